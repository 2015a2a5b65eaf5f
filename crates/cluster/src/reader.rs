//! Rows of a stream as records, in order.

use std::{collections::VecDeque, sync::atomic::AtomicU64};

use bytes::Bytes;
use ledger::{Assembly, Ledger, Misread, Position, RecordHead, Row, Segment, Stream, assemble};

use crate::{Clock, calls::until_answered};

/// Bytes that are read at a time.
const PAGE: usize = 4 << 20;

/// A record that must not be passed over: a takeover stops at it. An operator who accepts its loss says so with
/// [`crate::View::accept_loss`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("home {home}, stream {stream}: record {n} of epoch {epoch} {damage}")]
pub struct DamagedRecord {
    /// Its home.
    pub home: u16,
    /// Its stream.
    pub stream: u8,
    /// Its epoch.
    pub epoch: u64,
    /// Its number.
    pub n: u64,
    /// The damage.
    pub damage: Damage,
}

/// Damage of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Rows are there, and are not what was written.
    #[error(transparent)]
    Misread(Misread),
    /// The record is sealed, or a stream begins with it, and it is not there.
    #[error("is sealed and not there")]
    Missing,
}

/// A whole record.
#[derive(Debug)]
pub(crate) struct WholeRecord {
    pub(crate) head: RecordHead,
    pub(crate) position: Position,
    pub(crate) changes: Bytes,
    pub(crate) rows: Vec<Row>,
}

impl WholeRecord {
    pub(crate) fn segment(&self) -> u32 {
        self.rows.first().map_or(0, |row| row.segment.number)
    }

    pub(crate) fn damaged(&self, misread: Misread) -> DamagedRecord {
        damaged(self.head.stream, self.head.epoch, self.head.n, Damage::Misread(misread))
    }
}

pub(crate) fn damaged(stream: Stream, epoch: u64, n: u64, damage: Damage) -> DamagedRecord {
    DamagedRecord { home: stream.home, stream: stream.number, epoch, n, damage }
}

/// Reads the records of a stream in an epoch from one on, up to the first gap.
pub(crate) struct LedgerReader<'a> {
    ledger: &'a dyn Ledger,
    clock: &'a dyn Clock,
    repeats: AtomicU64,
    segment: Segment,
    /// Number of the record that comes next.
    n: u64,
    rows: VecDeque<Row>,
    more: bool,
    /// The segment before this one has no further record either.
    moved_on: bool,
    /// The gap is a record of which some parts are there.
    pub(crate) parts_only: bool,
}

impl<'a> LedgerReader<'a> {
    /// Begins with record `n`, which is in `segment` or begins the one behind it.
    pub(crate) fn new(ledger: &'a dyn Ledger, clock: &'a dyn Clock, segment: Segment, n: u64) -> Self {
        Self {
            ledger,
            clock,
            repeats: AtomicU64::new(0),
            segment,
            n,
            rows: VecDeque::new(),
            more: true,
            moved_on: false,
            parts_only: false,
        }
    }

    /// The next record; `None` at the first gap, which may have closed when another reader comes.
    ///
    /// # Errors
    /// A record is there and is misread.
    pub(crate) async fn next(&mut self) -> Result<Option<WholeRecord>, DamagedRecord> {
        loop {
            let parts = self.rows.iter().take_while(|row| row.n == self.n).count();
            if parts == self.rows.len() && self.more {
                self.load().await;
                continue;
            }
            if parts > 0 {
                let rows = self.rows.drain(..parts).collect();
                return self.assemble(rows);
            }
            let is_gap = !self.rows.is_empty();
            if is_gap || self.moved_on {
                return Ok(None);
            }
            self.segment.number = self.segment.number.saturating_add(1);
            (self.moved_on, self.more) = (true, true);
        }
    }

    async fn load(&mut self) {
        let from = self.rows.back().map_or((self.n, 0), |row| (row.n, row.part.saturating_add(1)));
        let (ledger, segment) = (self.ledger, self.segment);
        let (_, page) = until_answered(self.clock, &self.repeats, || ledger.read(segment, from, PAGE)).await;
        self.more = page.more;
        self.rows.extend(page.rows);
    }

    fn assemble(&mut self, rows: Vec<Row>) -> Result<Option<WholeRecord>, DamagedRecord> {
        match assemble(self.segment, self.n, &rows) {
            Ok(Assembly::Whole(head, position, changes)) => {
                (self.n, self.moved_on) = (self.n + 1, false);
                Ok(Some(WholeRecord { head, position, changes, rows }))
            }
            Ok(Assembly::Incomplete) => {
                self.parts_only = true;
                Ok(None)
            }
            Err(misread) => {
                let (stream, epoch) = (self.segment.stream, self.segment.epoch);
                Err(damaged(stream, epoch, self.n, Damage::Misread(misread)))
            }
        }
    }
}

/// The segment of a record: the last from `first` on that begins with it or with an earlier one; up to `last`, if that is known. `None`
/// if `first` does not begin so.
pub(crate) async fn locate(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    first: Segment,
    last: Option<u32>,
    n: u64,
) -> Option<u32> {
    let repeats = AtomicU64::new(0);
    let begins_before = async |number: u32| {
        let segment = Segment { number, ..first };
        let (_, page) = until_answered(clock, &repeats, || ledger.read(segment, (0, 0), 1)).await;
        page.rows.first().is_some_and(|row| row.n <= n)
    };
    if !begins_before(first.number).await {
        return None;
    }
    let mut low = first.number;
    let mut high = match last {
        Some(last) => last.saturating_add(1),
        None => {
            let mut step = 1;
            while begins_before(low.saturating_add(step)).await {
                low = low.saturating_add(step);
                step = step.saturating_mul(2);
            }
            low.saturating_add(step)
        }
    };
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if begins_before(middle).await {
            low = middle;
        } else {
            high = middle;
        }
    }
    Some(low)
}
