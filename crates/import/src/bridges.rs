//! The option `connection` and its followers: a bridge for each direction and set of prefixes and QoS.

use std::{
    collections::BTreeMap,
    net::Ipv6Addr,
    path::{Path, PathBuf},
};

use access::backends::intersection;
use config::{Config, Flags};
use gateway_core::TopicFilter;

use super::{
    draft::quoted,
    imported::Remark,
    lines::{flag, number, shown, text},
};

/// The places of waiting messages.
const SESSION: &str =
    "what goes out waits in the log of this side, and what comes in for max_age in a session of the other";

/// Options of a bridge that need nothing here, with the reason.
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

/// Options that have no counterpart.
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

/// Options with a table or a key here.
const CARRIED: &[&str] = &[
    "address",
    "addresses",
    "bridge_cafile",
    "bridge_certfile",
    "bridge_identity",
    "bridge_insecure",
    "bridge_keyfile",
    "bridge_outgoing_retain",
    "bridge_protocol_version",
    "bridge_psk",
    "bridge_tls_use_os_certs",
    "clientid",
    "keepalive_interval",
    "password",
    "remote_clientid",
    "remote_password",
    "remote_username",
    "round_robin",
    "start_type",
    "topic",
    "username",
];

/// Options whose value must be read for the bridge to be the same to the other side.
const TEXTS: &[&str] = &[
    "bridge_cafile",
    "bridge_capath",
    "bridge_certfile",
    "bridge_keyfile",
    "clientid",
    "password",
    "remote_clientid",
    "remote_password",
    "remote_username",
    "username",
];

/// Options that say whether there is TLS, and what it proves.
const FLAGS: &[&str] = &["bridge_insecure", "bridge_tls_use_os_certs"];

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
#[derive(Clone)]
struct Topic {
    is_in: bool,
    filter: String,
    qos: u8,
    local: String,
    remote: String,
}

impl Topic {
    /// Returns the filter on the side from which the bridge takes messages.
    fn taken(&self) -> String {
        if self.is_in { self.there() } else { self.here() }
    }

    /// Returns the filter as named on this side.
    fn here(&self) -> String {
        format!("{}{}", self.local, self.filter)
    }

    /// Returns the filter as named on the other side.
    fn there(&self) -> String {
        format!("{}{}", self.remote, self.filter)
    }

    /// Returns whether one bridge does for both topics.
    fn goes_with(&self, other: &Self) -> bool {
        let kind = |topic: &Self| (topic.is_in, topic.qos.min(1), topic.local.clone(), topic.remote.clone());
        kind(self) == kind(other)
    }
}

impl BridgeBlock {
    fn tell(&self, told: &mut Vec<Remark>, place: &str, text: String, lost: bool) {
        told.push(Remark {
            place: place.to_owned(),
            text: format!("connection {}: {text}", shown(&self.name)),
            lost,
        });
    }

    /// The value of the last of these options, whole.
    fn last(&self, keys: &[&str]) -> Option<&str> {
        let found = self.lines.iter().rev().find(|(_, key, _)| keys.contains(&key.as_str()));
        found.and_then(|(_, _, value)| text(value))
    }

    /// The first word of the last of these options.
    fn word(&self, keys: &[&str]) -> Option<&str> {
        self.last(keys)?.split(' ').next()
    }

    fn is(&self, key: &str) -> bool {
        self.word(&[key]).and_then(flag) == Some(true)
    }

    /// The tables; none if the connection cannot be carried over, which is told. `taken` has the names of those before.
    pub(super) fn tables(
        &self,
        beside: &Path,
        taken: &mut Vec<String>,
        told: &mut Vec<Remark>,
    ) -> BridgeTables {
        let topics = self.look_at_lines(told);
        let made = self.refused().map_or_else(|| self.make(topics, beside, taken, told), Err);
        made.unwrap_or_else(|problem| {
            self.tell(told, &self.place, format!("{problem}; it is not carried over"), true);
            BridgeTables::default()
        })
    }

