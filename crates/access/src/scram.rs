//! SCRAM-SHA-256 (RFC 5802 and 7677), the server's side without a socket: what the client sent in, what it is to be sent out.
//!
//! Names and passwords are taken as they are, without SASLprep: what a client normalizes must be normalized in the file too.
//! Channel binding is not offered.

use std::{fmt, num::NonZeroU32};

use aws_lc_rs::{constant_time, digest, hmac, pbkdf2};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use thiserror::Error;

use crate::passwords::{MAX_ITERATIONS, MAX_SALT};

/// Name of the method, in AUTH and CONNECT.
pub const METHOD: &str = "SCRAM-SHA-256";
pub(crate) const PREFIX: &str = "SCRAM-SHA-256$";
/// Iterations of keys that are made here: RFC 7677 asks for this at least, and every login costs the client as many.
pub const ITERATIONS: u32 = 4_096;
/// Longest message that is looked at.
const MAX_MESSAGE: usize = 4_096;
const KEY: usize = digest::SHA256_OUTPUT_LEN;

/// Why the client is not who it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ScramError {
    /// Not a message of SCRAM, or not one that is due.
    #[error("not a SCRAM message")]
    Malformed,
    /// Wrong password, unknown user, or a proof of another exchange.
    #[error("wrong user or password")]
    Wrong,
}

/// Keys that a server keeps of a password.
#[derive(Clone, PartialEq, Eq)]
pub struct ScramKeys {
    iterations: NonZeroU32,
    salt: Box<[u8]>,
    stored: [u8; KEY],
    server: [u8; KEY],
}

impl fmt::Debug for ScramKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

impl ScramKeys {
    /// The keys of a password; fewer iterations than one are one.
    pub fn new(password: &[u8], salt: &[u8], iterations: u32) -> Self {
        let iterations = NonZeroU32::new(iterations).unwrap_or(NonZeroU32::MIN);
        let salted = salted(password, salt, iterations);
        let stored = digest::digest(&digest::SHA256, &mac(&salted, b"Client Key"));
        Self {
            iterations,
            salt: salt.into(),
            stored: array(stored.as_ref()),
            server: mac(&salted, b"Server Key"),
        }
    }

    /// Reads `SCRAM-SHA-256$ITERATIONS:SALT$STORED:SERVER`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix(PREFIX)?.split(['$', ':']);
        let (iterations, salt) = (parts.next()?.parse::<NonZeroU32>().ok()?, parts.next()?);
        let (stored, server) = (parts.next()?, parts.next()?);
        let salt = STANDARD.decode(salt).ok()?;
        let key = |text: &str| <[u8; KEY]>::try_from(STANDARD.decode(text).ok()?).ok();
        let good = parts.next().is_none()
            && iterations.get() <= MAX_ITERATIONS
            && (1..=MAX_SALT).contains(&salt.len());
        let (stored, server) = (key(stored)?, key(server)?);
        good.then(|| Self { iterations, salt: salt.into(), stored, server })
    }

    /// Returns whether these are the keys of `password`; compares in constant time.
    pub(crate) fn verify(&self, password: &[u8]) -> bool {
        let salted = salted(password, &self.salt, self.iterations);
        let stored = digest::digest(&digest::SHA256, &mac(&salted, b"Client Key"));
        constant_time::verify_slices_are_equal(stored.as_ref(), &self.stored).is_ok()
    }

    pub(crate) fn shape(&self) -> ScramParameters {
        ScramParameters { iterations: self.iterations, salt: self.salt.len() }
    }

    pub(crate) fn erase(&mut self) {
        self.salt.fill(0);
        self.stored = [0; KEY];
        self.server = [0; KEY];
    }
}

impl fmt::Display for ScramKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [salt, stored, server] =
            [&*self.salt, &self.stored, &self.server].map(|key| STANDARD.encode(key));
        write!(f, "{PREFIX}{}:{salt}${stored}:{server}", self.iterations)
    }
}

/// Means to answer clients with unknown user names as if the users existed.
#[derive(Debug, Clone, Copy)]
pub struct MockScram<'a> {
    /// Makes the salts of unknown users: [`Passwords::secret`]. Anybody who knows it, or sees it change, can tell which
    /// users do not exist.
    ///
    /// [`Passwords::secret`]: crate::passwords::Passwords::secret
    pub secret: &'a [u8],
    /// Parameters of users' keys with the number of users that have them: [`Passwords::scram_shapes`]. Empty stands for the
    /// parameters of keys that are made here.
    ///
    /// [`Passwords::scram_shapes`]: crate::passwords::Passwords::scram_shapes
    pub shapes: &'a [(ScramParameters, usize)],
}

/// Parameters with which keys were made, which every client that asks can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScramParameters {
    pub(crate) iterations: NonZeroU32,
    pub(crate) salt: usize,
}

