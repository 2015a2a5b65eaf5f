//! Promises of the queue store, in memory: operations in order, a commit point that may advance at any time, and
//! crashes that lose everything after it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use gateway_core::{
    Commit, Journal, JournalPage, QoS, QueueId, QueueOp, SharedMessage, StoredEntry, Timestamp,
};
use parking_lot::Mutex;

use crate::StoredQueue;

/// An entry that is committed.
#[derive(Clone)]
pub(super) struct Stored {
    pub(super) qos: QoS,
    retain: bool,
    sent: bool,
    expires: Option<Timestamp>,
    group: u32,
    ids: Option<Box<[u32]>>,
    /// None after PUBREC.
    pub(super) message: Option<Arc<SharedMessage>>,
}

enum Job {
    Op(QueueOp),
    Load(u64),
}

/// State to which commits lead.
#[derive(Default)]
pub(super) struct DiskState {
    waiting: VecDeque<Job>,
    pub(super) entries: BTreeMap<(QueueId, u64), Stored>,
    pub(super) received: BTreeSet<(QueueId, u16)>,
    /// Loads that may be answered: the place to read from.
    readable: VecDeque<u64>,
    /// Messages that trims have taken away.
    pub(super) trimmed: Vec<Arc<SharedMessage>>,
}

/// The journal and what is committed of it.
#[derive(Default)]
pub(super) struct Disk(pub(super) Mutex<DiskState>);

impl Journal for Disk {
    fn submit(&self, op: QueueOp) {
        self.0.lock().waiting.push_back(Job::Op(op));
    }
}

impl Disk {
    /// As `QueueStore::load`: the answer comes after all that was submitted before.
    pub(super) fn load(&self, from: u64) {
        self.0.lock().waiting.push_back(Job::Load(from));
    }

    /// Forgets all loads.
    pub(super) fn cancel_loads(&self) {
        let mut state = self.0.lock();
        state.readable.clear();
        state.waiting.retain(|job| !matches!(job, Job::Load(_)));
    }

    /// Answers a load that may be answered with at most `most` entries of what is committed by now.
    pub(super) fn read(&self, queue: QueueId, most: usize, now: Timestamp) -> Option<JournalPage> {
        let mut state = self.0.lock();
        let from = state.readable.pop_front()?;
        let mut page = JournalPage { next: from, ..JournalPage::default() };
        let rest = state.entries.range((queue, from)..(queue, u64::MAX));
        for (&(_, place), stored) in rest.clone().take(most) {
            let Stored { qos, retain, sent, expires, group, ids, message } = stored.clone();
            let over = !sent && expires.is_some_and(|at| at <= now);
            let message = message.map(|message| if over { message.expired() } else { message });
            page.entries.push(StoredEntry { seq: place, qos, retain, sent, group, ids, message });
            page.next = place + 1;
        }
        page.end = rest.count() <= most;
        Some(page)
    }

    /// Commits about `most` operations, or fails them.
    pub(super) fn commit(&self, most: usize, fails: bool) {
        let mut done = Vec::new();
        {
            let mut state = self.0.lock();
            let length = state.length(most);
            let jobs: Vec<Job> = state.waiting.drain(..length).collect();
            if fails {
                state.fail(jobs, &mut done)
            } else {
                state.apply(jobs, &mut done)
            };
        }
        for (commit, refused) in done {
            if refused { commit.refuse() } else { commit.done() }
        }
    }

    /// Commits all that can be.
    pub(super) fn commit_all(&self) {
        self.commit(usize::MAX, false);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.0.lock().waiting.is_empty()
    }

    /// Loses what is not committed.
    pub(super) fn crash(&self) {
        let mut state = self.0.lock();
        state.waiting.clear();
        state.readable.clear();
    }

    /// Removes what has expired, unless `keeps` says otherwise. Returns how many, and their cost.
    pub(super) fn expire(
        &self,
        queue: QueueId,
        now: Timestamp,
        keeps: impl Fn(u64, QoS) -> bool,
    ) -> (usize, u64) {
        let mut state = self.0.lock();
        let (mut messages, mut bytes) = (0, 0);
        state.entries.retain(|key, stored| {
            let over = key.0 == queue
                && !stored.sent
                && stored.message.is_some()
                && stored.expires.is_some_and(|at| at <= now)
                && !keeps(key.1, stored.qos);
            if over {
                messages += 1;
                bytes += stored.message.as_ref().map_or(0, |message| message.cost() as u64);
            }
            !over
        });
        (messages, bytes)
    }

