//! Messages to Kafka: they count as delivered when all in-sync replicas have them (`acks=all`).
//!
//! A broker judges requests, each with the records of one partition, and librdkafka passes a verdict on to every record of
//! the request. So a verdict about records refuses one only if that one was alone in its request; otherwise requests become
//! smaller and the records are sent again. Later records must not overtake them. `enable.gapless.guarantee` stops the
//! producer at the first verdict, and a broker takes no request that does not follow the one before it. The broker knows
//! the one before as soon as it has taken one from this producer: until a record of a key is acknowledged, no second one
//! with that key is under way.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use ahash::RandomState;
use config::{Bridge, KafkaBridge, KafkaCompression};
use gateway_core::clock;
use rdkafka::{
    ClientConfig,
    error::{KafkaError, RDKafkaErrorCode as Code},
    message::{Header, Message as _, OwnedHeaders},
    producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer as _, PurgeConfig},
};
use tokio::{
    select,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    header, settings, why,
    witness::{ClientErrors, answers},
};
use crate::{
    mark::{MARK, has_mark},
    outward::{BridgeSink, OutboundProgress},
    status::{BridgeFailure, BridgeRefusal, BridgeStatus, Reason},
    work::{BridgeBatch, BridgeItem, Fate},
};

/// A producer, and what it tells of its connections.
#[derive(Clone)]
struct Producer {
    client: FutureProducer<ClientErrors>,
    errors: ClientErrors,
}

/// See the module.
pub(crate) struct KafkaOut {
    name: String,
    config: KafkaBridge,
    batch_messages: usize,
    deadline: Duration,
    /// Bytes of the largest packet of a device.
    most: usize,
    log: u64,
    /// The number of this gateway.
    mark: String,
    status: Arc<BridgeStatus>,
    /// Made anew, with the files read again, after a failure and after a verdict.
    producer: Option<Producer>,
    /// The cluster has answered the producer.
    is_known: bool,
    request: RequestLimit,
    /// Hashes of topics and keys of which the producer has had an acknowledgement.
    confirmed: HashSet<u64>,
    hashes: RandomState,
}

/// Bytes of a record beside its packet: its key, and the names of headers.
const ENVELOPE: usize = 64 << 10;
/// The longest name of a topic.
const MOST_TOPIC: usize = 249;
/// Keys that are remembered as acknowledged. When there are more, all are forgotten, which costs one round trip for each.
const MOST_CONFIRMED: usize = 8_192;
/// Time for which an unknown topic may still be on its way through the cluster, for example since it is being created.
const TOPIC_MAY_COME: Duration = Duration::from_secs(5);
/// Interval at which records that wait in a stopped producer are taken back.
const PURGE: Duration = Duration::from_millis(50);
/// Time for which requests stay small after a verdict about their size.
const SMALL: Duration = Duration::from_mins(10);
/// Bytes of a record beside its message: the headers that every record has.
const HEADERS: usize = 200;

/// The largest request that the producer makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RequestLimit {
    bytes: usize,
    records: usize,
    /// Time at which `bytes` may grow.
    until: Option<Instant>,
}

impl RequestLimit {
    /// The limits of librdkafka.
    const USUAL: Self = Self { bytes: 1_000_000, records: 10_000, until: None };

    /// The broker has refused a request with so many records of so many bytes.
    fn halve(&mut self, refusal: BridgeRefusal, records: usize, bytes: usize) {
        if refusal == BridgeRefusal::Size {
            self.bytes = (self.bytes.min(bytes) / 2).max(1);
            self.until = Some(Instant::now() + SMALL);
        } else {
            self.records = (self.records.min(records) / 2).max(1);
        }
    }

    /// Allows more again when it is time. Returns whether anything has changed.
    fn grow(&mut self) -> bool {
        if self.until.is_none_or(|until| Instant::now() < until) {
            return false;
        }
        self.bytes = self.bytes.saturating_mul(2).min(Self::USUAL.bytes);
        self.until = (self.bytes < Self::USUAL.bytes).then(|| Instant::now() + SMALL);
        true
    }
}

