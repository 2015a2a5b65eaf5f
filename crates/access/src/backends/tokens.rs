//! Bearer tokens: random, shown once, kept as hashes.
//!
//! The file has a JSON object on each line, so that a line can be added and taken away by hand as well; empty lines and
//! those that begin with `#` are left alone. A token has 256 random bits, so its hash needs no salt and no stretching, and
//! looking the hash up in a map tells an attacker by its time nothing that leads to a token.

use std::{collections::HashMap, fmt::Write as _, sync::Arc};

use aws_lc_rs::{
    digest::{SHA256, digest},
    rand,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{
    Role, Scope,
    date::{format_time, parse_time},
};

/// Prefix of tokens, so that scanners for leaked secrets find them.
const PREFIX: &str = "mqs_";
/// Most tokens in a file.
const MOST: usize = 10_000;
/// Longest note.
const MOST_NOTE: usize = 200;

/// SHA-256 of a token.
pub type TokenHash = [u8; 32];

/// Rights that a token grants, and their holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenGrant {
    /// Name of the token in lists and logs. Not secret.
    pub id: String,
    /// Role of the holder.
    pub role: Role,
    /// With what.
    pub scope: Scope,
    /// Seconds since 1970.
    pub created: u64,
    /// From when it is refused, in seconds since 1970; `None` is never.
    pub expires: Option<u64>,
    /// For people: who has it.
    pub note: String,
    /// Hash of the token itself; zeros where there is none.
    pub hash: TokenHash,
}

impl TokenGrant {
    /// Returns whether the token has expired at `now`, in seconds since 1970.
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|expires| now >= expires)
    }
}

/// A line of the file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct TokenLine {
    id: String,
    role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    topics: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    devices: Option<Vec<String>>,
    created: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    note: String,
    sha256: String,
}

/// Mistake in a line. The line itself is not repeated: it may be a token that somebody put there.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct TokenLineError {
    /// From 1.
    pub line: usize,
    /// The mistake, and what to write.
    pub problem: String,
}

/// The tokens of a file.
#[derive(Debug, Default, Clone)]
pub struct Tokens {
    grants: HashMap<TokenHash, Arc<TokenGrant>>,
    /// In the order of the file.
    order: Vec<Arc<TokenGrant>>,
}

impl Tokens {
    /// Reads a file.
    ///
    /// # Errors
    /// All lines that are wrong.
    pub fn parse(text: &str) -> Result<Self, Vec<TokenLineError>> {
        let mut tokens = Self::default();
        let mut errors = Vec::new();
        for (at, line) in text.lines().enumerate() {
            if !is_grant(line) {
                continue;
            }
            if let Err(problem) = read(line).and_then(|grant| tokens.add(grant)) {
                errors.push(TokenLineError { line: at + 1, problem });
            }
        }
        if errors.is_empty() { Ok(tokens) } else { Err(errors) }
    }

    fn add(&mut self, grant: TokenGrant) -> Result<(), String> {
        if self.order.len() >= MOST {
            return Err(format!("more than {MOST} tokens; take away those that are not used"));
        }
        if self.order.iter().any(|other| other.id == grant.id) {
            return Err(format!("another line has the id {}, too; give each its own", grant.id));
        }
        let grant = Arc::new(grant);
        if self.grants.insert(grant.hash, Arc::clone(&grant)).is_some() {
            return Err("another line has the same sha256; each token has a line of its own".to_owned());
        }
        self.order.push(grant);
        Ok(())
    }

    /// Returns the grant of `token`, expired or not; `None` if the token is not one of these.
    pub fn find(&self, token: &str) -> Option<&Arc<TokenGrant>> {
        self.grants.get(&hash(token))
    }

    /// Returns whether the token of `grant` still grants just that.
    pub fn has(&self, grant: &TokenGrant) -> bool {
        self.grants.get(&grant.hash).is_some_and(|known| **known == *grant)
    }

    /// All of them, in the order of the file.
    pub fn list(&self) -> &[Arc<TokenGrant>] {
        &self.order
    }

    /// `text` with a further line for a token.
    ///
    /// # Errors
    /// Why the line would not be read.
    pub fn with(text: &str, grant: &TokenGrant) -> Result<String, Vec<TokenLineError>> {
        let mut text = text.to_owned();
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let line = TokenLine {
            id: grant.id.clone(),
            role: grant.role,
            topics: grant.scope.topics().map(owned),
            devices: grant.scope.devices().map(owned),
            created: format_time(grant.created),
            expires: grant.expires.map(format_time),
            note: grant.note.clone(),
            sha256: hex(&grant.hash),
        };
        let line = serde_json::to_string(&line)
            .map_err(|error| vec![TokenLineError { line: 0, problem: error.to_string() }])?;
        text.push_str(&line);
        text.push('\n');
        Self::parse(&text).map(|_| text)
    }

    /// `text` without the line of the token of this name; `None` if there is none.
    pub fn without(text: &str, id: &str) -> Option<String> {
        let is_it = |line: &str| is_grant(line) && read(line).is_ok_and(|grant| grant.id == id);
        let kept: String = text.split_inclusive('\n').filter(|line| !is_it(line)).collect();
        (kept.len() != text.len()).then_some(kept)
    }
}

fn owned(list: &[Box<str>]) -> Vec<String> {
    list.iter().map(|entry| entry.to_string()).collect()
}

fn is_grant(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with('#')
}

