//! Problems of a configuration: everything at once, each with key, value and fix.

use std::fmt::{self, Write as _};

/// One thing wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Key as a path, such as `limits.max_qos` or `listeners[0].address`.
    pub key: String,
    /// The value as written; empty if it has none.
    pub value: String,
    /// Place where it was set, such as `MQTT_SERVER_ADDR` or `--addr`; empty for the file or a default.
    pub origin: String,
    /// Mistake in it.
    pub problem: String,
    /// Remedy.
    pub fix: String,
}

impl Problem {
    /// A problem of `key` with `value`.
    pub fn new(
        key: impl Into<String>,
        value: impl fmt::Display,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            key: key.into(),
            value: value.to_string(),
            origin: String::new(),
            problem: problem.into(),
            fix: fix.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.key)?;
        if !self.value.is_empty() {
            write!(f, " = {}", OneLine(&self.value))?;
        }
        if !self.origin.is_empty() {
            write!(f, " (from {})", self.origin)?;
        }
        write!(f, ": {}", OneLine(&self.problem))?;
        if !self.fix.is_empty() {
            write!(f, "; {}", OneLine(&self.fix))?;
        }
        Ok(())
    }
}

/// Text of a file or of the environment that cannot break the line.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { f.write_char(c)? }
        }
        Ok(())
    }
}

/// Everything wrong with a configuration, one line each; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(pub Vec<Problem>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, problem) in self.0.iter().enumerate() {
            let between = if number == 0 { "" } else { "\n" };
            write!(f, "{between}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