impl KafkaOut {
    /// `log` names the gateway in the ids of messages, and `mark` in what shows that a message was here. Packets of devices have
    /// at most `most` bytes.
    pub(crate) fn new(
        config: KafkaBridge,
        bridge: &Bridge,
        status: Arc<BridgeStatus>,
        log: u64,
        mark: String,
        most: usize,
    ) -> Self {
        Self {
            name: status.name().to_owned(),
            config,
            batch_messages: bridge.batch_messages,
            deadline: bridge.deadline.0,
            most,
            log,
            mark,
            status,
            producer: None,
            is_known: false,
            request: RequestLimit::USUAL,
            confirmed: HashSet::new(),
            hashes: RandomState::new(),
        }
    }

    fn settings(&self) -> Result<ClientConfig, (&'static str, String)> {
        let mut all = settings(&self.name, &self.config)?;
        let mut set = |key: &str, value: &str| {
            all.set(key, value);
        };
        // Acknowledged by all replicas, in order also where a request is repeated, and without repetition.
        set("enable.idempotence", "true");
        set("enable.gapless.guarantee", "true");
        // The same partitions as for clients in Java.
        set("partitioner", "murmur2_random");
        set("linger.ms", "2");
        set("message.timeout.ms", &(self.deadline * 9 / 10).as_millis().max(1).to_string());
        set("topic.metadata.propagation.max.ms", &TOPIC_MAY_COME.as_millis().to_string());
        set("queue.buffering.max.messages", &(self.batch_messages + 1).to_string());
        set("batch.size", &self.request.bytes.to_string());
        set("batch.num.messages", &self.request.records.to_string());
        // High enough for any message of a device: only the brokers know the limit of a topic, and refuse larger records
        // themselves.
        let largest = self.most.saturating_add(ENVELOPE).clamp(1_000_000, 1_000_000_000);
        set("message.max.bytes", &largest.to_string());
        set(
            "compression.type",
            match self.config.compression {
                KafkaCompression::None => "none",
                KafkaCompression::Lz4 => "lz4",
                KafkaCompression::Snappy => "snappy",
            },
        );
        Ok(all)
    }

    /// The producer; made if there is none, without waiting for the cluster.
    fn producer(&mut self) -> Result<Producer, BridgeFailure> {
        if self.request.grow() {
            self.drop_producer();
        }
        if let Some(producer) = &self.producer {
            return Ok(producer.clone());
        }
        let settings = self.settings();
        let settings =
            settings.map_err(|(key, text)| BridgeFailure::new(Reason::Denied, format!("{key}: {text}")))?;
        let errors = ClientErrors::default();
        let client = settings
            .create_with_context(errors.clone())
            .map_err(|error| BridgeFailure::new(Reason::Denied, error.to_string()))?;
        Ok(self.producer.insert(Producer { client, errors }).clone())
    }

    fn drop_producer(&mut self) {
        self.confirmed.clear();
        if let Some(producer) = self.producer.take() {
            // Its threads are joined.
            drop(spawn_blocking(move || drop(producer)));
        }
    }

    /// Hands over what is open, but of each key that is not confirmed only the first.
    fn hand_over(&self, producer: &Producer, work: &mut BridgeBatch) -> HandedOver {
        let mut all = HandedOver::default();
        let mut first = HashSet::new();
        for at in work.open() {
            let item = work.item(at);
            if has_mark(item.message().properties.as_deref(), &self.mark) {
                // Sent before, and back again.
                self.status.looped();
                work.set(at, Fate::Done);
                continue;
            }
            let (topic, key) = self.place(item);
            if topic.is_empty() || topic.len() > MOST_TOPIC || topic == "." || topic == ".." {
                let why = format!("Kafka has no topic \"{topic}\"");
                work.set(at, Fate::Refused(BridgeRefusal::Topic, why));
                continue;
            }
            // Records without a key are in no order.
            let hash = (!key.is_empty()).then(|| self.hashes.hash_one((&topic, &key)));
            if hash.is_some_and(|hash| !self.confirmed.contains(&hash) && !first.insert(hash)) {
                continue;
            }
            match self.send(producer, item, &topic, &key) {
                Ok(delivery) => all.sent.push(Sent { at, hash, delivery }),
                Err(error) => match classify(&error) {
                    RecordVerdict::About(refusal) => {
                        work.set(at, Fate::Refused(refusal, error.to_string()));
                    }
                    // A record that the producer already has was refused.
                    RecordVerdict::Aside => {
                        all.has_stopped = true;
                        break;
                    }
                    RecordVerdict::Fails => {
                        all.failure = Some(why(&error));
                        break;
                    }
                },
            }
        }
        all
    }

