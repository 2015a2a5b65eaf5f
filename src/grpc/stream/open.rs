//! The streams that are open: how many, whose, and how far behind each reader is.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gateway_core::{Timestamp, clock};
use parking_lot::Mutex;

use super::{super::server::access::Call, Error, StreamTarget};

/// Topic filters that are kept of a stream to be listed, and bytes of each.
const FILTERS: usize = 10;
const FILTER_BYTES: usize = 256;

/// All streams of the gateway: counts them and ends them at shutdown.
#[derive(Debug)]
pub(in crate::grpc) struct Streams {
    inner: Mutex<Registry>,
    max: usize,
}

#[derive(Debug, Default)]
struct Registry {
    next: u64,
    open: HashMap<u64, Arc<OpenStream>>,
    closed: bool,
}

/// How far a reader is behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::grpc) struct Backlog {
    /// Messages that wait for it, and their bytes.
    pub(in crate::grpc) waiting: u64,
    pub(in crate::grpc) bytes: u64,
    /// Since when the oldest of them has waited.
    pub(in crate::grpc) oldest: Option<Timestamp>,
    /// Handed to it, lost, and replaced by newer ones since the stream was opened.
    pub(in crate::grpc) sent: u64,
    pub(in crate::grpc) dropped: u64,
    pub(in crate::grpc) conflated: u64,
}

/// A stream, as it is listed.
#[derive(Debug)]
pub(in crate::grpc) struct OpenStream {
    pub(in crate::grpc) id: u64,
    pub(in crate::grpc) call: Arc<Call>,
    pub(in crate::grpc) since: Timestamp,
    /// The first filters, cut, and how many there are.
    pub(in crate::grpc) filters: Vec<String>,
    pub(in crate::grpc) filter_count: usize,
    /// Group and member, of a stream that reads one.
    pub(in crate::grpc) member: OnceLock<(String, String)>,
    target: Option<Weak<StreamTarget>>,
    /// Of a stream without a target: in the response that its reader does not take, and since when (0: there is none).
    waiting: AtomicU64,
    blocked: AtomicU64,
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl OpenStream {
    /// What fills its buffer, if it has one.
    pub(in crate::grpc) fn target(&self) -> Option<Arc<StreamTarget>> {
        self.target.as_ref().and_then(Weak::upgrade)
    }

    /// How far its reader is behind.
    pub(in crate::grpc) fn backlog(&self) -> Backlog {
        if let Some(target) = self.target() {
            return target.backlog();
        }
        let since = Some(self.blocked.load(Relaxed)).filter(|since| *since > 0);
        Backlog {
            waiting: since.map_or(0, |_| self.waiting.load(Relaxed)),
            bytes: 0,
            oldest: since.map(Timestamp),
            sent: self.sent.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
            conflated: 0,
        }
    }
}

/// One place among the streams, given back on drop.
#[derive(Debug)]
pub(in crate::grpc) struct StreamSlot {
    streams: Arc<Streams>,
    stream: Arc<OpenStream>,
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.streams.inner.lock().open.remove(&self.stream.id);
    }
}

impl StreamSlot {
    /// Notes which group it reads, and as whom.
    pub(in crate::grpc) fn reads(&self, group: &str, member: &str) {
        // Said once.
        let _ = self.stream.member.set((group.to_owned(), member.to_owned()));
    }

    /// Notes messages that were handed out.
    pub(in crate::grpc) fn sent(&self, messages: u64) {
        self.stream.sent.fetch_add(messages, Relaxed);
    }

    /// Notes messages that were lost.
    pub(in crate::grpc) fn lost(&self, messages: u64) {
        self.stream.dropped.fetch_add(messages, Relaxed);
    }

    /// Waits until a response of `messages` messages has found its place.
    pub(in crate::grpc) async fn sending<T>(&self, messages: u64, send: impl Future<Output = T>) -> T {
        let stream = &self.stream;
        stream.waiting.store(messages, Relaxed);
        stream.blocked.store(clock::now().0, Relaxed);
        let sent = send.await;
        stream.blocked.store(0, Relaxed);
        self.sent(messages);
        sent
    }
}

impl Streams {
    /// At most `max` streams at once.
    pub(in crate::grpc) fn new(max: usize) -> Self {
        Self { inner: Mutex::default(), max }
    }

    /// Takes a place, for a stream without a buffer of its own.
    pub(in crate::grpc) fn open(self: &Arc<Self>, call: &Arc<Call>) -> Result<StreamSlot, Error> {
        self.take(call, None, &[])
    }

    /// Takes a place, for a stream of what matches `filters`.
    pub(in crate::grpc) fn open_with(
        self: &Arc<Self>,
        call: &Arc<Call>,
        target: &Arc<StreamTarget>,
        filters: &[String],
    ) -> Result<StreamSlot, Error> {
        self.take(call, Some(Arc::downgrade(target)), filters)
    }

    fn take(
        self: &Arc<Self>,
        call: &Arc<Call>,
        target: Option<Weak<StreamTarget>>,
        filters: &[String],
    ) -> Result<StreamSlot, Error> {
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Error::ShuttingDown);
        }
        if inner.open.len() >= self.max {
            return Err(Error::TooManyStreams);
        }
        let id = inner.next;
        inner.next += 1;
        let first = filters.iter().take(FILTERS);
        let stream = Arc::new(OpenStream {
            id,
            call: Arc::clone(call),
            since: clock::now(),
            filters: first.map(|all| all[..all.floor_char_boundary(FILTER_BYTES)].to_owned()).collect(),
            filter_count: filters.len(),
            member: OnceLock::new(),
            target,
            waiting: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        });
        inner.open.insert(id, Arc::clone(&stream));
        Ok(StreamSlot { streams: Arc::clone(self), stream })
    }

    /// All that are open now, in no order.
    pub(in crate::grpc) fn all(&self) -> Vec<Arc<OpenStream>> {
        self.inner.lock().open.values().cloned().collect()
    }

    /// Tells watchers that values of `device` were deleted.
    pub(in crate::grpc) fn removed(&self, device: &str, topics: &[Arc<str>]) {
        for target in self.all().iter().filter_map(|stream| stream.target()) {
            target.removed(device, topics);
        }
    }

    /// Ends all streams that have a target, and refuses new ones.
    pub(in crate::grpc) fn close(&self) {
        self.inner.lock().closed = true;
        for target in self.all().iter().filter_map(|stream| stream.target()) {
            target.close(Error::ShuttingDown);
        }
    }
}
