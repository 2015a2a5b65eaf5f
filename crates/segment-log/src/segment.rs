//! One file of the log: what is known of it in memory, and finding out.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use gateway_core::{GroupId, PARTITIONS, Partition, Timestamp};
use parking_lot::{RwLock, RwLockReadGuard};

use super::{
    format::{self, GroupCount, Hole, LogFrame, PREFIX, PlacesAt, Prefix, SegmentHeader, TRAILER, Trailer},
    window::FileWindow,
};
use crate::counters::count;

/// A file of the log, whose name is the offset of its first frame.
pub(super) struct LogSegment {
    pub(super) path: PathBuf,
    pub(super) header: SegmentHeader,
    /// Bytes of the header.
    pub(super) head: u64,
    content: RwLock<SegmentContent>,
}

/// Durable content of a segment.
pub(super) struct SegmentContent {
    /// The offset after the last record.
    pub(super) end: u64,
    /// The latest time at which a record was received, if known.
    pub(super) latest: Option<Timestamp>,
    /// Stretches that cannot be read; in order. A hole at this segment's end that only the next segment tells of is not among
    /// them.
    pub(super) holes: Vec<Hole>,
    places: RecordPlaces,
}

enum RecordPlaces {
    /// In memory, by partition.
    Known(Box<[Vec<u32>]>),
    /// In the footer, which begins here.
    Footer(u64),
    /// To be found by reading the file.
    Unknown,
}

/// Findings of a read through a file.
pub(super) struct SegmentScan {
    pub(super) places: Box<[Vec<u32>]>,
    pub(super) holes: Vec<Hole>,
    pub(super) latest: Timestamp,
    /// The place after the last record that counts.
    pub(super) end: u64,
    /// Place at which the last batch begins, if there is one.
    pub(super) last_batch: Option<u64>,
    pub(super) counts: Vec<(GroupId, GroupCount)>,
}

/// Kind of a file.
pub(super) enum SegmentKind {
    Sealed(Box<SegmentHeader>, u64, Trailer, Vec<Hole>),
    Open(Box<SegmentHeader>, u64),
    Newer(u32),
    Damaged,
}

/// Records of a partition in a segment, from an offset on.
pub(super) struct RecordRun {
    /// Their places in the file; not more than asked for.
    pub(super) places: Vec<u32>,
    /// The holes that end after the offset, in order.
    pub(super) holes: Vec<Hole>,
    /// The end of what is durable, as of the same moment.
    pub(super) end: u64,
}

/// Empty places of all partitions.
pub(super) fn no_places() -> Box<[Vec<u32>]> {
    vec![Vec::new(); PARTITIONS].into()
}

/// The file in `folder` for the segment that begins at `base`.
pub(super) fn path(folder: &Path, base: u64) -> PathBuf {
    folder.join(format!("{base:016x}.log"))
}

/// Reads header and trailer.
pub(super) fn identify(file: &File) -> io::Result<SegmentKind> {
    let length = file.metadata()?.len();
    let mut bytes = vec![0; PREFIX];
    if length < PREFIX as u64 {
        return Ok(SegmentKind::Damaged);
    }
    file.read_exact_at(&mut bytes, 0)?;
    let head = match format::prefix(&bytes) {
        Prefix::Newer(version) => return Ok(SegmentKind::Newer(version)),
        Prefix::Length(head) if head as u64 <= length => head,
        _ => return Ok(SegmentKind::Damaged),
    };
    bytes.resize(head, 0);
    file.read_exact_at(&mut bytes, 0)?;
    let Some(header) = SegmentHeader::decode(&bytes) else { return Ok(SegmentKind::Damaged) };
    let (header, head) = (Box::new(header), head as u64);
    let Some(at) = length.checked_sub(TRAILER as u64).filter(|&at| at >= head) else {
        return Ok(SegmentKind::Open(header, head));
    };
    let mut bytes = vec![0; TRAILER];
    file.read_exact_at(&mut bytes, at)?;
    let Some(trailer) = format::trailer(&bytes) else { return Ok(SegmentKind::Open(header, head)) };
    let holes_length = 16 * u64::from(trailer.holes);
    let plausible = trailer.footer >= head
        && trailer.end >= header.base
        && trailer.end - header.base == trailer.footer - head
        && trailer.footer + format::DIRECTORY as u64 + holes_length <= at;
    if !plausible {
        return Ok(SegmentKind::Open(header, head));
    }
    let mut bytes = vec![0; holes_length as usize];
    file.read_exact_at(&mut bytes, at - holes_length)?;
    match trailer.decode_holes(&bytes) {
        Some(holes) => Ok(SegmentKind::Sealed(header, head, trailer, holes)),
        None => Ok(SegmentKind::Open(header, head)),
    }
}

