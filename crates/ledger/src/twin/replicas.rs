//! Replicas of a twin, and the messages between them and its callers.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{Chance, Faults, weight};
use crate::{Beat, Inserted, Owner, Row, Rows, Segment, StoredView, Swapped};

const REPLICAS: usize = 3;
const QUORUM: usize = 2;

/// Answer that a caller waits for. A caller is told that it is unknown as soon as nothing is left that could answer.
pub(super) struct TwinReply<T>(Arc<Mutex<Option<oneshot::Sender<T>>>>);

impl<T> Clone for TwinReply<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> TwinReply<T> {
    pub(super) fn new(sender: oneshot::Sender<T>) -> Self {
        Self(Arc::new(Mutex::new(Some(sender))))
    }

    /// Leaves the caller without an answer, now.
    pub(super) fn forget(&self) {
        self.0.lock().take();
    }

    fn answer(&self, value: T) {
        if let Some(sender) = self.0.lock().take() {
            // A caller that is gone needs none.
            let _ = sender.send(value);
        }
    }
}

/// Counts replicas that have answered a call.
#[derive(Clone, Default)]
struct Quorum(Arc<Mutex<[bool; REPLICAS]>>);

impl Quorum {
    /// Notes one, and returns whether they are a quorum.
    fn met_by(&self, replica: usize) -> bool {
        let mut have = self.0.lock();
        have[replica] = true;
        have.iter().filter(|has| **has).count() >= QUORUM
    }
}

struct TwinMessage {
    carry_out: Box<dyn Fn(&mut Replicas) + Send>,
    may_repeat: bool,
    is_slow: bool,
}

/// Order of rows: number and part, within a segment.
type CellKey = (u64, u16);

/// A row without its place.
#[derive(Clone, PartialEq, Eq)]
struct Cell {
    parts: u16,
    data: Bytes,
}

#[derive(Default)]
struct Replica {
    segments: BTreeMap<Segment, BTreeMap<CellKey, Cell>>,
    /// Number of views that are known.
    views: usize,
    beats: BTreeMap<Arc<str>, (u64, Beat)>,
}

/// All of a cluster's ledger.
pub(super) struct Replicas {
    faults: Faults,
    chance: Chance,
    at_once: bool,
    replicas: [Replica; REPLICAS],
    /// Views that were decided, from the first on.
    history: Vec<StoredView>,
    messages: Vec<TwinMessage>,
    /// Order of beats.
    stamp: u64,
    pub(super) written_twice: Option<String>,
}

impl Replicas {
    pub(super) fn new(faults: Faults, seed: u64, at_once: bool) -> Self {
        Self {
            faults,
            chance: Chance::new(seed),
            at_once,
            replicas: Default::default(),
            history: Vec::new(),
            messages: Vec::new(),
            stamp: 0,
            written_twice: None,
        }
    }

    pub(super) fn under_way(&self) -> usize {
        self.messages.len()
    }

    pub(super) fn history(&self) -> &[StoredView] {
        &self.history
    }

    /// Draws whether a call stays without an answer.
    pub(super) fn forgets(&mut self) -> bool {
        self.chance.per_mille(self.faults.unknown)
    }

    /// Ends a call's sending.
    pub(super) fn sent(&mut self) {
        if self.at_once {
            self.deliver_all();
        }
    }

    pub(super) fn deliver(&mut self) -> bool {
        if self.messages.is_empty() {
            return false;
        }
        let mut at = self.chance.below(self.messages.len());
        if self.messages[at].is_slow && !self.chance.per_mille(50) {
            at = self.chance.below(self.messages.len());
        }
        if self.messages[at].is_slow && !self.chance.per_mille(50) {
            return true;
        }
        let message = self.messages.swap_remove(at);
        if self.chance.per_mille(self.faults.lost) {
            return true;
        }
        (message.carry_out)(self);
        if message.may_repeat && self.chance.per_mille(self.faults.repeated) {
            self.messages.push(message);
        }
        true
    }

    pub(super) fn calm(&mut self) {
        self.faults = Faults { lost: 0, slow: 0, repeated: 0, unknown: 0, half_committed: 0, ..self.faults };
        self.at_once = true;
        self.deliver_all();
    }

    pub(super) fn discard(&mut self) {
        self.messages.clear();
    }

    fn deliver_all(&mut self) {
        while !self.messages.is_empty() {
            (self.messages.remove(0).carry_out)(self);
        }
    }

    fn send(&mut self, carry_out: impl Fn(&mut Self) + Send + 'static) {
        self.push(Box::new(carry_out), false);
    }

