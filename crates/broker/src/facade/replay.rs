//! Replay of retained messages to new subscribers.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use gateway_core::{DropReason, Durability, Effort, Offer, Outcome, SharedMessage, Timestamp, clock};

use crate::{Broker, RetainedCursor, Session, Target, Turn};

impl RetainedCursor {
    /// The next message that has not expired; `None` at the end. Visits at most `scan` topics and subtracts those it
    /// visited: `Some(None)` means "call again". Pending while messages are read from disk. What cannot be read is left
    /// out and counted, and the replay continues after it.
    pub fn poll_next(
        &mut self,
        broker: &Broker,
        now: Timestamp,
        scan: &mut usize,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Option<Arc<SharedMessage>>>> {
        self.poll(&broker.inner.retained, now, scan, cx)
    }

    /// Queues for a session without a connection what the cursor yields, as if it had one: until the end, or until the queue
    /// takes no more. Others have their turn in between. Cancel safe: what was queued stays.
    pub async fn queue_for(mut self, broker: &Broker, session: &Arc<dyn Session>) {
        let mut turn = Turn::default();
        loop {
            if turn.effort.is_spent() {
                turn.flush();
                turn.effort.renew();
                tokio::task::yield_now().await;
            }
            let now = clock::now();
            let most = turn.effort.affords(Effort::TOPIC);
            let mut left = most;
            let next = poll_fn(|cx| self.poll_next(broker, now, &mut left, cx)).await;
            turn.effort.spend(Effort::NODE);
            turn.effort.spend_each(Effort::TOPIC, most - left);
            let Some(next) = next else { return };
            let Some(message) = next else { continue };
            let mut message = message.borrow_at(now);
            // Nobody waits for a replay: it was acknowledged when it was published.
            message.durability = Durability::Interval;
            message.received = now;
            turn.effort.spend(Effort::DELIVERY);
            let delivered = session.deliver(&message, Offer { queue_offline: true, ..self.offer() });
            if delivered.flush {
                turn.dirty.push(Arc::clone(session) as Arc<dyn Target>);
            }
            if delivered.outcome == Outcome::Dropped(DropReason::QueueFull) {
                return;
            }
        }
    }
}