    /// The topic and the key of a message.
    fn place(&self, item: &BridgeItem) -> (String, String) {
        let message = item.message();
        let client_id = message.client_id.as_ref().map_or("", |id| id.as_str());
        let topic = self.config.topic.fill(client_id, &message.topic, clean);
        (topic, self.config.key.fill(client_id, &message.topic, str::to_owned))
    }

    fn send(
        &self,
        producer: &Producer,
        item: &BridgeItem,
        topic: &str,
        key: &str,
    ) -> Result<DeliveryFuture, KafkaError> {
        let message = item.message();
        let mut record: FutureRecord<'_, str, [u8]> =
            FutureRecord::to(topic).payload(&message.payload[..]).headers(self.headers(item));
        if !key.is_empty() {
            record = record.key(key);
        }
        record = record.timestamp(i64::try_from(clock::to_wall(message.received).0).unwrap_or_default());
        producer.client.send_result(record).map_err(|(error, _)| error)
    }

    fn headers(&self, item: &BridgeItem) -> OwnedHeaders {
        let message = item.message();
        let mut all = OwnedHeaders::new();
        let mut add = |key: &str, value: &[u8]| {
            all = std::mem::take(&mut all).insert(Header { key, value: Some(value) });
        };
        add(MARK, self.mark.as_bytes());
        add(header::TOPIC, message.topic.as_bytes());
        add(header::QOS, (message.qos as u8).to_string().as_bytes());
        add(header::RETAIN, if message.retain { b"1" } else { b"0" });
        add(header::ID, item.id(self.log).as_bytes());
        if let Some(id) = &message.client_id {
            add(header::CLIENT, id.as_str().as_bytes());
        }
        if let Some(properties) = &message.properties {
            if let Some(kind) = &properties.content_type {
                add(header::CONTENT_TYPE, kind.as_bytes());
            }
            if let Some(topic) = &properties.response_topic {
                add(header::RESPONSE_TOPIC, topic.as_bytes());
            }
            if let Some(data) = &properties.correlation_data {
                add(header::CORRELATION_DATA, data);
            }
            for (name, value) in &properties.user {
                add(name, value.as_bytes());
            }
        }
        all
    }

    /// Waits for what became of records. Trouble with the cluster is told at once, although librdkafka goes on trying.
    async fn collect(&mut self, producer: &Producer, all: Vec<Sent>, work: &mut BridgeBatch) -> WaveAnswers {
        let mut answers = WaveAnswers::default();
        let errors = &producer.errors;
        let mut pause = Duration::from_secs(1);
        let mut look = Instant::now() + pause;
        for Sent { at, hash, mut delivery } in all {
            let answer = loop {
                select! {
                    biased;
                    answer = &mut delivery => break answer,
                    // Takes back records that the stopped producer has not sent; the others are answered by their broker.
                    () = sleep(PURGE), if answers.has_stopped => {
                        producer.client.purge(PurgeConfig::default().queue().non_blocking());
                    }
                    () = sleep_until(look), if !answers.has_stopped => {
                        if let Some(failure) = errors.failure() {
                            self.status.failed(&failure, false);
                        }
                        pause = (pause * 2).min(Duration::from_secs(30));
                        look = Instant::now() + pause / 2;
                    }
                }
            };
            match answer {
                Ok(Ok(_)) => {
                    errors.forget();
                    work.set(at, Fate::Done);
                    if let Some(hash) = hash {
                        if self.confirmed.len() >= MOST_CONFIRMED {
                            self.confirmed.clear();
                        }
                        self.confirmed.insert(hash);
                    }
                }
                Ok(Err((error, record))) => {
                    answers.failed(at, &error, (record.topic().to_owned(), record.partition()), errors);
                }
                Err(_) => answers.fails(BridgeFailure::new(Reason::Failed, "the client of Kafka has ended")),
            }
        }
        answers
    }

