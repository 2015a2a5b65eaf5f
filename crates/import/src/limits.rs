//! `[limits]`: what Mosquitto bounds, within the bounds that the gateway has.

use config::Limits;

use super::{imported::Remark, lines::OptionLine, listeners::MosquittoListener, options::OptionReader};

impl OptionReader {
    pub(super) fn of_limits(&mut self, line: &OptionLine) -> bool {
        let key = match line.key.as_str() {
            "max_inflight_messages" => "max_inflight",
            "max_keepalive" => "keep_alive_max",
            "global_max_connections" => "max_connections",
            "memory_limit" => "memory_budget",
            "max_queued_messages" => "offline_messages",
            "max_queued_bytes" => "offline_bytes",
            "message_size_limit" | "max_packet_size" => "max_packet_size",
            "packet_max_connect" => "max_connect_size",
            "max_qos" | "maximum_qos" => "max_qos",
            "max_topic_alias" => "topic_alias_maximum",
            "persistent_client_expiration" => {
                match expiration(line.word()) {
                    Some(seconds) => self.copy(line, "limits", "session_expiry_max", seconds.to_string()),
                    None => self.lost(line, "not a number with s, h, d, w, m or y; left out"),
                }
                return true;
            }
            "queue_qos0_messages" => {
                if let Some(on) = self.flag(line) {
                    self.copy(line, "limits", "offline_qos0", on.to_string());
                }
                return true;
            }
            "retain_available" => {
                if let Some(on) = self.flag(line) {
                    self.copy(line, "limits", "retain_available", on.to_string());
                }
                return true;
            }
            _ => return false,
        };
        let Some(number) = self.number(line) else { return true };
        match u64::try_from(number) {
            Ok(number) => self.limit(line, key, number),
            // Some of them are -1 for no limit.
            Err(_) => self.note(line, "no limit there; the default of the gateway is kept"),
        }
        true
    }

    fn limit(&mut self, line: &OptionLine, key: &'static str, number: u64) {
        match (key, number) {
            ("max_inflight", 0) => self.copy(line, "limits", key, u16::MAX.to_string()),
            ("max_inflight", number) => {
                self.copy(line, "limits", key, number.min(u16::MAX.into()).to_string());
            }
            ("keep_alive_max", 0) => self.note(line, "no limit, as by default here"),
            ("keep_alive_max", number) => {
                self.copy(line, "limits", key, number.min(u16::MAX.into()).to_string());
                self.note(line, "a client of MQTT 3.1.1 that asks for more is not refused but let in");
            }
            ("max_qos", number @ 0..=2) | ("topic_alias_maximum", number @ 0..=65_535) => {
                let text = line.text();
                self.listener().limits.insert(key, (number, text));
            }
            ("max_qos" | "topic_alias_maximum", _) => self.lost(line, "more than there is; left out"),
            (_, 0) => self.note(
                line,
                "no limit there; here every queue and packet has one, and the default of the gateway is kept: see [limits]",
            ),
            ("max_packet_size", number) if line.key == "max_packet_size" => self.packet_size(line, number),
            ("max_packet_size", number) if self.max_packet_size.is_none() => {
                // The limit there is for the payload, here for the packet: room for a topic and properties.
                self.packet_size(line, number.saturating_add(8192));
                self.note(line, "a larger packet closes its connection here; there it was dropped");
            }
            ("max_packet_size", _) => self.note(line, "max_packet_size has been set"),
            ("offline_messages", number) => {
                self.copy(line, "limits", key, number.to_string());
                self.copy(line, "limits", "mailbox_messages", number.to_string());
            }
            ("offline_bytes", number) => {
                self.copy(line, "limits", key, number.to_string());
                self.copy(line, "limits", "mailbox_bytes", number.to_string());
            }
            ("memory_budget", number) => {
                self.copy(line, "limits", key, number.max(64 << 20).to_string());
                self.note(line, "here it is for what peers make the gateway hold, and at least 64 MiB");
            }
            (_, number) => self.copy(line, "limits", key, number.to_string()),
        }
    }

