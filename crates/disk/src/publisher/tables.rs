//! The tables of the Publisher: key -> record, a checksum and then bytes that only the Publisher reads.

use bytes::Bytes;
use heed::{RoTxn, RwTxn};

use crate::{
    counters::count,
    environment::{Environment, Table},
    fields,
};
use store::{PublisherTable, StoreError};

/// The tables.
#[derive(Clone, Copy)]
pub(super) struct PublisherTables {
    answers: Table,
    scheduled: Table,
    commands: Table,
}

impl PublisherTables {
    /// Opens or creates them, in the newest format.
    ///
    /// # Errors
    /// A newer format is refused, and nothing is changed.
    pub(super) fn open(environment: &Environment) -> Result<Self, StoreError> {
        let env = &environment.env;
        environment.open_tables(|txn| {
            Ok(Self {
                answers: env.create_database(txn, Some("answers"))?,
                scheduled: env.create_database(txn, Some("scheduled"))?,
                commands: env.create_database(txn, Some("commands"))?,
            })
        })
    }

    /// Adds or replaces a record; `buffer` is for its use.
    pub(super) fn put(
        &self,
        txn: &mut RwTxn<'_>,
        table: PublisherTable,
        key: &[u8],
        value: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        fields::begin(buffer);
        buffer.extend_from_slice(value);
        fields::seal(buffer);
        self.table(table).put(txn, key, buffer)
    }

    /// Removes a record.
    pub(super) fn remove(
        &self,
        txn: &mut RwTxn<'_>,
        table: PublisherTable,
        key: &[u8],
    ) -> Result<(), heed::Error> {
        self.table(table).delete(txn, key).map(|_| ())
    }

    /// Gives every sound record to `into`; returns the keys of the others.
    pub(super) fn read(
        &self,
        txn: &RoTxn<'_>,
        table: PublisherTable,
        into: &mut dyn FnMut(Bytes, Bytes),
    ) -> Result<Vec<Vec<u8>>, heed::Error> {
        let mut damaged = Vec::new();
        for entry in self.table(table).iter(txn)? {
            let (key, record) = entry?;
            match fields::open(record) {
                Some(value) => into(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value.0)),
                None => {
                    count(|c| c.store_damaged_records.add(1));
                    gateway_core::error_limited!(
                        ?table,
                        "stored record of the publisher is damaged and was skipped"
                    );
                    damaged.push(key.to_vec());
                }
            }
        }
        Ok(damaged)
    }

    fn table(&self, table: PublisherTable) -> Table {
        match table {
            PublisherTable::Answers => self.answers,
            PublisherTable::Scheduled => self.scheduled,
            PublisherTable::Commands => self.commands,
        }
    }
}

/// Returns whether a record is as it was written; for the tools.
pub(crate) fn is_sound(record: &[u8]) -> bool {
    fields::open(record).is_some()
}
