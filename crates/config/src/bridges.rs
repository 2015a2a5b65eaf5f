//! `[bridges]`: ways between the gateway and other systems, a table for each.

use std::{path::PathBuf, time::Duration};

use gateway_core::QoS;
use serde::{Deserialize, Serialize};

use super::{
    ByteSize, Config, DatabaseTls, RecordTopic, Span, Template,
    address::optional,
    secret::HIDDEN,
    validate::{Check, filter_is_valid},
};

/// Direction in which messages go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the gateway to the other system.
    #[default]
    Out,
    /// From the other system into the gateway.
    In,
}

/// Treatment of messages when a bridge holds as much as it may.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenFull {
    /// The oldest messages go, and are counted as lost.
    #[default]
    DropOldest,
    /// Matching messages are refused.
    Refuse,
}

/// `[bridges.NAME]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bridge {
    /// Direction.
    pub direction: Direction,
    /// MQTT filters of what it carries, none is `#`; in from Kafka, the names of the topics there.
    pub topics: Vec<String>,
    /// MQTT filters of what it leaves out.
    pub exclude_topics: Vec<String>,
    /// Also what backends publish, and what other bridges bring in.
    pub include_backends: bool,
    /// The lowest QoS that it carries.
    pub min_qos: u8,
    /// Bytes that it keeps on the disk for the other side.
    pub max_bytes: ByteSize,
    /// Time for which it keeps them.
    pub max_age: Span,
    /// Treatment of messages when `max_bytes` is reached.
    pub when_full: WhenFull,
    /// Messages that are sent together.
    pub batch_messages: usize,
    /// Bytes of these; one message is sent whatever it has.
    pub batch_bytes: ByteSize,
    /// Time for which the first of them waits for others.
    pub linger: Span,
    /// Time that the other side has for them.
    pub deadline: Span,
    /// The first pause after a failure; it doubles from there.
    pub retry_min: Span,
    /// The longest.
    pub retry_max: Span,
    /// `[bridges.NAME.kafka]`: the other side is Apache Kafka.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kafka: Option<KafkaBridge>,
    /// `[bridges.NAME.mqtt]`: the other side is a broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mqtt: Option<MqttBridge>,
    /// `[bridges.NAME.webhook]`: the other side is a service that takes POST.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<WebhookBridge>,
}

impl Default for Bridge {
    fn default() -> Self {
        Self {
            direction: Direction::Out,
            topics: Vec::new(),
            exclude_topics: Vec::new(),
            include_backends: false,
            min_qos: 0,
            max_bytes: ByteSize(1 << 30),
            max_age: Span(Duration::from_hours(7 * 24)),
            when_full: WhenFull::DropOldest,
            batch_messages: 500,
            batch_bytes: ByteSize(1 << 20),
            linger: Span(Duration::ZERO),
            deadline: Span(Duration::from_secs(30)),
            retry_min: Span(Duration::from_millis(200)),
            retry_max: Span(Duration::from_secs(30)),
            kafka: None,
            mqtt: None,
            webhook: None,
        }
    }
}

/// The level of MQTT that a bridge speaks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum MqttLevel {
    /// 5.0.
    #[default]
    #[serde(rename = "5")]
    V5,
    /// 3.1.1.
    #[serde(rename = "3.1.1")]
    V3,
}

/// `[bridges.NAME.mqtt]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct MqttBridge {
    /// `mqtt://host:port` or `mqtts://host:port`.
    pub url: String,
    /// The level that is spoken.
    pub level: MqttLevel,
    /// How the bridge calls itself there; empty is `mqtt-server-NAME`.
    #[serde(with = "optional")]
    pub client_id: Option<String>,
    /// User, if the broker asks for one.
    #[serde(with = "optional")]
    pub username: Option<String>,
    /// File with the password.
    #[serde(with = "optional")]
    pub password_file: Option<PathBuf>,
    /// CAs of the broker's certificate, PEM.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// The bridge's certificate, PEM.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
    /// QoS of what is sent, and of the subscription.
    pub qos: u8,
    /// Whether RETAIN goes with the messages.
    pub retain: bool,
    /// What topics here begin with and there do not.
    pub local_prefix: String,
    /// What topics there begin with and here do not.
    pub remote_prefix: String,
    /// How often an idle connection is looked after.
    pub keep_alive: Span,
}

