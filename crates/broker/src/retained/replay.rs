//! Retained messages for new subscribers, wherever the messages are: a cursor that visits a bounded number of topics per call and reads a bounded amount from disk, so that no
//! number of matches holds the lock for long or fills memory.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll},
};

use gateway_core::{ClientId, Offer, QueueId, SharedMessage, Timestamp};
use store::{BoxFuture, LoadedRetained, StoreError};

use super::{FoundTopic, RetainedMessages, SCAN, Scanned};
use crate::{counters::count, subscriber::Options};

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
    pub(crate) fn poll(
        &mut self,
        retained: &RetainedMessages,
        now: Timestamp,
        scan: &mut usize,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Option<Arc<SharedMessage>>>> {
        loop {
            let next = self.poll_any(retained, now, scan, cx);
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

    /// Polls like [`Self::poll`], with the client's own messages.
    fn poll_any(
        &mut self,
        retained: &RetainedMessages,
        now: Timestamp,
        scan: &mut usize,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Option<Arc<SharedMessage>>>> {
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
            match (*scan > 0).then(|| self.find(retained, now, scan)) {
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
            return self.poll_any(retained, now, scan, cx);
        }
    }

    /// The next topic that matches, whether its message is in memory or on disk.
    fn find(&mut self, retained: &RetainedMessages, now: Timestamp, scan: &mut usize) -> Scanned {
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
