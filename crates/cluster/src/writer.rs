//! A stream's appends.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use ledger::{
    Cleaned, Inserted, MAX_PARTS, MAX_ROW, Position, RecordHead, Row, Segment, Stream, cut_small, encode,
};

use crate::{
    Sealed, Start,
    calls::{First, first, until_answered},
    tenure::Core,
};

/// Bytes of a segment, unless one record has more: it is deleted as a whole.
pub const SEGMENT: usize = 16 << 20;

/// Outcome of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appended {
    /// Step (4) is reached: the record is durable, and nobody else owned the home when it became so. It is committed locally at this
    /// position, and acknowledged.
    Done(Position),
    /// The home is lost to this process. The record may be in the ledger or not, so it is neither acknowledged nor refused.
    Lost,
    /// The changes have more bytes than a record can have: 1 GiB. Nothing was written.
    TooLarge,
}

/// Sizes of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Most bytes of a row.
    pub row: usize,
    /// Bytes of a segment.
    pub segment: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { row: MAX_ROW, segment: SEGMENT }
    }
}

/// Writes a stream's records, one at a time.
pub struct StreamWriter {
    core: Arc<Core>,
    stream: Stream,
    /// The last record of this epoch.
    last: Option<Sealed>,
    /// Checksum of the last record, this epoch's or that from which it goes on.
    sum: u32,
    segment: u32,
    segment_bytes: usize,
    /// An append was dropped before it was answered: its number is taken, and nobody knows by what.
    is_dangling: bool,
    /// Records with marks that are not passed, and the bytes in the ledger before each.
    marks: VecDeque<(Start, u64)>,
    /// Segment of the start that was last published in this epoch.
    published: Option<u32>,
    pace: Pace,
    /// Steps of the append under way, for the tests.
    #[cfg(test)]
    pub(crate) probe: Arc<parking_lot::Mutex<Probe>>,
}

/// Steps of an append, as a test sees them.
#[cfg(test)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Probe {
    /// Its position, from the beginning of step (2) on.
    pub(crate) position: Option<Position>,
    /// Step (2) is done.
    pub(crate) is_inserted: bool,
}

/// Ends the tenure unless the append came to its end.
struct Guard<'a>(Option<&'a Core>);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(core) = self.0 {
            core.lose();
        }
    }
}

impl StreamWriter {
    pub(crate) fn new(core: Arc<Core>, number: u8, sum: u32) -> Self {
        Self {
            stream: Stream { home: core.owner.home, number },
            core,
            last: None,
            sum,
            segment: 0,
            segment_bytes: 0,
            is_dangling: false,
            marks: VecDeque::new(),
            published: None,
            pace: Pace::default(),
            #[cfg(test)]
            probe: Arc::default(),
        }
    }

    /// The stream's number.
    pub fn stream(&self) -> u8 {
        self.stream.number
    }

