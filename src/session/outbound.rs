//! The half of a session that outlives its connection: what we send, and what the peer must not send twice.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use super::{
    alias::{AliasUse, OutboundAliases},
    buffers::{recycle, take_buffer},
    inflight::{Entry, Inflight, Stage},
    pending::{Delivery, Pending},
};
use crate::{
    codec::{AckKind, PublishFrame, encode_ack, reason},
    config::{Limits, OverflowPolicy},
    telemetry::count,
    types::{DropReason, Message, Protocol, QoS, Receipt, SharedMessage, Timestamp},
};

/// Bytes that may wait in the out-buffer; beyond it deliveries wait as messages.
pub const OUT_BUFFER: usize = 64 << 10;

/// The process-wide memory budget for waiting messages.
pub trait Budget {
    /// Takes `bytes`; false if the budget is used up.
    fn charge(&self, bytes: usize) -> bool;
    /// Gives `bytes` back.
    fn release(&self, bytes: usize);
}

/// What calls need from outside: bounds, time, budget.
pub struct Env<'a> {
    /// Bounds.
    pub limits: &'a Limits,
    /// Now.
    pub now: Timestamp,
    /// Budget.
    pub budget: &'a dyn Budget,
}

/// What a new connection brings.
#[derive(Debug, Clone, Copy)]
pub struct LinkParams {
    /// Protocol level.
    pub protocol: Protocol,
    /// Un-acknowledged messages that the client takes (v5 Receive Maximum).
    pub receive_maximum: u16,
    /// Largest packet that the client takes.
    pub maximum_packet_size: u32,
    /// Topic aliases that the client takes.
    pub topic_alias_maximum: u16,
}

/// How a message is offered.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    /// Highest QoS.
    pub qos: QoS,
    /// RETAIN flag to send.
    pub retain: bool,
    /// Subscription identifiers.
    pub ids: &'a [u32],
    /// Shared group, 0 for none.
    pub group: u32,
    /// May wait while there is no connection.
    pub queue_offline: bool,
}

/// What became of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Take {
    /// Encoded, or waiting for a connected client.
    Sent,
    /// Waiting for a connection.
    Queued,
    /// Not taken.
    Dropped(DropReason),
    /// Not taken, and the policy is to end the connection.
    Overflow,
}

/// Answer to an inbound QoS 2 PUBLISH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// First time: route it, then PUBREC.
    New,
    /// Seen: PUBREC only [MQTT-4.3.3-10].
    Duplicate,
    /// More than Receive Maximum at once (0x93) [MQTT-3.3.4-7].
    Exceeded,
}

/// What few sessions need; made when first used.
#[derive(Debug, Default)]
struct Rare {
    inflight: Inflight,
    pending: Pending,
    received: HashSet<u16, ahash::RandomState>,
    aliases: Option<OutboundAliases>,
    marks: VecDeque<(u64, Arc<Receipt>)>,
    dropped: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Outbound {
    out: Vec<u8>,
    rare: Option<Box<Rare>>,
    /// Bytes ever appended to the out-buffer, and ever written to a socket, on this connection.
    appended: u64,
    written: u64,
    maximum_packet_size: u32,
    window: u16,
    protocol: Protocol,
    online: bool,
    ended: bool,
}

impl Outbound {
    /// A session that has no connection yet.
    pub fn new() -> Self {
        Self {
            out: Vec::new(),
            rare: None,
            appended: 0,
            written: 0,
            maximum_packet_size: u32::MAX,
            window: 0,
            protocol: Protocol::V4,
            online: false,
            ended: false,
        }
    }

