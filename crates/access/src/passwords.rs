//! Files of user names and password hashes: one `user:hash` a line, as Mosquitto's are.
//!
//! A hash is one of
//!
//! ```text
//! $argon2id$v=19$m=19456,t=2,p=1$SALT$HASH         what `mqtt-server passwd add` writes; Mosquitto 2.1 too
//! $7$ITERATIONS$SALT$HASH                          Mosquitto's PBKDF2 with HMAC-SHA-512
//! SCRAM-SHA-256$ITERATIONS:SALT$STORED:SERVER      for MQTT 5's enhanced authentication, and for plain passwords
//! ```
//!
//! Verifying costs what the line says, on purpose: it belongs on threads that nobody waits for.

use std::{collections::HashMap, fmt, num::NonZeroU32};

use argon2::{Algorithm, Argon2, Block, Params, Version, password_hash::phc::PasswordHash};
use aws_lc_rs::{constant_time, digest, pbkdf2};
use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, STANDARD_NO_PAD},
};
use thiserror::Error;

use crate::scram;

/// Memory of an argon2id hash that is made here, KiB.
pub(crate) const MEMORY_KIB: u32 = 19_456;
/// Passes of an argon2id hash that is made here.
pub(crate) const PASSES: u32 = 2;
/// Bytes of a fresh salt.
pub const SALT_LEN: usize = 16;

/// The most memory that a line may ask for, KiB.
const MAX_MEMORY_KIB: u32 = 1 << 18;
/// The most passes that a line may ask for.
const MAX_PASSES: u32 = 64;
/// The most iterations that a line may ask for.
pub(crate) const MAX_ITERATIONS: u32 = 10_000_000;
/// Lengths of hashes that are taken: a shorter one would be guessed.
const HASH_LENGTHS: std::ops::RangeInclusive<usize> = 16..=64;
/// Longest salt that is taken.
pub(crate) const MAX_SALT: usize = 128;
/// Longest user name: what a text of MQTT can be.
const MAX_USER: usize = 65_535;

/// Mistake in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadLine {
    /// There is no colon.
    #[error("no colon between user name and hash; write USER:HASH, or use mqtt-server passwd add")]
    NoColon,
    /// The user name is empty, too long, or has a control character.
    #[error("no user name; write USER:HASH")]
    User,
    /// The user is on an earlier line.
    #[error("the user is there already; remove one of the lines")]
    Twice,
    /// The hash begins like none that is known.
    #[error(
        "not a hash that is known; argon2id, Mosquitto's $7$ and SCRAM-SHA-256 are, plain text is not: use mqtt-server passwd add"
    )]
    Unknown,
    /// The hash is of a known kind, and is damaged or out of bounds.
    #[error("the hash is damaged, or asks for more work than is allowed; use mqtt-server passwd add")]
    Damaged,
}

/// A line that cannot be used, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct PasswordLineError {
    /// Number of the line.
    pub line: usize,
    /// Mistake in it.
    pub problem: BadLine,
}

/// Memory that hashing uses again and again. One for each thread.
#[derive(Default)]
pub struct Scratch {
    blocks: Vec<Block>,
    work: Work,
}

/// Work of hashing, by algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Blocks of argon2id: KiB of memory times passes.
    pub argon2id: u64,
    /// Iterations of PBKDF2 with HMAC-SHA-512.
    pub pbkdf2_sha512: u64,
    /// Iterations of PBKDF2 with HMAC-SHA-256, which SCRAM uses.
    pub pbkdf2_sha256: u64,
}

impl Scratch {
    /// The work that was done with this memory so far.
    pub fn work(&self) -> Work {
        self.work
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({} KiB)", self.blocks.len())
    }
}

/// A hash as a line has it.
#[derive(Clone, PartialEq, Eq)]
pub enum PasswordDigest {
    /// Argon2id, version 19.
    Argon2id {
        /// Memory, KiB.
        memory: u32,
        /// Passes.
        passes: u32,
        /// Lanes.
        lanes: u32,
        /// Salt.
        salt: Box<[u8]>,
        /// Hash of the right password.
        hash: Box<[u8]>,
    },
    /// PBKDF2 with HMAC-SHA-512, as Mosquitto writes it.
    Pbkdf2 {
        /// Iterations.
        iterations: NonZeroU32,
        /// Salt.
        salt: Box<[u8]>,
        /// Hash of the right password.
        hash: Box<[u8]>,
    },
    /// Keys of SCRAM-SHA-256.
    Scram(scram::ScramKeys),
}

