//! Opening an LMDB environment: checks the file first, and sets a damaged one aside.
//!
//! LMDB needs no recovery: a commit is there or not. What it does not survive is a file cut short or
//! overwritten from outside, since it reads the file through a memory map. So the file is looked at before
//! it is mapped. The file may be longer than the meta page says (a commit that never happened).
#![allow(unsafe_code, reason = "heed marks opening and resizing a memory map unsafe; nothing else here is")]

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom},
    path::Path,
};

use heed::{Env, EnvOpenOptions, MdbError, WithoutTls};

use crate::store::{DataDir, StoreError};

/// Readers at once; the read pool is far smaller.
const MAX_READERS: u32 = 126;

/// A file that lacks more than this at its end was cut, whatever its free list says.
const MAX_UNWRITTEN: u64 = 16 << 20;

const MAGIC: u32 = 0xBEEF_C0DE;
const PAGE_HEADER: usize = 16;

/// What a look at the data file says.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// There is none.
    Absent,
    /// Complete.
    Sound,
    /// Shorter than the meta page says: free pages that were never written, or a cut. It was filled up with
    /// zeros, and every record must be read before it is trusted.
    Suspect,
    /// Not a database, with the reason.
    Damaged(&'static str),
}

/// Opens the environment in the folder `name` of `directory`, creating it if absent.
///
/// `verify` is called when the file is suspect and says whether all of it can be read. A damaged file is
/// renamed to `data.mdb.damaged-<n>` with an error in the log, and an empty environment is opened.
pub(super) fn open(
    directory: &DataDir,
    name: &str,
    map_size: usize,
    databases: u32,
    verify: impl Fn(&Env<WithoutTls>) -> bool,
) -> Result<Env<WithoutTls>, StoreError> {
    let path = directory.path().join(name);
    let failed = |e: &dyn std::fmt::Display| {
        StoreError::Unavailable(format!("cannot open the store in {}: {e}", path.display()))
    };
    fs::create_dir_all(&path).map_err(|e| failed(&e))?;
    let look = look(&path.join("data.mdb")).map_err(|e| failed(&e))?;
    if let Look::Damaged(reason) = look {
        quarantine(&path, reason).map_err(|e| failed(&e))?;
    }
    match map(&path, map_size, databases) {
        Ok(env) if look != Look::Suspect || verify(&env) => return Ok(env),
        Ok(env) => {
            drop(env);
            quarantine(&path, "it was cut short").map_err(|e| failed(&e))?;
        }
        Err(e) if is_damage(&e) => quarantine(&path, &e.to_string()).map_err(|e| failed(&e))?,
        Err(e) => return Err(failed(&e)),
    }
    map(&path, map_size, databases).map_err(|e| failed(&e))
}

/// Whether an error of LMDB says that the file is not as LMDB left it.
pub(super) fn is_damage(error: &heed::Error) -> bool {
    use MdbError::{Corrupted, Invalid, PageNotFound, VersionMismatch};
    matches!(error, heed::Error::Mdb(Corrupted | Invalid | PageNotFound | VersionMismatch))
}

fn map(path: &Path, map_size: usize, databases: u32) -> Result<Env<WithoutTls>, heed::Error> {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(map_size).max_readers(MAX_READERS).max_dbs(databases);
    // SAFETY: the map is only sound while nobody else changes the file. `DataDir` holds an exclusive lock on
    // the directory for the life of this process and `EmbeddedLatest` keeps it beside the environment, so no
    // other gateway maps or renames the file. heed refuses to open one path twice in a process. No flag that
    // weakens LMDB's durability or locking is set.
    unsafe { options.open(path) }
}

/// Grows the memory map of `env`.
///
/// The caller holds the write side of the gate whose read side every transaction holds.
pub(super) fn grow(env: &Env<WithoutTls>) -> Result<(), heed::Error> {
    let size = env.info().map_size.saturating_mul(2);
    // SAFETY: LMDB asks that no transaction is active in this process. The only caller is the writer thread,
    // between its own transactions, while it holds the gate that excludes all readers.
    unsafe { env.resize(size) }
}

fn look(path: &Path) -> std::io::Result<Look> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Look::Absent),
        Err(e) => return Err(e),
    };
    let size = file.metadata()?.len();
    if size == 0 {
        // Created by a process that ended before the first write; LMDB starts it anew.
        return Ok(Look::Absent);
    }
    let Some(first) = read_meta(&mut file, 0)? else { return Ok(Look::Damaged("meta page 0 is not LMDB's")) };
    if !first.page.is_power_of_two() || !(512..=65_536).contains(&first.page) {
        return Ok(Look::Damaged("its page size is impossible"));
    }
    if size < 2 * first.page {
        return Ok(Look::Damaged("it is shorter than its two meta pages"));
    }
    let Some(second) = read_meta(&mut file, first.page)? else {
        return Ok(Look::Damaged("meta page 1 is not LMDB's"));
    };
    let page = first.page;
    let newest = if second.transaction > first.transaction { second } else { first };
    let Some(needed) = newest.last_page.checked_add(1).and_then(|n| n.checked_mul(page)) else {
        return Ok(Look::Damaged("its last page is impossible"));
    };
    match needed.saturating_sub(size) {
        0 => Ok(Look::Sound),
        missing if missing > MAX_UNWRITTEN => Ok(Look::Damaged("it was cut short")),
        _ => {
            // A mapped page beyond the end of the file would be a SIGBUS; a page of zeros is an error code.
            OpenOptions::new().write(true).open(path)?.set_len(needed)?;
            Ok(Look::Suspect)
        }
    }
}

struct Meta {
    page: u64,
    last_page: u64,
    transaction: u64,
}

/// Reads a meta page as `MDB_meta` lays it out on 64-bit machines. `None` if it is none.
fn read_meta(file: &mut File, at: u64) -> std::io::Result<Option<Meta>> {
    let mut bytes = [0; PAGE_HEADER + 136];
    file.seek(SeekFrom::Start(at))?;
    match file.read_exact(&mut bytes) {
        Ok(()) => {}
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    }
    let meta = &bytes[PAGE_HEADER..];
    let u64_at = |at: usize| meta[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
    let u32_at = |at: usize| meta[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
    let sound = u32_at(0) == MAGIC && u32_at(4) == 1;
    Ok(sound.then(|| Meta { page: u32_at(24).into(), last_page: u64_at(120), transaction: u64_at(128) }))
}

fn quarantine(folder: &Path, reason: &str) -> std::io::Result<()> {
    let mut n = 1;
    let aside = loop {
        let aside = folder.join(format!("data.mdb.damaged-{n}"));
        if !aside.try_exists()? {
            break aside;
        }
        n += 1;
    };
    fs::rename(folder.join("data.mdb"), &aside)?;
    match fs::remove_file(folder.join("lock.mdb")) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    tracing::error!(
        store = %folder.display(),
        aside = %aside.display(),
        reason,
        "store is damaged and was set aside, starting with an empty one"
    );
    Ok(())
}
