//! A disk in memory that keeps the promises of the stores: operations of queues in order, written or refused when a test says so.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use gateway_core::{Commit, Journal, NoRoom, QueueEntry, QueueId, QueueOp, StoredEntry};
use parking_lot::Mutex;
use store::{
    BoxFuture, Loaded, LoadedRetained, Restore, RetainedStore, SessionOp, SessionStore, StoreError,
    StoreHealth,
};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
};

use super::*;

thread_local! {
    /// The runtime of one test: each test has a thread of its own.
    static RUNTIME: Runtime = Builder::new_current_thread().build().expect("a runtime");
}

fn runtime() -> Handle {
    RUNTIME.with(|runtime| runtime.handle().clone())
}

/// Lets the broker take up the pages it has read.
pub(super) fn go_on() {
    RUNTIME.with(|runtime| runtime.block_on(tokio::task::yield_now()));
}

enum Job {
    Op(QueueOp),
    Load { queue: QueueId, from: u64, messages: usize, reply: oneshot::Sender<Result<Loaded, StoreError>> },
}

#[derive(Default)]
struct DiskState {
    waiting: VecDeque<Job>,
    entries: BTreeMap<(QueueId, u64), StoredEntry>,
    /// Commits fail.
    failing: bool,
    /// Reads fail.
    unreadable: bool,
    loads: usize,
}

#[derive(Default)]
pub(super) struct Disk(Mutex<DiskState>);

impl Disk {
    /// Stores of which only the queues keep anything.
    pub(super) fn stores(self: &Arc<Self>) -> Stores {
        Stores {
            sessions: Arc::new(Forgetful),
            queues: Arc::clone(self) as _,
            retained: Arc::new(Forgetful),
            runtime: runtime(),
        }
    }

    pub(super) fn append(&self, queue: QueueId, place: u64, message: &Message<'_>, qos: QoS) {
        let commit = message.commit().cloned();
        let entry = QueueEntry::new(queue, place, Arc::clone(message.share()), qos, commit);
        self.submit(QueueOp::Append(Arc::new(entry)));
    }

    pub(super) fn set_failing(&self, failing: bool) {
        self.0.lock().failing = failing;
    }

    pub(super) fn set_unreadable(&self, unreadable: bool) {
        self.0.lock().unreadable = unreadable;
    }

    /// Returns the number of pages asked for.
    pub(super) fn loads(&self) -> usize {
        self.0.lock().loads
    }

    /// Writes what was submitted, or fails to. False if there was nothing to do.
    pub(super) fn commit(&self) -> bool {
        let mut ended: Vec<(Arc<Commit>, bool)> = Vec::new();
        let mut answers = Vec::new();
        let busy = {
            let mut state = self.0.lock();
            let jobs = std::mem::take(&mut state.waiting);
            let busy = !jobs.is_empty();
            let refused = state.failing;
            for job in jobs {
                match job {
                    Job::Op(QueueOp::Append(entry)) => {
                        if let Some(message) = entry.take().filter(|_| !refused) {
                            let stored = stored(&entry, message);
                            let old = state.entries.insert((entry.queue, entry.seq), stored);
                            assert!(old.is_none(), "place {} given twice", entry.seq);
                        }
                        ended.extend(entry.commit.clone().map(|commit| (commit, refused)));
                    }
                    Job::Op(QueueOp::Remove { unit: Some(commit), queue, seq }) => {
                        if !refused {
                            state.entries.remove(&(queue, seq));
                        }
                        ended.push((commit, refused));
                    }
                    Job::Op(QueueOp::Receive { commit, .. }) => ended.push((commit, refused)),
                    Job::Op(op) if refused => state.waiting.push_back(Job::Op(op)),
                    Job::Op(QueueOp::Remove { queue, seq, .. }) => {
                        state.entries.remove(&(queue, seq));
                    }
                    Job::Op(QueueOp::Purge { queue }) => state.entries.retain(|key, _| key.0 != queue),
                    Job::Op(op) => panic!("{op:?}"),
                    Job::Load { queue, from, messages, reply } => {
                        answers.push((reply, state.load(queue, from, messages)));
                    }
                }
            }
            busy
        };
        for (commit, refused) in ended {
            if refused { commit.refuse() } else { commit.done() }
        }
        for (reply, answer) in answers {
            let _ = reply.send(answer);
        }
        go_on();
        busy
    }