impl Default for MqttBridge {
    fn default() -> Self {
        Self {
            url: String::new(),
            level: MqttLevel::V5,
            client_id: None,
            username: None,
            password_file: None,
            ca: None,
            cert: None,
            key: None,
            qos: 1,
            retain: true,
            local_prefix: String::new(),
            remote_prefix: String::new(),
            keep_alive: Span(Duration::from_secs(30)),
        }
    }
}

impl MqttBridge {
    /// Host, port, and whether there is TLS.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub fn target(&self) -> Result<(String, u16, bool), &'static str> {
        let (scheme, rest) = self.url.split_once("://").ok_or("not a URL")?;
        let (secure, usual) = match scheme {
            "mqtt" => (false, 1883),
            "mqtts" => (true, 8883),
            _ => return Err("not a URL of mqtt or mqtts"),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains('@') {
            return Err("user and password have keys of their own");
        }
        if rest.contains(['/', '?', '#']) {
            return Err("more than a host and a port");
        }
        let (host, port) = match rest.strip_prefix('[').map(|rest| rest.split_once(']')) {
            Some(Some((host, ""))) => (host, None),
            Some(Some((host, port))) => (host, Some(port.strip_prefix(':').ok_or("no port after the ]")?)),
            Some(None) => return Err("no ] after the address"),
            None => rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port))),
        };
        if host.is_empty() {
            return Err("no host in the URL");
        }
        let port = port.map_or(Ok(usual), str::parse).ok().filter(|&port| port > 0);
        Ok((host.to_owned(), port.ok_or("no port after the colon")?, secure))
    }

    /// The CAs, the bridge's certificate and its key.
    pub fn files(&self) -> DatabaseTls {
        DatabaseTls { ca: self.ca.clone(), cert: self.cert.clone(), key: self.key.clone() }
    }

    fn check(&self, section: &str, bridge: &Bridge, check: &mut Check) {
        let key = |name: &str| format!("{section}.{name}");
        match self.target() {
            Ok((_, _, true)) if self.ca.is_none() => check.fail(
                key("ca"),
                "\"\"",
                "mqtts needs the CA of the broker's certificate",
                "name its file, or /etc/ssl/certs/ca-certificates.crt for those that the system trusts",
            ),
            Ok((_, _, true)) => {}
            Ok((_, _, false)) => {
                for (name, file) in [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)] {
                    if let Some(file) = file {
                        let fix = "write mqtts:// in url, or remove it";
                        check.fail(key(name), file.display(), "is for TLS, which is off", fix);
                    }
                }
            }
            Err(problem) => {
                let shown = if self.url.contains('@') { HIDDEN } else { &self.url };
                check.fail(key("url"), shown, problem, "write it like mqtts://broker.example.com:8883");
            }
        }
        check_pair(section, &self.files(), check);
        if self.password_file.is_some() && self.username.is_none() {
            check.fail(key("username"), "\"\"", "there is a password without a user", "name the user");
        }
        if self.qos > 1 {
            check.fail(
                key("qos"),
                self.qos,
                "not 0 or 1",
                "use 1: nothing is lost, and after a crash of either side a message may come twice",
            );
        }
        if !(Duration::from_secs(5)..=Duration::from_secs(65_535)).contains(&self.keep_alive.0) {
            check.fail(key("keep_alive"), self.keep_alive, "not between 5s and 65535s", "use 30s");
        }
        for (name, prefix) in [("local_prefix", &self.local_prefix), ("remote_prefix", &self.remote_prefix)] {
            if prefix.contains(['+', '#', '\0']) {
                check.fail(key(name), prefix, "has a wildcard", "write it as topics begin, like site-1/");
            }
        }
        let (name, prefix) = match bridge.direction {
            Direction::Out => ("local_prefix", &self.local_prefix),
            Direction::In => ("remote_prefix", &self.remote_prefix),
        };
        if !prefix.is_empty() && bridge.topics.is_empty() {
            check.fail(key(name), prefix, "not all topics begin so", "name those that do in topics");
        }
        for topic in bridge.topics.iter().filter(|topic| !topic.starts_with(prefix.as_str())) {
            check.fail(
                key(name),
                prefix,
                format!("{topic} does not begin so"),
                "correct the prefix or topics",
            );
        }
    }
}

