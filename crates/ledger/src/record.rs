//! The format of a record: a head, and what its transaction changed.
//!
//! ```text
//! 0   format       u8
//! 1   stream       u8, home u16      against rows of another stream
//! 4   epoch        u64
//! 12  n            u64
//! 20  time         u64               of its writer, microseconds since 1970
//! 28  predecessor  u32               checksum of the record before in this epoch, or of where the epoch goes on from
//! 32  length       u32               of what follows
//! 36  sum          u32               CRC-32 of all other bytes
//! 40  changes
//! ```
//!
//! Numbers are little-endian. All of it is cut into rows of at most [`MAX_ROW`] bytes.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::{Row, Segment, Stream};

/// Format that this version writes, the newest that it reads.
pub const FORMAT: u8 = 1;

/// Most bytes of a row.
pub const MAX_ROW: usize = 128 << 10;

/// Most rows of a record: 1 GiB.
pub const MAX_PARTS: u16 = 8192;

/// Bytes of changes after which a store ends its transaction, at the next place between two units: a record has about as many, and
/// those of one unit.
pub const RECORD_BYTES: usize = 1 << 20;

const HEAD: usize = 40;
const SUM: std::ops::Range<usize> = 36..HEAD;

/// Place of a record that a directory has applied last: what comes next is behind it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    /// Epoch of the record.
    pub epoch: u64,
    /// Its number.
    pub n: u64,
    /// Its checksum.
    pub sum: u32,
}

impl Position {
    /// The bytes of no position.
    pub const NONE: [u8; 20] = [0; 20];

    /// The position in its bytes; `None` if they are [`Self::NONE`], or of another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 20] = bytes.try_into().ok()?;
        if bytes == Self::NONE {
            return None;
        }
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let sum = u32::from_le_bytes(std::array::from_fn(|i| bytes[16 + i]));
        Some(Self { epoch: u64_at(0), n: u64_at(8), sum })
    }

    /// Its bytes, as they are kept beside what was applied.
    pub fn to_bytes(self) -> [u8; 20] {
        let mut bytes = Self::NONE;
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.n.to_le_bytes());
        bytes[16..].copy_from_slice(&self.sum.to_le_bytes());
        bytes
    }
}

/// Head of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHead {
    /// Its stream.
    pub stream: Stream,
    /// Its epoch.
    pub epoch: u64,
    /// Its number.
    pub n: u64,
    /// Time of its writer, in microseconds since 1970.
    pub time: u64,
    /// Checksum of the record before it.
    pub predecessor: u32,
}

/// A record that is there and is not what was written: never the end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misread {
    /// Its bytes were changed, or are another's.
    #[error("is damaged")]
    Damaged,
    /// The record belongs to another place.
    #[error("belongs to another place of the ledger")]
    Foreign,
    /// A newer version has written it.
    #[error("has format {0}, which a newer version has written; this version reads up to {FORMAT}")]
    Newer(u8),
    /// The record does not follow the one before it.
    #[error("does not follow the record before it")]
    Unconnected,
}

/// A record, and its position.
pub fn encode(head: &RecordHead, changes: &[u8]) -> (Bytes, Position) {
    let mut out = BytesMut::with_capacity(HEAD + changes.len());
    out.extend_from_slice(&[FORMAT, head.stream.number]);
    out.extend_from_slice(&head.stream.home.to_le_bytes());
    for number in [head.epoch, head.n, head.time] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(&head.predecessor.to_le_bytes());
    let length = u32::try_from(changes.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(changes);
    let sum = sum(&out);
    out[SUM].copy_from_slice(&sum.to_le_bytes());
    (out.freeze(), Position { epoch: head.epoch, n: head.n, sum })
}

fn sum(record: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&record[..SUM.start]);
    hasher.update(&record[SUM.end..]);
    hasher.finalize()
}

/// Head, position and changes of a record. Its stream, epoch and number are compared with the place where it was found by
/// [`assemble`].
///
/// # Errors
/// [`Misread`], but never `Unconnected`.
pub fn decode(record: &Bytes) -> Result<(RecordHead, Position, Bytes), Misread> {
    let head = record.get(..HEAD).ok_or(Misread::Damaged)?;
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    if u32_at(SUM.start) != sum(record) {
        return Err(Misread::Damaged);
    }
    match head[0] {
        0 => return Err(Misread::Damaged),
        FORMAT => {}
        newer => return Err(Misread::Newer(newer)),
    }
    if u32_at(32) as usize != record.len() - HEAD {
        return Err(Misread::Damaged);
    }
    let stream = Stream { home: u16::from_le_bytes([head[2], head[3]]), number: head[1] };
    let found =
        RecordHead { stream, epoch: u64_at(4), n: u64_at(12), time: u64_at(20), predecessor: u32_at(28) };
    let position = Position { epoch: found.epoch, n: found.n, sum: u32_at(SUM.start) };
    Ok((found, position, record.slice(HEAD..)))
}

/// Cuts a record into rows. `None` if it is too large for any number of rows.
pub fn cut(record: &Bytes, segment: Segment, n: u64) -> Option<Arc<[Row]>> {
    cut_small(record, segment, n, MAX_ROW)
}

