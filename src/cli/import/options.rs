//! What each option of Mosquitto is here. The names are those of mosquitto.conf(5) up to 2.1, and of what older versions had.
//!
//! Long because it is one table: an arm for each option, and what the arms share.

use std::path::{Path, PathBuf};

use super::{
    Imported, Remark,
    bridges::BridgeBlock,
    draft::{Draft, quoted},
    lines::OptionLine,
    listeners::{Listener, ListenerGuard, Made},
    rules,
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

/// Options that there is nothing for, and what to do.
const MISSING: &[(&str, &str)] = &[
    ("accept_protocol_versions", "every listener takes MQTT 3.1, 3.1.1 and 5"),
    ("bind_interface", "listeners are bound to addresses: write the interface's address"),
    ("capath", "put the certificates of the directory into one file, and name it as cafile"),
    (
        "ciphers",
        "[tls] ciphersuites takes IANA names; TLS 1.2 and 1.3 have only strong suites here without it",
    ),
    ("ciphers_tls1.3", "[tls] ciphersuites takes these names, but must then have those of TLS 1.2 too"),
    (
        "clientid_prefixes",
        "tie client ids to who connects: auth.certificate.client_id, or rules with clients = [\"PREFIX*\"]",
    ),
    ("disable_client_cert_date_checks", "a certificate that has expired is refused"),
    (
        "global_max_clients",
        "limits.max_offline_sessions counts sessions without a connection, limits.max_connections the others",
    ),
    ("http_api", "the pages for operators are at http_addr"),
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

/// What belongs to the `connection` above it.
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

/// Reads what the lines say.
pub(super) fn convert(lines: &[OptionLine], rules_file: &Path) -> Imported {
    let mut reader = OptionReader::default();
    for line in lines {
        reader.line(line);
    }
    reader.finish(lines.first().map_or_else(String::new, |line| line.file.display().to_string()), rules_file)
}

#[derive(Default)]
struct OptionReader {
    draft: Draft,
    told: Vec<Remark>,
    /// The first is Mosquitto's default listener, which opens if it is asked for, or if there is no other.
    listeners: Vec<Listener>,
    default_asked: bool,
    per_listener: bool,
    guard: ListenerGuard,
    log: LogTypes,
    tls_versions: Vec<u8>,
    crl: Option<String>,
    /// Of these the last is the one that lines of bridges are of.
    connections: Vec<BridgeBlock>,
    secrets: Vec<(PathBuf, String)>,
    persistence: Option<bool>,
    max_packet_size: Option<u64>,
}

#[derive(Default)]
struct LogTypes {
    named: bool,
    level: u8,
    nowhere: bool,
}

/// Levels from `off` on, as `log_type` adds them up.
const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

impl OptionReader {
    fn note(&mut self, line: &OptionLine, text: &str) {
        let text = format!("{}: {text}", line.text());
        self.told.push(Remark { place: line.place(), text, lost: false });
    }

    fn lost(&mut self, line: &OptionLine, text: &str) {
        let text = format!("{}: {text}", line.text());
        self.told.push(Remark { place: line.place(), text, lost: true });
    }

    fn listener(&mut self) -> &mut Listener {
        if self.listeners.is_empty() {
            self.listeners.push(Listener {
                port: 1883,
                place: "the default listener".to_owned(),
                ..Listener::default()
            });
        }
        let last = self.listeners.len() - 1;
        // What comes before the first `listener` is about the default one.
        self.default_asked |= last == 0;
        &mut self.listeners[last]
    }

    fn guard(&mut self) -> &mut ListenerGuard {
        if self.per_listener { &mut self.listener().guard } else { &mut self.guard }
    }

    /// Copies a number, a size or a truth value to a key of ours.
    fn copy(&mut self, line: &OptionLine, section: &'static str, key: &'static str, value: String) {
        self.draft.set(section, key, value, &line.text());
    }

    fn line(&mut self, line: &OptionLine) {
        let key = line.key.as_str();
        if key == "connection" {
            let (place, name) = (line.place(), line.value.clone());
            self.connections.push(BridgeBlock { place, name, lines: Vec::new() });
            return;
        }
        if key.starts_with("bridge_") || OF_BRIDGES.contains(&key) {
            match self.connections.last_mut() {
                Some(connection) => {
                    connection.lines.push((line.place(), line.key.clone(), line.value.clone()))
                }
                None => self.lost(line, "there is no connection that it could be of"),
            }
            return;
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
        self.lost(line, "not an option that is known here");
    }

    fn flag(&mut self, line: &OptionLine) -> bool {
        match line.value.to_lowercase().as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            _ => {
                self.lost(line, "neither true nor false; taken for false");
                false
            }
        }
    }

    fn number(&mut self, line: &OptionLine) -> Option<u64> {
        let number = line.value.parse();
        if number.is_err() {
            self.lost(line, "not a number from 0");
        }
        number.ok()
    }

    fn of_listener(&mut self, line: &OptionLine) -> bool {
        let text = (!line.value.is_empty()).then(|| line.value.clone());
        match line.key.as_str() {
            "listener" => self.new_listener(line),
            "port" => match self.number(line).and_then(|port| u16::try_from(port).ok()) {
                Some(port) => self.listener().port = port,
                None => self.lost(line, "not a port"),
            },
            "bind_address" => self.listener().host = text,
            "socket_domain" => match line.value.as_str() {
                "ipv6" => self.listener().ipv6_only = true,
                _ => self.note(line, "a listener without an address is on all addresses of IPv4"),
            },
            "protocol" => match line.value.as_str() {
                "mqtt" => self.listener().websockets = false,
                "websockets" => {
                    self.listener().websockets = true;
                    self.note(
                        line,
                        "clients must ask for the path /mqtt, or for the one that you set as path",
                    );
                }
                other => {
                    let problem = format!("protocol {other} is not spoken here");
                    self.listener().blocked.push(problem);
                }
            },
            "max_connections" => match line.value.parse::<i64>() {
                Ok(count) => self.listener().max_connections = u64::try_from(count).ok(),
                Err(_) => self.lost(line, "not a number"),
            },
            "certfile" => self.listener().certfile = text,
            "keyfile" => self.listener().keyfile = text,
            "cafile" => self.listener().cafile = text,
            "require_certificate" => self.listener().require_certificate = self.flag(line),
            "use_identity_as_username" => self.listener().identity_as_username = self.flag(line),
            "use_subject_as_username" => {
                if self.flag(line) {
                    let problem = "use_subject_as_username: a certificate's whole subject is no user name here; \
                                   auth.certificate.username makes one of its parts, like {cn}";
                    self.listener().blocked.push(problem.to_owned());
                }
            }
            "use_username_as_clientid" => {
                if self.flag(line) {
                    let problem = "use_username_as_clientid: the client id is the client's; auth.certificate.client_id and \
                                   auth.jwt.client_id tie it to who connects";
                    self.listener().blocked.push(problem.to_owned());
                }
            }
            "psk_hint" => {
                let problem =
                    "psk_hint: there are no pre-shared keys here; give devices certificates or passwords";
                self.listener().blocked.push(problem.to_owned());
            }
            "mount_point" => {
                let problem = format!(
                    "mount_point {}: topics are the same on every listener; let clients use the whole topic, and keep \
                     them apart with rules",
                    line.value
                );
                self.listener().blocked.push(problem);
            }
            "tls_keyform" => match line.value.as_str() {
                "pem" => self.note(line, "keys are PEM files"),
                _ => self.lost(line, "keys are PEM files"),
            },
            "tls_version" => match line.value.as_str() {
                "tlsv1.3" => self.tls_versions.push(3),
                "tlsv1.2" => self.tls_versions.push(2),
                _ => self.note(line, "the oldest version here is TLS 1.2"),
            },
            "crlfile" => match (&self.crl, text) {
                (Some(crl), Some(other)) if *crl != other => {
                    self.lost(line, "there is one tls.crl for all listeners: put both lists into one file");
                }
                (_, Some(crl)) => {
                    self.draft.set("tls", "crl", quoted(&crl), &line.text());
                    self.crl = Some(crl);
                }
                _ => {}
            },
            "websockets_origin" => self.listener().origins.extend(text),
            "enable_proxy_protocol" => self.listener().proxy_protocol = line.value != "0",
            "proxy_protocol_v2_require_tls" => {
                if self.flag(line) {
                    self.lost(
                        line,
                        "what the proxy says about TLS is not looked at: let it pass on TLS only",
                    );
                }
            }
            _ => return false,
        }
        true
    }

    fn new_listener(&mut self, line: &OptionLine) {
        let asked = self.default_asked;
        self.listener();
        self.default_asked = asked;
        let mut words = line.value.splitn(2, char::is_whitespace);
        let port = words.next().unwrap_or_default().parse::<u16>();
        let host = words.next().map(|host| host.trim().to_owned());
        let mut listener =
            Listener { place: format!("{}: {}", line.place(), line.text()), ..Listener::default() };
        match port {
            Ok(0) => listener.unix = host,
            Ok(port) => (listener.port, listener.host) = (port, host),
            Err(_) => listener.blocked.push("not a port".to_owned()),
        }
        self.listeners.push(listener);
    }

    fn of_guard(&mut self, line: &OptionLine) -> bool {
        let text = (!line.value.is_empty()).then(|| line.value.clone());
        match line.key.as_str() {
            "per_listener_settings" => self.per_listener = self.flag(line),
            "allow_anonymous" | "listener_allow_anonymous" => {
                let allowed = self.flag(line);
                match line.key.starts_with("listener_") {
                    true => self.listener().guard.allow_anonymous = Some(allowed),
                    false => self.guard().allow_anonymous = Some(allowed),
                }
            }
            "listener_auto_id_prefix" => {
                self.note(line, "client ids that the gateway makes have a form of their own")
            }
            "password_file" => self.guard().password_file = text,
            "acl_file" => self.guard().acl_file = text,
            "auth_plugin" | "plugin" | "global_plugin" | "plugin_load" | "plugin_use" => {
                let plugin = line.value.clone();
                if !["persist_sqlite", "sparkplug_aware"].iter().any(|known| plugin.contains(known)) {
                    match line.key == "global_plugin" {
                        true => self.guard.plugin = Some(plugin),
                        false => self.guard().plugin = Some(plugin),
                    }
                }
                self.lost(line, "plugins of Mosquitto cannot be loaded; docs/guides/from-mosquitto.md says what there is instead");
            }
            key if key.starts_with("auth_opt_") || key.starts_with("plugin_opt_") => {
                self.lost(line, "of a plugin that is not loaded");
            }
            "allow_zero_length_clientid" => {
                if !self.flag(line) {
                    self.lost(line, "a client without a client id gets one, as MQTT asks");
                }
            }
            _ => return false,
        }
        true
    }

    fn of_limits(&mut self, line: &OptionLine) -> bool {
        let limit = |key| ("limits", key);
        let (section, key) = match line.key.as_str() {
            "max_inflight_messages" => limit("max_inflight"),
            "max_keepalive" => limit("keep_alive_max"),
            "global_max_connections" => limit("max_connections"),
            "memory_limit" => limit("memory_budget"),
            "max_queued_messages" => limit("offline_messages"),
            "max_queued_bytes" => limit("offline_bytes"),
            "message_size_limit" | "max_packet_size" => limit("max_packet_size"),
            "packet_max_connect" => limit("max_connect_size"),
            "max_qos" => limit("max_qos"),
            "max_topic_alias" => limit("topic_alias_maximum"),
            "persistent_client_expiration" => {
                match expiration(&line.value) {
                    Some(seconds) => self.copy(line, "limits", "session_expiry_max", seconds.to_string()),
                    None => self.lost(line, "not a number with h, d, w, m or y"),
                }
                return true;
            }
            "queue_qos0_messages" => {
                let on = self.flag(line);
                self.copy(line, "limits", "offline_qos0", on.to_string());
                return true;
            }
            "retain_available" => {
                let on = self.flag(line);
                self.copy(line, "limits", "retain_available", on.to_string());
                return true;
            }
            _ => return false,
        };
        // Some of them are -1 for no limit.
        if line.value.starts_with('-') {
            self.note(line, "no limit there; the default of the gateway is kept");
            return true;
        }
        let Some(number) = self.number(line) else { return true };
        match (line.key.as_str(), number) {
            ("max_inflight_messages", 0) => self.copy(line, section, key, u16::MAX.to_string()),
            ("max_inflight_messages", number) => {
                self.copy(line, section, key, number.min(u16::MAX.into()).to_string());
            }
            ("max_keepalive", 0) => self.note(line, "no limit, as by default here"),
            ("max_keepalive", number) => {
                self.copy(line, section, key, number.min(u16::MAX.into()).to_string());
                self.note(line, "a client of MQTT 3.1.1 that asks for more is not refused but let in");
            }
            (_, 0) if key != "max_qos" && key != "topic_alias_maximum" => self.note(
                line,
                "no limit there; here every queue and packet has one, and the default of the gateway is kept: see [limits]",
            ),
            ("message_size_limit", number) if self.max_packet_size.is_none() => {
                // The limit there is for the payload, here for the packet: room for a topic and properties.
                self.packet_size(line, number.saturating_add(8192));
                self.note(line, "a larger packet closes its connection here; there it was dropped");
            }
            ("message_size_limit", _) => self.note(line, "max_packet_size has been set"),
            ("max_packet_size", number) => self.packet_size(line, number),
            ("max_queued_messages", number) => {
                self.copy(line, section, key, number.to_string());
                self.copy(line, section, "mailbox_messages", number.to_string());
            }
            ("max_queued_bytes", number) => {
                self.copy(line, section, key, number.to_string());
                self.copy(line, section, "mailbox_bytes", number.to_string());
            }
            ("memory_limit", number) => {
                self.copy(line, section, key, number.max(64 << 20).to_string());
                self.note(line, "here it is for what peers make the gateway hold, and at least 64 MiB");
            }
            ("max_qos" | "max_topic_alias", number) => {
                let text = line.text();
                self.listener().limits.insert(key, (number, text));
            }
            (_, number) => self.copy(line, section, key, number.to_string()),
        }
        true
    }

    fn packet_size(&mut self, line: &OptionLine, bytes: u64) {
        // MQTT has no larger packets.
        let bytes = bytes.min(256 << 20);
        self.max_packet_size = Some(bytes);
        self.copy(line, "limits", "max_packet_size", bytes.to_string());
    }

    fn of_the_rest(&mut self, line: &OptionLine) -> bool {
        match line.key.as_str() {
            "persistence" => self.persistence = Some(self.flag(line)),
            "persistence_location" => self.note(
                line,
                "data_dir is the gateway's own; sessions and retained messages of mosquitto.db do not come along: \
                 docs/guides/from-mosquitto.md says how retained messages do",
            ),
            "sys_interval" => match self.number(line) {
                Some(0) => self.copy(line, "sys", "enabled", "false".to_owned()),
                Some(seconds) => self.copy(line, "sys", "interval", quoted(&format!("{seconds}s"))),
                None => {}
            },
            "log_dest" => match line.value.split_whitespace().next().unwrap_or_default() {
                "none" => self.log.nowhere = true,
                "stderr" => {}
                _ => self.note(line, "the log is on standard error: systemd or the container keeps it"),
            },
            "log_type" => {
                let level = match line.value.as_str() {
                    "none" => 0,
                    "error" => 1,
                    "warning" => 2,
                    "notice" | "information" | "subscribe" | "unsubscribe" | "websockets" => 3,
                    "debug" | "all" => 4,
                    _ => {
                        self.lost(line, "not a kind of line that is known");
                        return true;
                    }
                };
                self.log.named = true;
                self.log.level = self.log.level.max(level);
            }
            "include_dir" => self.note(line, "only the main file includes others, as with Mosquitto"),
            _ => return false,
        }
        true
    }

    /// Whether there is a bridge.
    fn bridges(&mut self, rules_file: &Path) -> bool {
        for connection in std::mem::take(&mut self.connections) {
            let tables = connection.tables(rules_file, &mut self.told);
            if !tables.text.is_empty() {
                self.draft.table(tables.text);
                self.secrets.extend(tables.secrets);
            }
        }
        self.draft.has_tables()
    }

    fn finish(mut self, source: String, rules_file: &Path) -> Imported {
        let opened = self.open_listeners();
        let listeners: Vec<&Listener> = opened.iter().collect();
        let secured = listeners
            .iter()
            .find_map(|listener| Some((listener.certfile.as_ref()?, listener.keyfile.as_ref()?)));
        self.draft.set("", "addr", quoted(""), "all listeners are named below");
        match secured {
            Some((cert, key)) => {
                self.draft.set(
                    "",
                    "cert",
                    quoted(cert),
                    "gRPC shows the certificate of the first TLS listener",
                );
                self.draft.set("", "key", quoted(key), "");
            }
            None => self.draft.set(
                "",
                "non_tls",
                "true".to_owned(),
                "no certificate: gRPC on this machine is plaintext too",
            ),
        }
        if listeners.is_empty() {
            let text = "no listener could be carried over: the gateway listens on this machine only";
            self.told.push(Remark { place: String::new(), text: text.to_owned(), lost: true });
            self.draft.set("", "addr", quoted("127.0.0.1:1883"), text);
            self.draft.set("", "non_tls", "true".to_owned(), "");
        }
        self.backends(&listeners);
        self.draft.set("", "data_dir", quoted("/var/lib/mqtt-server"), "");
        self.passwords(&listeners);
        let rules = rules::of_listeners(&listeners, &mut self.told);
        if rules.is_some() {
            let path = quoted(&rules_file.display().to_string());
            self.draft.set("authorization", "rules", path, "acl_file");
            self.unproved_names(&listeners);
        }
        if self.draft.has("tls", "crl") && !listeners.iter().any(|listener| listener.asks_for_certificates())
        {
            self.draft.set("tls", "crl", quoted(""), "no listener asks for certificates");
        }
        if let Some(version) = self.tls_versions.iter().min() {
            let text = format!("1.{version}");
            self.draft.set("tls", "min_version", quoted(&text), "tls_version");
        }
        self.limits(&listeners);
        let bridges = self.bridges(rules_file);
        self.persist(bridges);
        if self.log.nowhere || self.log.named {
            let level = if self.log.nowhere { 0 } else { self.log.level };
            self.draft.set("log", "level", quoted(LEVELS[usize::from(level)]), "log_type, log_dest");
        }
        self.draft.set(
            "commands",
            "enabled",
            "false".to_owned(),
            "with commands the gateway answers what begins with cmd/; with Mosquitto that is a topic like others",
        );
        Imported { config: self.draft.written(&source), rules, secrets: self.secrets, told: self.told }
    }

    /// Writes those listeners that let in nobody else than before, and the others as comments.
    fn open_listeners(&mut self) -> Vec<Listener> {
        let all = std::mem::take(&mut self.listeners);
        let several = all.len() > 1;
        let mut all = all.into_iter();
        // Without any, Mosquitto listens on this machine and lets everybody in.
        let local = !several && !self.default_asked;
        let default = all.next().unwrap_or_else(|| Listener { port: 1883, ..Listener::default() });
        let mut found: Vec<Listener> = Vec::new();
        if local {
            let mut default =
                Listener { place: "no listener is named: on this machine only".to_owned(), ..default };
            default.host = Some("127.0.0.1".to_owned());
            found.push(default);
        } else if self.default_asked {
            found.push(default);
        }
        found.extend(all);
        let mut opened = Vec::new();
        let mut first_passwords: Option<String> = None;
        for mut listener in found {
            self.guard_of(&mut listener, local);
            match (&first_passwords, &listener.guard.password_file) {
                (Some(first), Some(other)) if first != other => {
                    let problem = format!(
                        "there is one password file for all listeners: put the users of {other} into {first}"
                    );
                    listener.blocked.push(problem);
                }
                (None, Some(file)) => first_passwords = Some(file.clone()),
                _ => {}
            }
            match listener.make() {
                Made::Table(text) => {
                    if !listener.ipv6_only && listener.host.is_none() && listener.unix.is_none() {
                        let text = format!(
                            "on all addresses of IPv4; for IPv6 add one like it with address = \"[::]:{}\"",
                            listener.port
                        );
                        self.told.push(Remark { place: listener.place.clone(), text, lost: false });
                    }
                    if listener.cafile.is_some() && !listener.asks_for_certificates() {
                        let text = "cafile: of no use, since require_certificate is not set";
                        self.told.push(Remark {
                            place: listener.place.clone(),
                            text: text.to_owned(),
                            lost: false,
                        });
                    }
                    self.draft.listener(text);
                    opened.push(listener);
                }
                Made::Blocked(problems) => {
                    let place = listener.place.clone();
                    self.draft.listener(format!("# Not opened: {place}: {}\n", problems.join("; ")));
                    for text in problems {
                        let text = format!("the listener is not opened: {text}");
                        self.told.push(Remark { place: place.clone(), text, lost: true });
                    }
                }
            }
        }
        opened
    }

    fn guard_of(&self, listener: &mut Listener, local: bool) {
        if !self.per_listener {
            let own = listener.guard.allow_anonymous;
            listener.guard = self.guard.clone();
            listener.guard.allow_anonymous = own.or(self.guard.allow_anonymous);
        } else if listener.guard.plugin.is_none() {
            listener.guard.plugin.clone_from(&self.guard.plugin);
        }
        listener.guard.allow_anonymous.get_or_insert(local);
    }

    /// Listeners may have the ports of gRPC and metrics.
    fn backends(&mut self, listeners: &[&Listener]) {
        let mut taken: Vec<u16> = listeners.iter().map(|listener| listener.port).collect();
        for (key, usual) in [("grpc_addr", 10000_u16), ("http_addr", 9090)] {
            let free = (usual..).find(|port| !taken.contains(port)).unwrap_or(usual);
            taken.push(free);
            if free != usual {
                self.draft.set(
                    "",
                    key,
                    quoted(&format!("127.0.0.1:{free}")),
                    "a listener has the usual port",
                );
            }
        }
    }

    fn passwords(&mut self, listeners: &[&Listener]) {
        let file = listeners.iter().find_map(|listener| listener.guard.password_file.clone());
        if let Some(file) = file {
            self.draft.set("auth", "password_file", quoted(&file), "password_file");
        }
    }

    /// Mosquitto believes a user name that nobody has checked, and applies its lines of the `acl_file`.
    fn unproved_names(&mut self, listeners: &[&Listener]) {
        for listener in listeners {
            let guard = &listener.guard;
            let proved = guard.password_file.is_some() || listener.identity_as_username;
            if guard.acl_file.is_some() && !proved {
                let text = "nobody proves a user name here, so that the lines of acl_file for users apply to nobody; \
                            Mosquitto believes the name that a client says";
                self.told.push(Remark { place: listener.place.clone(), text: text.to_owned(), lost: true });
            }
        }
    }

    fn limits(&mut self, listeners: &[&Listener]) {
        // Of each listener there, of all here: the largest of what they say, if all of them say it.
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
    }

    fn persist(&mut self, bridges: bool) {
        match self.persistence {
            Some(false) if bridges => {
                let text = "persistence false: bridges keep what waits on the disk, and so the gateway keeps sessions, too";
                self.told.push(Remark { place: String::new(), text: text.to_owned(), lost: false });
            }
            Some(true) => self.draft.set("store", "enabled", "true".to_owned(), "persistence true"),
            Some(false) => {
                self.draft.set("store", "enabled", "false".to_owned(), "persistence false");
                self.draft.set("groups", "enabled", "false".to_owned(), "they need the store");
            }
            None => self.told.push(Remark {
                place: String::new(),
                text: "persistence is not set, so that Mosquitto forgets sessions and retained messages when it ends; here \
                       they are kept (store.enabled = false forgets them too)"
                    .to_owned(),
                lost: false,
            }),
        }
    }
}

/// `2m`, `14d`: seconds, at most what MQTT can say.
fn expiration(text: &str) -> Option<u64> {
    let at = text.len().checked_sub(1)?;
    let (number, unit) = (text.get(..at)?, text.get(at..)?);
    let hours = match unit {
        "h" => 1,
        "d" => 24,
        "w" => 7 * 24,
        "m" => 30 * 24,
        "y" => 365 * 24,
        _ => return None,
    };
    let number: u64 = number.trim().parse().ok()?;
    Some(number.saturating_mul(hours * 3600).min(u64::from(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The options of mosquitto.conf(5) of 2.0 and 2.1, with a value that says something.
    const OPTIONS: &str = "\
        accept_protocol_versions 5|acl_file acl|allow_anonymous false|allow_duplicate_messages true|\
        allow_zero_length_clientid false|auth_opt_x y|auth_plugin p|auth_plugin_deny_special_chars true|auto_id_prefix a|\
        autosave_interval 1|autosave_on_changes true|bind_interface eth0|capath c|certfile c|keyfile k|cafile c|\
        check_retain_source true|ciphers c|ciphers_tls1.3 c|clientid_prefixes c|connection_messages true|crlfile c|dhparamfile d|\
        disable_client_cert_date_checks true|enable_control_api true|enable_proxy_protocol 2|global_max_clients 5|\
        global_max_connections 5|global_plugin p|http_dir d|include_dir d|listener 1884|listener_allow_anonymous false|\
        listener_auto_id_prefix a|log_dest syslog|log_facility 1|log_timestamp true|log_timestamp_format f|log_type all|\
        max_connections 4|max_inflight_bytes 1|max_inflight_messages 1|max_keepalive 1|max_packet_size 2000|max_qos 1|\
        max_queued_bytes 2000000|max_queued_messages 1|max_topic_alias 1|max_topic_alias_broker 1|memory_limit 90000000|\
        message_size_limit 1|mount_point m|packet_buffer_size 1|packet_max_auth 1|packet_max_connect 1|packet_max_simple 1|\
        packet_max_sub 1|packet_max_un 1|password_file p|per_listener_settings true|persistence true|persistence_file f|\
        persistence_location l|persistent_client_expiration 1d|pid_file p|plugin p|plugin_load p p|plugin_opt_x y|plugin_use p|\
        protocol websockets|proxy_protocol_v2_require_tls true|psk_file p|psk_hint h|queue_qos0_messages true|\
        require_certificate true|retain_available false|retain_expiry_interval 1|retry_interval 1|set_tcp_nodelay true|\
        socket_domain ipv6|store_clean_interval 1|sys_interval 0|tls_engine e|tls_engine_kpass_sha1 e|tls_keyform engine|\
        tls_version tlsv1.3|upgrade_outgoing_qos true|use_identity_as_username true|use_subject_as_username true|\
        use_username_as_clientid true|user u|websockets_headers_size 1|websockets_log_level 1|websockets_origin https://a.example|\
        address b|addresses b|bridge_alpn a|bridge_attempt_unsubscribe true|bridge_bind_address a|bridge_cafile c|\
        bridge_capath c|bridge_certfile c|bridge_ciphers c|bridge_ciphers_tls1.3 c|bridge_identity i|bridge_insecure true|\
        bridge_keyfile k|bridge_max_packet_size 1|bridge_max_topic_alias 1|bridge_outgoing_retain false|\
        bridge_protocol_version mqttv50|bridge_psk p|bridge_receive_maximum 1|bridge_reload_type immediate|\
        bridge_require_ocsp true|bridge_session_expiry_interval 1|bridge_tcp_keepalive 1 1 1|bridge_tcp_user_timeout 1|\
        bridge_tls_use_os_certs true|bridge_tls_version tlsv1.2|cleansession true|clientid c|connection c|idle_timeout 1|\
        keepalive_interval 1|local_cleansession true|local_clientid c|local_password p|local_username u|notification_topic t|\
        notifications true|notifications_local_only true|password p|remote_clientid c|remote_password p|remote_username u|\
        restart_timeout 1|round_robin true|start_type lazy|threshold 1|topic t out|try_private true|username u";

    fn imported(texts: &[&str]) -> (String, Vec<String>) {
        let lines = texts.iter().enumerate().map(|(at, text)| {
            let (key, value) = text.split_once(' ').unwrap_or((text, ""));
            OptionLine {
                file: PathBuf::from("m.conf"),
                number: at + 1,
                key: key.to_owned(),
                value: value.to_owned(),
            }
        });
        let imported = convert(&lines.collect::<Vec<_>>(), Path::new("rules.toml"));
        (imported.config, imported.told.into_iter().map(|told| told.text).collect())
    }

    #[test]
    fn an_option_that_is_neither_carried_over_nor_told_is_found() {
        let before =
            ["listener 1883", "allow_anonymous true", "connection other", "address a", "topic t out"];
        let without = imported(&before);
        for option in OPTIONS.split('|') {
            let with = imported(&[&before[..], &[option]].concat());
            assert!(with != without, "{option} is passed over in silence");
            assert!(!with.1.iter().any(|text| text.contains("not an option")), "{option}: {:?}", with.1);
        }
        assert!(imported(&["nonsense 1"]).1[0].contains("not an option"));
    }

    #[test]
    fn a_guard_that_is_lost_leaves_its_listener_closed() {
        let open = ["listener 1883", "allow_anonymous true"];
        assert!(imported(&open).0.contains("0.0.0.0:1883"));
        for guard in [
            "plugin dynsec.so",
            "mount_point a/",
            "psk_hint h",
            "use_username_as_clientid true",
            "require_certificate true",
            "use_subject_as_username true",
            "use_identity_as_username true",
            "allow_anonymous false",
            "certfile without-key",
        ] {
            let (config, told) = imported(&[&open[..], &[guard]].concat());
            assert!(
                !config.contains("[[listeners]]") && config.contains("# Not opened"),
                "{guard}: {config}"
            );
            assert!(config.contains("addr = \"127.0.0.1:1883\""), "{guard}: {config}");
            assert!(told.iter().any(|text| text.contains("this machine only")), "{guard}: {told:?}");
        }
    }

    #[test]
    fn a_connection_is_a_bridge_for_each_way_and_set_of_prefixes() {
        let connection = [
            "connection To the Cloud",
            "address broker.example.com:8883 other.example.com",
            "bridge_cafile ca.crt",
            "remote_username site",
            "remote_clientid site-1",
            "remote_password secret",
            "topic a/# out 1",
            "topic b/# out 1",
            "topic c/# out 0 here/ there/",
            "topic d/# in 1",
            "topic e/# in 1 home/ site/",
            "topic f/# in 1 home/ site/",
        ];
        let (config, told) = imported(&connection);
        assert!(!config.contains("secret") && !told.iter().any(|text| text.contains("secret")), "{told:?}");
        for row in [
            "[bridges.to_the_cloud-1]\ntopics = [\"a/#\", \"b/#\"]",
            "[bridges.to_the_cloud-2]\ntopics = [\"here/c/#\"]",
            "url = \"mqtts://broker.example.com:8883\"\nlevel = \"3.1.1\"\nclient_id = \"site-1-1\"\nusername = \"site\"",
            "password_file = \"bridge-to_the_cloud.password\"",
            "local_prefix = \"here/\"\nremote_prefix = \"there/\"\nqos = 0",
            "[bridges.to_the_cloud-3]\ndirection = \"in\"\ntopics = [\"d/#\"]",
            "[bridges.to_the_cloud-4]\ndirection = \"in\"\ntopics = [\"site/e/#\", \"site/f/#\"]",
            "local_prefix = \"home/\"\nremote_prefix = \"site/\"\nqos = 1",
        ] {
            assert!(config.contains(row), "{row}: {config}");
        }
        assert!(told.iter().any(|told| told.contains("a bridge has one address")), "{told:?}");
        // It switches TLS on, too: without it the password would go out in clear.
        let capath =
            connection.map(|line| if line.starts_with("bridge_ca") { "bridge_capath certs" } else { line });
        let (config, told) = imported(&capath);
        assert!(config.contains("mqtts://broker") && !config.contains("mqtt://"), "{config}");
        assert!(config.contains("ca = \"/etc/ssl/certs/ca-certificates.crt\""), "{config}");
        assert!(told.iter().any(|told| told.contains("bridge_capath")), "{told:?}");
        let (config, told) = imported(&[&connection[..], &["bridge_insecure true"]].concat());
        assert!(!config.contains("[bridges."), "the other side is not checked: {config}");
        assert!(told.iter().any(|told| told.contains("bridge_insecure")), "{told:?}");
    }

    /// The failure: at level 3.1.1 nothing says that what comes in went out before, so that devices would get it twice.
    #[test]
    fn what_goes_out_and_comes_in_is_bridged_at_a_level_that_knows_it_again() {
        let connection = |topics: &[&str]| {
            imported(
                &[&["connection c", "address 127.0.0.1", "bridge_outgoing_retain false"], topics].concat(),
            )
        };
        for topics in [
            &["topic a/# both 1 here/ there/"][..],
            &["topic a/# out 1 here/ there/", "topic +/b in 1 \"\" there/"],
        ] {
            let (config, told) = connection(topics);
            assert!(!config.contains("level = "), "{config}");
            assert!(config.contains("direction = \"in\"\ntopics = [\"there/"), "{config}");
            assert_eq!(config.matches("retain = false").count(), 1, "that is of what goes out: {config}");
            assert!(told.iter().any(|text| text.contains("speak MQTT 5")), "{told:?}");
        }
        let (config, told) = connection(&["topic a/# out 1", "topic b/# in 1"]);
        assert_eq!(config.matches("level = \"3.1.1\"").count(), 2, "{config}");
        assert!(!told.iter().any(|text| text.contains("speak MQTT 5")), "{told:?}");
    }

    #[test]
    fn a_configuration_without_listeners_is_for_this_machine_only() {
        let (config, _) = imported(&["persistence true"]);
        assert!(
            config.contains("address = \"127.0.0.1:1883\"") && config.contains("\"anonymous\""),
            "{config}"
        );
        let (config, _) = imported(&["port 1884"]);
        assert!(!config.contains("[[listeners]]"), "nobody may connect: {config}");
    }

    #[test]
    fn spans_are_read_as_mosquitto_does() {
        let cases = [
            ("1h", Some(3600)),
            ("2m", Some(5_184_000)),
            ("999999999y", Some(u64::from(u32::MAX))),
            ("d", None),
            ("", None),
            ("1ä", None),
        ];
        for (text, seconds) in cases {
            assert_eq!(expiration(text), seconds, "{text}");
        }
    }
}
