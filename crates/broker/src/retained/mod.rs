//! Retained messages: the last one per topic, in order of topic, within count and byte limits.
//!
//! With a store, a message with more than a small payload stays in memory only for a while after it was set. Afterwards
//! only its size and expiry are here, and it is read from disk when somebody wants it: see `evict` and [`replay`].
//! Messages in memory are on the account: one that does not fit is not retained, and while more than half of the share
//! is taken, messages leave memory as soon as they are on disk.

mod listing;
mod replay;

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use ahash::RandomState;
use gateway_core::{Message, OriginKind, SharedMessage, Timestamp, has_wildcard, matches, warn_limited};
use parking_lot::{Mutex, RwLock};
use store::{LoadedRetained, StateStore, StoreError};
use tracing::field::display;

use crate::{
    QuotaHolders,
    counters::count,
    memory::{Account, MemoryKind},
    quota_holders::RetainedQuotaUse,
};

pub use listing::RetainedPage;
pub use replay::RetainedCursor;

/// Larger payloads do not stay in memory if there is a store.
const SMALL: usize = 256;
/// Time that larger payloads stay, in milliseconds, unless memory is short.
const STAY: u64 = 60_000;
/// Messages, and bytes of them, that one tick considers for leaving memory.
const EVICT: usize = 1000;
const EVICT_BYTES: usize = 16 << 20;
/// Topics looked at under one lock.
const SCAN: usize = 1000;
/// Topics checked for expiry per tick.
const SWEEP: usize = 10_000;

/// Retained message operations refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetainError {
    /// Count or bytes limit.
    Quota,
    /// The memory budget, or the share of it that retained messages may take, is used up.
    Memory,
    /// A quota of the publisher's identity or tenant; counted already.
    QuotaHolder,
    /// Switched off.
    Unavailable,
}

/// The retained store.
pub(crate) struct RetainedMessages {
    table: RwLock<RetainedTable>,
    max_messages: usize,
    max_bytes: usize,
    available: bool,
    /// Number of messages, readable without the lock.
    len: AtomicUsize,
    /// The topic where the next sweep begins.
    swept: Mutex<Option<Arc<str>>>,
    account: Arc<Account>,
    store: Option<Arc<dyn StateStore>>,
    /// Time of the last message that was refused for a limit, and the key of that limit.
    refused: Mutex<Option<(Timestamp, &'static str)>>,
}

#[derive(Default)]
struct RetainedTable {
    messages: BTreeMap<Arc<str>, RetainedPlace>,
    bytes: usize,
    /// Messages that have an expiry.
    expiring: usize,
    /// Topics whose message may leave memory, by the turn in which each is considered.
    leaving: BTreeMap<u64, Arc<str>>,
    /// The last turn that was given.
    turn: u64,
    /// Bytes in memory.
    held: usize,
    /// By topic, what of them has somebody's quotas. Empty unless quotas are configured.
    owned: HashMap<Arc<str>, RetainedQuotaUse, RandomState>,
}

/// Bytes counted for a topic in memory, beside what its message costs there.
const NODE: usize = 96;

/// Place of a topic's message: in memory or on disk.
enum RetainedPlace {
    Here {
        message: Arc<SharedMessage>,
        /// The turn in which it is considered for leaving memory, 0 for never. The topic is in `leaving` under this
        /// turn unless it is being considered right now.
        turn: u64,
    },
    /// On disk only; the store has confirmed it.
    Disk { received: Timestamp, expires: Option<Timestamp>, cost: u32 },
}

impl RetainedPlace {
    fn on_disk(message: &SharedMessage) -> Self {
        let cost = u32::try_from(message.cost()).unwrap_or(u32::MAX);
        Self::Disk { received: message.received, expires: message.expires, cost }
    }

    fn cost(&self) -> usize {
        match self {
            Self::Here { message, .. } => message.cost(),
            Self::Disk { cost, .. } => *cost as usize,
        }
    }

