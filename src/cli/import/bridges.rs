//! `connection` and what follows it: a bridge for each direction and set of prefixes and QoS.

use std::path::{Path, PathBuf};

use access::backends::intersection;

use super::{Remark, draft::quoted};

/// Where what waits is.
const SESSION: &str =
    "what goes out waits in the log of this side, and what comes in for max_age in a session of the other";

/// What of a bridge needs nothing here, and why.
const NEEDLESS: &[(&str, &str)] = &[
    ("bridge_attempt_unsubscribe", "a bridge subscribes there to what it brings in, and to nothing else"),
    (
        "bridge_max_packet_size",
        "limits.max_packet_size is for what comes in, and the other broker says what it takes",
    ),
    ("bridge_max_topic_alias", "a bridge uses no topic aliases"),
    ("bridge_receive_maximum", "it is 1,000 for what comes in, and the other broker says how many it takes"),
    ("bridge_reload_type", "a bridge is as the configuration was at the start"),
    ("bridge_session_expiry_interval", SESSION),
    ("bridge_tcp_keepalive", "keep_alive looks after the connection"),
    ("bridge_tcp_user_timeout", "deadline is the time for an acknowledgement"),
    ("bridge_tls_version", "TLS 1.2 or 1.3, as the other side has it"),
    ("cleansession", SESSION),
    ("idle_timeout", "a bridge stays connected"),
    ("local_cleansession", "a bridge is no client of this side"),
    ("local_clientid", "a bridge is no client of this side"),
    ("local_password", "a bridge is no client of this side"),
    ("local_username", "a bridge is no client of this side"),
    ("notification_topic", "metrics say how each bridge is"),
    ("notifications", "metrics say how each bridge is"),
    ("notifications_local_only", "metrics say how each bridge is"),
    ("restart_timeout", "retry_min and retry_max are the pauses, 200ms to 30s unless set"),
    ("threshold", "a bridge stays connected"),
    ("try_private", "what a bridge brings in, none sends out unless include_backends is set"),
];

/// What there is nothing for.
const MISSING: &[(&str, &str)] = &[
    ("bridge_alpn", "no ALPN is sent"),
    ("bridge_bind_address", "the system chooses the address"),
    (
        "bridge_capath",
        "put the certificates of the directory into one file, and name it as ca; unless there is bridge_cafile, ca is the system's",
    ),
    ("bridge_ciphers", "those of TLS 1.2 and 1.3 that are secure"),
    ("bridge_ciphers_tls1.3", "those of TLS 1.3 that are secure"),
    ("bridge_require_ocsp", "there is no OCSP"),
];

/// The system's authorities, where Debian has them.
const SYSTEM_CA: &str = "/etc/ssl/certs/ca-certificates.crt";

/// A line of a connection: place, key, value.
pub(super) type BridgeLine = (String, String, String);

/// A `connection`, line by line.
pub(super) struct BridgeBlock {
    pub(super) place: String,
    pub(super) name: String,
    pub(super) lines: Vec<BridgeLine>,
}

/// The tables of a connection, and the secrets that they name.
#[derive(Default)]
pub(super) struct BridgeTables {
    pub(super) text: String,
    /// File and password.
    pub(super) secrets: Vec<(PathBuf, String)>,
}

/// A `topic`, one way.
struct Topic {
    is_in: bool,
    filter: String,
    qos: u8,
    local: String,
    remote: String,
}

impl Topic {
    /// What the bridge takes, where it takes it.
    fn taken(&self) -> String {
        format!("{}{}", if self.is_in { &self.remote } else { &self.local }, self.filter)
    }

    /// What it is called on the other side.
    fn there(&self) -> String {
        format!("{}{}", self.remote, self.filter)
    }

    /// Whether one bridge does for both.
    fn goes_with(&self, other: &Self) -> bool {
        let kind = |topic: &Self| (topic.is_in, topic.qos.min(1), topic.local.clone(), topic.remote.clone());
        kind(self) == kind(other)
    }
}

impl BridgeBlock {
    fn tell(&self, told: &mut Vec<Remark>, place: &str, text: String, lost: bool) {
        told.push(Remark {
            place: place.to_owned(),
            text: format!("connection {}: {text}", self.name),
            lost,
        });
    }