    /// A connection begins: its first bytes are `connack`, then what earlier connections left un-acknowledged
    /// [MQTT-4.4.0-1], then what waits.
    pub fn attach(&mut self, link: LinkParams, connack: &[u8], env: &Env<'_>) {
        if self.online {
            self.detach();
        }
        self.online = true;
        self.protocol = link.protocol;
        self.window = link.receive_maximum.min(env.limits.max_inflight).max(1);
        self.maximum_packet_size = link.maximum_packet_size;
        self.append(connack);
        if let Some(rare) = &mut self.rare {
            rare.aliases = None;
        }
        if link.protocol.is_v5() && link.topic_alias_maximum > 0 {
            self.rare().aliases = Some(OutboundAliases::new(link.topic_alias_maximum));
        }
        self.pump(env);
    }

    /// The connection ended: unsent bytes are gone, QoS 1 and 2 will be sent again.
    pub fn detach(&mut self) {
        self.online = false;
        recycle(std::mem::take(&mut self.out));
        self.appended = 0;
        self.written = 0;
        if let Some(rare) = &mut self.rare {
            rare.inflight.rewind();
            rare.aliases = None;
            for (_, receipt) in rare.marks.drain(..) {
                receipt.update(|state| {
                    state.dropped += 1;
                    state.reason = Some(DropReason::ConnectionLost);
                });
            }
        }
    }

    /// Whether there is a connection.
    pub fn is_online(&self) -> bool {
        self.online
    }

    /// Protocol level of the current or last connection.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// (in flight, waiting, bytes waiting, dropped).
    pub fn sizes(&self) -> (usize, usize, usize, u64) {
        self.rare.as_ref().map_or((0, 0, 0, 0), |rare| {
            (rare.inflight.len(), rare.pending.len(), rare.pending.bytes(), rare.dropped)
        })
    }

    /// Whether a paced replay may offer more now without queueing.
    pub fn has_room(&self) -> bool {
        self.online
            && self.out.len() < OUT_BUFFER / 2
            && self.rare.as_ref().is_none_or(|rare| {
                rare.pending.is_empty()
                    && rare.inflight.is_resent()
                    && rare.inflight.has_room(self.window.into())
            })
    }

    /// Takes one message: into the out-buffer if it can go now, else into the queue, else drops it.
    pub fn offer(&mut self, message: &Message<'_>, offer: Offer<'_>, env: &Env<'_>) -> Take {
        if self.ended {
            count(|c| c.dropped_session_ended.add(1));
            return Take::Dropped(DropReason::SessionEnded);
        }
        let qos = offer.qos.min(message.qos);
        if self.online {
            if qos == QoS::AtMostOnce {
                if self.out.len() < OUT_BUFFER
                    && self.rare.as_ref().is_none_or(|rare| !rare.pending.has_qos0())
                {
                    return self.send_qos0(message, offer, env.now);
                }
            } else if self.can_send_now() {
                return self.send_acknowledged(message, qos, offer, env.now);
            }
        } else if !offer.queue_offline || (qos == QoS::AtMostOnce && !env.limits.offline_qos0) {
            count(|c| c.dropped_offline.add(1));
            if let Some(rare) = &mut self.rare {
                rare.dropped += 1;
            }
            return Take::Dropped(DropReason::Offline);
        }
        self.enqueue(message, qos, offer, env)
    }

    /// Appends a control packet. Never waits: control packets answer the peer's own packets.
    pub fn append(&mut self, bytes: &[u8]) {
        if self.out.capacity() == 0 {
            self.out = take_buffer();
        }
        self.out.extend_from_slice(bytes);
        self.appended += bytes.len() as u64;
    }

    /// Bytes in the out-buffer.
    pub fn buffered(&self) -> usize {
        self.out.len()
    }

