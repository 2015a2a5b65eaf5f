//! The file of tokens on disk: read whole, changed by replacing it.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use access::backends::Tokens;
use edge::replace::{replace, target};
use thiserror::Error;

/// Largest file.
const MOST_BYTES: u64 = 16 << 20;

/// Error that left the file unchanged.
#[derive(Debug, Error)]
pub enum FileError {
    /// None is configured.
    #[error("no file of tokens is configured; set backends.tokens")]
    None,
    /// The file cannot be read or written.
    #[error("{action} {}: {error}; check the path and its permissions", .path.display())]
    Io {
        /// Verb of the failed attempt.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// Lines of it are wrong.
    #[error("{}", .0.join("\n"))]
    Lines(Vec<String>),
}

/// Time that another process may hold the lock; a change takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// Locks, unless another process does not let go.
fn lock(folder: &File) -> io::Result<()> {
    for _ in 0..PATIENCE.as_millis() / PAUSE.as_millis() {
        match folder.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn text(path: &Path) -> Result<String, FileError> {
    let failed = |error| FileError::Io { action: "read", path: path.to_owned(), error };
    match fs::metadata(path) {
        Ok(meta) if meta.len() > MOST_BYTES => {
            Err(failed(io::Error::other(format!("larger than {MOST_BYTES} bytes"))))
        }
        Ok(_) => fs::read_to_string(path).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(failed(error)),
    }
}

fn parse(path: &Path, text: &str) -> Result<Tokens, Vec<String>> {
    let told = |error| format!("{}: {error}", path.display());
    Tokens::parse(text).map_err(|errors| errors.into_iter().map(told).collect())
}

/// The tokens in it; none if it is not there.
///
/// # Errors
/// A text for each thing that is wrong.
pub fn read(path: &Path) -> Result<Tokens, Vec<String>> {
    let text = text(path).map_err(|error| vec![error.to_string()])?;
    parse(path, &text)
}

/// Replaces its text by the result of `edit`, on disk when this returns, and returns the tokens in it then. Nobody sees
/// half of a change, and two at once come one after the other.
///
/// # Errors
/// The errors of `edit`, and of the file; then nothing has changed.
pub fn edit<E: From<FileError>>(
    path: &Path,
    edit: impl FnOnce(&str) -> Result<String, E>,
) -> Result<Tokens, E> {
    let failed = |action| move |error| FileError::Io { action, path: path.to_owned(), error };
    // Processes that come by another link must take the same lock.
    let path = &*target(path).map_err(failed("find"))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // The file itself is replaced, so its folder is what can be locked.
    let folder = File::open(folder).map_err(failed("open the folder of"))?;
    lock(&folder).map_err(failed("lock the folder of"))?;
    let old = text(path)?;
    parse(path, &old).map_err(FileError::Lines)?;
    let new = edit(&old)?;
    let tokens = parse(path, &new).map_err(FileError::Lines)?;
    replace(path, &new).map_err(failed("write"))?;
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_change_replaces_the_file_and_a_refused_one_leaves_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        assert!(read(&path).unwrap().list().is_empty(), "a file that is not there");
        let write = |text: &str| edit(&path, |_| Ok::<_, FileError>(text.to_owned()));
        write("# one\n").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        write("# two\n").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640, "as it was");
        assert!(matches!(write("nonsense\n"), Err(FileError::Lines(lines)) if lines[0].contains("line 1")));
        assert!(matches!(edit(&path, |_| Err(FileError::None)), Err(FileError::None)));
        assert_eq!(fs::read_to_string(&path).unwrap(), "# two\n");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        fs::write(&path, "nonsense\n").unwrap();
        assert!(matches!(write(""), Err(FileError::Lines(_))), "what is broken is mended by hand first");
        let away = dir.path().join("none/tokens");
        assert!(matches!(edit(&away, |_| Err(FileError::None)), Err(FileError::Io { .. })));
    }

    /// Rules out that one of two changes at once is lost, also by way of a link.
    #[test]
    fn changes_at_once_are_all_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        fs::create_dir(dir.path().join("links")).unwrap();
        let link = dir.path().join("links/tokens");
        symlink(&path, &link).unwrap();
        thread::scope(|scope| {
            for number in 0..8 {
                let path = if number % 2 == 0 { &path } else { &link };
                scope.spawn(move || {
                    let add = |text: &str| Ok::<_, FileError>(format!("{text}# {number}\n"));
                    (0..10).for_each(|_| drop(edit(path, add).unwrap()));
                });
            }
        });
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 80);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
