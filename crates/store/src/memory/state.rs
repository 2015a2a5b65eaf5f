//! State of sessions in memory, as a disk would have it: what was submitted waits for a commit, which may fail, and a crash loses
//! what was not committed.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, OnceLock},
};

use gateway_core::{
    Commit, Journal, Message, NoRoom, QoS, QueueEntry, QueueId, QueueOp, SharedMessage, StoredEntry,
    Timestamp,
};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{
    BoxFuture, Loaded, LoadedRetained, QueueSummary, Restore, SessionOp, StateStore, StoreError, StoreHealth,
    StoredSession, StoredSubscription,
};

/// A [`StateStore`] whose commits a test makes itself with [`Self::commit`], or leaves to the store ([`Self::prompt`]).
#[derive(Default)]
pub struct MemoryState {
    inner: Mutex<Inner>,
    /// Is told of changes of sessions as they are submitted.
    watcher: OnceLock<SessionWatcher>,
    /// Each change is committed at once.
    prompt: bool,
}

type SessionWatcher = Box<dyn Fn(&SessionOp) + Send + Sync>;

/// Ways in which the disk is not what it should be.
#[derive(Debug, Clone, Copy, Default)]
pub struct StateFaults {
    /// Commits fail: what is new is refused, all else waits for the next.
    pub failing: bool,
    /// Reads fail.
    pub unreadable: bool,
    /// Reads wait for [`MemoryState::answer`].
    pub holding: bool,
    /// No new session is accepted.
    pub full: bool,
}

/// Contents of the disk.
#[derive(Debug, Clone, Default)]
pub struct StateContents {
    /// Records.
    pub sessions: BTreeMap<QueueId, StoredSession>,
    /// By session and filter.
    pub subscriptions: BTreeMap<(QueueId, String), StoredSubscription>,
    /// Full names of shared groups.
    pub groups: BTreeMap<QueueId, String>,
    /// With the time from which an entry may be dropped unsent.
    pub entries: BTreeMap<(QueueId, u64), (StoredEntry, Option<Timestamp>)>,
    /// Packet identifiers that came in.
    pub received: BTreeSet<(QueueId, u16)>,
    /// By topic.
    pub retained: BTreeMap<Arc<str>, Arc<SharedMessage>>,
}

#[derive(Default)]
struct Inner {
    faults: StateFaults,
    waiting: VecDeque<StateJob>,
    disk: StateContents,
    /// Number of retained messages submitted.
    retained: u64,
    /// The last of these that was written of each topic: one that comes later with its unit does not replace it.
    written: BTreeMap<Arc<str>, u64>,
    reads: Vec<StateRead>,
    loads: usize,
    trimmed: Vec<Arc<SharedMessage>>,
}

enum StateJob {
    Queue(QueueOp),
    Session(SessionOp),
    Retained {
        topic: Arc<str>,
        message: Option<Arc<SharedMessage>>,
        commit: Option<Arc<Commit>>,
        number: u64,
    },
    Read(StateRead),
}

enum StateRead {
    Queue {
        queue: QueueId,
        from: u64,
        messages: usize,
        reply: oneshot::Sender<Result<Loaded, StoreError>>,
    },
    /// With what was there when it was asked for.
    Topics {
        loaded: LoadedRetained,
        reply: oneshot::Sender<Result<LoadedRetained, StoreError>>,
    },
}

/// Parts that ended with a commit, and which of them were refused.
type Ended = Vec<(Arc<Commit>, bool)>;

impl MemoryState {
    /// An empty one that commits every change at once.
    pub fn prompt() -> Self {
        Self { prompt: true, ..Self::default() }
    }

    /// Changes what is wrong with the disk.
    pub fn fault(&self, change: impl FnOnce(&mut StateFaults)) {
        change(&mut self.inner.lock().faults);
    }

    /// Looks at what is committed.
    pub fn contents<R>(&self, look: impl FnOnce(&StateContents) -> R) -> R {
        look(&self.inner.lock().disk)
    }

    /// Changes what is committed.
    pub fn change<R>(&self, change: impl FnOnce(&mut StateContents) -> R) -> R {
        change(&mut self.inner.lock().disk)
    }

    /// Commits all that can be, or fails it. False if all that waited still does.
    pub fn commit(&self) -> bool {
        self.commit_some(usize::MAX)
    }

