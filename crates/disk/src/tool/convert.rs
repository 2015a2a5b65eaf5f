//! A data directory of an earlier version, with an environment for each store, as one of this version: `state` and `records`.
//!
//! The new environments grow beside the old ones, in `converting`, table by table. Nothing is done twice after a kill: the last key
//! of a table says how far it is. The new name `converted` is the point at which the conversion counts; from then on the old
//! environments are only moved away, into `before-conversion`, and the new ones to their places.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    ops::Bound,
    path::Path,
    sync::Arc,
};

use heed::{Database, Env, PutFlags, RoTxn, WithoutTls, types::Bytes};

use super::{StoreReport, TABLES, ToolProgress, close, failed, own_any, size};
use crate::{
    earlier::{self, CONVERTED, EARLIER},
    format::{self, META},
    marker,
    open::{self, Existing},
};
use store::{DataDir, StoreError, sync_directory};

/// Bytes of one transaction, about.
const BATCH: usize = if cfg!(test) { 16 << 10 } else { 32 << 20 };

/// A new environment grows here.
const CONVERTING: &str = "converting";
/// A file in there: length and time of the old environments when the conversion began.
const SOURCES: &str = "sources";
/// The old environments, for somebody to remove.
const BEFORE: &str = "before-conversion";

/// Change of a table's keys, which keeps their order.
#[derive(Clone, Copy)]
enum KeyChange {
    /// The old stores stay.
    Same,
    /// A queue at this place had 5 bytes of its number, and has 2 of its home and 6 of its number.
    Queue { at: usize },
}

impl KeyChange {
    /// Bytes of a queue before the five: home 0, and a higher byte of the number.
    const BEFORE: [u8; 3] = [0; 3];

    /// The key of now; `None` if no version wrote such a key.
    fn forward(self, key: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Same => Some(key.to_vec()),
            Self::Queue { at } => {
                let (before, rest) = key.split_at_checked(at)?;
                Some([before, &Self::BEFORE, rest].concat())
            }
        }
    }

    /// The key of then.
    fn back(self, key: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Same => Some(key.to_vec()),
            Self::Queue { at } => {
                let (before, rest) = key.split_at_checked(at)?;
                Some([before, rest.get(Self::BEFORE.len()..)?].concat())
            }
        }
    }
}

/// A table's way. Records stay byte for byte.
struct TableCopy {
    /// Old environment and table.
    from: (&'static str, &'static str),
    table: &'static str,
    keys: KeyChange,
}

const fn copy(folder: &'static str, from: &'static str, table: &'static str, keys: KeyChange) -> TableCopy {
    TableCopy { from: (folder, from), table, keys }
}

/// The environments of this version, and where their tables come from.
const COPIES: [(&str, &[TableCopy]); 2] = [
    (
        "state",
        &[
            copy("sessions", "sessions", "sessions", KeyChange::Same),
            copy("sessions", "subscriptions", "subscriptions", KeyChange::Same),
            copy("sessions", "groups", "shared_groups", KeyChange::Same),
            copy("queues", "bodies", "bodies", KeyChange::Same),
            copy("queues", "refs", "refs", KeyChange::Same),
            copy("queues", "entries", "entries", KeyChange::Queue { at: 0 }),
            copy("queues", "received", "received", KeyChange::Queue { at: 0 }),
            // Behind the second.
            copy("queues", "expiry", "expiry", KeyChange::Queue { at: 5 }),
            copy("retained", "retained", "retained", KeyChange::Same),
        ],
    ),
    (
        "records",
        &[
            copy("publisher", "answers", "answers", KeyChange::Same),
            copy("publisher", "scheduled", "scheduled", KeyChange::Same),
            copy("publisher", "commands", "commands", KeyChange::Same),
            copy("groups", "groups", "groups", KeyChange::Same),
            copy("shadows", "shadows", "shadows", KeyChange::Same),
        ],
    ),
];

/// Bytes that a conversion needs on the disk, and those that are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConversionRoom {
    /// Bytes that it needs, about; what an interrupted one has written counts as written.
    pub needed: u64,
    /// Bytes that are free.
    pub free: u64,
}

