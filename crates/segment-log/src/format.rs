//! The bytes of a segment. Knows no file.
//!
//! ```text
//! segment   header frames footer?
//! header    magic version length sum | log base time, end of each partition, counts of each group | sum
//! frame     sum length body; the sum also knows the offset, so that a frame at another place is no frame
//! body      0 partition cost groups message    a record
//!           1 mark offset                      a batch, in front of its records
//! footer    256 x (count, place, sum of places) | places of records, by partition | holes | trailer
//! ```
//!
//! An offset is a distance in bytes from the beginning of the whole log, without headers and footers. A batch is written
//! only when all before it is synced: so one that is there proves what is before it, and only the last may be torn.
//!
//! Decoding returns a value or `None` for any bytes. Numbers are little-endian.

use std::sync::Arc;

use gateway_core::{GroupId, LogRecord, PARTITIONS, Partition, SharedMessage, Timestamp};

use store::encoding::{
    fields::{self, Input},
    message,
};

/// The format of segments and of the folder.
pub(super) const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"gw-log\r\n";
const TRAILER_MAGIC: [u8; 8] = *b"gw-end\r\n";
/// Found in the middle of damage, it shows where to go on.
pub(super) const MARK: [u8; 8] = [0xF7, b'b', b'a', b't', b'c', b'h', 0x00, 0xE3];

/// Bytes of a header that tell its version, and how long it is.
pub(super) const PREFIX: usize = 20;
/// Bytes in front of a frame's body.
pub(super) const FRAME: usize = 8;
/// Bytes of a batch's frame.
pub(super) const BATCH: usize = FRAME + 1 + MARK.len() + 8;
/// Bytes of an entry in a footer's directory.
pub(super) const ENTRY: usize = 12;
/// Bytes of the directory.
pub(super) const DIRECTORY: usize = ENTRY * PARTITIONS;
/// Bytes at the end of a sealed segment.
pub(super) const TRAILER: usize = 8 + 8 + 8 + 8 + 4 + 4 + 4;

const RECORD_TAG: u8 = 0;
const BATCH_TAG: u8 = 1;

/// More groups in a header than any log has.
const MAX_GROUPS: u32 = 10_000_000;

/// Messages and bytes that a group has got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct GroupCount {
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

/// State of the log when a segment began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    /// The id of the log.
    pub(super) log: u64,
    /// The offset of the first frame.
    pub(super) base: u64,
    /// Time at which the first record was received, or a record before it that was received later.
    pub(super) time: Timestamp,
    /// One more than the offset of the last record of each partition; 0 if there never was one.
    pub(super) ends: Box<[u64]>,
    /// By group, in order.
    pub(super) counts: Box<[(GroupId, GroupCount)]>,
}

/// Contents of the first bytes of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    /// The header has this many bytes.
    Length(usize),
    /// Another version has written it.
    Newer(u32),
    /// The bytes are no header.
    Damaged,
}

pub(super) fn prefix(bytes: &[u8]) -> Prefix {
    let read = || {
        let mut input = Input(bytes.get(..PREFIX)?);
        let magic = input.take(MAGIC.len())? == MAGIC;
        let (version, length, sum) = (input.u32()?, input.u32()?, input.u32()?);
        (magic && sum == crc32fast::hash(&bytes[..PREFIX - 4])).then_some((version, length as usize))
    };
    match read() {
        None => Prefix::Damaged,
        Some((version, _)) if version > VERSION => Prefix::Newer(version),
        Some((_, length)) => Prefix::Length(length),
    }
}

impl SegmentHeader {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(PREFIX + 28 + 8 * PARTITIONS + 20 * self.counts.len() + 4);
        out.extend_from_slice(&[0; PREFIX]);
        for number in [self.log, self.base, self.time.0] {
            put_u64(&mut out, number);
        }
        self.ends.iter().for_each(|&end| put_u64(&mut out, end));
        put_u32(&mut out, self.counts.len() as u32);
        for (group, count) in &self.counts {
            put_u32(&mut out, group.0);
            put_u64(&mut out, count.messages);
            put_u64(&mut out, count.bytes);
        }
        let sum = crc32fast::hash(&out[PREFIX..]);
        put_u32(&mut out, sum);
        let length = out.len() as u32;
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&length.to_le_bytes());
        let sum = crc32fast::hash(&out[..PREFIX - 4]);
        out[16..PREFIX].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// From all bytes of a header.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        if prefix(bytes) != Prefix::Length(bytes.len()) {
            return None;
        }
        let (body, sum) = bytes.get(PREFIX..)?.split_last_chunk::<4>()?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let mut input = Input(body);
        let (log, base, time) = (input.u64()?, input.u64()?, Timestamp(input.u64()?));
        let ends = (0..PARTITIONS).map(|_| input.u64()).collect::<Option<_>>()?;
        let groups = input.u32().filter(|&groups| groups <= MAX_GROUPS)?;
        let mut counts = Vec::new();
        for _ in 0..groups {
            let group = GroupId(input.u32()?);
            counts.push((group, GroupCount { messages: input.u64()?, bytes: input.u64()? }));
        }
        let sound = input.0.is_empty() && counts.is_sorted_by(|(a, _), (b, _)| a < b);
        sound.then(|| Self { log, base, time, ends, counts: counts.into() })
    }
}

