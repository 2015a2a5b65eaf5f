//! Retained messages that are not written yet: the last change of each topic.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use gateway_core::{Commit, SharedMessage, metrics::count};
use heed::RwTxn;

use super::tables::Tables;
use crate::embedded::{
    committer::{Inbox, Work},
    pending::Change,
};

/// A message, or `None` to remove that of a topic, and who waits.
pub(super) struct Op {
    pub(super) topic: Arc<str>,
    pub(super) message: Option<Arc<SharedMessage>>,
    pub(super) commit: Option<Arc<Commit>>,
}

/// Bytes counted for a removal, beside the topic.
const OVERHEAD: usize = 100;

/// Changes in the order of topics, and who waits for them.
pub(super) struct Waiting {
    topics: BTreeMap<Arc<str>, Change<Arc<SharedMessage>>>,
    commits: Vec<Arc<Commit>>,
    operations: usize,
    bytes: usize,
    /// Bytes that the writer has in hand.
    in_hand: Arc<AtomicUsize>,
    limit: usize,
}

impl Waiting {
    /// Nothing waits. With more than `limit` bytes here and in hand nothing more is taken.
    pub(super) fn new(limit: usize, in_hand: Arc<AtomicUsize>) -> Self {
        Self { topics: BTreeMap::new(), commits: Vec::new(), operations: 0, bytes: 0, in_hand, limit }
    }

    fn is_full(&self) -> bool {
        self.bytes + self.in_hand.load(Relaxed) > self.limit
    }

    fn take_from(&mut self, later: &mut Self) {
        for (topic, later) in mem::take(&mut later.topics) {
            self.topics.entry(topic).or_default().merge(later);
        }
        self.commits.append(&mut later.commits);
        later.bytes = 0;
        later.operations = 0;
    }

    fn is_empty(&self) -> bool {
        self.topics.is_empty() && self.commits.is_empty()
    }
}

impl Inbox for Waiting {
    type Op = Op;

    fn push(&mut self, op: Op) {
        self.operations += 1;
        // A removal of a topic that waits already makes room.
        let grows = op.message.is_some() || !self.topics.contains_key(&op.topic);
        if grows && self.is_full() {
            count(|c| c.store_refused_retained.add(1));
            if let Some(commit) = op.commit {
                commit.refuse();
            }
            return;
        }
        let topic = Arc::clone(&op.topic);
        let known = self.topics.get(&topic).map_or(0, |change| bytes(&topic, change));
        let change = self.topics.entry(op.topic).or_default();
        match (op.message, op.commit.is_some()) {
            (Some(message), true) => change.offer(message),
            (message, _) => change.keep(message),
        }
        self.bytes = self.bytes + bytes(&topic, change) - known;
        self.commits.extend(op.commit);
    }

    fn len(&self) -> usize {
        self.operations
    }
}

fn bytes(topic: &str, change: &Change<Arc<SharedMessage>>) -> usize {
    OVERHEAD + topic.len() + change.values().map(|message| message.cost()).sum::<usize>()
}

/// Writes what waits.
pub(super) struct Writer {
    tables: Tables,
    batch: Waiting,
    buffer: Vec<u8>,
}

impl Writer {
    /// `batch` is an empty one.
    pub(super) fn new(tables: Tables, batch: Waiting) -> Self {
        Self { tables, batch, buffer: Vec::new() }
    }

    fn note_bytes(&self) {
        let bytes = self.batch.topics.iter().map(|(topic, change)| bytes(topic, change)).sum();
        self.batch.in_hand.store(bytes, Relaxed);
    }
}

impl Work for Writer {
    type Inbox = Waiting;

    fn accept(&mut self, inbox: &mut Waiting) {
        self.batch.take_from(inbox);
        self.note_bytes();
    }

    fn plan(&mut self) -> bool {
        !self.batch.is_empty()
    }

    fn apply(&mut self, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        for (topic, change) in &self.batch.topics {
            match change.target() {
                Some(Some(message)) => self.tables.set(txn, message, &mut self.buffer)?,
                Some(None) => self.tables.clear(txn, topic)?,
                None => {}
            }
        }
        Ok(())
    }

    /// What nobody waits for is written even from the reserve: it cannot be refused, and there is a bound to it.
    fn adds(&self) -> bool {
        self.batch.topics.values().any(Change::is_offer)
    }

    fn committed(&mut self) {
        self.batch.topics.clear();
        self.batch.in_hand.store(0, Relaxed);
        for commit in self.batch.commits.drain(..) {
            commit.done();
        }
    }

    fn failed(&mut self) {
        self.batch.topics.retain(|_, change| change.fail());
        self.note_bytes();
        for commit in self.batch.commits.drain(..) {
            commit.refuse();
        }
    }

    fn more(&self) -> bool {
        !self.batch.is_empty()
    }

    fn close(&mut self) {
        self.failed();
    }
}
