//! Text that is never shown.

use std::{convert::Infallible, fmt, str::FromStr};

use serde::{Deserialize, Serialize, Serializer};

/// Placeholder for a secret in messages.
pub(super) const HIDDEN: &str = "(hidden)";

/// A password. Displayed or serialized it is `(hidden)`, or empty if there is none.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The text itself: to be used, and never to be logged.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns whether there is no secret.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn shown(&self) -> &'static str {
        if self.0.is_empty() { "" } else { HIDDEN }
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl FromStr for Secret {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.shown())
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.shown())
    }
}

/// Returns whether the value under this key, perhaps misspelt, must not be shown. Takes a whole line with key and
/// value, too.
pub(super) fn is_secret(text: &str) -> bool {
    let text = text.to_lowercase();
    // Its section is named for passwords, and has none.
    let text = text.trim_start_matches("auth.password.");
    !text.ends_with("password_file") && (text.contains("pas") || text.contains("secret"))
}