    /// Takes the out-buffer for writing; it begins and ends at frame boundaries.
    pub fn take_out(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// `bytes` of what was taken have gone to the socket.
    pub fn note_written(&mut self, bytes: usize) {
        self.written += bytes as u64;
        let Some(rare) = &mut self.rare else { return };
        while let Some((end, receipt)) = rare.marks.front() {
            if *end > self.written {
                break;
            }
            receipt.update(|state| state.sent += 1);
            rare.marks.pop_front();
        }
    }

    /// Fills the out-buffer from what must be sent again and what waits. True if bytes were added.
    pub fn pump(&mut self, env: &Env<'_>) -> bool {
        if !self.online || self.rare.is_none() {
            return false;
        }
        let before = self.appended;
        while self.out.len() < OUT_BUFFER && self.resend_one(env) {}
        while self.out.len() < OUT_BUFFER && self.send_one_pending(env) {}
        self.appended != before
    }

    /// PUBACK [MQTT-4.3.2-5]. False if the id is not in flight at QoS 1.
    pub fn handle_puback(&mut self, id: u16, code: u8, env: &Env<'_>) -> bool {
        let Some(rare) = &mut self.rare else { return false };
        let expected = matches!(rare.inflight.get_mut(id),
            Some(entry) if matches!(&entry.stage, Stage::Publish(d) if d.qos == QoS::AtLeastOnce));
        if !expected {
            return false;
        }
        if let Some(Entry { stage: Stage::Publish(delivery), .. }) = rare.inflight.remove(id) {
            acknowledged(delivery.message.receipt.as_ref(), code);
        }
        self.pump(env);
        true
    }

    /// PUBREC: appends PUBREL, 0x92 when the id is unknown [MQTT-4.3.3-4]; a failure code ends the delivery.
    pub fn handle_pubrec(&mut self, id: u16, code: u8, env: &Env<'_>) {
        let mut release = reason::PACKET_IDENTIFIER_NOT_FOUND;
        if let Some(rare) = &mut self.rare
            && let Some(entry) = rare.inflight.get_mut(id)
        {
            match &entry.stage {
                Stage::Publish(delivery) if delivery.qos == QoS::ExactlyOnce => {
                    let receipt = delivery.message.receipt.clone();
                    if code >= 0x80 {
                        acknowledged(receipt.as_ref(), code);
                        rare.inflight.remove(id);
                        self.pump(env);
                        return;
                    }
                    entry.stage = Stage::Release(receipt);
                    release = reason::SUCCESS;
                }
                Stage::Release(_) => release = reason::SUCCESS,
                Stage::Publish(_) => {}
            }
        }
        if code >= 0x80 {
            return;
        }
        self.append_ack(AckKind::PubRel, id, release);
    }

    /// PUBCOMP. False if the id is not waiting for it.
    pub fn handle_pubcomp(&mut self, id: u16, env: &Env<'_>) -> bool {
        let Some(rare) = &mut self.rare else { return false };
        if !matches!(rare.inflight.get_mut(id), Some(entry) if matches!(entry.stage, Stage::Release(_))) {
            return false;
        }
        if let Some(Entry { stage: Stage::Release(receipt), .. }) = rare.inflight.remove(id) {
            acknowledged(receipt.as_ref(), reason::SUCCESS);
        }
        self.pump(env);
        true
    }

    /// An inbound QoS 2 PUBLISH arrives.
    pub fn begin_received(&mut self, id: u16, receive_maximum: u16) -> Begin {
        let received = &mut self.rare().received;
        if received.contains(&id) {
            return Begin::Duplicate;
        }
        if received.len() >= usize::from(receive_maximum) {
            return Begin::Exceeded;
        }
        received.insert(id);
        Begin::New
    }

    /// The PUBLISH was refused in its PUBREC: the id is free again [MQTT-4.3.3-9].
    pub fn abort_received(&mut self, id: u16) {
        if let Some(rare) = &mut self.rare {
            rare.received.remove(&id);
        }
    }

    /// PUBREL: forgets the id and appends PUBCOMP [MQTT-4.3.3-11].
    pub fn handle_pubrel(&mut self, id: u16) {
        let known = self.rare.as_mut().is_some_and(|rare| rare.received.remove(&id));
        let code = if known { reason::SUCCESS } else { reason::PACKET_IDENTIFIER_NOT_FOUND };
        self.append_ack(AckKind::PubComp, id, code);
    }

    /// What a shared group queued here and is not yet sent.
    pub fn yield_shared(&mut self, budget: &dyn Budget) -> Vec<(u32, Arc<SharedMessage>)> {
        let Some(rare) = &mut self.rare else { return Vec::new() };
        let taken = rare.pending.extract(|delivery| delivery.group != 0);
        taken
            .into_iter()
            .map(|delivery| {
                budget.release(delivery.message.cost());
                (delivery.group, delivery.message)
            })
            .collect()
    }

    /// The session is over. Hands back what a shared group may give to another member: what waits, and QoS 1
    /// in flight; never QoS 2 in flight [MQTT-4.8.2-5].
    pub fn end(&mut self, budget: &dyn Budget) -> Vec<(u32, Arc<SharedMessage>)> {
        self.detach();
        self.ended = true;
        let Some(mut rare) = self.rare.take() else { return Vec::new() };
        let mut shared = Vec::new();
        for entry in rare.inflight.drain() {
            match entry.stage {
                Stage::Publish(delivery) if delivery.group != 0 && delivery.qos == QoS::AtLeastOnce => {
                    shared.push((delivery.group, delivery.message));
                }
                Stage::Publish(delivery) => {
                    dropped(delivery.message.receipt.as_ref(), DropReason::SessionEnded)
                }
                Stage::Release(receipt) => dropped(receipt.as_ref(), DropReason::SessionEnded),
            }
        }
        while let Some(delivery) = rare.pending.pop() {
            budget.release(delivery.message.cost());
            if delivery.group != 0 {
                shared.push((delivery.group, delivery.message));
            } else {
                count(|c| c.dropped_session_ended.add(1));
                dropped(delivery.message.receipt.as_ref(), DropReason::SessionEnded);
            }
        }
        shared
    }

    /// Notes that `messages` QoS 0 messages were lost with the connection.
    pub fn note_lost(&mut self, messages: u64) {
        if messages > 0 {
            count(|c| c.dropped_connection_lost.add(messages));
            self.rare().dropped += messages;
        }
    }

    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_with(Box::default)
    }