    fn send_idempotent(&mut self, carry_out: impl Fn(&mut Self) + Send + 'static) {
        self.push(Box::new(carry_out), true);
    }

    fn push(&mut self, carry_out: Box<dyn Fn(&mut Self) + Send>, may_repeat: bool) {
        let is_slow = self.chance.per_mille(self.faults.slow);
        self.messages.push(TwinMessage { carry_out, may_repeat, is_slow });
    }

    // Rows.

    fn put(&mut self, replica: usize, row: &Row) {
        let cell = Cell { parts: row.parts, data: row.data.clone() };
        let segment = self.replicas[replica].segments.entry(row.segment).or_default();
        let there = segment.entry((row.n, row.part)).or_insert_with(|| cell.clone());
        if *there != cell {
            self.written_twice =
                Some(format!("{:?} n {} part {} was written with other bytes", row.segment, row.n, row.part));
        }
    }

    pub(super) fn store(&mut self, rows: &Arc<[Row]>, reply: TwinReply<Inserted>) {
        // Rows that are not at a quorum yet.
        let left = Arc::new(Mutex::new(vec![false; rows.len()]));
        for index in 0..rows.len() {
            let quorum = Quorum::default();
            for replica in self.chance.order(REPLICAS) {
                let (rows, quorum, left, reply) =
                    (Arc::clone(rows), quorum.clone(), Arc::clone(&left), reply.clone());
                self.send_idempotent(move |world| {
                    world.put(replica, &rows[index]);
                    let mut left = left.lock();
                    left[index] |= quorum.met_by(replica);
                    if left.iter().all(|is_stored| *is_stored) {
                        reply.answer(Inserted::Stored);
                    }
                });
            }
        }
    }

    pub(super) fn store_if_owned(&mut self, owner: Owner, rows: Arc<[Row]>, reply: TwinReply<Inserted>) {
        self.send_idempotent(move |world| {
            let is_owner = world.history.last().is_some_and(|view| view.owners.contains(&owner));
            if is_owner {
                (0..REPLICAS).for_each(|replica| rows.iter().for_each(|row| world.put(replica, row)));
            }
            reply.answer(if is_owner { Inserted::Owned } else { Inserted::Fenced });
        });
    }

    pub(super) fn read(&mut self, segment: Segment, from: CellKey, bytes: usize, reply: TwinReply<Rows>) {
        let found = Arc::new(Mutex::new(Vec::<(usize, BTreeMap<CellKey, Cell>)>::new()));
        for replica in self.chance.order(REPLICAS) {
            let (found, reply) = (Arc::clone(&found), reply.clone());
            self.send(move |world| {
                let cells = world.replicas[replica].segments.get(&segment);
                let cells =
                    cells.map(|cells| cells.range(from..).map(|(at, cell)| (*at, cell.clone())).collect());
                let mut found = found.lock();
                found.push((replica, cells.unwrap_or_default()));
                if found.len() == QUORUM {
                    let readers: Vec<usize> = found.iter().map(|(replica, _)| *replica).collect();
                    let merged = found.iter().flat_map(|(_, cells)| cells.clone()).collect();
                    let rows = page(segment, merged, bytes);
                    if world.faults.repairs {
                        for replica in readers {
                            rows.rows.iter().for_each(|row| world.put(replica, row));
                        }
                    }
                    reply.answer(rows);
                }
            });
        }
    }

    pub(super) fn delete(&mut self, segment: Segment, reply: TwinReply<()>) {
        let quorum = Quorum::default();
        for replica in self.chance.order(REPLICAS) {
            let (quorum, reply) = (quorum.clone(), reply.clone());
            self.send_idempotent(move |world| {
                world.replicas[replica].segments.remove(&segment);
                if quorum.met_by(replica) {
                    reply.answer(());
                }
            });
        }
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        let mut all = BTreeMap::new();
        for replica in &self.replicas {
            for (segment, cells) in &replica.segments {
                all.extend(cells.iter().map(|(place, cell)| ((*segment, *place), cell.clone())));
            }
        }
        all.into_iter().map(|((segment, place), cell)| row(segment, place, cell)).collect()
    }

    pub(super) fn damage(&mut self, damage: &mut dyn FnMut(&Row) -> Option<Row>) {
        let changed: Vec<Row> = self.rows().iter().filter_map(damage).collect();
        for replica in &mut self.replicas {
            replica.segments.clear();
        }
        for replica in 0..REPLICAS {
            changed.iter().for_each(|row| self.put(replica, row));
        }
    }

    // The view.

    fn learn(&mut self, replica: usize, views: usize) {
        let known = &mut self.replicas[replica].views;
        *known = views.max(*known);
    }

