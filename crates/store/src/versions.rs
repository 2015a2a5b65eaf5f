//! Versions of latest values: microseconds of wall time, forced to grow within and across processes.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gateway_core::Timestamp;
use parking_lot::Mutex;

use super::{DataDir, StoreError};

/// Distance of the ceiling on disk ahead of the newest version, in microseconds.
const RESERVE: u64 = 10_000_000;

/// Returns the offset of this gateway's versions in each millisecond, in microseconds: gateways that share a store hardly ever
/// give two values of one topic the same version.
pub fn version_offset(server_id: &str) -> u64 {
    u64::from(crc32fast::hash(server_id.as_bytes()) % 1000)
}

/// Gives out versions: max(wall clock + offset, last + 1).
#[derive(Debug)]
pub struct VersionClock {
    last: AtomicU64,
    offset: u64,
}

impl VersionClock {
    /// A clock whose versions are all above `start`; see [`version_offset`].
    pub fn new(start: u64, offset: u64) -> Self {
        Self { last: AtomicU64::new(start), offset }
    }

    /// The next version at wall time `now`.
    pub fn next(&self, now: Timestamp) -> u64 {
        let wall = now.0.saturating_mul(1000).saturating_add(self.offset);
        let mut last = self.last.load(Relaxed);
        loop {
            let next = wall.max(last.saturating_add(1));
            match self.last.compare_exchange_weak(last, next, Relaxed, Relaxed) {
                Ok(_) => return next,
                Err(seen) => last = seen,
            }
        }
    }

    /// The last version given out.
    pub fn last(&self) -> u64 {
        self.last.load(Relaxed)
    }
}

/// The ceiling of versions in the data directory (file `versions`).
///
/// No version above the ceiling is ever written to a store, so a process that starts its clock at the
/// ceiling never goes back, whatever its wall clock says.
#[derive(Debug)]
pub struct VersionMark {
    directory: Arc<DataDir>,
    ceiling: AtomicU64,
    writing: Mutex<()>,
}

impl VersionMark {
    /// Reads the ceiling that the process before left. A damaged file is reported and replaced.
    pub fn open(directory: &Arc<DataDir>) -> Result<Self, StoreError> {
        let path = directory.path().join("versions");
        let ceiling = match fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().unwrap_or_else(|_| {
                tracing::error!(path = %path.display(), "version mark is damaged, versions start at wall time");
                0
            }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => 0,
            Err(e) => return Err(StoreError::Unavailable(format!("cannot read {}: {e}", path.display()))),
        };
        Ok(Self {
            directory: Arc::clone(directory),
            ceiling: AtomicU64::new(ceiling),
            writing: Mutex::new(()),
        })
    }

    /// Returns the version above which this process's versions start.
    pub fn ceiling(&self) -> u64 {
        self.ceiling.load(Relaxed)
    }

    /// Raises the ceiling over `version` with room to spare, if it must be. Blocks on the disk.
    pub fn reserve(&self, version: u64) -> Result<(), StoreError> {
        if version <= self.ceiling() {
            return Ok(());
        }
        self.store(version.saturating_add(RESERVE))
    }

    /// At a clean end: lowers the ceiling to the last version in use. Blocks on the disk.
    pub fn settle(&self, last: u64) -> Result<(), StoreError> {
        if last >= self.ceiling() { Ok(()) } else { self.store(last) }
    }

    fn store(&self, ceiling: u64) -> Result<(), StoreError> {
        let _one_at_a_time = self.writing.lock();
        self.directory.replace_file("versions", &format!("{ceiling}\n"))?;
        self.ceiling.store(ceiling, Relaxed);
        Ok(())
    }
}
