//! Changes of sessions that are not written yet, by session: all that waits is written in one transaction, so of
//! changes of one record only the last counts, and a stalled disk cannot make more of them than there are records.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use gateway_core::{Commit, QueueId, metrics::count};
use heed::RwTxn;

use super::tables::Tables;
use crate::{
    SessionOp, StoredSession, StoredSubscription,
    embedded::{
        committer::{Inbox, Work},
        pending::Change,
    },
};

/// Fixed part of what one waiting record is counted with, in bytes.
const OVERHEAD: usize = 200;

/// What waits for one session.
#[derive(Default)]
struct Session {
    /// All that was stored is to be removed first.
    cleared: bool,
    record: Change<Box<StoredSession>>,
    subscriptions: BTreeMap<String, Change<StoredSubscription>>,
}

/// Changes in the order of their keys, and who waits for them.
pub(super) struct Waiting {
    sessions: BTreeMap<QueueId, Session>,
    groups: BTreeMap<QueueId, Change<String>>,
    commits: Vec<Arc<Commit>>,
    operations: usize,
    /// Bytes of values in memory, here.
    bytes: usize,
    /// Bytes that the writer has in hand.
    in_hand: Arc<AtomicUsize>,
    limit: usize,
}

impl Waiting {
    /// Nothing waits. With more than `limit` bytes here and in hand, what somebody waits for is refused.
    pub(super) fn new(limit: usize, in_hand: Arc<AtomicUsize>) -> Self {
        Self {
            sessions: BTreeMap::new(),
            groups: BTreeMap::new(),
            commits: Vec::new(),
            operations: 0,
            bytes: 0,
            in_hand,
            limit,
        }
    }

    fn is_full(&self) -> bool {
        self.bytes + self.in_hand.load(Relaxed) > self.limit
    }

    fn put(&mut self, session: Box<StoredSession>, commit: Option<Arc<Commit>>) {
        let place = &mut self.sessions.entry(session.queue).or_default().record;
        self.bytes -= records(place);
        match commit {
            Some(commit) => {
                place.offer(session);
                self.commits.push(commit);
            }
            None => place.keep(Some(session)),
        }
        self.bytes += records(place);
    }

    fn remove(&mut self, queue: QueueId, commit: Option<Arc<Commit>>) {
        let place = self.sessions.entry(queue).or_default();
        self.bytes -= place.bytes();
        *place = Session { cleared: true, ..Session::default() };
        self.commits.extend(commit);
    }

    fn subscription(&mut self, queue: QueueId, filter: String, value: Option<StoredSubscription>) {
        let place = self.sessions.entry(queue).or_default().subscriptions.entry(filter).or_default();
        self.bytes -= subscriptions(place);
        match value {
            Some(value) => place.offer(value),
            None => place.keep(None),
        }
        self.bytes += subscriptions(place);
    }

    fn take_from(&mut self, later: &mut Self) {
        for (queue, later) in mem::take(&mut later.sessions) {
            self.sessions.entry(queue).or_default().merge(later);
        }
        for (queue, later) in mem::take(&mut later.groups) {
            self.groups.entry(queue).or_default().merge(later);
        }
        self.commits.append(&mut later.commits);
        later.bytes = 0;
        later.operations = 0;
    }

    fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.groups.is_empty() && self.commits.is_empty()
    }
}

impl Inbox for Waiting {
    type Op = SessionOp;

    fn push(&mut self, op: SessionOp) {
        self.operations += 1;
        match op {
            SessionOp::Put(_, Some(commit)) | SessionOp::Subscribe(_, _, commit) if self.is_full() => {
                count(|c| c.store_refused_sessions.add(1));
                commit.refuse();
            }
            SessionOp::Put(session, commit) => self.put(session, commit),
            SessionOp::Remove(queue, commit) => self.remove(queue, commit),
            SessionOp::Subscribe(queue, value, commit) => {
                self.subscription(queue, value.filter.clone(), Some(value));
                self.commits.push(commit);
            }
            SessionOp::Unsubscribe(queue, filter, commit) => {
                self.subscription(queue, filter, None);
                self.commits.push(commit);
            }
            SessionOp::Group(queue, name) => self.groups.entry(queue).or_default().keep(Some(name)),
            SessionOp::RemoveGroup(queue) => self.groups.entry(queue).or_default().keep(None),
        }
    }

