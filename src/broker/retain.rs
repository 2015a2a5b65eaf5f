//! Retained messages: the last one per topic, in order of topic, within count and byte limits.
//!
//! Replay to a new subscriber is a cursor that looks at a bounded stretch of topics per call, so that any
//! number of matches neither holds the lock nor fills memory.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::{Mutex, RwLock};

use super::{Broker, MatchOptions, RetainError, index::Options};
use crate::{
    store::RetainedStore,
    types::{Message, OriginKind, QueueId, SharedMessage, Timestamp, matches},
};

/// Topics looked at per call of [`RetainedCursor::next`].
const SCAN: usize = 1000;
/// Topics looked at for expiry per tick.
const SWEEP: usize = 10_000;

/// The retained store.
pub(super) struct Retained {
    table: RwLock<Table>,
    max_messages: usize,
    max_bytes: usize,
    available: bool,
    /// Number of messages, readable without the lock.
    len: AtomicUsize,
    /// The topic where the next sweep begins.
    swept: Mutex<Option<Arc<str>>>,
    store: Option<Arc<dyn RetainedStore>>,
}

#[derive(Default)]
struct Table {
    messages: BTreeMap<Arc<str>, Arc<SharedMessage>>,
    bytes: usize,
    /// Messages that expire some time.
    expiring: usize,
}

impl Table {
    fn put(&mut self, message: Arc<SharedMessage>) {
        self.remove(&message.topic);
        self.bytes += message.cost();
        self.expiring += usize::from(message.expires.is_some());
        self.messages.insert(Arc::clone(&message.topic), message);
    }

    fn remove(&mut self, topic: &str) -> bool {
        let Some(message) = self.messages.remove(topic) else { return false };
        self.bytes -= message.cost();
        self.expiring -= usize::from(message.expires.is_some());
        true
    }
}

impl Retained {
    pub(super) fn new(
        max_messages: usize,
        max_bytes: usize,
        available: bool,
        store: Option<Arc<dyn RetainedStore>>,
    ) -> Self {
        let len = AtomicUsize::new(0);
        let swept = Mutex::new(None);
        Self { table: RwLock::default(), max_messages, max_bytes, available, len, swept, store }
    }

    /// Sets, replaces or, for an empty payload, clears [MQTT-3.3.1-5] [MQTT-3.3.1-6]. True if there was one.
    pub(super) fn set(&self, message: &Message<'_>) -> Result<bool, RetainError> {
        if !self.available {
            return Err(RetainError::Unavailable);
        }
        if message.payload.is_empty() {
            let mut table = self.table.write();
            let existed = table.remove(message.topic);
            self.len.store(table.messages.len(), Relaxed);
            if let Some(store) = self.store.as_ref().filter(|_| existed) {
                // Submitted under the lock: in the order of the changes.
                store.clear(Arc::from(message.topic), message.retained_part());
            }
            return Ok(existed);
        }
        let published = message;
        let message = Arc::clone(message.share());
        let mut table = self.table.write();
        let old = table.messages.get(&*message.topic);
        let existed = old.is_some();
        let old_cost = old.map_or(0, |old| old.cost());
        let too_many = !existed && table.messages.len() >= self.max_messages;
        if too_many || table.bytes - old_cost + message.cost() > self.max_bytes {
            return Err(RetainError::Quota);
        }
        if let Some(store) = self.store.as_ref().filter(|_| message.kind != OriginKind::Server) {
            store.set(message.without_receipt(), published.retained_part());
        }
        table.put(message);
        self.len.store(table.messages.len(), Relaxed);
        Ok(existed)
    }

    /// Takes what the store kept, in order of topic; false beyond the limits.
    pub(super) fn restore(&self, message: &Arc<SharedMessage>) -> bool {
        let mut table = self.table.write();
        let full = table.messages.len() >= self.max_messages || table.bytes + message.cost() > self.max_bytes;
        if full || !self.available {
            return false;
        }
        table.put(Arc::clone(message));
        self.len.store(table.messages.len(), Relaxed);
        true
    }

    /// The message of a topic, if it has not expired.
    pub(super) fn get(&self, topic: &str, now: Timestamp) -> Option<Arc<SharedMessage>> {
        let message = Arc::clone(self.table.read().messages.get(topic)?);
        (!message.is_expired(now)).then_some(message)
    }

    /// Whether a new subscription to `filter` needs a cursor: surely not when nothing can match.
    pub(super) fn may_match(&self, filter: &str, now: Timestamp) -> bool {
        self.len() > 0 && (filter.contains(['+', '#']) || self.get(filter, now).is_some())
    }

