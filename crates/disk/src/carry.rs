//! A damaged file of a store: its parts that are whole go into a new file.
//!
//! A part is some tables that mean nothing without each other (`format`). The new file is written beside the damaged one, gets a name
//! that says that it is complete, and takes the damaged one's place once that is set aside: a process that ends in between leaves what
//! the next start goes on with.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use heed::{Database, Env, RwTxn, WithoutTls, types::Bytes};
use ledger::Position;
use lmdb_0_9_pages::{Salvage, SalvageTable};

use super::{
    format::{self, META, POSITION},
    marker,
};
use store::sync_directory;

/// Creates an environment in a folder, for about so many bytes and so many tables.
pub(super) type MakeEnvironment = fn(&Path, u64, u32) -> Result<Env<WithoutTls>, heed::Error>;

type Table = Database<Bytes, Bytes>;

/// Bytes of one transaction, about.
const BATCH: usize = 32 << 20;

/// Parts of a damaged file that are in the new one, and those that are not.
#[derive(Debug, Default)]
pub(super) struct CarriedOver {
    /// Tables in the new file, for people.
    pub(super) carried: Vec<String>,
    /// Reasons why others are not.
    pub(super) lost: Vec<String>,
    /// Tables that are not in the new file.
    pub(super) lost_tables: Vec<&'static str>,
}

/// Writes the parts that are whole of the damaged file in `folder`, the store `name`, into a new file, if there are any.
pub(super) fn carry_over(
    folder: &Path,
    name: &str,
    make: MakeEnvironment,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<CarriedOver> {
    let file = folder.join("data.mdb");
    let mut result = CarriedOver::default();
    let found = match fs::metadata(&file) {
        Ok(data) if data.len() > 0 => Salvage::of(&file, format::layout(name), progress)?,
        _ => return Ok(result),
    };
    result
        .lost
        .extend(found.tables().iter().filter(|table| !table.is_older).filter_map(|t| t.damage.clone()));
    let note = whole(&found, &[META]);
    let format = marker::format(folder);
    if note.is_none() && format.is_none() {
        return Ok(result);
    }
    let mut carried = Vec::new();
    for part in format::parts(name) {
        match whole(&found, part) {
            Some(mut tables) => carried.append(&mut tables),
            None => result.lost_tables.extend(*part),
        }
    }
    if carried.is_empty() {
        return Ok(result);
    }
    let format = format.filter(|_| note.is_none());
    let tables: Vec<_> = note.into_iter().flatten().chain(carried.iter().copied()).collect();
    write(folder, &found, &tables, format, make).map_err(to_io)?;
    for table in carried {
        let older = match (table.is_older, found.knows_the_last()) {
            (true, _) => ", without the last commit",
            (false, true) => "",
            (false, false) => ", perhaps without the last commit",
        };
        result.carried.push(format!("{} ({} entries{older})", table.name, table.entries));
    }
    Ok(result)
}

/// The tables of a part, all as of one transaction, the last one in which they are whole. One that an older version has not made
/// is not missed, but there must be one.
fn whole<'f>(found: &'f Salvage<'_>, part: &[&str]) -> Option<Vec<&'f SalvageTable>> {
    [false, true].into_iter().find_map(|is_older| {
        let tables = found.tables().iter().filter(|table| table.is_older == is_older);
        let of_part: Vec<_> = tables.filter(|table| part.contains(&&*table.name)).collect();
        let is_whole = !of_part.is_empty() && of_part.iter().all(|table| table.damage.is_none());
        is_whole.then_some(of_part)
    })
}

/// Puts a file that was carried over in the place of the damaged one, which is set aside.
pub(super) fn put_in_place(folder: &Path) -> io::Result<bool> {
    match fs::rename(complete(folder), folder.join("data.mdb")) {
        Ok(()) => sync_directory(folder).map(|()| true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Goes on where a process ended that carried something over, before the store in `folder` is looked at.
pub(super) fn go_on(folder: &Path) -> io::Result<()> {
    let _ = fs::remove_dir_all(unfinished(folder));
    if folder.join("data.mdb").try_exists()? {
        // The damaged file is still in its place, and is carried over again.
        return match fs::remove_file(complete(folder)) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
    }
    put_in_place(folder).map(drop)
}

fn unfinished(folder: &Path) -> PathBuf {
    folder.join("carrying-over")
}

fn complete(folder: &Path) -> PathBuf {
    folder.join("data.mdb.carried-over")
}

/// Writes these tables, and the note of the `format` if that is not among them.
fn write(
    folder: &Path,
    found: &Salvage<'_>,
    tables: &[&SalvageTable],
    format: Option<u32>,
    make: MakeEnvironment,
) -> Result<(), heed::Error> {
    let unfinished = unfinished(folder);
    let _ = fs::remove_dir_all(&unfinished);
    fs::create_dir_all(&unfinished)?;
    let size = fs::metadata(folder.join("data.mdb"))?.len();
    let env = make(&unfinished, size, tables.len() as u32 + 1)?;
    if let Some(format) = format {
        let mut txn = env.write_txn()?;
        let meta: Table = env.create_database(&mut txn, Some(META))?;
        format::note(format).iter().try_for_each(|(key, value)| meta.put(&mut txn, key, value))?;
        txn.commit()?;
    }
    for table in tables {
        let mut txn = env.write_txn()?;
        let into: Table = env.create_database(&mut txn, Some(&table.name))?;
        let mut txn = Some(txn);
        let mut written = 0;
        found.read(table, |key, value| {
            let mut next = txn.take().map_or_else(|| env.write_txn(), Ok).map_err(to_io)?;
            // A file that may lack something is at no place in a ledger, now or at a later start.
            let is_place = table.name == META && key == POSITION;
            let value = if is_place { &Position::NONE[..] } else { value };
            put(into, &mut next, key, value).map_err(to_io)?;
            written += key.len() + value.len();
            if written < BATCH {
                txn = Some(next);
                return Ok(());
            }
            written = 0;
            next.commit().map_err(to_io)
        })?;
        txn.map_or(Ok(()), RwTxn::commit)?;
    }
    env.prepare_for_closing().wait();
    let file = unfinished.join("data.mdb");
    File::open(&file)?.sync_all()?;
    fs::rename(&file, complete(folder))?;
    sync_directory(folder)?;
    let _ = fs::remove_dir_all(&unfinished);
    Ok(())
}

/// The entries come in order of key.
fn put(table: Table, txn: &mut RwTxn<'_>, key: &[u8], value: &[u8]) -> Result<(), heed::Error> {
    table.put_with_flags(txn, heed::PutFlags::APPEND, key, value)
}

fn to_io(error: heed::Error) -> io::Error {
    match error {
        heed::Error::Io(error) => error,
        other => io::Error::other(other),
    }
}
