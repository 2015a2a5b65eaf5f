//! Writes that wait, and their turns: kinds share a transaction, and within a kind each owner has one write after the other's.
//!
//! Of a kind (three of them are one *lane*, with one bound) a transaction takes so much and no more. A flood of one kind, or of
//! one owner, therefore delays the writes of all others by the transaction that is under way, and no longer.

use std::{
    collections::{BTreeMap, HashMap},
    mem,
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use bytes::Bytes;

use crate::{committer::Inbox, counters::count, reserve::RESERVE};
use store::{
    Expect, RecordChange, RecordKind, RecordOutcome, RecordWaiter, RecordWrite, StoreError, is_deleted_shadow,
};

/// Bytes counted for a write, and for each change of it besides key, value and condition.
const OVERHEAD: usize = 100;

/// Bytes and changes of a lane in one transaction, about: a commit must not take long.
const LANE_BYTES: usize = 2 << 20;
const LANE_CHANGES: usize = 2_000;

/// Bytes that one transaction may take of the room kept for removals.
const RESERVED_BYTES: usize = RESERVE / 4;

/// Number of lanes.
pub(super) const LANES: usize = 3;

/// The lane of a kind.
fn lane(kind: RecordKind) -> usize {
    match kind {
        RecordKind::Answers | RecordKind::Scheduled | RecordKind::Commands => 0,
        RecordKind::Groups => 1,
        RecordKind::Shadows => 2,
    }
}

fn count_refused(lane: usize) {
    count(|c| [&c.store_refused_publisher, &c.store_refused_groups, &c.store_refused_shadows][lane].add(1));
}

/// A write and who waits for it.
pub(super) struct RecordOp {
    pub(super) write: RecordWrite,
    pub(super) waiter: RecordWaiter,
}

impl RecordOp {
    /// The record by which it has its turn.
    fn place(&self) -> (RecordKind, Bytes) {
        let RecordWrite { changes, fence } = &self.write;
        let change = changes.first().map(|change| (change.kind, &change.key));
        let first = change.or_else(|| fence.as_ref().map(|fence| (fence.kind, &fence.key)));
        first.map_or((RecordKind::Answers, Bytes::new()), |(kind, key)| (kind, kind.owner(key)))
    }

    fn bytes(&self) -> usize {
        OVERHEAD + self.write.changes.iter().map(size).sum::<usize>()
    }

    /// Returns whether it makes no more than room, so that what it removes is a bound to it.
    fn is_removal(&self) -> bool {
        self.write.fence.is_none() && self.write.changes.iter().all(RecordChange::is_removal)
    }

    /// Returns whether it adds to the stored records, so that it must not use the room kept for removals.
    ///
    /// A group that cannot note what was acknowledged cannot free its messages either: notes may use that room, of which they
    /// need little again and again. What is large, as dead letters are, may not. Changes that nobody waits for may: they cannot
    /// be refused, and there is a bound to them.
    fn adds(&self) -> bool {
        let is_new = |change: &RecordChange| match (change.kind, &change.value) {
            (_, None) => false,
            (RecordKind::Groups, _) => self.bytes() > RESERVED_BYTES,
            (RecordKind::Shadows, Some(value)) => !is_deleted_shadow(value),
            (RecordKind::Answers | RecordKind::Scheduled | RecordKind::Commands, _) => true,
        };
        !self.waiter.is_nobody() && self.write.changes.iter().any(is_new)
    }

    /// Tells that it is not made. Removals in it are left, to be made some time.
    fn refuse(mut self, error: StoreError) -> Option<Self> {
        let has_no_fence = self.write.fence.is_none();
        self.write.changes.retain(|change| has_no_fence && change.is_removal());
        mem::replace(&mut self.waiter, RecordWaiter::Nobody).tell(Err(error));
        (!self.write.changes.is_empty()).then_some(self)
    }
}

fn size(change: &RecordChange) -> usize {
    let expected = match &change.expect {
        Expect::Value(value) => value.len(),
        Expect::Any | Expect::Absent | Expect::Version(_) => 0,
    };
    OVERHEAD + change.key.len() + change.value.as_ref().map_or(0, Bytes::len) + expected
}

/// Owner of a write, and its number among all: the order in which an owner's are made.
type Place = (Bytes, u64);

/// Writes of a lane.
#[derive(Default)]
struct Lane {
    writes: BTreeMap<Place, RecordOp>,
    /// Number of the last write that nobody waits for, by the record that it changes: each has only the last change of a record.
    kept: HashMap<(RecordKind, Bytes), u64, ahash::RandomState>,
    bytes: usize,
    /// Owner who had a turn last.
    served: Bytes,
}

impl Lane {
    fn insert(&mut self, (owner, number): Place, mut op: RecordOp) {
        if op.waiter.is_nobody() {
            op.write.changes.retain(|change| self.replace(&owner, number, change));
            if op.write.changes.is_empty() {
                return;
            }
        }
        self.bytes += op.bytes();
        self.writes.insert((owner, number), op);
    }

    /// Takes an earlier change of the same record back that nobody waits for. False if there is a later one.
    fn replace(&mut self, owner: &Bytes, number: u64, change: &RecordChange) -> bool {
        let last = self.kept.entry((change.kind, change.key.clone())).or_insert(number);
        if *last > number {
            return false;
        }
        let place = (owner.clone(), mem::replace(last, number));
        if place.1 < number
            && let Some(op) = self.writes.get_mut(&place)
        {
            let before = op.bytes();
            op.write.changes.retain(|old| (old.kind, &old.key) != (change.kind, &change.key));
            self.bytes = self.bytes + op.bytes() - before;
            if op.write.changes.is_empty() {
                self.bytes -= op.bytes();
                self.writes.remove(&place);
            }
        }
        true
    }

    /// Moves the next writes to `planned`: one of each owner in turn. With `adding`, only of those that [add](RecordOp::adds) or
    /// do not, and of an owner only while they are its first ones. With a ledger no more is taken once `redo` bytes are. Returns
    /// whether that was why it ended.
    fn plan(&mut self, adding: Option<bool>, redo: usize, planned: &mut Vec<(Place, RecordOp)>) -> bool {
        let most = if adding == Some(false) { RESERVED_BYTES / LANES } else { LANE_BYTES };
        let (most, is_for_ledger) = (most.min(redo), redo < most);
        let mut has_enough = false;
        let (mut bytes, mut changes) = (0, 0);
        let mut owner = self.served.clone();
        let mut first_skipped: Option<Bytes> = None;
        loop {
            let behind = (Bound::Excluded((owner, u64::MAX)), Bound::Unbounded);
            let next = self.writes.range(behind).next().or_else(|| self.writes.first_key_value());
            let Some((place, op)) = next else { break };
            if adding.is_some_and(|adding| adding != op.adds()) {
                if first_skipped.as_ref() == Some(&place.0) {
                    break;
                }
                owner = place.0.clone();
                first_skipped.get_or_insert_with(|| owner.clone());
                continue;
            }
            let more = (op.bytes(), op.write.changes.len());
            let is_first = bytes == 0;
            let has_room = bytes + more.0 <= most;
            if !is_first && (!has_room || changes + more.1 > LANE_CHANGES) {
                has_enough = is_for_ledger && !has_room;
                break;
            }
            (bytes, changes) = (bytes + more.0, changes + more.1);
            first_skipped = None;
            let place = place.clone();
            owner = place.0.clone();
            self.served = owner.clone();
            if let Some(op) = self.writes.remove(&place) {
                planned.push((place, op));
            }
        }
        self.bytes -= bytes;
        has_enough
    }
}

/// Writes of all lanes.
#[derive(Default)]
struct Lanes {
    lanes: [Lane; LANES],
    last: u64,
}

impl Lanes {
    fn push(&mut self, op: RecordOp) {
        self.last += 1;
        let (kind, owner) = op.place();
        self.lanes[lane(kind)].insert((owner, self.last), op);
    }

    fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.writes.is_empty())
    }
}