    /// Refuses the records that were alone in their requests, and makes requests smaller where they were not.
    fn conclude(&mut self, answers: &mut WaveAnswers, work: &mut BridgeBatch) {
        for (partition, refused) in std::mem::take(&mut answers.refused) {
            // Names of bad records in the answer tell apart which are at fault.
            let is_named = answers.beside.contains(&partition);
            if is_named || refused.len() == 1 || self.request.records == 1 {
                for RefusedRecord { at, refusal, why } in refused {
                    work.set(at, Fate::Refused(refusal, why));
                }
                self.request.records = RequestLimit::USUAL.records;
                continue;
            }
            let all: Vec<usize> = refused.iter().map(|record| record.at).collect();
            let bytes = all.iter().map(|&at| work.item(at).cost() + HEADERS).sum();
            self.request.halve(refused[0].refusal, all.len(), bytes);
            work.attempt_failed(&all);
        }
    }
}

/// Records that were given to the producer.
#[derive(Default)]
struct HandedOver {
    sent: Vec<Sent>,
    /// The producer has stopped and takes no more.
    has_stopped: bool,
    /// The producer takes no more for another reason.
    failure: Option<BridgeFailure>,
}

/// A record that the producer has.
struct Sent {
    at: usize,
    /// Hash of its topic and key, if it has a key.
    hash: Option<u64>,
    delivery: DeliveryFuture,
}

/// A topic, and the number of a partition of it.
type TopicPartition = (String, i32);

/// A record that a broker refuses, perhaps for another one of the same request.
struct RefusedRecord {
    at: usize,
    refusal: BridgeRefusal,
    why: String,
}

/// Answers about the records of one wave, beside those that were delivered.
#[derive(Default)]
struct WaveAnswers {
    /// Verdicts about records, by topic and partition.
    refused: BTreeMap<TopicPartition, Vec<RefusedRecord>>,
    /// Partitions with records that are told to be not at fault.
    beside: HashSet<TopicPartition>,
    /// The producer sends nothing more.
    has_stopped: bool,
    failure: Option<BridgeFailure>,
}

impl WaveAnswers {
    fn failed(&mut self, at: usize, error: &KafkaError, partition: TopicPartition, errors: &ClientErrors) {
        self.has_stopped = true;
        match classify(error) {
            RecordVerdict::About(refusal) => {
                let why = error.to_string();
                self.refused.entry(partition).or_default().push(RefusedRecord { at, refusal, why });
            }
            RecordVerdict::Aside if error.rdkafka_error_code() == Some(Code::InvalidDifferentRecord) => {
                self.beside.insert(partition);
            }
            RecordVerdict::Aside => {}
            RecordVerdict::Fails => {
                let mut failure = why(error);
                if failure.reason == Reason::Deadline {
                    failure = errors.failure().unwrap_or(failure);
                } else {
                    failure.detail = format!("topic \"{}\": {}", partition.0, failure.detail);
                }
                self.fails(failure);
            }
        }
    }

    fn fails(&mut self, failure: BridgeFailure) {
        self.has_stopped = true;
        self.failure.get_or_insert(failure);
    }
}

/// Returns a value with the characters that the name of a topic allows: levels of MQTT are separated by dots, and other
/// characters become underscores.
fn clean(value: &str) -> String {
    let known = |c: char| match c {
        '/' => '.',
        c if c.is_ascii_alphanumeric() || "._-".contains(c) => c,
        _ => '_',
    };
    value.chars().map(known).collect()
}

