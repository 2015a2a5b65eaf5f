//! The directory that holds everything the gateway keeps on disk, locked against a second process.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{Read, Write},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::StoreError;

/// Verification of the embedded stores when they are opened: their files are read page by page before they are used.
#[derive(Debug, Clone, Copy)]
pub struct Verify {
    /// Verify files that were closed cleanly too, however long it takes.
    pub always: bool,
    /// Most time to verify each store; the rest is assumed sound. Zero means no limit.
    pub limit: Duration,
}

impl Default for Verify {
    fn default() -> Self {
        Self { always: false, limit: Duration::from_secs(60) }
    }
}

/// An existing data directory, locked for this process until the last handle is dropped.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    verify: Verify,
    shipping: OnceLock<Arc<dyn FileShipping>>,
    _lock: File,
}

/// Stores files elsewhere before they are replaced in a directory.
pub trait FileShipping: Send + Sync {
    /// Stores the new content of the file `name`, then calls `write`, which replaces it here. Blocks.
    ///
    /// # Errors
    /// As `write`; and if the content may not be stored any more, in which case `write` is not called.
    fn replace(
        &self,
        name: &str,
        content: &str,
        write: &mut dyn FnMut() -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;
}

impl fmt::Debug for dyn FileShipping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileShipping")
    }
}

impl DataDir {
    /// Creates the directory if needed and locks it. Fails after a second if another process has it: one that is about to
    /// end may take a moment. Blocks.
    pub fn open(path: &Path) -> Result<Arc<Self>, StoreError> {
        Self::open_with(path, Verify::default())
    }

    /// As [`Self::open`]; the stores in it are verified as `verify` says.
    pub fn open_with(path: &Path, verify: Verify) -> Result<Arc<Self>, StoreError> {
        let failed = |what: &str, e: &dyn fmt::Display| {
            StoreError::Unavailable(format!("cannot {what} data directory {}: {e}", path.display()))
        };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| refused(path, &error))?;
        warn_if_open_to_others(path);
        let mut lock = OpenOptions::new()
            .create(true)
            .mode(0o600)
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
        Ok(Arc::new(Self { path: path.to_owned(), verify, shipping: OnceLock::new(), _lock: lock }))
    }

    /// Returns the verification of the stores in it.
    pub fn verify(&self) -> Verify {
        self.verify
    }

    /// Replaces the content of the file `name` in it: a crash leaves either the old or the new content. Blocks on the disk, and on
    /// the [`FileShipping`] if there is one.
    ///
    /// # Errors
    /// The file cannot be written; the old content is still there.
    pub fn replace_file(&self, name: &str, content: &str) -> Result<(), StoreError> {
        match self.shipping.get() {
            Some(shipping) => {
                shipping.replace(name, content, &mut || replace_file(self.path(), name, content))
            }
            None => replace_file(self.path(), name, content),
        }
    }

    /// From now on files are stored elsewhere before they are replaced. Once; later calls do nothing.
    pub fn ship_files(&self, shipping: Arc<dyn FileShipping>) {
        let _ = self.shipping.set(shipping);
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Why there is no directory, and what to do.
fn refused(path: &Path, error: &std::io::Error) -> StoreError {
    let file = path.ancestors().find(|part| part.exists()).filter(|part| !part.is_dir());
    let (problem, fix) = match file {
        Some(file) => (format!("{} is a file", file.display()), "or move the file"),
        None => (error.to_string(), "or make its parent writable for this user"),
    };
    let text = format!(
        "cannot create data directory {}: {problem}; name another place with --data-dir, {fix}",
        path.display()
    );
    StoreError::Unavailable(text)
}

/// Warns if other users can read what devices say and what their sessions queue. The permissions of an existing
/// directory stay as they are: its owner may have a reason.
fn warn_if_open_to_others(path: &Path) {
    let Ok(metadata) = fs::metadata(path) else { return };
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        tracing::warn!(
            data_dir = %path.display(),
            mode = format!("{mode:04o}"),
            "other users can open the data directory: chmod 700 {}",
            path.display()
        );
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

/// Replaces the content of the file `name` in `directory`: a crash leaves either the old or the new content. Blocks on
/// the disk.
pub fn replace_file(directory: &Path, name: &str, content: &str) -> Result<(), StoreError> {
    let path = directory.join(name);
    let replace = || {
        let temporary = path.with_extension("new");
        let mut file = File::create(&temporary)?;
        file.write_all(content.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        sync_directory(directory)
    };
    replace()
        .map_err(|e: std::io::Error| StoreError::Unavailable(format!("cannot write {}: {e}", path.display())))
}

/// Makes created and renamed files of `directory` durable.
pub fn sync_directory(directory: &Path) -> std::io::Result<()> {
    File::open(directory)?.sync_all()
}
