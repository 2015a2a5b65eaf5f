//! A real Kafka of one node, killed, paused and started again on its port.

use std::{
    collections::BTreeMap,
    env,
    path::PathBuf,
    process::{Command, Output},
    time::Duration,
};

use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    message::{Header, OwnedHeaders},
    producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer},
};

use crate::support::{ports::free_ports, root, skipped};

/// One of its own, on ports that were free.
pub(super) struct Kafka {
    pub(super) port: u16,
    /// With `ca.pem` and `server.pem`, for a listener that speaks TLS two ports on.
    tls: Option<PathBuf>,
}

impl Kafka {
    /// `None`, said loudly, where Java or Maven is missing, and where `MQTT_SERVER_TEST_KAFKA` is `none`.
    pub(super) fn start() -> Option<Self> {
        Self::start_with(None)
    }

    /// Also with TLS, by the papers in this folder.
    pub(super) fn start_with(tls: Option<PathBuf>) -> Option<Self> {
        if env::var("MQTT_SERVER_TEST_KAFKA").is_ok_and(|kafka| kafka == "none") {
            skipped("Kafka");
            return None;
        }
        // The next port is its controller's, and the one behind it for TLS.
        let port = free_ports(3);
        let kafka = Self { port, tls };
        let started = kafka.run(&["start"]);
        if started.status.code() == Some(3) {
            skipped("Java, Maven or Kafka's jars");
            return None;
        }
        assert!(started.status.success(), "{started:?}");
        Some(kafka)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(root().join("scripts/kafka.sh"));
        command.args(arguments).env("KAFKA_PORT", self.port.to_string());
        command.envs(self.tls.as_ref().map(|folder| ("KAFKA_TLS", folder)));
        command.output().expect("run scripts/kafka.sh")
    }

    /// `kill`, `start`, `pause` or `resume`.
    pub(super) fn tell(&self, what: &str) {
        let output = self.run(&[what]);
        assert!(output.status.success(), "{output:?}");
    }

    /// Makes a topic with one partition and these settings.
    pub(super) fn create_topic(&self, name: &str, settings: &[(&str, &str)]) {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", format!("127.0.0.1:{}", self.port));
        let admin: AdminClient<DefaultClientContext> = config.create().expect("a client");
        let mut topic = NewTopic::new(name, 1, TopicReplication::Fixed(1));
        for (key, value) in settings {
            topic = topic.set(key, value);
        }
        let runtime = tokio::runtime::Runtime::new().expect("start a runtime");
        let made = runtime.block_on(admin.create_topics(&[topic], &AdminOptions::new())).expect("an answer");
        assert_eq!(made, [Ok(name.to_owned())]);
    }

    /// Somebody who writes to it.
    pub(super) fn writer(&self) -> Writer {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", format!("127.0.0.1:{}", self.port)).set("enable.idempotence", "true");
        Writer(config.create().expect("a producer"))
    }

    /// The values of a topic by key, in order.
    pub(super) fn values(&self, topic: &str) -> BTreeMap<String, Vec<usize>> {
        // On a busy machine the reader may end before it has started to read.
        let dumped = || String::from_utf8(self.run(&["dump", topic]).stdout).expect("text");
        let text = (0..6).map(|_| dumped()).find(|text| !text.is_empty()).unwrap_or_default();
        let mut values = BTreeMap::<String, Vec<usize>>::new();
        for line in text.lines() {
            let mut cells = line.split('\t').rev();
            let (value, key) = (cells.next().expect("a value"), cells.next().expect("a key"));
            values.entry(key.to_owned()).or_default().push(value.parse().expect("a number"));
        }
        values
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        let _ = self.run(&["stop"]);
    }
}

/// See [`Kafka::writer`].
pub(super) struct Writer(ThreadedProducer<DefaultProducerContext>);

impl Writer {
    /// Puts a record down to be written.
    pub(super) fn put(&self, topic: &str, key: Option<&str>, value: &[u8], headers: &[(&str, &[u8])]) {
        let mut all = OwnedHeaders::new();
        for &(key, value) in headers {
            all = all.insert(Header { key, value: Some(value) });
        }
        let mut record = BaseRecord::<str, [u8]>::to(topic).payload(value).headers(all);
        if let Some(key) = key {
            record = record.key(key);
        }
        self.0.send(record).map_err(|(error, _)| error).expect("room");
    }

    /// Until all is written.
    pub(super) fn flush(&self) {
        self.0.flush(Duration::from_mins(2)).expect("write everything");
    }
}