    /// Returns the reason for which the connection cannot be the same to the other side.
    fn refused(&self) -> Option<String> {
        for key in ["bridge_psk", "bridge_identity", "bridge_insecure"] {
            let there = self.lines.iter().any(|(_, known, _)| known == key);
            if there && (key != "bridge_insecure" || self.is(key)) {
                return Some(format!("{key}: a bridge checks the other side's certificate"));
            }
        }
        self.lines.iter().find_map(|(_, key, value)| {
            let unread = match key.as_str() {
                key if TEXTS.contains(&key) => text(value).is_none(),
                key if FLAGS.contains(&key) => flag(value.split(' ').next().unwrap_or_default()).is_none(),
                _ => false,
            };
            unread.then(|| format!("{key}: no value that can be read"))
        })
    }

    fn make(
        &self,
        topics: Vec<Topic>,
        beside: &Path,
        taken: &mut Vec<String>,
        told: &mut Vec<Remark>,
    ) -> Result<BridgeTables, String> {
        let hosts = self.hosts()?;
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
            return Err("no topic".to_owned());
        }
        let mut made = BridgeTables::default();
        let name = self.slug(taken, groups.len());
        let mut password = self.last(&["remote_password", "password"]);
        if password.is_some() && self.last(&["remote_username", "username"]).is_none() {
            self.tell(told, &self.place, "a password without a user name is not sent".to_owned(), true);
            password = None;
        }
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
            made.text.push_str(&self.table(&name, (&hosts[0], level), topic, filters, [id, password]));
        }
        check(&made.text)?;
        Ok(made)
    }

    /// `host:port` of each address.
    fn hosts(&self) -> Result<Vec<String>, String> {
        let named = self.last(&["address", "addresses"]).unwrap_or_default();
        let words = named.split(' ').filter(|word| !word.is_empty());
        let hosts: Vec<String> =
            words.take_while(|word| !word.starts_with('#')).map(host_and_port).collect::<Result<_, _>>()?;
        if hosts.is_empty() { Err("no address".to_owned()) } else { Ok(hosts) }
    }

    /// Returns the level to write. A message that goes out and comes in again is known by a property of MQTT 5: at
    /// 3.1.1, of which `try_private` is an extension, devices would get it twice.
    fn level(&self, topics: &[Topic], told: &mut Vec<Remark>) -> Option<&'static str> {
        if self.word(&["bridge_protocol_version"]) == Some("mqttv50") {
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
            let value = shown(value);
            let word = value.split(' ').next().unwrap_or_default();
            let shown = format!("{key} {}", if key.ends_with("password") { "..." } else { &value });
            let mut tell =
                |text: String, lost: bool| self.tell(told, place, format!("{shown}: {text}"), lost);
            if let Some((_, why)) = NEEDLESS.iter().find(|(name, _)| name == key) {
                tell((*why).to_owned(), false);
            } else if let Some((_, remedy)) = MISSING.iter().find(|(name, _)| name == key) {
                tell((*remedy).to_owned(), true);
            } else if key == "start_type" && word != "automatic" || key == "round_robin" && self.is(key) {
                tell("a bridge connects at the start and stays connected".to_owned(), true);
            } else if key == "bridge_protocol_version" && word == "mqttv31" {
                tell("3.1.1 is the oldest that a bridge speaks".to_owned(), false);
            } else if key == "topic" {
                match topic(&value) {
                    Err(problem) => tell(problem.to_owned(), true),
                    Ok(ways) => {
                        if ways.iter().any(|topic| topic.qos == 2) {
                            tell(
                                "a bridge has QoS 0 and 1; after a failure a message may come twice"
                                    .to_owned(),
                                false,
                            );
                        }
                        topics.extend(ways);
                    }
                }
            } else if !CARRIED.contains(&key.as_str()) {
                tell("not an option of a connection that is known here".to_owned(), true);
            }
        }
        topics
    }

    /// The name as one of ours that no other table has, nor one of its several.
    fn slug(&self, taken: &mut Vec<String>, tables: usize) -> String {
        let known = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '_' };
        let plain: String = self.name.to_lowercase().chars().map(known).take(40).collect();
        let names = |name: &str| {
            let numbered: Vec<String> = (1..=tables).map(|number| format!("{name}-{number}")).collect();
            [numbered, vec![name.to_owned()]].concat()
        };
        let numbered = (2..).map(|number| format!("{plain}_{number}"));
        let free = std::iter::once(plain.clone())
            .chain(numbered)
            .find(|name| names(name).iter().all(|name| !taken.contains(name)))
            .unwrap_or(plain);
        taken.extend(names(&free));
        free
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
        let others = self.is("bridge_tls_use_os_certs")
            || self.last(&["bridge_capath", "bridge_certfile", "bridge_keyfile"]).is_some();
        let ca = self.last(&["bridge_cafile"]).or_else(|| others.then_some(SYSTEM_CA));
        let scheme = if ca.is_some() { "mqtts" } else { "mqtt" };
        rows.push(format!("url = {}", quoted(&format!("{scheme}://{host}"))));
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
        if !topic.is_in && self.word(&["bridge_outgoing_retain"]).and_then(flag) == Some(false) {
            rows.push("retain = false".to_owned());
        }
        if let Some(seconds) = self.word(&["keepalive_interval"]).and_then(number) {
            rows.push(format!("keep_alive = \"{}s\"", seconds.clamp(5, 65_535)));
        }
        rows.join("\n") + "\n"
    }
}

