//! The start: headers and footers, and the frames of the last segment.

use std::{
    collections::VecDeque,
    fs::{self, DirBuilder, File, OpenOptions},
    hash::{BuildHasher as _, RandomState},
    io,
    os::unix::fs::{DirBuilderExt as _, FileExt as _},
    path::Path,
    sync::Arc,
};

use gateway_core::{GroupId, PARTITIONS, Timestamp};

use super::{
    format::{GroupCount, Hole, VERSION},
    segment::{self, LogSegment, SegmentKind},
    synced,
    window::FileWindow,
};
use crate::counters::count;
use store::{StoreError, sync_directory};

/// State of the log that a start finds.
pub(super) struct OpenedLog {
    pub(super) id: u64,
    pub(super) segments: VecDeque<Arc<LogSegment>>,
    /// The file of the last segment, if it goes on.
    pub(super) file: Option<File>,
    /// The offset after the last record.
    pub(super) end: u64,
    /// One more than the offset of the last record of each partition.
    pub(super) ends: Box<[u64]>,
    pub(super) counts: Vec<(GroupId, GroupCount)>,
    /// The latest time at which a record was received, as far as headers and footers tell.
    pub(super) latest: Timestamp,
    /// Bytes of all files.
    pub(super) bytes: u64,
    /// Places before this one were set aside as damaged, if the log begins here; 0 if none were.
    pub(super) damaged: u64,
    /// All before this place was synced, and is told as lost if it is not there.
    synced: u64,
}

/// Opens the log in `folder`, which is made if there is none.
///
/// # Errors
/// [`StoreError::Format`] if a newer version wrote any of it; nothing is changed then.
pub(super) fn open(folder: &Path) -> Result<OpenedLog, StoreError> {
    let failed = |error: io::Error| StoreError::Unavailable(format!("log {}: {error}", folder.display()));
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    let named = read_id(folder)?;
    let mut found = Vec::new();
    for base in bases(folder).map_err(failed)? {
        let path = segment::path(folder, base);
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let kind = match segment::identify(&file).map_err(failed)? {
            SegmentKind::Newer(version) => return Err(newer(version)),
            SegmentKind::Sealed(header, ..) | SegmentKind::Open(header, _) if header.base != base => {
                SegmentKind::Damaged
            }
            kind => kind,
        };
        found.push((base, file, kind));
    }
    let headers = || found.iter().filter_map(|(.., kind)| kind.header());
    let id = named.or_else(|| headers().next().map(|header| header.log));
    let id = id.unwrap_or_else(|| RandomState::new().hash_one(std::process::id()));
    if named.is_none() {
        write_id(folder, id).map_err(failed)?;
    }
    let mut opened = OpenedLog {
        id,
        segments: VecDeque::new(),
        file: None,
        end: 0,
        ends: vec![0; PARTITIONS].into(),
        counts: Vec::new(),
        latest: Timestamp(0),
        bytes: 0,
        damaged: 0,
        synced: synced::read(folder, id),
    };
    let bases: Vec<u64> = found.iter().map(|(base, ..)| *base).collect();
    for (at, (base, file, kind)) in found.into_iter().enumerate() {
        opened.add(folder, base, file, kind, bases.get(at + 1).copied()).map_err(failed)?;
    }
    if opened.end < opened.synced {
        opened.end_too_early(folder);
    }
    Ok(opened)
}

impl SegmentKind {
    fn header(&self) -> Option<&super::format::SegmentHeader> {
        match self {
            Self::Sealed(header, ..) | Self::Open(header, _) => Some(header),
            Self::Newer(_) | Self::Damaged => None,
        }
    }
}