    /// As [`Self::commit`], about `most` changes of queues.
    pub fn commit_some(&self, most: usize) -> bool {
        let (busy, ended) = {
            let mut inner = self.inner.lock();
            let before = inner.waiting.len();
            let jobs = inner.take(most);
            let mut ended = Ended::new();
            match inner.faults.failing {
                true => inner.fail(jobs, &mut ended),
                false => jobs.into_iter().for_each(|job| inner.write(job, &mut ended)),
            }
            (inner.waiting.len() < before, ended)
        };
        for (commit, refused) in ended {
            if refused { commit.refuse() } else { commit.done() }
        }
        if !self.inner.lock().faults.holding {
            self.answer();
        }
        busy
    }

    /// Answers reads, as the disk is now. No more of them are held.
    pub fn answer(&self) {
        let mut inner = self.inner.lock();
        inner.faults.holding = false;
        for read in std::mem::take(&mut inner.reads) {
            let failed = inner.faults.unreadable;
            let error = || StoreError::Unavailable("a test says so".to_owned());
            // Whoever asked may be gone.
            match read {
                StateRead::Queue { queue, from, messages, reply } => {
                    let loaded = inner.disk.page(queue, from, messages);
                    drop(reply.send(if failed { Err(error()) } else { Ok(loaded) }));
                }
                StateRead::Topics { loaded, reply } => {
                    drop(reply.send(if failed { Err(error()) } else { Ok(loaded) }));
                }
            }
        }
    }

    /// Returns whether nothing waits to be written.
    pub fn is_idle(&self) -> bool {
        self.inner.lock().waiting.is_empty()
    }

    /// Loses what is not committed, as the end of the process does: nobody is told.
    pub fn crash(&self) {
        let mut inner = self.inner.lock();
        inner.waiting.clear();
        inner.reads.clear();
        inner.written.clear();
    }

    /// Removes what has expired, unless `keeps` says otherwise. Returns the messages and bytes of each queue.
    pub fn expire(
        &self,
        now: Timestamp,
        keeps: impl Fn(QueueId, u64, QoS) -> bool,
    ) -> Vec<(QueueId, usize, u64)> {
        let mut expired: BTreeMap<QueueId, (usize, u64)> = BTreeMap::new();
        self.inner.lock().disk.entries.retain(|&(queue, seq), (entry, expires)| {
            let due = !entry.sent && expires.is_some_and(|at| at <= now);
            let Some(message) = entry.message.as_ref().filter(|_| due && !keeps(queue, seq, entry.qos))
            else {
                return true;
            };
            let (messages, bytes) = expired.entry(queue).or_default();
            (*messages, *bytes) = (*messages + 1, *bytes + message.cost() as u64);
            false
        });
        expired.into_iter().map(|(queue, (messages, bytes))| (queue, messages, bytes)).collect()
    }

    /// Number of reads that were asked for.
    pub fn loads(&self) -> usize {
        self.inner.lock().loads
    }

    /// Takes the messages that trims have removed since the last call.
    pub fn take_trimmed(&self) -> Vec<Arc<SharedMessage>> {
        std::mem::take(&mut self.inner.lock().trimmed)
    }

    /// Calls `watcher` with each change of a session that is submitted from now on. To be called once.
    pub fn watch_sessions(&self, watcher: impl Fn(&SessionOp) + Send + Sync + 'static) {
        let _ = self.watcher.set(Box::new(watcher));
    }

    fn push(&self, job: StateJob) {
        self.inner.lock().waiting.push_back(job);
        if self.prompt {
            self.commit();
        }
    }

    fn retain(&self, topic: Arc<str>, message: Option<Arc<SharedMessage>>, commit: Option<Arc<Commit>>) {
        let mut inner = self.inner.lock();
        inner.retained += 1;
        let number = inner.retained;
        inner.waiting.push_back(StateJob::Retained { topic, message, commit, number });
        drop(inner);
        if self.prompt {
            self.commit();
        }
    }
}