/// Bytes of each lane with the writer.
type InHand = Arc<[AtomicUsize; LANES]>;

/// Writes on their way to the writer.
pub(super) struct TurnsInbox {
    lanes: Lanes,
    operations: usize,
    in_hand: InHand,
    limits: [usize; LANES],
}

impl Inbox for TurnsInbox {
    type Op = RecordOp;

    fn push(&mut self, op: RecordOp) {
        self.operations += 1;
        let kind = op.place().0;
        let lane = lane(kind);
        let waiting = self.lanes.lanes[lane].bytes + self.in_hand[lane].load(Relaxed);
        let refused = if !op.write.is_valid() {
            "the key of a record has no possible length".to_owned()
        } else if waiting > self.limits[lane] && !op.is_removal() {
            count_refused(lane);
            format!("too many changes of {} wait for the disk", kind.name())
        } else {
            return self.lanes.push(op);
        };
        let op = op.refuse(StoreError::Unavailable(refused));
        if let Some(op) = op.filter(|op| op.write.is_valid()) {
            self.lanes.push(op);
        }
    }

    fn len(&self) -> usize {
        self.operations
    }
}

/// Writes with the writer.
pub(super) struct Turns {
    lanes: Lanes,
    planned: Vec<(Place, RecordOp)>,
    in_hand: InHand,
    /// Since a transaction failed, writes that add and others are in turn in transactions of their own: a full disk takes the
    /// others.
    apart: Option<bool>,
}

