//! An environment whose transactions go to a ledger first.
//!
//! A writer runs its transaction up to the commit, hands what it changed to [`Shipping`], and commits with the position of that
//! record beside the changes. From then on the record is decided: if the local commit fails, the record itself is applied, in a
//! larger map or when there is room, and never the transaction again, which may have seen other things.
//!
//! In front of its own changes each record repeats the oldest keys of its store, as many bytes as the transaction before had, for
//! as long as the ledger wants that: when all keys have been repeated, nothing before that round is needed. A copy that
//! applies only records of a round has everything.

use std::{
    io,
    ops::Bound,
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Duration,
};

use heed::{MdbError, RoTxn, types::Bytes};
use ledger::{Position, RECORD_BYTES, Shipped, Shipping};

use super::{Environment, Upkeep};
use crate::{
    format::{self, META, POSITION},
    open,
    table::{self, Table, WriteTxn},
};
use store::StoreError;

/// First pause after a local commit of what the ledger has has failed; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Least bytes that are repeated in front of a record while the ledger wants it.
const LEAST_REPEATED: usize = 4 << 10;

/// Room of the map that is asked for before a record goes to the ledger, for each of its bytes: a page may be half full, and
/// every page on the way to it is copied.
const ROOM_FOR_BYTE: usize = 8;
const ROOM: usize = 256 << 10;

/// Place that the round of repeated keys has reached.
#[derive(Debug, Clone, Default)]
pub(crate) struct RepeatCursor {
    /// Number of the table, and the last key that was repeated; none before its first.
    table: u8,
    after: Option<Vec<u8>>,
    /// Bytes of the last transaction.
    last: usize,
}

impl RepeatCursor {
    /// Gives `each` the entries behind this place, about so many bytes of them. Returns the place of the last, and whether the round has
    /// ended with it.
    pub(crate) fn go_on(
        &self,
        txn: &RoTxn<'_>,
        tables: &[Table],
        bytes: usize,
        mut each: impl FnMut(Table, &[u8], &[u8]),
    ) -> Result<(Self, bool), heed::Error> {
        let (mut at, mut left) = (self.clone(), bytes);
        while let Some(table) = tables.get(usize::from(at.table)) {
            let from = at.after.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            let mut last = None;
            for entry in table.range(txn, &(from, Bound::<&[u8]>::Unbounded))? {
                let (key, value) = entry?;
                left = left.saturating_sub(key.len() + value.len());
                each(*table, key, value);
                if left == 0 {
                    last = Some(key.to_vec());
                    break;
                }
            }
            if last.is_some() {
                at.after = last;
                return Ok((at, false));
            }
            at = Self { table: at.table + 1, after: None, last: at.last };
        }
        Ok((Self { last: at.last, ..Self::default() }, true))
    }
}

/// An error that says that the home is lost. No commit comes after it.
pub(super) fn lost() -> heed::Error {
    heed::Error::Io(io::ErrorKind::ConnectionAborted.into())
}

impl Environment {
    /// Bytes of changes that a transaction should have at most, about; no bound without a ledger.
    pub(crate) fn redo_room(&self) -> usize {
        if self.shipping.is_some() { RECORD_BYTES } else { usize::MAX }
    }

    /// The place of the last record that is in it; `None` if there is none, or it cannot be read.
    pub(crate) fn position(&self) -> Result<Option<Position>, StoreError> {
        self.reading(|txn| {
            let meta = self.env.open_database::<Bytes, Bytes>(txn, Some(META))?;
            let Some(meta) = meta else { return Ok(None) };
            Ok(meta.get(txn, POSITION)?.and_then(Position::from_bytes))
        })
    }

    /// Makes the changes of a record that others have shipped, and notes its position. False if the changes are not of this store.
    pub(crate) fn apply_record(&self, changes: &[u8], position: Position) -> Result<bool, StoreError> {
        let applied = self.writing(|txn| self.apply(txn, changes, position));
        applied.map_err(|error| self.failed(&error))
    }

    /// The same in a transaction that goes on.
    pub(crate) fn apply(
        &self,
        txn: &mut WriteTxn<'_>,
        changes: &[u8],
        position: Position,
    ) -> Result<bool, heed::Error> {
        let tables = self.all_tables(txn)?;
        if !table::apply(changes, &tables, txn)? {
            return Ok(false);
        }
        self.note_position(txn, position)?;
        Ok(true)
    }

    fn all_tables(&self, txn: &mut WriteTxn<'_>) -> Result<Vec<Table>, heed::Error> {
        format::tables(self.name()).map(|name| self.table(txn, name)).collect()
    }

    /// Removes every entry, and the position.
    pub(crate) fn empty(&self) -> Result<(), StoreError> {
        let emptied = self.writing(|txn| {
            for table in self.all_tables(txn)? {
                table.clear(txn.bare())?;
            }
            let meta = self.table(txn, META)?;
            meta.put(txn, POSITION, &Position::NONE)
        });
        emptied.map_err(|error| self.failed(&error))
    }

    /// Forgets the place of the last record.
    pub(crate) fn forget_position(&self) -> Result<(), StoreError> {
        let forgotten = self.writing(|txn| self.table(txn, META)?.put(txn, POSITION, &Position::NONE));
        forgotten.map_err(|error| self.failed(&error))
    }