impl StateJob {
    /// Its part of a commit.
    fn commit(&self) -> Option<&Arc<Commit>> {
        match self {
            Self::Queue(QueueOp::Append(entry)) => entry.commit.as_ref(),
            Self::Queue(QueueOp::Remove { unit, .. }) => unit.as_ref(),
            Self::Queue(
                QueueOp::Release { commit, .. }
                | QueueOp::Receive { commit, .. }
                | QueueOp::Forget { commit, .. },
            ) => Some(commit),
            Self::Queue(QueueOp::NoteSent { .. } | QueueOp::Trim { .. } | QueueOp::Purge { .. })
            | Self::Session(SessionOp::Group(..) | SessionOp::RemoveGroup(_))
            | Self::Read(_) => None,
            Self::Session(SessionOp::Put(_, commit) | SessionOp::Remove(_, commit))
            | Self::Retained { commit, .. } => commit.as_ref(),
            Self::Session(SessionOp::Subscribe(.., commit) | SessionOp::Unsubscribe(.., commit)) => {
                Some(commit)
            }
        }
    }

    fn unit(&self) -> Option<*const Commit> {
        self.commit().filter(|commit| commit.is_unit()).map(Arc::as_ptr)
    }

    /// Returns whether it is written with the sessions, whatever waits for its queue.
    fn overtakes(&self) -> bool {
        matches!(self, Self::Queue(QueueOp::NoteSent { .. }))
    }

    fn closes_unit(&self) -> bool {
        matches!(self, Self::Queue(QueueOp::Receive { .. } | QueueOp::Remove { .. }))
    }

    /// The queue whose order it keeps.
    fn queue(&self) -> Option<QueueId> {
        let queue = match self {
            Self::Queue(QueueOp::Append(entry)) => entry.queue,
            Self::Queue(
                QueueOp::Remove { queue, .. }
                | QueueOp::Release { queue, .. }
                | QueueOp::Receive { queue, .. }
                | QueueOp::Forget { queue, .. }
                | QueueOp::NoteSent { queue, .. }
                | QueueOp::Trim { queue, .. }
                | QueueOp::Purge { queue },
            )
            | Self::Read(StateRead::Queue { queue, .. }) => *queue,
            Self::Session(_) | Self::Retained { .. } | Self::Read(StateRead::Topics { .. }) => return None,
        };
        (queue != QueueId::NONE).then_some(queue)
    }
}

impl Inner {
    /// Takes all changes that the next transaction has: of queues about `most`. No unit is cut, and none is written before it is
    /// closed; it holds back what comes after it in its queues.
    fn take(&mut self, most: usize) -> Vec<StateJob> {
        let mut open: BTreeSet<*const Commit> = BTreeSet::new();
        let mut length = 0;
        for (index, job) in self.waiting.iter().enumerate() {
            if let Some(unit) = job.unit() {
                let _ = if job.closes_unit() { open.remove(&unit) } else { open.insert(unit) };
            }
            if length < most && open.is_empty() {
                length = index + 1;
            }
        }
        if length < most {
            length = self.waiting.len();
        }
        let mut held = vec![false; self.waiting.len()];
        loop {
            let units = open.len();
            let mut queues = BTreeSet::new();
            for (job, held) in self.waiting.iter().zip(&mut held) {
                let (unit, queue) = (job.unit(), job.queue());
                *held = unit.is_some_and(|unit| open.contains(&unit))
                    || queue.is_some_and(|queue| queues.contains(&queue) && !job.overtakes());
                if *held {
                    open.extend(unit);
                    queues.extend(queue);
                }
            }
            if open.len() == units {
                break;
            }
        }
        let (mut taken, mut left) = (Vec::new(), VecDeque::new());
        for (index, (job, held)) in self.waiting.drain(..).zip(held).enumerate() {
            let of_queues = (job.queue().is_some() && !job.overtakes()) || job.unit().is_some();
            let is_late = index >= length && of_queues;
            if held || is_late { left.push_back(job) } else { taken.push(job) }
        }
        self.waiting = left;
        taken
    }

    fn write(&mut self, job: StateJob, ended: &mut Ended) {
        // Settled entries have ended their part themselves.
        let mut commit = job.commit().cloned();
        match job {
            StateJob::Queue(QueueOp::Append(entry)) => match entry.take() {
                Some(message) => self.disk.append(&entry, &message),
                None => commit = None,
            },
            StateJob::Queue(QueueOp::Trim { queue, from, count }) => {
                let removed = self.disk.trim(queue, from, count);
                self.trimmed.extend(removed);
            }
            StateJob::Queue(op) => self.disk.change(&op),
            StateJob::Session(op) => self.disk.change_session(op),
            StateJob::Retained { topic, message, number, .. } => {
                let written = self.written.entry(Arc::clone(&topic)).or_default();
                if *written < number {
                    *written = number;
                    let _ = match message {
                        Some(message) => self.disk.retained.insert(topic, message.without_receipt()),
                        None => self.disk.retained.remove(&topic),
                    };
                }
            }
            StateJob::Read(read) => self.reads.push(read),
        }
        ended.extend(commit.map(|commit| (commit, false)));
    }

