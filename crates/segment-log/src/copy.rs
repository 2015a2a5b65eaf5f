//! A backup of the log, also while a gateway runs.

use std::{fs, io, path::Path};

use super::open::refuse_newer;
use store::{StoreError, sync_directory};

/// Copies the log in the folder `from` to `to`, durably, and returns its bytes; `None` if there is no log. What is appended
/// meanwhile may be in it in part, as after a crash; what is trimmed meanwhile may be missing at its front.
///
/// # Errors
/// [`StoreError::Format`] if a newer version wrote any of it; nothing is copied then.
pub fn copy(from: &Path, to: &Path) -> Result<Option<u64>, StoreError> {
    if !from.is_dir() {
        return Ok(None);
    }
    refuse_newer(from)?;
    let copied = copy_files(from, to).map_err(|e| StoreError::Unavailable(format!("log: {e}")))?;
    Ok(Some(copied))
}

fn copy_files(from: &Path, to: &Path) -> io::Result<u64> {
    let mut names: Vec<_> =
        fs::read_dir(from)?.map(|entry| entry.map(|entry| entry.file_name())).collect::<Result<_, _>>()?;
    // By their offsets: what is missing is then before all that is copied.
    names.sort();
    fs::create_dir_all(to)?;
    let mut bytes = 0;
    for name in names {
        let is_log =
            name == "log" || Path::new(&name).extension().is_some_and(|extension| extension == "log");
        if !is_log {
            continue;
        }
        match fs::copy(from.join(&name), to.join(&name)) {
            Ok(copied) => bytes += copied,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        }
        fs::File::open(to.join(&name))?.sync_all()?;
    }
    sync_directory(to)?;
    Ok(bytes)
}