    fn last(&self, keys: &[&str]) -> Option<&str> {
        let found = self.lines.iter().rev().find(|(_, key, _)| keys.contains(&key.as_str()));
        found.map(|(_, _, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    fn is(&self, key: &str) -> bool {
        self.last(&[key]).is_some_and(|value| matches!(value.to_lowercase().as_str(), "true" | "1"))
    }

    /// The tables; none if the connection cannot be carried over, which is told.
    pub(super) fn tables(&self, beside: &Path, told: &mut Vec<Remark>) -> BridgeTables {
        let topics = self.look_at_lines(told);
        let Some(address) = self.last(&["address", "addresses"]) else {
            self.tell(told, &self.place, "no address; it is not carried over".to_owned(), true);
            return BridgeTables::default();
        };
        for key in ["bridge_psk", "bridge_identity", "bridge_insecure"] {
            let refused = if key == "bridge_insecure" { self.is(key) } else { self.last(&[key]).is_some() };
            if refused {
                let text =
                    format!("{key}: a bridge checks the other side's certificate; it is not carried over");
                self.tell(told, &self.place, text, true);
                return BridgeTables::default();
            }
        }
        let hosts: Vec<&str> = address.split_whitespace().collect();
        if hosts.len() > 1 {
            let text = format!("a bridge has one address: {} alone is carried over", hosts[0]);
            self.tell(told, &self.place, text, true);
        }
        let level = self.level(&topics, told);
        let mut groups: Vec<(Topic, Vec<String>)> = Vec::new();
        for topic in topics {
            let filter = topic.taken();
            match groups.iter_mut().find(|(known, _)| known.goes_with(&topic)) {
                Some((_, filters)) => filters.push(filter),
                None => groups.push((topic, vec![filter])),
            }
        }
        if groups.is_empty() {
            self.tell(told, &self.place, "no topic; it is not carried over".to_owned(), true);
        }
        let mut made = BridgeTables::default();
        let name = self.slug();
        let password = self.last(&["remote_password", "password"]);
        let file = beside.with_file_name(format!("bridge-{name}.password"));
        if let Some(password) = password {
            made.secrets.push((file.clone(), password.to_owned()));
        }
        let several = groups.len() > 1;
        if several && let Some(id) = self.client_id() {
            let text = format!(
                "its topics make {} bridges here, which have client ids of their own: {id}-1 and so on",
                groups.len()
            );
            self.tell(told, &self.place, text, false);
        }
        for (number, (topic, filters)) in groups.iter().enumerate() {
            let name = if several { format!("{name}-{}", number + 1) } else { name.clone() };
            let password = password.map(|_| file.display().to_string());
            // Two with one id would throw each other out.
            let id = self
                .client_id()
                .map(|id| if several { format!("{id}-{}", number + 1) } else { id.to_owned() });
            if number > 0 {
                made.text.push('\n');
            }
            made.text.push_str(&self.table(&name, (hosts[0], level), topic, filters, [id, password]));
        }
        made
    }

    /// What is written as the level. What goes out and comes in again is known by a property of MQTT 5: at 3.1.1, of which
    /// `try_private` is an extension, it would come to devices twice.
    fn level(&self, topics: &[Topic], told: &mut Vec<Remark>) -> Option<&'static str> {
        if self.last(&["bridge_protocol_version"]) == Some("mqttv50") {
            return None;
        }
        let (inward, out): (Vec<_>, Vec<_>) = topics.iter().partition(|topic| topic.is_in);
        let returns =
            |topic: &&Topic| out.iter().any(|other| intersection(&topic.there(), &other.there()).is_some());
        let Some(topic) = inward.into_iter().find(returns) else { return Some("3.1.1") };
        let text = format!(
            "{} goes out and comes in: its bridges speak MQTT 5, which the other broker must speak too, so that nothing goes round",
            topic.there()
        );
        self.tell(told, &self.place, text, false);
        None
    }

    fn look_at_lines(&self, told: &mut Vec<Remark>) -> Vec<Topic> {
        let mut topics = Vec::new();
        for (place, key, value) in &self.lines {
            let shown = format!("{key} {}", if key.ends_with("password") { "..." } else { value });
            if let Some((_, why)) = NEEDLESS.iter().find(|(name, _)| name == key) {
                self.tell(told, place, format!("{shown}: {why}"), false);
            } else if let Some((_, remedy)) = MISSING.iter().find(|(name, _)| name == key) {
                self.tell(told, place, format!("{shown}: {remedy}"), true);
            } else if key == "start_type" && value != "automatic" || key == "round_robin" && self.is(key) {
                self.tell(
                    told,
                    place,
                    format!("{shown}: a bridge connects at the start and stays connected"),
                    true,
                );
            } else if key == "bridge_protocol_version" && value == "mqttv31" {
                self.tell(told, place, format!("{shown}: 3.1.1 is the oldest that a bridge speaks"), false);
            } else if key == "topic" {
                match topic(value) {
                    Err(problem) => self.tell(told, place, format!("{shown}: {problem}"), true),
                    Ok(ways) => {
                        if ways.iter().any(|topic| topic.qos == 2) {
                            let text = format!(
                                "{shown}: a bridge has QoS 0 and 1; after a failure a message may come twice"
                            );
                            self.tell(told, place, text, false);
                        }
                        topics.extend(ways);
                    }
                }
            }
        }
        topics
    }

    /// The name as one of ours.
    fn slug(&self) -> String {
        let known = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '_' };
        self.name.to_lowercase().chars().map(known).take(40).collect()
    }

    fn client_id(&self) -> Option<&str> {
        self.last(&["remote_clientid", "clientid"])
    }

    fn table(
        &self,
        name: &str,
        (host, level): (&str, Option<&str>),
        topic: &Topic,
        filters: &[String],
        [client_id, password]: [Option<String>; 2],
    ) -> String {
        let filters: Vec<String> = filters.iter().map(|filter| quoted(filter)).collect();
        let mut rows = vec![format!("# {}", self.place), format!("[bridges.{name}]")];
        if topic.is_in {
            rows.push("direction = \"in\"".to_owned());
        }
        rows.push(format!("topics = [{}]", filters.join(", ")));
        rows.push(String::new());
        rows.push(format!("[bridges.{name}.mqtt]"));
        // Each of these switches TLS on, and without it the password would be seen on the way.
        let others = self.is("bridge_tls_use_os_certs") || self.last(&["bridge_capath"]).is_some();
        let ca = self.last(&["bridge_cafile"]).or_else(|| others.then_some(SYSTEM_CA));
        let scheme = if ca.is_some() { "mqtts" } else { "mqtt" };
        let port = if host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
            ""
        } else {
            ":1883"
        };
        rows.push(format!("url = {}", quoted(&format!("{scheme}://{host}{port}"))));
        rows.extend(level.map(|level| format!("level = {}", quoted(level))));
        let mut text = |key: &str, value: Option<&str>| {
            rows.extend(
                value.filter(|value| !value.is_empty()).map(|value| format!("{key} = {}", quoted(value))),
            );
        };
        text("client_id", client_id.as_deref());
        text("username", self.last(&["remote_username", "username"]));
        text("password_file", password.as_deref());
        text("ca", ca);
        text("cert", self.last(&["bridge_certfile"]));
        text("key", self.last(&["bridge_keyfile"]));
        text("local_prefix", Some(&topic.local));
        text("remote_prefix", Some(&topic.remote));
        rows.push(format!("qos = {}", topic.qos.min(1)));
        if !topic.is_in
            && self.last(&["bridge_outgoing_retain"]).is_some()
            && !self.is("bridge_outgoing_retain")
        {
            rows.push("retain = false".to_owned());
        }
        let seconds = self.last(&["keepalive_interval"]).and_then(|value| value.parse::<u32>().ok());
        if let Some(seconds) = seconds {
            rows.push(format!("keep_alive = \"{}s\"", seconds.clamp(5, 65_535)));
        }
        rows.join("\n") + "\n"
    }
}

/// `pattern [out|in|both] [qos] [local-prefix remote-prefix]`: the topic, for each way that it goes.
fn topic(value: &str) -> Result<Vec<Topic>, &'static str> {
    let mut words = value.split_whitespace();
    let filter = words.next().ok_or("no topic")?;
    let ways: &[bool] = match words.next().unwrap_or("out") {
        "out" => &[false],
        "in" => &[true],
        "both" => &[false, true],
        _ => return Err("neither out, in nor both"),
    };
    let qos = words.next().map_or(Ok(0), str::parse).ok().filter(|qos| *qos <= 2).ok_or("no such QoS")?;
    let mut prefix = || words.next().filter(|word| *word != "\"\"").unwrap_or_default().to_owned();
    let (local, remote) = (prefix(), prefix());
    let filter = if filter == "\"\"" { "" } else { filter };
    let topic = |&is_in: &bool| Topic {
        is_in,
        filter: filter.to_owned(),
        qos,
        local: local.clone(),
        remote: remote.clone(),
    };
    Ok(ways.iter().map(topic).collect())
}