    /// Commits the newest view to so many replicas now, and to the others some time.
    fn commit(&mut self, now: usize) {
        let views = self.history.len();
        for (rank, replica) in self.chance.order(REPLICAS).into_iter().enumerate() {
            if rank < now {
                self.learn(replica, views);
            } else if self.faults.commits >= QUORUM {
                self.send_idempotent(move |world| world.learn(replica, views));
            }
        }
    }

    pub(super) fn view(&mut self, reply: TwinReply<Option<StoredView>>) {
        self.send(move |world| {
            // A serial read finishes what is in progress.
            if world.faults.commits >= QUORUM {
                world.commit(QUORUM);
            }
            reply.answer(world.history.last().cloned());
        });
    }

    pub(super) fn swap(&mut self, new: StoredView, reply: TwinReply<Swapped>) {
        self.send(move |world| {
            let version = world.history.last().map_or(0, |view| view.version);
            if new.version != version + 1 {
                return reply.answer(Swapped::Conflict);
            }
            world.history.push(new.clone());
            if world.chance.per_mille(world.faults.half_committed) {
                let reached = world.chance.below(REPLICAS + 1);
                world.commit(reached);
            } else {
                world.commit(world.faults.commits);
                reply.answer(Swapped::Applied);
            }
        });
    }

    pub(super) fn owners(&mut self, reply: TwinReply<Vec<Owner>>) {
        let found = Arc::new(Mutex::new(Vec::<(usize, usize)>::new()));
        for replica in self.chance.order(REPLICAS) {
            let (found, reply) = (Arc::clone(&found), reply.clone());
            self.send(move |world| {
                let mut found = found.lock();
                found.push((replica, world.replicas[replica].views));
                if found.len() == QUORUM {
                    let views = found.iter().map(|(_, views)| *views).max().unwrap_or_default();
                    for (replica, _) in found.iter() {
                        world.learn(*replica, views);
                    }
                    let view = views.checked_sub(1).and_then(|last| world.history.get(last));
                    reply.answer(view.map(|view| view.owners.clone()).unwrap_or_default());
                }
            });
        }
    }

    pub(super) fn true_owners(&mut self, reply: TwinReply<Vec<Owner>>) {
        self.send(move |world| {
            reply.answer(world.history.last().map(|view| view.owners.clone()).unwrap_or_default());
        });
    }

    // Signs of life.

    pub(super) fn beat(&mut self, beat: Beat, reply: TwinReply<Vec<Owner>>) {
        self.stamp += 1;
        let (stamp, quorum) = (self.stamp, Quorum::default());
        for replica in self.chance.order(REPLICAS) {
            let (beat, quorum, reply) = (beat.clone(), quorum.clone(), reply.clone());
            self.send(move |world| {
                let node = Arc::clone(&beat.node);
                let there =
                    world.replicas[replica].beats.entry(node).or_insert_with(|| (stamp, beat.clone()));
                if there.0 < stamp {
                    *there = (stamp, beat.clone());
                }
                if quorum.met_by(replica) {
                    world.owners(reply.clone());
                }
            });
        }
    }

    pub(super) fn beats(&mut self, reply: TwinReply<Vec<Beat>>) {
        let found = Arc::new(Mutex::new((0, BTreeMap::<Arc<str>, (u64, Beat)>::new())));
        for replica in self.chance.order(REPLICAS) {
            let (found, reply) = (Arc::clone(&found), reply.clone());
            self.send(move |world| {
                let (answers, newest) = &mut *found.lock();
                for (node, beat) in &world.replicas[replica].beats {
                    let there = newest.entry(Arc::clone(node)).or_insert_with(|| beat.clone());
                    if there.0 < beat.0 {
                        *there = beat.clone();
                    }
                }
                *answers += 1;
                if *answers == QUORUM {
                    reply.answer(newest.values().map(|(_, beat)| beat.clone()).collect());
                }
            });
        }
    }
}

fn row(segment: Segment, (n, part): CellKey, cell: Cell) -> Row {
    Row { segment, n, part, parts: cell.parts, data: cell.data }
}

/// The first rows, of about so many bytes.
fn page(segment: Segment, cells: BTreeMap<CellKey, Cell>, bytes: usize) -> Rows {
    let (mut rows, mut size) = (Vec::new(), 0);
    for (place, cell) in cells {
        if size >= bytes && !rows.is_empty() {
            return Rows { rows, more: true };
        }
        size += weight(&cell.data);
        rows.push(row(segment, place, cell));
    }
    Rows { rows, more: false }
}
