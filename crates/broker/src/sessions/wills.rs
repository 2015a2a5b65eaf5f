//! Wills in the records of sessions.
//!
//! The will of a session that is kept on disk stays in the session's record until it is safe with its receivers, even
//! if a new connection or the session's end changes the record meanwhile. So no crash loses it; a crash just before
//! that may publish it twice.

use std::{any::Any, sync::Arc};

use gateway_core::{Commit, OriginKind, SharedMessage, Timestamp};

use super::core::SessionState;
use crate::{SessionCore, Will, durable::Storage};

impl Will {
    /// The message of a will, with its own QoS and retain flag [MQTT-3.1.2-14] [MQTT-3.1.2-15].
    pub(crate) fn message_of(&self, core: &SessionCore, slot: u32, now: Timestamp) -> SharedMessage {
        let stored = &self.message;
        SharedMessage {
            topic: Arc::clone(&stored.topic),
            payload: stored.payload.clone(),
            qos: stored.qos,
            retain: stored.retain,
            properties: stored.properties.clone(),
            expires: self.expiry.map(|seconds| now.plus_secs(seconds)),
            received: now,
            kind: OriginKind::Device,
            client_id: Some(core.client_id().clone()),
            slot,
            receipt: None,
            direct: false,
        }
    }
}

impl SessionState {
    /// Writes the session's state, if it is kept on disk. The caller holds its lock, so that changes are written in
    /// order. While a will is being published the record keeps that will, and a commit that waits for the new state
    /// waits until the will is safe.
    pub(crate) fn keep(&mut self, core: &SessionCore, storage: Storage<'_>, commit: Option<&Arc<Commit>>) {
        let Some(durable) = storage.durable_for(core.queue()) else { return };
        match (commit, self.leaving()) {
            (Some(commit), Some(leaving)) => leaving.wait(commit),
            _ => durable.put_session(self.stored(core), commit),
        }
    }
}

impl SessionCore {
    /// A will is safe, or what had to precede the session's removal is done. After the last of these the session is
    /// written as it is now, or removed.
    pub(crate) fn will_is_safe(&self, storage: Storage<'_>) {
        let mut state = self.state.lock();
        let Some(waiting) = state.will_is_safe() else { return };
        if !state.ended {
            state.keep(self, storage, waiting.as_ref());
        } else if let Some(durable) = storage.durable_for(self.queue()) {
            durable.remove_session(self.queue(), self.slot(), waiting.as_ref());
        }
        drop(state);
        if let Some(waiting) = waiting {
            waiting.done();
        }
    }

    /// Removes the session, which has ended, from disk, after its wills are safe.
    pub(crate) fn remove_after_wills(&self, storage: Storage<'_>, commit: Option<&Arc<Commit>>) {
        let Some(durable) = storage.durable_for(self.queue()) else { return };
        let mut state = self.state.lock();
        let Some(leaving) = state.leaving() else {
            return durable.remove_session(self.queue(), self.slot(), commit);
        };
        if let Some(commit) = commit {
            leaving.wait(commit);
        }
        drop(state);
        self.will_is_safe(storage);
    }

    /// The connection of `epoch` has authenticated again: replaces its identity, and the author of its will by what `author`
    /// makes of the former one. False if another has taken the session over.
    pub(crate) fn reauthenticate(
        &self,
        epoch: u32,
        identity: Option<Arc<dyn Any + Send + Sync>>,
        author: impl FnOnce(&str) -> String,
        storage: Storage<'_>,
    ) -> bool {
        let mut state = self.state.lock();
        if state.epoch != epoch {
            return false;
        }
        state.reauthenticate(identity, author);
        if state.will().is_some() {
            state.keep(self, storage, None);
        }
        true
    }
}
