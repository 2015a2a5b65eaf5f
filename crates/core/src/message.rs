//! An application message on its way through the gateway.
//!
//! [`Message`] borrows from the publisher's read buffer, so that QoS 0 needs no allocation. Whoever must keep it calls
//! [`Message::share`], which copies it once for all of them.

use std::{cell::OnceCell, sync::Arc};

use bytes::Bytes;

use super::{ClientId, Commit, QoS, Receipt, Timestamp};

/// The user property by which gateways know messages, and each other: its value names a gateway.
pub const BRIDGE_MARK: &str = "mqtt-server-bridge";

/// MQTT 5 properties that travel with a message from publisher to receivers, in order
/// [MQTT-3.3.2-15] [MQTT-3.3.2-16] [MQTT-3.3.2-17] [MQTT-3.3.2-20].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Properties {
    /// Payload format indicator: 0 bytes, 1 UTF-8 text.
    pub payload_format: Option<u8>,
    /// MIME type of the payload.
    pub content_type: Option<String>,
    /// Topic for a reply.
    pub response_topic: Option<String>,
    /// Opaque data for matching a reply to its request.
    pub correlation_data: Option<Bytes>,
    /// Name and value pairs in the publisher's order; names may repeat.
    pub user: Vec<(String, String)>,
}

impl Properties {
    /// Returns whether no property is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Bytes counted against memory caps: texts, data, and what keeping them apart takes.
    pub fn cost(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let pairs = self.user.iter().map(|(name, value)| PAIR + name.len() + value.len());
        let data = self.correlation_data.as_ref().map_or(0, Bytes::len);
        size_of::<Self>()
            + text(&self.content_type)
            + text(&self.response_topic)
            + data
            + pairs.sum::<usize>()
    }
}

/// Kind of party that sent a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginKind {
    /// An MQTT client (its will included).
    Device,
    /// A gRPC caller.
    Backend,
    /// The gateway itself (`$SYS`).
    Server,
}

/// Sender of a message.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// Kind of sender.
    pub kind: OriginKind,
    /// The device's id; `None` unless `kind` is `Device`.
    pub client_id: Option<&'a ClientId>,
    /// The sending session's slot in the broker (for No Local), 0 if none.
    pub slot: u32,
}

impl Origin<'_> {
    /// A message of the gateway itself.
    pub const SERVER: Self = Self { kind: OriginKind::Server, client_id: None, slot: 0 };
    /// A message of a gRPC caller.
    pub const BACKEND: Self = Self { kind: OriginKind::Backend, client_id: None, slot: 0 };
}

/// Promise of the acknowledgement of a QoS 1 or 2 message, for the persistent sessions that it matched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// The message is on disk, or its receiver has it.
    #[default]
    Always,
    /// The message will be on disk soon: a crash may lose messages acknowledged in the last moments.
    Interval,
    /// Nothing: it is written only where memory does not keep it (offline sessions, long queues).
    None,
}

/// A message being routed. Valid for one turn.
#[derive(Debug)]
pub struct Message<'a> {
    /// Topic name, valid UTF-8 without wildcards.
    pub topic: &'a str,
    /// Payload.
    pub payload: &'a [u8],
    /// QoS of the publish.
    pub qos: QoS,
    /// RETAIN flag as the publisher set it; on replay of a retained message, true.
    pub retain: bool,
    /// MQTT 5 properties, if any.
    pub properties: Option<&'a Arc<Properties>>,
    /// Time at which the message expires, if it does [MQTT-3.3.2-5].
    pub expires: Option<Timestamp>,
    /// Time at which the gateway received the message.
    pub received: Timestamp,
    /// The time of this turn: later than `received` if the message has waited. Receivers are told how much of its expiry
    /// interval is left at this time [MQTT-3.3.2-6].
    pub now: Timestamp,
    /// Sender.
    pub origin: Origin<'a>,
    /// Receipt to which the outcome is reported (gRPC `wait`).
    pub receipt: Option<&'a Arc<Receipt>>,
    /// Promise of the acknowledgement.
    pub durability: Durability,
    /// Its durable parts are written together or not at all, together with an operation that the caller submits
    /// afterwards: see [`Commit::of_unit`].
    pub unit: bool,
    /// A backend sends it to this receiver, whatever the receiver may subscribe to.
    pub direct: bool,
    commit: OnceCell<Arc<Commit>>,
    shared: OnceCell<Arc<SharedMessage>>,
}

impl<'a> Message<'a> {
    /// A QoS 0 message without properties; set the public fields as needed.
    pub fn new(topic: &'a str, payload: &'a [u8], received: Timestamp, origin: Origin<'a>) -> Self {
        Self {
            topic,
            payload,
            qos: QoS::AtMostOnce,
            retain: false,
            properties: None,
            expires: None,
            received,
            now: received,
            origin,
            receipt: None,
            durability: Durability::Always,
            unit: false,
            direct: false,
            commit: OnceCell::new(),
            shared: OnceCell::new(),
        }
    }

    /// Bytes counted against memory caps, as [`SharedMessage::cost`].
    pub fn cost(&self) -> usize {
        let properties = self.properties.map_or(0, |properties| properties.cost());
        self.payload.len() + self.topic.len() + properties + OVERHEAD
    }

    /// The commit for a part that must be on disk before the message is acknowledged; `None` if its acknowledgement
    /// does not promise that.
    pub fn commit(&self) -> Option<&Arc<Commit>> {
        if self.durability != Durability::Always || self.qos == QoS::AtMostOnce {
            return None;
        }
        Some(self.commit.get_or_init(|| if self.unit { Commit::of_unit() } else { Commit::new() }))
    }