/// A frame that is sound.
#[derive(Debug, Clone, Copy)]
pub(super) enum LogFrame<'a> {
    Record(RawRecord<'a>),
    /// Records follow, up to the next.
    Batch,
}

/// A record whose message is not decoded yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawRecord<'a> {
    pub(super) partition: Partition,
    /// Bytes that the message counts for.
    pub(super) cost: u32,
    groups: &'a [u8],
    count: u32,
    message: &'a [u8],
}

/// The length of the frame that begins here, as it says itself.
pub(super) fn frame_length(bytes: &[u8]) -> Option<usize> {
    let length = Input(bytes.get(4..)?).u32()?;
    FRAME.checked_add(length as usize)
}

/// The frame at the beginning of `bytes`, and how long it is; `None` if it is not sound or not whole.
pub(super) fn frame(bytes: &[u8], offset: u64) -> Option<(LogFrame<'_>, usize)> {
    let length = frame_length(bytes)?;
    let frame = bytes.get(..length)?;
    if Input(frame).u32()? != sum(&frame[4..], offset) {
        return None;
    }
    let mut input = Input(&frame[FRAME..]);
    let frame = match input.u8()? {
        RECORD_TAG => LogFrame::Record(RawRecord::begin(&mut input)?),
        BATCH_TAG => {
            let mark = input.take(MARK.len())? == MARK && input.u64()? == offset;
            mark.then_some(LogFrame::Batch)?
        }
        _ => return None,
    };
    Some((frame, length))
}

impl<'a> RawRecord<'a> {
    fn begin(input: &mut Input<'a>) -> Option<Self> {
        let partition = Partition(input.u8()?);
        let cost = input.varint()?;
        let count = input.varint()?;
        let groups = input.0;
        for _ in 0..count {
            input.varint()?;
        }
        Some(Self { partition, cost, groups, count, message: input.0 })
    }

    /// The groups, in order.
    pub(super) fn groups(self) -> impl Iterator<Item = GroupId> + 'a {
        let mut input = Input(self.groups);
        let mut group = 0_u32;
        (0..self.count).map_while(move |_| {
            group = group.wrapping_add(input.varint()?);
            Some(GroupId(group))
        })
    }

    /// Returns the time at which the message was received.
    pub(super) fn received(self) -> Option<Timestamp> {
        message::decode_received(&mut Input(self.message))
    }

    /// As the log gives it. `known` are the groups of the record before: mostly they are the same.
    pub(super) fn decode(self, offset: u64, known: &mut Arc<[GroupId]>) -> Option<LogRecord> {
        if known.len() != self.count as usize || !self.groups().eq(known.iter().copied()) {
            *known = self.groups().collect();
        }
        let message = Arc::new(message::decode_fields(&mut Input(self.message))?);
        Some(LogRecord { offset, groups: Arc::clone(known), message })
    }
}

/// Adds a record that will be at `offset`.
pub(super) fn put_record(
    partition: Partition,
    groups: &[GroupId],
    cost: u32,
    message: &SharedMessage,
    offset: u64,
    out: &mut Vec<u8>,
) {
    let start = begin_frame(out, RECORD_TAG);
    out.push(partition.0);
    fields::put_varint(out, cost);
    fields::put_varint(out, groups.len() as u32);
    let mut before = 0;
    for group in groups {
        fields::put_varint(out, group.0.wrapping_sub(before));
        before = group.0;
    }
    message::encode_fields(message, out);
    end_frame(out, start, offset);
}

/// Adds the beginning of a batch that will be at `offset`.
pub(super) fn put_batch(offset: u64, out: &mut Vec<u8>) {
    let start = begin_frame(out, BATCH_TAG);
    out.extend_from_slice(&MARK);
    put_u64(out, offset);
    end_frame(out, start, offset);
}

/// Adds a frame of any body.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn put_frame(tag: u8, body: &[u8], offset: u64, out: &mut Vec<u8>) {
    let start = begin_frame(out, tag);
    out.extend_from_slice(body);
    end_frame(out, start, offset);
}

