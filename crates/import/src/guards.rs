//! Options that say where a listener is and who gets in.
//!
//! One that cannot be read, or that there is nothing for here, leaves closed what it is about.

use config::TlsVersion;

use super::{lines::OptionLine, listeners::MosquittoListener, options::OptionReader};

/// Plugins of Mosquitto that decide about nobody.
const HARMLESS_PLUGINS: &[&str] = &["mosquitto_persist_sqlite.so", "mosquitto_sparkplug_aware.so"];

impl OptionReader {
    pub(super) fn of_listener(&mut self, line: &OptionLine) -> bool {
        match line.key.as_str() {
            "listener" => self.new_listener(line),
            "port" => self.default_port(line),
            "bind_address" => self.default_address(line),
            "bind_interface" => self.block(line, "listeners are bound to addresses: write the interface's address"),
            "socket_domain" => match line.word() {
                "ipv6" => self.listener().ipv6_only = true,
                "ipv4" => self.note(line, "a listener without an address is on all addresses of IPv4"),
                _ => self.block(line, "neither ipv4 nor ipv6"),
            },
            "protocol" => match line.word() {
                "mqtt" => self.listener().websockets = false,
                "websockets" => {
                    self.listener().websockets = true;
                    self.note(
                        line,
                        "clients must ask for the path /mqtt, or for the one that you set as path",
                    );
                }
                _ => self.block(line, "not spoken here; the pages for operators are at http_addr"),
            },
            "max_connections" => match line.number() {
                Some(count) => self.listener().max_connections = u64::try_from(count).ok(),
                None => self.block(line, "not a number"),
            },
            "certfile" => self.listener_text(line, |listener| &mut listener.certfile),
            "keyfile" => self.listener_text(line, |listener| &mut listener.keyfile),
            "cafile" => self.listener_text(line, |listener| &mut listener.cafile),
            "capath" => {
                self.listener_text(line, |listener| &mut listener.capath);
                self.lost(line, "put the certificates of the directory into one file, and name it as cafile");
            }
            "crlfile" => self.listener_text(line, |listener| &mut listener.crlfile),
            "require_certificate" => self.listener_flag(line, |listener| &mut listener.require_certificate),
            "use_identity_as_username" => {
                self.listener_flag(line, |listener| &mut listener.identity_as_username);
            }
            "use_subject_as_username" => self.block_if(
                line,
                "a certificate's whole subject is no user name here; auth.certificate.username makes one of its parts, like {cn}",
            ),
            "use_username_as_clientid" => self.block_if(
                line,
                "the client id is the client's; auth.certificate.client_id and auth.jwt.client_id tie it to who connects",
            ),
            "psk_hint" => {
                self.block(line, "there are no pre-shared keys here; give devices certificates or passwords");
            }
            "mount_point" => self.block(
                line,
                "topics are the same on every listener; let clients use the whole topic, and keep them apart with rules",
            ),
            "accept_protocol_versions" => self.protocol_versions(line),
            "tls_keyform" => match line.rest() {
                Some("pem") => self.note(line, "keys are PEM files"),
                _ => self.lost(line, "keys are PEM files"),
            },
            "tls_version" => match line.rest() {
                Some("tlsv1.3") => self.listener().tls_version = Some(TlsVersion::V13),
                Some("tlsv1.2") => self.listener().tls_version = Some(TlsVersion::V12),
                Some("tlsv1.1" | "tlsv1") => self.note(line, "the oldest version here is TLS 1.2"),
                _ => self.block(line, "not a version of TLS that is known"),
            },
            "websockets_origin" => self.origin(line),
            "enable_proxy_protocol" => match line.number() {
                Some(1 | 2) => self.listener().proxy_protocol = true,
                _ => self.block(line, "neither 1 nor 2"),
            },
            "proxy_protocol_v2_require_tls" => self.block_if(
                line,
                "what the proxy says about TLS is not looked at: let it pass on TLS only, and open the listener then",
            ),
            _ => return false,
        }
        true
    }