    /// Sets the sizes, for tests.
    pub fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
    }

    /// Bytes of this stream in the ledger since the place with which it may begin, about: more than they are after a takeover, until
    /// a mark is passed.
    pub fn ledger_bytes(&self) -> u64 {
        self.core.streams[usize::from(self.stream.number)].ledger_bytes()
    }

    /// Tells whether so many epochs are in the home's chain that a round of cleaning begins at once.
    pub fn has_long_chain(&self) -> bool {
        self.core.has_long_chain()
    }

    /// The last record of this epoch, if there is one; nothing if it is not known.
    #[expect(clippy::option_option, reason = "unknown, and known to be none")]
    pub(crate) fn last(&self) -> Option<Option<Sealed>> {
        (!self.is_dangling).then_some(self.last)
    }

    /// Steps (2) to (4): appends a record of a transaction's changes, which are applied in its environment and not committed. Waits for as
    /// long as the ledger does not answer: "unknown" is no error. [`crate::Tenure::run`] must be polled meanwhile. A stream that the view
    /// lacks waits for [`crate::Tenure::widen`] first: what a taker does not read must not be acknowledged.
    ///
    /// Changes that depend on another stream's record are appended after that stream's append is done.
    ///
    /// Cancel safety: an append that is dropped before its end ends the tenure.
    pub async fn append(&mut self, changes: &[u8]) -> Appended {
        let core = Arc::clone(&self.core);
        if core.is_lost() || self.is_dangling {
            return Appended::Lost;
        }
        if changes.len() > (usize::from(MAX_PARTS) - 1) * MAX_ROW {
            return Appended::TooLarge;
        }
        if let First::One(()) = first(core.lost(), core.has_stream(self.stream.number)).await {
            return Appended::Lost;
        }
        let n = self.last.map_or(0, |last| last.n + 1);
        let epoch = core.owner.epoch;
        let head =
            RecordHead { stream: self.stream, epoch, n, time: core.clock.wall(), predecessor: self.sum };
        let (record, position) = encode(&head, changes);
        if self.segment_bytes > 0 && self.segment_bytes + record.len() > self.pace.segment {
            (self.segment, self.segment_bytes) = (self.segment + 1, 0);
        }
        let segment = Segment { stream: self.stream, epoch, number: self.segment };
        let Some(rows) = cut_small(&record, segment, n, self.pace.row) else { return Appended::TooLarge };

        #[cfg(test)]
        {
            *self.probe.lock() = Probe { position: Some(position), is_inserted: false };
        }
        // From here on the number is taken, whatever becomes of it.
        self.is_dangling = true;
        let state = &core.streams[usize::from(self.stream.number)];
        state.begun.store(u64::try_from(core.clock.now().as_micros()).unwrap_or(u64::MAX - 1) + 1, Relaxed);
        let mut guard = Guard(Some(&core));
        let ended = first(core.lost(), self.store(&core, rows)).await;
        guard.0 = None;
        state.begun.store(0, Relaxed);
        if let First::One(()) = ended {
            return Appended::Lost;
        }

        // (4)
        self.is_dangling = false;
        state.written.fetch_add(record.len() as u64, Relaxed);
        state.records.fetch_add(1, Relaxed);
        state.bytes.fetch_add(changes.len() as u64, Relaxed);
        self.segment_bytes += record.len();
        self.sum = position.sum;
        self.last = Some(Sealed { n, segment: self.segment });
        Appended::Done(position)
    }

    /// Steps (2) and (3). Ends when the record counts; does not end if the home is lost.
    async fn store(&self, core: &Core, rows: Arc<[Row]>) {
        if weakened!(ValidationBefore) {
            core.validated().await;
        }
        // (2) All rows at a quorum, repeated unchanged until answered.
        let insert = || core.ledger.insert(&core.owner, Arc::clone(&rows));
        let (begun, inserted) = if weakened!(UnknownIsStored) {
            let answer = first(insert(), core.clock.sleep(Duration::from_millis(200))).await;
            let inserted = if let First::One(Ok(inserted)) = answer { inserted } else { Inserted::Stored };
            (core.clock.now(), inserted)
        } else {
            until_answered(&*core.clock, &core.repeats, insert).await
        };
        #[cfg(test)]
        {
            self.probe.lock().is_inserted = true;
        }
        match inserted {
            Inserted::Owned => core.owned(begun),
            Inserted::Fenced => {
                core.lose();
                std::future::pending().await
            }
            Inserted::Stored if weakened!(NoValidation | ValidationBefore) => {}
            // (3) A read of the owners that begins now.
            Inserted::Stored => core.validated().await,
        }
    }

    /// Appends a record that begins with puts of the oldest keys, as they are in the environment before the transaction. Once the record
    /// passes a mark, the stream may begin with the record of that mark. [`crate::Tenure::run`] publishes that where it frees a segment, or
    /// an epoch, and deletes what lies before.
    ///
    /// Cancel safety: as for [`Self::append`].
    pub async fn append_cleaned(&mut self, changes: &[u8], cleaned: Cleaned) -> Appended {
        let core = Arc::clone(&self.core);
        let state = &core.streams[usize::from(self.stream.number)];
        let before = state.written.load(Relaxed);
        let appended = self.append(changes).await;
        let Appended::Done(Position { epoch, n, .. }) = appended else { return appended };
        let here = Start { epoch, n, segment: self.segment };
        if cleaned.marks {
            self.marks.push_back((here, before));
        }
        let passed = self.marks.drain(..cleaned.passed.min(self.marks.len())).next_back();
        let Some((mut start, before)) = passed else { return appended };
        state.dropped.fetch_max(before, Relaxed);
        if weakened!(PublishEnd) {
            start = here;
        }
        if self.published.is_none_or(|published| start.segment > published) {
            self.published = Some(start.segment);
            core.to_publish(self.stream.number, start, before);
        }
        appended
    }
}
