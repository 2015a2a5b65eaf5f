//! Opening and growing an LMDB environment; a damaged file is set aside.
#![expect(unsafe_code, reason = "heed marks opening and resizing a memory map unsafe; nothing else here is")]

use std::{
    fs::{self, OpenOptions},
    io::{self, ErrorKind, Write as _},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use heed::{Env, EnvFlags, EnvOpenOptions, MdbError, WithoutTls};

use lmdb_0_9_pages::{Look, Terms, look, verify};

use super::{
    carry::{self, CarriedOver},
    format,
    marker::{self, ShutdownState},
};
use store::{DataDir, StoreError, Verify};

/// Readers at once; the read pool is far smaller.
const MAX_READERS: u32 = 126;

/// A smaller file is always verified: that takes no longer than reading what a start reads anyway.
const SMALL: u64 = 64 << 20;

/// Between two lines of the log about a verification.
const REPORT: Duration = Duration::from_secs(5);

/// Room taken for LMDB's lock file before it is mapped, as LMDB ends the process if the disk has no room for it. More
/// than its readers need.
const LOCK_FILE: u64 = 16 << 10;

/// An environment, and what had to be moved out of its way.
pub(super) struct OpenedEnvironment {
    pub(super) env: Env<WithoutTls>,
    pub(super) damage: Option<FoundDamage>,
}

/// Damage that was found at open.
pub(super) struct FoundDamage {
    /// Path of the damaged file: its new place, or its old one if it is gone.
    pub(super) set_aside: PathBuf,
    /// Tables of which nothing was carried over; `None` are all.
    pub(super) lost_tables: Option<Vec<&'static str>>,
}

/// Opens the environment in the folder `name` of `directory`, creating it if absent.
///
/// A damaged file is renamed to `data.mdb.damaged-<Unix seconds>` with an error in the log, and one with its parts that are whole is
/// opened, see [`carry`]. A file that is gone is damage, too: an error in the log names it.
pub(super) fn open(
    directory: &DataDir,
    name: &str,
    map_size: usize,
    databases: u32,
) -> Result<OpenedEnvironment, StoreError> {
    let path = directory.path().join(name);
    let failed = |e: &dyn std::fmt::Display| {
        StoreError::Unavailable(format!("cannot open the store in {}: {e}", path.display()))
    };
    fs::create_dir_all(&path).map_err(|e| failed(&e))?;
    carry::go_on(&path).map_err(|e| failed(&e))?;
    let mut damage = None;
    let found = examine(&path, name, directory.verify()).map_err(|e| failed(&e))?;
    if let Some(reason) = found {
        damage = Some(set_aside(&path, name, &reason).map_err(|e| failed(&e))?);
    } else if is_gone(&path).map_err(|e| failed(&e))? {
        damage = Some(tell_gone(&path).map_err(|e| failed(&e))?);
    }
    take_room(&path.join("lock.mdb")).map_err(|e| failed(&e))?;
    let env = match map(&path, map_size, databases) {
        Err(e) if is_damage(&e) => {
            let lost = CarriedOver { lost: vec![e.to_string()], ..CarriedOver::default() };
            let aside = quarantine(&path, "LMDB refuses it", &lost).map_err(|e| failed(&e))?;
            damage = Some(FoundDamage { set_aside: aside, lost_tables: None });
            map(&path, map_size, databases)
        }
        result => result,
    };
    let env = env.map_err(|e| failed(&e))?;
    marker::opened(&path);
    Ok(OpenedEnvironment { env, damage })
}

/// Sets the damaged file of the store `name` in `folder` aside, and puts one with its parts that are whole in its place.
fn set_aside(folder: &Path, name: &str, reason: &str) -> io::Result<FoundDamage> {
    let mut told = now();
    let mut progress = |done: u64, total: u64| {
        if told.elapsed() >= REPORT {
            told = now();
            tracing::info!(store = name, done, total, "reading what is whole of a damaged store");
        }
    };
    let found = carry::carry_over(folder, name, create, &mut progress).map_err(|error| {
        let text = format!(
            "it is damaged ({reason}), and what is whole of it cannot be written to a new file: {error}; \
             make room, or move its file data.mdb away to begin with an empty store"
        );
        io::Error::new(error.kind(), text)
    })?;
    let set_aside = quarantine(folder, reason, &found)?;
    let is_carried = carry::put_in_place(folder)?;
    Ok(FoundDamage { set_aside, lost_tables: is_carried.then_some(found.lost_tables) })
}

/// Returns the damage of the store in `folder`, if there is any.
fn examine(folder: &Path, name: &str, how: Verify) -> io::Result<Option<String>> {
    let file = folder.join("data.mdb");
    let left = marker::left(folder);
    let large = fs::metadata(&file).is_ok_and(|file| file.len() > SMALL);
    let begun = now();
    let found = if left == ShutdownState::Clean && large && !how.always {
        look(&file)?
    } else {
        let limited = !how.always && left != ShutdownState::Suspect && !how.limit.is_zero();
        let mut told = begun;
        let mut progress = |done: u64, total: u64| {
            if told.elapsed() >= REPORT {
                told = now();
                tracing::info!(store = name, done, total, "verifying pages of the store");
            }
        };
        let until = limited.then(|| begun + how.limit);
        verify(&file, Terms { layout: format::layout(name), until, progress: &mut progress })?
    };
    match found {
        Look::Damaged(reason) => return Ok(Some(reason)),
        Look::Empty if marker::was_used(folder) => return Ok(Some("it is empty".to_owned())),
        Look::Unfinished => tracing::warn!(
            store = name,
            took = ?begun.elapsed(),
            "store is so large that only a part of it was verified; start with --verify-store to verify all"
        ),
        Look::Sound if large => tracing::info!(store = name, took = ?begun.elapsed(), "store is sound"),
        Look::Sound | Look::Empty | Look::Absent => {}
    }
    Ok(None)
}

/// Makes the file at least as long as LMDB needs it, without a hole at its end. What is in it stays: a tool may have it
/// open.
fn take_room(path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let missing = LOCK_FILE.saturating_sub(file.metadata()?.len());
    file.write_all(&vec![0; missing as usize])
}

#[expect(
    clippy::disallowed_methods,
    reason = "a verification is bounded in time, and tells how long it took"
)]
fn now() -> Instant {
    Instant::now()
}