    /// As `QueueStore::summaries` of one queue: first and next place, end of QoS 2, messages, bytes, received identifiers.
    /// With the packet identifiers that came in apart.
    pub(super) fn summary(&self, queue: QueueId) -> (StoredQueue<'static>, Vec<u16>) {
        let state = self.0.lock();
        let places = state.entries.range((queue, 0)..(queue, u64::MAX));
        let cost = |stored: &Stored| stored.message.as_ref().map_or(0, |message| message.cost() as u64);
        let next = places.clone().next_back().map_or(0, |(key, _)| key.1 + 1);
        let exact = places.clone().rfind(|(_, stored)| stored.qos == QoS::ExactlyOnce);
        let left = StoredQueue {
            first: places.clone().next().map_or(0, |(key, _)| key.1),
            next,
            exact: exact.map_or(0, |(key, _)| key.1 + 1),
            begun: next,
            messages: places.clone().count(),
            bytes: places.map(|(_, stored)| cost(stored)).sum(),
            received: &[],
        };
        (left, state.received.iter().filter(|(of, _)| *of == queue).map(|(_, id)| *id).collect())
    }
}

type CommitsDone = Vec<(Arc<Commit>, bool)>;

impl DiskState {
    /// No unit is cut, and none written that is not closed.
    fn length(&self, most: usize) -> usize {
        let mut open: Vec<*const Commit> = Vec::new();
        let mut length = 0;
        for (index, job) in self.waiting.iter().enumerate() {
            match job {
                Job::Op(QueueOp::Append(entry)) => {
                    open.extend(entry.commit.iter().filter(|commit| commit.is_unit()).map(Arc::as_ptr));
                }
                Job::Op(QueueOp::Receive { commit, .. } | QueueOp::Remove { unit: Some(commit), .. }) => {
                    open.retain(|unit| *unit != Arc::as_ptr(commit));
                }
                _ => {}
            }
            if open.is_empty() {
                length = index + 1;
                if length >= most {
                    break;
                }
            }
        }
        length
    }

    fn apply(&mut self, jobs: Vec<Job>, done: &mut CommitsDone) {
        for job in jobs {
            match job {
                Job::Load(from) => self.readable.push_back(from),
                Job::Op(QueueOp::Append(entry)) => {
                    let Some(message) = entry.take() else { continue };
                    done.extend(entry.commit.clone().map(|commit| (commit, false)));
                    let stored = Stored {
                        qos: entry.qos,
                        retain: entry.retain,
                        sent: entry.may_be_sent(),
                        expires: entry.expires,
                        group: u32::try_from(entry.group.0).expect("the model's groups are few"),
                        ids: entry.ids.clone(),
                        message: Some(message.without_receipt()),
                    };
                    let old = self.entries.insert((entry.queue, entry.seq), stored);
                    assert!(old.is_none(), "place {} given twice", entry.seq);
                }
                Job::Op(QueueOp::Remove { queue, seq, unit }) => {
                    self.entries.remove(&(queue, seq));
                    done.extend(unit.map(|commit| (commit, false)));
                }
                Job::Op(QueueOp::Release { queue, seq, commit }) => {
                    let stored = self.entries.entry((queue, seq)).or_insert(Stored {
                        qos: QoS::ExactlyOnce,
                        retain: false,
                        sent: true,
                        expires: None,
                        group: 0,
                        ids: None,
                        message: None,
                    });
                    (stored.message, stored.sent) = (None, true);
                    done.push((commit, false));
                }
                Job::Op(QueueOp::Receive { queue, packet_id, commit }) => {
                    self.received.insert((queue, packet_id));
                    done.push((commit, false));
                }
                Job::Op(QueueOp::Forget { queue, packet_id, commit }) => {
                    self.received.remove(&(queue, packet_id));
                    done.push((commit, false));
                }
                Job::Op(QueueOp::NoteSent { queue, below }) => {
                    for (_, stored) in self.entries.range_mut((queue, 0)..(queue, below)) {
                        stored.sent = true;
                    }
                }
                Job::Op(QueueOp::Trim { queue, from, count }) => {
                    let places = self.entries.range((queue, from)..(queue, u64::MAX));
                    let keys: Vec<_> = places.take(count).map(|(key, _)| *key).collect();
                    for key in keys {
                        let stored = self.entries.remove(&key);
                        self.trimmed.extend(stored.and_then(|stored| stored.message));
                    }
                }
                Job::Op(QueueOp::Purge { queue }) => {
                    self.entries.retain(|key, _| key.0 != queue);
                    self.received.retain(|key| key.0 != queue);
                }
            }
        }
    }

    fn fail(&mut self, jobs: Vec<Job>, done: &mut CommitsDone) {
        let mut kept = VecDeque::new();
        for job in jobs {
            match &job {
                Job::Op(QueueOp::Append(entry)) => {
                    if entry.take().is_some() {
                        done.extend(entry.commit.clone().map(|commit| (commit, true)));
                    }
                }
                Job::Op(QueueOp::Receive { commit, .. } | QueueOp::Remove { unit: Some(commit), .. }) => {
                    done.push((Arc::clone(commit), true));
                }
                Job::Load(from) if kept.is_empty() => self.readable.push_back(*from),
                _ => kept.push_back(job),
            }
        }
        kept.append(&mut self.waiting);
        self.waiting = kept;
    }
}