    fn can_send_now(&self) -> bool {
        self.out.len() < OUT_BUFFER
            && self.rare.as_ref().is_none_or(|rare| {
                rare.pending.is_empty()
                    && rare.inflight.is_resent()
                    && rare.inflight.has_room(self.window.into())
            })
    }

    fn append_ack(&mut self, kind: AckKind, id: u16, code: u8) {
        let mut bytes = Vec::with_capacity(8);
        encode_ack(kind, id, code, self.protocol, &mut bytes);
        self.append(&bytes);
    }

    fn send_qos0(&mut self, message: &Message<'_>, offer: Offer<'_>, now: Timestamp) -> Take {
        let frame = Frame {
            message,
            qos: QoS::AtMostOnce,
            retain: offer.retain,
            ids: offer.ids,
            packet_id: 0,
            dup: false,
        };
        if !self.append_frame(&frame, now) {
            return self.too_large();
        }
        count(|c| c.messages_out_0.add(1));
        if let Some(receipt) = message.receipt {
            receipt.update(|state| state.acked += 1);
            self.mark(receipt);
        }
        Take::Sent
    }

    fn send_acknowledged(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        now: Timestamp,
    ) -> Take {
        let packet_id = self.rare().inflight.next_id();
        let frame = Frame { message, qos, retain: offer.retain, ids: offer.ids, packet_id, dup: false };
        if !self.append_frame(&frame, now) {
            return self.too_large();
        }
        self.rare().inflight.push(keep(message, qos, offer));
        count_sent(qos);
        if let Some(receipt) = message.receipt {
            self.mark(receipt);
        }
        Take::Sent
    }