/// `[bridges.NAME.webhook]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebhookBridge {
    /// Where batches are posted: `http://…` or `https://…`.
    pub url: String,
    /// CAs of the service's certificate, PEM.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// The bridge's certificate, PEM.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
    /// File with the secret that signs what is posted.
    #[serde(with = "optional")]
    pub secret_file: Option<PathBuf>,
    /// File with a bearer token that is shown.
    #[serde(with = "optional")]
    pub token_file: Option<PathBuf>,
}

impl WebhookBridge {
    /// The CAs, the bridge's certificate and its key.
    pub fn files(&self) -> DatabaseTls {
        DatabaseTls { ca: self.ca.clone(), cert: self.cert.clone(), key: self.key.clone() }
    }

    fn check(&self, section: &str, bridge: &Bridge, check: &mut Check) {
        let rest = self.url.strip_prefix("https://").or_else(|| self.url.strip_prefix("http://"));
        let problem = match rest {
            Some("") | None => Some("not a URL of http or https"),
            Some(rest) if rest.split('/').next().is_some_and(|host| host.contains('@')) => {
                Some("user and password are not for the URL")
            }
            Some(_) if self.url.starts_with("https:") && self.ca.is_none() => {
                check.fail(
                    format!("{section}.ca"),
                    "\"\"",
                    "https needs the CA of the service's certificate",
                    "name its file, or /etc/ssl/certs/ca-certificates.crt for those that the system trusts",
                );
                None
            }
            Some(_) => None,
        };
        if let Some(problem) = problem {
            let shown = if self.url.contains('@') { HIDDEN } else { &self.url };
            check.fail(
                format!("{section}.url"),
                shown,
                problem,
                "write it like https://hooks.example.com/gateway",
            );
        }
        check_pair(section, &self.files(), check);
        if bridge.direction == Direction::In {
            check.fail(
                section.trim_end_matches(".webhook").to_owned() + ".direction",
                "in",
                "a webhook takes messages and has none",
                "use out; to publish over HTTP there is the API",
            );
        }
    }
}

/// Method by which the bridge proves its identity to Kafka.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum SaslMechanism {
    /// The password itself.
    #[serde(rename = "PLAIN")]
    Plain,
    /// SCRAM with SHA-256.
    #[serde(rename = "SCRAM-SHA-256")]
    Sha256,
    /// SCRAM with SHA-512.
    #[default]
    #[serde(rename = "SCRAM-SHA-512")]
    Sha512,
}

/// Compression of messages sent to Kafka.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KafkaCompression {
    /// Not at all.
    #[default]
    None,
    /// LZ4.
    Lz4,
    /// Snappy.
    Snappy,
}

/// Start of a bridge from Kafka that has never been there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KafkaStart {
    /// With what comes from now on.
    #[default]
    Latest,
    /// With all that the topics have.
    Earliest,
}

/// `[bridges.NAME.kafka]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct KafkaBridge {
    /// Brokers of the cluster, as host:port; a few are enough.
    pub brokers: Vec<String>,
    /// The topic in Kafka; only out, as the next two.
    pub topic: Template,
    /// The key of each message; those of one key stay in order.
    pub key: Template,
    /// Compression of messages.
    pub compression: KafkaCompression,
    /// The topic here of what comes in; only in, as the next four.
    pub mqtt_topic: RecordTopic,
    /// The consumer group there.
    #[serde(with = "optional")]
    pub group: Option<String>,
    /// Position at which the group begins.
    pub start: KafkaStart,
    /// QoS of what comes in.
    pub qos: u8,
    /// Whether what comes in is retained.
    pub retain: bool,
    /// Speak TLS.
    pub tls: bool,
    /// CAs of the brokers' certificates, PEM.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// The bridge's certificate, PEM.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(with = "optional")]
    pub cert_key: Option<PathBuf>,
    /// User, if the brokers ask for one (SASL).
    #[serde(with = "optional")]
    pub username: Option<String>,
    /// File with the password.
    #[serde(with = "optional")]
    pub password_file: Option<PathBuf>,
    /// Method by which the password is shown.
    pub mechanism: SaslMechanism,
}

impl Default for KafkaBridge {
    fn default() -> Self {
        let template = |text: &str| text.parse().expect("a template");
        Self {
            brokers: Vec::new(),
            topic: template("mqtt"),
            key: template("{client_id}"),
            compression: KafkaCompression::None,
            mqtt_topic: "kafka/{topic}".parse().expect("a topic"),
            group: None,
            start: KafkaStart::Latest,
            qos: 1,
            retain: false,
            tls: false,
            ca: None,
            cert: None,
            cert_key: None,
            username: None,
            password_file: None,
            mechanism: SaslMechanism::Sha512,
        }
    }
}

