//! The directory that holds everything the gateway keeps on disk, locked against a second process.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::StoreError;

/// An existing data directory, locked for this process until the last handle is dropped.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Creates the directory if needed and locks it. Fails after a second if another process has it: one that is about to
    /// end may take a moment. Blocks.
    pub fn open(path: &Path) -> Result<Arc<Self>, StoreError> {
        let failed = |what: &str, e: &dyn std::fmt::Display| {
            StoreError::Unavailable(format!("cannot {what} data directory {}: {e}", path.display()))
        };
        fs::create_dir_all(path).map_err(|e| failed("create", &e))?;
        let mut lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path.join("lock"))
            .map_err(|e| failed("lock", &e))?;
        match lock_soon(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                let _ = (&lock).take(20).read_to_string(&mut owner);
                return Err(StoreError::Unavailable(format!(
                    "data directory {} is in use by another process (pid {}); give each gateway its own",
                    path.display(),
                    owner.trim()
                )));
            }
            Err(TryLockError::Error(e)) => return Err(failed("lock", &e)),
        }
        // The process id is for people; a failure to write it loses nothing.
        let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
        Ok(Arc::new(Self { path: path.to_owned(), _lock: lock }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Tries for a second.
fn lock_soon(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..20 {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(50)),
            result => return result,
        }
    }
    lock.try_lock()
}

/// Makes created and renamed files of `directory` durable.
pub(super) fn sync_directory(directory: &Path) -> std::io::Result<()> {
    File::open(directory)?.sync_all()
}