    /// Returns whether there is an entry in any table.
    pub(crate) fn has_entries(&self) -> Result<bool, StoreError> {
        self.reading(|txn| {
            for name in format::tables(self.name()) {
                let table = self.env.open_database::<Bytes, Bytes>(txn, Some(name))?;
                if table.is_some_and(|table| table.is_empty(txn).is_ok_and(|empty| !empty)) {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    /// Gives `ship` all entries as the changes of records of about a megabyte, and notes the position of the last.
    pub(crate) fn export_to(
        &self,
        ship: &mut dyn FnMut(&[u8]) -> io::Result<Position>,
    ) -> Result<(), StoreError> {
        let (mut cursor, mut ended) = (RepeatCursor { last: RECORD_BYTES, ..RepeatCursor::default() }, false);
        while !ended {
            let (mut next, mut ends) = (cursor.clone(), false);
            let exported = self.writing(|txn| {
                txn.want_redo();
                (next, ends) = self.repeat(txn, &cursor)?;
                let redo = txn.take_redo().filter(|redo| !redo.bytes().is_empty());
                let Some(redo) = redo else { return Ok(()) };
                let position = ship(redo.bytes()).map_err(heed::Error::Io)?;
                self.note_position(txn, position)
            });
            exported.map_err(|error| self.failed(&error))?;
            (cursor, ended) = (next, ends);
        }
        Ok(())
    }

    pub(crate) fn note_position(
        &self,
        txn: &mut WriteTxn<'_>,
        position: Position,
    ) -> Result<(), heed::Error> {
        let meta = self.table(txn, META)?;
        meta.put(txn, POSITION, &position.to_bytes())
    }

    /// Repeats the oldest keys at the beginning of a transaction, if the ledger wants that. Returns where the round has come, and
    /// whether it ended.
    pub(super) fn repeat_oldest(
        &self,
        shipping: &Arc<dyn Shipping>,
        txn: &mut WriteTxn<'_>,
        cursor: &RepeatCursor,
    ) -> Result<(RepeatCursor, bool), heed::Error> {
        match shipping.wants_repeats(self.alive()?) {
            true => self.repeat(txn, cursor),
            false => Ok((cursor.clone(), false)),
        }
    }

    /// Repeats entries behind `cursor`, about as many bytes as the last transaction had.
    fn repeat(
        &self,
        txn: &mut WriteTxn<'_>,
        cursor: &RepeatCursor,
    ) -> Result<(RepeatCursor, bool), heed::Error> {
        let tables = self.all_tables(txn)?;
        let mut found = Vec::new();
        let bytes = cursor.last.max(LEAST_REPEATED);
        let round = cursor.go_on(txn, &tables, bytes, |table, key, value| {
            found.push((table, key.to_vec(), value.to_vec()));
        })?;
        for (table, key, value) in &found {
            table.repeat(txn, key, value);
        }
        Ok(round)
    }

    fn alive(&self) -> Result<u64, heed::Error> {
        self.env.non_free_pages_size()
    }

    /// Ends a transaction: stores it in the ledger, then commits it here.
    pub(super) fn ship_and_commit(
        &self,
        shipping: &Arc<dyn Shipping>,
        mut txn: WriteTxn<'_>,
        (mut cursor, ends_round): (RepeatCursor, bool),
        upkeep: &mut Upkeep,
    ) -> Result<(), heed::Error> {
        let Some(redo) = txn.take_redo().filter(|redo| !redo.bytes().is_empty()) else { return txn.commit() };
        let changes = redo.bytes();
        // While it can still be refused.
        self.ask_for_room(changes.len())?;
        cursor.last = changes.len().min(RECORD_BYTES);
        let position = match shipping.ship(changes, ends_round) {
            Shipped::Done(position) => position,
            Shipped::Refused => return Err(heed::Error::Io(io::ErrorKind::FileTooLarge.into())),
            Shipped::Lost => {
                self.lost.store(true, Relaxed);
                return Err(lost());
            }
        };
        upkeep.cursor = cursor;
        let committed = self.note_position(&mut txn, position).and_then(|()| txn.commit());
        match committed {
            Ok(()) => Ok(()),
            Err(error) => {
                self.commit_record(changes, position, error);
                Ok(())
            }
        }
    }

    /// Fails as a map that is full does, if a transaction of so many bytes may not fit in it.
    fn ask_for_room(&self, bytes: usize) -> Result<(), heed::Error> {
        let used = (self.env.info().last_page_number + 1) * self.env.stat().page_size as usize;
        let wanted = used.saturating_add(bytes.saturating_mul(ROOM_FOR_BYTE)).saturating_add(ROOM);
        if wanted <= self.env.info().map_size {
            return Ok(());
        }
        // Free pages inside count, too.
        let free = (used as u64).saturating_sub(self.alive()?);
        let wanted = wanted.saturating_sub(usize::try_from(free).unwrap_or(usize::MAX));
        if wanted <= self.env.info().map_size { Ok(()) } else { Err(heed::Error::Mdb(MdbError::MapFull)) }
    }

    /// Commits a record that the ledger has, for as long as it takes.
    fn commit_record(&self, changes: &[u8], position: Position, mut error: heed::Error) {
        let mut pause = FIRST_PAUSE;
        loop {
            if matches!(error, heed::Error::Mdb(MdbError::MapFull)) {
                let grown = {
                    let size = self.env.info().map_size;
                    let _gate = self.gate.write();
                    open::resize(&self.env, size.saturating_mul(2))
                };
                if let Err(error) = grown {
                    gateway_core::error_limited!(store = self.name(), %error, "memory map cannot grow");
                    thread::sleep(pause);
                }
            } else {
                self.met(&error);
                gateway_core::error_limited!(
                    store = self.name(),
                    %error,
                    "the ledger has a change that cannot be written here, it is tried again"
                );
                thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            let written = WriteTxn::new(&self.env, false).and_then(|mut txn| {
                self.apply(&mut txn, changes, position)?;
                txn.commit()
            });
            match written {
                Ok(()) => return,
                Err(failed) => error = failed,
            }
        }
    }
}

#[cfg(test)]
mod tests;
