//! Topics of shadows: `{prefix}/{client_id}/shadow/…` and `{prefix}/{client_id}/shadow/name/{name}/…`.

use thiserror::Error;

use crate::MAX_NAME;

/// Operation on a shadow that a device requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowOperation {
    /// Change it.
    Update,
    /// Read it.
    Get,
    /// Delete it.
    Delete,
}

impl ShadowOperation {
    /// The last level of its topic.
    pub fn name(self) -> &'static str {
        match self {
            Self::Update => "update",
            Self::Get => "get",
            Self::Delete => "delete",
        }
    }
}

/// Why a prefix is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("use levels without wildcards, the first of which begins with $ and is neither $SYS nor $share")]
pub struct PrefixError;

/// The topics below one prefix.
///
/// The prefix begins with `$`, so that no filter of a client reaches the topics by a wildcard in its first level [MQTT-4.7.2-1]:
/// a subscription to `#` gets no shadow.
#[derive(Debug, Clone)]
pub struct ShadowTopics {
    /// With the slash after it.
    prefix: Box<str>,
}

impl ShadowTopics {
    /// Topics below `prefix`, such as `$aws/things`.
    pub fn new(prefix: &str) -> Result<Self, PrefixError> {
        let first = prefix.split('/').next().unwrap_or_default();
        let good = first.len() > 1
            && first.starts_with('$')
            && !matches!(first, "$SYS" | "$share")
            && !prefix.ends_with('/')
            && prefix.len() <= 128
            && !prefix.contains(['+', '#', '\0']);
        if good { Ok(Self { prefix: format!("{prefix}/").into() }) } else { Err(PrefixError) }
    }

    /// The prefix, with the slash after it.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The topic of an answer, such as `update/accepted`.
    pub fn answer(&self, client_id: &str, name: &str, answer: &str) -> String {
        match name {
            "" => [&self.prefix, client_id, "/shadow/", answer].concat(),
            name => [&self.prefix, client_id, "/shadow/name/", name, "/", answer].concat(),
        }
    }
}

/// The operation that a device asks for by publishing to a topic, of which `rest` is what is after its client id, and the
/// shadow's name: empty is the classic one.
pub fn operation(rest: &str) -> Option<(ShadowOperation, &str)> {
    let rest = rest.strip_prefix("shadow/")?;
    let (name, operation) = match rest.strip_prefix("name/") {
        Some(rest) => rest.split_once('/').filter(|(name, _)| is_name(name))?,
        None => ("", rest),
    };
    let operation = match operation {
        "update" => ShadowOperation::Update,
        "get" => ShadowOperation::Get,
        "delete" => ShadowOperation::Delete,
        _ => return None,
    };
    Some((operation, name))
}

/// Returns whether the text can be the name of a shadow: 1 to 64 of letters, digits, `:`, `_` and `-`.
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b':' | b'_' | b'-'))
}