impl Turns {
    /// The writer's side, and two inboxes that take so many bytes of each lane together with it.
    pub(super) fn new(limits: [usize; LANES]) -> (Self, [TurnsInbox; 2]) {
        let in_hand = InHand::default();
        let inbox =
            || TurnsInbox { lanes: Lanes::default(), operations: 0, in_hand: Arc::clone(&in_hand), limits };
        let inboxes = [inbox(), inbox()];
        (Self { lanes: Lanes::default(), planned: Vec::new(), in_hand, apart: None }, inboxes)
    }

    pub(super) fn accept(&mut self, inbox: &mut TurnsInbox) {
        inbox.operations = 0;
        for lane in mem::take(&mut inbox.lanes).lanes {
            lane.writes.into_values().for_each(|op| self.lanes.push(op));
        }
        self.note_bytes();
    }

    /// Chooses the writes of the next transaction, with about `redo` bytes of changes, of which each lane has a part.
    pub(super) fn plan(&mut self, redo: usize) -> bool {
        for _ in 0..2 {
            if let Some(adding) = &mut self.apart {
                *adding = !*adding;
            }
            let mut has_enough = false;
            for lane in &mut self.lanes.lanes {
                has_enough |= lane.plan(self.apart, redo / LANES, &mut self.planned);
            }
            count(|c| c.store_full_records.add(has_enough.into()));
            if !self.planned.is_empty() {
                return true;
            }
        }
        false
    }

    /// The writes of the transaction.
    pub(super) fn planned(&self) -> impl Iterator<Item = &RecordOp> {
        self.planned.iter().map(|(_, op)| op)
    }

    /// Returns whether the transaction must not use the room kept for removals.
    pub(super) fn adds(&self) -> bool {
        self.apart.unwrap_or_else(|| {
            self.planned().any(RecordOp::adds)
                || self.planned().map(RecordOp::bytes).sum::<usize>() > RESERVED_BYTES
        })
    }

    /// Tells the outcomes of the transaction.
    pub(super) fn committed(&mut self, outcomes: &mut Vec<RecordOutcome>) {
        if self.apart == Some(true) || self.lanes.is_empty() {
            self.apart = None;
        }
        let planned = mem::take(&mut self.planned);
        for ((_, number), op) in planned.iter().filter(|(_, op)| op.waiter.is_nobody()) {
            let lane = &mut self.lanes.lanes[lane(op.place().0)];
            for change in &op.write.changes {
                let record = (change.kind, change.key.clone());
                if lane.kept.get(&record) == Some(number) {
                    lane.kept.remove(&record);
                }
            }
        }
        self.note_bytes();
        for ((_, op), outcome) in planned.into_iter().zip(outcomes.drain(..)) {
            op.waiter.tell(Ok(outcome));
        }
    }

    /// Refuses the writes of the transaction, and leaves those that cannot be refused or may have more luck on their own.
    pub(super) fn failed(&mut self) {
        let was_mixed = self.apart.is_none() && self.adds();
        self.apart.get_or_insert(true);
        for (place, op) in mem::take(&mut self.planned) {
            let kind = op.place().0;
            let left = if op.waiter.is_nobody() || (was_mixed && !op.adds()) {
                Some(op)
            } else {
                let name = kind.name();
                op.refuse(StoreError::Unavailable(format!("the disk does not take changes of {name}")))
            };
            if let Some(op) = left {
                self.lanes.lanes[lane(kind)].insert(place, op);
            }
        }
        self.note_bytes();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Refuses all.
    pub(super) fn close(&mut self) {
        for lane in &mut self.lanes.lanes {
            for op in mem::take(&mut lane.writes).into_values() {
                op.refuse(StoreError::closed());
            }
        }
    }

    fn note_bytes(&self) {
        for (lane, in_hand) in self.lanes.lanes.iter().zip(&*self.in_hand) {
            in_hand.store(lane.bytes, Relaxed);
        }
    }
}