impl fmt::Debug for PasswordDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Argon2id { .. } => "argon2id",
            Self::Pbkdf2 { .. } => "pbkdf2-sha512",
            Self::Scram(_) => "scram-sha-256",
        })
    }
}

impl PasswordDigest {
    /// Reads what stands after the colon.
    ///
    /// # Errors
    /// [`BadLine::Unknown`] and [`BadLine::Damaged`].
    pub fn parse(text: &str) -> Result<Self, BadLine> {
        if text.starts_with("$argon2id$") {
            Self::parse_argon2id(text)
        } else if let Some(rest) = text.strip_prefix("$7$") {
            Self::parse_pbkdf2(rest).ok_or(BadLine::Damaged)
        } else if text.starts_with(scram::PREFIX) {
            scram::ScramKeys::parse(text).map(Self::Scram).ok_or(BadLine::Damaged)
        } else {
            Err(BadLine::Unknown)
        }
    }

    fn parse_argon2id(text: &str) -> Result<Self, BadLine> {
        let parsed = PasswordHash::new(text).map_err(|_| BadLine::Damaged)?;
        let params = Params::try_from(&parsed).map_err(|_| BadLine::Damaged)?;
        let (Some(salt), Some(hash)) = (parsed.salt, parsed.hash) else { return Err(BadLine::Damaged) };
        let (memory, passes, lanes) = (params.m_cost(), params.t_cost(), params.p_cost());
        let keyed = !params.keyid().is_empty() || !params.data().is_empty();
        // Without a version it is an older one.
        let version = parsed.version == Some(Version::V0x13.into());
        let bounded = memory <= MAX_MEMORY_KIB && passes <= MAX_PASSES && lanes <= 16;
        if !version || keyed || !bounded || !HASH_LENGTHS.contains(&hash.as_bytes().len()) {
            return Err(BadLine::Damaged);
        }
        let (salt, hash): (&[u8], &[u8]) = (salt.as_ref(), hash.as_bytes());
        Ok(Self::Argon2id { memory, passes, lanes, salt: salt.into(), hash: hash.into() })
    }

    fn parse_pbkdf2(text: &str) -> Option<Self> {
        let mut parts = text.split('$');
        let (iterations, salt, hash) = (parts.next()?, parts.next()?, parts.next()?);
        let iterations: NonZeroU32 = iterations.parse().ok()?;
        let (salt, hash) = (STANDARD.decode(salt).ok()?, STANDARD.decode(hash).ok()?);
        let good = parts.next().is_none()
            && iterations.get() <= MAX_ITERATIONS
            && (1..=MAX_SALT).contains(&salt.len())
            && HASH_LENGTHS.contains(&hash.len());
        good.then(|| Self::Pbkdf2 { iterations, salt: salt.into(), hash: hash.into() })
    }

    /// A new argon2id hash of `password`.
    ///
    /// # Panics
    /// Never: the parameters are ours.
    pub fn argon2id(password: &[u8], salt: &[u8; SALT_LEN], scratch: &mut Scratch) -> Self {
        let mut hash = vec![0; 32];
        let done = fill_argon2id((MEMORY_KIB, PASSES, 1), password, salt, &mut hash, scratch);
        debug_assert!(done, "our own parameters");
        Self::Argon2id {
            memory: MEMORY_KIB,
            passes: PASSES,
            lanes: 1,
            salt: (*salt).into(),
            hash: hash.into(),
        }
    }