impl KafkaBridge {
    /// The CAs, the bridge's certificate and its key.
    pub fn files(&self) -> DatabaseTls {
        DatabaseTls { ca: self.ca.clone(), cert: self.cert.clone(), key: self.cert_key.clone() }
    }

    fn check(&self, section: &str, bridge: &Bridge, check: &mut Check) {
        let key = |name: &str| format!("{section}.{name}");
        if !cfg!(feature = "kafka") {
            check.fail(section, "", "this build has no Kafka", "build with --features kafka");
        }
        self.check_direction(section, bridge, check);
        let good = |broker: &String| {
            let port =
                broker.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
            port.is_some_and(|(host, port)| port > 0 && !host.is_empty() && !host.contains(['/', ',', ' ']))
        };
        if self.brokers.is_empty() {
            check.fail(key("brokers"), "[]", "nobody to connect to", "write it like [\"kafka-1:9092\"]");
        }
        for broker in self.brokers.iter().filter(|broker| !good(broker)) {
            check.fail(key("brokers"), broker, "not host:port", "write it like kafka-1:9092");
        }
        let files = [("ca", &self.ca), ("cert", &self.cert), ("cert_key", &self.cert_key)];
        for (name, file) in files {
            if let Some(file) = file.as_ref().filter(|_| !self.tls) {
                check.fail(key(name), file.display(), "is for TLS, which is off", "set tls = true");
            }
        }
        if self.tls && self.ca.is_none() {
            let fix = "name its file, or /etc/ssl/certs/ca-certificates.crt for those that the system trusts";
            check.fail(key("ca"), "\"\"", "TLS needs the CA of the brokers' certificates", fix);
        }
        if self.cert.is_some() != self.cert_key.is_some() {
            let unset = if self.cert.is_some() { "cert_key" } else { "cert" };
            check.fail(key(unset), "\"\"", "certificate and key go together", "set both, or none");
        }
        if self.username.is_some() != self.password_file.is_some() {
            let unset = if self.username.is_some() { "password_file" } else { "username" };
            check.fail(key(unset), "\"\"", "user and password go together", "set both, or none");
        }
    }

    /// Checks for settings that are for one direction only.
    fn check_direction(&self, section: &str, bridge: &Bridge, check: &mut Check) {
        let key = |name: &str| format!("{section}.{name}");
        let usual = Self::default();
        let is_in = bridge.direction == Direction::In;
        for (name, of_in, set) in [
            ("topic", false, self.topic != usual.topic),
            ("key", false, self.key != usual.key),
            ("compression", false, self.compression != usual.compression),
            ("mqtt_topic", true, self.mqtt_topic != usual.mqtt_topic),
            ("group", true, self.group.is_some()),
            ("start", true, self.start != usual.start),
            ("qos", true, self.qos != usual.qos),
            ("retain", true, self.retain),
        ] {
            if set && of_in != is_in {
                let problem = if of_in { "is for bridges in" } else { "is for bridges out" };
                check.fail(key(name), "", problem, "remove it");
            }
        }
        if !is_in {
            if self.topic.is_empty() {
                check.fail(key("topic"), "\"\"", "no topic", "write it like mqtt, or devices-{client_id}");
            }
            return;
        }
        let topics = section.strip_suffix(".kafka").unwrap_or(section).to_owned() + ".topics";
        if bridge.topics.is_empty() {
            let fix = "name the topics in Kafka, like [\"commands\"]";
            check.fail(topics.as_str(), "[]", "nothing to take from Kafka", fix);
        }
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        for topic in bridge.topics.iter().filter(|topic| !topic.bytes().all(known) || topic.len() > 249) {
            check.fail(topics.as_str(), topic, "no name of a topic in Kafka", "name each topic in full");
        }
        if self.mqtt_topic.is_empty() {
            check.fail(key("mqtt_topic"), "\"\"", "no topic", "write it like kafka/{topic}");
        }
        if self.qos > 2 {
            check.fail(key("qos"), self.qos, "no such QoS", "use 0, 1 or 2");
        }
    }
}

fn check_pair(section: &str, files: &DatabaseTls, check: &mut Check) {
    if files.cert.is_some() != files.key.is_some() {
        let unset = if files.cert.is_some() { "key" } else { "cert" };
        let problem = "certificate and key go together";
        check.fail(format!("{section}.{unset}"), "\"\"", problem, "set both, or none");
    }
}

