//! Publication of wills.

use std::sync::Arc;

use super::{Broker, Session, Turn, Will, session_core::State};
use crate::{
    telemetry::count,
    types::{OriginKind, SharedMessage, Timestamp},
};

impl Broker {
    /// Publishes every will that sessions still hold, with and without a connection. For graceful shutdown,
    /// after the last connection was asked to end; wills leave their sessions, so none is published twice.
    pub fn shutdown_wills(&self, now: Timestamp, turn: &mut Turn) {
        let mut wills = Vec::new();
        self.inner.slots.for_each_session(|session| {
            let will = {
                let mut state = session.core().state.lock();
                let will = self.inner.timers.update(&session, &mut state, State::take_will);
                if will.is_some() {
                    self.inner.keep(session.core(), &state, None);
                }
                will
            };
            wills.extend(will.map(|will| (session, will)));
        });
        for (session, will) in wills {
            self.publish_will(&session, &will, session.core().slot(), now, turn);
        }
    }

    /// Publishes a will [MQTT-3.1.2-8] with its own QoS and retain flag [MQTT-3.1.2-14] [MQTT-3.1.2-15].
    /// `slot` is 0 once the session is over: the slot may be another's by now.
    pub(super) fn publish_will(
        &self,
        session: &Arc<dyn Session>,
        will: &Will,
        slot: u32,
        now: Timestamp,
        turn: &mut Turn,
    ) {
        let stored = &will.message;
        let message = Arc::new(SharedMessage {
            topic: Arc::clone(&stored.topic),
            payload: stored.payload.clone(),
            qos: stored.qos,
            retain: stored.retain,
            properties: stored.properties.clone(),
            expires: will.expiry.map(|seconds| now.plus_secs(seconds)),
            received: now,
            kind: OriginKind::Device,
            client_id: Some(session.core().client_id().clone()),
            slot,
            receipt: None,
        });
        count(|c| c.wills_published.add(1));
        self.publish(&message.borrow(), turn);
    }
}