    /// Returns whether `password` is the right one. Hashes are compared in constant time.
    pub fn verify(&self, password: &[u8], scratch: &mut Scratch) -> bool {
        match self {
            Self::Argon2id { memory, passes, lanes, salt, hash } => {
                scratch.work.argon2id += u64::from(*memory) * u64::from(*passes);
                let mut made = vec![0; hash.len()];
                fill_argon2id((*memory, *passes, *lanes), password, salt, &mut made, scratch)
                    && constant_time::verify_slices_are_equal(&made, hash).is_ok()
            }
            Self::Pbkdf2 { iterations, salt, hash } => {
                scratch.work.pbkdf2_sha512 += u64::from(iterations.get());
                pbkdf2::verify(pbkdf2::PBKDF2_HMAC_SHA512, *iterations, salt, password, hash).is_ok()
            }
            Self::Scram(keys) => {
                scratch.work.pbkdf2_sha256 += u64::from(keys.shape().iterations.get());
                keys.verify(password)
            }
        }
    }

    /// Returns the cost of verifying, for comparison: the kind and its parameters.
    fn cost(&self) -> (u8, u32, u32, u32, usize) {
        match self {
            Self::Argon2id { memory, passes, lanes, hash, .. } => (2, *memory, *passes, *lanes, hash.len()),
            Self::Pbkdf2 { iterations, hash, .. } => (1, iterations.get(), 0, 0, hash.len()),
            Self::Scram(keys) => (0, keys.shape().iterations.get(), 0, 0, 0),
        }
    }

    /// A hash that costs as much to check and that no password fits.
    fn decoy(&self) -> Self {
        let mut decoy = self.clone();
        match &mut decoy {
            Self::Argon2id { salt, hash, .. } | Self::Pbkdf2 { salt, hash, .. } => {
                salt.fill(0);
                hash.fill(0);
            }
            Self::Scram(keys) => keys.erase(),
        }
        decoy
    }
}

impl fmt::Display for PasswordDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argon2id { memory, passes, lanes, salt, hash } => {
                let (salt, hash) = (STANDARD_NO_PAD.encode(salt), STANDARD_NO_PAD.encode(hash));
                write!(f, "$argon2id$v=19$m={memory},t={passes},p={lanes}${salt}${hash}")
            }
            Self::Pbkdf2 { iterations, salt, hash } => {
                write!(f, "$7${iterations}${}${}", STANDARD.encode(salt), STANDARD.encode(hash))
            }
            Self::Scram(keys) => write!(f, "{keys}"),
        }
    }
}

/// False if the parameters fit nothing.
fn fill_argon2id(
    (memory, passes, lanes): (u32, u32, u32),
    password: &[u8],
    salt: &[u8],
    out: &mut [u8],
    scratch: &mut Scratch,
) -> bool {
    let Ok(params) = Params::new(memory, passes, lanes, Some(out.len())) else { return false };
    let blocks = params.block_count();
    if scratch.blocks.len() < blocks {
        scratch.blocks.resize(blocks, Block::default());
    }
    let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    argon2.hash_password_into_with_memory(password, salt, out, &mut scratch.blocks[..blocks]).is_ok()
}

/// The kinds of hashes in a file that a wrong password is made to cost. A file has two or three as a rule.
const MOST_KINDS: usize = 8;

/// The users of a file.
#[derive(Debug, Clone)]
pub struct Passwords {
    users: HashMap<Box<str>, PasswordDigest>,
    /// A hash of each kind in the file, or of one kind if it is empty, that no password fits.
    decoys: Box<[PasswordDigest]>,
    kinds: usize,
    scram_shapes: Box<[(scram::ScramParameters, usize)]>,
    secret: [u8; 32],
}

impl Default for Passwords {
    fn default() -> Self {
        Self::new(HashMap::new())
    }
}

impl Passwords {
    /// Reads a whole file. Empty lines and those that begin with `#` are passed over.
    ///
    /// # Errors
    /// Every line that cannot be used.
    pub fn parse(text: &str) -> Result<Self, Vec<PasswordLineError>> {
        let (mut users, mut errors) = (HashMap::new(), Vec::new());
        for (number, line) in text.lines().enumerate() {
            let read = match read_line(line) {
                None => continue,
                Some(Ok((user, _))) if users.contains_key(user) => Err(BadLine::Twice),
                Some(read) => read,
            };
            match read {
                Ok((user, hash)) => drop(users.insert(user.into(), hash)),
                Err(problem) => errors.push(PasswordLineError { line: number + 1, problem }),
            }
        }
        if errors.is_empty() { Ok(Self::new(users)) } else { Err(errors) }
    }

