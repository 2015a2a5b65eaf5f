//! Latest values go to the ledger once per key and interval, in a thread of their own: nobody waits for it.
//!
//! A **lap** goes through the table of changes (`changed`) in the order of its keys. It reads a record's worth of them with what the
//! store holds at that moment, ships that, and takes out what has not changed again since. So of a key that changes all the time
//! one value goes with each lap, the newest; and a lap that takes longer than the interval puts values off and drops none. The position of
//! the last record is noted with what is taken out: the store may be ahead of it, and has everything up to it.
//!
//! While the ledger wants it, a record also repeats the oldest keys, and a lap goes on until all have been.

use std::{
    fmt,
    ops::Bound,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use heed::RoTxn;
use ledger::{Cleaned, Shipped, Shipping};
use parking_lot::{Condvar, Mutex};
use store::StoreError;

use super::{changed, read, tables::LatestTables};
use crate::{
    counters::count,
    environment::{Environment, RepeatCursor},
    record,
    table::{Redo, Table},
};

/// Bytes of a record, unless a single value has more: a row of the ledger. What is acknowledged waits behind one of these at most.
const RECORD: usize = 128 << 10;

/// Values that are noted as changed in one transaction where the ledger has none.
const NOTED: usize = 1_000;

/// Time that the last lap has when the store is closed in order.
const LAST_LAP: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

/// Most time that closing waits for an append whose answer does not come.
const PATIENCE: Duration = Duration::from_secs(1);

/// A ledger for latest values, which are written to the store first.
#[derive(Clone)]
pub struct LatestLedger {
    /// Their stream.
    pub shipping: Arc<dyn Shipping>,
    /// A key goes to the ledger at most once in this time.
    pub interval: Duration,
    /// Bytes a second, on average.
    pub bytes: usize,
}

impl fmt::Debug for LatestLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { interval, bytes, .. } = self;
        f.debug_struct("LatestLedger")
            .field("interval", interval)
            .field("bytes", bytes)
            .finish_non_exhaustive()
    }
}

/// Figures of latest values on their way to the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatestLedgerFigures {
    /// Keys that have changed since the ledger had them.
    pub waiting: u64,
    /// The ledger has every value that is older than this.
    pub lag: Duration,
}

/// The thread, and what is told to it. Dropping it ends the thread, and waits for an append under way for a second at most.
pub(super) struct LatestShipper {
    shared: Arc<ShipperShared>,
    thread: Option<JoinHandle<()>>,
}

struct ShipperShared {
    state: Mutex<ShipperState>,
    /// The state has changed.
    changed: Condvar,
}

struct ShipperState {
    /// The thread is to end, and may ship until then.
    end: Option<Instant>,
    has_ended: bool,
    /// Beginning of the last lap that went through all changes.
    lapped: Instant,
}

impl LatestShipper {
    pub(super) fn start(
        environment: Arc<Environment>,
        tables: LatestTables,
        changed: Table,
        ledger: LatestLedger,
    ) -> Result<Self, StoreError> {
        let state = ShipperState { end: None, has_ended: false, lapped: now() };
        let shared = Arc::new(ShipperShared { state: Mutex::new(state), changed: Condvar::new() });
        let worker = ShipperWorker {
            environment,
            tables,
            changed,
            ledger,
            cursor: RepeatCursor::default(),
            due: now(),
            lap: LapState { begun: now(), paced: Duration::ZERO },
            shared: Arc::clone(&shared),
        };
        let thread = std::thread::Builder::new()
            .name("latest-ledger".to_owned())
            .spawn(move || worker.run())
            .map_err(|e| StoreError::Unavailable(format!("cannot start the thread latest-ledger: {e}")))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Time since the beginning of the last lap that went through all changes.
    pub(super) fn lag(&self) -> Duration {
        self.shared.state.lock().lapped.elapsed()
    }

    /// Ends it with a last lap, which has a second, and waits for that off the runtime. Whoever drops the future leaves it to itself.
    pub(super) async fn finish(&self) {
        let shared = Arc::clone(&self.shared);
        let finish = tokio::task::spawn_blocking(move || shared.end(LAST_LAP));
        // The thread does not panic.
        let _ = finish.await;
    }
}

impl Drop for LatestShipper {
    fn drop(&mut self) {
        let has_ended = self.shared.end(Duration::ZERO);
        // One that waits for the ledger holds the directory until that answers, or the home is handed over.
        if let Some(thread) = self.thread.take().filter(|_| has_ended) {
            store::join(thread);
        }
    }
}

impl ShipperShared {
    /// Tells the thread to end, and waits. Returns whether it has ended.
    fn end(&self, ships_for: Duration) -> bool {
        let until = now() + ships_for;
        let mut state = self.state.lock();
        state.end = Some(state.end.map_or(until, |end| end.min(until)));
        self.changed.notify_all();
        while !state.has_ended {
            if self.changed.wait_until(&mut state, until + PATIENCE).timed_out() {
                break;
            }
        }
        state.has_ended
    }

