//! The streams that are open: how many, whose, what they hold, and how far behind each reader is.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use auth::backends::callers::{CallerKey, CallerPlaces, NoPlace};
use broker::Account;
use gateway_core::{Timestamp, clock, level_count};
use parking_lot::Mutex;

use super::{
    super::server::{
        access::Call,
        caller_memory::{CallerMemory, MemoryReservation},
    },
    Error, StreamBacklog, StreamTarget,
};
use crate::counters::count;

/// Topic filters that are kept of a stream to be listed, and bytes of each.
const FILTERS: usize = 10;
const FILTER_BYTES: usize = 256;

/// All streams of the gateway: counts them, also by caller, and ends them at shutdown.
#[derive(Debug)]
pub(crate) struct OpenStreams {
    inner: Mutex<StreamRegistry>,
    places: CallerPlaces,
    account: Arc<Account>,
}

#[derive(Debug, Default)]
struct StreamRegistry {
    next: u64,
    open: HashMap<u64, Arc<OpenStream>>,
    /// Callers with a stream.
    callers: HashMap<CallerKey, CallerStreams>,
    closed: bool,
}

/// The streams of a caller.
#[derive(Debug)]
struct CallerStreams {
    open: usize,
    /// Charges of all streams of the caller.
    caller_memory: Arc<CallerMemory>,
}

/// A stream, as it is listed.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub id: u64,
    pub(crate) call: Arc<Call>,
    pub since: Timestamp,
    /// Group and member, of a stream that reads one.
    pub(crate) member: OnceLock<(String, String)>,
    /// Target that fills the buffer of a stream of messages.
    source: OnceLock<StreamSource>,
    /// Of a stream without a target: in the response that its reader does not take, and since when (0: there is none).
    waiting: AtomicU64,
    blocked: AtomicU64,
    sent: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Debug)]
struct StreamSource {
    target: Weak<StreamTarget>,
    /// The first filters, cut, and how many there are.
    filters: Vec<String>,
    filter_count: usize,
}

impl OpenStream {
    /// Returns the target that fills the stream's buffer, if there is one.
    pub(crate) fn target(&self) -> Option<Arc<StreamTarget>> {
        self.source.get().and_then(|source| source.target.upgrade())
    }

    /// The first of its topic filters, cut, and how many it has.
    pub(crate) fn filters(&self) -> (&[String], usize) {
        self.source.get().map_or((&[], 0), |source| (&source.filters, source.filter_count))
    }

    /// Returns the backlog of the reader.
    pub(crate) fn backlog(&self) -> StreamBacklog {
        if let Some(target) = self.target() {
            return target.backlog();
        }
        let since = Some(self.blocked.load(Relaxed)).filter(|since| *since > 0);
        StreamBacklog {
            waiting: since.map_or(0, |_| self.waiting.load(Relaxed)),
            bytes: 0,
            oldest: since.map(Timestamp),
            sent: self.sent.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
            conflated: 0,
        }
    }
}

/// One place among the streams, with what the stream holds beside its buffer; given back on drop.
#[derive(Debug)]
pub(crate) struct StreamSlot {
    streams: Arc<OpenStreams>,
    stream: Arc<OpenStream>,
    caller: CallerKey,
    caller_memory: Arc<CallerMemory>,
    selection: MemoryReservation,
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        let mut inner = self.streams.inner.lock();
        inner.open.remove(&self.stream.id);
        if let Some(of_caller) = inner.callers.get_mut(&self.caller) {
            of_caller.open -= 1;
            if of_caller.open == 0 {
                inner.callers.remove(&self.caller);
            }
        }
    }
}

/// Bytes of a name in a selection besides its own: as text, in a set, and as the system's memory hands it out.
const NAME: usize = 96;
/// Bytes of a filter in the index besides its own, and of each of its levels.
const FILTER: usize = 128;
const LEVEL: usize = 48;

/// Returns the memory of a selection of names: devices, prefixes, names of shadows.
pub(crate) fn size_of_names<'a>(names: impl IntoIterator<Item = &'a String>) -> usize {
    names.into_iter().map(|name| NAME + name.len()).sum()
}

/// Returns the memory of subscriptions to `filters`, with the list of them.
pub(crate) fn size_of_filters(filters: &[String]) -> usize {
    let size = |filter: &String| NAME + FILTER + 2 * filter.len() + LEVEL * level_count(filter);
    filters.iter().map(size).sum()
}