    fn new(users: HashMap<Box<str>, PasswordDigest>) -> Self {
        let mut costs: HashMap<_, (usize, &PasswordDigest)> = HashMap::new();
        let mut shapes: HashMap<scram::ScramParameters, usize> = HashMap::new();
        for hash in users.values() {
            costs.entry(hash.cost()).or_insert((0, hash)).0 += 1;
            if let PasswordDigest::Scram(keys) = hash {
                *shapes.entry(keys.shape()).or_insert(0) += 1;
            }
        }
        let kinds = costs.len();
        let mut costs: Vec<_> = costs.into_iter().collect();
        costs.sort_unstable_by_key(|(cost, (users, _))| std::cmp::Reverse((*users, *cost)));
        let mut decoys: Vec<PasswordDigest> =
            costs.iter().take(MOST_KINDS).map(|(_, (_, hash))| hash.decoy()).collect();
        if decoys.is_empty() {
            decoys.push(PasswordDigest::Argon2id {
                memory: MEMORY_KIB,
                passes: PASSES,
                lanes: 1,
                salt: [0; SALT_LEN].into(),
                hash: [0; 32].into(),
            });
        }
        let mut scram_shapes: Vec<_> = shapes.into_iter().collect();
        scram_shapes.sort_unstable();
        let secret = secret_of(&users);
        Self { users, decoys: decoys.into(), kinds, scram_shapes: scram_shapes.into(), secret }
    }

    /// The hash of a user.
    pub fn get(&self, user: &str) -> Option<&PasswordDigest> {
        self.users.get(user)
    }

    /// Checks the user's password; `None` for a user who is not in the file. A wrong password and an unknown user cost the
    /// same, one hash of each kind that the file has, so that the time of an answer tells neither whether a user exists
    /// nor which kind of hash it has.
    pub fn check(&self, user: &str, password: &[u8], scratch: &mut Scratch) -> Option<bool> {
        let known = self.get(user);
        if known.is_some_and(|hash| hash.verify(password, scratch)) {
            return Some(true);
        }
        let own = known.map(PasswordDigest::cost);
        for decoy in self.decoys.iter().filter(|decoy| Some(decoy.cost()) != own) {
            std::hint::black_box(decoy.verify(password, scratch));
        }
        known.map(|_| false)
    }

    /// The hash of a user, or one that no password fits.
    pub fn get_or_decoy(&self, user: &str) -> &PasswordDigest {
        self.get(user).unwrap_or(&self.decoys[0])
    }

    /// Number of kinds of hashes in the file beyond those that a wrong password is made to cost. With any, users with such a hash
    /// can be told from others by time.
    pub fn kinds_beyond(&self) -> usize {
        self.kinds.saturating_sub(MOST_KINDS)
    }

    /// Parameters of the keys for SCRAM with the number of users that have them, in order. Empty if no user has such keys.
    pub fn scram_shapes(&self) -> &[(scram::ScramParameters, usize)] {
        &self.scram_shapes
    }

    /// A secret that gateways with the same file have in common, also after a restart, and that nobody knows who does not know
    /// the hashes of several users. It seldom changes with the file.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// Returns the number of users.
    pub fn len(&self) -> usize {
        self.users.len()
    }

    /// Returns whether there is no user.
    pub fn is_empty(&self) -> bool {
        self.users.is_empty()
    }
}

/// Made of the lines of a few users that a digest of their names chooses: a change of another user changes nothing.
fn secret_of(users: &HashMap<Box<str>, PasswordDigest>) -> [u8; 32] {
    const CHOSEN: usize = 8;
    let mut chosen: Vec<([u8; 32], &str)> =
        users.keys().map(|name| (sha256(name.as_bytes()), &**name)).collect();
    if chosen.len() > CHOSEN {
        chosen.select_nth_unstable(CHOSEN);
        chosen.truncate(CHOSEN);
    }
    chosen.sort_unstable();
    let line = |(_, name): &([u8; 32], &str)| users.get(*name).map(|hash| format!("{name}:{hash}\n"));
    sha256(chosen.iter().filter_map(line).collect::<String>().as_bytes())
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    out
}

