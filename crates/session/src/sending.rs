//! From a message to bytes in the out-buffer, or to a place in the queue.

use std::sync::Arc;

use codec::{AckKind, PublishFrame, reason};
use gateway_core::{
    DropReason, Message, Offer, Outcome, QoS, Receipt, Timestamp, limits::OverflowPolicy, part_of_qos_0,
};

use super::{
    Env, Outbound,
    alias::{AliasUse, OutboundAliases},
    durable::waits_until,
    inflight::{InflightStage, Released, id},
    outbound::{ReceiptMark, SessionExtras, dropped},
    pending::{Awaited, PendingDelivery},
};
use crate::counters::count;

impl Outbound {
    pub(super) fn send_qos0(&mut self, message: &Message<'_>, offer: Offer<'_>, now: Timestamp) -> Outcome {
        let frame = OutgoingPublish {
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
            self.mark(receipt, 0);
        }
        Outcome::Sent
    }

    /// Sends a new message of a session that is not persistent. The caller has checked `can_send_now`.
    pub(super) fn send_acknowledged(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        now: Timestamp,
    ) -> Outcome {
        let place = self.rare().inflight.next_place();
        if !self.append_publish(message, qos, offer, place, now) {
            return self.too_large();
        }
        self.rare().inflight.push(place, PendingDelivery::keep(message, qos, offer));
        Outcome::Sent
    }

    /// Appends a QoS 1 or 2 message for `place`; false if it is too large for the client.
    pub(super) fn append_publish(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        place: u64,
        now: Timestamp,
    ) -> bool {
        let packet_id = id(place);
        let frame =
            OutgoingPublish { message, qos, retain: offer.retain, ids: offer.ids, packet_id, dup: false };
        if !self.append_frame(&frame, now) {
            return false;
        }
        count_sent(qos);
        if let Some(receipt) = message.receipt {
            self.mark(receipt, packet_id);
        }
        true
    }

    pub(super) fn enqueue(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        env: &Env<'_>,
    ) -> Outcome {
        let online = self.is_online();
        let (most, most_bytes) = if online {
            (env.limits.mailbox_messages, env.limits.mailbox_bytes.0)
        } else {
            (env.limits.offline_messages, env.limits.offline_bytes.0)
        };
        // The last room is for messages that somebody waits for.
        let (most, most_bytes) = match qos {
            QoS::AtMostOnce => (part_of_qos_0(most), part_of_qos_0(most_bytes)),
            _ => (most, most_bytes),
        };
        let rare = self.rare();
        let cost = message.cost();
        while rare.pending.len() >= most || rare.pending.bytes() + cost > most_bytes {
            rare.dropped += 1;
            DropReason::QueueFull.count(1);
            if qos == QoS::AtMostOnce || env.limits.overflow == OverflowPolicy::DropNewest {
                return Outcome::Dropped(DropReason::QueueFull);
            }
            if env.limits.overflow == OverflowPolicy::Disconnect && online {
                rare.overflowed = true;
                return Outcome::Dropped(DropReason::QueueFull);
            }
            let Some(oldest) = rare.pending.pop() else { return Outcome::Dropped(DropReason::QueueFull) };
            env.budget.release(oldest.message.cost());
            dropped(oldest.receipt(), DropReason::QueueFull);
            oldest.on_disk.remove(oldest.place, env);
        }
        if !env.budget.charge(rare.held(), cost) {
            rare.dropped += 1;
            DropReason::Memory.count(1);
            return Outcome::Dropped(DropReason::Memory);
        }
        let mut delivery = PendingDelivery::keep(message, qos, offer);
        if online {
            rare.pending.push(delivery);
            return Outcome::Sent;
        }
        // Nobody waits for it, even if it is sent before deliveries that somebody waits for.
        delivery.awaited = Awaited::No;
        delivery.until = waits_until(message.received, env);
        rare.pending.push(delivery);
        Outcome::Queued
    }