    /// Payloads of a queue, in order.
    pub(super) fn payloads(&self, queue: QueueId) -> Vec<String> {
        let state = self.0.lock();
        let entries = state.entries.range((queue, 0)..=(queue, u64::MAX));
        let messages = entries.filter_map(|(_, entry)| entry.message.as_ref());
        messages.map(|message| String::from_utf8_lossy(&message.payload).into_owned()).collect()
    }

    /// Removes the first entry as expired; returns what it cost.
    pub(super) fn expire_first(&self, queue: QueueId) -> u64 {
        let mut state = self.0.lock();
        let key = *state.entries.range((queue, 0)..).next().expect("an entry").0;
        let message = state.entries.remove(&key).and_then(|entry| entry.message);
        message.expect("a message").cost() as u64
    }
}

impl DiskState {
    fn load(&self, queue: QueueId, from: u64, messages: usize) -> Result<Loaded, StoreError> {
        if self.unreadable {
            return Err(StoreError::Unavailable("a test says so".to_owned()));
        }
        let rest = self.entries.range((queue, from)..=(queue, u64::MAX));
        let entries: Vec<StoredEntry> = rest.clone().take(messages).map(|(_, entry)| entry.clone()).collect();
        let next = entries.last().map_or(from, |entry| entry.seq + 1);
        Ok(Loaded { entries, next, end: rest.count() <= messages, damaged: 0 })
    }
}

fn stored(entry: &QueueEntry, message: Arc<SharedMessage>) -> StoredEntry {
    let QueueEntry { seq, qos, retain, sent, group, .. } = *entry;
    StoredEntry { seq, qos, retain, sent, group, ids: None, message: Some(message.without_receipt()) }
}

impl Journal for Disk {
    fn submit(&self, op: QueueOp) {
        self.0.lock().waiting.push_back(Job::Op(op));
    }
}

impl QueueStore for Disk {
    fn load(
        &self,
        queue: QueueId,
        from: u64,
        messages: usize,
        _bytes: usize,
    ) -> BoxFuture<'static, Result<Loaded, StoreError>> {
        let (reply, answer) = oneshot::channel();
        let mut state = self.0.lock();
        state.loads += 1;
        state.waiting.push_back(Job::Load { queue, from, messages, reply });
        Box::pin(async move { answer.await.expect("an answer") })
    }
    fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError> {
        Ok(Vec::new())
    }
    fn accepts(&self) -> bool {
        !self.0.lock().failing
    }
    fn admit(&self, _: &Message<'_>) -> Result<(), NoRoom> {
        if self.accepts() { Ok(()) } else { Err(NoRoom::Full) }
    }
    fn health(&self) -> StoreHealth {
        if self.0.lock().failing { StoreHealth::Failing } else { StoreHealth::Sound }
    }
}

/// Keeps nothing.
struct Forgetful;

impl SessionStore for Forgetful {
    fn submit(&self, op: SessionOp) {
        if let SessionOp::Put(_, Some(commit)) | SessionOp::Remove(_, Some(commit)) = op {
            commit.done();
        }
    }
    fn restore(&self, _into: &mut dyn Restore) -> Result<(), StoreError> {
        Ok(())
    }
    fn accepts(&self) -> bool {
        true
    }
    fn health(&self) -> StoreHealth {
        StoreHealth::Sound
    }
}