/// Bridges at once: each has a task, and a group if it leads out.
const MOST_BRIDGES: usize = 100;
/// The longest name: that of its group is a little longer.
const MOST_NAME: usize = 48;
/// Most messages of a batch, which is held in memory.
const MOST_BATCH: usize = 10_000;

impl Bridge {
    /// The lowest QoS that it carries.
    pub fn least_qos(&self) -> QoS {
        QoS::from_bits(self.min_qos).unwrap_or_default()
    }

    fn check(&self, section: &str, check: &mut Check) {
        let key = |name: &str| format!("{section}.{name}");
        let kinds = [self.kafka.is_some(), self.mqtt.is_some(), self.webhook.is_some()];
        if kinds.iter().filter(|&&there| there).count() != 1 {
            check.fail(
                section,
                "",
                "does not say what is on the other side",
                format!(
                    "write one table below it: [{section}.kafka], [{section}.mqtt] or [{section}.webhook]"
                ),
            );
        }
        for (name, filters) in [("topics", &self.topics), ("exclude_topics", &self.exclude_topics)] {
            for filter in filters.iter().filter(|filter| !filter_is_valid(filter)) {
                let fix = "use + as a whole level and # as the last level";
                check.fail(key(name), filter, "not a topic filter", fix);
            }
        }
        if self.min_qos > 2 {
            check.fail(key("min_qos"), self.min_qos, "no such QoS", "use 0, 1 or 2");
        }
        for (name, bytes) in [("max_bytes", self.max_bytes), ("batch_bytes", self.batch_bytes)] {
            check.positive(&key(name), bytes, bytes.0 == 0);
        }
        for (name, time) in [
            ("max_age", self.max_age),
            ("deadline", self.deadline),
            ("retry_min", self.retry_min),
            ("retry_max", self.retry_max),
        ] {
            check.positive(&key(name), time, time.0.is_zero());
        }
        check.positive(&key("batch_messages"), self.batch_messages, self.batch_messages == 0);
        if self.batch_messages > MOST_BATCH {
            let fix = format!("use at most {MOST_BATCH}");
            check.fail(key("batch_messages"), self.batch_messages, "more than works well", fix);
        }
        if self.batch_bytes > self.max_bytes {
            let problem = format!("more than max_bytes ({})", self.max_bytes);
            check.fail(key("batch_bytes"), self.batch_bytes, problem, "make it smaller");
        }
        if self.retry_min > self.retry_max {
            let problem = format!("longer than retry_max ({})", self.retry_max);
            check.fail(key("retry_min"), self.retry_min, problem, "make it shorter");
        }
        // A lingering batch is held by a lease of a minute, after which it would come again.
        for (name, time, longest) in [
            ("deadline", self.deadline, Span(Duration::from_mins(10))),
            ("linger", self.linger, Span(Duration::from_secs(30))),
            ("retry_max", self.retry_max, Span(Duration::from_mins(10))),
        ] {
            if time.0 > longest.0 {
                check.fail(key(name), time, format!("longer than {longest}"), "make it shorter");
            }
        }
        if self.direction == Direction::In {
            for (name, set) in [
                ("exclude_topics", !self.exclude_topics.is_empty()),
                ("include_backends", self.include_backends),
                ("min_qos", self.min_qos != 0),
            ] {
                if set {
                    check.fail(
                        key(name),
                        "",
                        "is for bridges out",
                        "remove it, and say in topics what is wanted",
                    );
                }
            }
        }
        if let Some(kafka) = &self.kafka {
            kafka.check(&key("kafka"), self, check);
        }
        if let Some(mqtt) = &self.mqtt {
            mqtt.check(&key("mqtt"), self, check);
        }
        if let Some(webhook) = &self.webhook {
            webhook.check(&key("webhook"), self, check);
        }
    }
}

