//! The password file, as Mosquitto reads it and as the gateway takes it.
//!
//! Mosquitto keeps out a user whose line it cannot use, and lets in the others; the gateway does not start with such a file. So
//! where a line cannot be used, the users that can go into a file of their own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

use access::passwords::{PasswordDigest, Passwords, is_user};

use super::{imported::Remark, lines::shown};

/// A user with the line of its hash, or why it has none.
type UserLine = (usize, String, Result<String, &'static str>);

/// Reads the file, and tells which users are kept out. Returns the text of a file without them, or `None` if the
/// gateway takes the file as it is, or if it cannot be read.
pub(super) fn usable(path: &Path, told: &mut Vec<Remark>) -> Option<String> {
    let mut tell = |text: String| told.push(Remark { place: String::new(), text, lost: true });
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            tell(format!("password_file {}: {error}; it could not be looked at", path.display()));
            return None;
        }
    };
    let lines: Vec<UserLine> = bytes
        .split(|byte| *byte == b'\n')
        .enumerate()
        .filter_map(|(number, line)| Some((number + 1, read_line(line)?)))
        .map(|(number, (user, hash))| (number, user, hash))
        .collect();
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, user, _) in &lines {
        *times.entry(user.as_str()).or_default() += 1;
    }
    let mut kept = String::from("# Made by 'mqtt-server import', without the users that are kept out.\n");
    let mut out: BTreeSet<&str> = BTreeSet::new();
    for (number, user, hash) in &lines {
        let problem = match hash {
            Ok(hash) if times[user.as_str()] == 1 => {
                let _ = writeln!(kept, "{user}:{hash}");
                continue;
            }
            Ok(_) => "the user is there more than once",
            Err(problem) => problem,
        };
        if out.insert(user) {
            tell(format!(
                "{}: line {number}: user {} is kept out: {problem}; use mqtt-server passwd add",
                path.display(),
                shown(user)
            ));
        }
    }
    let same = String::from_utf8(bytes.clone()).ok().and_then(|text| Passwords::parse(&text).ok());
    match same {
        Some(users) if out.is_empty() && lines.iter().all(|(_, user, _)| users.get(user).is_some()) => None,
        _ => Some(kept),
    }
}

/// Returns user and hash without blanks around, and without the part after a second colon; `None` for a line without a
/// user.
fn read_line(line: &[u8]) -> Option<(String, Result<String, &'static str>)> {
    if line.starts_with(b"#") {
        return None;
    }
    let text = String::from_utf8_lossy(line);
    let mut parts = text.split(':');
    let user = parts.next().unwrap_or_default().trim().to_owned();
    if user.is_empty() {
        return None;
    }
    if std::str::from_utf8(line).is_err() || !is_user(&user) {
        return Some((user, Err("a name that no user can have")));
    }
    let hash = parts.next().map(str::trim).filter(|hash| !hash.is_empty());
    let hash = match hash {
        None => Err("there is no hash"),
        Some(hash) if hash.starts_with("$6$") => {
            Err("Mosquitto's $6$ is one round of SHA-512, which is guessed too fast to be taken")
        }
        Some(hash) => match PasswordDigest::parse(hash) {
            Ok(_) => Ok(hash.to_owned()),
            Err(_) => Err("not a hash that is taken: argon2id and Mosquitto's $7$ are"),
        },
    };
    Some((user, hash))
}