    /// Leaves the listener that an option is about closed.
    fn block(&mut self, line: &OptionLine, why: &str) {
        let problem = format!("{}: {why}", line.text());
        self.listener().blocked.push(problem);
    }

    /// Leaves the listener closed if the option is on, or cannot be read.
    fn block_if(&mut self, line: &OptionLine, why: &str) {
        match line.flag() {
            Some(true) => self.block(line, why),
            Some(false) => {}
            None => self.block(line, "neither true nor false, which are spelt so"),
        }
    }

    fn listener_flag(&mut self, line: &OptionLine, place: fn(&mut MosquittoListener) -> &mut bool) {
        match line.flag() {
            Some(on) => *place(self.listener()) = on,
            None => self.block(line, "neither true nor false, which are spelt so"),
        }
    }

    fn listener_text(&mut self, line: &OptionLine, place: fn(&mut MosquittoListener) -> &mut Option<String>) {
        match line.rest() {
            Some(text) => *place(self.listener()) = Some(text.to_owned()),
            None => self.block(line, "no value that could be a path"),
        }
    }

    fn new_listener(&mut self, line: &OptionLine) {
        let mut words = line.words().take_while(|word| !word.starts_with('#'));
        let port = words.next().and_then(super::lines::number).and_then(|port| u16::try_from(port).ok());
        let host = words.next().and_then(super::lines::text).map(str::to_owned);
        let mut listener = MosquittoListener {
            place: format!("{}: {}", line.place(), line.text()),
            ..MosquittoListener::default()
        };
        match (port, host) {
            (Some(0), Some(path)) => listener.unix = Some(path),
            (Some(0), None) => listener.blocked.push("port 0 is for the path of a Unix socket".to_owned()),
            (Some(port), host) => (listener.port, listener.host) = (port, host),
            (None, _) => listener.blocked.push("not a port".to_owned()),
        }
        self.listeners.push(listener);
        let last = self.listeners.len() - 1;
        self.cursor().go_to(last);
    }