impl BridgeSink for KafkaOut {
    async fn deliver(&mut self, work: &mut BridgeBatch) -> Result<OutboundProgress, BridgeFailure> {
        let producer = self.producer()?;
        let HandedOver { sent, has_stopped, failure } = self.hand_over(&producer, work);
        let places: Vec<usize> = sent.iter().map(|sent| sent.at).collect();
        let collected = timeout(self.deadline, self.collect(&producer, sent, work)).await;
        let Ok(mut answers) = collected else {
            work.attempt_failed(&places);
            return Err(producer.errors.failure().unwrap_or_else(BridgeFailure::late));
        };
        let has_verdict = !answers.refused.is_empty();
        self.conclude(&mut answers, work);
        if let Some(failure) = answers.failure.or(failure) {
            work.attempt_failed(&places);
            return Err(failure);
        }
        if has_verdict {
            self.drop_producer();
        } else if answers.has_stopped || has_stopped {
            return Err(BridgeFailure::new(Reason::Failed, "the client of Kafka has stopped"));
        }
        self.is_known = true;
        Ok(OutboundProgress::of(work))
    }

    async fn idle(&mut self) -> Result<(), BridgeFailure> {
        if self.is_known {
            return std::future::pending().await;
        }
        let producer = self.producer()?;
        let brokers = self.config.brokers.join(", ");
        answers(producer.client, producer.errors, brokers).await?;
        self.is_known = true;
        Ok(())
    }

    fn reset(&mut self) {
        self.is_known = false;
        self.drop_producer();
    }
}

/// Meaning of an error for its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordVerdict {
    /// A record of the request will never be taken.
    About(BridgeRefusal),
    /// Another record is at fault, or the producer has stopped for another: this one is to be sent again.
    Aside,
    /// The cluster, or what an operator can mend: a topic that is not there, a right that is missing. It is waited for.
    Fails,
}

fn classify(error: &KafkaError) -> RecordVerdict {
    match error.rdkafka_error_code() {
        Some(Code::MessageSizeTooLarge | Code::InvalidMessageSize) => {
            RecordVerdict::About(BridgeRefusal::Size)
        }
        Some(Code::InvalidTopic) => RecordVerdict::About(BridgeRefusal::Topic),
        Some(Code::InvalidRecord) => RecordVerdict::About(BridgeRefusal::Record),
        Some(Code::InvalidTimestamp) => RecordVerdict::About(BridgeRefusal::Timestamp),
        Some(Code::PolicyViolation) => RecordVerdict::About(BridgeRefusal::Policy),
        Some(
            Code::InvalidDifferentRecord
            | Code::PurgeQueue
            | Code::PurgeInflight
            | Code::Fatal
            | Code::GaplessGuarantee,
        ) => RecordVerdict::Aside,
        _ => RecordVerdict::Fails,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// librdkafka's own bound of 1,000,000 bytes made dead letters of messages that the topic would have taken.
    #[test]
    fn whatever_a_device_may_send_fits_into_a_record() {
        for (packet, record) in
            [(1_000, 1_000_000), (1 << 20, (1 << 20) + ENVELOPE), (10 << 20, (10 << 20) + ENVELOPE)]
        {
            let status = Arc::new(BridgeStatus::new("b", "kafka", "out"));
            let out =
                KafkaOut::new(KafkaBridge::default(), &Bridge::default(), status, 1, String::new(), packet);
            let settings = out.settings().expect("settings");
            assert_eq!(settings.get("message.max.bytes"), Some(record.to_string().as_str()));
        }
    }

    /// A limit that does not shrink to one record would send the same request for ever.
    #[test]
    fn a_request_shrinks_to_one_record() {
        let mut limit = RequestLimit::USUAL;
        for _ in 0..20 {
            limit.halve(BridgeRefusal::Size, 2, usize::MAX);
            limit.halve(BridgeRefusal::Record, usize::MAX, 1);
        }
        assert_eq!((limit.bytes, limit.records), (1, 1));
    }
}
