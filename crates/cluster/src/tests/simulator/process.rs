//! A gateway, as the simulator runs it: follows, takes the home, serves, and stops or is killed.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use ledger::{
    Cleaned, Ledger, Marks, Position,
    twin::{Chance, Twin},
};

use tokio::sync::Notify;

use super::{
    directory::{Change, Contents, Directory, apply, write},
    schedule::{Spawner, VirtualClock, pause},
};
use crate::{
    Appended, Clock, Follower, LEASE_WAIT, Lease, MemberNode, Node, Pace, Sealed, StreamWriter, TakeError,
    View, take,
    weakening::{WEAKENING, Weakening},
    writer::Probe,
};

/// Streams of the home: one has the bodies of messages, the other closes them.
pub(super) const STREAMS: u8 = 2;

/// Everything that happened, as nobody in the cluster knows it.
pub(super) struct Truth {
    pub(super) chance: RefCell<Chance>,
    pub(super) twin: Twin,
    /// Stream with the bodies.
    pub(super) bodies: u8,
    /// Vectors of sealed epochs in the views that were looked at, and how many those were.
    sealed: RefCell<(usize, BTreeMap<u64, Vec<Option<Sealed>>>)>,
    /// Changes of each record, by epoch and stream, without the puts of cleaning.
    pub(super) records: RefCell<BTreeMap<(u64, u8), Vec<Vec<Change>>>>,
    /// Epoch, stream and number of records that were acknowledged.
    pub(super) acknowledged: RefCell<Vec<(u64, u8, u64)>>,
    pub(super) violation: RefCell<Option<String>>,
    pub(super) tally: RefCell<Tally>,
    /// Directories by node, and copies of them that somebody has made.
    pub(super) directories: RefCell<BTreeMap<&'static str, Directory>>,
    pub(super) backups: RefCell<Vec<Directory>>,
    /// Nodes whose directory is in use.
    pub(super) locked: RefCell<BTreeSet<&'static str>>,
    /// Leases of all tenures, with the clocks of their processes.
    leases: RefCell<Vec<(u64, Arc<Lease>, Arc<dyn Clock>)>>,
}

/// Counts, to see that the simulator does what it is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) acknowledged: usize,
    pub(super) served: usize,
    pub(super) from_directories: usize,
    pub(super) followed: usize,
    pub(super) released: usize,
    pub(super) cleaned: usize,
    pub(super) lost: usize,
}

impl Truth {
    pub(super) fn new(chance: Chance, twin: Twin, bodies: u8) -> Self {
        Self {
            chance: RefCell::new(chance),
            twin,
            bodies,
            sealed: RefCell::default(),
            records: RefCell::default(),
            acknowledged: RefCell::default(),
            violation: RefCell::default(),
            tally: RefCell::default(),
            directories: RefCell::default(),
            backups: RefCell::default(),
            locked: RefCell::default(),
            leases: RefCell::default(),
        }
    }

    pub(super) fn below(&self, end: usize) -> usize {
        self.chance.borrow_mut().below(end)
    }

    pub(super) fn per_mille(&self, times: usize) -> bool {
        self.chance.borrow_mut().per_mille(times)
    }

    pub(super) fn violated(&self, text: String) {
        self.violation.borrow_mut().get_or_insert(text);
    }

    /// The vector of each epoch that was ever sealed; a violation if there are two.
    pub(super) fn sealed(&self) -> BTreeMap<u64, Vec<Option<Sealed>>> {
        let (looked, found) = &mut *self.sealed.borrow_mut();
        let history = self.twin.history();
        for stored in &history[*looked..] {
            let view = View::read(stored).unwrap();
            for ended in &view.homes[0].chain {
                let Some(vector) = &ended.sealed else { continue };
                let there = found.entry(ended.epoch).or_insert_with(|| vector.clone());
                if there != vector {
                    self.violated(format!("epoch {} is sealed at {there:?} and {vector:?}", ended.epoch));
                }
            }
        }
        *looked = history.len();
        found.clone()
    }