    /// Waits until a time, unless the thread is to end: then returns until when it may ship.
    fn wait_until(&self, at: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        while state.end.is_none() && !self.changed.wait_until(&mut state, at).timed_out() {}
        state.end
    }
}

struct ShipperWorker {
    environment: Arc<Environment>,
    tables: LatestTables,
    changed: Table,
    ledger: LatestLedger,
    /// Keys that were repeated.
    cursor: RepeatCursor,
    /// Time before which no record goes, for `ledger.bytes`.
    due: Instant,
    lap: LapState,
    shared: Arc<ShipperShared>,
}

struct LapState {
    begun: Instant,
    /// Time that was waited for `ledger.bytes`.
    paced: Duration,
}

/// Key and value in `changed`.
type ChangedEntry = (Vec<u8>, Vec<u8>);

/// End of a lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LapEnd {
    /// All that had changed before it began is in the ledger.
    Whole,
    /// The time to end has come.
    Cut,
    /// The home belongs to another process.
    Lost,
}

/// Content of a record, and what is done once the ledger has it.
struct ShippedBatch {
    redo: Redo,
    /// Entries of `changed` that are in it.
    noted: Vec<ChangedEntry>,
    /// Progress with the oldest keys, if it repeats some.
    cursor: Option<RepeatCursor>,
    cleaned: Cleaned,
    has_ended_round: bool,
}

impl ShipperWorker {
    fn run(mut self) {
        gateway_core::give_way();
        let mut next = now() + self.ledger.interval;
        loop {
            let end = self.shared.wait_until(next);
            self.lap = LapState { begun: now(), paced: Duration::ZERO };
            match self.lap() {
                Ok(LapEnd::Whole) => self.shared.state.lock().lapped = self.lap.begun,
                Ok(LapEnd::Cut) => {}
                Ok(LapEnd::Lost) => break,
                Err(error) => {
                    gateway_core::warn_limited!(%error, "latest values cannot be read for the ledger, it is tried again");
                }
            }
            if end.is_some() {
                break;
            }
            next = self.lap.begun + self.ledger.interval;
        }
        let Self { shared, environment, .. } = self;
        // So that the directory is free once it is known to have ended.
        drop(environment);
        shared.state.lock().has_ended = true;
        shared.changed.notify_all();
    }

    fn lap(&mut self) -> Result<LapEnd, StoreError> {
        if !self.note_all()? {
            return Ok(LapEnd::Cut);
        }
        let mut after: Option<Vec<u8>> = None;
        let mut has_changes = true;
        loop {
            let alive = self.alive()?;
            let wants_repeats = self.ledger.shipping.wanted_repeats(alive) > 0;
            if !has_changes && !wants_repeats {
                return Ok(LapEnd::Whole);
            }
            let waited = now();
            let end = self.shared.wait_until(self.due);
            self.lap.paced += waited.elapsed();
            if end.is_some_and(|end| now() >= end) {
                return Ok(LapEnd::Cut);
            }
            let batch = self.collect(after.as_deref(), wants_repeats.then_some(alive))?;
            has_changes = !batch.noted.is_empty();
            if has_changes {
                after = batch.noted.last().map(|(key, _)| key.clone());
            }
            let bytes = batch.redo.bytes().len();
            self.due = self.due.max(now()) + self.time_for(bytes);
            let has_ended_round = batch.has_ended_round;
            if bytes > 0 && !self.ship(batch)? {
                return Ok(LapEnd::Lost);
            }
            if !has_changes && (has_ended_round || bytes == 0) {
                return Ok(LapEnd::Whole);
            }
        }
    }

