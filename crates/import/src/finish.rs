//! The conclusions from all lines together.

use std::path::Path;

use config::{Binding, TlsVersion};

use super::{
    draft::quoted,
    imported::{ImportedFiles, Remark},
    listeners::{Made, MosquittoListener},
    options::{LEVELS, OptionReader},
    rules,
};

/// Explanation of the listener that stands although none could be carried over.
const NONE_LEFT: &str =
    "no listener could be carried over: there is one on this machine only, and it lets nobody in";

impl OptionReader {
    pub(super) fn finish(mut self, source: &str, rules_file: &Path) -> ImportedFiles {
        let opened = self.open_listeners();
        let listeners: Vec<&MosquittoListener> = opened.iter().collect();
        self.addresses(&listeners);
        self.backends(&listeners);
        self.draft.set("", "data_dir", quoted("/var/lib/mqtt-server"), "");
        let password_file = listeners.iter().find_map(|listener| listener.guard.password_file.clone());
        if let Some(file) = &password_file {
            self.draft.set("auth", "password_file", quoted(file), "password_file");
        }
        let rules = rules::of_listeners(&listeners, &mut self.told);
        if rules.is_some() {
            let path = quoted(&rules_file.display().to_string());
            self.draft.set("authorization", "rules", path, "acl_file");
            self.unproved_names(&listeners);
        }
        self.tls(&listeners);
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
        ImportedFiles {
            draft: self.draft,
            source: source.to_owned(),
            rules,
            password_file: password_file.map(Into::into),
            secrets: self.secrets,
            told: self.told,
        }
    }

