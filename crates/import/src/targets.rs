//! The files that an import makes: all of them, whole, or none.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// A file to be made.
pub(super) struct ImportTarget {
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// Only its owner may read it.
    pub(super) secret: bool,
}

/// Makes every file, or none: all places are looked at first, the files are written beside them and get their names when all are
/// whole. A file that is there is never written over.
///
/// # Errors
/// Each place that cannot be used, or what went wrong on the way; no target is left then.
pub(super) fn write_all(targets: &[ImportTarget]) -> Result<(), String> {
    look_at(targets)?;
    let mut drafts = Drafts::default();
    for target in targets {
        let draft = beside(&target.path);
        drafts.0.push(draft.clone());
        write_draft(&draft, target)
            .map_err(|error| format!("write {}: {error}; nothing was written", target.path.display()))?;
    }
    let mut named: Vec<&Path> = Vec::new();
    for (target, draft) in targets.iter().zip(&drafts.0) {
        // Unlike a rename it fails if another process has made the file meanwhile.
        if let Err(error) = fs::hard_link(draft, &target.path) {
            for path in named {
                let _ = fs::remove_file(path);
            }
            return Err(format!("{}; nothing was written", refused(&target.path, &error)));
        }
        named.push(&target.path);
    }
    Ok(())
}

fn look_at(targets: &[ImportTarget]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let mut problems = Vec::new();
    for ImportTarget { path, .. } in targets {
        let folder = folder(path);
        if !seen.insert(place(path)) {
            problems.push(format!("{} is named for two files; choose another with --rules", path.display()));
        } else if fs::symlink_metadata(path).is_ok() {
            problems.push(refused(path, &io::ErrorKind::AlreadyExists.into()));
        } else if !folder.is_dir() {
            problems.push(format!("write {}: there is no folder {}", path.display(), folder.display()));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(format!("{}; nothing was written", problems.join("; "))) }
}

fn refused(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AlreadyExists => format!("{} is there already", path.display()),
        _ => format!("write {}: {error}", path.display()),
    }
}

/// One name for each place, however it is written.
fn place(path: &Path) -> PathBuf {
    let folder = folder(path);
    let folder = fs::canonicalize(&folder).unwrap_or(folder);
    path.file_name().map_or_else(|| folder.clone(), |name| folder.join(name))
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.new", std::process::id()))
}

fn write_draft(draft: &Path, target: &ImportTarget) -> io::Result<()> {
    let mode = if target.secret { 0o600 } else { 0o666 };
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(draft)?;
    file.write_all(target.text.as_bytes())?;
    file.sync_all()
}

/// Files that go when this does.
#[derive(Default)]
struct Drafts(Vec<PathBuf>);

impl Drop for Drafts {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}
