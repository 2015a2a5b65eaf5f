//! An environment whose transactions go to a ledger first.
//!
//! A writer runs its transaction up to the commit, hands what it changed to [`Shipping`], and commits with the position of that
//! record beside the changes. From then on the record is decided: if the local commit fails, the record itself is applied, in a
//! larger map or when there is room, and never the transaction again, which may have seen other things.
//!
//! In front of its own changes each record repeats the oldest keys of its store, as many bytes as the transaction before changed or
//! some times that, for as long as the ledger wants it. Some records have marks: once all keys have been repeated since one of them,
//! nothing before it is needed. A copy that applies only records from a mark on that is passed has everything.

use std::{
    io,
    ops::Bound,
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Duration,
};

use heed::{MdbError, RoTxn, types::Bytes};
use ledger::{Cleaned, Marks, Position, RECORD_BYTES, Shipped, Shipping};

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

/// Marks for each time that as many bytes as are alive are shipped.
const MARKS: u64 = 8;

/// Room of the map that is asked for before a record goes to the ledger, for each of its bytes: a page may be half full, and
/// every page on the way to it is copied.
const ROOM_FOR_BYTE: usize = 8;
const ROOM: usize = 256 << 10;

/// A place among the keys of a store: number of a table, and a key in it; none before its first.
type Place = (u8, Option<Vec<u8>>);

/// Progress of the round of repeated keys.
#[derive(Debug, Clone, Default)]
pub(crate) struct RepeatCursor {
    /// The last key that was repeated.
    place: Place,
    marks: Marks<Place>,
    /// Bytes that were shipped since the last mark.
    since_mark: u64,
    /// Bytes of the last transaction's own changes.
    last: usize,
}

/// Repeats in front of a transaction.
#[derive(Debug, Default)]
pub(super) struct RepeatedFront {
    /// Progress with them; none if there are none.
    cursor: Option<RepeatCursor>,
    cleaned: Cleaned,
    has_ended_round: bool,
    /// Their part of the redo.
    bytes: usize,
}

impl RepeatCursor {
    /// Gives `each` the next entries, about so many `bytes` of them. A mark is set for each eighth of the bytes that are `alive`. Returns
    /// the record's part in cleaning, and whether the round has ended with it.
    pub(crate) fn go_on(
        &mut self,
        txn: &RoTxn<'_>,
        tables: &[Table],
        bytes: usize,
        alive: u64,
        each: impl FnMut(Table, &[u8], &[u8]),
    ) -> Result<(Cleaned, bool), heed::Error> {
        let is_due = self.marks.is_empty() || self.since_mark >= alive / MARKS;
        let marks = is_due && self.marks.set(self.place.clone());
        if marks {
            self.since_mark = 0;
        }
        let has_ended_round = self.move_on(txn, tables, bytes, each)?;
        let passed = self.marks.pass(&self.place, has_ended_round);
        Ok((Cleaned { marks, passed }, has_ended_round))
    }

    /// Takes note of a record that was shipped, and of how many bytes of it were not repeated.
    pub(crate) fn shipped(&mut self, bytes: usize, own: usize) {
        self.since_mark += bytes as u64;
        self.last = own;
    }

    fn move_on(
        &mut self,
        txn: &RoTxn<'_>,
        tables: &[Table],
        bytes: usize,
        mut each: impl FnMut(Table, &[u8], &[u8]),
    ) -> Result<bool, heed::Error> {
        let mut left = bytes;
        let (number, after) = &mut self.place;
        while let Some(table) = tables.get(usize::from(*number)) {
            let from = after.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
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
                *after = last;
                return Ok(false);
            }
            (*number, *after) = (*number + 1, None);
        }
        self.place = Place::default();
        Ok(true)
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
        let (mut cursor, mut has_ended) = (RepeatCursor::default(), false);
        while !has_ended {
            let mut front = RepeatedFront::default();
            let exported = self.writing(|txn| {
                txn.want_redo();
                front = self.repeat(txn, &cursor, RECORD_BYTES)?;
                let redo = txn.take_redo().filter(|redo| !redo.bytes().is_empty());
                let Some(redo) = redo else { return Ok(()) };
                let position = ship(redo.bytes()).map_err(heed::Error::Io)?;
                self.note_position(txn, position)
            });
            exported.map_err(|error| self.failed(&error))?;
            (cursor, has_ended) = (front.cursor.unwrap_or_default(), front.has_ended_round);
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

    /// Repeats the oldest keys at the beginning of a transaction, as many bytes as the ledger wants for each of the transaction before.
    pub(super) fn repeat_oldest(
        &self,
        shipping: &Arc<dyn Shipping>,
        txn: &mut WriteTxn<'_>,
        cursor: &RepeatCursor,
    ) -> Result<RepeatedFront, heed::Error> {
        match shipping.wanted_repeats(self.alive()?) {
            0 => Ok(RepeatedFront::default()),
            times => {
                let bytes = cursor.last.saturating_mul(times).clamp(LEAST_REPEATED, RECORD_BYTES);
                self.repeat(txn, cursor, bytes)
            }
        }
    }

    /// Repeats entries behind `cursor`, about so many bytes.
    fn repeat(
        &self,
        txn: &mut WriteTxn<'_>,
        cursor: &RepeatCursor,
        bytes: usize,
    ) -> Result<RepeatedFront, heed::Error> {
        let tables = self.all_tables(txn)?;
        let (mut found, mut cursor) = (Vec::new(), cursor.clone());
        let (cleaned, has_ended_round) =
            cursor.go_on(txn, &tables, bytes, self.alive()?, |table, key, value| {
                found.push((table, key.to_vec(), value.to_vec()));
            })?;
        for (table, key, value) in &found {
            table.repeat(txn, key, value);
        }
        let bytes = txn.redo().map_or(0, |redo| redo.bytes().len());
        Ok(RepeatedFront { cursor: Some(cursor), cleaned, has_ended_round, bytes })
    }

    fn alive(&self) -> Result<u64, heed::Error> {
        self.env.non_free_pages_size()
    }

    /// Ends a transaction: stores it in the ledger, then commits it here.
    pub(super) fn ship_and_commit(
        &self,
        shipping: &Arc<dyn Shipping>,
        mut txn: WriteTxn<'_>,
        front: RepeatedFront,
        upkeep: &mut Upkeep,
    ) -> Result<(), heed::Error> {
        let Some(redo) = txn.take_redo().filter(|redo| !redo.bytes().is_empty()) else { return txn.commit() };
        let changes = redo.bytes();
        // While it can still be refused.
        self.ask_for_room(changes.len())?;
        let position = match shipping.ship(changes, front.cleaned) {
            Shipped::Done(position) => position,
            Shipped::Refused => return Err(heed::Error::Io(io::ErrorKind::FileTooLarge.into())),
            Shipped::Lost => {
                self.lost.store(true, Relaxed);
                return Err(lost());
            }
        };
        if let Some(cursor) = front.cursor {
            upkeep.cursor = cursor;
        }
        upkeep.cursor.shipped(changes.len(), changes.len() - front.bytes);
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
