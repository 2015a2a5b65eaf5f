//! State in which the last process left a store: the file `state` in its folder.
//!
//! A store whose last process closed it, and whose file nobody has changed since, need not be verified whole. The file
//! names length and time of the data file, so that whatever came after makes it untrue by itself.
//!
//! The file `format` repeats the format of the data file, for the case that the page with the note of it is damaged.

use std::{
    fs::{self, File, Metadata},
    io::{self, Write as _},
    path::Path,
    time::UNIX_EPOCH,
};

const STATE: &str = "state";
const FORMAT: &str = "format";
const OPEN: &str = "open";
const SUSPECT: &str = "suspect";

/// State in which a store was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShutdownState {
    /// Closed, and not changed since.
    Clean,
    /// Open, or changed since, or by a version that did not say.
    Unclean,
    /// The process met damage in it.
    Suspect,
}

/// Returns the state in which the store in `folder` was left.
pub(super) fn left(folder: &Path) -> ShutdownState {
    let Ok(text) = fs::read(folder.join(STATE)) else { return ShutdownState::Unclean };
    let closed = closed(folder).is_some_and(|closed| closed.as_bytes() == text.trim_ascii());
    match text.trim_ascii() {
        _ if closed => ShutdownState::Clean,
        text if text == SUSPECT.as_bytes() => ShutdownState::Suspect,
        _ => ShutdownState::Unclean,
    }
}

/// Returns whether a process had a store in `folder` before.
pub(super) fn was_used(folder: &Path) -> bool {
    [STATE, "reserve"].iter().any(|name| folder.join(name).exists())
}

/// A process has the store from now on. Durable: after a power cut it must not look closed.
pub(super) fn opened(folder: &Path) {
    note(folder, OPEN);
}

/// The store met damage, or something that looks like it: it is verified whole at the next start.
pub(super) fn suspected(folder: &Path) {
    note(folder, SUSPECT);
}

/// Nothing is written from now on.
pub(super) fn was_closed(folder: &Path) {
    if left(folder) != ShutdownState::Suspect
        && let Some(closed) = closed(folder)
    {
        note(folder, &closed);
    }
}

/// Forgets what was known of the file that was in `folder`.
pub(super) fn forget(folder: &Path) {
    let _ = fs::remove_file(folder.join(STATE));
}

/// Returns the format of the store in `folder`, if it was noted.
pub(super) fn format(folder: &Path) -> Option<u32> {
    fs::read_to_string(folder.join(FORMAT)).ok()?.trim().parse().ok()
}

/// Notes the format of the store in `folder`.
pub(super) fn note_format(folder: &Path, format: u32) {
    if self::format(folder) != Some(format) {
        write(folder, FORMAT, &format.to_string());
    }
}

fn note(folder: &Path, text: &str) {
    write(folder, STATE, text);
}

/// Writes `text`; where that fails, on a full disk, leaves no file: as good as [`OPEN`], and as a format that nobody noted.
fn write(folder: &Path, name: &str, text: &str) {
    let write = || -> io::Result<()> {
        let mut file = File::create(folder.join(name))?;
        writeln!(file, "{text}")?;
        file.sync_data()
    };
    if let Err(error) = write() {
        tracing::debug!(folder = %folder.display(), name, %error, "cannot note how the store is left");
        let _ = fs::remove_file(folder.join(name));
    }
}

fn closed(folder: &Path) -> Option<String> {
    let (length, changed) = stamp(folder)?;
    Some(format!("closed {length} {changed}"))
}

/// Returns length and time of change of the data file in `folder`, which another change makes others.
pub(super) fn stamp(folder: &Path) -> Option<(u64, u128)> {
    let data = fs::metadata(folder.join("data.mdb")).ok()?;
    Some((data.len(), changed(&data)?))
}

/// Returns the time at which the file was changed, in nanoseconds.
fn changed(data: &Metadata) -> Option<u128> {
    Some(data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos())
}