impl StreamSlot {
    /// Returns the charges of all streams of its caller.
    pub(crate) fn caller_memory(&self) -> &Arc<CallerMemory> {
        &self.caller_memory
    }

    /// Charges what the stream was asked for, for as long as it is open: `bytes` as the sizes here say.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn select(&mut self, bytes: usize) -> Result<(), Error> {
        if self.selection.set(bytes) { Ok(()) } else { Err(Error::MemoryBudget) }
    }

    /// Lists it as one of what matches `filters`, which `target` takes in.
    pub(super) fn feeds(&self, target: &Arc<StreamTarget>, filters: &[String]) {
        let first = filters.iter().take(FILTERS);
        let source = StreamSource {
            target: Arc::downgrade(target),
            filters: first.map(|all| all[..all.floor_char_boundary(FILTER_BYTES)].to_owned()).collect(),
            filter_count: filters.len(),
        };
        // Said once.
        let _ = self.stream.source.set(source);
        // Targets that were there already are told by the code that closes them.
        if self.streams.inner.lock().closed {
            target.close(Error::ShuttingDown);
        }
    }

    /// Notes which group it reads, and as whom.
    pub(crate) fn reads(&self, group: &str, member: &str) {
        // Said once.
        let _ = self.stream.member.set((group.to_owned(), member.to_owned()));
    }

    /// Notes messages that were handed out.
    pub(crate) fn sent(&self, messages: u64) {
        self.stream.sent.fetch_add(messages, Relaxed);
    }

    /// Notes messages that were lost.
    pub(crate) fn lost(&self, messages: u64) {
        self.stream.dropped.fetch_add(messages, Relaxed);
    }

    /// Waits until a response of `messages` messages has found its place.
    pub(crate) async fn sending<T>(&self, messages: u64, send: impl Future<Output = T>) -> T {
        let stream = &self.stream;
        stream.waiting.store(messages, Relaxed);
        stream.blocked.store(clock::now().0, Relaxed);
        let sent = send.await;
        stream.blocked.store(0, Relaxed);
        self.sent(messages);
        sent
    }
}

fn refused(none: NoPlace) -> Error {
    Error::TooManyStreams(match none {
        NoPlace::All => {
            count(|c| c.grpc_streams_refused_all.add(1));
            "in all"
        }
        NoPlace::Caller => {
            count(|c| c.grpc_streams_refused_caller.add(1));
            "of this caller"
        }
    })
}

impl OpenStreams {
    /// At most so many streams at once; what they hold is charged to `account`.
    pub(crate) fn new(places: CallerPlaces, account: Arc<Account>) -> Self {
        Self { inner: Mutex::default(), places, account }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// All are taken, the caller has its share of them, or the gateway shuts down.
    pub(crate) fn open(self: &Arc<Self>, call: &Arc<Call>) -> Result<StreamSlot, Error> {
        let caller = call.key();
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Error::ShuttingDown);
        }
        let held = inner.callers.get(&caller).map_or(0, |of_caller| of_caller.open);
        self.places.check(inner.open.len(), held).map_err(refused)?;
        let of_caller = inner.callers.entry(caller).or_insert_with(|| CallerStreams {
            open: 0,
            caller_memory: CallerMemory::of_streams(Arc::clone(&self.account)),
        });
        of_caller.open += 1;
        let caller_memory = Arc::clone(&of_caller.caller_memory);
        let id = inner.next;
        inner.next += 1;
        let stream = Arc::new(OpenStream {
            id,
            call: Arc::clone(call),
            since: clock::now(),
            member: OnceLock::new(),
            source: OnceLock::new(),
            waiting: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        });
        inner.open.insert(id, Arc::clone(&stream));
        let selection = caller_memory.open();
        Ok(StreamSlot { streams: Arc::clone(self), stream, caller, caller_memory, selection })
    }

    /// All that are open now, in no order.
    pub(crate) fn all(&self) -> Vec<Arc<OpenStream>> {
        self.inner.lock().open.values().cloned().collect()
    }

    /// Tells watchers that values of `device` were deleted.
    pub(crate) fn removed(&self, device: &str, topics: &[Arc<str>]) {
        for target in self.all().iter().filter_map(|stream| stream.target()) {
            target.removed(device, topics);
        }
    }

    /// Ends all streams that have a target, and refuses new ones.
    pub(crate) fn close(&self) {
        self.inner.lock().closed = true;
        for target in self.all().iter().filter_map(|stream| stream.target()) {
            target.close(Error::ShuttingDown);
        }
    }
}