/// Returns whether an error of LMDB says that the file is not as LMDB left it.
pub(super) fn is_damage(error: &heed::Error) -> bool {
    use MdbError::{Corrupted, Invalid, PageNotFound, VersionMismatch};
    matches!(error, heed::Error::Mdb(Corrupted | Invalid | PageNotFound | VersionMismatch))
}

/// Creates an environment in `path` for about so many bytes, or opens it.
pub(super) fn create(path: &Path, bytes: u64, databases: u32) -> Result<Env<WithoutTls>, heed::Error> {
    let size = usize::try_from(bytes.saturating_mul(2)).unwrap_or(usize::MAX).max(1 << 20);
    map(path, size.next_multiple_of(1 << 16), databases)
}

fn map(path: &Path, map_size: usize, databases: u32) -> Result<Env<WithoutTls>, heed::Error> {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(map_size).max_readers(MAX_READERS).max_dbs(databases);
    // SAFETY: the map is only sound while nobody else changes the file. `DataDir` holds an exclusive lock on
    // the directory for the life of this process and `Environment` keeps it beside the LMDB environment, so no
    // other gateway maps or renames the file. heed refuses to open one path twice in a process. No flag that
    // weakens LMDB's durability or locking is set.
    unsafe { options.open(path) }
}

/// Resizes the memory map of `env` to a multiple of the page size. LMDB never makes it smaller than the data.
///
/// The caller holds the write side of the gate whose read side every read transaction holds.
pub(super) fn resize(env: &Env<WithoutTls>, size: usize) -> Result<(), heed::Error> {
    // SAFETY: LMDB asks that no transaction is active in this process. The only callers are in `Environment`, between
    // its own write transactions, which are one at a time, while they hold the gate that excludes all readers.
    unsafe { env.resize(size) }
}