    /// Bytes that it takes in memory.
    fn held(&self, topic: &str) -> usize {
        match self {
            Self::Here { message, .. } => NODE + message.cost(),
            Self::Disk { .. } => NODE + topic.len(),
        }
    }

    fn expires(&self) -> Option<Timestamp> {
        match self {
            Self::Here { message, .. } => message.expires,
            Self::Disk { expires, .. } => *expires,
        }
    }

    fn is_expired(&self, now: Timestamp) -> bool {
        self.expires().is_some_and(|at| at <= now)
    }

    fn turn(&self) -> u64 {
        match self {
            Self::Here { turn, .. } => *turn,
            Self::Disk { .. } => 0,
        }
    }
}

impl RetainedTable {
    fn put(&mut self, topic: &Arc<str>, kept: RetainedPlace) {
        if let Some(old) = self.take(topic)
            && old.turn() != kept.turn()
        {
            self.leaving.remove(&old.turn());
        }
        self.bytes += kept.cost();
        self.held += kept.held(topic);
        self.expiring += usize::from(kept.expires().is_some());
        self.messages.insert(Arc::clone(topic), kept);
    }

    fn remove(&mut self, topic: &str) -> bool {
        let kept = self.take(topic);
        self.owned.remove(topic);
        if let Some(kept) = &kept {
            self.leaving.remove(&kept.turn());
        }
        kept.is_some()
    }

    /// Takes it out of the table but leaves its turn in `leaving`.
    fn take(&mut self, topic: &str) -> Option<RetainedPlace> {
        let kept = self.messages.remove(topic)?;
        self.bytes -= kept.cost();
        self.held -= kept.held(topic);
        self.expiring -= usize::from(kept.expires().is_some());
        Some(kept)
    }

    /// Queues the message of a topic, if it is in memory, after all others that may leave it.
    fn may_leave(&mut self, topic: &Arc<str>) {
        let Some(RetainedPlace::Here { turn, .. }) = self.messages.get_mut(topic) else { return };
        self.turn += 1;
        let before = std::mem::replace(turn, self.turn);
        self.leaving.remove(&before);
        self.leaving.insert(self.turn, Arc::clone(topic));
    }
}

impl RetainedMessages {
    pub(crate) fn new(
        max_messages: usize,
        max_bytes: usize,
        available: bool,
        account: &Arc<Account>,
        store: Option<Arc<dyn StateStore>>,
    ) -> Self {
        let account = Arc::clone(account);
        let len = AtomicUsize::new(0);
        let swept = Mutex::new(None);
        let (table, refused) = (RwLock::default(), Mutex::new(None));
        Self { table, max_messages, max_bytes, available, len, swept, account, store, refused }
    }

    /// Time of the last message that was refused for a limit, and the key of that limit.
    pub(crate) fn refused(&self) -> Option<(Timestamp, &'static str)> {
        *self.refused.lock()
    }

    #[cold]
    fn refuse(&self, at: Timestamp, key: &'static str) {
        *self.refused.lock() = Some((at, key));
    }

    /// Keeps a message that was published with RETAIN. One that is refused for a limit is counted and told.
    pub(crate) fn keep(&self, message: &Message<'_>, quota_holders: &QuotaHolders) {
        match self.set(message, quota_holders) {
            Err(RetainError::Quota) => count(|c| c.retained_refused.add(1)),
            Err(RetainError::Memory) => count(|c| c.retained_memory.add(1)),
            Ok(_) | Err(RetainError::Unavailable | RetainError::QuotaHolder) => return,
        }
        self.tell_refused(message);
    }

    /// Tells that a message was delivered and not stored: its publisher is not, since it was accepted.
    #[cold]
    fn tell_refused(&self, message: &Message<'_>) {
        let client_id = message.origin.client_id.map(display);
        let limit = self.refused().map(|(_, key)| key);
        warn_limited!(
            client_id,
            topic = message.topic,
            limit,
            "retained message is not stored, a limit is reached"
        );
    }