#[derive(Default)]
struct Shelves {
    messages: BTreeMap<Arc<str>, Arc<SharedMessage>>,
    refusing: bool,
    unreadable: bool,
    holding: bool,
    held: Vec<(oneshot::Sender<Result<LoadedRetained, StoreError>>, LoadedRetained)>,
    loads: usize,
}

/// Retained messages, written at once.
#[derive(Default)]
pub(super) struct Shelf(Mutex<Shelves>);

impl Shelf {
    /// Stores of which only that of retained messages keeps anything.
    pub(super) fn stores(self: &Arc<Self>) -> Stores {
        Stores {
            sessions: Arc::new(Forgetful),
            queues: Arc::new(Disk::default()),
            retained: Arc::clone(self) as _,
            runtime: runtime(),
        }
    }

    pub(super) fn set_refusing(&self, refusing: bool) {
        self.0.lock().refusing = refusing;
    }

    pub(super) fn set_unreadable(&self, unreadable: bool) {
        self.0.lock().unreadable = unreadable;
    }

    /// While on, reads wait for [`Self::answer`].
    pub(super) fn set_holding(&self, holding: bool) {
        self.0.lock().holding = holding;
    }

    pub(super) fn answer(&self) {
        let held = {
            let mut shelves = self.0.lock();
            shelves.holding = false;
            std::mem::take(&mut shelves.held)
        };
        for (reply, loaded) in held {
            let _ = reply.send(Ok(loaded));
        }
        go_on();
    }

    pub(super) fn loads(&self) -> usize {
        self.0.lock().loads
    }

    /// Returns the number of references to the message of a topic, this store's included.
    pub(super) fn references(&self, topic: &str) -> usize {
        Arc::strong_count(&self.0.lock().messages[topic])
    }
}

impl RetainedStore for Shelf {
    fn set(&self, message: Arc<SharedMessage>, commit: Option<Arc<Commit>>) {
        let mut shelves = self.0.lock();
        if !shelves.refusing {
            shelves.messages.insert(Arc::clone(&message.topic), message);
        }
        drop(shelves);
        commit.inspect(|commit| commit.done());
    }
    fn clear(&self, topic: Arc<str>, commit: Option<Arc<Commit>>) {
        self.0.lock().messages.remove(&topic);
        commit.inspect(|commit| commit.done());
    }
    fn load(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>> {
        let mut shelves = self.0.lock();
        shelves.loads += 1;
        if shelves.unreadable {
            let error = StoreError::Unavailable("a test says so".to_owned());
            return Box::pin(std::future::ready(Err(error)));
        }
        // As if decoded anew.
        let copy = |message: &Arc<SharedMessage>| {
            message.with_receipt(Arc::new(gateway_core::Receipt::default())).without_receipt()
        };
        let loaded: LoadedRetained =
            topics.iter().map(|topic| shelves.messages.get(topic).map(copy)).collect();
        let (reply, answer) = oneshot::channel();
        if shelves.holding {
            shelves.held.push((reply, loaded));
        } else {
            let _ = reply.send(Ok(loaded));
        }
        Box::pin(async move { answer.await.expect("an answer") })
    }
    fn restore(&self, into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError> {
        let messages: Vec<_> = self.0.lock().messages.values().cloned().collect();
        messages.into_iter().for_each(into);
        Ok(())
    }
    fn health(&self) -> StoreHealth {
        StoreHealth::Sound
    }
}

impl RetainedStore for Forgetful {
    fn set(&self, _message: Arc<SharedMessage>, _commit: Option<Arc<Commit>>) {}
    fn clear(&self, _topic: Arc<str>, _commit: Option<Arc<Commit>>) {}
    fn load(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>> {
        Box::pin(std::future::ready(Ok(vec![None; topics.len()])))
    }
    fn restore(&self, _into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError> {
        Ok(())
    }
    fn health(&self) -> StoreHealth {
        StoreHealth::Sound
    }
}
