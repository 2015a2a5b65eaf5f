//! Changes of sessions and shared groups that are not written yet.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gateway_core::{Commit, QueueId};

use super::tables::SessionTables;
use crate::{
    counters::count,
    pending::KeyChange,
    state::queues::QueueTables,
    table::WriteTxn,
    waiting::{Changes, Tally},
};
use store::{SessionOp, StoredSession, StoredSubscription};

/// Fixed part of what one waiting record is counted with, in bytes.
const OVERHEAD: usize = 200;

/// Tables to which changes are written, and the number of sessions afterwards.
pub(crate) struct CountedTables {
    tables: SessionTables,
    queues: QueueTables,
    /// Sessions in the table after the transaction.
    count: u64,
    stored: Arc<AtomicU64>,
}

impl CountedTables {
    /// Keeps `stored` at the number of sessions that are durable.
    pub(super) fn new(tables: SessionTables, queues: QueueTables, stored: Arc<AtomicU64>) -> Self {
        Self { tables, queues, count: 0, stored }
    }
}

/// A change of a session, or what its queue is to say before its record is written.
pub(crate) enum SessionChange {
    Op(SessionOp),
    /// Entries below this place may have been sent.
    NoteSent(QueueId, u64),
}

/// Changes by session and by group.
#[derive(Default)]
pub(crate) struct SessionChanges {
    sessions: BTreeMap<QueueId, OneSession>,
    groups: BTreeMap<QueueId, KeyChange<String>>,
}

/// Changes of one session that wait.
#[derive(Default)]
struct OneSession {
    /// All that was stored is to be removed first.
    cleared: bool,
    /// Entries of the queue below this place may have been sent.
    sent: u64,
    record: KeyChange<Box<StoredSession>>,
    subscriptions: BTreeMap<String, KeyChange<StoredSubscription>>,
}

impl SessionChanges {
    fn put(&mut self, session: Box<StoredSession>, commit: Option<Arc<Commit>>, tally: &mut Tally) {
        let place = &mut self.sessions.entry(session.queue).or_default().record;
        tally.bytes -= records(place);
        match commit {
            Some(commit) => {
                place.offer(session);
                tally.commits.push(commit);
            }
            None => place.keep(Some(session)),
        }
        tally.bytes += records(place);
    }

    fn remove(&mut self, queue: QueueId, commit: Option<Arc<Commit>>, tally: &mut Tally) {
        let place = self.sessions.entry(queue).or_default();
        tally.bytes -= place.bytes();
        *place = OneSession { cleared: true, sent: place.sent, ..OneSession::default() };
        tally.commits.extend(commit);
    }

    fn subscription(&mut self, queue: QueueId, filter: String) -> &mut KeyChange<StoredSubscription> {
        self.sessions.entry(queue).or_default().subscriptions.entry(filter).or_default()
    }
}

impl Changes for SessionChanges {
    type Op = SessionChange;
    type Tables = CountedTables;

    fn push(&mut self, change: SessionChange, tally: &mut Tally) {
        let op = match change {
            SessionChange::Op(op) => op,
            SessionChange::NoteSent(queue, below) => {
                let sent = &mut self.sessions.entry(queue).or_default().sent;
                *sent = below.max(*sent);
                return;
            }
        };
        match op {
            SessionOp::Put(_, Some(commit)) | SessionOp::Subscribe(_, _, commit) if tally.is_full() => {
                count(|c| c.store_refused_sessions.add(1));
                commit.refuse();
            }
            SessionOp::Put(session, commit) => self.put(session, commit, tally),
            SessionOp::Remove(queue, commit) => self.remove(queue, commit, tally),
            SessionOp::Subscribe(queue, value, commit) => {
                let place = self.subscription(queue, value.filter.clone());
                tally.bytes -= subscriptions(place);
                place.offer(value);
                tally.bytes += subscriptions(place);
                tally.commits.push(commit);
            }
            SessionOp::Unsubscribe(queue, filter, commit) => {
                let place = self.subscription(queue, filter);
                tally.bytes -= subscriptions(place);
                place.keep(None);
                tally.commits.push(commit);
            }
            SessionOp::Group(queue, name) => self.groups.entry(queue).or_default().keep(Some(name)),
            SessionOp::RemoveGroup(queue) => self.groups.entry(queue).or_default().keep(None),
        }
    }

    fn merge(&mut self, later: Self) {
        for (queue, later) in later.sessions {
            self.sessions.entry(queue).or_default().merge(later);
        }
        for (queue, later) in later.groups {
            self.groups.entry(queue).or_default().merge(later);
        }
    }

    fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.groups.is_empty()
    }

    fn bytes(&self) -> usize {
        self.sessions.values().map(OneSession::bytes).sum()
    }

    fn has_offer(&self) -> bool {
        self.sessions.values().any(|session| {
            session.record.is_offer() || session.subscriptions.values().any(KeyChange::is_offer)
        })
    }

    fn fail(&mut self) {
        self.sessions.retain(|_, session| session.fail());
    }

    fn apply(
        &self,
        target: &mut CountedTables,
        txn: &mut WriteTxn<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        let tables = &target.tables;
        for (&queue, session) in &self.sessions {
            if session.cleared {
                tables.remove(txn, queue)?;
            }
            if session.sent > 0 {
                target.queues.note_all_sent(txn, queue, session.sent)?;
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
        for (&queue, change) in &self.groups {
            match change.target() {
                Some(Some(name)) => tables.put_group(txn, queue, name, buffer)?,
                Some(None) => tables.remove_group(txn, queue)?,
                None => {}
            }
        }
        target.count = tables.count(txn)?;
        Ok(())
    }

    fn committed(tables: &CountedTables) {
        tables.stored.store(tables.count, Relaxed);
    }
}

impl OneSession {
    fn merge(&mut self, later: Self) {
        let sent = self.sent.max(later.sent);
        if later.cleared {
            *self = Self { sent, ..later };
            return;
        }
        self.sent = sent;
        self.record.merge(later.record);
        for (filter, later) in later.subscriptions {
            self.subscriptions.entry(filter).or_default().merge(later);
        }
    }

    /// Drops offered changes that could not be written. Returns whether something is left.
    fn fail(&mut self) -> bool {
        self.subscriptions.retain(|_, change| change.fail());
        self.record.fail() | self.cleared | (self.sent > 0) | !self.subscriptions.is_empty()
    }

    fn bytes(&self) -> usize {
        records(&self.record) + self.subscriptions.values().map(subscriptions).sum::<usize>()
    }
}

fn records(change: &KeyChange<Box<StoredSession>>) -> usize {
    change
        .values()
        .map(|session| {
            let will = session.will.as_ref().map_or(0, |will| will.message.cost());
            let username = session.username.as_ref().map_or(0, |name| name.len());
            OVERHEAD + session.client_id.as_str().len() + username + will
        })
        .sum()
}

fn subscriptions(change: &KeyChange<StoredSubscription>) -> usize {
    change.values().map(|subscription| OVERHEAD + 2 * subscription.filter.len()).sum()
}