    /// Changes the table and adjusts the account. The caller has checked that what the change adds may be taken.
    fn change<R>(&self, table: &mut RetainedTable, change: impl FnOnce(&mut RetainedTable) -> R) -> R {
        let before = table.held;
        let result = change(table);
        match table.held.checked_sub(before) {
            Some(more) => self.account.force(MemoryKind::Retained, more),
            None => self.account.release(MemoryKind::Retained, before - table.held),
        }
        self.len.store(table.messages.len(), Relaxed);
        result
    }

    /// Sets, replaces or, for an empty payload, clears [MQTT-3.3.1-5] [MQTT-3.3.1-6]. True if there was one. It counts for
    /// `quota_holders` from now on.
    pub(crate) fn set(
        &self,
        message: &Message<'_>,
        quota_holders: &QuotaHolders,
    ) -> Result<bool, RetainError> {
        if !self.available {
            return Err(RetainError::Unavailable);
        }
        if message.payload.is_empty() {
            let mut table = self.table.write();
            let existed = self.change(&mut table, |table| table.remove(message.topic));
            if let Some(store) = self.store.as_ref().filter(|_| existed) {
                // Submitted under the lock, so that the store sees changes in their order.
                store.clear_retained(Arc::from(message.topic), message.part());
            }
            return Ok(existed);
        }
        let published = message;
        let message = Arc::clone(message.share());
        let mut table = self.table.write();
        let old = table.messages.get(&*message.topic);
        let existed = old.is_some();
        let old_cost = old.map_or(0, RetainedPlace::cost);
        let turn = old.map_or(0, RetainedPlace::turn);
        let too_many = !existed && table.messages.len() >= self.max_messages;
        let more = (NODE + message.cost()).saturating_sub(old.map_or(0, |old| old.held(&message.topic)));
        if too_many || table.bytes - old_cost + message.cost() > self.max_bytes {
            let key = if too_many { "limits.retained_messages" } else { "limits.retained_bytes" };
            self.refuse(message.received, key);
            return Err(RetainError::Quota);
        }
        let ours = message.kind == OriginKind::Server;
        if more > 0 && !ours && !self.account.takes_retained(more) {
            self.refuse(message.received, "limits.memory_budget");
            return Err(RetainError::Memory);
        }
        self.own(&mut table, &message, quota_holders)?;
        let mut may_leave = false;
        if let Some(store) = self.store.as_ref().filter(|_| message.kind != OriginKind::Server) {
            store.set_retained(message.without_receipt(), published.part());
            may_leave = turn == 0 && message.payload.len() > SMALL;
        }
        let topic = Arc::clone(&message.topic);
        self.change(&mut table, |table| table.put(&topic, RetainedPlace::Here { message, turn }));
        if may_leave {
            table.may_leave(&topic);
        }
        Ok(existed)
    }

    /// Has a message that is about to be set count for `quota_holders`, in the place of one that may be there.
    fn own(
        &self,
        table: &mut RetainedTable,
        message: &SharedMessage,
        quota_holders: &QuotaHolders,
    ) -> Result<(), RetainError> {
        if quota_holders.is_empty() && table.owned.is_empty() {
            return Ok(());
        }
        let former = table.owned.get_mut(&message.topic);
        let owned = RetainedQuotaUse::set(quota_holders, former, message.cost())
            .map_err(|_| RetainError::QuotaHolder)?;
        // The remainder of the former share is dropped with it.
        match owned {
            Some(owned) => drop(table.owned.insert(Arc::clone(&message.topic), owned)),
            None => drop(table.owned.remove(&message.topic)),
        }
        Ok(())
    }

