//! Mosquitto's options and their counterparts here. The names are the ones of mosquitto.conf(5) up to 2.1, and older
//! ones that it had before.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    bridges::BridgeBlock,
    draft::{Draft, quoted},
    imported::Remark,
    lines::OptionLine,
    listeners::{ListenerGuard, MosquittoListener},
};

/// Options that need nothing here, and why.
const NEEDLESS: &[(&str, &str)] = &[
    (
        "allow_duplicate_messages",
        "a client gets one copy of a message, by the subscription with the highest QoS",
    ),
    (
        "auth_plugin_deny_special_chars",
        "a name with +, # or / in it stands for nothing in a rule that allows",
    ),
    ("auto_id_prefix", "client ids that the gateway makes have a form of their own"),
    ("autosave_interval", "what is acknowledged is on disk before ([store] durability)"),
    ("autosave_on_changes", "what is acknowledged is on disk before ([store] durability)"),
    ("check_retain_source", "rules are asked again for each message before it is sent, about who gets it"),
    ("connection_messages", "connects and disconnects are events of the API, and lines at log level debug"),
    ("dhparamfile", "keys are exchanged by elliptic curves only"),
    ("enable_control_api", "clients, sessions and rules are looked after by gRPC and mqtt-server ctl"),
    ("listener_auto_id_prefix", "client ids that the gateway makes have a form of their own"),
    ("log_facility", "the log is on standard error: systemd or the container keeps it"),
    ("log_timestamp", "each line of the log has its time"),
    ("log_timestamp_format", "times are in UTC, as RFC 3339 writes them"),
    ("max_topic_alias_broker", "the gateway uses no topic aliases towards clients"),
    ("packet_buffer_size", "buffers grow and shrink with what they hold"),
    ("packet_max_auth", "limits.max_packet_size is for packets of every kind"),
    ("packet_max_simple", "limits.max_packet_size is for packets of every kind"),
    ("packet_max_sub", "limits.max_packet_size is for packets of every kind"),
    ("packet_max_un", "limits.max_packet_size is for packets of every kind"),
    ("persistence_file", "the gateway has its own files; mosquitto.db is not read"),
    ("pid_file", "systemd or the container knows the process"),
    ("retry_interval", "messages are sent again when a client reconnects, and only then, as MQTT asks"),
    ("set_tcp_nodelay", "small messages are never held back"),
    ("store_clean_interval", "nothing has to be cleaned up"),
    ("user", "start the gateway as the user it is to be (User= in systemd); it gives no rights up by itself"),
    ("websockets_headers_size", "the header of a WebSocket request is bounded"),
    ("websockets_log_level", "[log] level says it, as for everything"),
];

/// Options without a counterpart that protect no listener, each with advice.
const MISSING: &[(&str, &str)] = &[
    (
        "ciphers",
        "[tls] ciphersuites takes IANA names; TLS 1.2 and 1.3 have only strong suites here without it",
    ),
    ("ciphers_tls1.3", "[tls] ciphersuites takes these names, but must then have those of TLS 1.2 too"),
    ("disable_client_cert_date_checks", "a certificate that has expired is refused"),
    (
        "global_max_clients",
        "limits.max_offline_sessions counts sessions without a connection, limits.max_connections the others",
    ),
    ("http_dir", "files are served by a web server in front"),
    (
        "max_inflight_bytes",
        "limits.max_inflight counts messages; limits.memory_budget bounds the bytes of all",
    ),
    ("psk_file", "there are no pre-shared keys here: give devices certificates or passwords"),
    ("retain_expiry_interval", "publishers can set the message expiry interval of MQTT 5"),
    ("tls_engine", "keys are PEM files"),
    ("tls_engine_kpass_sha1", "keys are PEM files"),
    (
        "upgrade_outgoing_qos",
        "a message is delivered at the lower QoS of message and subscription, as MQTT asks",
    ),
];

/// Options that belong to the `connection` above them.
const OF_BRIDGES: &[&str] = &[
    "address",
    "addresses",
    "cleansession",
    "clientid",
    "idle_timeout",
    "keepalive_interval",
    "local_cleansession",
    "local_clientid",
    "local_password",
    "local_username",
    "notification_topic",
    "notifications",
    "notifications_local_only",
    "password",
    "remote_clientid",
    "remote_password",
    "remote_username",
    "restart_timeout",
    "round_robin",
    "start_type",
    "threshold",
    "topic",
    "try_private",
    "username",
];

