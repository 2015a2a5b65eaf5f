//! Tools of an operator for a data directory: check every record, compact, back up.

mod convert;
#[cfg(test)]
mod convert_tests;
mod export;
mod file;
mod import;
#[cfg(test)]
mod tests;

use std::{fs, io, path::Path, sync::Arc, thread, time::Duration};

use heed::{CompactionOption, Env, WithoutTls, types::Bytes};

use super::{
    earlier, format,
    open::{Existing, existing, in_use},
    record, records,
    state::{queues::audit, sessions},
};
use store::encoding::message;
use store::{DataDir, StoreError, sync_directory};

pub use convert::{ConversionRoom, conversion_room, convert};
pub use export::export;
pub use import::import;

/// Returns whether a record is sound, by key and value.
type Sound = fn(&[u8], &[u8]) -> bool;

/// A table: its name, whether it holds [records](StoreReport::records), and what is sound in it.
type Checked = (&'static str, bool, Sound);

/// Folders and their tables.
const STORES: &[(&str, &[Checked])] = &[
    (
        "latest",
        &[
            ("latest", true, |_, value| record::decode_value(value).is_some()),
            ("newest", false, |_, value| record::decode_head(value).is_some()),
        ],
    ),
    (
        // Also whether the tables of queues fit each other: see `audit`.
        "state",
        &[
            ("sessions", true, |key, value| sessions::session(key, value).is_some()),
            ("subscriptions", true, |key, value| sessions::subscription(key, value).is_some()),
            ("shared_groups", true, |key, value| sessions::group(key, value).is_some()),
            ("retained", true, |_, value| message::decode(value).is_some()),
        ],
    ),
    (
        "records",
        &[
            ("answers", false, |_, value| records::is_sound(value)),
            ("scheduled", false, |_, value| records::is_sound(value)),
            ("commands", false, |_, value| records::is_sound(value)),
            ("groups", true, |_, value| records::is_sound(value)),
            ("shadows", true, |key, value| records::shadow(key, value).is_some()),
        ],
    ),
];

/// Most tables of one environment, with room for those of newer versions.
const TABLES: u32 = 32;

/// Progress of a check, a copy, an export or an import. A file is verified before it is read: pages come first then.
#[derive(Debug, Clone, Copy)]
pub struct ToolProgress {
    /// Folder of the store.
    pub store: &'static str,
    /// Pages verified or records done; bytes of a copy or of the file that is imported.
    pub done: u64,
    /// Number of pages, records or bytes in all.
    pub total: u64,
}

/// Findings in one store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreReport {
    /// Folder of the store.
    pub store: &'static str,
    /// Records, as an export has one line for each: sessions, subscriptions, shared groups, messages and their places
    /// in queues, packet identifiers, retained messages, latest values. What the store keeps besides them, to find them
    /// again, is looked at but not counted. A check counts damaged ones, too; an export and an import those they wrote.
    pub records: u64,
    /// Number of damaged records, and of notes that do not fit them.
    pub damaged: u64,
    /// Bytes of the data file; after compaction those of the new one.
    pub bytes: u64,
    /// Why it could not be read to its end.
    pub problem: Option<String>,
}

/// Looks at every record of every store in the data directory; changes nothing. Stores that are absent are left out.
///
/// # Errors
/// If the directory is not there, is in use by a gateway, or cannot be read.
pub fn check(path: &Path, progress: &mut dyn FnMut(ToolProgress)) -> Result<Vec<StoreReport>, StoreError> {
    let directory = own(path)?;
    let mut reports = Vec::new();
    for &(store, tables) in STORES {
        let folder = directory.path().join(store);
        let mut report = StoreReport { store, records: 0, damaged: 0, bytes: size(&folder), problem: None };
        match existing(&folder, store, TABLES, &mut |done, total| {
            progress(ToolProgress { store, done, total })
        }) {
            Ok(Existing::Absent) => continue,
            Ok(Existing::Damaged(reason)) => report.problem = Some(reason),
            Ok(Existing::Sound(env)) => {
                let result = check_tables(&env, tables, &mut report, progress);
                close(env);
                report.problem = result.unwrap_or_else(|e| Some(e.to_string()));
            }
            Err(e) => report.problem = Some(e.to_string()),
        }
        reports.push(report);
    }
    Ok(reports)
}