    /// Restores a message from the store, in order of topic; false if it is beyond the limits. It counts for `quota_holders`.
    pub(crate) fn restore(&self, message: &Arc<SharedMessage>, quota_holders: &QuotaHolders) -> bool {
        let mut table = self.table.write();
        let full = table.messages.len() >= self.max_messages || table.bytes + message.cost() > self.max_bytes;
        if full || !self.available {
            return false;
        }
        let small = message.payload.len() <= SMALL;
        let here = || RetainedPlace::Here { message: Arc::clone(message), turn: 0 };
        let kept = if small { here() } else { RetainedPlace::on_disk(message) };
        self.change(&mut table, |table| table.put(&message.topic, kept));
        if let Some(owned) = RetainedQuotaUse::restored(quota_holders, message.cost()) {
            table.owned.insert(Arc::clone(&message.topic), owned);
        }
        true
    }

    /// Finds the message of a topic, if it has not expired.
    pub(crate) fn get(&self, topic: &str, now: Timestamp) -> Option<FoundTopic> {
        let table = self.table.read();
        let (topic, kept) = table.messages.get_key_value(topic)?;
        (!kept.is_expired(now)).then(|| FoundTopic::new(topic, kept))
    }

    /// Returns whether a new subscription to `filter` needs a cursor. False only if nothing can match.
    pub(crate) fn may_match(&self, filter: &str, now: Timestamp) -> bool {
        self.len() > 0 && (has_wildcard(filter) || self.get(filter, now).is_some())
    }

    /// Reads messages that are on disk only, for [`Self::read`].
    pub(crate) fn load(
        &self,
        topics: Vec<Arc<str>>,
    ) -> impl Future<Output = Result<LoadedRetained, StoreError>> + Send + use<> {
        let answer = self.store.as_ref().map(|store| store.load_retained(topics));
        async move {
            match answer {
                Some(answer) => answer.await,
                None => Ok(Vec::new()),
            }
        }
    }

    /// Fills in messages that were read; `read` has those of [`FoundTopic::to_read`] in the same order.
    pub(crate) fn fill<'a>(
        &self,
        found: impl IntoIterator<Item = &'a mut FoundTopic>,
        read: LoadedRetained,
        now: Timestamp,
    ) {
        let mut read = read.into_iter();
        for found in found.into_iter().filter(|found| found.message.is_none()) {
            found.message = self.read(&found.topic, read.next().flatten(), now);
        }
    }

    /// The current message of a topic for which the disk gave `read`: it may have been replaced or cleared meanwhile.
    pub(crate) fn read(
        &self,
        topic: &str,
        read: Option<Arc<SharedMessage>>,
        now: Timestamp,
    ) -> Option<Arc<SharedMessage>> {
        match self.table.read().messages.get(topic)? {
            RetainedPlace::Here { message, .. } => Some(Arc::clone(message)),
            RetainedPlace::Disk { received, .. } => read.filter(|message| message.received == *received),
        }
        .filter(|message| !message.is_expired(now))
    }

    /// The first match after `after` among the next `scan` topics, and how many were visited.
    pub(crate) fn scan(
        &self,
        filter: &str,
        after: Option<&str>,
        scan: usize,
        now: Timestamp,
    ) -> (Scanned, usize) {
        let prefix = literal_prefix(filter);
        let start = match after {
            Some(after) => Bound::Excluded(after),
            None => Bound::Included(prefix),
        };
        let table = self.table.read();
        let mut last = None;
        let mut seen = 0;
        for (topic, kept) in table.messages.range::<str, _>((start, Bound::Unbounded)) {
            if !topic.starts_with(prefix) {
                break;
            }
            if seen == scan {
                return (last.map_or(Scanned::End, Scanned::Paused), seen);
            }
            seen += 1;
            if matches(filter, topic) && !kept.is_expired(now) {
                return (Scanned::Found(FoundTopic::new(topic, kept)), seen);
            }
            if seen == scan {
                last = Some(Arc::clone(topic));
            }
        }
        (Scanned::End, seen)
    }