/// Checks tables of bridges; returns their fault in the words of the gateway's start.
fn check(tables: &str) -> Result<(), String> {
    let text = format!("addr = \"127.0.0.1:1883\"\nnon_tls = true\n{tables}");
    Config::load(&Flags::default(), Some(&text), &BTreeMap::new())
        .map(drop)
        .map_err(|problems| problems.to_string())
}

/// `host`, `host:port` or, with the port as Mosquitto asks, an address of IPv6, as the authority of a URL.
fn host_and_port(word: &str) -> Result<String, String> {
    let (host, port) = word.rsplit_once(':').unwrap_or((word, "1883"));
    let port: u16 = port.parse().map_err(|_| format!("address {word}: not a port"))?;
    let plain = |letter: char| letter.is_alphanumeric() || matches!(letter, '.' | '-' | '_');
    match host.parse::<Ipv6Addr>() {
        Ok(ip) => Ok(format!("[{ip}]:{port}")),
        Err(_) if !host.is_empty() && host.chars().all(plain) => Ok(format!("{host}:{port}")),
        Err(_) => Err(format!("address {word}: neither a host nor an IP address")),
    }
}

/// `pattern [out|in|both] [qos] [local-prefix remote-prefix]`, and perhaps a comment after the direction's QoS or a prefix: the
/// topic, for each way that it goes. A pattern with blanks stands in quotation marks.
fn topic(value: &str) -> Result<Vec<Topic>, &'static str> {
    let (filter, rest) = match value.strip_prefix('"').filter(|rest| !rest.starts_with('"')) {
        Some(quoted) => quoted.split_once('"').ok_or("no second quotation mark")?,
        None => value.split_once(' ').unwrap_or((value, "")),
    };
    let mut words = rest.split(' ').filter(|word| !word.is_empty());
    if filter.is_empty() {
        return Err("no topic");
    }
    let ways: &[bool] = match words.next().unwrap_or("out").to_ascii_lowercase().as_str() {
        "out" => &[false],
        "in" => &[true],
        "both" => &[false, true],
        _ => return Err("neither out, in nor both"),
    };
    let mut words = words.take_while(|word| !word.starts_with('#'));
    let qos = words.next().map_or(Some(0), number).and_then(|qos| u8::try_from(qos).ok());
    let qos = qos.filter(|qos| *qos <= 2).ok_or("no such QoS")?;
    let mut prefix = || words.next().filter(|word| *word != "\"\"").unwrap_or_default().to_owned();
    let (local, remote) = (prefix(), prefix());
    let filter = if filter == "\"\"" { "" } else { filter };
    let topic = Topic { is_in: false, filter: filter.to_owned(), qos, local, remote };
    let wild = |prefix: &str| prefix.contains(['+', '#']);
    let fits = |filter: &str| TopicFilter::check(filter).is_ok();
    if wild(&topic.local) || wild(&topic.remote) || !fits(&topic.here()) || !fits(&topic.there()) {
        return Err("not a topic filter");
    }
    Ok(ways.iter().map(|&is_in| Topic { is_in, ..topic.clone() }).collect())
}