    /// Contents of a stream when epoch `end` began; `None` if an epoch before it is not sealed.
    pub(super) fn expected(&self, stream: u8, end: u64) -> Option<Contents> {
        let (sealed, mut contents) = (self.sealed(), Contents::new());
        for ((epoch, _), records) in
            self.records.borrow().iter().filter(|((epoch, of), _)| *epoch < end && *of == stream)
        {
            let Some(vector) = sealed.get(epoch) else {
                // An epoch that left the chain at once had nothing sealed.
                let last = self.twin.history().pop();
                let view = View::read(&last.unwrap()).unwrap();
                if view.homes[0].chain.iter().any(|ended| ended.epoch == *epoch) {
                    return None;
                }
                continue;
            };
            let count = vector[usize::from(stream)].map_or(0, |last| last.n as usize + 1);
            records.iter().take(count).for_each(|changes| apply(&mut contents, changes));
        }
        Some(contents)
    }
}

/// Unlocks a directory when its process ends, in any way.
struct Lock(Rc<Truth>, &'static str);

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.locked.borrow_mut().remove(self.1);
    }
}

fn is_weak(weakening: Weakening) -> bool {
    WEAKENING.get() == Some(weakening)
}

/// Runs a gateway that appends at most so many records to each stream.
pub(super) async fn gateway(
    truth: Rc<Truth>,
    spawner: Spawner,
    clock: VirtualClock,
    name: &'static str,
    records: usize,
) {
    let clock: Arc<dyn Clock> = Arc::new(clock);
    let ledger: Arc<dyn Ledger> = Arc::new(truth.twin.clone());
    let incarnation = if is_weak(Weakening::SameIncarnation) { 1 } else { truth.chance.borrow_mut().draw() };
    let me = Arc::new(MemberNode::new(ledger, Arc::clone(&clock), Node::new(name, incarnation)));
    let running = Arc::clone(&me);
    spawner.spawn(async move { running.run().await });

    // A second process of a node, or a node without a disk, has an empty directory of its own.
    let is_free = truth.locked.borrow_mut().insert(name);
    let lock = is_free.then(|| Lock(Rc::clone(&truth), name));
    let own =
        || truth.directories.borrow_mut().entry(name).or_insert_with(|| Directory::new(STREAMS)).clone();
    let mut directory = if is_free && name != "z" { own() } else { Directory::new(STREAMS) };

    // A standby, for some time.
    let mut follower = Follower::new(0);
    let steps = if truth.per_mille(400) { truth.below(6) } else { 0 };
    for _ in 0..steps {
        let Ok(view) = me.view().await else { return };
        match follower.step(&me, &view, &mut directory).await {
            Ok(followed) => truth.tally.borrow_mut().followed += followed.applied as usize,
            Err(error) => return truth.violated(format!("{name} follows: {error}")),
        }
        clock.sleep(Duration::from_millis(500)).await;
    }

    let had = (0..STREAMS).any(|stream| crate::HomeCopy::position(&directory, stream).is_some());
    let tenure = match take(&me, 0, None, LEASE_WAIT, &mut directory).await {
        Ok(tenure) => tenure,
        Err(TakeError::View(_)) => return,
        Err(error) => return truth.violated(format!("{name} takes: {error}")),
    };
    let epoch = tenure.owner().epoch;
    for (of, lease, clock) in truth.leases.borrow().iter() {
        if *of < epoch && lease.held(clock.now()) {
            truth.violated(format!("epoch {epoch} is served while epoch {of} holds its lease"));
        }
    }
    truth.leases.borrow_mut().push((epoch, Arc::clone(tenure.lease()), Arc::clone(&clock)));
    for stream in 0..STREAMS {
        let contents = directory.contents(stream);
        let expected = truth.expected(stream, epoch);
        if expected.as_ref().is_some_and(|expected| *expected != contents) {
            truth.violated(format!("epoch {epoch} stream {stream} restored {contents:?}, not {expected:?}"));
        }
    }
    {
        let mut tally = truth.tally.borrow_mut();
        tally.served += 1;
        tally.from_directories += usize::from(had);
    }
    if truth.per_mille(100) {
        return;
    }
    if is_free && truth.per_mille(300) {
        truth.backups.borrow_mut().push(directory.copy());
    }

    let running = tenure.clone();
    spawner.spawn(async move { running.run().await });
    let finished = Rc::new(RefCell::new(Vec::new()));
    let bodies = Rc::new(RefCell::new(Bodies::default()));
    let pace = Pace { row: 100, segment: 400 };
    for mut writer in tenure.writers() {
        writer.set_pace(pace);
        let stream = Stream {
            truth: Rc::clone(&truth),
            directory: directory.clone(),
            bodies: Rc::clone(&bodies),
            name,
            epoch,
            number: writer.stream(),
            cursor: String::new(),
            marks: Marks::default(),
        };
        let finished = Rc::clone(&finished);
        spawner.spawn(async move {
            if let Some(writer) = stream.serve(writer, records).await {
                finished.borrow_mut().push(writer);
            }
        });
    }
    while !tenure.is_lost() && finished.borrow().len() < usize::from(STREAMS) {
        clock.sleep(Duration::from_millis(100)).await;
    }
    if truth.per_mille(500) {
        // Starts are published, and segments deleted.
        clock.sleep(Duration::from_secs(3)).await;
    }
    if tenure.is_lost() {
        truth.tally.borrow_mut().lost += 1;
    } else if truth.per_mille(500) {
        let mut writers = finished.take();
        writers.sort_by_key(StreamWriter::stream);
        if tenure.release(writers).await.is_ok() {
            truth.tally.borrow_mut().released += 1;
        }
    }
    drop(lock);
}