/// Levels from `off` on, as `log_type` adds them up.
pub(super) const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

/// Position in a file: the listener and the connection that its next options are about. An included file begins anew,
/// and the including file goes on from its own position.
#[derive(Clone, Copy, Default)]
pub(super) struct Cursor {
    pub(super) listener: Option<usize>,
    pub(super) connection: Option<usize>,
    /// Listeners of all files when its last line was read.
    seen: usize,
    /// An included file had listeners of its own, after which options are about no listener for Mosquitto 2.0 and 2.1.
    is_lost: bool,
}

impl Cursor {
    /// Goes to a listener; returns where it was.
    pub(super) fn go_to(&mut self, listener: usize) -> usize {
        self.is_lost = false;
        self.listener.replace(listener).unwrap_or_default()
    }
}

/// Result of the lines so far.
#[derive(Default)]
pub(super) struct OptionReader {
    pub(super) draft: Draft,
    pub(super) told: Vec<Remark>,
    /// The first is Mosquitto's default listener, which opens if it is asked for, or if there is no other.
    pub(super) listeners: Vec<MosquittoListener>,
    pub(super) default_asked: bool,
    pub(super) per_listener: bool,
    /// A `password_file`, `allow_anonymous` or the like came already.
    pub(super) guarded: bool,
    pub(super) guard: ListenerGuard,
    /// Reasons for which no listener can be opened.
    pub(super) shut: Vec<String>,
    pub(super) connections: Vec<BridgeBlock>,
    pub(super) secrets: Vec<(PathBuf, String)>,
    pub(super) persistence: Option<bool>,
    pub(super) max_packet_size: Option<u64>,
    pub(super) log: LogTypes,
    cursors: BTreeMap<PathBuf, Cursor>,
    file: PathBuf,
}

#[derive(Default)]
pub(super) struct LogTypes {
    pub(super) named: bool,
    pub(super) level: u8,
    pub(super) nowhere: bool,
}

impl OptionReader {
    pub(super) fn new() -> Self {
        let default = MosquittoListener {
            port: 1883,
            place: "the default listener".to_owned(),
            ..MosquittoListener::default()
        };
        Self { listeners: vec![default], ..Self::default() }
    }

    pub(super) fn note(&mut self, line: &OptionLine, text: &str) {
        let text = format!("{}: {text}", line.text());
        self.told.push(Remark { place: line.place(), text, lost: false });
    }

    pub(super) fn lost(&mut self, line: &OptionLine, text: &str) {
        let text = format!("{}: {text}", line.text());
        self.told.push(Remark { place: line.place(), text, lost: true });
    }

    /// Leaves every listener closed because of a line.
    pub(super) fn shut(&mut self, line: &OptionLine, why: &str) {
        self.lost(line, why);
        self.shut.push(format!("{}: {}: {why}", line.place(), line.text()));
    }

    pub(super) fn cursor(&mut self) -> &mut Cursor {
        self.cursors.entry(self.file.clone()).or_default()
    }

    /// Returns the listener that an option of this file is about. An option before the first `listener` is about the
    /// default one, and opens it.
    pub(super) fn listener(&mut self) -> &mut MosquittoListener {
        let at = self.place();
        self.default_asked |= at == 0;
        &mut self.listeners[at]
    }

    /// The place of that listener, which stays closed if it is not sure that the option is about it.
    fn place(&mut self) -> usize {
        let Cursor { listener, is_lost, .. } = *self.cursor();
        let at = listener.unwrap_or_default();
        if is_lost && at > 0 {
            let problem = "an option of it comes after an include_dir with listeners, and is for Mosquitto about none of them: \
                           write include_dir last";
            self.listeners[at].blocked.push(problem.to_owned());
        }
        at
    }

    /// The guard that an option of this file is about; it opens no listener.
    pub(super) fn guard(&mut self) -> &mut ListenerGuard {
        if !self.per_listener {
            return &mut self.guard;
        }
        let at = self.place();
        &mut self.listeners[at].guard
    }

    /// Copies a number, a size or a truth value to a key of ours.
    pub(super) fn copy(
        &mut self,
        line: &OptionLine,
        section: &'static str,
        key: &'static str,
        value: String,
    ) {
        self.draft.set(section, key, value, &line.text());
    }