/// User and hash of a line; `None` if it has none to begin with.
fn read_line(line: &str) -> Option<Result<(&str, PasswordDigest), BadLine>> {
    let line = line.trim_end();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let Some((user, hash)) = line.split_once(':') else { return Some(Err(BadLine::NoColon)) };
    if !is_user(user) {
        return Some(Err(BadLine::User));
    }
    Some(PasswordDigest::parse(hash).map(|hash| (user, hash)))
}

/// Returns whether a line can have this user name.
pub fn is_user(user: &str) -> bool {
    (1..=MAX_USER).contains(&user.len())
        && !user.starts_with('#')
        && !user.chars().any(|c| c == ':' || c.is_control())
}

/// The file's text with this hash for the user, in the line that the user has or a new one; the others stay as they are.
pub fn with_user(text: &str, user: &str, hash: &PasswordDigest) -> String {
    let new = format!("{user}:{hash}\n");
    let mut found = false;
    let mut out = String::with_capacity(text.len() + new.len());
    for line in text.lines() {
        if line.split_once(':').is_some_and(|(known, _)| known == user) {
            if !std::mem::replace(&mut found, true) {
                out.push_str(&new);
            }
            continue;
        }
        out.push_str(line);
        out.push('\n');
    }
    if !found {
        out.push_str(&new);
    }
    out
}

