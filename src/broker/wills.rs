//! Publication of wills.

use std::{sync::Arc, task::Wake};

use super::{Broker, Session, Turn, Will, session_core::State};
use crate::{
    telemetry::count,
    types::{OriginKind, SharedMessage, Ticket, Timestamp},
};

impl Broker {
    /// Publishes every will that sessions still hold, with and without a connection. For graceful shutdown,
    /// after the last connection was asked to end; wills leave their sessions, so none is published twice.
    pub fn shutdown_wills(&self, now: Timestamp, turn: &mut Turn) {
        let mut wills = Vec::new();
        self.inner.slots.for_each_session(|session| {
            let will = {
                let mut state = session.core().state.lock();
                self.inner.timers.update(&session, &mut state, State::take_will)
            };
            wills.extend(will.map(|will| (session, will)));
        });
        for (session, will) in wills {
            self.publish_kept_will(&session, &will, now, turn);
        }
    }

    /// Publishes the will of a session that goes on. On disk it leaves the session after it has come where it goes, so
    /// that a crash in between does not lose it.
    pub(super) fn publish_kept_will(
        &self,
        session: &Arc<dyn Session>,
        will: &Will,
        now: Timestamp,
        turn: &mut Turn,
    ) {
        let ticket = self.publish_will(session, will, session.core().slot(), now, turn);
        let keeper = Arc::new(Keeper { broker: self.clone(), session: Arc::clone(session) });
        let waker = Arc::clone(&keeper).into();
        if ticket.is_none_or(|ticket| ticket.poll(&waker).is_some()) {
            keeper.keep();
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
    ) -> Option<Arc<Ticket>> {
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
        let message = message.borrow();
        self.publish(&message, turn);
        let ticket = message.issued().cloned();
        if let Some(ticket) = &ticket {
            ticket.done();
        }
        ticket
    }
}

/// Writes a session as it is, when its will is safe.
struct Keeper {
    broker: Broker,
    session: Arc<dyn Session>,
}

impl Keeper {
    fn keep(&self) {
        let core = self.session.core();
        let state = core.state.lock();
        if !state.ended {
            self.broker.inner.keep(core, &state, None);
        }
    }
}

impl Wake for Keeper {
    fn wake(self: Arc<Self>) {
        self.keep();
    }
}