/// Says how much room [`convert`] needs; `None` if there is nothing to convert.
///
/// # Errors
/// If the directory is not there, is in use by a gateway, or cannot be read.
pub fn conversion_room(path: &Path) -> Result<Option<ConversionRoom>, StoreError> {
    let directory = own_any(path)?;
    if !earlier::is_earlier(directory.path()) {
        return Ok(None);
    }
    if directory.path().join(CONVERTED).exists() {
        return Ok(Some(ConversionRoom { needed: 0, free: free(&directory)? }));
    }
    let old: u64 = EARLIER.iter().map(|name| size(&directory.path().join(name))).sum();
    let written = COPIES.iter().map(|(name, _)| size(&directory.path().join(CONVERTING).join(name)));
    let needed = old.saturating_sub(written.sum()) + (1 << 20);
    Ok(Some(ConversionRoom { needed, free: free(&directory)? }))
}

fn free(directory: &DataDir) -> Result<u64, StoreError> {
    let found = rustix::fs::statvfs(directory.path()).map_err(|e| failed("data directory", &e))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Makes of a data directory of an earlier version one of this version. Killed at any moment, it goes on when it is called
/// again; until its last step the old environments are untouched.
///
/// # Errors
/// If the directory is not there, is in use by a gateway, or an old environment is damaged or of a version that is not known; if
/// something cannot be written.
pub fn convert(path: &Path, progress: &mut dyn FnMut(ToolProgress)) -> Result<Vec<StoreReport>, StoreError> {
    let directory = own_any(path)?;
    let root = directory.path();
    if !earlier::is_earlier(root) {
        return Ok(Vec::new());
    }
    for (name, _) in COPIES {
        if root.join(name).exists() && !root.join(CONVERTED).exists() {
            let text = format!(
                "{name} is there already, of this version: move it or the stores of the earlier version away"
            );
            return Err(failed("convert", &text));
        }
    }
    if !root.join(CONVERTED).exists() {
        build(&directory, progress)?;
    }
    put_in_place(root).map_err(|e| failed("convert", &e))?;
    Ok(COPIES
        .map(|(store, _)| {
            let bytes = size(&root.join(store));
            StoreReport { store, records: 0, damaged: 0, bytes, problem: None }
        })
        .into())
}

/// Goes on with what an interrupted conversion has written, or begins anew if an earlier version has written to the old environments
/// since.
fn begin(root: &Path, converting: &Path) -> io::Result<()> {
    let sources: String =
        EARLIER.iter().map(|name| format!("{name} {:?}\n", marker::stamp(&root.join(name)))).collect();
    let noted = converting.join(SOURCES);
    if fs::read_to_string(&noted).is_ok_and(|noted| noted == sources) {
        return Ok(());
    }
    match fs::remove_dir_all(converting) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    fs::create_dir(converting)?;
    fs::write(&noted, sources)?;
    File::open(&noted)?.sync_all()?;
    sync_directory(converting)
}

/// Writes the new environments.
fn build(directory: &Arc<DataDir>, progress: &mut dyn FnMut(ToolProgress)) -> Result<(), StoreError> {
    let converting = directory.path().join(CONVERTING);
    begin(directory.path(), &converting).map_err(|e| failed("convert", &e))?;
    for (store, copies) in COPIES {
        let folder = converting.join(store);
        let from: Vec<&'static str> = copies.iter().map(|copy| copy.from.0).collect();
        let bytes: u64 = EARLIER
            .iter()
            .filter(|name| from.contains(name))
            .map(|name| size(&directory.path().join(name)))
            .sum();
        fs::create_dir_all(&folder).map_err(|e| failed(store, &e))?;
        let env = open::create(&folder, bytes, TABLES).map_err(|e| failed(store, &e))?;
        let mut old: Option<(&str, Existing)> = None;
        for copy in copies {
            let name = copy.from.0;
            if old.as_ref().is_none_or(|(known, _)| *known != name) {
                let folder = directory.path().join(name);
                let mut verifying = |done, total| progress(ToolProgress { store: name, done, total });
                let found =
                    open::existing(&folder, name, TABLES, &mut verifying).map_err(|e| failed(name, &e))?;
                close_old(old.replace((name, found)));
            }
            match &old {
                Some((_, Existing::Sound(from))) => {
                    check_format(name, from)?;
                    copy_table(store, from, copy, &env, progress).map_err(|e| failed(name, &e))?;
                }
                Some((_, Existing::Damaged(reason))) => {
                    let fix =
                        "start the version that wrote it once, which sets it aside, or move its folder away";
                    return Err(StoreError::Damaged(format!("{name}: {reason}; {fix}")));
                }
                _ => {}
            }
        }
        close_old(old);
        let finish = || -> Result<(), heed::Error> {
            let mut txn = env.write_txn()?;
            let meta: Database<Bytes, Bytes> = env.create_database(&mut txn, Some(META))?;
            format::note(format::newest(format::upgrades(store)))
                .iter()
                .try_for_each(|(key, value)| meta.put(&mut txn, key, value))?;
            txn.commit()
        };
        finish().map_err(|e| failed(store, &e))?;
        close(env);
        sync_directory(&folder).map_err(|e| failed(store, &e))?;
    }
    let commit = || {
        fs::remove_file(converting.join(SOURCES))?;
        sync_directory(&converting)?;
        fs::rename(&converting, directory.path().join(CONVERTED))?;
        sync_directory(directory.path())
    };
    commit().map_err(|e| failed("convert", &e))
}

fn close_old(old: Option<(&str, Existing)>) {
    if let Some((_, Existing::Sound(env))) = old {
        close(env);
    }
}

/// All versions before this one had format 1.
fn check_format(name: &str, env: &Env<WithoutTls>) -> Result<(), StoreError> {
    let found = env.read_txn().and_then(|txn| format::found(env, &txn)).map_err(|e| failed(name, &e))?;
    match found {
        None | Some(1) => Ok(()),
        Some(found) => {
            Err(StoreError::Format(format!("{name} have format {found}, which this version cannot convert")))
        }
    }
}

/// Copies what is missing of a table.
fn copy_table(
    store: &'static str,
    from: &Env<WithoutTls>,
    copy: &TableCopy,
    into: &Env<WithoutTls>,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<(), heed::Error> {
    let txn = from.read_txn()?;
    let Some(old) = from.open_database::<Bytes, Bytes>(&txn, Some(copy.from.1))? else { return Ok(()) };
    let total = old.len(&txn)?;
    loop {
        let mut write = into.write_txn()?;
        let new: Database<Bytes, Bytes> = into.create_database(&mut write, Some(copy.table))?;
        let last = new.last(&write)?.map(|(key, _)| key.to_vec());
        let mut bytes = 0;
        for entry in behind(&old, &txn, last.as_deref(), copy.keys)? {
            let (key, value) = entry?;
            // No version wrote such a key.
            let Some(key) = copy.keys.forward(key) else { continue };
            new.put_with_flags(&mut write, PutFlags::APPEND, &key, value)?;
            bytes += key.len() + value.len();
            if bytes >= BATCH {
                break;
            }
        }
        let done = new.len(&write)?;
        write.commit()?;
        progress(ToolProgress { store, done, total });
        if bytes < BATCH {
            return Ok(());
        }
    }
}

/// Entries of a table behind the one that is `last` in the new one.
fn behind<'t>(
    old: &Database<Bytes, Bytes>,
    txn: &'t RoTxn<'_, WithoutTls>,
    last: Option<&[u8]>,
    keys: KeyChange,
) -> Result<heed::RoRange<'t, Bytes, Bytes>, heed::Error> {
    let last = last.and_then(|key| keys.back(key));
    let begin = last.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
    old.range(txn, &(begin, Bound::Unbounded))
}

/// Moves the old environments away and the new ones to their places, as far as that is not done.
fn put_in_place(root: &Path) -> io::Result<()> {
    let (before, converted) = (root.join(BEFORE), root.join(CONVERTED));
    fs::create_dir_all(&before)?;
    for name in EARLIER {
        rename(&root.join(name), &before.join(name))?;
    }
    for (name, _) in COPIES {
        rename(&converted.join(name), &root.join(name))?;
    }
    sync_directory(&before)?;
    sync_directory(root)?;
    earlier::refuse(root).map_err(io::Error::other)?;
    match fs::remove_dir(&converted) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    sync_directory(root)
}

/// Renames what is there, unless that was done before.
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        return Ok(());
    }
    match fs::rename(from, to) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
