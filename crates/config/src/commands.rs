//! `[commands]`: requests to devices, and the topics that they and their answers have.

use std::time::Duration;

use gateway_core::{Levels, ReservedTopics, TopicName};
use serde::{Deserialize, Serialize};

use super::{ByteSize, Config, Span, validate::Check};

/// `[commands]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Commands {
    /// Offer them. What begins with `topic` is the gateway's then.
    pub enabled: bool,
    /// Prefix of the topics of commands, before `/{client_id}/`: one level or several.
    pub topic: String,
    /// The topic of a command after `{topic}/{client_id}/`: levels, and `{id}` and `{name}` once each.
    pub request: String,
    /// The same of a device's reply, with `{id}`; the last level is `{status}`, which devices of MQTT 5 leave out.
    pub reply: String,
    /// Commands at once that wait for their answer: calls of Send, and stored ones that were sent.
    pub max_outstanding: usize,
    /// The same to one device.
    pub max_outstanding_per_device: usize,
    /// Stored commands that have not ended.
    pub max_active: usize,
    /// The same for one device.
    pub max_active_per_device: usize,
    /// Bytes of stored commands, those that have ended included.
    pub max_bytes: ByteSize,
    /// How long a stored command is kept after its end.
    pub keep: Span,
    /// How many of these are kept; for one more the oldest goes.
    pub max_kept: usize,
}

impl Default for Commands {
    fn default() -> Self {
        Self {
            enabled: true,
            topic: "cmd".to_owned(),
            request: "{id}/{name}".to_owned(),
            reply: "{id}/reply/{status}".to_owned(),
            max_outstanding: 10_000,
            max_outstanding_per_device: 100,
            max_active: 100_000,
            max_active_per_device: 1_000,
            max_bytes: ByteSize(128 << 20),
            keep: Span(Duration::from_hours(24)),
            max_kept: 10_000,
        }
    }
}

/// Each is in memory, too.
const MOST_STORED: usize = 1_000_000;

impl Config {
    /// The topics that devices may publish to only below their own name, and without a rule.
    pub fn reserved_topics(&self) -> ReservedTopics {
        let commands = self.commands.enabled.then(|| self.commands.prefix());
        let shadows = self.has_shadows().ok().map(|()| self.shadow.prefix());
        ReservedTopics::new(commands.iter().chain(&shadows).map(String::as_str))
    }

    pub(super) fn check_commands(&self, check: &mut Check) {
        let commands = &self.commands;
        let topic = &commands.topic;
        if TopicName::check(topic).is_err()
            || topic.split('/').any(str::is_empty)
            || topic.starts_with("$SYS")
            || topic.starts_with("$share")
        {
            check.fail(
                "commands.topic",
                topic,
                "not the beginning of a topic: levels with text, no wildcard, not $SYS or $share",
                "use cmd, or another level that no device publishes to",
            );
        }
        if let Err(problem) = commands.request_levels() {
            check.fail(
                "commands.request",
                &commands.request,
                problem,
                "use {id}/{name}, in any order and with other levels",
            );
        }
        if let Err(problem) = commands.reply_levels() {
            let fix = "use {id}/reply/{status}, or other levels than reply";
            check.fail("commands.reply", &commands.reply, problem, fix);
        }
        for (key, value) in [
            ("commands.max_outstanding", commands.max_outstanding),
            ("commands.max_outstanding_per_device", commands.max_outstanding_per_device),
            ("commands.max_active", commands.max_active),
            ("commands.max_active_per_device", commands.max_active_per_device),
            ("commands.max_kept", commands.max_kept),
        ] {
            check.positive(key, value, value == 0);
            if value > MOST_STORED {
                check.fail(key, value, "more than works well", format!("use at most {MOST_STORED}"));
            }
        }
        check.positive("commands.max_bytes", commands.max_bytes, commands.max_bytes.0 == 0);
        let keep = commands.keep;
        if !(Duration::from_secs(1)..=Duration::from_hours(365 * 24)).contains(&keep.0) {
            check.fail("commands.keep", keep, "not between 1s and 365d", "use 1d");
        }
    }
}

impl Commands {
    /// Returns the prefix of their topics, the last `/` included.
    pub fn prefix(&self) -> String {
        format!("{}/", self.topic)
    }

    /// The levels of a command's topic after the client id, with the places id and name.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn request_levels(&self) -> Result<Levels, String> {
        Levels::parse(&self.request, &["id", "name"])
    }

    /// The same of a reply, with the places id and status.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn reply_levels(&self) -> Result<Levels, String> {
        let levels = Levels::parse(&self.reply, &["id", "status"])?;
        if levels.ends_with(1) { Ok(levels) } else { Err("does not end with {status}".to_owned()) }
    }
}
