//! The file of the audit log.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use edge::reload::Reload;
use parking_lot::Mutex;

/// Target of its events, which pass at any `log.level`.
pub const AUDIT: &str = "audit";

/// A file that is appended to line by line. Reloading opens it anew, so that a program may move it away before.
#[derive(Debug)]
pub struct AuditFile {
    path: PathBuf,
    file: Mutex<File>,
}

impl AuditFile {
    /// Opens the file, or makes it, for the user of the gateway alone.
    ///
    /// # Errors
    /// The system's errors.
    pub(super) fn open(path: &Path) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { path: path.to_owned(), file: Mutex::new(append_to(path)?) }))
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

impl Write for &AuditFile {
    /// Writes all of `line` at once.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.file.lock().write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Reload for AuditFile {
    fn name(&self) -> &'static str {
        "audit log"
    }

    /// None: it changes with every line.
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        // A reader that sees the new file finds in it, and not in the old one, all lines from now on.
        let mut file = self.file.lock();
        *file = append_to(&self.path).map_err(|error| {
            vec![format!("open {}: {error}; check the path and its permissions", self.path.display())]
        })?;
        Ok(self.path.display().to_string())
    }
}