    /// Topics of messages that have been in memory for long, for the caller to load and pass to [`Self::evict`].
    pub(crate) fn leaving(&self, now: Timestamp) -> Vec<Arc<str>> {
        let stay = if self.account.takes(MemoryKind::Retained, self.account.share(MemoryKind::Retained) / 2) {
            STAY
        } else {
            0
        };
        let mut table = self.table.write();
        let (mut chosen, mut bytes) = (Vec::new(), 0);
        for _ in 0..EVICT.min(table.leaving.len()) {
            if bytes > EVICT_BYTES {
                break;
            }
            let Some((_, topic)) = table.leaving.pop_first() else { break };
            let Some(RetainedPlace::Here { message, .. }) = table.messages.get(&topic) else { continue };
            if message.received.plus_millis(stay) <= now {
                bytes += message.cost();
                chosen.push(topic);
            } else {
                table.may_leave(&topic);
            }
        }
        chosen
    }

    /// Drops messages from memory whose copy on disk is the same. A message that the store refused, because nobody
    /// waited for it, or has not written yet stays for now.
    pub(crate) fn evict(&self, topics: Vec<Arc<str>>, loaded: LoadedRetained) {
        let loaded = loaded.into_iter().chain(std::iter::repeat(None));
        for (topic, read) in topics.into_iter().zip(loaded) {
            let mut table = self.table.write();
            let Some(RetainedPlace::Here { message, turn }) = table.messages.get_mut(&topic) else {
                continue;
            };
            if message.payload.len() <= SMALL {
                let before = std::mem::take(turn);
                table.leaving.remove(&before);
            } else if read.is_some_and(|read| is_same(&read, message)) {
                let kept = RetainedPlace::on_disk(message);
                self.change(&mut table, |table| table.put(&topic, kept));
            } else {
                table.may_leave(&topic);
            }
        }
    }

    /// Removes expired messages from the next stretch of topics.
    pub(crate) fn sweep(&self, now: Timestamp) {
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
            for (seen, (topic, kept)) in stretch.enumerate() {
                if kept.is_expired(now) {
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
                // The message may have been replaced in between.
                if table.messages.get(&**topic).is_some_and(|kept| kept.is_expired(now)) {
                    self.change(&mut table, |table| table.remove(topic));
                    if let Some(store) = &self.store {
                        store.clear_retained(Arc::clone(topic), None);
                    }
                }
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.table.read().bytes
    }

    #[cfg(test)]
    pub(crate) fn leaving_len(&self) -> usize {
        self.table.read().leaving.len()
    }
}

/// A topic that has a message.
pub(crate) struct FoundTopic {
    pub(crate) topic: Arc<str>,
    /// `None` if it is on disk only.
    pub(crate) message: Option<Arc<SharedMessage>>,
    /// Cost of the message.
    pub(crate) cost: usize,
}

impl FoundTopic {
    fn new(topic: &Arc<str>, kept: &RetainedPlace) -> Self {
        let message = match kept {
            RetainedPlace::Here { message, .. } => Some(Arc::clone(message)),
            RetainedPlace::Disk { .. } => None,
        };
        Self { topic: Arc::clone(topic), message, cost: kept.cost() }
    }

    /// Topics of those that are on disk only.
    pub(crate) fn to_read<'a>(found: impl IntoIterator<Item = &'a Self>) -> Vec<Arc<str>> {
        let missing = found.into_iter().filter(|found| found.message.is_none());
        missing.map(|found| Arc::clone(&found.topic)).collect()
    }
}

pub(crate) enum Scanned {
    Found(FoundTopic),
    /// No match up to this topic.
    Paused(Arc<str>),
    End,
}

fn is_same(read: &SharedMessage, here: &SharedMessage) -> bool {
    read.received == here.received
        && read.expires == here.expires
        && read.qos == here.qos
        && read.payload == here.payload
        && read.properties == here.properties
}

/// Returns the text with which every topic that matches `filter` begins.
fn literal_prefix(filter: &str) -> &str {
    let end = filter.find(['+', '#']).unwrap_or(filter.len());
    let prefix = &filter[..end];
    // `a/#` matches `a` too.
    if filter[end..].starts_with('#') { prefix.strip_suffix('/').unwrap_or(prefix) } else { prefix }
}