/// Looks at all records. Returns why it could not, if so.
fn check_tables(
    env: &Env<WithoutTls>,
    tables: &[Checked],
    report: &mut StoreReport,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<Option<String>, heed::Error> {
    /// Records between two reports of progress.
    const STEP: u64 = 10_000;

    let txn = env.read_txn()?;
    if let Some(problem) = format::problem(report.store, env, &txn)? {
        return Ok(Some(problem));
    }
    let mut found = Vec::new();
    let mut total = 0;
    for &(name, records, sound) in tables {
        if let Some(table) = env.open_database::<Bytes, Bytes>(&txn, Some(name))? {
            total += if records { table.len(&txn)? } else { 0 };
            found.push((table, records, sound));
        }
    }
    let queues = if report.store == "state" { audit::tables(env, &txn)? } else { None };
    if let Some(queues) = &queues {
        total += audit::records(queues, &txn)?;
    }
    let mut seen = |sound: bool| {
        report.records += 1;
        report.damaged += u64::from(!sound);
        if report.records.is_multiple_of(STEP) {
            progress(ToolProgress { store: report.store, done: report.records, total });
        }
    };
    let mut misfits = 0;
    for (table, records, sound) in found {
        for entry in table.iter(&txn)? {
            let (key, value) = entry?;
            match records {
                true => seen(sound(key, value)),
                false => misfits += u64::from(!sound(key, value)),
            }
        }
    }
    if let Some(queues) = &queues {
        misfits += audit::audit(queues, &txn, &mut seen)?;
    }
    report.damaged += misfits;
    progress(ToolProgress { store: report.store, done: report.records, total });
    Ok(None)
}

/// Writes every store anew without free space. Each is replaced in one step, once its copy is durable; ended at any
/// moment, every store is as it was or compacted.
///
/// # Errors
/// If the directory is not there, is in use by a gateway, or a store is damaged, was written by a newer version or cannot be
/// written; those before it are compacted then.
pub fn compact(path: &Path, progress: &mut dyn FnMut(ToolProgress)) -> Result<Vec<StoreReport>, StoreError> {
    let directory = own(path)?;
    let mut reports = Vec::new();
    for &(store, _) in STORES {
        let folder = directory.path().join(store);
        let copy = folder.join("data.mdb.compacting");
        let mut verifying = |done, total| progress(ToolProgress { store, done, total });
        let found = existing(&folder, store, TABLES, &mut verifying).map_err(|e| failed(store, &e))?;
        if !copy_store(store, found, &copy, progress)? {
            continue;
        }
        let replace = || -> io::Result<()> {
            fs::rename(&copy, folder.join("data.mdb"))?;
            sync_directory(&folder)?;
            // The lock file names transactions of the old file.
            match fs::remove_file(folder.join("lock.mdb")) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                _ => Ok(()),
            }
        };
        replace().map_err(|e| failed(store, &e))?;
        reports.push(StoreReport { store, records: 0, damaged: 0, bytes: size(&folder), problem: None });
    }
    Ok(reports)
}