    fn time_for(&self, bytes: usize) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.ledger.bytes.max(1) as f64)
    }

    fn alive(&self) -> Result<u64, StoreError> {
        self.environment.filled().map_err(|error| self.environment.failed(&error))
    }

    /// Changes behind a key, as they are now, and the oldest keys as they are, if so many bytes that are alive are to be repeated.
    fn collect(&self, after: Option<&[u8]>, repeats: Option<u64>) -> Result<ShippedBatch, StoreError> {
        let LatestTables { latest, newest, .. } = self.tables;
        self.environment.reading(|txn| {
            let mut redo = Redo::default();
            let mut noted = Vec::new();
            let most = if repeats.is_some() { RECORD / 2 } else { RECORD };
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            for entry in self.changed.range(txn, &(from, Bound::<&[u8]>::Unbounded))? {
                let (key, entry) = entry?;
                redo.note(latest, key, latest.get(txn, key)?);
                if let Some(key) = changed::newest(entry) {
                    redo.note(newest, key, newest.get(txn, key)?);
                }
                noted.push((key.to_vec(), entry.to_vec()));
                if redo.bytes().len() >= most {
                    break;
                }
            }
            let (mut cursor, mut cleaned, mut has_ended_round) = (None, Cleaned::default(), false);
            if let Some(alive) = repeats {
                let bytes = redo.bytes().len().max(RECORD / 2);
                let cursor = cursor.insert(self.cursor.clone());
                (cleaned, has_ended_round) =
                    cursor.go_on(txn, &[latest, newest], bytes, alive, |table, key, value| {
                        redo.note(table, key, Some(value));
                    })?;
            }
            Ok(ShippedBatch { redo, noted, cursor, cleaned, has_ended_round })
        })
    }

    /// Ships a record, and takes out what has not changed since it was collected. False if the home is another's.
    fn ship(&mut self, batch: ShippedBatch) -> Result<bool, StoreError> {
        let ShippedBatch { redo, noted, cursor, cleaned, .. } = batch;
        let position = match self.ledger.shipping.ship(redo.bytes(), cleaned) {
            Shipped::Done(position) => Some(position),
            Shipped::Refused => None,
            Shipped::Lost => return Ok(false),
        };
        if position.is_some() {
            // The ledger's side knows of the marks, whatever becomes of the rest.
            self.cursor = cursor.unwrap_or_else(|| std::mem::take(&mut self.cursor));
            self.cursor.shipped(redo.bytes().len(), 0);
        }
        let taken_out = self.environment.writing(|txn| {
            for (key, entry) in &noted {
                if self.changed.get(txn, key)?.is_some_and(|now| now == &entry[..]) {
                    self.changed.delete(txn, key)?;
                }
            }
            position.map_or(Ok(()), |position| self.environment.note_position(txn, position))
        });
        // A key that the ledger has, and that is not taken out, goes once more.
        taken_out.map_err(|error| self.environment.failed(&error))?;
        let values = noted.len() as u64;
        if position.is_none() {
            count(|c| c.ledger_latest_dropped_size.add(values));
            return Ok(true);
        }
        let took = self.lap.begun.elapsed();
        let is_late = took > self.ledger.interval;
        let is_paced = self.lap.paced > took / 2;
        count(|c| {
            c.ledger_latest_shipped.add(values);
            c.ledger_latest_bytes.add(redo.bytes().len() as u64);
            match is_late {
                true if is_paced => c.ledger_latest_put_off_bytes.add(values),
                true => c.ledger_latest_put_off_ledger.add(values),
                false => {}
            }
        });
        Ok(true)
    }

    /// Notes every value as changed if the ledger has none of them: the home is of an earlier version, or its store was not
    /// shipped. False if the time to end has come.
    fn note_all(&self) -> Result<bool, StoreError> {
        if self.environment.position()?.is_some() {
            return Ok(true);
        }
        let mut after: Option<Vec<u8>> = None;
        loop {
            let values = self.environment.reading(|txn| self.values(txn, after.as_deref()))?;
            let Some((last, _)) = values.last() else { return Ok(true) };
            let noted = self.environment.writing(|txn| {
                for (key, entry) in &values {
                    if self.changed.get(txn, key)?.is_none() {
                        self.changed.put(txn, key, entry)?;
                    }
                }
                Ok(())
            });
            noted.map_err(|error| self.environment.failed(&error))?;
            after = Some(last.clone());
            if self.shared.state.lock().end.is_some_and(|end| now() >= end) {
                return Ok(false);
            }
        }
    }

    /// Keys of values behind a key, each with an entry for `changed`.
    fn values(&self, txn: &RoTxn<'_>, after: Option<&[u8]>) -> Result<Vec<ChangedEntry>, heed::Error> {
        let LatestTables { latest, newest, .. } = self.tables;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut values = Vec::new();
        for entry in latest.range(txn, &(from, Bound::<&[u8]>::Unbounded))?.take(NOTED) {
            let (key, value) = entry?;
            let head = record::decode_head(value);
            let place = match head {
                Some(head) => {
                    read::locate(newest, txn, head.topic.as_bytes(), |found| found.topic == head.topic)?
                }
                // Sent as it is.
                None => None,
            };
            let version = head.map_or(0, |head| head.version);
            values.push((key.to_vec(), changed::entry(version, place.as_ref().map(|place| &place.key[..]))));
        }
        Ok(values)
    }
}

#[expect(clippy::disallowed_methods, reason = "the thread waits for deadlines and measures its laps")]
fn now() -> Instant {
    Instant::now()
}