    /// Refuses what is new; all else waits for the next commit.
    fn fail(&mut self, jobs: Vec<StateJob>, ended: &mut Ended) {
        let mut kept = VecDeque::new();
        for job in jobs {
            let (refused, queue) = (job.commit().cloned(), job.queue());
            let keep = match job {
                StateJob::Queue(QueueOp::Append(entry)) => {
                    if entry.take().is_none() {
                        continue;
                    }
                    None
                }
                StateJob::Queue(QueueOp::Receive { .. } | QueueOp::Remove { unit: Some(_), .. })
                | StateJob::Session(SessionOp::Put(_, Some(_)) | SessionOp::Subscribe(..))
                | StateJob::Retained { message: Some(_), commit: Some(_), .. } => None,
                // A removal is carried out some time although who waited was refused.
                StateJob::Session(SessionOp::Remove(queue, _)) => {
                    Some(StateJob::Session(SessionOp::Remove(queue, None)))
                }
                StateJob::Session(SessionOp::Unsubscribe(queue, filter, _)) => {
                    let nobody = Commit::new();
                    nobody.add();
                    Some(StateJob::Session(SessionOp::Unsubscribe(queue, filter, nobody)))
                }
                StateJob::Retained { topic, message, number, .. } => {
                    Some(StateJob::Retained { topic, message, number, commit: None })
                }
                // Entries before it in its queue may still wait.
                StateJob::Read(read) if !kept.iter().any(|kept: &StateJob| kept.queue() == queue) => {
                    self.reads.push(read);
                    continue;
                }
                StateJob::Read(_) | StateJob::Queue(_) | StateJob::Session(_) => {
                    kept.push_back(job);
                    continue;
                }
            };
            kept.extend(keep);
            ended.extend(refused.map(|commit| (commit, true)));
        }
        kept.append(&mut self.waiting);
        self.waiting = kept;
    }
}

impl StateContents {
    fn append(&mut self, entry: &QueueEntry, message: &Arc<SharedMessage>) {
        let stored = StoredEntry {
            seq: entry.seq,
            qos: entry.qos,
            retain: entry.retain,
            sent: entry.may_be_sent(),
            group: entry.group,
            ids: entry.ids.clone(),
            message: Some(message.without_receipt()),
        };
        let old = self.entries.insert((entry.queue, entry.seq), (stored, entry.expires));
        assert!(old.is_none(), "place {} of queue {} is given twice", entry.seq, entry.queue.0);
    }

    fn change(&mut self, op: &QueueOp) {
        match *op {
            QueueOp::Remove { queue, seq, .. } => drop(self.entries.remove(&(queue, seq))),
            QueueOp::Release { queue, seq, .. } => {
                let released = StoredEntry {
                    seq,
                    qos: QoS::ExactlyOnce,
                    retain: false,
                    sent: true,
                    group: QueueId::NONE,
                    ids: None,
                    message: None,
                };
                self.entries.insert((queue, seq), (released, None));
            }
            QueueOp::Receive { queue, packet_id, .. } => drop(self.received.insert((queue, packet_id))),
            QueueOp::Forget { queue, packet_id, .. } => drop(self.received.remove(&(queue, packet_id))),
            QueueOp::NoteSent { queue, below } => {
                for (_, (entry, _)) in self.entries.range_mut((queue, 0)..(queue, below)) {
                    entry.sent = true;
                }
            }
            QueueOp::Purge { queue } => {
                self.entries.retain(|key, _| key.0 != queue);
                self.received.retain(|key| key.0 != queue);
            }
            QueueOp::Append(_) | QueueOp::Trim { .. } => {}
        }
    }

