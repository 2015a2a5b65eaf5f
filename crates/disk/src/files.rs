//! Small files of the data directory in the ledger of a cluster: the clock, ids, bans.
//!
//! A record is names and contents. The file `ledger` in the directory says which record was the last, and the names of all files that
//! were ever in one: with each record that the ledger wants repeats with, all of them are in it.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use ledger::Position;
use parking_lot::Mutex;

use ledger::{Cleaned, Shipped, Shipping};
use store::encoding::fields::{Input, put_bytes};
use store::{FileShipping, StoreError, replace_file};

const NAME: &str = "ledger";

/// More names than there are kinds of files.
const MOST: usize = 64;

/// Files of a directory that are in the ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct FilesReached {
    position: Option<Position>,
    names: BTreeSet<String>,
}

impl FilesReached {
    fn read(directory: &Path) -> Self {
        let text = fs::read_to_string(directory.join(NAME)).unwrap_or_default();
        let mut lines = text.lines();
        let numbers = lines.next().map(|line| line.split(' ').map(str::parse::<u64>).collect::<Vec<_>>());
        let position = match numbers.as_deref() {
            Some([Ok(epoch), Ok(n), Ok(sum)]) => {
                u32::try_from(*sum).ok().map(|sum| Position { epoch: *epoch, n: *n, sum })
            }
            _ => None,
        };
        let names = lines.filter(|name| is_name(name)).map(str::to_owned).collect();
        Self { position, names }
    }

    fn write(&self, directory: &Path) -> Result<(), StoreError> {
        let Some(Position { epoch, n, sum }) = self.position else { return Ok(()) };
        let names: String = self.names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
        replace_file(directory, NAME, &format!("{epoch} {n} {sum}\n{names}"))
    }
}

/// Files of the directory itself, and none of a store.
fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !name.is_empty()
        && name.len() <= 64
        && name.chars().all(is_plain)
        && !name.starts_with('.')
        && name != NAME
}

fn put_file(changes: &mut Vec<u8>, name: &str, content: &[u8]) {
    put_bytes(changes, name.as_bytes());
    put_bytes(changes, content);
}

/// The owner's side.
pub struct ShippedFiles {
    directory: PathBuf,
    shipping: Arc<dyn Shipping>,
    reached: Mutex<FilesReached>,
}

impl ShippedFiles {
    /// Goes on with the files of `directory`.
    pub fn open(directory: &Path, shipping: Arc<dyn Shipping>) -> Self {
        let reached = Mutex::new(FilesReached::read(directory));
        Self { directory: directory.to_owned(), shipping, reached }
    }
}

impl FileShipping for ShippedFiles {
    fn replace(
        &self,
        name: &str,
        content: &str,
        write: &mut dyn FnMut() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        // One at a time, so that files and position go together.
        let mut reached = self.reached.lock();
        let mut changes = Vec::new();
        let repeats = self.shipping.wanted_repeats(4096) > 0;
        if repeats {
            for known in reached.names.iter().filter(|known| *known != name) {
                if let Ok(content) = fs::read(self.directory.join(known)) {
                    put_file(&mut changes, known, &content);
                }
            }
        }
        put_file(&mut changes, name, content.as_bytes());
        let cleaned = if repeats { Cleaned::WHOLE } else { Cleaned::default() };
        let Shipped::Done(position) = self.shipping.ship(&changes, cleaned) else {
            return Err(StoreError::Unavailable("this home belongs to another gateway now".to_owned()));
        };
        write()?;
        reached.names.insert(name.to_owned());
        reached.position = Some(position);
        reached.write(&self.directory)
    }
}

/// Files that are kept by the records of another process.
pub(super) struct FilesCopy {
    directory: PathBuf,
    reached: FilesReached,
}

impl FilesCopy {
    pub(super) fn open(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), reached: FilesReached::read(directory) }
    }

    pub(super) fn position(&self) -> Option<Position> {
        self.reached.position
    }

    /// Makes a record's changes. False if they are not of files.
    pub(super) fn apply(&mut self, position: Position, changes: &[u8]) -> Result<bool, StoreError> {
        let mut input = Input(changes);
        while !input.0.is_empty() {
            let file = input.bytes().zip(input.bytes());
            let file = file.and_then(|(name, content)| {
                Some((std::str::from_utf8(name).ok()?, std::str::from_utf8(content).ok()?))
            });
            let Some((name, content)) = file.filter(|(name, _)| is_name(name)) else { return Ok(false) };
            if self.reached.names.len() >= MOST && !self.reached.names.contains(name) {
                return Ok(false);
            }
            replace_file(&self.directory, name, content)?;
            self.reached.names.insert(name.to_owned());
        }
        self.reached.position = Some(position);
        self.reached.write(&self.directory)?;
        Ok(true)
    }

    pub(super) fn clear(&mut self) -> io::Result<()> {
        for name in std::mem::take(&mut self.reached).names.iter().map(String::as_str).chain([NAME]) {
            match fs::remove_file(self.directory.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Forgets the place of a directory's files in the ledger, and keeps them.
pub(super) fn forget(directory: &Path) -> io::Result<()> {
    match fs::remove_file(directory.join(NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Gives `into` the files of a directory that was not in a cluster, as the changes of one record.
pub(super) fn export(
    directory: &Path,
    names: &[&str],
    into: impl FnOnce(&[u8]) -> io::Result<Position>,
) -> Result<(), StoreError> {
    let failed = |error: io::Error| StoreError::Unavailable(format!("{}: {error}", directory.display()));
    let (mut changes, mut reached) = (Vec::new(), FilesReached::default());
    for name in names {
        match fs::read(directory.join(name)) {
            Ok(content) => {
                put_file(&mut changes, name, &content);
                reached.names.insert((*name).to_owned());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
    if changes.is_empty() {
        return Ok(());
    }
    reached.position = Some(into(&changes).map_err(failed)?);
    reached.write(directory)
}
