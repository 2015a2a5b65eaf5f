//! Retained messages for new subscribers and for callers that list them, wherever the messages are.
//!
//! Replay is a cursor that visits a bounded number of topics per call and reads a bounded amount from disk, so that no
//! number of matches holds the lock for long or fills memory.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use gateway_core::{
    ClientId, DropReason, Durability, Effort, Message, Offer, Outcome, QueueId, SharedMessage, Timestamp,
    clock, metrics::count,
};
use store::{BoxFuture, LoadedRetained, StoreError};

use super::{FoundTopic, Scanned};
use crate::{Broker, BrokerInner, QuotaHolders, RetainError, Session, Target, Turn, routing::Options};

/// Topics looked at under one lock.
const SCAN: usize = 1000;
/// Messages and bytes that a cursor holds at once when it has to read from disk.
const READ_MESSAGES: usize = 64;
const READ_BYTES: usize = 256 << 10;

/// Position in the retained messages that match one new subscription.
pub struct RetainedCursor {
    filter: Box<str>,
    position: Option<Arc<str>>,
    /// Messages it may still yield.
    left: usize,
    options: Options,
    /// The subscriber, if it wants none of its own messages.
    foreign_to: Option<ClientId>,
    /// Subscription identifier, 0 for none.
    id: [u32; 1],
    done: bool,
    /// Topics found and not yet yielded; the message of the first is on disk only.
    found: VecDeque<FoundTopic>,
    /// The read of those that are on disk only.
    reading: Option<BoxFuture<'static, Result<LoadedRetained, StoreError>>>,
}

impl RetainedCursor {
    /// Makes a cursor for the client `own`; `limit` 0 is none.
    pub(crate) fn new(filter: &str, options: Options, own: &ClientId, id: u32, limit: usize) -> Self {
        Self {
            filter: Box::from(filter),
            position: None,
            left: if limit == 0 { usize::MAX } else { limit },
            options,
            foreign_to: options.no_local().then(|| own.clone()),
            id: [id],
            done: false,
            found: VecDeque::new(),
            reading: None,
        }
    }

    /// The filter of the subscription.
    pub fn filter(&self) -> &str {
        &self.filter
    }

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
        loop {
            let next = self.poll_any(broker, now, scan, cx);
            // A subscription with No Local gets no message back, retained or not [MQTT-3.8.3-3].
            match (&next, &self.foreign_to) {
                (Poll::Ready(Some(Some(message))), Some(own)) if message.client_id.as_ref() == Some(own) => {
                    if *scan == 0 {
                        return Poll::Ready(Some(None));
                    }
                }
                _ => return next,
            }
        }
    }

    /// Polls like [`Self::poll_next`], with the client's own messages.
    fn poll_any(
        &mut self,
        broker: &Broker,
        now: Timestamp,
        scan: &mut usize,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Option<Arc<SharedMessage>>>> {
        let retained = &broker.inner.retained;
        if let Some(reading) = &mut self.reading {
            let Poll::Ready(result) = reading.as_mut().poll(cx) else { return Poll::Pending };
            self.reading = None;
            match result {
                Ok(read) => retained.fill(&mut self.found, read, now),
                Err(error) => {
                    gateway_core::error_limited!(%error, "retained messages cannot be read and are left out of a replay");
                    retained.fill(&mut self.found, Vec::new(), now);
                    let unread = self.found.iter().filter(|found| found.message.is_none()).count();
                    count(|c| c.retained_unread.add(unread as u64));
                }
            }
        }
        if let Some(found) = self.found.pop_front() {
            return Poll::Ready(Some(found.message));
        }
        if self.done || self.left == 0 {
            return Poll::Ready(None);
        }
        let mut bytes = 0;
        loop {
            match (*scan > 0).then(|| self.find(broker, now, scan)) {
                Some(Scanned::Found(found)) if found.message.is_some() && self.found.is_empty() => {
                    return Poll::Ready(Some(found.message));
                }
                Some(Scanned::Found(found)) => {
                    bytes += found.cost;
                    self.found.push_back(found);
                    if self.found.len() < READ_MESSAGES && bytes < READ_BYTES && self.left > 0 && !self.done {
                        continue;
                    }
                }
                _ if !self.found.is_empty() => {}
                None | Some(Scanned::Paused(_)) => return Poll::Ready(Some(None)),
                Some(Scanned::End) => return Poll::Ready(None),
            }
            self.reading = Some(Box::pin(retained.load(FoundTopic::to_read(&self.found))));
            return self.poll_any(broker, now, scan, cx);
        }
    }

    /// The next topic that matches, whether its message is in memory or on disk.
    fn find(&mut self, broker: &Broker, now: Timestamp, scan: &mut usize) -> Scanned {
        let retained = &broker.inner.retained;
        if !self.filter.bytes().any(|byte| byte == b'+' || byte == b'#') {
            self.done = true;
            *scan -= 1;
            return retained.get(&self.filter, now).map_or(Scanned::End, Scanned::Found);
        }
        let (scanned, seen) = retained.scan(&self.filter, self.position.as_deref(), SCAN.min(*scan), now);
        *scan -= seen;
        match &scanned {
            Scanned::Found(found) => {
                self.position = Some(Arc::clone(&found.topic));
                self.left -= 1;
            }
            Scanned::Paused(topic) => self.position = Some(Arc::clone(topic)),
            Scanned::End => self.done = true,
        }
        scanned
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

    /// Returns the terms on which messages from [`Self::poll_next`] are offered: with RETAIN, whatever the subscription says
    /// [MQTT-3.3.1-8].
    pub fn offer(&self) -> Offer<'_> {
        Offer {
            qos: self.options.qos(),
            retain: true,
            ids: if self.id[0] == 0 { &[] } else { &self.id },
            group: 0,
            group_queue: QueueId::NONE,
            queue_offline: false,
        }
    }
}