    fn trim(&mut self, queue: QueueId, from: u64, count: usize) -> Vec<Arc<SharedMessage>> {
        let places = self.entries.range((queue, from)..=(queue, u64::MAX)).take(count);
        let keys: Vec<_> = places.map(|(key, _)| *key).collect();
        keys.iter().filter_map(|key| self.entries.remove(key)?.0.message).collect()
    }

    fn change_session(&mut self, op: SessionOp) {
        match op {
            SessionOp::Put(session, _) => drop(self.sessions.insert(session.queue, *session)),
            SessionOp::Remove(queue, _) => {
                self.sessions.remove(&queue);
                self.subscriptions.retain(|key, _| key.0 != queue);
            }
            SessionOp::Subscribe(queue, subscription, _) => {
                self.subscriptions.insert((queue, subscription.filter.clone()), subscription);
            }
            SessionOp::Unsubscribe(queue, filter, _) => drop(self.subscriptions.remove(&(queue, filter))),
            SessionOp::Group(queue, name) => drop(self.groups.insert(queue, name)),
            SessionOp::RemoveGroup(queue) => drop(self.groups.remove(&queue)),
        }
    }

    fn page(&self, queue: QueueId, from: u64, messages: usize) -> Loaded {
        let rest = self.entries.range((queue, from)..=(queue, u64::MAX));
        let entries: Vec<_> = rest.clone().take(messages).map(|(_, (entry, _))| entry.clone()).collect();
        let next = entries.last().map_or(from, |entry| entry.seq + 1);
        Loaded { entries, next, end: rest.count() <= messages, damaged: 0 }
    }

    fn topics(&self, topics: &[Arc<str>]) -> LoadedRetained {
        // As if decoded anew.
        let copy = |message: &Arc<SharedMessage>| message.with_receipt(Arc::default()).without_receipt();
        topics.iter().map(|topic| self.retained.get(topic).map(copy)).collect()
    }

    fn summaries(&self) -> Vec<QueueSummary> {
        let mut queues: BTreeMap<QueueId, QueueSummary> = BTreeMap::new();
        for (&(queue, seq), (entry, _)) in &self.entries {
            let new = || QueueSummary { queue, first: seq, ..QueueSummary::default() };
            let summary = queues.entry(queue).or_insert_with(new);
            summary.messages += 1;
            summary.bytes += entry.message.as_ref().map_or(0, |message| message.cost() as u64);
            (summary.next, summary.begun) = (seq + 1, seq + 1);
            if entry.qos == QoS::ExactlyOnce {
                summary.exact = seq + 1;
            }
        }
        for &(queue, packet_id) in &self.received {
            let new = || QueueSummary { queue, ..QueueSummary::default() };
            queues.entry(queue).or_insert_with(new).received.push(packet_id);
        }
        queues.into_values().collect()
    }
}

impl Journal for MemoryState {
    fn submit(&self, op: QueueOp) {
        self.push(StateJob::Queue(op));
    }
}

impl StateStore for MemoryState {
    fn submit_session(&self, op: SessionOp) {
        if let Some(watcher) = self.watcher.get() {
            watcher(&op);
        }
        self.push(StateJob::Session(op));
    }

    fn set_retained(&self, message: Arc<SharedMessage>, commit: Option<Arc<Commit>>) {
        self.retain(Arc::clone(&message.topic), Some(message), commit);
    }

    fn clear_retained(&self, topic: Arc<str>, commit: Option<Arc<Commit>>) {
        self.retain(topic, None, commit);
    }

