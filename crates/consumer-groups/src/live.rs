//! One group at work: the logic behind a lock, the members that wait for it, and the records of it.
//!
//! The lock is held for memory only. The members that the logic wakes are woken after it is released. Acknowledgements are
//! answered when the write is done that was begun after them: each write has a number, and a waiting member knows from
//! which number on its answer holds.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::Waker,
    time::Duration,
};

use access::backends::Scope;
use ahash::RandomState;
use bytes::Bytes;
use gateway_core::{GroupId, LogRecord, Partition, Timestamp};
use groups::Group;
use hashbrown::HashMap;
use parking_lot::{Mutex, MutexGuard};
use store::{Expect, PartitionedLog};
use tokio::sync::{Notify, watch};
use tracing::warn;

use super::{
    Definition, GroupError, Intake, Marker, MemberMemory, MessageFilter, RetentionPolicy,
    dead_letters::DeadLetters,
    in_scope,
    records::{COUNTS, KeptDefinition, MEMBERS, SettledCounts, definition_change, progress_key, put},
    state::{Epoch, GroupState, StateChange, StateError},
    waypoints::Waypoints,
};

/// Changes of deliveries in one step under a group's lock, before others have their turn.
pub(super) const STEP: usize = 64;

/// The least time from the begin of one write to that of the next. Acknowledgements that come meanwhile share the next one.
const GATHER: Duration = Duration::from_millis(5);

/// One group.
pub(super) struct Live {
    pub(super) id: GroupId,
    owner: GroupOwner,
    pub(super) log: Arc<dyn PartitionedLog>,
    pub(super) state: GroupState,
    marker: Arc<dyn Marker>,
    pub(super) clock: fn() -> Timestamp,
    inner: Mutex<GroupInner>,
    /// There is something to be written.
    dirty: Notify,
    /// Something was given up.
    dying: Notify,
    /// Deadlines may have come nearer.
    pub(super) timer: Notify,
    written: watch::Sender<WrittenUpTo>,
    /// Set while the group, which drops the oldest, has so much that some must go.
    pub(super) over: AtomicBool,
    /// True once the group is being deleted, or the gateway stops.
    pub(super) ended: AtomicBool,
    /// Messages of the group that were appended, since the log began.
    pub(super) appended: AtomicU64,
    pub(super) appended_bytes: AtomicU64,
}

/// Ownership of a group. The group belongs to this gateway as soon as one of its records was written: the start writes
/// nothing, so that it works on a full disk.
pub(super) struct GroupOwner {
    /// The epoch in which its records were read.
    seen: Epoch,
    own: tokio::sync::Mutex<Option<Epoch>>,
}

impl GroupOwner {
    /// Of a group whose records were read in the epoch `seen`.
    pub(super) fn later(seen: Epoch) -> Self {
        Self { seen, own: tokio::sync::Mutex::new(None) }
    }

    /// Of a group that is this gateway's.
    pub(super) fn now(own: Epoch) -> Self {
        Self { seen: own, own: tokio::sync::Mutex::new(Some(own)) }
    }
}

/// Progress of the writer.
#[derive(Debug, Clone, Copy, Default)]
struct WrittenUpTo {
    /// The last write that is done.
    done: u64,
    /// The next has failed, and is tried again.
    stuck: bool,
}

pub(super) struct GroupInner {
    pub(super) logic: Group,
    pub(super) kept: KeptDefinition,
    pub(super) wants: Arc<MessageFilter>,
    pub(super) letters: DeadLetters,
    wakers: HashMap<u64, Vec<Waker>, RandomState>,
    /// Memory of members without a stream, for what was read for them and not fetched yet.
    pub(super) ahead: HashMap<u64, MemberMemory, RandomState>,
    /// The number of the next write.
    write: u64,
    /// Number of writes before this process.
    writes: u64,
    /// Expected counts at the first write, for a group that was read and not made: nobody else has written since.
    first: Option<Expect>,
    /// Members that wait for a write: its number, theirs.
    awaited: BTreeSet<(u64, u64)>,
    /// Changes that are not in the logic: the definition, letters.
    pub(super) changes: Vec<StateChange>,
    /// Floor of each partition, as it is on disk.
    pub(super) floors: Vec<u64>,
    /// Of [`Live::appended`], how many are settled or lost, as far as is known.
    pub(super) base: u64,
    pub(super) base_bytes: u64,
    pub(super) lost: u64,
    /// Places between those that the log counts at.
    pub(super) waypoints: Waypoints,
    /// Set once the beginning of its messages is known: earlier ones that were not told to it are not its own.
    pub(super) has_begun: bool,
    /// In which partitions that nobody reads a message of its own is the next, so that they are not looked at again.
    pub(super) next_own: HashMap<u8, u64, RandomState>,
    /// The intake that the state of the log asks for.
    pub(super) log_intake: Intake,
    /// The intake that the broker was told.
    intake: Intake,
}

