//! The tables of a damaged file that are whole.
//!
//! LMDB never overwrites a page of its last two transactions, so there are two chances for each table: as the newest meta page
//! has it, and as it was one transaction before, when that is all that can be read. The list of free pages does not matter.

use std::{fs::File, io, path::Path};

use super::{
    Layout, Meta, Terms, metas,
    page::Db,
    walk::{FileWalk, Taker, VerifyFault},
};

/// A damaged file, and its tables.
pub struct Salvage<'l> {
    file: File,
    size: u64,
    layout: Layout<'l>,
    /// The meta pages that can be read, the newest first.
    metas: Vec<Meta>,
    tables: Vec<SalvageTable>,
}

/// A table as one of the meta pages has it.
pub struct SalvageTable {
    /// Its name.
    pub name: String,
    /// Number of its entries.
    pub entries: u64,
    /// True if it is as of the transaction before the last one.
    pub is_older: bool,
    /// Reason why it cannot be read, if so.
    pub damage: Option<String>,
    db: Db,
    meta: usize,
}

impl<'l> Salvage<'l> {
    /// Looks for tables: reads every page of those that can be found. `progress` is called as with [`verify`](super::verify).
    ///
    /// # Errors
    /// Those of reading the file which say nothing about damage.
    pub fn of(path: &Path, layout: Layout<'l>, progress: &mut dyn FnMut(u64, u64)) -> io::Result<Self> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut found = Self { file, size, layout, metas: Vec::new(), tables: Vec::new() };
        for meta in metas(&found.file) {
            match meta {
                Ok(meta) if meta.length().is_ok() => found.metas.push(meta),
                Err(VerifyFault::Io(error)) => return Err(error),
                _ => {}
            }
        }
        found.metas.sort_by_key(|meta| std::cmp::Reverse(meta.transaction));
        for meta in 0..found.metas.len() {
            let all_whole = |tables: &[SalvageTable]| tables.iter().all(|table| table.damage.is_none());
            if !found.tables.is_empty() && all_whole(&found.tables) {
                break;
            }
            found.look(meta, progress)?;
        }
        Ok(found)
    }

    /// The tables, the newest first; those that are damaged in their newest state are there once more.
    pub fn tables(&self) -> &[SalvageTable] {
        &self.tables
    }

    /// Returns whether it is known which transaction was the last.
    pub fn knows_the_last(&self) -> bool {
        self.metas.len() == 2
    }

    fn look(&mut self, meta: usize, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        let Some(mut walk) = self.walk(meta, progress) else { return Ok(()) };
        let names = match walk.names(&self.metas[meta].main) {
            Ok(names) => names,
            Err(VerifyFault::Io(error)) => return Err(error),
            Err(_) => return Ok(()),
        };
        let mut found = Vec::new();
        for (name, db) in names {
            let damage = match walk.table(&name, &db) {
                Ok(()) => None,
                Err(VerifyFault::Damage(reason)) => Some(reason),
                Err(VerifyFault::OutOfTime) => Some("there was no time to look at it".to_owned()),
                Err(VerifyFault::Io(error)) => return Err(error),
            };
            let name = String::from_utf8_lossy(&name).into_owned();
            found.push(SalvageTable { name, entries: db.entries, is_older: meta > 0, damage, db, meta });
        }
        drop(walk);
        self.tables.append(&mut found);
        Ok(())
    }

    /// Gives all entries of a table to `taker`, in order of key.
    ///
    /// # Errors
    /// Those of `taker`, and of reading the file.
    pub fn read(
        &self,
        table: &SalvageTable,
        mut taker: impl FnMut(&[u8], &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut silent = |_, _| {};
        let taker: &mut Taker<'_> = &mut taker;
        let walk = self.walk(table.meta, &mut silent);
        let walk = walk.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        walk.take(table.name.as_bytes(), &table.db, taker).map_err(|fault| match fault {
            VerifyFault::Io(error) => error,
            VerifyFault::Damage(reason) => io::Error::new(io::ErrorKind::InvalidData, reason),
            VerifyFault::OutOfTime => io::ErrorKind::TimedOut.into(),
        })
    }

    /// A walk by one of the meta pages, in a file of which a part may be missing.
    fn walk<'a>(&'a self, meta: usize, progress: &'a mut dyn FnMut(u64, u64)) -> Option<FileWalk<'a>> {
        let meta = self.metas.get(meta)?;
        let length = meta.length().ok()?;
        let terms = Terms { layout: self.layout.clone(), until: None, progress };
        Some(FileWalk::new(&self.file, meta.page as usize, self.size / meta.page, length / meta.page, terms))
    }
}
