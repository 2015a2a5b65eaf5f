//! The handshakes of QoS 1 and 2, both directions.

use super::{
    Begin, Env, Outbound,
    inflight::{Entry, Stage},
    outbound::acknowledged,
};
use crate::{
    codec::{AckKind, reason},
    types::QoS,
};

impl Outbound {
    /// PUBACK [MQTT-4.3.2-5]. False if the id is not in flight at QoS 1.
    pub fn handle_puback(&mut self, id: u16, code: u8, env: &Env<'_>) -> bool {
        let Some(rare) = &mut self.rare else { return false };
        let expected = matches!(rare.inflight.get_mut(id),
            Some(entry) if matches!(&entry.stage, Stage::Publish(d) if d.qos == QoS::AtLeastOnce));
        if !expected {
            return false;
        }
        if let Some(Entry { stage: Stage::Publish(delivery), .. }) = rare.inflight.remove(id) {
            acknowledged(delivery.receipt(), code);
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
                    let receipt = delivery.receipt().cloned();
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
}