    pub(super) fn resend_one(&mut self, env: &Env<'_>) -> bool {
        let window = usize::from(self.window);
        let Some(mut rare) = self.rare.take() else { return false };
        let Some((id, place, entry)) = rare.inflight.next_resend(window) else {
            self.rare = Some(rare);
            return false;
        };
        let mut fits = true;
        match &entry.stage {
            InflightStage::Publish(delivery)
                if SessionExtras::withholds(&mut rare.gate, &delivery.message) =>
            {
                DropReason::NotAuthorized.count(1);
                rare.dropped += 1;
                dropped(delivery.receipt(), DropReason::NotAuthorized);
                if delivery.qos == QoS::ExactlyOnce {
                    // The client may have it from before, and then keeps its identifier until PUBREL: the handshake goes
                    // on as if PUBREC had come. Should the disk not know that before a crash, the next process decides
                    // about the message again.
                    let released = Released { receipt: None, ..Self::release(delivery, place, env) };
                    rare.inflight.release(id, released);
                } else {
                    delivery.on_disk.remove(place, env);
                    rare.inflight.remove(id);
                }
                self.rare = Some(rare);
                return true;
            }
            InflightStage::Release(_) => self.append_ack(AckKind::PubRel, id, reason::SUCCESS),
            InflightStage::Publish(delivery) => {
                let message = delivery.message.borrow();
                let frame = OutgoingPublish {
                    message: &message,
                    qos: delivery.qos,
                    retain: delivery.retain,
                    ids: delivery.ids.as_deref().unwrap_or_default(),
                    packet_id: id,
                    // [MQTT-3.3.1-1]
                    dup: true,
                };
                let mut aliases = rare.aliases.take();
                fits = self.append_with(&frame, env.now, aliases.as_mut());
                rare.aliases = aliases;
                if fits {
                    count_sent(delivery.qos);
                    if let Some(receipt) = delivery.receipt().filter(|_| delivery.awaited == Awaited::Unsent)
                    {
                        let end = self.taken + self.out.len() as u64;
                        rare.marks.push_back(ReceiptMark { end, id, receipt: Arc::clone(receipt) });
                    }
                } else {
                    DropReason::TooLarge.count(1);
                    dropped(delivery.receipt(), DropReason::TooLarge);
                    delivery.on_disk.remove(place, env);
                }
            }
        }
        if fits {
            rare.inflight.advance();
        } else {
            rare.inflight.remove(id);
        }
        self.rare = Some(rare);
        true
    }

    pub(super) fn send_one_pending(&mut self, env: &Env<'_>) -> bool {
        let window = usize::from(self.window);
        let Some(rare) = &mut self.rare else { return false };
        let Some(front) = rare.pending.front() else { return false };
        let place = match env.disk {
            Some(_) => front.place,
            None => rare.inflight.next_place(),
        };
        let expired = front.is_expired(env.now);
        let withheld = !expired && SessionExtras::withholds(&mut rare.gate, &front.message);
        let over = expired || withheld;
        if !over
            && front.qos != QoS::AtMostOnce
            && !(rare.inflight.is_resent() && rare.inflight.has_room(window, place))
        {
            return false;
        }
        let Some(delivery) = rare.pending.pop() else { return false };
        env.budget.release(delivery.message.cost());
        if expired {
            rare.dropped += 1;
            DropReason::Expired.count(1);
            dropped(delivery.receipt(), DropReason::Expired);
            delivery.on_disk.remove(place, env);
            return true;
        }
        if withheld {
            rare.dropped += 1;
            DropReason::NotAuthorized.count(1);
            dropped(delivery.receipt(), DropReason::NotAuthorized);
            delivery.on_disk.remove(place, env);
            return true;
        }
        let mut message = delivery.message.borrow();
        message.receipt = delivery.receipt();
        let offer = delivery.offer();
        let taken = match delivery.qos {
            QoS::AtMostOnce => self.send_qos0(&message, offer, env.now),
            qos if self.append_publish(&message, qos, offer, place, env.now) => Outcome::Sent,
            _ => self.too_large(),
        };
        drop(message);
        if let Outcome::Dropped(reason) = taken {
            dropped(delivery.receipt(), reason);
        }
        if taken == Outcome::Sent && delivery.qos != QoS::AtMostOnce {
            self.rare().inflight.push(place, delivery);
        } else {
            delivery.on_disk.remove(place, env);
        }
        true
    }

    pub(super) fn too_large(&mut self) -> Outcome {
        // A packet above the client's maximum is dropped as if sent [MQTT-3.1.2-25].
        self.rare().dropped += 1;
        DropReason::TooLarge.count(1);
        Outcome::Dropped(DropReason::TooLarge)
    }

    fn mark(&mut self, receipt: &Arc<Receipt>, id: u16) {
        let end = self.taken + self.out.len() as u64;
        self.rare().marks.push_back(ReceiptMark { end, id, receipt: Arc::clone(receipt) });
    }

    fn append_frame(&mut self, frame: &OutgoingPublish<'_, '_>, now: Timestamp) -> bool {
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
        frame: &OutgoingPublish<'_, '_>,
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
        encoded.encode(self.out());
        count(|c| {
            c.packets_out.add(1);
            let bytes = match frame.qos {
                QoS::AtMostOnce => &c.payload_bytes_out_0,
                QoS::AtLeastOnce => &c.payload_bytes_out_1,
                QoS::ExactlyOnce => &c.payload_bytes_out_2,
            };
            bytes.add(message.payload.len() as u64);
        });
        if let (Some(aliases), AliasUse::Set(alias)) = (aliases, used) {
            aliases.assign(message.topic, alias);
        }
        true
    }
}

struct OutgoingPublish<'m, 'a> {
    message: &'m Message<'a>,
    qos: QoS,
    retain: bool,
    ids: &'m [u32],
    packet_id: u16,
    dup: bool,
}

fn count_sent(qos: QoS) {
    count(|c| match qos {
        QoS::AtMostOnce => c.messages_out_0.add(1),
        QoS::AtLeastOnce => c.messages_out_1.add(1),
        QoS::ExactlyOnce => c.messages_out_2.add(1),
    });
}