impl Default for ScramParameters {
    /// Returns the shape of keys that are made here.
    fn default() -> Self {
        let iterations = NonZeroU32::new(ITERATIONS).unwrap_or(NonZeroU32::MIN);
        Self { iterations, salt: crate::passwords::SALT_LEN }
    }
}

impl MockScram<'_> {
    /// Keys of a user that is not there: as if it were one of the others, the same each time.
    fn keys(&self, user: &str) -> ScramKeys {
        let shape = self.shape(user);
        let mut salt = Vec::with_capacity(MAX_SALT);
        while salt.len() < shape.salt {
            let more = [&[salt.len() as u8], user.as_bytes()].concat();
            salt.extend(mac(self.secret, &more));
        }
        salt.truncate(shape.salt);
        let nobody = [0; KEY];
        ScramKeys { iterations: shape.iterations, salt: salt.into(), stored: nobody, server: nobody }
    }

    /// A shape that is as frequent among users that are not there as among those that are. Where few users have a shape, it
    /// would show otherwise that they exist.
    fn shape(&self, user: &str) -> ScramParameters {
        let chance = mac(self.secret, &[b"shape", user.as_bytes()].concat());
        let chance = chance.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
        let users: u64 = self.shapes.iter().map(|(_, users)| *users as u64).sum();
        // Scaled rather than divided: a user more or less changes the shape of few.
        let mut at = ((u128::from(chance) * u128::from(users)) >> 64) as u64;
        for (shape, users) in self.shapes {
            match at.checked_sub(*users as u64) {
                Some(rest) => at = rest,
                None => return *shape,
            }
        }
        ScramParameters::default()
    }
}

/// An exchange whose first message was answered.
pub struct Exchange {
    user: Box<str>,
    keys: ScramKeys,
    /// True if the user exists.
    known: bool,
    /// Text that the client put before its first message, in base64: it comes again in its last.
    header: String,
    nonce: String,
    /// Both first messages, as both sides sign them.
    signed: String,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("user", &self.user).finish_non_exhaustive()
    }
}

/// The user whom a client's first message names; `None` if it is none.
pub fn user_of(first: &[u8]) -> Option<String> {
    let (_, rest) = message(first).ok()?.split_once(',')?;
    let (_, bare) = rest.split_once(',')?;
    field(&mut bare.split(','), "n=").and_then(unescape).filter(|user| !user.is_empty())
}

impl Exchange {
    /// Answers the client's first message. `fresh` is text that nobody can guess, without a comma. For a user that `find`
    /// does not know the exchange goes on with a salt that is made up, the same each time, and ends as with a wrong password.
    ///
    /// # Errors
    /// [`ScramError::Malformed`].
    pub fn start(
        first: &[u8],
        fresh: &str,
        mock: &MockScram<'_>,
        find: impl FnOnce(&str) -> Option<ScramKeys>,
    ) -> Result<(Self, Vec<u8>), ScramError> {
        let text = message(first)?;
        // gs2-header: no channel binding (n), or the client could and believes that we cannot (y).
        let rest =
            text.strip_prefix("n,").or_else(|| text.strip_prefix("y,")).ok_or(ScramError::Malformed)?;
        let (identity, bare) = rest.split_once(',').ok_or(ScramError::Malformed)?;
        let header = &text[..text.len() - bare.len()];
        let mut fields = bare.split(',');
        let user = field(&mut fields, "n=").and_then(unescape).ok_or(ScramError::Malformed)?;
        let nonce =
            field(&mut fields, "r=").filter(|nonce| !nonce.is_empty()).ok_or(ScramError::Malformed)?;
        // To act for another is not offered.
        let other = match identity {
            "" => None,
            identity => Some(identity.strip_prefix("a=").and_then(unescape).ok_or(ScramError::Malformed)?),
        };
        if user.is_empty() || other.is_some_and(|other| other != user) {
            return Err(ScramError::Malformed);
        }
        // Made up for everybody, so that it takes as long for those who are there.
        let made_up = mock.keys(&user);
        let (keys, known) = find(&user).map_or((made_up, false), |keys| (keys, true));
        let nonce = format!("{nonce}{fresh}");
        let answer = format!("r={nonce},s={},i={}", STANDARD.encode(&keys.salt), keys.iterations);
        let signed = format!("{bare},{answer}");
        let header = STANDARD.encode(header);
        Ok((Self { user: user.into(), keys, known, header, nonce, signed }, answer.into_bytes()))
    }