impl OpenedLog {
    /// Adds the next segment. `next` is the base of the one after it.
    fn add(
        &mut self,
        folder: &Path,
        base: u64,
        file: File,
        kind: SegmentKind,
        next: Option<u64>,
    ) -> io::Result<()> {
        let path = segment::path(folder, base);
        let mut length = file.metadata()?.len();
        let mut segment = match kind {
            SegmentKind::Sealed(header, head, trailer, holes) => {
                LogSegment::sealed(path, *header, head, &trailer, holes)
            }
            SegmentKind::Open(header, head) => match next {
                // The segment ends where the next begins: bytes after that were never synced.
                Some(next) => {
                    LogSegment::unknown(path, *header, head, next.min(base.saturating_add(length - head)))
                }
                None => {
                    let segment = recover(path, &file, header, head, self)?;
                    length = file.metadata()?.len();
                    self.file = Some(file);
                    segment
                }
            },
            SegmentKind::Newer(_) | SegmentKind::Damaged => {
                drop(file);
                return self.quarantine(&path, base, length, next);
            }
        };
        // Versions before wrote the time of the first record, which may be older than what is before it.
        segment.header.time = segment.header.time.max(self.latest);
        self.latest = segment.header.time.max(segment.content().latest.unwrap_or_default());
        if next.is_some() || self.file.is_none() {
            // The next header says the same, if it can be read.
            self.ends.copy_from_slice(&segment.header.ends);
            self.counts = segment.header.counts.to_vec();
        }
        let sealed_last = next.is_none() && self.file.is_none();
        self.end = segment.end();
        self.bytes += length;
        if sealed_last {
            self.learn(&segment)?;
        }
        self.segments.push_back(Arc::new(segment));
        Ok(())
    }

    /// Takes note that what was synced is not there: it is lost, of whichever partition it was, and nothing takes its place.
    fn end_too_early(&mut self, folder: &Path) {
        let (end, synced) = (self.end, self.synced);
        count(|c| c.log_damaged.add(1));
        tracing::error!(
            log = %folder.display(),
            end,
            synced,
            "the log ends before the place up to which it was synced; what was there is told as lost"
        );
        if self.segments.is_empty() {
            self.damaged = synced;
        }
        self.end = synced;
        self.ends.fill(synced);
        // Later records go into another segment, behind this one.
        self.file = None;
    }

    /// Takes ends and counts from a sealed segment that is the last, as a crash between the two leaves it.
    fn learn(&mut self, segment: &LogSegment) -> io::Result<()> {
        let file = segment.open()?;
        let scan = segment::scan(&file, &segment.header, segment.head, segment.place(segment.end()))?;
        for (end, places) in self.ends.iter_mut().zip(&scan.places) {
            if let Some(&place) = places.last() {
                *end = segment.offset(u64::from(place)) + 1;
            }
        }
        cover(&mut self.ends, &scan.holes);
        self.counts = scan.counts;
        Ok(())
    }

    /// Sets a file aside whose header cannot be read.
    fn quarantine(&mut self, path: &Path, base: u64, length: u64, next: Option<u64>) -> io::Result<()> {
        let last = next.is_none();
        let file = File::open(path)?;
        // The header is durable before anything follows it: without that the file is just not whole.
        if last && length < 1 << 20 && FileWindow::new(&file, length).has_no_batch()? {
            tracing::info!(segment = %path.display(), "a segment that was not finished is removed");
            return fs::remove_file(path);
        }
        let aside = path.with_extension("damaged");
        fs::rename(path, &aside)?;
        if self.segments.is_empty() {
            self.damaged = next.unwrap_or_else(|| base.saturating_add(length));
        }
        count(|c| c.log_damaged.add(1));
        tracing::error!(
            segment = %aside.display(),
            "the header of a segment is damaged; it is set aside, and what was in it is told as lost"
        );
        if last {
            if let Some(before) = self.segments.back().cloned() {
                self.learn(&before)?;
            }
            // Behind whatever was in it, and of whichever partition.
            self.end = base.saturating_add(length);
            self.ends.fill(self.end);
        }
        Ok(())
    }
}

