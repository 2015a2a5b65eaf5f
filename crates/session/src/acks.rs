//! The handshakes of QoS 1 and 2, both directions.

use std::sync::Arc;

use codec::{AckKind, reason};
use gateway_core::{Commit, QoS, QueueOp};

use super::{
    Disk, Env, Outbound, Qos2Begin, Reply,
    inflight::{InflightStage, Unacked},
    outbound::answered,
};

/// An acknowledgement of a message in flight that is not the next step of its handshake: a protocol error, after which the
/// two sides can no longer agree [MQTT-4.3.2-3] [MQTT-4.3.3-3] [MQTT-4.3.3-5].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WrongStep;

impl Outbound {
    /// PUBACK [MQTT-4.3.2-5]. False if the id is not in flight.
    pub(crate) fn handle_puback(&mut self, id: u16, code: u8, env: &Env<'_>) -> Result<bool, WrongStep> {
        let known = self.acknowledged(id, code, env)?;
        if known {
            self.pump(env);
        }
        Ok(known)
    }

    /// Several PUBACK packets, all with success. What they make room for is sent once.
    pub(crate) fn handle_pubacks(
        &mut self,
        mut ids: impl Iterator<Item = u16>,
        env: &Env<'_>,
    ) -> Result<(), WrongStep> {
        let result = ids.try_for_each(|id| self.acknowledged(id, reason::SUCCESS, env).map(drop));
        self.pump(env);
        result
    }

    fn acknowledged(&mut self, id: u16, code: u8, env: &Env<'_>) -> Result<bool, WrongStep> {
        let Some(rare) = &mut self.rare else { return Ok(false) };
        let is_due = |entry: &Unacked| matches!(&entry.stage, InflightStage::Publish(delivery) if delivery.qos == QoS::AtLeastOnce);
        let Some(removed) = rare.inflight.remove_if(id, is_due) else { return Ok(false) };
        if let (place, Unacked { stage: InflightStage::Publish(delivery), .. }) = removed? {
            delivery.on_disk.remove(place, env);
            answered(delivery.receipt(), code);
        }
        Ok(true)
    }

    /// PUBREC: PUBREL is to follow, with 0x92 when the id is unknown [MQTT-4.3.3-4]; a failure code ends the delivery. What
    /// is on disk must say so before PUBREL goes. The caller sends it after the answers before it, also where it waits for
    /// nothing: PUBRELs keep the order of their PUBRECs [MQTT-4.6.0-4].
    pub(crate) fn handle_pubrec(
        &mut self,
        id: u16,
        code: u8,
        env: &Env<'_>,
    ) -> Result<Option<Reply>, WrongStep> {
        let mut release = reason::PACKET_IDENTIFIER_NOT_FOUND;
        let mut after = None;
        if let Some(rare) = &mut self.rare
            && let Some((place, entry)) = rare.inflight.get_mut(id)
        {
            match &entry.stage {
                InflightStage::Publish(delivery) if delivery.qos == QoS::ExactlyOnce => {
                    if code >= 0x80 {
                        answered(delivery.receipt(), code);
                        delivery.on_disk.remove(place, env);
                        rare.inflight.remove(id);
                        self.pump(env);
                        return Ok(None);
                    }
                    let released = Self::release(delivery, place, env);
                    after = released.commit.clone();
                    rare.inflight.release(id, released);
                    rare.settle(env.budget);
                    release = reason::SUCCESS;
                }
                InflightStage::Release(released) => {
                    after = released.commit.clone();
                    release = reason::SUCCESS;
                }
                InflightStage::Publish(_) => return Err(WrongStep),
            }
        }
        let reply = Reply { kind: AckKind::PubRel, packet_id: id, code: release, after };
        Ok((code < 0x80).then_some(reply))
    }

    /// PUBCOMP. False if the id is not in flight.
    pub(crate) fn handle_pubcomp(&mut self, id: u16, env: &Env<'_>) -> Result<bool, WrongStep> {
        let Some(rare) = &mut self.rare else { return Ok(false) };
        let is_due = |entry: &Unacked| matches!(entry.stage, InflightStage::Release(_));
        let Some(removed) = rare.inflight.remove_if(id, is_due) else { return Ok(false) };
        if let (place, Unacked { stage: InflightStage::Release(released), .. }) = removed? {
            released.on_disk.remove(place, env);
            answered(released.receipt.as_ref(), reason::SUCCESS);
        }
        self.pump(env);
        Ok(true)
    }

    /// An inbound QoS 2 PUBLISH arrives.
    pub(crate) fn begin_received(&mut self, id: u16, receive_maximum: u16) -> Qos2Begin {
        let received = &mut self.rare().received;
        if let Some(commit) = received.get(&id) {
            return Qos2Begin::Duplicate(commit.clone());
        }
        if received.len() >= usize::from(receive_maximum) {
            return Qos2Begin::Exceeded;
        }
        received.insert(id, None);
        Qos2Begin::New
    }

    /// Returns the commit that the answer to the PUBLISH of `id` waits for. The outer `None`: no such PUBLISH is open.
    pub(crate) fn received_before(&self, id: u16) -> Option<Option<Arc<Commit>>> {
        self.rare.as_ref()?.received.get(&id).cloned()
    }

    /// The PUBLISH of `id` has parts on disk, as the id itself: it is remembered until PUBREL, also by the next process.
    /// False if it was forgotten meanwhile: the disk must forget it too.
    #[must_use]
    pub fn keep_received(&mut self, id: u16, commit: Arc<Commit>) -> bool {
        let place = self.rare.as_mut().and_then(|rare| rare.received.get_mut(&id));
        place.map(|place| *place = Some(commit)).is_some()
    }

    /// The PUBLISH was refused in its PUBREC: the id is free again [MQTT-4.3.3-9].
    pub fn abort_received(&mut self, id: u16) {
        if let Some(rare) = &mut self.rare {
            rare.received.remove(&id);
        }
    }

    /// PUBREL: forgets the id; PUBCOMP is to follow [MQTT-4.3.3-11]. An id on disk must be gone there first: the client may
    /// use it again after PUBCOMP.
    pub(crate) fn handle_pubrel(&mut self, id: u16, env: &Env<'_>) -> Reply {
        let reply = |code, after| Reply { kind: AckKind::PubComp, packet_id: id, code, after };
        let rare = self.rare();
        let known = rare.received.remove(&id);
        rare.forgetting.retain(|(_, commit)| commit.result().is_none());
        if let (Some(Some(_)), Some(Disk { journal, queue })) = (&known, env.disk) {
            let commit = Commit::new();
            journal.submit(QueueOp::Forget { queue, packet_id: id, commit: Arc::clone(&commit) });
            rare.forgetting.retain(|(other, _)| *other != id);
            rare.forgetting.push((id, Arc::clone(&commit)));
            return reply(reason::SUCCESS, Some(commit));
        }
        // Sent again on another connection.
        let forgetting = rare.forgetting.iter().find(|(other, _)| *other == id && known.is_none());
        if let Some((_, commit)) = forgetting {
            return reply(reason::SUCCESS, Some(Arc::clone(commit)));
        }
        let code = if known.is_some() { reason::SUCCESS } else { reason::PACKET_IDENTIFIER_NOT_FOUND };
        reply(code, None)
    }
}