    /// Returns the user that the client claims to be.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Checks the client's last message: the user, and what proves to the client that we know the password.
    ///
    /// # Errors
    /// [`ScramError`].
    pub fn finish(self, last: &[u8]) -> Result<(Box<str>, Vec<u8>), ScramError> {
        let text = message(last)?;
        let (unproved, proof) = text.rsplit_once(",p=").ok_or(ScramError::Malformed)?;
        let mut fields = unproved.split(',');
        let header = field(&mut fields, "c=").ok_or(ScramError::Malformed)?;
        let nonce = field(&mut fields, "r=").ok_or(ScramError::Malformed)?;
        let proof = STANDARD.decode(proof).ok().filter(|proof| proof.len() == KEY);
        let proof = proof.ok_or(ScramError::Malformed)?;
        if header != self.header || nonce != self.nonce {
            return Err(ScramError::Wrong);
        }
        let signed = format!("{},{unproved}", self.signed);
        let signature = mac(&self.keys.stored, signed.as_bytes());
        let client_key: Vec<u8> = proof.iter().zip(signature).map(|(proof, byte)| proof ^ byte).collect();
        let stored = digest::digest(&digest::SHA256, &client_key);
        let right = constant_time::verify_slices_are_equal(stored.as_ref(), &self.keys.stored).is_ok();
        if !(right && self.known) {
            return Err(ScramError::Wrong);
        }
        let proof = mac(&self.keys.server, signed.as_bytes());
        Ok((self.user, format!("v={}", STANDARD.encode(proof)).into_bytes()))
    }
}

/// Messages of the client, for tests and for tools that log in.
pub mod client {
    use super::{NonZeroU32, STANDARD, ScramError, ScramKeys, array, digest, field, mac, message, salted};
    use base64::Engine as _;

    /// The first message.
    pub fn first(user: &str, nonce: &str) -> String {
        let user = user.replace('=', "=3D").replace(',', "=2C");
        format!("n,,n={user},r={nonce}")
    }

    /// The last message, and what the server must answer.
    ///
    /// # Errors
    /// What the server sent is not a first message of SCRAM.
    pub fn last(first: &str, answer: &[u8], password: &[u8]) -> Result<(String, String), ScramError> {
        let text = message(answer)?;
        let mut fields = text.split(',');
        let nonce = field(&mut fields, "r=").ok_or(ScramError::Malformed)?;
        let salt = field(&mut fields, "s=").and_then(|salt| STANDARD.decode(salt).ok());
        let iterations = field(&mut fields, "i=").and_then(|text| text.parse::<NonZeroU32>().ok());
        let (Some(salt), Some(iterations)) = (salt, iterations) else { return Err(ScramError::Malformed) };
        let bare = first.strip_prefix("n,,").ok_or(ScramError::Malformed)?;
        let unproved = format!("c=biws,r={nonce}");
        let signed = format!("{bare},{text},{unproved}");
        let salted = salted(password, &salt, iterations);
        let key = mac(&salted, b"Client Key");
        let stored: [u8; 32] = array(digest::digest(&digest::SHA256, &key).as_ref());
        let signature = mac(&stored, signed.as_bytes());
        let proof: Vec<u8> = key.iter().zip(signature).map(|(key, byte)| key ^ byte).collect();
        let server = mac(&ScramKeys::new(password, &salt, iterations.get()).server, signed.as_bytes());
        let expected = format!("v={}", STANDARD.encode(server));
        Ok((format!("{unproved},p={}", STANDARD.encode(proof)), expected))
    }
}

fn message(bytes: &[u8]) -> Result<&str, ScramError> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= MAX_MESSAGE);
    text.ok_or(ScramError::Malformed)
}

/// The next field, which must be this one.
fn field<'a>(fields: &mut impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    fields.next()?.strip_prefix(name)
}

/// A name in which `=2C` stands for a comma and `=3D` for an equals sign; nothing else may.
fn unescape(text: &str) -> Option<String> {
    let mut parts = text.split('=');
    let mut name = parts.next()?.to_owned();
    for part in parts {
        let (c, rest) = match part.get(..2)? {
            "2C" => (',', &part[2..]),
            "3D" => ('=', &part[2..]),
            _ => return None,
        };
        name.push(c);
        name.push_str(rest);
    }
    Some(name)
}

fn salted(password: &[u8], salt: &[u8], iterations: NonZeroU32) -> [u8; KEY] {
    let mut out = [0; KEY];
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, iterations, salt, password, &mut out);
    out
}

fn mac(key: &[u8], data: &[u8]) -> [u8; KEY] {
    array(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), data).as_ref())
}