/// Failures of a write after which those who wait for it are told.
const TRIES: u32 = 3;

/// Calls of one member at once that are woken.
const MOST_WAKERS: usize = 16;

impl Live {
    #[expect(clippy::too_many_arguments, reason = "made in one place")]
    pub(super) fn new(
        id: GroupId,
        owner: GroupOwner,
        (log, state, marker): (Arc<dyn PartitionedLog>, GroupState, Arc<dyn Marker>),
        clock: fn() -> Timestamp,
        kept: KeptDefinition,
        wants: Arc<MessageFilter>,
        logic: Group,
        letters: DeadLetters,
        (counts, first): (SettledCounts, Option<Expect>),
    ) -> Self {
        let floors = Partition::all().map(|partition| logic.floor(partition)).collect();
        let last = log.marks(id).last().map_or((0, 0), |mark| (mark.messages, mark.bytes));
        let inner = GroupInner {
            logic,
            kept,
            wants,
            letters,
            wakers: HashMap::default(),
            ahead: HashMap::default(),
            write: 1,
            writes: counts.writes,
            first,
            awaited: BTreeSet::new(),
            changes: Vec::new(),
            floors,
            base: counts.messages.min(last.0),
            base_bytes: counts.bytes.min(last.1),
            lost: counts.lost,
            waypoints: Waypoints::default(),
            has_begun: false,
            next_own: HashMap::default(),
            log_intake: Intake::All,
            intake: Intake::All,
        };
        Self {
            id,
            owner,
            log,
            state,
            marker,
            clock,
            inner: Mutex::new(inner),
            dirty: Notify::new(),
            dying: Notify::new(),
            timer: Notify::new(),
            written: watch::Sender::default(),
            over: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            appended: AtomicU64::new(last.0),
            appended_bytes: AtomicU64::new(last.1),
        }
    }