    fn len(&self) -> usize {
        self.operations
    }
}

impl Session {
    fn merge(&mut self, later: Self) {
        if later.cleared {
            *self = later;
            return;
        }
        self.record.merge(later.record);
        for (filter, later) in later.subscriptions {
            self.subscriptions.entry(filter).or_default().merge(later);
        }
    }

    /// What was offered could not be written. Whether something is left.
    fn fail(&mut self) -> bool {
        self.subscriptions.retain(|_, change| change.fail());
        self.record.fail() | self.cleared | !self.subscriptions.is_empty()
    }

    fn bytes(&self) -> usize {
        records(&self.record) + self.subscriptions.values().map(subscriptions).sum::<usize>()
    }
}

fn records(change: &Change<Box<StoredSession>>) -> usize {
    change
        .values()
        .map(|session| {
            let will = session.will.as_ref().map_or(0, |will| will.message.cost());
            let username = session.username.as_ref().map_or(0, |name| name.len());
            OVERHEAD + session.client_id.as_str().len() + username + will
        })
        .sum()
}

fn subscriptions(change: &Change<StoredSubscription>) -> usize {
    change.values().map(|subscription| OVERHEAD + 2 * subscription.filter.len()).sum()
}

/// Writes what waits.
pub(super) struct Writer {
    tables: Tables,
    batch: Waiting,
    buffer: Vec<u8>,
    /// Sessions in the table after the transaction.
    count: u64,
    stored: Arc<AtomicU64>,
}

impl Writer {
    /// `batch` is an empty one; `stored` is told how many sessions there are.
    pub(super) fn new(tables: Tables, batch: Waiting, stored: Arc<AtomicU64>) -> Self {
        Self { tables, batch, buffer: Vec::new(), count: 0, stored }
    }

    fn note_bytes(&self) {
        let bytes = self.batch.sessions.values().map(Session::bytes).sum();
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
        let (tables, buffer) = (&self.tables, &mut self.buffer);
        for (&queue, session) in &self.batch.sessions {
            if session.cleared {
                tables.remove(txn, queue)?;
            }
            if let Some(Some(record)) = session.record.target() {
                tables.put(txn, record, buffer)?;
            }
            for (filter, change) in &session.subscriptions {
                match change.target() {
                    Some(Some(subscription)) => tables.subscribe(txn, queue, subscription, buffer)?,
                    Some(None) => tables.unsubscribe(txn, queue, filter)?,
                    None => {}
                }
            }
        }
        for (&queue, change) in &self.batch.groups {
            match change.target() {
                Some(Some(name)) => tables.put_group(txn, queue, name, buffer)?,
                Some(None) => tables.remove_group(txn, queue)?,
                None => {}
            }
        }
        self.count = tables.sessions.len(txn)?;
        Ok(())
    }

    /// What nobody waits for is written even from the reserve: it cannot be refused, and there is a bound to it.
    fn adds(&self) -> bool {
        self.batch
            .sessions
            .values()
            .any(|session| session.record.is_offer() || session.subscriptions.values().any(Change::is_offer))
    }

    fn committed(&mut self) {
        self.stored.store(self.count, Relaxed);
        self.batch.sessions.clear();
        self.batch.groups.clear();
        self.batch.in_hand.store(0, Relaxed);
        for commit in self.batch.commits.drain(..) {
            commit.done();
        }
    }

    fn failed(&mut self) {
        self.batch.sessions.retain(|_, session| session.fail());
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