    fn load(
        &self,
        queue: QueueId,
        from: u64,
        messages: usize,
        _bytes: usize,
    ) -> BoxFuture<'static, Result<Loaded, StoreError>> {
        let (reply, answer) = oneshot::channel();
        self.inner.lock().loads += 1;
        self.push(StateJob::Read(StateRead::Queue { queue, from, messages, reply }));
        Box::pin(async move { answer.await.map_err(|_| closed())? })
    }

    fn load_retained(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>> {
        let (reply, answer) = oneshot::channel();
        let mut inner = self.inner.lock();
        inner.loads += 1;
        let loaded = inner.disk.topics(&topics);
        inner.reads.push(StateRead::Topics { loaded, reply });
        let holding = inner.faults.holding;
        drop(inner);
        if !holding {
            self.answer();
        }
        Box::pin(async move { answer.await.map_err(|_| closed())? })
    }

    fn restore_sessions(&self, into: &mut dyn Restore) -> Result<(), StoreError> {
        let mut inner = self.inner.lock();
        let disk = &mut inner.disk;
        let mut newest = BTreeMap::new();
        for (queue, session) in &disk.sessions {
            newest.insert(session.client_id.clone(), *queue);
        }
        let is_newest = |session: &StoredSession| newest[&session.client_id] == session.queue;
        disk.sessions.retain(|_, session| is_newest(session) || session.will.is_some());
        disk.subscriptions.retain(|key, _| disk.sessions.contains_key(&key.0));
        for (queue, session) in &disk.sessions {
            let own = disk.subscriptions.iter().filter(|(key, _)| key.0 == *queue && is_newest(session));
            into.session(session.clone(), own.map(|(_, subscription)| subscription.clone()).collect());
        }
        for (queue, name) in &disk.groups {
            into.group(*queue, name);
        }
        Ok(())
    }

    fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError> {
        Ok(self.inner.lock().disk.summaries())
    }

    fn restore_retained(&self, into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError> {
        let messages: Vec<_> = self.inner.lock().disk.retained.values().cloned().collect();
        messages.into_iter().for_each(into);
        Ok(())
    }

    fn accepts_sessions(&self) -> bool {
        !self.inner.lock().faults.full
    }

    fn accepts(&self) -> bool {
        !self.inner.lock().faults.failing
    }

    fn admit(&self, _message: &Message<'_>) -> Result<(), NoRoom> {
        if self.accepts() { Ok(()) } else { Err(NoRoom::Full) }
    }

    fn health(&self) -> StoreHealth {
        if self.inner.lock().faults.failing { StoreHealth::Failing } else { StoreHealth::Sound }
    }
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::state;

    #[tokio::test]
    async fn passes_the_suite() {
        state::sessions_and_groups(&MemoryState::prompt()).await;
        state::queues(&MemoryState::prompt()).await;
        state::retained_messages(&MemoryState::prompt()).await;
        state::units(&MemoryState::prompt()).await;
    }

    /// Returns how many sessions, entries, packet identifiers and retained messages there are.
    fn counts(store: &MemoryState) -> [usize; 4] {
        store.contents(|disk| {
            [disk.sessions.len(), disk.entries.len(), disk.received.len(), disk.retained.len()]
        })
    }

    /// After any number of operations a crash leaves all parts of a unit or none, and a record that says how its connection ended
    /// only with what was sent.
    #[test]
    fn no_crash_parts_what_belongs_together() {
        for most in 0..6 {
            for fails in [false, true] {
                let store = MemoryState::default();
                let unit = Commit::of_unit();
                let message = state::message("t", "x");
                store.set_retained(Arc::clone(&message), Some(unit.part()));
                let entry = |queue, commit| {
                    let commit = Some(Arc::clone(commit));
                    QueueEntry::new(queue, 0, Arc::clone(&message), QoS::ExactlyOnce, commit)
                };
                store.submit(QueueOp::Append(Arc::new(entry(QueueId(2), &unit))));
                store.submit(QueueOp::Append(Arc::new(entry(QueueId(3), &unit))));
                store.commit();
                assert_eq!(counts(&store), [0; 4], "the unit is open");
                store.submit(QueueOp::Receive { queue: QueueId(1), packet_id: 1, commit: unit.part() });
                unit.done();
                store.submit(QueueOp::NoteSent { queue: QueueId(2), below: 1 });
                let offline =
                    StoredSession { since: Some(Timestamp(1)), ..state::session(QueueId(2), "subscriber") };
                store.submit_session(SessionOp::Put(Box::new(offline), None));
                store.fault(|faults| faults.failing = fails);
                store.commit_some(most);
                store.crash();
                let whole = [1, 2, 1, 1];
                match (unit.result(), fails) {
                    (Some(Ok(())), false) => assert_eq!(counts(&store), whole, "{most}"),
                    (result, _) => {
                        assert_eq!(counts(&store)[1..], [0; 3], "{most}");
                        assert!(result != Some(Ok(())) && (fails || result.is_none()));
                    }
                }
                let sent = store.contents(|disk| disk.entries.values().any(|(entry, _)| entry.sent));
                let has_entry = counts(&store)[1] > 0;
                assert_eq!(sent, has_entry && counts(&store)[0] == 1);
            }
        }
    }
}