fn read(line: &str) -> Result<TokenGrant, String> {
    let line: TokenLine = serde_json::from_str(line).map_err(|error| match error.classify() {
        // The message of a wrong value quotes it.
        serde_json::error::Category::Data => {
            format!("not a token's line, at column {}; 'mqtt-server token create' shows one", error.column())
        }
        _ => format!("not a JSON object on one line, at column {}", error.column()),
    })?;
    let id_is_good =
        line.id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) && line.id.len() <= 64;
    if line.id.is_empty() || !id_is_good {
        return Err("id is not 1 to 64 letters, digits, '-', '_' or '.'".to_owned());
    }
    if line.note.chars().count() > MOST_NOTE || line.note.contains(char::is_control) {
        return Err(format!("note is longer than {MOST_NOTE} characters, or has more than one line"));
    }
    let time = |name: &str, text: &str| {
        parse_time(text)
            .ok_or_else(|| format!("{name} is not a time; write it in UTC like 2027-01-31T12:00:00Z"))
    };
    let hash = unhex(&line.sha256).ok_or("sha256 is not 64 hexadecimal digits")?;
    Ok(TokenGrant {
        scope: Scope::new(line.topics, line.devices).map_err(|error| error.to_string())?,
        created: time("created", &line.created)?,
        expires: line.expires.map(|text| time("expires", &text)).transpose()?,
        id: line.id,
        role: line.role,
        note: line.note,
        hash,
    })
}

/// A new token and a name for it.
///
/// # Errors
/// The system gives no random numbers.
pub fn mint() -> Result<(String, String), &'static str> {
    let (mut secret, mut id) = ([0; 32], [0; 5]);
    if rand::fill(&mut secret).is_err() || rand::fill(&mut id).is_err() {
        return Err("the system gives no random numbers");
    }
    Ok((format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(secret)), hex(&id)))
}

/// Returns the hash that is kept of a token.
pub fn hash(token: &str) -> TokenHash {
    let mut hash = TokenHash::default();
    hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    hash
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(text: &str) -> Option<TokenHash> {
    let mut hash = TokenHash::default();
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(id: &str, token: &str) -> TokenGrant {
        TokenGrant {
            hash: hash(token),
            id: id.to_owned(),
            role: Role::Reader,
            scope: Scope::new(Some(vec!["a/#".into()]), Some(vec!["dev-*".into()])).unwrap(),
            created: 1_795_426_200,
            expires: Some(1_803_202_200),
            note: "Grafana \"prod\"".to_owned(),
        }
    }

    #[test]
    fn a_token_is_found_by_itself_alone_until_its_line_is_gone() {
        let (token, id) = mint().unwrap();
        assert!(token.starts_with("mqs_") && token.len() == 47 && id.len() == 10);
        let first = "# who has what\n\n".to_owned();
        let text = Tokens::with(&first, &grant(&id, &token)).unwrap();
        assert!(!text.contains(&token), "shown once and kept nowhere");
        let (other, other_id) = mint().unwrap();
        let all =
            TokenGrant { scope: Scope::ALL, expires: None, note: String::new(), ..grant(&other_id, &other) };
        let text = Tokens::with(text.trim_end(), &all).unwrap();
        let tokens = Tokens::parse(&text).unwrap();
        assert_eq!(**tokens.find(&token).unwrap(), grant(&id, &token));
        assert!(tokens.has(&all) && !tokens.has(&TokenGrant { role: Role::Admin, ..all.clone() }));
        assert_eq!(**tokens.find(&other).unwrap(), all);
        assert!(tokens.find(&token[..46]).is_none() && tokens.find("").is_none());
        assert_eq!(tokens.list().len(), 2);
        let left = Tokens::without(&text, &id).unwrap();
        assert!(left.starts_with(&first) && Tokens::parse(&left).unwrap().find(&token).is_none());
        assert_eq!(Tokens::without(&left, &id), None);
        assert_eq!(Tokens::without(&left, &other_id).unwrap(), first);
    }

    #[test]
    fn a_token_ends_at_its_time() {
        let grant = grant("x", "x");
        assert!(!grant.is_expired(1_803_202_199) && grant.is_expired(1_803_202_200));
        assert!(!TokenGrant { expires: None, ..grant }.is_expired(u64::MAX));
    }

    #[test]
    fn wrong_lines_are_named_by_number_and_never_shown() {
        let good = Tokens::with("", &grant("x", "x")).unwrap();
        let line = good.trim_end();
        let (secret, _) = mint().unwrap();
        for (bad, problem) in [
            (secret.clone(), "not a JSON object on one line"),
            (line.replace("reader", &secret), "not a token's line"),
            (line.replace("\"role\"", "\"rule\""), "not a token's line"),
            (line.replace("a/#", "a/#/b"), "is not a topic filter"),
            (line.replace("2026-11", "2026-13"), "created is not a time"),
            (line.replace("\"x\"", "\"x y\""), "id is not"),
            (line.replace("sha256\":\"2", "sha256\":\"g"), "sha256 is not 64"),
            (line.to_owned(), "another line has the id x"),
            (line.replace("\"x\"", "\"y\""), "another line has the same sha256"),
        ] {
            let errors = Tokens::parse(&format!("{line}\n# comment\n{bad}\n")).unwrap_err();
            assert_eq!((errors.len(), errors[0].line), (1, 3), "{bad}: {errors:?}");
            assert!(errors[0].problem.contains(problem), "{bad}: {errors:?}");
            assert!(!errors[0].to_string().contains(&secret));
        }
    }
}