impl Config {
    pub(super) fn check_bridges(&self, check: &mut Check) {
        if self.bridges.len() > MOST_BRIDGES {
            let fix = format!("use at most {MOST_BRIDGES}");
            check.fail("bridges", self.bridges.len(), "more than work well", fix);
        }
        for (name, bridge) in &self.bridges {
            let known =
                |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
            if name.is_empty() || name.len() > MOST_NAME || !name.bytes().all(known) {
                check.fail(
                    "bridges",
                    name,
                    "not a name for a bridge",
                    format!("use 1 to {MOST_NAME} of lower-case letters, digits, '-' and '_'"),
                );
                continue;
            }
            let section = format!("bridges.{name}");
            bridge.check(&section, check);
            if bridge.direction == Direction::Out && !self.has_groups() {
                check.fail(
                    section,
                    "out",
                    "keeps what it carries in the log of consumer groups, which is off",
                    "set store.enabled and groups.enabled",
                );
            }
        }
        self.check_loops(check);
    }

    /// Without the properties of version 5 nothing in a message says that it has been here.
    fn check_loops(&self, check: &mut Check) {
        let all: Vec<DirectedBridge<'_>> =
            self.bridges.iter().filter_map(|(name, bridge)| DirectedBridge::of(name, bridge)).collect();
        for (at, one) in all.iter().enumerate() {
            let is_out = one.bridge.direction == Direction::Out;
            let others = all.iter().enumerate().filter(|(other, _)| *other != at);
            let meets =
                |other: &&DirectedBridge<'_>| other.bridge.direction == Direction::In && one.meets(other);
            let Some(other) = others.map(|(_, other)| other).find(meets) else { continue };
            let (name, back) = (one.name, other.name);
            let fix = "speak level 5, which marks what has been here";
            if is_out && one.bridge.include_backends {
                check.fail(
                    format!("bridges.{name}.include_backends"),
                    true,
                    format!("sends back what bridges.{back} brings from there, for ever"),
                    format!("set it to false, or {fix}, in both"),
                );
            } else if is_out && self.non_broker {
                check.fail(
                    format!("bridges.{name}.mqtt.level"),
                    "3.1.1",
                    format!("brings what a device publishes to other devices, through bridges.{back}"),
                    format!("{fix}, in both, or let them carry different topics"),
                );
            } else if !is_out && name < back {
                check.fail(
                    format!("bridges.{name}.topics"),
                    "",
                    format!("overlap with those of bridges.{back}, which brings the same messages in again"),
                    "let them bring different topics",
                );
            }
        }
    }
}

/// An MQTT bridge, with its topics as the other side names them.
struct DirectedBridge<'a> {
    name: &'a str,
    bridge: &'a Bridge,
    target: (String, u16, bool),
    is_marked: bool,
    there: Vec<String>,
}

impl<'a> DirectedBridge<'a> {
    fn of(name: &'a str, bridge: &'a Bridge) -> Option<Self> {
        let mqtt = bridge.mqtt.as_ref()?;
        let all = ["#".to_owned()];
        let topics = if bridge.topics.is_empty() { &all[..] } else { &bridge.topics };
        let there = |topic: &String| match bridge.direction {
            Direction::In => topic.clone(),
            Direction::Out => {
                let rest = topic.strip_prefix(mqtt.local_prefix.as_str()).unwrap_or(topic);
                format!("{}{rest}", mqtt.remote_prefix)
            }
        };
        Some(Self {
            name,
            bridge,
            target: mqtt.target().ok()?,
            is_marked: mqtt.level == MqttLevel::V5,
            there: topics.iter().map(there).collect(),
        })
    }

    /// Returns whether both carry the same topics of the same broker, and nothing in the messages tells.
    fn meets(&self, other: &Self) -> bool {
        self.target == other.target
            && !(self.is_marked && other.is_marked)
            && self.there.iter().any(|one| other.there.iter().any(|another| overlap(one, another)))
    }
}

/// Returns whether there is a topic that both filters match.
fn overlap(one: &str, other: &str) -> bool {
    let (mut ones, mut others) = (one.split('/'), other.split('/'));
    loop {
        match (ones.next(), others.next()) {
            (Some("#"), _) | (_, Some("#")) | (None, None) => return true,
            (Some(one), Some(other)) if one == other || one == "+" || other == "+" => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_overlap_if_a_topic_matches_both() {
        for (one, other, is) in [
            ("a/b", "a/b", true),
            ("a/+", "+/b", true),
            ("a/#", "a", true),
            ("#", "x/y", true),
            ("a/+", "a/b/c", false),
            ("a/b", "a/c", false),
            ("+", "a/b", false),
        ] {
            assert_eq!(overlap(one, other), is, "{one} {other}");
            assert_eq!(overlap(other, one), is, "{other} {one}");
        }
    }
}