fn begin_frame(out: &mut Vec<u8>, tag: u8) -> usize {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME]);
    out.push(tag);
    start
}

fn end_frame(out: &mut [u8], start: usize, offset: u64) {
    let frame = &mut out[start..];
    // A message comes from a packet, whose length fits in 32 bits.
    let length = (frame.len() - FRAME) as u32;
    frame[4..FRAME].copy_from_slice(&length.to_le_bytes());
    let sum = sum(&frame[4..], offset);
    frame[..4].copy_from_slice(&sum.to_le_bytes());
}

fn sum(bytes: &[u8], offset: u64) -> u32 {
    crc32fast::hash(bytes) ^ (offset ^ offset >> 32) as u32
}

/// Offsets between which nothing can be read: from the first up to, and without, the last.
pub(super) type Hole = (u64, u64);

/// Summary of the whole segment in its footer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trailer {
    /// The offset after the last record.
    pub(super) end: u64,
    /// Place in the file at which the footer begins.
    pub(super) footer: u64,
    /// The latest time at which a record was received.
    pub(super) latest: Timestamp,
    /// Number of holes, which are before the trailer.
    pub(super) holes: u32,
    holes_sum: u32,
}

/// A footer: where in the file the records of each partition are.
pub(super) fn encode_footer(
    places: &[Vec<u32>],
    holes: &[Hole],
    end: u64,
    footer: u64,
    latest: Timestamp,
) -> Vec<u8> {
    let total: usize = places.iter().map(Vec::len).sum();
    let mut out = Vec::with_capacity(DIRECTORY + 4 * total + 16 * holes.len() + TRAILER);
    out.resize(DIRECTORY, 0);
    for (partition, places) in places.iter().enumerate() {
        let start = out.len();
        places.iter().for_each(|&place| put_u32(&mut out, place));
        let entry = [places.len() as u32, start as u32, crc32fast::hash(&out[start..])];
        let directory = out[ENTRY * partition..].iter_mut();
        directory.zip(entry.iter().flat_map(|n| n.to_le_bytes())).for_each(|(to, byte)| *to = byte);
    }
    let start = out.len();
    for (from, to) in holes {
        put_u64(&mut out, *from);
        put_u64(&mut out, *to);
    }
    let holes_sum = crc32fast::hash(&out[start..]);
    let start = out.len();
    out.extend_from_slice(&TRAILER_MAGIC);
    for number in [end, footer, latest.0] {
        put_u64(&mut out, number);
    }
    put_u32(&mut out, holes.len() as u32);
    put_u32(&mut out, holes_sum);
    let sum = crc32fast::hash(&out[start..]);
    put_u32(&mut out, sum);
    out
}

/// The trailer in the last [`TRAILER`] bytes of a file.
pub(super) fn trailer(bytes: &[u8]) -> Option<Trailer> {
    let (body, sum) = bytes.split_last_chunk::<4>()?;
    let mut input = Input(body);
    let sound = bytes.len() == TRAILER
        && crc32fast::hash(body) == u32::from_le_bytes(*sum)
        && input.take(8)? == TRAILER_MAGIC;
    let trailer = Trailer {
        end: input.u64()?,
        footer: input.u64()?,
        latest: Timestamp(input.u64()?),
        holes: input.u32()?,
        holes_sum: input.u32()?,
    };
    sound.then_some(trailer)
}

impl Trailer {
    /// From the bytes in front of the trailer.
    pub(super) fn decode_holes(&self, bytes: &[u8]) -> Option<Vec<Hole>> {
        if crc32fast::hash(bytes) != self.holes_sum || bytes.len() != 16 * self.holes as usize {
            return None;
        }
        let mut input = Input(bytes);
        (0..self.holes).map(|_| Some((input.u64()?, input.u64()?))).collect()
    }
}

/// Places of one partition in the footer: their number, and where they begin.
pub(super) struct PlacesAt {
    pub(super) count: u32,
    pub(super) start: u32,
    sum: u32,
}

impl PlacesAt {
    /// From an entry of the directory.
    pub(super) fn decode(entry: &[u8]) -> Option<Self> {
        let mut input = Input(entry);
        Some(Self { count: input.u32()?, start: input.u32()?, sum: input.u32()? })
    }

    /// The places, in order.
    pub(super) fn places(&self, bytes: &[u8]) -> Option<Vec<u32>> {
        let (places, []) = bytes.as_chunks::<4>() else { return None };
        let sound = places.len() == self.count as usize && crc32fast::hash(bytes) == self.sum;
        let places: Vec<u32> = places.iter().map(|place| u32::from_le_bytes(*place)).collect();
        (sound && places.is_sorted()).then_some(places)
    }
}

fn put_u32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}
