//! QoS 2 messages of the client between PUBLISH and PUBREL: each is routed once, however often it comes.

use std::{collections::HashMap, sync::Arc};

use codec::{AckKind, reason};
use gateway_core::{Commit, QueueOp};

use crate::{Disk, Env, Reply};

/// Answer to an inbound QoS 2 PUBLISH.
#[derive(Debug, Clone)]
pub(crate) enum Qos2Begin {
    /// First time: route it, then PUBREC.
    New,
    /// Seen: PUBREC only [MQTT-4.3.3-10], once the commit is done, if there is one.
    Duplicate(Option<Arc<Commit>>),
    /// More than Receive Maximum at once (0x93) [MQTT-3.3.4-7].
    Exceeded,
}

/// Packet identifiers of these messages.
#[derive(Debug, Default)]
pub(super) struct ReceivedIds {
    /// Each with a commit if it is on disk or on its way there.
    open: HashMap<u16, Option<Arc<Commit>>, ahash::RandomState>,
    /// Identifiers that are being removed from disk, one entry for each.
    forgetting: Vec<(u16, Arc<Commit>)>,
}

impl ReceivedIds {
    /// Takes over what an earlier process left on disk.
    pub(super) fn restore(&mut self, ids: &[u16]) {
        let on_disk = Commit::new();
        on_disk.done();
        self.open.extend(ids.iter().map(|id| (*id, Some(Arc::clone(&on_disk)))));
    }

    /// An inbound QoS 2 PUBLISH arrives.
    pub(super) fn begin(&mut self, id: u16, receive_maximum: u16) -> Qos2Begin {
        if let Some(commit) = self.open.get(&id) {
            return Qos2Begin::Duplicate(commit.clone());
        }
        if self.open.len() >= usize::from(receive_maximum) {
            return Qos2Begin::Exceeded;
        }
        self.open.insert(id, None);
        Qos2Begin::New
    }

    /// Returns the commit that the answer to the PUBLISH of `id` waits for. The outer `None`: no such PUBLISH is open.
    pub(super) fn commit(&self, id: u16) -> Option<Option<Arc<Commit>>> {
        self.open.get(&id).cloned()
    }

    /// The identifier goes to disk with this commit. False if it was forgotten meanwhile.
    pub(super) fn keep(&mut self, id: u16, commit: Arc<Commit>) -> bool {
        self.open.get_mut(&id).map(|place| *place = Some(commit)).is_some()
    }

    /// The PUBLISH was refused in its PUBREC: the id is free again [MQTT-4.3.3-9].
    pub(super) fn abort(&mut self, id: u16) {
        self.open.remove(&id);
    }

    /// PUBREL: forgets the id; PUBCOMP is to follow [MQTT-4.3.3-11]. An id on disk must be gone there first: the client may
    /// use it again after PUBCOMP.
    pub(super) fn release(&mut self, id: u16, env: &Env<'_>) -> Reply {
        let reply = |code, after| Reply { kind: AckKind::PubComp, packet_id: id, code, after };
        let known = self.open.remove(&id);
        self.forgetting.retain(|(_, commit)| commit.result().is_none());
        if let (Some(Some(_)), Some(Disk { journal, queue })) = (&known, env.disk) {
            let commit = Commit::new();
            journal.submit(QueueOp::Forget { queue, packet_id: id, commit: Arc::clone(&commit) });
            self.forgetting.retain(|(other, _)| *other != id);
            self.forgetting.push((id, Arc::clone(&commit)));
            return reply(reason::SUCCESS, Some(commit));
        }
        // Sent again on another connection.
        let forgetting = self.forgetting.iter().find(|(other, _)| *other == id && known.is_none());
        if let Some((_, commit)) = forgetting {
            return reply(reason::SUCCESS, Some(Arc::clone(commit)));
        }
        let code = if known.is_some() { reason::SUCCESS } else { reason::PACKET_IDENTIFIER_NOT_FOUND };
        reply(code, None)
    }
}