    /// The first match after `after` among the next `scan` topics.
    fn scan(&self, filter: &str, after: Option<&str>, scan: usize, now: Timestamp) -> Scanned {
        let prefix = literal_prefix(filter);
        let start = match after {
            Some(after) => Bound::Excluded(after),
            None => Bound::Included(prefix),
        };
        let table = self.table.read();
        let mut last = None;
        for (seen, (topic, message)) in table.messages.range::<str, _>((start, Bound::Unbounded)).enumerate()
        {
            if !topic.starts_with(prefix) {
                return Scanned::End;
            }
            if seen == scan {
                return last.map_or(Scanned::End, Scanned::Paused);
            }
            if matches(filter, topic) && !message.is_expired(now) {
                return Scanned::Found(Arc::clone(message));
            }
            if seen + 1 == scan {
                last = Some(Arc::clone(topic));
            }
        }
        Scanned::End
    }

    /// Matches after `after`, at most `limit`.
    pub(super) fn list(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<Arc<SharedMessage>> {
        let mut list: Vec<Arc<SharedMessage>> = Vec::new();
        let mut position: Option<Arc<str>> = after.map(Arc::from);
        while list.len() < limit {
            match self.scan(filter, position.as_deref(), SCAN, now) {
                Scanned::End => break,
                Scanned::Paused(topic) => position = Some(topic),
                Scanned::Found(message) => {
                    position = Some(Arc::clone(&message.topic));
                    list.push(message);
                }
            }
        }
        list
    }

    /// Removes expired messages from the next stretch of topics.
    pub(super) fn sweep(&self, now: Timestamp) {
        let mut swept = self.swept.lock();
        let mut expired = Vec::new();
        {
            let table = self.table.read();
            if table.expiring == 0 {
                return;
            }
            let start = swept.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            let mut last = None;
            let stretch = table.messages.range::<str, _>((start, Bound::Unbounded)).take(SWEEP);
            for (seen, (topic, message)) in stretch.enumerate() {
                if message.is_expired(now) {
                    expired.push(Arc::clone(topic));
                }
                if seen + 1 == SWEEP {
                    last = Some(Arc::clone(topic));
                }
            }
            *swept = last;
        }
        for part in expired.chunks(256) {
            let mut table = self.table.write();
            for topic in part {
                // It may have been replaced in between.
                if table.messages.get(&**topic).is_some_and(|message| message.is_expired(now)) {
                    table.remove(topic);
                    if let Some(store) = &self.store {
                        store.clear(Arc::clone(topic), None);
                    }
                }
            }
            self.len.store(table.messages.len(), Relaxed);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.read().bytes
    }
}

enum Scanned {
    Found(Arc<SharedMessage>),
    /// Nothing up to this topic.
    Paused(Arc<str>),
    End,
}

/// Position in the retained messages that match one new subscription.
pub struct RetainedCursor {
    filter: Box<str>,
    position: Option<Arc<str>>,
    /// Messages it may still yield.
    left: usize,
    options: Options,
    /// Subscription identifier, 0 for none.
    id: [u32; 1],
    done: bool,
}

impl RetainedCursor {
    /// `limit` 0 is none.
    pub(super) fn new(filter: &str, options: Options, id: u32, limit: usize) -> Self {
        let left = if limit == 0 { usize::MAX } else { limit };
        Self { filter: Box::from(filter), position: None, left, options, id: [id], done: false }
    }

    /// The next message, skipping expired ones; `None` at the end. Looks at a bounded number of topics per
    /// call: `Some(None)` means "call again".
    pub fn next(&mut self, broker: &Broker, now: Timestamp) -> Option<Option<Arc<SharedMessage>>> {
        if self.done || self.left == 0 {
            return None;
        }
        let retained = broker.retained_store();
        if !self.filter.bytes().any(|byte| byte == b'+' || byte == b'#') {
            self.done = true;
            return retained.get(&self.filter, now).map(Some);
        }
        match retained.scan(&self.filter, self.position.as_deref(), SCAN, now) {
            Scanned::Found(message) => {
                self.position = Some(Arc::clone(&message.topic));
                self.left -= 1;
                Some(Some(message))
            }
            Scanned::Paused(topic) => {
                self.position = Some(topic);
                Some(None)
            }
            Scanned::End => {
                self.done = true;
                None
            }
        }
    }

    /// Options for delivering what [`Self::next`] yields (replay is set).
    pub fn options(&self) -> MatchOptions<'_> {
        MatchOptions {
            qos: self.options.qos(),
            retain_as_published: self.options.retain_as_published(),
            replay: true,
            ids: if self.id[0] == 0 { &[] } else { &self.id },
            group: 0,
            group_queue: QueueId::NONE,
            queue_offline: false,
        }
    }
}

/// What every topic that matches `filter` begins with.
fn literal_prefix(filter: &str) -> &str {
    let end = filter.find(['+', '#']).unwrap_or(filter.len());
    let prefix = &filter[..end];
    // `a/#` matches `a` too.
    if filter[end..].starts_with('#') { prefix.strip_suffix('/').unwrap_or(prefix) } else { prefix }
}
