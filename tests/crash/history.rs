//! The actions and observations of clients, in the order of one clock, and the MQTT state that follows from them. A
//! client's state is a fold over its own part of the history, so the state at any past moment can be had.

use std::collections::{BTreeMap, BTreeSet};

use gateway_core::QoS;

/// A message by its publisher (a client's number) and its place among that publisher's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MsgId {
    pub(crate) publisher: usize,
    pub(crate) seq: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Msg {
    pub(crate) id: MsgId,
    pub(crate) topic: String,
    pub(crate) qos: QoS,
    pub(crate) retain: bool,
}

impl Msg {
    /// The payload says which message it is; its length follows from that too, mostly small, now and then 9 KB.
    pub(crate) fn payload(&self) -> Vec<u8> {
        let MsgId { publisher, seq } = self.id;
        let spread = (seq as usize).wrapping_mul(7919) + publisher * 131;
        let len = if spread.is_multiple_of(41) { 9_000 } else { 20 + spread % 300 };
        let mut payload = format!("{publisher}:{seq}:{}:", self.topic).into_bytes();
        payload.resize(payload.len().max(len), b'.');
        payload
    }

    /// The message that a payload names and the topic it was published to.
    pub(crate) fn parse(payload: &[u8]) -> Option<(MsgId, &str)> {
        let text = std::str::from_utf8(payload).ok()?;
        let mut parts = text.split(':');
        let publisher = parts.next()?.parse().ok()?;
        let seq = parts.next()?.parse().ok()?;
        Some((MsgId { publisher, seq }, parts.next()?))
    }
}

/// Action or observation of a client. An action is noted before its bytes are sent, an observation after its bytes were
/// read and before any answer: so the state at a moment never lags behind the server's possible knowledge of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The next CONNECT has this will. A delayed one must never come: the client returns within the delay.
    Will {
        msg: Msg,
        delayed: bool,
    },
    /// CONNECT is about to be sent; a clean one throws the session away.
    Connect {
        clean: bool,
    },
    /// DISCONNECT is about to be sent: the will need not come.
    Disconnect,
    Connected {
        clean: bool,
        present: bool,
        persistent: bool,
    },
    Subscribe {
        filter: String,
        qos: QoS,
    },
    Subscribed {
        filter: String,
    },
    Unsubscribe {
        filter: String,
    },
    Unsubscribed {
        filter: String,
    },
    /// For the first time; sending again with DUP is no event.
    Publish {
        packet_id: u16,
        msg: Msg,
    },
    /// PUBACK, or PUBREC, with success.
    Acked {
        packet_id: u16,
    },
    /// PUBACK or PUBREC with an error.
    Refused {
        packet_id: u16,
        code: u8,
    },
    /// PUBCOMP.
    Completed {
        packet_id: u16,
    },
    /// `fresh` is false when QoS 2 state says that it is the same message once more. `id` is none for foreign bytes.
    Received {
        packet_id: u16,
        qos: QoS,
        retain: bool,
        topic: String,
        id: Option<MsgId>,
        fresh: bool,
    },
    /// PUBREL.
    Released {
        packet_id: u16,
    },
    /// A packet that no server may send here.
    Nonsense {
        what: String,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Record {
    /// Nanoseconds of the monotonic clock.
    pub(crate) at: u64,
    pub(crate) client: usize,
    pub(crate) event: Event,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// PUBLISH sent.
    Published,
    /// PUBREC seen, PUBREL sent.
    Released,
}

/// A message whose handshake is under way.
#[derive(Debug, Clone)]
pub(crate) struct Out {
    pub(crate) packet_id: u16,
    pub(crate) msg: Msg,
    pub(crate) stage: Stage,
}

/// The state that a correct client keeps across connections and crashes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Durable {
    /// The server has confirmed a persistent session.
    pub(crate) session: bool,
    /// In the order of their first sending.
    pub(crate) inflight: Vec<Out>,
    pub(crate) next_seq: u32,
    next_packet_id: u16,
    /// QoS 2 messages that came and were not released.
    pub(crate) received: BTreeMap<u16, Option<MsgId>>,
    /// Confirmed subscriptions.
    pub(crate) subscribed: BTreeSet<String>,
}

/// Packet identifiers from here on are those of SUBSCRIBE and UNSUBSCRIBE.
pub(crate) const CONTROL_IDS: u16 = 60_000;

impl Durable {
    pub(crate) fn apply(&mut self, event: &Event) {
        match event {
            Event::Will { msg, .. } => self.next_seq = msg.id.seq + 1,
            Event::Connect { clean: true } => self.forget(),
            Event::Connected { clean, present, persistent } => {
                if !clean && !present {
                    self.forget();
                }
                self.session = *persistent;
            }
            Event::Subscribed { filter } => {
                self.subscribed.insert(filter.clone());
            }
            Event::Unsubscribed { filter } => {
                self.subscribed.remove(filter);
            }
            Event::Publish { packet_id, msg } => {
                self.inflight.push(Out { packet_id: *packet_id, msg: msg.clone(), stage: Stage::Published });
                self.next_seq = msg.id.seq + 1;
                self.next_packet_id = *packet_id;
            }
            Event::Acked { packet_id } => {
                if let Some(at) = self.published(*packet_id) {
                    if self.inflight[at].msg.qos == QoS::ExactlyOnce {
                        self.inflight[at].stage = Stage::Released;
                    } else {
                        self.inflight.remove(at);
                    }
                }
            }
            Event::Refused { packet_id, .. } | Event::Completed { packet_id } => {
                self.inflight.retain(|out| out.packet_id != *packet_id);
            }
            Event::Received { packet_id, qos: QoS::ExactlyOnce, id, fresh: true, .. } => {
                self.received.insert(*packet_id, *id);
            }
            Event::Released { packet_id } => {
                self.received.remove(packet_id);
            }
            _ => {}
        }
    }

    /// Returns the place in `inflight` of the un-acknowledged message with this identifier.
    pub(crate) fn published(&self, packet_id: u16) -> Option<usize> {
        self.inflight.iter().position(|out| out.packet_id == packet_id && out.stage == Stage::Published)
    }

    /// An identifier that is not in flight.
    pub(crate) fn free_packet_id(&self) -> u16 {
        let mut id = self.next_packet_id;
        loop {
            id = id % (CONTROL_IDS - 1) + 1;
            if self.inflight.iter().all(|out| out.packet_id != id) {
                return id;
            }
        }
    }

    fn forget(&mut self) {
        self.session = false;
        self.inflight.clear();
        self.received.clear();
        self.subscribed.clear();
    }
}

/// The states of `clients` clients after these records.
pub(crate) fn states(records: &[Record], clients: usize) -> Vec<Durable> {
    let mut states = vec![Durable::default(); clients];
    for record in records {
        states[record.client].apply(&record.event);
    }
    states
}