    /// Does something with the group, and wakes those for whom there is something to do then.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut GroupInner) -> T) -> T {
        let mut inner = self.inner.lock();
        let result = act(&mut inner);
        self.release(inner);
        result
    }

    fn release(&self, mut inner: MutexGuard<'_, GroupInner>) {
        let dirty = inner.logic.has_changes() || !inner.changes.is_empty();
        let dying = inner.logic.has_given_up();
        let woken = inner.logic.woken();
        let wakers: Vec<Waker> =
            woken.into_iter().filter_map(|number| inner.wakers.remove(&number)).flatten().collect();
        drop(inner);
        if dirty {
            self.dirty.notify_one();
        }
        if dying {
            self.dying.notify_one();
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Messages have become durable; `records` are all that did, of which some are the group's. True if the group, which drops
    /// the oldest, has so much now that some must go.
    pub(super) fn appended(&self, records: &[(Partition, LogRecord)], own: &[usize]) -> bool {
        let bytes: usize = own.iter().map(|&at| records[at].1.message.cost()).sum();
        let messages_before = self.appended.fetch_add(own.len() as u64, Relaxed);
        let bytes_before = self.appended_bytes.fetch_add(bytes as u64, Relaxed);
        self.with(|inner| {
            let Definition { retention_bytes, retention_age, .. } = inner.kept.definition;
            let limits = (retention_bytes, retention_age);
            let own_records = own.iter().map(|&at| &records[at].1);
            let last = own_records.clone().next_back().map(|record| record.message.received);
            let bytes_after = bytes_before + bytes as u64;
            if last.is_some_and(|last| inner.waypoints.is_due(limits, bytes_after, last)) {
                let latest = self.log.time_at(u64::MAX).unwrap_or_default();
                inner.waypoints.note(limits, own_records, (messages_before, bytes_before), latest);
            }
            for &at in own {
                let (partition, record) = &records[at];
                inner.logic.appended(*partition, record);
            }
            if retention_bytes == 0 {
                return false;
            }
            match inner.kept.definition.when_full {
                RetentionPolicy::Refuse => {
                    self.update_intake(inner);
                    false
                }
                RetentionPolicy::DropOldest => {
                    let is_over = self.lag(inner).1 > retention_bytes + retention_bytes / 64;
                    self.over.fetch_or(is_over, Relaxed);
                    is_over
                }
            }
        })
    }

    /// Decides what becomes of messages that the group wants, and tells the broker if that is another than before.
    pub(super) fn update_intake(&self, inner: &mut GroupInner) {
        let Definition { retention_bytes, when_full, .. } = inner.kept.definition;
        let is_full = when_full == RetentionPolicy::Refuse
            && retention_bytes > 0
            && self.lag(inner).1 > retention_bytes;
        let intake = if is_full { Intake::Refuses } else { inner.log_intake };
        if inner.intake != intake {
            inner.intake = intake;
            self.marker.set_intake(self.id, intake);
        }
    }

    /// Its filter.
    pub(super) fn wants(&self) -> Arc<MessageFilter> {
        self.with(|inner| Arc::clone(&inner.wants))
    }

    /// Resolves when the write of this number is done.
    ///
    /// # Errors
    /// [`GroupError::Gone`] if the group ends before; [`GroupError::Store`] if the disk does not take it: it is tried again, but
    /// nobody knows for how long.
    pub(super) async fn written(&self, number: u64) -> Result<(), GroupError> {
        let mut written = self.written.subscribe();
        let over = |written: &WrittenUpTo| written.done >= number || written.stuck || self.is_ended();
        let now = *written.wait_for(over).await.map_err(|_| GroupError::Gone)?;
        if now.done >= number {
            Ok(())
        } else if self.is_ended() {
            Err(GroupError::Gone)
        } else {
            let text = "the disk does not take changes of groups";
            Err(GroupError::Store(store::StoreError::Unavailable(text.to_owned())))
        }
    }

    pub(super) fn is_written(&self, number: u64) -> bool {
        self.written.borrow().done >= number
    }

    /// The epoch to write under; begun with the first call.
    pub(super) async fn own(&self) -> Result<Epoch, StateError> {
        let mut own = self.owner.own.lock().await;
        if let Some(own) = *own {
            return Ok(own);
        }
        Ok(*own.insert(self.state.acquire(self.id, self.owner.seen).await?))
    }

    pub(super) fn is_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    /// Ends all that waits for the group.
    pub(super) fn end(&self) {
        self.ended.store(true, Relaxed);
        self.dirty.notify_one();
        self.dying.notify_one();
        self.timer.notify_one();
        self.written.send_modify(|_| {});
        let wakers: Vec<Waker> = {
            let mut inner = self.inner.lock();
            inner.ahead.clear();
            inner.wakers.drain().flat_map(|(_, wakers)| wakers).collect()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Writes all changes until the group ends: at once after a pause, and otherwise all changes since the last write
    /// began, after a few milliseconds, since a write costs the same for one acknowledgement and for many. A failed write
    /// is tried again: until it succeeds nobody gets an answer.
    pub(super) async fn write_all(self: Arc<Self>) {
        let mut next = tokio::time::Instant::now();
        while !self.is_ended() {
            if !self.with(|inner| inner.has_write()) {
                self.dirty.notified().await;
                continue;
            }
            tokio::time::sleep_until(next).await;
            let Some(write) = self.with(GroupInner::take_write) else { continue };
            next = tokio::time::Instant::now() + GATHER;
            let mut pause = Duration::from_millis(50);
            let mut tries = 0;
            loop {
                let written = match self.own().await {
                    Ok(epoch) => self.state.write(self.id, epoch, write.changes.clone()).await,
                    Err(error) => Err(error),
                };
                match written {
                    Ok(()) => break,
                    Err(StateError::Store(error)) => {
                        warn!(group = self.id.0, %error, "group is not written, trying again");
                        tries += 1;
                        // One failure may have made room: a full disk keeps some for this.
                        if tries == TRIES {
                            self.written.send_modify(|written| written.stuck = true);
                        }
                    }
                    // The group was deleted meanwhile.
                    Err(_) if self.is_ended() => {}
                    Err(error) => {
                        warn!(group = self.id.0, %error, "group is not this gateway's any more");
                        self.end();
                    }
                }
                if self.is_ended() {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(5));
            }
            self.written.send_replace(WrittenUpTo { done: write.number, stuck: false });
            let wakers: Vec<Waker> = {
                let mut inner = self.inner.lock();
                for (partition, floor) in write.floors {
                    inner.floors[usize::from(partition.0)] = floor;
                }
                if inner.intake == Intake::Refuses {
                    // The settled messages may have made room.
                    self.update_intake(&mut inner);
                }
                inner.answered(write.number)
            };
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Copies what is given up, so that the next write has it, until the group ends. Beside the writer: acknowledgements do not
    /// wait for a log that cannot be read.
    pub(super) async fn bury_all(self: Arc<Self>) {
        while !self.is_ended() {
            let dying = self.with(|inner| inner.logic.given_up(64));
            if dying.is_empty() {
                self.dying.notified().await;
                continue;
            }
            let mut unread = Vec::new();
            for (partition, offset) in dying {
                if let Err(error) = self.bury(partition, offset).await {
                    warn!(group = self.id.0, %error, "message that is given up cannot be read, trying again");
                    unread.push((partition, offset));
                }
            }
            if !unread.is_empty() {
                tokio::time::sleep(Duration::from_secs(1)).await;
                self.with(|inner| {
                    unread.iter().for_each(|&(partition, offset)| inner.logic.not_buried(partition, offset));
                });
            }
            // The copies wait in memory for the disk: no more of them until it has these.
            let number = self.with(|inner| Self::wait_number(inner));
            let over = |written: &WrittenUpTo| written.done >= number || self.is_ended();
            if self.written.subscribe().wait_for(over).await.is_err() {
                return;
            }
        }
    }

    async fn bury(&self, partition: Partition, offset: u64) -> Result<(), store::StoreError> {
        let limit = store::ReadLimit { records: 1, bytes: 1 };
        let slice = match self.log.read(partition, offset, limit) {
            store::LogRead::Now(slice) => slice,
            store::LogRead::Later(slice) => slice.await?,
        };
        let record = slice.records.into_iter().find(|record| record.offset == offset);
        let now = (self.clock)();
        self.with(|inner| {
            let Some((attempts, reason)) = inner.logic.bury(partition, offset) else { return };
            if let Some(record) = record {
                let letter = inner.letters.add(&record.message, attempts, &reason, now);
                inner.changes.extend(letter);
            } else {
                inner.lost += 1;
            }
        });
        Ok(())
    }

    /// Ticks until the group ends.
    pub(super) async fn tick_all(self: Arc<Self>) {
        const SHORTEST: Duration = Duration::from_millis(5);
        const LONGEST: Duration = Duration::from_millis(100);
        while !self.is_ended() {
            let now = (self.clock)();
            let next = self.with(|inner| {
                let GroupInner { logic, ahead, .. } = inner;
                let next = logic.tick(now);
                // With its lease goes what was read for it.
                ahead.retain(|number, _| logic.has_member(*number));
                next
            });
            match next {
                Some(next) => {
                    let pause = Duration::from_millis(next.0.saturating_sub(now.0)).clamp(SHORTEST, LONGEST);
                    tokio::time::sleep(pause).await;
                }
                None => self.timer.notified().await,
            }
        }
    }

    /// Messages that are not settled, and their cost.
    pub(super) fn lag(&self, inner: &GroupInner) -> (u64, u64) {
        if Partition::all().all(|partition| inner.logic.is_idle(partition)) {
            return (0, 0);
        }
        let totals = inner.logic.totals();
        let settled = inner.base + totals.settled + totals.given_up + totals.lost;
        let bytes = inner.base_bytes + totals.settled_bytes;
        let messages = self.appended.load(Relaxed).saturating_sub(settled);
        let bytes = if messages == 0 { 0 } else { self.appended_bytes.load(Relaxed).saturating_sub(bytes) };
        (messages, bytes)
    }

    /// The number of the write that holds all that was done before.
    pub(super) fn wait_number(inner: &GroupInner) -> u64 {
        if inner.has_write() { inner.write } else { inner.write - 1 }
    }

    /// Changes the definition; its filter and its order stay. Returns the number of the write that holds it.
    pub(super) fn redefine(&self, definition: Definition) -> u64 {
        self.with(|inner| {
            inner.logic.set_config(definition.config());
            let Definition { filter, order, .. } = inner.kept.definition.clone();
            inner.kept.definition = Definition { filter, order, ..definition };
            inner.kept.etag += 1;
            inner.waypoints.hasten();
            inner.keep();
            Self::wait_number(inner)
        })
    }
}

/// Changes that are written at once.
struct StateWrite {
    number: u64,
    changes: Vec<StateChange>,
    floors: Vec<(Partition, u64)>,
}

impl GroupInner {
    /// Passes over what is not the group's, where nothing of it waits: all before `told` that is its own is known.
    pub(super) fn pass(&mut self, told: u64) {
        if !self.has_begun {
            return;
        }
        for partition in Partition::all() {
            let place = self.logic.place(partition);
            if place < told && self.logic.is_idle(partition) {
                self.logic.pass(partition, place, told);
            }
        }
    }

    /// Wakes the member for what waits for it. The wakers are to be called without the lock.
    pub(super) fn take_wakers(&mut self, member: u64) -> Vec<Waker> {
        self.wakers.remove(&member).unwrap_or_default()
    }

    /// The member waits for the answer that this write allows.
    pub(super) fn await_write(&mut self, member: u64, number: u64) {
        self.awaited.insert((number, member));
    }

    /// Takes the wakers of the members that wait for this write, or for one before it.
    fn answered(&mut self, number: u64) -> Vec<Waker> {
        let rest = self.awaited.split_off(&(number + 1, 0));
        let done = std::mem::replace(&mut self.awaited, rest);
        done.into_iter().filter_map(|(_, member)| self.wakers.remove(&member)).flatten().collect()
    }

    /// Leaves a waker to be woken when the member has something to do, or something is written.
    pub(super) fn wait(&mut self, member: u64, waker: &Waker) {
        let wakers = self.wakers.entry(member).or_default();
        if !wakers.iter().any(|other| other.will_wake(waker)) {
            if wakers.len() >= MOST_WAKERS {
                wakers.remove(0).wake();
            }
            wakers.push(waker.clone());
        }
    }

    /// Tells whether there is something that is not written.
    fn has_write(&self) -> bool {
        !self.changes.is_empty() || self.logic.has_changes()
    }

    fn take_write(&mut self) -> Option<StateWrite> {
        if !self.has_write() {
            return None;
        }
        let mut changes = std::mem::take(&mut self.changes);
        let mut floors = Vec::new();
        for change in self.logic.changes() {
            floors.push((change.partition, change.floor));
            changes.push(put(progress_key(change.partition), change.record));
        }
        changes.extend(self.logic.roster_change().map(|roster| put(Bytes::from_static(MEMBERS), roster)));
        let expect = self.first.take().unwrap_or(Expect::Any);
        changes.push(StateChange { expect, ..self.counts_change() });
        let number = self.write;
        self.write += 1;
        Some(StateWrite { number, changes, floors })
    }

    /// Returns the counts of settled messages, which are part of every write.
    pub(super) fn counts_change(&self) -> StateChange {
        let totals = self.logic.totals();
        let counts = SettledCounts {
            messages: self.base + totals.settled + totals.given_up + totals.lost,
            bytes: self.base_bytes + totals.settled_bytes,
            lost: self.lost + totals.lost,
            writes: self.writes + self.write,
            next_letter: self.letters.next(),
        };
        put(Bytes::from_static(COUNTS), counts.encode())
    }

    /// Tells of records of a partition whether they are the group's: those from before it was made by its filter.
    pub(super) fn is_own(&self, group: GroupId, partition: Partition) -> impl Fn(&LogRecord) -> bool + use<> {
        let born = self.kept.born.get(usize::from(partition.0)).copied().unwrap_or_default();
        let wants = Arc::clone(&self.wants);
        move |record| {
            record.groups.binary_search(&group).is_ok()
                || (record.offset < born && wants(&record.message.borrow()))
        }
    }

    /// Tells whether a caller of this scope may have all messages of the group.
    pub(super) fn is_within(&self, scope: &Scope) -> bool {
        let kept = &self.kept;
        scope.is_all() || !kept.had_other_filters && in_scope(scope, &kept.definition.filter)
    }

    /// The definition is to be written.
    pub(super) fn keep(&mut self) {
        self.changes.push(definition_change(&self.kept));
    }
}
