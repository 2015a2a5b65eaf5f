//! The log in the ledger of a cluster: its changes as records, and the copy that is made of them.
//!
//! ```text
//! 0 id                      the id of the log, once
//! 1 base length header      a segment begins
//! 2 base place length bytes a batch
//! 3 base                    a segment is not needed any more
//! ```
//!
//! The file `ledger` in the folder says up to which record and which byte the copy has come, and with which record each segment
//! began. Bytes behind that place do not count: they are cut when the folder is opened as a copy.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use ledger::{Cleaned, Position, Shipped, Shipping};
use parking_lot::Mutex;
use store::encoding::fields::{Input, put_bytes};

use super::{
    format, open,
    segment::{self, SegmentKind},
};

const ID: u8 = 0;
const BEGIN: u8 = 1;
const BATCH: u8 = 2;
const REMOVE: u8 = 3;

const NAME: &str = "ledger";

/// Place that a copy has reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct LogReached {
    position: Position,
    /// Segment that grows, and the place in its file behind the last batch.
    base: u64,
    place: u64,
    /// Segments, and epoch and number of the records that they began with. In order.
    begins: Vec<(u64, u64, u64)>,
}

impl LogReached {
    fn read(folder: &Path) -> Option<Self> {
        let bytes = fs::read(folder.join(NAME)).ok()?;
        let (body, sum) = bytes.split_last_chunk::<4>()?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let mut input = Input(body);
        let position = Position::from_bytes(input.take(20)?)?;
        let (base, place) = (input.u64()?, input.u64()?);
        let mut begins = Vec::new();
        while !input.0.is_empty() {
            begins.push((input.u64()?, input.u64()?, input.u64()?));
        }
        Some(Self { position, base, place, begins })
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = self.position.to_bytes().to_vec();
        let begins = self.begins.iter().flat_map(|(base, epoch, n)| [base, epoch, n]);
        for number in [&self.base, &self.place].into_iter().chain(begins) {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let sum = crc32fast::hash(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }

    /// A copy that is interrupted here has no position, or an older one.
    fn write(&self, file: &File) -> io::Result<()> {
        let bytes = self.encode();
        file.write_all_at(&bytes, 0)?;
        file.set_len(bytes.len() as u64)
    }
}

fn open_mark(folder: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(folder.join(NAME))
}

/// The writer's side: each batch goes to the ledger before it is written.
pub(super) struct LogLedger {
    shipping: Arc<dyn Shipping>,
    mark: File,
    reached: Mutex<LogReached>,
    /// Changes that go with the next batch.
    before: Mutex<Vec<u8>>,
}

impl LogLedger {
    /// Goes on with what is in `folder`. The id goes first if no segment has it yet.
    pub(super) fn open(folder: &Path, id: u64, shipping: Arc<dyn Shipping>) -> io::Result<Self> {
        let reached = LogReached::read(folder).unwrap_or_default();
        let mut before = Vec::new();
        if reached.begins.is_empty() {
            before.push(ID);
            before.extend_from_slice(&id.to_le_bytes());
        }
        let mark = open_mark(folder)?;
        Ok(Self { shipping, mark, reached: Mutex::new(reached), before: Mutex::new(before) })
    }

    /// A segment was made, with this header.
    pub(super) fn begun(&self, base: u64, header: &[u8]) {
        let mut before = self.before.lock();
        before.push(BEGIN);
        before.extend_from_slice(&base.to_le_bytes());
        put_bytes(&mut before, header);
    }

    /// A segment is not needed any more.
    pub(super) fn removed(&self, base: u64) {
        let mut before = self.before.lock();
        before.push(REMOVE);
        before.extend_from_slice(&base.to_le_bytes());
        drop(before);
        let mut reached = self.reached.lock();
        reached.begins.retain(|(known, ..)| *known > base);
        if let Some((_, epoch, n)) = reached.begins.first() {
            self.shipping.begin_at(*epoch, *n);
        }
    }

    /// Ships a batch that is to be written at `place` of the segment `base`.
    pub(super) fn ship(&self, base: u64, place: u64, batch: &[u8]) -> Shipped {
        let mut changes = std::mem::take(&mut *self.before.lock());
        changes.push(BATCH);
        changes.extend_from_slice(&base.to_le_bytes());
        changes.extend_from_slice(&place.to_le_bytes());
        put_bytes(&mut changes, batch);
        self.shipping.ship(&changes, Cleaned::default())
    }

    /// Notes that the batch at `position` is written and synced, up to `place`.
    pub(super) fn note(&self, position: Position, base: u64, place: u64) {
        let mut reached = self.reached.lock();
        if reached.base != base || reached.begins.is_empty() {
            reached.begins.push((base, position.epoch, position.n));
        }
        (reached.position, reached.base, reached.place) = (position, base, place);
        if let Err(error) = reached.write(&self.mark) {
            // The next start reads more of the ledger.
            gateway_core::warn_limited!(%error, "cannot note where the log is in the ledger");
        }
    }
}

/// A log that is kept by the records of another process.
pub struct LogCopy {
    folder: PathBuf,
    mark: File,
    reached: Option<LogReached>,
    /// The file of the last segment.
    file: Option<(u64, File)>,
}

impl LogCopy {
    /// Opens the log in `folder`: what is behind the place that it has reached is cut. Reads all of it: one that is damaged has no
    /// position, as the ledger has what is lost here.
    pub fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let reached = LogReached::read(folder);
        let mut copy = Self { folder: folder.to_owned(), mark: open_mark(folder)?, reached, file: None };
        copy.cut()?;
        if copy.reached.as_ref().is_some_and(|reached| !reached.begins.is_empty()) && !copy.is_whole()? {
            tracing::error!(log = %folder.display(), "the copy of the log is damaged, it is made anew");
            copy.reached = None;
        }
        Ok(copy)
    }

    /// Returns whether every segment up to the place that was reached can be read, from its header to where the next begins.
    fn is_whole(&self) -> io::Result<bool> {
        let bases = open::bases(&self.folder)?;
        if bases.last().copied() != self.reached.as_ref().map(|reached| reached.base) {
            return Ok(false);
        }
        for (at, base) in bases.iter().enumerate() {
            let file = File::open(segment::path(&self.folder, *base))?;
            let (header, head, end, known) = match segment::identify(&file)? {
                // Whoever opens the log refuses it.
                SegmentKind::Newer(_) => continue,
                SegmentKind::Damaged => return Ok(false),
                SegmentKind::Sealed(header, head, trailer, holes) => (header, head, trailer.end, holes),
                SegmentKind::Open(header, head) => {
                    let end = base.saturating_add(file.metadata()?.len() - head);
                    (header, head, bases.get(at + 1).map_or(end, |next| end.min(*next)), Vec::new())
                }
            };
            let is_next = bases.get(at + 1).is_none_or(|next| *next == end);
            if header.base != *base || !is_next {
                return Ok(false);
            }
            let scan = segment::scan(&file, &header, head, head + (end - base))?;
            if scan.holes != known || scan.end != head + (end - base) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The last record that is in it.
    pub fn position(&self) -> Option<Position> {
        self.reached.as_ref().map(|reached| reached.position)
    }

    fn cut(&mut self) -> io::Result<()> {
        let Some(reached) = self.reached.clone() else { return Ok(()) };
        remove_if_there(&self.folder.join("synced"))?;
        for base in open::bases(&self.folder)? {
            let path = segment::path(&self.folder, base);
            if base > reached.base {
                fs::remove_file(path)?;
            } else if base == reached.base {
                let file = OpenOptions::new().write(true).open(path)?;
                if file.metadata()?.len() < reached.place {
                    // Less is there than was noted: nothing of it is worth keeping.
                    self.reached = None;
                    return Ok(());
                }
                file.set_len(reached.place)?;
            }
        }
        Ok(())
    }

    /// Makes a record's changes. False if they are not of a log.
    pub fn apply(&mut self, position: Position, changes: &[u8]) -> io::Result<bool> {
        let mut input = Input(changes);
        let mut reached = self.reached.take().unwrap_or_default();
        while !input.0.is_empty() {
            let Some(done) = self.change(&mut input, &mut reached, position) else { return Ok(false) };
            done?;
        }
        reached.position = position;
        self.reached = Some(reached);
        Ok(true)
    }

    fn change(
        &mut self,
        input: &mut Input<'_>,
        reached: &mut LogReached,
        position: Position,
    ) -> Option<io::Result<()>> {
        match input.u8()? {
            ID => {
                let id = input.u64()?;
                Some(open::write_id(&self.folder, id))
            }
            BEGIN => {
                let (base, header) = (input.u64()?, input.bytes()?);
                reached.begins.retain(|(known, ..)| *known < base);
                reached.begins.push((base, position.epoch, position.n));
                (reached.base, reached.place) = (base, header.len() as u64);
                Some(self.begin(base, header))
            }
            BATCH => {
                let (base, place, bytes) = (input.u64()?, input.u64()?, input.bytes()?);
                // A batch is behind all that came before it.
                if (base, place) != (reached.base, reached.place) || reached.begins.is_empty() {
                    return None;
                }
                reached.place = place.checked_add(bytes.len() as u64)?;
                Some(self.write(base, place, bytes))
            }
            REMOVE => {
                let base = input.u64()?;
                reached.begins.retain(|(known, ..)| *known > base);
                Some(remove_if_there(&segment::path(&self.folder, base)))
            }
            _ => None,
        }
    }

    fn begin(&mut self, base: u64, header: &[u8]) -> io::Result<()> {
        self.file = None;
        let path = segment::path(&self.folder, base);
        let file =
            OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o600).open(path)?;
        file.write_all_at(header, 0)?;
        self.file = Some((base, file));
        store::sync_directory(&self.folder)
    }

    fn write(&mut self, base: u64, place: u64, bytes: &[u8]) -> io::Result<()> {
        let file = match self.file.take() {
            Some((known, file)) if known == base => file,
            _ => OpenOptions::new().write(true).open(segment::path(&self.folder, base))?,
        };
        let written = file.write_all_at(bytes, place).and_then(|()| file.set_len(place + bytes.len() as u64));
        self.file = Some((base, file));
        written
    }

    /// Makes durable and notes what was applied.
    pub fn sync(&self) -> io::Result<()> {
        if let Some((_, file)) = &self.file {
            file.sync_data()?;
        }
        match &self.reached {
            Some(reached) => reached.write(&self.mark),
            None => self.mark.set_len(0),
        }
    }

    /// Forgets its place in the ledger, and keeps what is in it.
    pub fn forget(self) -> io::Result<()> {
        remove_if_there(&self.folder.join(NAME))
    }

    /// Empties it.
    pub fn clear(&mut self) -> io::Result<()> {
        (self.reached, self.file) = (None, None);
        self.mark.set_len(0)?;
        for base in open::bases(&self.folder)? {
            fs::remove_file(segment::path(&self.folder, base))?;
        }
        remove_if_there(&self.folder.join("synced"))?;
        remove_if_there(&self.folder.join("log"))
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether there is a segment in `folder`.
pub fn has_segments(folder: &Path) -> bool {
    open::bases(folder).is_ok_and(|bases| !bases.is_empty())
}

/// Length of the whole frames in front of `bytes`, so that a copy that ends with a record ends with a frame; all of it if there is none.
fn whole_frames(bytes: &[u8]) -> usize {
    let mut end = 0;
    while let Some(length) = bytes.get(end..).and_then(format::frame_length) {
        match end.checked_add(length) {
            Some(next) if next <= bytes.len() => end = next,
            _ => break,
        }
    }
    if end == 0 { bytes.len() } else { end }
}

/// Gives `into` the log in `folder` as the changes of records, from the first segment on, each about a megabyte, and returns the
/// number of records.
pub fn export(
    folder: &Path,
    mut into: impl FnMut(&[u8]) -> io::Result<Position>,
) -> Result<(), store::StoreError> {
    const CHUNK: u64 = 1 << 20;
    let opened = open::open(folder)?;
    let mut give = || -> io::Result<()> {
        let mut reached = LogReached::default();
        let mut changes = vec![ID];
        changes.extend_from_slice(&opened.id.to_le_bytes());
        for segment in &opened.segments {
            let (file, base) = (segment.open()?, segment.header.base);
            let mut header = vec![0; segment.head as usize];
            file.read_exact_at(&mut header, 0)?;
            changes.push(BEGIN);
            changes.extend_from_slice(&base.to_le_bytes());
            put_bytes(&mut changes, &header);
            let (mut place, end) = (segment.head, segment.place(segment.end()));
            let mut first = true;
            while first || place < end {
                let mut bytes = vec![0; (end - place).min(CHUNK) as usize];
                file.read_exact_at(&mut bytes, place)?;
                bytes.truncate(whole_frames(&bytes));
                changes.push(BATCH);
                changes.extend_from_slice(&base.to_le_bytes());
                changes.extend_from_slice(&place.to_le_bytes());
                put_bytes(&mut changes, &bytes);
                place += bytes.len() as u64;
                reached.position = into(&std::mem::take(&mut changes))?;
                if std::mem::take(&mut first) {
                    reached.begins.push((base, reached.position.epoch, reached.position.n));
                }
                (reached.base, reached.place) = (base, place);
            }
        }
        if !changes.is_empty() {
            reached.position = into(&changes)?;
        }
        reached.write(&open_mark(folder)?)
    };
    give().map_err(|error| store::StoreError::Unavailable(format!("log {}: {error}", folder.display())))
}