/// Cuts a record into rows of at most `size` bytes, for tests: a record of few bytes has many rows.
pub fn cut_small(record: &Bytes, segment: Segment, n: u64, size: usize) -> Option<Arc<[Row]>> {
    let size = size.clamp(1, MAX_ROW);
    let parts = u16::try_from(record.len().div_ceil(size)).ok().filter(|parts| *parts <= MAX_PARTS)?;
    let row = |part: u16| {
        let begin = usize::from(part) * size;
        let data = record.slice(begin..record.len().min(begin + size));
        Row { segment, n, part, parts, data }
    };
    Some((0..parts).map(row).collect())
}

/// Outcome of putting the rows of a number together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Assembly {
    /// Not all parts are there: the record was never acknowledged, and its stream ends before it, unless it is known to be sealed.
    Incomplete,
    /// The record, its position and its changes.
    Whole(RecordHead, Position, Bytes),
}

/// Puts the rows of one number together. They are in order of their parts, all of segment `segment` and number `n`.
///
/// # Errors
/// [`Misread`]: rows are there that nobody wrote so.
pub fn assemble(segment: Segment, n: u64, rows: &[Row]) -> Result<Assembly, Misread> {
    let Some(first) = rows.first() else { return Ok(Assembly::Incomplete) };
    let parts = first.parts;
    let mut record = BytesMut::new();
    for (index, row) in rows.iter().enumerate() {
        let is_there = row.segment == segment && row.n == n;
        if !is_there || row.parts != parts || row.part >= parts || row.data.len() > MAX_ROW {
            return Err(Misread::Damaged);
        }
        if usize::from(row.part) != index {
            // A part before it is missing; one that is there twice was never written so.
            return if usize::from(row.part) > index {
                Ok(Assembly::Incomplete)
            } else {
                Err(Misread::Damaged)
            };
        }
        record.extend_from_slice(&row.data);
    }
    if rows.len() != usize::from(parts) {
        return Ok(Assembly::Incomplete);
    }
    let (head, position, changes) = decode(&record.freeze())?;
    if head.stream != segment.stream || head.epoch != segment.epoch || head.n != n {
        return Err(Misread::Foreign);
    }
    Ok(Assembly::Whole(head, position, changes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segment() -> Segment {
        Segment { stream: Stream { home: 0x1234, number: 3 }, epoch: 1 << 40, number: 9 }
    }

    fn head(n: u64, time: u64, predecessor: u32) -> RecordHead {
        RecordHead { stream: segment().stream, epoch: segment().epoch, n, time, predecessor }
    }

    /// The failure: a version reads what another has written as something else.
    #[test]
    fn the_format_is_this() {
        let (record, position) = encode(&head(0x0102_0304_0506_0708, 5, 0xAABB_CCDD), b"abc");
        assert_eq!(record[..4], [1, 3, 0x34, 0x12]);
        assert_eq!(record[4..12], (1_u64 << 40).to_le_bytes());
        assert_eq!(record[12..20], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(record[20..28], 5_u64.to_le_bytes());
        assert_eq!(record[28..32], [0xDD, 0xCC, 0xBB, 0xAA]);
        assert_eq!(record[32..36], 3_u32.to_le_bytes());
        assert_eq!(record[36..40], position.sum.to_le_bytes());
        assert_eq!(&record[40..], b"abc");
        assert_eq!(position.sum, 0xD4F8_8F53);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let (record, _) = encode(&head(7, 8, 9), b"what a transaction changed");
        for bit in 0..record.len() * 8 {
            let mut flipped = BytesMut::from(&record[..]);
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&flipped.freeze()), Err(Misread::Damaged), "bit {bit}");
        }
        for length in 0..record.len() {
            assert_eq!(decode(&record.slice(..length)), Err(Misread::Damaged), "{length} bytes");
        }
    }

    #[test]
    fn a_part_that_is_there_twice_is_damage() {
        let (record, _) = encode(&head(7, 8, 9), &[0; 2 * MAX_ROW]);
        let rows = cut(&record, segment(), 7).unwrap();
        let twice: Vec<Row> = [0, 1, 1, 2].map(|index: usize| rows[index].clone()).to_vec();
        assert_eq!(assemble(segment(), 7, &twice), Err(Misread::Damaged));
    }

    proptest! {
        #[test]
        fn a_record_comes_back(
            changes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..300),
                (MAX_ROW - 50..3 * MAX_ROW).prop_map(|length| vec![7; length]),
            ],
            n: u64, time: u64, predecessor: u32,
            at: prop::sample::Index, by in 1_u8..,
        ) {
            let head = head(n, time, predecessor);
            let (record, position) = encode(&head, &changes);
            let rows = cut(&record, segment(), n).unwrap();
            prop_assert!(rows.iter().all(|row| row.data.len() <= MAX_ROW && usize::from(row.parts) == rows.len()));
            let whole = Assembly::Whole(head, position, Bytes::from(changes));
            prop_assert_eq!(assemble(segment(), n, &rows), Ok(whole));

            let at = at.index(record.len());
            let mut flipped = rows.to_vec();
            let mut data = BytesMut::from(&flipped[at / MAX_ROW].data[..]);
            data[at % MAX_ROW] ^= by;
            flipped[at / MAX_ROW].data = data.freeze();
            prop_assert_eq!(assemble(segment(), n, &flipped), Err(Misread::Damaged));
        }
    }
}
