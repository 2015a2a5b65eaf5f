//! Questions and later answers of the stores. They reach the broker weakly, since its stores hold them.

use std::sync::{Arc, Weak};

use gateway_core::{DropReason, QoS, QueueId, SharedMessage, Yielded};
use store::{Expiry, Loaded, StoreError};

use super::BrokerInner;
use crate::{Session, durable::StoreAnswers, shared::QueuedMessage};

impl StoreAnswers for BrokerInner {
    fn take_read(&self, group: u32, queue: QueueId, read: Result<Loaded, StoreError>) {
        if let Some((durable, group)) = self.durable.as_ref().zip(self.index.group(group)) {
            group.read(queue, read, durable, &self.account);
        }
    }

    fn take_refused(&self, group: u32, message: Arc<SharedMessage>, place: u64) {
        let Some(durable) = &self.durable else { return };
        match self.index.group(group) {
            Some(found) => {
                found.put_back(QueuedMessage { message, place }, &self.account);
                durable.stall(group);
            }
            // Its queue went with it.
            None => DropReason::SessionEnded.count(1),
        }
    }

    fn take_refused_yielded(&self, yielded: Yielded, from: QueueId) {
        if let Some(durable) = &self.durable {
            durable.stall_yielded(&self.account, yielded, from);
        }
    }
}

/// Answers about messages that expire on disk.
pub(super) struct QueueExpiry(pub(super) Weak<BrokerInner>);

impl Expiry for QueueExpiry {
    fn keeps(&self, queue: QueueId, seq: u64, qos: QoS) -> bool {
        let inner = self.0.upgrade();
        inner.and_then(|inner| inner.session_of(queue)).is_some_and(|session| session.may_have_sent(seq, qos))
    }

    fn expired(&self, queue: QueueId, messages: usize, bytes: u64) {
        let Some(inner) = self.0.upgrade() else { return };
        if let Some(session) = inner.session_of(queue) {
            return session.note_expired(messages, bytes);
        }
        let group = inner.durable.as_ref().and_then(|durable| durable.group_of(queue));
        if let Some(group) = group.and_then(|group| inner.index.group(group)) {
            group.note_expired(messages, bytes);
        }
    }
}

impl BrokerInner {
    /// The session of a durable queue.
    fn session_of(&self, queue: QueueId) -> Option<Arc<dyn Session>> {
        let slots = self.durable.as_ref()?.slots_of(queue);
        let mut sessions = slots.into_iter().filter_map(|slot| self.sessions.slots.session(slot));
        sessions.find(|session| session.core().queue() == queue)
    }
}