/// Messages whose bodies are appended, and how many of them were closed.
#[derive(Default)]
struct Bodies {
    appended: Vec<String>,
    closed: usize,
    is_finished: bool,
    changed: Rc<Notify>,
}

impl Bodies {
    fn append(&mut self, body: String) {
        self.appended.push(body);
        self.changed.notify_one();
    }
}

/// A stream of a home that is served.
struct Stream {
    truth: Rc<Truth>,
    directory: Directory,
    bodies: Rc<RefCell<Bodies>>,
    name: &'static str,
    epoch: u64,
    number: u8,
    /// The key that was repeated last.
    cursor: String,
    marks: Marks<String>,
}

impl Stream {
    /// Appends records; the writer comes back if the home was not lost.
    async fn serve(mut self, mut writer: StreamWriter, records: usize) -> Option<StreamWriter> {
        for n in 0..records {
            let before = self.directory.contents(self.number);
            let mut changes = self.other_changes(&before, n);
            let body = format!("b{}.{n}", self.epoch);
            if self.has_bodies() {
                changes.push((body.clone(), Some(format!("{}.{n}", self.epoch))));
            } else {
                let Some(body) = self.next_body().await else { break };
                changes.push((format!("c{body}"), Some("closed".to_owned())));
            }
            // Puts of the oldest keys, as they are before the transaction.
            let wanted = 1 + self.truth.below(3);
            let marks =
                (self.marks.is_empty() || self.truth.per_mille(300)) && self.marks.set(self.cursor.clone());
            let behind = (std::ops::Bound::Excluded(&*self.cursor), std::ops::Bound::Unbounded);
            let oldest = before.range::<str, _>(behind).take(wanted);
            let oldest: Vec<Change> = oldest.map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
            let has_ended_round = oldest.len() < wanted;
            let cursor = oldest.last().filter(|_| !has_ended_round);
            self.cursor = cursor.map(|(key, _)| key.clone()).unwrap_or_default();
            let cleaned = Cleaned { marks, passed: self.passed(has_ended_round) };
            self.truth
                .records
                .borrow_mut()
                .entry((self.epoch, self.number))
                .or_default()
                .push(changes.clone());
            let record: Vec<Change> = match is_weak(Weakening::CursorLast) {
                true => changes.iter().cloned().chain(oldest).collect(),
                false => oldest.into_iter().chain(changes.iter().cloned()).collect(),
            };
            let record = write(&record, self.truth.below(150));
            if is_weak(Weakening::NoThen) && self.has_bodies() {
                self.bodies.borrow_mut().append(body.clone());
            }
            let position = self.append(&mut writer, &record, cleaned, &changes, &body).await?;
            // Dies here, between (4) and the local commit.
            pause().await;
            if !is_weak(Weakening::LocalFirst) {
                self.directory.commit(self.number, position, &changes);
            }
            self.truth.acknowledged.borrow_mut().push((self.epoch, self.number, position.n));
            let mut tally = self.truth.tally.borrow_mut();
            tally.acknowledged += 1;
            tally.cleaned += cleaned.passed;
            drop(tally);
            if self.has_bodies() && !is_weak(Weakening::NoThen) && !is_weak(Weakening::ThenAtInsert) {
                self.bodies.borrow_mut().append(body);
            }
        }
        if self.has_bodies() {
            let mut bodies = self.bodies.borrow_mut();
            bodies.is_finished = true;
            bodies.changed.notify_one();
        }
        Some(writer)
    }