    fn enqueue(&mut self, message: &Message<'_>, qos: QoS, offer: Offer<'_>, env: &Env<'_>) -> Take {
        let online = self.online;
        let (most, most_bytes) = if online {
            (env.limits.mailbox_messages, env.limits.mailbox_bytes.0)
        } else {
            (env.limits.offline_messages, env.limits.offline_bytes.0)
        };
        let rare = self.rare();
        let cost = message.payload.len() + message.topic.len() + 160;
        while rare.pending.len() >= most || rare.pending.bytes() + cost > most_bytes {
            rare.dropped += 1;
            count(|c| c.dropped_queue_full.add(1));
            if qos == QoS::AtMostOnce || env.limits.overflow == OverflowPolicy::DropNewest {
                return Take::Dropped(DropReason::QueueFull);
            }
            if env.limits.overflow == OverflowPolicy::Disconnect && online {
                return Take::Overflow;
            }
            let Some(oldest) = rare.pending.pop() else { return Take::Dropped(DropReason::QueueFull) };
            env.budget.release(oldest.message.cost());
            dropped(oldest.message.receipt.as_ref(), DropReason::QueueFull);
        }
        if !env.budget.charge(cost) {
            rare.dropped += 1;
            count(|c| c.dropped_memory.add(1));
            return Take::Dropped(DropReason::Memory);
        }
        rare.pending.push(keep(message, qos, offer));
        if online { Take::Sent } else { Take::Queued }
    }

    fn resend_one(&mut self, env: &Env<'_>) -> bool {
        let Some(mut rare) = self.rare.take() else { return false };
        let sent = match rare.inflight.next_resend() {
            None => false,
            Some((id, entry)) => {
                let mut drop_entry = false;
                match &entry.stage {
                    Stage::Release(_) => {
                        let mut bytes = Vec::with_capacity(8);
                        encode_ack(AckKind::PubRel, id, reason::SUCCESS, self.protocol, &mut bytes);
                        self.append(&bytes);
                    }
                    Stage::Publish(delivery) => {
                        let message = delivery.message.borrow();
                        let frame = Frame {
                            message: &message,
                            qos: delivery.qos,
                            retain: delivery.retain,
                            ids: delivery.ids.as_deref().unwrap_or_default(),
                            packet_id: id,
                            dup: entry.sent,
                        };
                        let mut aliases = rare.aliases.take();
                        let appended = self.append_with(&frame, env.now, aliases.as_mut());
                        rare.aliases = aliases;
                        drop_entry = !appended;
                        if appended {
                            count_sent(delivery.qos);
                        }
                    }
                }
                if drop_entry {
                    count(|c| c.dropped_too_large.add(1));
                    rare.inflight.remove(id);
                } else {
                    rare.inflight.advance();
                }
                true
            }
        };
        self.rare = Some(rare);
        sent
    }

    fn send_one_pending(&mut self, env: &Env<'_>) -> bool {
        let window = usize::from(self.window);
        let Some(rare) = &mut self.rare else { return false };
        let Some(front) = rare.pending.front() else { return false };
        let expired = front.message.is_expired(env.now);
        if !expired
            && front.qos != QoS::AtMostOnce
            && !(rare.inflight.is_resent() && rare.inflight.has_room(window))
        {
            return false;
        }
        let Some(delivery) = rare.pending.pop() else { return false };
        env.budget.release(delivery.message.cost());
        if expired {
            rare.dropped += 1;
            count(|c| c.dropped_expired.add(1));
            dropped(delivery.message.receipt.as_ref(), DropReason::Expired);
            return true;
        }
        let message = delivery.message.borrow();
        let offer = Offer {
            qos: delivery.qos,
            retain: delivery.retain,
            ids: delivery.ids.as_deref().unwrap_or_default(),
            group: delivery.group,
            queue_offline: true,
        };
        let taken = match delivery.qos {
            QoS::AtMostOnce => self.send_qos0(&message, offer, env.now),
            qos => self.send_acknowledged(&message, qos, offer, env.now),
        };
        if let Take::Dropped(reason) = taken {
            dropped(delivery.message.receipt.as_ref(), reason);
        }
        true
    }