    /// The part of the commit for the store that writes units, if the acknowledgement must wait for it.
    pub fn part(&self) -> Option<Arc<Commit>> {
        self.commit().map(Commit::part)
    }

    /// The same for one that knows no units (the log of consumer groups, stored commands, shadows). A unit has a commit of its own
    /// for these, which must be done before it is closed.
    pub fn plain_part(&self) -> Option<Arc<Commit>> {
        let commit = self.commit()?;
        Some(if self.unit { commit.make_before().part() } else { commit.part() })
    }

    /// The message with a commit of which parts have already been given out.
    pub fn with_commit(mut self, commit: Option<Arc<Commit>>) -> Self {
        self.commit = commit.map(OnceCell::from).unwrap_or_default();
        self
    }

    /// The commit, if a part was given out.
    pub fn issued(&self) -> Option<&Arc<Commit>> {
        self.commit.get()
    }

    /// An owned form that outlives the turn; copied on first use, then shared.
    pub fn share(&self) -> &Arc<SharedMessage> {
        self.shared.get_or_init(|| {
            Arc::new(SharedMessage {
                topic: Arc::from(self.topic),
                payload: Bytes::copy_from_slice(self.payload),
                qos: self.qos,
                retain: self.retain,
                properties: self.properties.cloned(),
                expires: self.expires,
                received: self.received,
                kind: self.origin.kind,
                client_id: self.origin.client_id.cloned(),
                slot: self.origin.slot,
                receipt: self.receipt.cloned(),
                direct: self.direct,
            })
        })
    }
}

/// Bytes counted for a user property besides its texts: two strings, each in an allocation of its own.
const PAIR: usize = size_of::<(String, String)>() + 16;

/// Bytes counted for a waiting message besides payload, topic and properties.
const OVERHEAD: usize = 160;

/// A message that goes back to its shared group: to another member, or to the group's queue.
#[derive(Debug)]
pub struct Yielded {
    /// The broker's number of the group.
    pub group: u32,
    /// The message.
    pub message: Arc<SharedMessage>,
    /// Its place in the former member's durable queue, to be removed once it is safe elsewhere.
    pub place: Option<u64>,
}

/// An owned message: payload and topic stored once for all receivers.
#[derive(Debug)]
pub struct SharedMessage {
    /// Topic name.
    pub topic: Arc<str>,
    /// Payload.
    pub payload: Bytes,
    /// QoS of the publish.
    pub qos: QoS,
    /// RETAIN flag as published.
    pub retain: bool,
    /// MQTT 5 properties, if any.
    pub properties: Option<Arc<Properties>>,
    /// Time at which the message expires, if it does.
    pub expires: Option<Timestamp>,
    /// Time at which the gateway received the message.
    pub received: Timestamp,
    /// Kind of sender.
    pub kind: OriginKind,
    /// The sending device.
    pub client_id: Option<ClientId>,
    /// The sending session's slot.
    pub slot: u32,
    /// Receipt to which the outcome is reported.
    pub receipt: Option<Arc<Receipt>>,
    /// A backend sends it to one receiver, whatever that may subscribe to.
    pub direct: bool,
}

impl SharedMessage {
    /// The borrowed form at the time at which it was received; sharing it again costs a reference count.
    pub fn borrow(self: &Arc<Self>) -> Message<'_> {
        self.borrow_at(self.received)
    }

    /// The borrowed form for a delivery at `now`, after the message has waited.
    pub fn borrow_at(self: &Arc<Self>, now: Timestamp) -> Message<'_> {
        let shared = OnceCell::new();
        let _ = shared.set(Arc::clone(self));
        Message {
            topic: &self.topic,
            payload: &self.payload,
            qos: self.qos,
            retain: self.retain,
            properties: self.properties.as_ref(),
            expires: self.expires,
            received: self.received,
            now,
            origin: Origin { kind: self.kind, client_id: self.client_id.as_ref(), slot: self.slot },
            receipt: self.receipt.as_ref(),
            durability: Durability::Always,
            unit: false,
            direct: self.direct,
            commit: OnceCell::new(),
            shared,
        }
    }

    /// The same message for a delivery that nobody waits for; this one if it has no receipt.
    pub fn without_receipt(self: &Arc<Self>) -> Arc<Self> {
        if self.receipt.is_none() { Arc::clone(self) } else { self.with(None) }
    }

    /// The same message with another receipt.
    pub fn with_receipt(&self, receipt: Arc<Receipt>) -> Arc<Self> {
        self.with(Some(receipt))
    }

    /// The same message, but already expired.
    pub fn expired(&self) -> Arc<Self> {
        let expires = Some(Timestamp(0));
        Arc::new(Self { expires, ..self.copy(self.receipt.clone()) })
    }

    fn with(&self, receipt: Option<Arc<Receipt>>) -> Arc<Self> {
        Arc::new(self.copy(receipt))
    }

    fn copy(&self, receipt: Option<Arc<Receipt>>) -> Self {
        Self {
            topic: Arc::clone(&self.topic),
            payload: self.payload.clone(),
            qos: self.qos,
            retain: self.retain,
            properties: self.properties.clone(),
            expires: self.expires,
            received: self.received,
            kind: self.kind,
            client_id: self.client_id.clone(),
            slot: self.slot,
            receipt,
            direct: self.direct,
        }
    }

    /// Bytes counted against memory caps: payload, topic, properties and a fixed overhead.
    pub fn cost(&self) -> usize {
        let properties = self.properties.as_ref().map_or(0, |properties| properties.cost());
        self.payload.len() + self.topic.len() + properties + OVERHEAD
    }

    /// Returns whether the message has expired at `now`.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}