/// Copies every store to the same folders below `target`, which must not be there or be empty. Works while a gateway
/// runs: each store is copied as it is at one moment, though not all at the same. A gateway starts from the copy.
///
/// # Errors
/// If there is no data directory, the target is not empty, or a store is damaged, was written by a newer version or cannot be
/// copied; the target is empty then.
pub fn backup(
    path: &Path,
    target: &Path,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<Vec<StoreReport>, StoreError> {
    let unusable = |e: &dyn std::fmt::Display| {
        StoreError::Unavailable(format!("cannot use {} for a backup: {e}", target.display()))
    };
    exists(path)?;
    earlier::check(path)?;
    fs::create_dir_all(target).map_err(|e| unusable(&e))?;
    // While nobody else has it, the files can be looked at before they are mapped.
    let owned = DataDir::open(path).ok();
    if fs::read_dir(target).map_err(|e| unusable(&e))?.next().is_some() {
        return Err(unusable(&"it is not empty"));
    }
    copy_all(path, target, owned.is_some(), progress).inspect_err(|_| empty(target))
}

/// Removes what an unfinished backup left: a gateway would start from it.
fn empty(target: &Path) {
    for entry in fs::read_dir(target).into_iter().flatten().flatten() {
        let path = entry.path();
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

fn copy_all(
    path: &Path,
    target: &Path,
    owned: bool,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<Vec<StoreReport>, StoreError> {
    let unusable = |e: &dyn std::fmt::Display| {
        StoreError::Unavailable(format!("cannot use {} for a backup: {e}", target.display()))
    };
    let mut reports = Vec::new();
    for &(store, _) in STORES {
        let to = target.join(store);
        let from = path.join(store);
        let found = match owned {
            true => existing(&from, store, TABLES, &mut |done, total| {
                progress(ToolProgress { store, done, total })
            }),
            false => in_use(&from, TABLES),
        };
        let found = found.map_err(|e| failed(store, &e))?;
        fs::create_dir_all(&to).map_err(|e| failed(store, &e))?;
        let copied = copy_store(store, found, &to.join("data.mdb"), progress)?;
        if copied {
            sync_directory(&to).map_err(|e| failed(store, &e))?;
            reports.push(StoreReport { store, records: 0, damaged: 0, bytes: size(&to), problem: None });
        } else {
            fs::remove_dir(&to).map_err(|e| failed(store, &e))?;
        }
    }
    // After the groups: none of them may be further than its log.
    let (from, to) = (path.join("log"), target.join("log"));
    if let Some(bytes) = segment_log::copy(&from, &to)? {
        reports.push(StoreReport { store: "log", records: 0, damaged: 0, bytes, problem: None });
    }
    // Files that a gateway keeps beside the stores: the mark below which no version is used again.
    for entry in fs::read_dir(path).map_err(|e| unusable(&e))? {
        let entry = entry.map_err(|e| unusable(&e))?;
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name() != "lock" {
            fs::copy(entry.path(), target.join(entry.file_name())).map_err(|e| unusable(&e))?;
        }
    }
    // This file marks a data directory.
    fs::write(target.join("lock"), "").map_err(|e| unusable(&e))?;
    sync_directory(target).map_err(|e| unusable(&e))?;
    Ok(reports)
}

/// Between two reports of a copy's progress.
const REPORT: Duration = Duration::from_millis(100);

/// Writes a compacted, durable copy of a store to `file`. False if there is none.
fn copy_store(
    store: &'static str,
    found: Existing,
    file: &Path,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<bool, StoreError> {
    let env = match found {
        Existing::Absent => return Ok(false),
        Existing::Damaged(reason) => return Err(StoreError::Damaged(format!("{store}: {reason}"))),
        Existing::Sound(env) => env,
    };
    if let Some(problem) = newer(store, &env).map_err(|e| failed(store, &e))? {
        close(env);
        return Err(StoreError::Format(problem));
    }
    let total = size(env.path());
    let copied = thread::scope(|scope| {
        let copying = scope.spawn(|| env.copy_to_path(file, CompactionOption::Enabled));
        while !copying.is_finished() {
            let done = fs::metadata(file).map_or(0, |file| file.len());
            progress(ToolProgress { store, done: done.min(total), total });
            thread::sleep(REPORT);
        }
        progress(ToolProgress { store, done: total, total });
        copying.join()
    });
    close(env);
    let copied = copied.map_err(|_| StoreError::Unavailable(format!("{store}: the copy did not end")))?;
    let copied = copied.map_err(|e| failed(store, &e))?;
    copied.sync_all().map_err(|e| failed(store, &e))?;
    Ok(true)
}

fn newer(store: &str, env: &Env<WithoutTls>) -> Result<Option<String>, heed::Error> {
    format::newer(store, env, &env.read_txn()?)
}

/// Locks an existing data directory of this version.
fn own(path: &Path) -> Result<Arc<DataDir>, StoreError> {
    let directory = own_any(path)?;
    earlier::check(path)?;
    Ok(directory)
}

/// Locks an existing data directory of any version.
fn own_any(path: &Path) -> Result<Arc<DataDir>, StoreError> {
    exists(path)?;
    DataDir::open(path)
}

fn exists(path: &Path) -> Result<(), StoreError> {
    if path.join("lock").is_file() {
        return Ok(());
    }
    Err(StoreError::Unavailable(format!("{} is not a data directory: it has no file `lock`", path.display())))
}

fn close(env: Env<WithoutTls>) {
    env.prepare_for_closing().wait();
}

fn size(folder: &Path) -> u64 {
    fs::metadata(folder.join("data.mdb")).map_or(0, |data| data.len())
}

fn failed(store: &str, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Unavailable(format!("{store}: {error}"))
}