    fn too_large(&mut self) -> Take {
        // A packet above the client's maximum is dropped as if sent [MQTT-3.1.2-25].
        self.rare().dropped += 1;
        count(|c| c.dropped_too_large.add(1));
        Take::Dropped(DropReason::TooLarge)
    }

    fn mark(&mut self, receipt: &Arc<Receipt>) {
        let end = self.appended;
        self.rare().marks.push_back((end, Arc::clone(receipt)));
    }

    fn append_frame(&mut self, frame: &Frame<'_, '_>, now: Timestamp) -> bool {
        let has_aliases = self.rare.as_ref().is_some_and(|rare| rare.aliases.is_some());
        if !has_aliases {
            return self.append_with(frame, now, None);
        }
        let mut aliases = self.rare().aliases.take();
        let appended = self.append_with(frame, now, aliases.as_mut());
        self.rare().aliases = aliases;
        appended
    }

    fn append_with(
        &mut self,
        frame: &Frame<'_, '_>,
        now: Timestamp,
        aliases: Option<&mut OutboundAliases>,
    ) -> bool {
        let message = frame.message;
        let v5 = self.protocol.is_v5();
        let used = aliases.as_ref().map_or(AliasUse::None, |aliases| aliases.choose(message.topic));
        let (topic, alias) = match used {
            AliasUse::None => (message.topic, None),
            AliasUse::Set(alias) => (message.topic, Some(alias)),
            AliasUse::Known(alias) => ("", Some(alias)),
        };
        let encoded = PublishFrame {
            protocol: self.protocol,
            topic,
            payload: message.payload,
            qos: frame.qos,
            dup: frame.dup,
            retain: frame.retain,
            packet_id: frame.packet_id,
            alias,
            expiry: if v5 { message.expires.map(|at| now.secs_until(at)) } else { None },
            ids: if v5 { frame.ids } else { &[] },
            properties: if v5 { message.properties.map(|properties| &**properties) } else { None },
        };
        if self.maximum_packet_size != u32::MAX && encoded.encoded_len() > self.maximum_packet_size as usize {
            return false;
        }
        if self.out.capacity() == 0 {
            self.out = take_buffer();
        }
        let before = self.out.len();
        encoded.encode(&mut self.out);
        self.appended += (self.out.len() - before) as u64;
        count(|c| {
            c.packets_out.add(1);
            c.payload_bytes_out.add(message.payload.len() as u64);
        });
        if let (Some(aliases), AliasUse::Set(alias)) = (aliases, used) {
            aliases.assign(message.topic, alias);
        }
        true
    }
}

impl Default for Outbound {
    fn default() -> Self {
        Self::new()
    }
}

struct Frame<'m, 'a> {
    message: &'m Message<'a>,
    qos: QoS,
    retain: bool,
    ids: &'m [u32],
    packet_id: u16,
    dup: bool,
}

fn keep(message: &Message<'_>, qos: QoS, offer: Offer<'_>) -> Delivery {
    Delivery {
        message: Arc::clone(message.share()),
        ids: if offer.ids.is_empty() { None } else { Some(offer.ids.into()) },
        group: offer.group,
        qos,
        retain: offer.retain,
    }
}

fn count_sent(qos: QoS) {
    count(|c| match qos {
        QoS::AtMostOnce => c.messages_out_0.add(1),
        QoS::AtLeastOnce => c.messages_out_1.add(1),
        QoS::ExactlyOnce => c.messages_out_2.add(1),
    });
}

fn acknowledged(receipt: Option<&Arc<Receipt>>, code: u8) {
    if let Some(receipt) = receipt {
        receipt.update(|state| {
            state.acked += 1;
            state.code = code;
        });
    }
}

fn dropped(receipt: Option<&Arc<Receipt>>, reason: DropReason) {
    if let Some(receipt) = receipt {
        receipt.update(|state| {
            state.dropped += 1;
            state.reason = Some(reason);
        });
    }
}
