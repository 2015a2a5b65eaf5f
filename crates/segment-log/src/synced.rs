//! The place up to which the log was synced, in the file `synced`: a log that ends before it is damaged, not torn.
//!
//! The file is written after each sync of a segment, and is itself synced only when the log is closed. So after a power cut it may
//! name an older place, but never one that was not synced.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

const NAME: &str = "synced";
const LENGTH: usize = 20;

/// The open file.
pub(super) struct SyncedMark {
    file: File,
    log: u64,
}

impl SyncedMark {
    /// Opens the mark of the log with this id, or makes one.
    pub(super) fn open(folder: &Path, log: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).mode(0o600).open(folder.join(NAME))?;
        Ok(Self { file, log })
    }

    /// Notes that all before `offset` is synced.
    pub(super) fn note(&self, offset: u64) -> io::Result<()> {
        self.file.write_all_at(&encode(self.log, offset), 0)
    }

    /// Makes the note itself durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// The place up to which the log with this id was synced; 0 if nothing is known of it.
pub(super) fn read(folder: &Path, log: u64) -> u64 {
    let Ok(bytes) = std::fs::read(folder.join(NAME)) else { return 0 };
    let offset = bytes.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
    if bytes == encode(log, offset) { offset } else { 0 }
}

fn encode(log: u64, offset: u64) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[..8].copy_from_slice(&log.to_le_bytes());
    bytes[8..16].copy_from_slice(&offset.to_le_bytes());
    let sum = crc32fast::hash(&bytes[..16]);
    bytes[16..].copy_from_slice(&sum.to_le_bytes());
    bytes
}