    fn default_port(&mut self, line: &OptionLine) {
        self.back_to_default(line);
        match line.number().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0) {
            Some(port) => self.listeners[0].port = port,
            None => self.block(line, "not a port"),
        }
    }

    fn default_address(&mut self, line: &OptionLine) {
        self.back_to_default(line);
        let host = line.rest().map(str::to_owned);
        if host.is_none() || self.listeners[0].host.as_ref().is_some_and(|known| Some(known) != host.as_ref())
        {
            self.block(line, "not one address");
        }
        self.listeners[0].host = host;
    }

    /// `port` and `bind_address` are about the default listener, wherever they are.
    fn back_to_default(&mut self, line: &OptionLine) {
        let before = self.cursor().go_to(0);
        self.default_asked = true;
        if before != 0 {
            let problem = format!(
                "{}: {}: about the default listener, and what follows it is for Mosquitto 2.0 about another listener than for \
                 2.1: write 'listener PORT ADDRESS' with its options below",
                line.place(),
                line.text()
            );
            self.listeners[before].blocked.push(problem.clone());
            self.listeners[0].blocked.push(problem);
        }
    }

    fn protocol_versions(&mut self, line: &OptionLine) {
        let named: Vec<&str> = line.value.split([',', ' ', '\t']).collect();
        if !["3", "4", "5"].iter().all(|version| named.contains(version)) {
            self.block(line, "every listener takes MQTT 3.1, 3.1.1 and 5");
        }
    }

    /// Mosquitto lets in pages whose origin is this text.
    fn origin(&mut self, line: &OptionLine) {
        let Some(text) = line.rest().map(str::to_lowercase) else {
            return self.block(line, "not an origin");
        };
        let (scheme, host) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), host)) => {
                (Some(scheme), host.strip_suffix('/').unwrap_or(host))
            }
            Some(_) => return self.block(line, "not an origin: write it like https://app.example.com"),
            None => (None, text.as_str()),
        };
        if host.is_empty() || host.contains(['/', '*', ' ', '?', '#', '@', '"', '\\']) {
            return self.block(line, "not an origin: write it like https://app.example.com");
        }
        if scheme.is_none() {
            self.lost(
                line,
                "no browser sends an origin without https:// or http://, so that Mosquitto let in no page; taken for https://",
            );
        }
        let origin = format!("{}://{host}", scheme.unwrap_or("https"));
        self.listener().origins.push(origin);
    }

    pub(super) fn of_guard(&mut self, line: &OptionLine) -> bool {
        match line.key.as_str() {
            "per_listener_settings" => self.per_listener_settings(line),
            "allow_anonymous" => {
                self.guarded = true;
                match line.flag() {
                    Some(allowed) => self.guard().allow_anonymous = Some(allowed),
                    None => self.block_guarded(line, "neither true nor false, which are spelt so"),
                }
            }
            "listener_allow_anonymous" => match line.flag() {
                Some(allowed) => self.listener().guard.allow_anonymous = Some(allowed),
                None => self.block(line, "neither true nor false, which are spelt so"),
            },
            "password_file" | "acl_file" => {
                self.guarded = true;
                match (line.rest().map(str::to_owned), line.key.as_str()) {
                    (None, _) => self.block_guarded(line, "no value that could be a path"),
                    (file, "acl_file") => self.guard().acl_file = file,
                    (file, _) => self.guard().password_file = file,
                }
            }
            "auth_plugin" | "plugin" | "global_plugin" | "plugin_load" | "plugin_use" => self.plugin(line),
            key if key.starts_with("auth_opt_") || key.starts_with("plugin_opt_") => {
                self.lost(line, "of a plugin that is not loaded");
            }
            "allow_zero_length_clientid" => {
                self.guarded = true;
                match line.flag() {
                    Some(true) => {}
                    Some(false) => self.block_guarded(line, "a client without a client id gets one here, as MQTT allows"),
                    None => self.block_guarded(line, "neither true nor false, which are spelt so"),
                }
            }
            "clientid_prefixes" => self.shut(
                line,
                "client ids are not looked at here; tie them to who connects: auth.certificate.client_id, or rules with \
                 clients = [\"PREFIX*\"]",
            ),
            _ => return false,
        }
        true
    }

    /// Leaves closed what a guard is about: a listener with `per_listener_settings`, else all.
    fn block_guarded(&mut self, line: &OptionLine, why: &str) {
        if self.per_listener {
            let problem = format!("{}: {why}", line.text());
            let at = self.cursor().listener.unwrap_or_default();
            self.listeners[at].blocked.push(problem);
        } else {
            self.shut(line, why);
        }
    }

    fn per_listener_settings(&mut self, line: &OptionLine) {
        match line.flag() {
            None => self.shut(line, "neither true nor false, which are spelt so"),
            Some(on) if on == self.per_listener => {}
            Some(true) if !self.guarded => self.per_listener = true,
            Some(true) => self.shut(
                line,
                "Mosquitto takes it only before password_file, acl_file, plugins and allow_anonymous",
            ),
            Some(false) => self.shut(line, "it was true before, and for Mosquitto 2.1 it remains so"),
        }
    }

    fn plugin(&mut self, line: &OptionLine) {
        let plugin = line.value.trim().to_owned();
        let name = plugin.rsplit('/').next().unwrap_or_default();
        if !HARMLESS_PLUGINS.contains(&name) {
            match line.key == "global_plugin" {
                true => self.guard.plugin = Some(super::lines::shown(&plugin)),
                false => self.guard().plugin = Some(super::lines::shown(&plugin)),
            }
        }
        self.guarded = true;
        self.lost(
            line,
            "plugins of Mosquitto cannot be loaded; docs/guides/from-mosquitto.md says what there is instead",
        );
    }
}