    fn packet_size(&mut self, line: &OptionLine, bytes: u64) {
        // MQTT has no larger packets.
        let bytes = bytes.min(256 << 20);
        self.max_packet_size = Some(bytes);
        self.copy(line, "limits", "max_packet_size", bytes.to_string());
    }

    pub(super) fn limits(&mut self, listeners: &[&MosquittoListener]) {
        // The limit is each listener's there and the whole broker's here: the largest of the limits, if all listeners
        // have one.
        for key in ["max_qos", "topic_alias_maximum"] {
            let said: Vec<(u64, String)> =
                listeners.iter().filter_map(|listener| listener.limits.get(key).cloned()).collect();
            let Some((largest, text)) = said.iter().max().cloned() else { continue };
            let all = said.len() == listeners.len();
            if all {
                self.draft.set("limits", key, largest.to_string(), &text);
            }
            if !all || said.iter().any(|(number, _)| *number != largest) {
                let text = format!("{text}: limits.{key} is for all listeners, and theirs are not the same");
                self.told.push(Remark { place: String::new(), text, lost: true });
            }
        }
        if !self.draft.has("limits", "session_expiry_max") {
            let text = "Mosquitto keeps sessions for ever; persistent_client_expiration was not set";
            self.draft.set("limits", "session_expiry_max", u32::MAX.to_string(), text);
        }
        match self.max_packet_size {
            None => self.told.push(Remark {
                place: String::new(),
                text: "packets may have 1 MiB here, and 256 MiB with Mosquitto 2.0: set limits.max_packet_size if your \
                       devices send larger ones, such as pictures"
                    .to_owned(),
                lost: false,
            }),
            // A queue holds a packet at least.
            Some(bytes) => {
                for key in ["mailbox_bytes", "offline_bytes", "group_queue_bytes"] {
                    if bytes > 16 << 20 && !self.draft.has("limits", key) {
                        self.draft.set("limits", key, bytes.to_string(), "room for one packet");
                    }
                }
                if bytes > 4 << 20 {
                    self.draft.set("limits", "stream_buffer", bytes.to_string(), "room for one packet");
                }
            }
        }
        self.fit_queues();
    }

    /// Keeps the queues between one packet and the budget, outside which the gateway does not start.
    fn fit_queues(&mut self) {
        let usual = Limits::default();
        let size = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
        let packet = self.max_packet_size.unwrap_or_else(|| size(usual.max_packet_size.0));
        // The usual budget is a share of the machine's memory, and at least this.
        let budget = self.draft.number("limits", "memory_budget").unwrap_or(64 << 20);
        if packet > budget {
            self.draft.set("limits", "memory_budget", packet.to_string(), "room for one packet");
        }
        let budget = budget.max(packet);
        for key in ["mailbox_bytes", "offline_bytes"] {
            let Some(asked) = self.draft.number("limits", key) else { continue };
            let (least, most) = match key {
                "mailbox_bytes" => (packet, budget),
                // Messages that wait on the disk are not within the budget.
                _ if self.persistence != Some(false) => (0, u64::MAX),
                _ => (0, budget),
            };
            let fitting = asked.clamp(least, most);
            if fitting != asked {
                let why = if fitting > asked { "room for one packet" } else { "within limits.memory_budget" };
                self.draft.set("limits", key, fitting.to_string(), why);
                let text = format!("limits.{key} is {fitting} and not {asked}: {why}");
                self.told.push(Remark { place: String::new(), text, lost: fitting < asked });
            }
        }
    }
}

/// `2m`, `14d`: seconds, at most what MQTT can say.
pub(super) fn expiration(text: &str) -> Option<u64> {
    let at = text.len().checked_sub(1)?;
    let (number, unit) = (text.get(..at)?, text.get(at..)?);
    let seconds = match unit {
        "s" => 1,
        "h" => 3600,
        "d" => 24 * 3600,
        "w" => 7 * 24 * 3600,
        "m" => 30 * 24 * 3600,
        "y" => 365 * 24 * 3600,
        _ => return None,
    };
    let number: u64 = number.parse().ok().filter(|number| *number > 0)?;
    Some(number.saturating_mul(seconds).min(u64::from(u32::MAX)))
}