/// Copies a hash of this length.
fn array(bytes: &[u8]) -> [u8; KEY] {
    let mut out = [0; KEY];
    out.copy_from_slice(bytes);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(secret: &[u8]) -> MockScram<'_> {
        MockScram { secret, shapes: &[] }
    }

    /// The exchange in RFC 7677, section 3.
    #[test]
    fn the_exchange_of_the_rfc() {
        let salt = STANDARD.decode("W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
        let keys = ScramKeys::new(b"pencil", &salt, 4096);
        let fresh = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
        let first = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO";
        let find = |user: &str| (user == "user").then(|| keys.clone());
        let (exchange, answer) = Exchange::start(first, fresh, &hidden(b""), find).unwrap();
        assert_eq!(
            String::from_utf8(answer).unwrap(),
            "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
        );
        let last = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                     p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
        let (user, answer) = exchange.finish(last).unwrap();
        assert_eq!(&*user, "user");
        assert_eq!(String::from_utf8(answer).unwrap(), "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
    }

    fn login(user: &str, password: &[u8], change: impl Fn(String) -> String) -> Result<Box<str>, ScramError> {
        let keys = ScramKeys::new(b"right", b"salt", 2);
        let first = client::first(user, "abc");
        let find = |user: &str| (user == "a=,b").then(|| keys.clone());
        let (exchange, answer) = Exchange::start(first.as_bytes(), "def", &hidden(b"secret"), find)?;
        let (last, expected) = client::last(&first, &answer, password)?;
        let (user, answer) = exchange.finish(change(last).as_bytes())?;
        assert_eq!(String::from_utf8(answer).unwrap(), expected);
        Ok(user)
    }

    #[test]
    fn only_the_right_password_of_a_user_that_is_there_comes_through() {
        assert_eq!(login("a=,b", b"right", |last| last).as_deref(), Ok("a=,b"));
        assert_eq!(login("a=,b", b"wrong", |last| last), Err(ScramError::Wrong));
        assert_eq!(login("nobody", b"right", |last| last), Err(ScramError::Wrong));
        let stale = |last: String| last.replace("abcdef", "abcxyz");
        assert_eq!(login("a=,b", b"right", stale), Err(ScramError::Wrong));
        let bound = |last: String| last.replace("biws", "eSws");
        assert_eq!(login("a=,b", b"right", bound), Err(ScramError::Wrong));
    }

    /// The salt would tell otherwise.
    #[test]
    fn a_user_that_is_not_there_gets_the_same_salt_each_time() {
        let answer = |user: &str, secret: &[u8]| {
            let first = client::first(user, "n");
            Exchange::start(first.as_bytes(), "x", &hidden(secret), |_| None).unwrap().1
        };
        assert_eq!(answer("bob", b"s"), answer("bob", b"s"));
        assert_ne!(answer("bob", b"s"), answer("eve", b"s"));
        assert_ne!(answer("bob", b"s"), answer("bob", b"t"));
    }

    #[test]
    fn a_user_that_is_not_there_looks_like_those_who_are() {
        for length in [1, 12, 32, 40, MAX_SALT] {
            let keys = ScramKeys::new(b"p", &vec![7; length], 3);
            let shapes = [(keys.shape(), 1)];
            let mock = MockScram { secret: b"s", shapes: &shapes };
            let made_up = mock.keys("bob");
            assert_eq!(made_up.shape(), keys.shape());
            assert!(!made_up.verify(b""));
        }
    }

    /// If all that are not there looked like most that are, the others would be known to exist.
    #[test]
    fn each_way_to_make_keys_is_as_frequent_among_users_that_are_not_there() {
        let shape = |iterations| ScramKeys::new(b"p", b"salt", iterations).shape();
        let shapes = [(shape(2), 30), (shape(3), 10)];
        let mock = MockScram { secret: b"s", shapes: &shapes };
        let looks = |n: u32| mock.keys(&format!("nobody-{n}")).shape();
        let rare = (0..1000).filter(|n| looks(*n) == shape(3)).count();
        assert!((150..350).contains(&rare), "{rare} of 1000");
        assert!((0..1000).all(|n| looks(n) == looks(n)));
        let more = [(shape(2), 31), (shape(3), 10)];
        let later = MockScram { secret: b"s", shapes: &more };
        let changed = (0..1000).filter(|n| later.keys(&format!("nobody-{n}")).shape() != looks(*n)).count();
        assert!(changed < 50, "{changed} of 1000 look different after one more user");
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let start = |first: &[u8]| Exchange::start(first, "x", &hidden(b""), |_| None).map(|_| ());
        for first in [
            &b""[..],
            b"n,,",
            b"n,,n=,r=x",
            b"n,,n=a",
            b"n,,n=a,r=",
            b"n,,m=x,n=a,r=x",
            b"p=tls-unique,,n=a,r=x",
            b"n,a=b,n=a,r=x",
            b"n,,n=a=2c,r=x",
            b"n,,n=a=,r=x",
            b"n,,n=\xff,r=x",
            &[b'n'; 5000],
        ] {
            assert_eq!(start(first), Err(ScramError::Malformed), "{first:?}");
        }
        assert!(start(b"n,a=a,n=a,r=x").is_ok());
    }
}