    /// Marks that a record passes.
    fn passed(&mut self, has_ended_round: bool) -> usize {
        match has_ended_round && is_weak(Weakening::PassSoon) {
            true => std::mem::take(&mut self.marks).len(),
            false => self.marks.pass(&self.cursor, has_ended_round),
        }
    }

    fn has_bodies(&self) -> bool {
        self.number == self.truth.bodies
    }

    /// Keys that are deleted or overwritten along with it.
    fn other_changes(&self, before: &Contents, n: usize) -> Vec<Change> {
        let keys: Vec<&String> = before.keys().collect();
        if keys.is_empty() {
            return Vec::new();
        }
        let key = keys[self.truth.below(keys.len())].clone();
        match self.truth.below(10) {
            0..3 => vec![(key, None)],
            3..5 if self.has_bodies() => vec![(key, Some(format!("{}.{n}", self.epoch)))],
            _ => Vec::new(),
        }
    }

    /// A message whose body counts, to be closed; `None` when there will be no more.
    async fn next_body(&self) -> Option<String> {
        loop {
            let changed = {
                let bodies = &mut *self.bodies.borrow_mut();
                if let Some(body) = bodies.appended.get(bodies.closed) {
                    bodies.closed += 1;
                    return Some(body.clone());
                }
                if bodies.is_finished {
                    return None;
                }
                Rc::clone(&bodies.changed)
            };
            changed.notified().await;
        }
    }

    /// Appends; looks at the steps in between, for protocols that are wrong.
    async fn append(
        &self,
        writer: &mut StreamWriter,
        record: &[u8],
        cleaned: Cleaned,
        changes: &[Change],
        body: &str,
    ) -> Option<Position> {
        let probe = Arc::clone(&writer.probe);
        *probe.lock() = Default::default();
        let before = self.directory.contents(self.number);
        let mut append = pin!(writer.append_cleaned(record, cleaned));
        let (mut has_begun, mut is_inserted) = (false, false);
        let appended = std::future::poll_fn(|context| {
            let polled = append.as_mut().poll(context);
            let Probe { position, is_inserted: inserted } = *probe.lock();
            if let Some(position) = position.filter(|_| !std::mem::replace(&mut has_begun, true)) {
                if is_weak(Weakening::LocalFirst) {
                    self.directory.commit(self.number, position, changes);
                }
                if is_weak(Weakening::DirectoryAhead) {
                    self.commit_elsewhere(position, &before, changes);
                }
            }
            let is_new = inserted && !std::mem::replace(&mut is_inserted, true);
            if is_new && self.has_bodies() && is_weak(Weakening::ThenAtInsert) {
                self.bodies.borrow_mut().append(body.to_owned());
            }
            polled
        })
        .await;
        match appended {
            Appended::Done(position) => Some(position),
            Appended::Lost => None,
            Appended::TooLarge => panic!("a record of {} bytes", record.len()),
        }
    }

    /// Warm copies of other nodes run ahead of what was validated.
    fn commit_elsewhere(&self, position: Position, before: &Contents, changes: &[Change]) {
        let locked = self.truth.locked.borrow();
        for (name, directory) in self.truth.directories.borrow().iter() {
            if *name != self.name && !locked.contains(name) {
                directory.replace(self.number, before);
                directory.commit(self.number, position, changes);
            }
        }
    }
}
