//! Commands: requests to devices, and their answers.
//!
//! ```text
//! dispatcher who waits for an answer: takes the replies of devices from the broker, and gives each to its caller
//! sending   one call of Send
//! machine   one stored command, without clock, device and disk
//! record    the same as it is on disk
//! ending    how one ends
//! table     all stored commands in memory
//! registry  the same, with what is written of them
//! listing   pages of them
//! topics    the topics of commands and replies
//! running   stored commands at work
//! ```
//!
//! A command goes to its device on `{topic}/{client_id}/{id}/{name}`, with the response topic `{topic}/{client_id}/{id}/reply`
//! and correlation data for MQTT 5. A device of MQTT 3 answers on `{topic}/{client_id}/{id}/reply/{status}`. What comes after the
//! client id is as the configuration says ([`CommandTopics`]). Replies are taken
//! where the broker would route them ([`broker::Reserved`]), so that nobody but the caller gets them. Of whom a reply is says
//! the broker, which takes what is below the name of another from nobody; for what it is says its topic, and at MQTT 5 the
//! correlation data.
//!
//! Knows no tonic and no proto. Nothing waits under a lock; the dispatcher's is held for a lookup.

pub mod counters;
mod dispatcher;
mod ending;
mod listing;
mod machine;
mod record;
mod registry;
mod running;
mod sending;
mod table;
mod topics;

use std::{sync::Arc, time::Duration};

use aws_lc_rs::rand;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use broker::{Broker, Charge, Reserved};
use bytes::Bytes;
use gateway_core::{Message, Origin, Properties, QoS, Receipt, Timestamp};
use thiserror::Error;

pub use dispatcher::ReplyDispatcher;
pub use machine::{CommandState, Times};
pub use record::CommandRecord;
pub use registry::{CancelError, CommandRegistry, CommandRegistryOptions, CommandStartError};
pub use topics::CommandTopics;

/// Digest by which two requests are told apart.
pub type CommandDigest = [u8; 32];

/// Bytes of correlation data, and of an id of the gateway's making.
const RANDOM: usize = 16;
/// The user property in which a device of MQTT 5 reports the outcome.
const STATUS: &str = "status";

/// Command to a device. Valid: the device is one level of a topic, and so is the name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Client id.
    pub device: Arc<str>,
    /// Last level of the topic.
    pub name: String,
    /// Payload.
    pub payload: Bytes,
    /// Properties, without response topic and correlation data.
    pub properties: Option<Arc<Properties>>,
    /// QoS.
    pub qos: QoS,
}

impl Spec {
    /// Bytes held for it on the memory account.
    fn cost(&self) -> usize {
        let properties = self.properties.as_ref().map_or(0, |properties| properties.cost());
        self.device.len() + self.name.len() + self.payload.len() + properties
    }
}

/// Reply of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReply {
    /// Payload.
    pub payload: Bytes,
    /// Properties.
    pub properties: Option<Arc<Properties>>,
    /// Status that the device reports; 0 if there is none.
    pub status: u32,
    /// Time of the reply.
    pub at: Timestamp,
}

impl DeviceReply {
    /// Bytes held for it on the memory account.
    fn cost(&self) -> usize {
        self.payload.len() + self.properties.as_ref().map_or(0, |properties| properties.cost())
    }
}

/// The answer to a call of Send.
#[derive(Debug)]
pub struct SendReply {
    /// The answer of the device.
    pub answer: DeviceReply,
    /// Its bytes on the memory account.
    pub _charge: Charge,
}

/// Stage of a command that has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SendStage {
    /// The command has not left the gateway.
    Queued,
    /// Handed to the operating system.
    Sent,
    /// Acknowledged by the device.
    Delivered,
}

