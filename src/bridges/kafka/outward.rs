//! Messages to Kafka: they count as delivered when all in-sync replicas have them (`acks=all`).

use std::{sync::Arc, time::Duration};

use gateway_core::clock;
use rdkafka::{
    ClientConfig,
    error::{KafkaError, RDKafkaErrorCode as Code},
    message::{Header, OwnedHeaders},
    producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer as _},
};
use tokio::task::spawn_blocking;

use super::{ASKING, header, settings, why};
use crate::{
    bridges::{
        MARK, has_mark,
        outward::Out,
        status::{BridgeFailure, Reason, Status},
        work::{BridgeBatch, BridgeItem, Fate},
    },
    config::{Bridge, KafkaBridge, KafkaCompression},
};

/// See the module.
pub(in crate::bridges) struct KafkaOut {
    name: String,
    config: KafkaBridge,
    batch_messages: usize,
    deadline: Duration,
    /// Bytes of the largest packet of a device.
    most: usize,
    log: u64,
    /// The number of this gateway.
    mark: String,
    status: Arc<Status>,
    /// Made anew, with the files read again, after a failure.
    producer: Option<FutureProducer>,
    /// The cluster has answered the producer.
    is_known: bool,
}

/// What a record may have beside a packet: its key, and what headers are called.
const ENVELOPE: usize = 64 << 10;
/// The longest name of a topic.
const MOST_TOPIC: usize = 249;

impl KafkaOut {
    /// `log` names the gateway in the ids of messages, and `mark` in what shows that a message was here. Packets of devices have at
    /// most `most` bytes.
    pub(in crate::bridges) fn new(
        config: KafkaBridge,
        bridge: &Bridge,
        status: Arc<Status>,
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
        }
    }

    fn settings(&self) -> Result<ClientConfig, (&'static str, String)> {
        let mut all = settings(&self.name, &self.config)?;
        let mut set = |key: &str, value: &str| {
            all.set(key, value);
        };
        // Acknowledged by all replicas, in order also where a request is repeated, and without repetition.
        set("enable.idempotence", "true");
        // The same partitions as for clients in Java.
        set("partitioner", "murmur2_random");
        set("linger.ms", "2");
        set("message.timeout.ms", &(self.deadline * 9 / 10).as_millis().max(1).to_string());
        set("queue.buffering.max.messages", &(self.batch_messages + 1).to_string());
        // Whatever a device may send: what is too large for the topic its brokers say, who know.
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
    fn producer(&mut self) -> Result<FutureProducer, BridgeFailure> {
        if let Some(producer) = &self.producer {
            return Ok(producer.clone());
        }
        let settings = self.settings();
        let settings =
            settings.map_err(|(key, text)| BridgeFailure::new(Reason::Denied, format!("{key}: {text}")))?;
        let producer: FutureProducer =
            settings.create().map_err(|error| BridgeFailure::new(Reason::Denied, error.to_string()))?;
        Ok(self.producer.insert(producer).clone())
    }

    fn send(&self, producer: &FutureProducer, item: &BridgeItem) -> Result<HandedOver, BridgeFailure> {
        let message = item.message();
        if has_mark(message.properties.as_deref(), &self.mark) {
            // It went out here before, and came back.
            self.status.looped();
            return Ok(HandedOver::Passed);
        }
        let client_id = message.client_id.as_ref().map_or("", |id| id.as_str());
        let topic = self.config.topic.fill(client_id, &message.topic, clean);
        if topic.is_empty() || topic.len() > MOST_TOPIC || topic == "." || topic == ".." {
            return Ok(HandedOver::Never(format!("Kafka has no topic \"{topic}\"")));
        }
        let key = self.config.key.fill(client_id, &message.topic, str::to_owned);
        let mut record: FutureRecord<'_, str, [u8]> =
            FutureRecord::to(&topic).payload(&message.payload[..]).headers(self.headers(item));
        if !key.is_empty() {
            record = record.key(&key);
        }
        record = record.timestamp(i64::try_from(clock::to_wall(message.received).0).unwrap_or_default());
        match producer.send_result(record) {
            Ok(delivery) => Ok(HandedOver::Under(delivery)),
            Err((error, _)) => judge(&error).map(HandedOver::Never),
        }
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
}

/// What may stand in the name of a topic: other characters become dots, as the levels of MQTT do, or underscores.
fn clean(value: &str) -> String {
    let known = |c: char| match c {
        '/' => '.',
        c if c.is_ascii_alphanumeric() || "._-".contains(c) => c,
        _ => '_',
    };
    value.chars().map(known).collect()
}

/// What came of handing a message to the client.
enum HandedOver {
    Under(DeliveryFuture),
    /// It is not for the other side.
    Passed,
    Never(String),
}

impl Out for KafkaOut {
    async fn deliver(&mut self, work: &mut BridgeBatch) -> Result<(), BridgeFailure> {
        let producer = self.producer()?;
        let mut under = Vec::new();
        let mut failed = None;
        for at in work.open() {
            match self.send(&producer, work.item(at)) {
                Ok(HandedOver::Under(delivery)) => under.push((at, delivery)),
                Ok(HandedOver::Passed) => work.set(at, Fate::Done),
                Ok(HandedOver::Never(why)) => work.set(at, Fate::Refused(why)),
                Err(failure) => {
                    failed = Some(failure);
                    break;
                }
            }
        }
        for (at, delivery) in under {
            let gone = || BridgeFailure::new(Reason::Failed, "the client of Kafka has ended");
            match delivery.await {
                Ok(Ok(_)) => work.set(at, Fate::Done),
                Ok(Err((error, _))) => match judge(&error) {
                    Ok(why) => work.set(at, Fate::Refused(why)),
                    Err(failure) => failed = failed.or(Some(failure)),
                },
                Err(_) => failed = failed.or_else(|| Some(gone())),
            }
        }
        self.is_known = failed.is_none();
        failed.map_or(Ok(()), Err)
    }

    async fn idle(&mut self) -> Result<(), BridgeFailure> {
        if self.is_known {
            return std::future::pending().await;
        }
        let producer = self.producer()?;
        let asked = spawn_blocking(move || producer.client().fetch_cluster_id(ASKING)).await;
        if asked.ok().flatten().is_none() {
            let brokers = self.config.brokers.join(", ");
            return Err(BridgeFailure::new(Reason::Connect, format!("no answer from {brokers}")));
        }
        self.is_known = true;
        Ok(())
    }

    fn reset(&mut self) {
        self.is_known = false;
        if let Some(producer) = self.producer.take() {
            // Its threads are joined.
            drop(spawn_blocking(move || drop(producer)));
        }
    }
}

/// Why a message will never be taken; or, as an error, why it is not taken for now. What an operator can mend (a topic that is not
/// there, a right that is missing) is waited for.
fn judge(error: &KafkaError) -> Result<String, BridgeFailure> {
    match error.rdkafka_error_code() {
        Some(
            Code::MessageSizeTooLarge
            | Code::InvalidMessageSize
            | Code::InvalidTopic
            | Code::InvalidRecord
            | Code::PolicyViolation,
        ) => Ok(error.to_string()),
        _ => Err(why(error)),
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
            let status = Arc::new(Status::new("b", "kafka", "out"));
            let out =
                KafkaOut::new(KafkaBridge::default(), &Bridge::default(), status, 1, String::new(), packet);
            let settings = out.settings().expect("settings");
            assert_eq!(settings.get("message.max.bytes"), Some(record.to_string().as_str()));
        }
    }
}