    /// Reads a line of whichever file.
    pub(super) fn line(&mut self, line: &OptionLine) {
        self.file.clone_from(&line.file);
        let listeners = self.listeners.len();
        let cursor = self.cursor();
        cursor.is_lost |= cursor.seen > 0 && cursor.seen < listeners;
        self.option(line);
        let listeners = self.listeners.len();
        self.cursor().seen = listeners;
    }

    fn option(&mut self, line: &OptionLine) {
        let key = line.key.as_str();
        if key == "connection" {
            return self.connection(line);
        }
        if key.starts_with("bridge_") || OF_BRIDGES.contains(&key) {
            return match self.cursor().connection {
                Some(at) => {
                    self.connections[at].lines.push((line.place(), line.key.clone(), line.value.clone()))
                }
                None => self.lost(line, "there is no connection that it could be of"),
            };
        }
        if let Some((_, why)) = NEEDLESS.iter().find(|(name, _)| *name == key) {
            return self.note(line, why);
        }
        if let Some((_, remedy)) = MISSING.iter().find(|(name, _)| *name == key) {
            return self.lost(line, remedy);
        }
        if self.of_listener(line) || self.of_guard(line) || self.of_limits(line) || self.of_the_rest(line) {
            return;
        }
        let why = match key.contains(|letter: char| letter.is_control()) {
            true => "a tab or control character in a name, which Mosquitto does not take: write a blank",
            false => {
                "not an option that is known here, and Mosquitto would not start with one that it does not know"
            }
        };
        self.shut(line, why);
    }

    fn connection(&mut self, line: &OptionLine) {
        let name = line.word().to_owned();
        if name.is_empty() || self.connections.iter().any(|known| known.name == name) {
            self.lost(line, "a connection needs a name of its own; what follows is left out");
            self.cursor().connection = None;
            return;
        }
        self.connections.push(BridgeBlock { place: line.place(), name, lines: Vec::new() });
        self.cursor().connection = Some(self.connections.len() - 1);
    }

    /// The truth value of an option that guards nothing.
    pub(super) fn flag(&mut self, line: &OptionLine) -> Option<bool> {
        let flag = line.flag();
        if flag.is_none() {
            self.lost(line, "neither true nor false; left out");
        }
        flag
    }

    /// The number of an option that guards nothing.
    pub(super) fn number(&mut self, line: &OptionLine) -> Option<i64> {
        let number = line.number();
        if number.is_none() {
            self.lost(line, "not a number; left out");
        }
        number
    }

    fn of_the_rest(&mut self, line: &OptionLine) -> bool {
        match line.key.as_str() {
            "persistence" | "retained_persistence" => self.persistence = self.flag(line).or(self.persistence),
            "persistence_location" => self.note(
                line,
                "data_dir is the gateway's own; sessions and retained messages of mosquitto.db do not come along: \
                 docs/guides/from-mosquitto.md says how retained messages do",
            ),
            "sys_interval" => match self.number(line) {
                Some(0) => self.copy(line, "sys", "enabled", "false".to_owned()),
                Some(seconds @ 1..=65_535) => {
                    self.copy(line, "sys", "interval", quoted(&format!("{seconds}s")));
                }
                Some(_) => self.lost(line, "not from 0 to 65535; left out"),
                None => {}
            },
            "log_dest" => match line.word() {
                "none" => self.log.nowhere = true,
                "stderr" => {}
                _ => self.note(line, "the log is on standard error: systemd or the container keeps it"),
            },
            "log_type" => {
                let level = match line.word() {
                    "none" => 0,
                    "error" => 1,
                    "warning" => 2,
                    "notice" | "information" | "subscribe" | "unsubscribe" | "websockets" | "internal" => 3,
                    "debug" | "all" => 4,
                    _ => {
                        self.lost(line, "not a kind of line that is known");
                        return true;
                    }
                };
                self.log.named = true;
                self.log.level = self.log.level.max(level);
            }
            "include_dir" => {
                let why = match line.included {
                    true => "only the main file may include others: Mosquitto does not start with this one",
                    false => "names no directory",
                };
                self.shut(line, why);
            }
            _ => return false,
        }
        true
    }
}