/// Reads through the frames of a file up to `end`. Whatever is after the first damage in the last batch was never
/// synced, and does not count.
pub(super) fn scan(file: &File, header: &SegmentHeader, head: u64, end: u64) -> io::Result<SegmentScan> {
    struct FoundRecord {
        place: u32,
        partition: Partition,
        received: Timestamp,
        cost: u64,
        groups: Vec<GroupId>,
    }
    let mut scan = SegmentScan {
        places: no_places(),
        holes: Vec::new(),
        latest: Timestamp(0),
        end: head,
        last_batch: None,
        counts: Vec::new(),
    };
    let mut counts: hashbrown::HashMap<GroupId, GroupCount, ahash::RandomState> =
        header.counts.iter().copied().collect();
    let mut take = |scan: &mut SegmentScan, found: FoundRecord| {
        scan.places[usize::from(found.partition.0)].push(found.place);
        scan.latest = scan.latest.max(found.received);
        for group in found.groups {
            let count = counts.entry(group).or_default();
            count.messages += 1;
            count.bytes += found.cost;
        }
    };
    let shift = header.base.wrapping_sub(head);
    let mut window = FileWindow::new(file, end);
    // Damage since the last batch began, and what is sound after it.
    let (mut holes, mut doubtful): (Vec<Hole>, Vec<FoundRecord>) = (Vec::new(), Vec::new());
    let mut place = head;
    while place < end {
        let offset = place.wrapping_add(shift);
        let sound = match window.frame(place, offset, true)? {
            Some((LogFrame::Batch, length)) => {
                scan.holes.append(&mut holes);
                doubtful.drain(..).for_each(|found| take(&mut scan, found));
                scan.last_batch = Some(place);
                Some(length)
            }
            Some((LogFrame::Record(record), length)) => match (record.received(), u32::try_from(place)) {
                (Some(received), Ok(at)) => {
                    let found = FoundRecord {
                        place: at,
                        partition: record.partition,
                        received,
                        cost: u64::from(record.cost),
                        groups: record.groups().collect(),
                    };
                    if holes.is_empty() {
                        take(&mut scan, found);
                    } else {
                        doubtful.push(found);
                    }
                    Some(length)
                }
                _ => None,
            },
            None => None,
        };
        place = match sound {
            Some(length) => place + length as u64,
            None => {
                let Some(next) = after_damage(&mut window, place, shift)? else { break };
                holes.push((offset, next.wrapping_add(shift)));
                next
            }
        };
        if holes.is_empty() {
            scan.end = place;
        }
    }
    if let Some((from, _)) = holes.first() {
        scan.end = from.wrapping_sub(shift);
    }
    scan.counts = counts.into_iter().collect();
    scan.counts.sort_unstable_by_key(|(group, _)| *group);
    Ok(scan)
}