    fn addresses(&mut self, listeners: &[&MosquittoListener]) {
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
            self.told.push(Remark { place: String::new(), text: NONE_LEFT.to_owned(), lost: true });
            self.draft.set("", "addr", quoted("127.0.0.1:1883"), NONE_LEFT);
            self.draft.set("", "non_tls", "true".to_owned(), "");
            let why = "without TLS nobody shows a certificate: set it when you open a listener";
            self.draft.set("auth", "order", "[\"certificate\"]".to_owned(), why);
        }
    }

    /// Writes those listeners that let in nobody else than before, and the others as comments.
    fn open_listeners(&mut self) -> Vec<MosquittoListener> {
        // Without any, Mosquitto listens on this machine and lets everybody in.
        let local = self.listeners.len() == 1 && !self.default_asked;
        let mut found = std::mem::take(&mut self.listeners);
        if local {
            "no listener is named: on this machine only".clone_into(&mut found[0].place);
            found[0].host = Some("127.0.0.1".to_owned());
        } else if !self.default_asked {
            let default = found.remove(0);
            self.without_default(&default);
        }
        let mut opened: Vec<MosquittoListener> = Vec::new();
        for mut listener in found {
            self.guard_of(&mut listener, local);
            self.look_at_others(&mut listener, &opened);
            match listener.make() {
                Made::Table(text) => {
                    self.tell_of(&listener);
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

    /// Tells of settings that come before the first listener with `per_listener_settings`, and so are for a default listener that
    /// nothing opens.
    fn without_default(&mut self, default: &MosquittoListener) {
        let guard = &default.guard;
        let set = guard.allow_anonymous.is_some()
            || guard.password_file.is_some()
            || guard.acl_file.is_some()
            || guard.plugin.is_some()
            || !default.blocked.is_empty();
        if set {
            let text = "per_listener_settings: what comes before the first listener is for the default listener at port 1883, \
                        which is not opened: Mosquitto 2.1 does not start so";
            self.told.push(Remark { place: String::new(), text: text.to_owned(), lost: true });
        }
    }

    /// Closes a listener for a setting that is each listener's there and the whole broker's here.
    fn look_at_others(&self, listener: &mut MosquittoListener, opened: &[MosquittoListener]) {
        listener.blocked.extend(self.shut.iter().cloned());
        let first = opened.iter().find_map(|other| other.guard.password_file.as_ref());
        if let (Some(first), Some(other)) = (first, &listener.guard.password_file)
            && first != other
        {
            let problem = format!(
                "there is one password file for all listeners: put the users of {other} into {first}"
            );
            listener.blocked.push(problem);
        }
        let first = opened.iter().filter(|other| other.asks_for_certificates());
        let first = first.filter_map(|other| other.crlfile.as_ref()).next();
        if let (Some(first), Some(other)) = (first, &listener.crlfile)
            && first != other
            && listener.asks_for_certificates()
        {
            let problem =
                format!("there is one tls.crl for all listeners: put the list of {other} into {first}");
            listener.blocked.push(problem);
        }
        let binding = |listener: &MosquittoListener| {
            let address = listener.address().ok()?.parse().ok()?;
            Some(Binding { address, ipv6_only: listener.takes_ipv6_only() })
        };
        let taken = binding(listener)
            .is_some_and(|own| opened.iter().filter_map(binding).any(|other| other.collides(&own)));
        if taken || opened.iter().any(|other| other.name() == listener.name()) {
            listener.blocked.push("another listener has its address".to_owned());
        }
    }

    fn tell_of(&mut self, listener: &MosquittoListener) {
        let mut note = |text: String| {
            self.told.push(Remark { place: listener.place.clone(), text, lost: false });
        };
        if !listener.ipv6_only && listener.host.is_none() && listener.unix.is_none() {
            note(format!(
                "on all addresses of IPv4; for those of IPv6 too write address = \"[::]:{}\"",
                listener.port
            ));
        }
        if listener.cafile.is_some() && !listener.asks_for_certificates() {
            note("cafile: of no use, since require_certificate is not set".to_owned());
        }
        if listener.crlfile.is_some() && !listener.asks_for_certificates() {
            note("crlfile: of no use, since require_certificate is not set".to_owned());
        }
        if listener.tls_version.is_some() && listener.certfile.is_none() {
            note("tls_version: of no use without certfile and keyfile".to_owned());
        }
    }

    fn guard_of(&self, listener: &mut MosquittoListener, local: bool) {
        if !self.per_listener {
            let own = listener.guard.allow_anonymous;
            let plugin = listener.guard.plugin.clone();
            listener.guard = self.guard.clone();
            listener.guard.allow_anonymous = own.or(self.guard.allow_anonymous);
            listener.guard.plugin = plugin.or_else(|| self.guard.plugin.clone());
        } else if listener.guard.plugin.is_none() {
            listener.guard.plugin.clone_from(&self.guard.plugin);
        }
        listener.guard.allow_anonymous.get_or_insert(local);
    }

    /// Listeners may have the ports of gRPC and metrics.
    fn backends(&mut self, listeners: &[&MosquittoListener]) {
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

    /// Of each listener there, of all here: the strictest.
    fn tls(&mut self, listeners: &[&MosquittoListener]) {
        let asking = listeners.iter().filter(|listener| listener.asks_for_certificates());
        if let Some(crl) = asking.clone().find_map(|listener| listener.crlfile.as_ref()) {
            self.draft.set("tls", "crl", quoted(crl), "crlfile");
            if asking.clone().any(|listener| listener.crlfile.is_none()) {
                let text = "crlfile: tls.crl is for all listeners that ask for certificates";
                self.told.push(Remark { place: String::new(), text: text.to_owned(), lost: false });
            }
        }
        let versions = || listeners.iter().filter(|listener| listener.certfile.is_some());
        let Some(oldest) = versions().filter_map(|listener| listener.tls_version).max() else { return };
        let shown = if oldest == TlsVersion::V13 { "1.3" } else { "1.2" };
        self.draft.set("tls", "min_version", quoted(shown), "tls_version");
        if versions().any(|listener| listener.tls_version.unwrap_or_default() != oldest) {
            let text = format!(
                "tls_version: tls.min_version is for all listeners, {shown} as the strictest of them says"
            );
            self.told.push(Remark { place: String::new(), text, lost: true });
        }
    }

    /// Mosquitto believes a user name that nobody has checked, and applies its lines of the `acl_file`.
    fn unproved_names(&mut self, listeners: &[&MosquittoListener]) {
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

    /// Tells whether there is a bridge.
    fn bridges(&mut self, rules_file: &Path) -> bool {
        let mut names = Vec::new();
        for connection in std::mem::take(&mut self.connections) {
            let tables = connection.tables(rules_file, &mut names, &mut self.told);
            if !tables.text.is_empty() {
                self.draft.table(tables.text);
                self.secrets.extend(tables.secrets);
            }
        }
        self.draft.has_tables()
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