/// The file's text without the user; `None` if it is not there.
pub fn without_user(text: &str, user: &str) -> Option<String> {
    let is_it = |line: &&str| line.split_once(':').is_some_and(|(known, _)| known == user);
    text.lines().any(|line| is_it(&line)).then(|| {
        let mut out = String::with_capacity(text.len());
        for line in text.lines().filter(|line| !is_it(line)) {
            out.push_str(line);
            out.push('\n');
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `mosquitto_passwd -H sha512-pbkdf2`: "secret".
    fn mosquitto(password: &[u8]) -> String {
        let iterations = NonZeroU32::new(101).unwrap();
        let mut hash = [0; 64];
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA512, iterations, b"twelve bytes", password, &mut hash);
        format!("$7$101${}${}", STANDARD.encode(b"twelve bytes"), STANDARD.encode(hash))
    }

    #[test]
    fn lines_of_every_kind_take_the_right_password_only() {
        let mut scratch = Scratch::default();
        let ours = PasswordDigest::argon2id(b"secret", b"0123456789abcdef", &mut scratch).to_string();
        let scram =
            PasswordDigest::Scram(scram::ScramKeys::new(b"secret", b"0123456789abcdef", 4096)).to_string();
        let text = format!("# users\nalice:{ours}\n\nbob:{}\r\ncarol:{scram}\n", mosquitto(b"secret"));
        let passwords = Passwords::parse(&text).unwrap();
        assert_eq!(passwords.len(), 3);
        for user in ["alice", "bob", "carol"] {
            let hash = passwords.get(user).unwrap();
            assert!(hash.verify(b"secret", &mut scratch), "{user}");
            assert!(!hash.verify(b"Secret", &mut scratch), "{user}");
            assert!(!hash.verify(b"", &mut scratch), "{user}");
            assert_eq!(&PasswordDigest::parse(&hash.to_string()).unwrap(), hash, "{user}");
        }
        assert!(passwords.get("dave").is_none());
    }

    #[test]
    fn every_bad_line_is_named_and_none_is_used() {
        let text = "plain:secret\nno colon\n:$7$1$AA==$AA==\n#$\nx:$7$101$AA==$AA==\n\
                    y:$argon2id$v=19$m=4294967295,t=1,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA\n";
        let errors = Passwords::parse(text).unwrap_err();
        let said: Vec<_> = errors.iter().map(|error| (error.line, error.problem)).collect();
        assert_eq!(
            said,
            [
                (1, BadLine::Unknown),
                (2, BadLine::NoColon),
                (3, BadLine::User),
                (5, BadLine::Damaged),
                (6, BadLine::Damaged)
            ]
        );
        assert!(!errors[0].to_string().contains("secret"), "{}", errors[0]);
        let twice = format!("a:{0}\na:{0}", mosquitto(b"x"));
        assert_eq!(Passwords::parse(&twice).unwrap_err()[0].problem, BadLine::Twice);
    }

    /// Otherwise the time of an answer tells which names are there, and which of them have keys for SCRAM.
    #[test]
    fn a_wrong_password_costs_the_same_for_every_user_there_or_not() {
        let mut scratch = Scratch::default();
        let scram = |name: &str| {
            format!(
                "{name}:{}\n",
                PasswordDigest::Scram(scram::ScramKeys::new(b"x", b"0123456789abcdef", 4096))
            )
        };
        let text = format!("a:{0}\nb:{0}\nc:{1}\n", mosquitto(b"x"), {
            PasswordDigest::argon2id(b"x", b"0123456789abcdef", &mut scratch)
        }) + &scram("d");
        let passwords = Passwords::parse(&text).unwrap();
        let work = |user: &str, password: &[u8], expected: Option<bool>| {
            let mut scratch = Scratch::default();
            assert_eq!(passwords.check(user, password, &mut scratch), expected, "{user}");
            scratch.work()
        };
        let unknown = work("nobody", b"x", None);
        let each = Work { argon2id: 2 * 19_456, pbkdf2_sha512: 101, pbkdf2_sha256: 4_096 };
        assert_eq!(unknown, each, "a hash of each kind in the file");
        for user in ["a", "b", "c", "d"] {
            assert_eq!(work(user, b"wrong", Some(false)), unknown, "{user}");
        }
        let right = work("d", b"x", Some(true));
        assert_eq!(
            right,
            Work { pbkdf2_sha256: 4_096, ..Work::default() },
            "who is let in waits for no other"
        );
        let mut scratch = Scratch::default();
        assert_eq!(Passwords::default().check("a", b"x", &mut scratch), None);
        assert!(scratch.work().argon2id > 0, "an empty file gives nothing away either");
    }

    /// Salts of users that are not there come from the secret: if theirs alone changed, everybody could see that.
    #[test]
    fn the_secret_of_a_file_outlives_restarts_and_most_changes() {
        let user = |n: usize| format!("user-{n}:{}\n", mosquitto(&n.to_be_bytes()));
        let users = |count: usize| -> String { (0..count).map(user).collect() };
        let secret = |text: &str| *Passwords::parse(text).unwrap().secret();
        let before = secret(&users(400));
        assert_eq!(secret(&users(400)), before);
        let kept = (400..450).filter(|n| secret(&(users(400) + &user(*n))) == before).count();
        assert!(kept >= 40, "{kept} of 50 after one more user");
        let last = format!("user-0:{}\n", mosquitto(b"another"));
        assert_ne!(secret(&last), secret(&users(1)), "nobody knows it without the hashes");
    }

    #[test]
    fn many_kinds_of_hashes_do_not_multiply_the_work_of_a_guess() {
        let line = |n: u32| {
            let keys = scram::ScramKeys::new(b"x", b"0123456789abcdef", n);
            format!("user-{n}:{}\n", PasswordDigest::Scram(keys))
        };
        let text: String = (1..=100).map(line).collect();
        let passwords = Passwords::parse(&text).unwrap();
        assert_eq!(passwords.kinds_beyond(), 92);
        let mut scratch = Scratch::default();
        assert_eq!(passwords.check("nobody", b"x", &mut scratch), None);
        assert!(scratch.work().pbkdf2_sha256 <= 8 * 100);
    }

    #[test]
    fn a_user_is_changed_or_removed_and_the_rest_stays() {
        let hash = PasswordDigest::parse(&mosquitto(b"x")).unwrap();
        let text = "# kept\na:old\nb:other\n";
        assert_eq!(with_user(text, "a", &hash), format!("# kept\na:{hash}\nb:other\n"));
        assert_eq!(with_user(text, "c", &hash), format!("{text}c:{hash}\n"));
        assert_eq!(without_user(text, "b").as_deref(), Some("# kept\na:old\n"));
        assert_eq!(without_user(text, "d"), None);
    }

    #[test]
    fn what_a_line_holds_is_not_shown() {
        let passwords = Passwords::parse(&format!("a:{}", mosquitto(b"x"))).unwrap();
        let shown = format!("{passwords:?}");
        assert!(shown.contains("pbkdf2-sha512") && !shown.contains("101"), "{shown}");
    }
}