/// The next place with a sound frame: after the damaged one, if its length is sound, or else the next batch.
fn after_damage(window: &mut FileWindow<'_>, place: u64, shift: u64) -> io::Result<Option<u64>> {
    if let Some(next) = window.claimed_end(place)?
        && window.frame(next, next.wrapping_add(shift), true)?.is_some()
    {
        return Ok(Some(next));
    }
    window.find_batch(place + 1, shift)
}

impl LogSegment {
    /// A new one, whose file has its header.
    pub(super) fn new(path: PathBuf, header: SegmentHeader, head: u64) -> Self {
        let content = SegmentContent {
            end: header.base,
            latest: Some(Timestamp(0)),
            holes: Vec::new(),
            places: RecordPlaces::Known(no_places()),
        };
        Self { path, header, head, content: RwLock::new(content) }
    }

    /// One with a footer.
    pub(super) fn sealed(
        path: PathBuf,
        header: SegmentHeader,
        head: u64,
        trailer: &Trailer,
        holes: Vec<Hole>,
    ) -> Self {
        let places = RecordPlaces::Footer(trailer.footer);
        let content = SegmentContent { end: trailer.end, latest: Some(trailer.latest), holes, places };
        Self { path, header, head, content: RwLock::new(content) }
    }

    /// One without a footer, which ends at `end` and is read through when somebody wants something of it.
    pub(super) fn unknown(path: PathBuf, header: SegmentHeader, head: u64, end: u64) -> Self {
        let content = SegmentContent { end, latest: None, holes: Vec::new(), places: RecordPlaces::Unknown };
        Self { path, header, head, content: RwLock::new(content) }
    }

    /// One that was read through.
    pub(super) fn scanned(path: PathBuf, header: SegmentHeader, head: u64, scan: SegmentScan) -> Self {
        let end = header.base + (scan.end - head);
        let places = RecordPlaces::Known(scan.places);
        let content = SegmentContent { end, latest: Some(scan.latest), holes: scan.holes, places };
        Self { path, header, head, content: RwLock::new(content) }
    }

    /// The offset after what is durable.
    pub(super) fn end(&self) -> u64 {
        self.content.read().end
    }