/// Setting and reading retained messages.
impl Broker {
    /// Sets (non-empty payload) or clears (empty) a retained message without routing it. True if one was there.
    pub fn set_retained(&self, message: &Message<'_>) -> Result<bool, RetainError> {
        self.inner.retained.set(message, &QuotaHolders::default())
    }

    /// Time of the last retained message that was refused for a limit, and the key of that limit; `None` if none was.
    pub fn retained_refused(&self) -> Option<(Timestamp, &'static str)> {
        self.inner.retained.refused()
    }

    /// A retained message, if set and not expired. Cancel safe.
    pub async fn retained(
        &self,
        topic: &str,
        now: Timestamp,
    ) -> Result<Option<Arc<SharedMessage>>, StoreError> {
        let retained = &self.inner.retained;
        let mut found = retained.get(topic, now);
        self.read_retained(found.as_mut_slice(), now).await?;
        Ok(found.and_then(|found| found.message))
    }

    /// Topics that match `filter` and have a retained message, after topic `after`, at most `limit`.
    pub fn retained_topics(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<Arc<str>> {
        let (found, _) = self.find_retained(filter, after, limit, usize::MAX, now);
        found.into_iter().map(|found| found.topic).collect()
    }

    /// Retained messages that match `filter`, after topic `after`, at most `limit` and about `bytes`. Cancel safe.
    pub async fn list_retained(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        bytes: usize,
        now: Timestamp,
    ) -> Result<RetainedPage, StoreError> {
        let (mut found, next) = self.find_retained(filter, after, limit, bytes, now);
        self.read_retained(&mut found, now).await?;
        Ok(RetainedPage { messages: found.into_iter().filter_map(|found| found.message).collect(), next })
    }

    /// Reads what is on disk only.
    async fn read_retained(&self, found: &mut [FoundTopic], now: Timestamp) -> Result<(), StoreError> {
        let retained = &self.inner.retained;
        let topics = FoundTopic::to_read(&*found);
        if !topics.is_empty() {
            let read = retained.load(topics).await?;
            retained.fill(found, read, now);
        }
        Ok(())
    }

    fn find_retained(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        bytes: usize,
        now: Timestamp,
    ) -> (Vec<FoundTopic>, Option<Arc<str>>) {
        let retained = &self.inner.retained;
        let (mut list, mut sum) = (Vec::new(), 0);
        let mut position: Option<Arc<str>> = after.map(Arc::from);
        while list.len() < limit && sum < bytes {
            match retained.scan(filter, position.as_deref(), SCAN, now).0 {
                Scanned::End => return (list, None),
                Scanned::Paused(topic) => position = Some(topic),
                Scanned::Found(found) => {
                    position = Some(Arc::clone(&found.topic));
                    sum += found.cost;
                    list.push(found);
                }
            }
        }
        (list, position)
    }
}

/// Some retained messages.
#[derive(Debug, Default)]
pub struct RetainedPage {
    /// In order of topic.
    pub messages: Vec<Arc<SharedMessage>>,
    /// The topic after which there may be more; `None` at the end.
    pub next: Option<Arc<str>>,
}

impl BrokerInner {
    /// Drops retained messages from memory that have been there for long and are on disk.
    pub(crate) fn evict_retained(&self, now: Timestamp) {
        let Some(durable) = &self.durable else { return };
        let topics = self.retained.leaving(now);
        if topics.is_empty() {
            return;
        }
        let inner = durable.inner.clone();
        let answer = self.retained.load(topics.clone());
        durable.run(async move {
            let loaded = answer.await.unwrap_or_default();
            if let Some(inner) = inner.upgrade() {
                inner.retained.evict(topics, loaded);
            }
        });
    }
}