/// Reason why a command has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoReply {
    /// The device has no connection.
    #[error("the device is offline")]
    Offline,
    /// Its time is over.
    #[error("no answer in time")]
    TimedOut,
    /// The device refused it, with this reason code.
    #[error("the device refused the command")]
    Refused(u8),
    /// The command is larger than the device takes.
    #[error("the command is larger than the device takes")]
    TooLarge,
    /// The device's queue is full.
    #[error("the device's queue is full")]
    QueueFull,
    /// Too many wait for answers, by this bound of the configuration.
    #[error("too many commands wait for answers")]
    TooMany(&'static str),
    /// No memory.
    #[error("the memory budget is used up")]
    Memory,
    /// The system gives no random numbers.
    #[error("no random numbers")]
    Random,
    /// The gateway stops.
    #[error("the gateway shuts down")]
    ShuttingDown,
}

/// A failure, and the stage that the command had reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed {
    /// Reason.
    pub why: NoReply,
    /// Stage.
    pub stage: SendStage,
}

/// Bounds.
#[derive(Debug, Clone)]
pub struct CommandsOptions {
    /// Of commands and replies.
    pub topics: CommandTopics,
    /// Calls of Send at once.
    pub max_outstanding: usize,
    /// The same to one device.
    pub max_outstanding_per_device: usize,
}

/// Commands of the gateway.
pub struct CommandService {
    broker: Broker,
    dispatcher: Arc<ReplyDispatcher>,
    registry: Arc<CommandRegistry>,
}

impl CommandService {
    /// With the dispatcher that the broker was made with.
    pub fn new(
        broker: Broker,
        dispatcher: Arc<ReplyDispatcher>,
        registry: Arc<CommandRegistry>,
    ) -> Arc<Self> {
        dispatcher.set_registry(Arc::clone(&registry));
        Arc::new(Self { broker, dispatcher, registry })
    }

    /// Stored commands.
    pub fn registry(&self) -> &Arc<CommandRegistry> {
        &self.registry
    }

    /// The topic that a command of this device and name would have, but for its id.
    pub fn topic_of(&self, spec: &Spec) -> String {
        self.dispatcher.options.topics.request(spec, "id")
    }

    /// Tells whether a command of this name would have the topic of a reply.
    pub fn is_of_replies(&self, name: &str) -> bool {
        self.dispatcher.options.topics.is_of_replies(name)
    }

    /// Hands a command to the device if it has a connection.
    fn publish(
        &self,
        spec: &Spec,
        id: &str,
        correlation: [u8; RANDOM],
        receipt: &Arc<Receipt>,
        (now, expires): (Timestamp, Timestamp),
    ) -> broker::DirectOutcome {
        let topics = &self.dispatcher.options.topics;
        let topic = topics.request(spec, id);
        let mut properties = spec.properties.as_deref().cloned().unwrap_or_default();
        properties.response_topic = Some(topics.response(&spec.device, id));
        properties.correlation_data = Some(Bytes::copy_from_slice(&correlation));
        let properties = Arc::new(properties);
        let mut message = Message::new(&topic, &spec.payload, now, Origin::BACKEND);
        message.qos = spec.qos;
        message.properties = Some(&properties);
        message.receipt = Some(receipt);
        message.direct = true;
        // The gateway sends the command again by itself, not by the session's records on disk.
        message.durability = gateway_core::Durability::None;
        message.expires = Some(expires);
        let mut turn = broker::Turn::default();
        let outcome = self.broker.publish_to_device(&spec.device, &message, broker::Offline::Fail, &mut turn);
        turn.flush();
        outcome
    }
}

/// Nobody guesses it.
fn random() -> Result<[u8; RANDOM], NoReply> {
    let mut bytes = [0; RANDOM];
    rand::fill(&mut bytes).map_err(|_| NoReply::Random)?;
    Ok(bytes)
}

/// An id that nobody guesses, as text that is one level of a topic.
pub(crate) fn random_id() -> Result<String, NoReply> {
    Ok(URL_SAFE_NO_PAD.encode(random()?))
}

/// The dispatcher as the broker takes it.
pub fn reserved(dispatcher: &Arc<ReplyDispatcher>) -> Arc<dyn Reserved> {
    Arc::clone(dispatcher) as _
}

/// As a point of the gateway's clock.
fn after(now: Timestamp, span: Duration) -> Timestamp {
    now.plus_millis(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod tests;