    /// Locks the content for reading.
    pub(super) fn content(&self) -> RwLockReadGuard<'_, SegmentContent> {
        self.content.read()
    }

    /// The place in the file of an offset.
    pub(super) fn place(&self, offset: u64) -> u64 {
        offset.saturating_sub(self.header.base) + self.head
    }

    /// The offset of a place in the file.
    pub(super) fn offset(&self, place: u64) -> u64 {
        place.saturating_sub(self.head) + self.header.base
    }

    /// Returns the count of the group when the segment began.
    pub(super) fn count(&self, group: GroupId) -> GroupCount {
        let counts = &self.header.counts;
        let found = counts.binary_search_by_key(&group, |(group, _)| *group);
        found.map_or_else(|_| GroupCount::default(), |at| counts[at].1)
    }

    /// Bytes of memory that it takes.
    pub(super) fn memory(&self) -> usize {
        let places = match &self.content.read().places {
            RecordPlaces::Known(places) => places.iter().map(|places| 4 * places.capacity() + 24).sum(),
            RecordPlaces::Footer(_) | RecordPlaces::Unknown => 0,
        };
        size_of::<Self>()
            + 8 * self.header.ends.len()
            + size_of::<(GroupId, GroupCount)>() * self.header.counts.len()
            + places
    }

    /// Adds records that are durable now.
    pub(super) fn add(&self, added: &[(Partition, u32)], end: u64, latest: Timestamp) {
        let mut content = self.content.write();
        content.end = end;
        content.latest = content.latest.map(|before| before.max(latest));
        if let RecordPlaces::Known(places) = &mut content.places {
            for (partition, place) in added {
                places[usize::from(partition.0)].push(*place);
            }
        }
    }

    /// The bytes of its footer, if it can have one.
    pub(super) fn footer(&self) -> Option<Vec<u8>> {
        let content = self.content.read();
        let RecordPlaces::Known(places) = &content.places else { return None };
        let latest = content.latest.unwrap_or_default();
        Some(format::encode_footer(places, &content.holes, content.end, self.place(content.end), latest))
    }

    /// The footer is written: places are read from it.
    pub(super) fn seal(&self) {
        let mut content = self.content.write();
        content.places = RecordPlaces::Footer(self.place(content.end));
    }

    /// Opens the file for reading.
    pub(super) fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// At most `most` records of the partition from `from` on. Reads the disk.
    pub(super) fn stretch(
        &self,
        file: &File,
        partition: Partition,
        from: u64,
        most: usize,
    ) -> io::Result<RecordRun> {
        let first = u32::try_from(self.place(from)).unwrap_or(u32::MAX);
        let choose = |places: &[u32]| {
            let start = places.partition_point(|&place| place < first);
            places[start..].iter().take(most).copied().collect::<Vec<_>>()
        };
        loop {
            let content = self.content.read();
            let places = match &content.places {
                RecordPlaces::Known(places) => choose(&places[usize::from(partition.0)]),
                RecordPlaces::Footer(footer) => match read_places(file, *footer, partition)? {
                    Some(places) => choose(&places),
                    None => {
                        drop(content);
                        count(|c| c.log_damaged.add(1));
                        gateway_core::error_limited!(
                            segment = %self.path.display(),
                            "the footer of a segment is damaged, the segment is read through"
                        );
                        self.content.write().places = RecordPlaces::Unknown;
                        continue;
                    }
                },
                RecordPlaces::Unknown => {
                    drop(content);
                    self.learn(file)?;
                    continue;
                }
            };
            let holes = content.holes.iter().filter(|(_, to)| *to > from).copied().collect();
            return Ok(RecordRun { places, holes, end: content.end });
        }
    }

    /// Reads through the file, once.
    fn learn(&self, file: &File) -> io::Result<()> {
        let mut content = self.content.write();
        if !matches!(content.places, RecordPlaces::Unknown) {
            return Ok(());
        }
        let scan = scan(file, &self.header, self.head, self.place(content.end))?;
        let end = self.offset(scan.end);
        let mut holes = scan.holes;
        // The recorded end was synced, so records missing before it are a hole.
        if end < content.end {
            holes.push((end, content.end));
        }
        content.holes = holes;
        content.latest = Some(scan.latest);
        content.places = RecordPlaces::Known(scan.places);
        Ok(())
    }
}

/// The places of a partition; `None` if they are damaged.
fn read_places(file: &File, footer: u64, partition: Partition) -> io::Result<Option<Vec<u32>>> {
    let mut entry = [0; format::ENTRY];
    let at = footer + (format::ENTRY * usize::from(partition.0)) as u64;
    if !read_whole(file, &mut entry, at)? {
        return Ok(None);
    }
    let Some(entry) = PlacesAt::decode(&entry) else { return Ok(None) };
    let (start, length) = (footer + u64::from(entry.start), 4 * u64::from(entry.count));
    if start + length > file.metadata()?.len() {
        return Ok(None);
    }
    let mut bytes = vec![0; length as usize];
    if !read_whole(file, &mut bytes, start)? {
        return Ok(None);
    }
    Ok(entry.places(&bytes))
}

fn read_whole(file: &File, bytes: &mut [u8], at: u64) -> io::Result<bool> {
    match file.read_exact_at(bytes, at) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the file of a segment, with its header, and makes both durable.
pub(super) fn create(folder: &Path, header: &SegmentHeader) -> io::Result<(File, u64)> {
    let path = path(folder, header.base);
    let bytes = header.encode();
    let make = || {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        store::sync_directory(folder)?;
        Ok(file)
    };
    let made: io::Result<File> = make();
    if made.is_err() {
        // The new file holds nothing yet.
        let _ = std::fs::remove_file(&path);
    }
    Ok((made?, bytes.len() as u64))
}