#[expect(clippy::disallowed_methods, reason = "the time is part of a file name, for people")]
fn quarantine(folder: &Path, reason: &str, found: &CarriedOver) -> io::Result<PathBuf> {
    let mut seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let aside = loop {
        let aside = folder.join(format!("data.mdb.damaged-{seconds}"));
        if !aside.try_exists()? {
            break aside;
        }
        seconds += 1;
    };
    fs::rename(folder.join("data.mdb"), &aside)?;
    marker::forget(folder);
    remove_lock(folder)?;
    let (store, aside_path) = (folder.display(), aside.display());
    if found.carried.is_empty() {
        tracing::error!(
            %store,
            aside = %aside_path,
            reason,
            "store is damaged and was set aside, starting with an empty one"
        );
    } else {
        tracing::error!(
            %store,
            aside = %aside_path,
            reason,
            carried_over = found.carried.join(", "),
            lost = found.lost.join(", "),
            "store is damaged and was set aside, starting with what is whole of it"
        );
    }
    Ok(aside)
}

/// Returns whether a store was in `folder`, and its file is not there any more.
fn is_gone(folder: &Path) -> io::Result<bool> {
    Ok(marker::was_used(folder) && !folder.join("data.mdb").try_exists()?)
}

/// Tells that the file is gone, and forgets what was known of it. Returns where it was.
fn tell_gone(folder: &Path) -> io::Result<FoundDamage> {
    let file = folder.join("data.mdb");
    marker::forget(folder);
    remove_lock(folder)?;
    tracing::error!(
        store = %folder.display(),
        file = %file.display(),
        "store's file is gone, starting with an empty one; stop the gateway and put it back, or restore a backup"
    );
    Ok(FoundDamage { set_aside: file, lost_tables: None })
}

/// Removes LMDB's lock file, which names transactions of a file that is not there any more.
fn remove_lock(folder: &Path) -> io::Result<()> {
    match fs::remove_file(folder.join("lock.mdb")) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Content of a folder that is only to be looked at.
pub(super) enum Existing {
    Absent,
    Damaged(String),
    Sound(Env<WithoutTls>),
}

/// Opens the store `name` in `folder` if there is one, once all of it is verified; creates nothing, sets nothing aside,
/// writes no data. The caller holds the lock of the data directory.
pub(super) fn existing(
    folder: &Path,
    name: &str,
    databases: u32,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Existing, heed::Error> {
    let terms = Terms { layout: format::layout(name), until: None, progress };
    match verify(&folder.join("data.mdb"), terms)? {
        Look::Absent if marker::was_used(folder) => {
            Ok(Existing::Damaged("its file data.mdb is gone".to_owned()))
        }
        Look::Absent => Ok(Existing::Absent),
        Look::Empty if marker::was_used(folder) => Ok(Existing::Damaged("it is empty".to_owned())),
        Look::Empty => Ok(Existing::Absent),
        Look::Damaged(reason) => Ok(Existing::Damaged(reason)),
        Look::Sound | Look::Unfinished => read_only(folder, databases),
    }
}

/// As [`existing`], while a gateway may have it open: without a look at the file, which would see it change.
pub(super) fn in_use(folder: &Path, databases: u32) -> Result<Existing, heed::Error> {
    match fs::metadata(folder.join("data.mdb")) {
        Ok(data) if data.len() > 0 => read_only(folder, databases),
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e.into()),
        Err(_) if marker::was_used(folder) => Ok(Existing::Damaged("its file data.mdb is gone".to_owned())),
        _ => Ok(Existing::Absent),
    }
}

fn read_only(folder: &Path, databases: u32) -> Result<Existing, heed::Error> {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.max_readers(MAX_READERS).max_dbs(databases);
    // SAFETY: as in `map`. A gateway that has the same environment open in another process goes by LMDB's own lock
    // file, which keeps the pages of a reader's snapshot from being reused, and it renames nothing once it runs.
    // READ_ONLY never writes to the map.
    let env = unsafe { options.flags(EnvFlags::READ_ONLY).open(folder) };
    match env {
        Ok(env) => Ok(Existing::Sound(env)),
        Err(e) if is_damage(&e) => Ok(Existing::Damaged(e.to_string())),
        Err(e) => Err(e),
    }
}