/// The last segment, cut after what is whole.
fn recover(
    path: std::path::PathBuf,
    file: &File,
    header: Box<super::format::SegmentHeader>,
    head: u64,
    opened: &mut OpenedLog,
) -> io::Result<LogSegment> {
    let length = file.metadata()?.len();
    let scan = segment::scan(file, &header, head, length)?;
    let cut = length - scan.end;
    // Synced bytes are not torn: the file stays as it is.
    let torn = header.base.saturating_add(scan.end - head) >= opened.synced;
    if cut > 0 && torn {
        tracing::warn!(segment = %path.display(), bytes = cut, "the end of the log was not written whole and is cut");
        count(|c| c.log_cut_bytes.add(cut));
        file.set_len(scan.end)?;
    }
    // The last batch may be in the system's memory only, and look written there after a sync that failed.
    if let Some(batch) = scan.last_batch.filter(|batch| *batch < scan.end) {
        let mut bytes = vec![0; (scan.end - batch) as usize];
        file.read_exact_at(&mut bytes, batch)?;
        file.write_all_at(&bytes, batch)?;
    }
    file.sync_all()?;
    for (from, to) in &scan.holes {
        count(|c| c.log_damaged.add(1));
        tracing::error!(segment = %path.display(), from, to, "a part of the log is damaged, and told as lost");
    }
    opened.ends.copy_from_slice(&header.ends);
    for (end, places) in opened.ends.iter_mut().zip(&scan.places) {
        if let Some(&place) = places.last() {
            *end = header.base + (u64::from(place) - head) + 1;
        }
    }
    cover(&mut opened.ends, &scan.holes);
    opened.counts.clone_from(&scan.counts);
    Ok(LogSegment::scanned(path, *header, head, scan))
}

/// Whichever partition it was of: what is damaged counts, so that somebody reads that far and is told.
fn cover(ends: &mut [u64], holes: &[Hole]) {
    let last = holes.last().map_or(0, |(_, to)| *to);
    ends.iter_mut().for_each(|end| *end = last.max(*end));
}

/// The bases of the segments in `folder`, in order.
pub(super) fn bases(folder: &Path) -> io::Result<Vec<u64>> {
    let mut bases = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let base = name.to_str().and_then(|name| name.strip_suffix(".log"));
        if let Some(base) =
            base.filter(|base| base.len() == 16).and_then(|base| u64::from_str_radix(base, 16).ok())
        {
            bases.push(base);
        }
    }
    bases.sort_unstable();
    Ok(bases)
}

/// The id in the file `log`, which also names the version; `None` if there is no such file, or not a whole one.
fn read_id(folder: &Path) -> Result<Option<u64>, StoreError> {
    let Ok(text) = fs::read_to_string(folder.join("log")) else { return Ok(None) };
    let mut words = text.split_ascii_whitespace();
    let version = words.next().and_then(|word| word.parse::<u32>().ok());
    let id = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
    match (version, id) {
        (Some(version), _) if version > VERSION => Err(newer(version)),
        (Some(_), id) => Ok(id),
        (None, _) => Ok(None),
    }
}

pub(super) fn write_id(folder: &Path, id: u64) -> io::Result<()> {
    let (path, new) = (folder.join("log"), folder.join("log.new"));
    fs::write(&new, format!("{VERSION} {id:016x}\n"))?;
    File::open(&new)?.sync_all()?;
    fs::rename(&new, &path)?;
    sync_directory(folder)
}

/// Refuses a log of which a newer version wrote a part.
///
/// # Errors
/// [`StoreError::Format`], and [`StoreError::Unavailable`] if it cannot be read.
pub(super) fn refuse_newer(folder: &Path) -> Result<(), StoreError> {
    read_id(folder)?;
    let failed = |error: io::Error| StoreError::Unavailable(format!("log {}: {error}", folder.display()));
    for base in bases(folder).map_err(failed)? {
        match File::open(segment::path(folder, base)).and_then(|file| segment::identify(&file)) {
            Ok(SegmentKind::Newer(version)) => return Err(newer(version)),
            // A gateway has removed it meanwhile.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
    }
    Ok(())
}

fn newer(version: u32) -> StoreError {
    StoreError::Format(format!(
        "the log has format {version}, this version reads up to {VERSION}: use the version that wrote it"
    ))
}
