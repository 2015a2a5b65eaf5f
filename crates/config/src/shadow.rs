//! `[shadow]`: documents about devices.

use serde::{Deserialize, Serialize};

use super::{ByteSize, Config, validate::Check};

/// `[shadow]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shadow {
    /// Offer them; needs `store.enabled` or `latest.enabled`.
    pub enabled: bool,
    /// What their topics begin with, before the client id.
    pub topic_prefix: String,
    /// Bytes of a document, without the times of its values.
    pub max_bytes: ByteSize,
    /// Levels below `desired` and `reported`.
    pub max_depth: usize,
    /// Named shadows of a device.
    pub max_named: usize,
    /// Requests that a device may have under way; one more is rejected.
    pub max_requests: usize,
    /// Bytes of the disk that all shadows in the data directory may take; nothing new is kept beyond it.
    pub max_total_bytes: ByteSize,
}

impl Default for Shadow {
    fn default() -> Self {
        Self {
            enabled: true,
            topic_prefix: "$gateway/devices".to_owned(),
            max_bytes: ByteSize(8 << 10),
            max_depth: 8,
            max_named: 25,
            max_requests: 10,
            max_total_bytes: ByteSize(4 << 30),
        }
    }
}

impl Shadow {
    /// Returns the prefix of their topics, with the slash after it.
    pub(super) fn prefix(&self) -> String {
        format!("{}/", self.topic_prefix)
    }
}

/// A document is read and written whole with every update.
const MOST_BYTES: usize = 256 << 10;
/// Each level is a call of a function.
const MOST_DEPTH: usize = 64;
/// All names of a device are looked at when it gets another.
const MOST_NAMED: usize = 1_000;
/// Pages and a few documents of the largest size.
const LEAST_TOTAL: usize = 1 << 20;
/// Each waits in memory.
const MOST_REQUESTS: usize = 1_000;

impl Config {
    /// Returns whether shadows are offered; if not, the key that switches them off.
    pub fn has_shadows(&self) -> Result<(), &'static str> {
        match self.shadow.enabled {
            false => Err("shadow.enabled"),
            true if self.store.enabled || self.latest.enabled => Ok(()),
            true => Err("store.enabled"),
        }
    }

    pub(super) fn check_shadow(&self, check: &mut Check) {
        let shadow = &self.shadow;
        if let Err(problem) = ::shadow::ShadowTopics::new(&shadow.topic_prefix) {
            let fix =
                format!("{problem}, such as $gateway/devices, or $aws/things for firmware made for AWS IoT");
            check.fail("shadow.topic_prefix", &shadow.topic_prefix, "cannot begin their topics", fix);
        }
        let (own, commands) = (shadow.prefix(), self.commands.prefix());
        let both = shadow.enabled && self.commands.enabled;
        if both && (own.starts_with(&commands) || commands.starts_with(&own)) {
            let fix = format!("use a prefix that neither begins {commands} nor begins with it");
            check.fail("shadow.topic_prefix", &shadow.topic_prefix, "meets commands.topic", fix);
        }
        if shadow.max_total_bytes.0 < LEAST_TOTAL {
            let fix = format!("use at least {}", ByteSize(LEAST_TOTAL));
            check.fail("shadow.max_total_bytes", shadow.max_total_bytes, "too little for any use", fix);
        }
        for (key, value, most) in [
            ("shadow.max_bytes", shadow.max_bytes.0, MOST_BYTES),
            ("shadow.max_depth", shadow.max_depth, MOST_DEPTH),
            ("shadow.max_named", shadow.max_named, MOST_NAMED),
            ("shadow.max_requests", shadow.max_requests, MOST_REQUESTS),
        ] {
            check.positive(key, value, value == 0);
            if value > most {
                check.fail(key, value, "more than works well", format!("use at most {most}"));
            }
        }
    }
}
