//! Queues as records that can be carried to another data directory.

use gateway_core::{QueueId, SharedMessage};
use hashbrown::HashSet;
use heed::RoTxn;

use super::{
    audit,
    tables::{self, EntryKey, QueueTables},
};
use store::encoding::message;
pub(crate) use tables::EntryHead;

use crate::{environment::Environment, table::WriteTxn};
use store::StoreError;

/// One record. Messages come first, in the order of their numbers, then entries, then what was received.
pub(crate) enum QueueRecord {
    /// A message by its number.
    Message(u64, SharedMessage),
    /// A place of a queue.
    Entry(QueueId, u64, EntryHead),
    /// A packet identifier that is not released.
    Received(QueueId, u16),
}

/// Why [`export`] ended.
pub(crate) enum ExportError<E> {
    Store(heed::Error),
    Sink(E),
}

impl<E> From<heed::Error> for ExportError<E> {
    fn from(error: heed::Error) -> Self {
        Self::Store(error)
    }
}

/// Gives every record to `sink`; how many are damaged and were left out. Needs 8 bytes of memory per entry.
pub(crate) fn export<E>(
    tables: &QueueTables,
    txn: &RoTxn<'_>,
    sink: &mut impl FnMut(QueueRecord) -> Result<(), E>,
) -> Result<u64, ExportError<E>> {
    let mut give = |record| sink(record).map_err(ExportError::Sink);
    let mut named = Vec::new();
    for entry in tables.entries.iter(txn)? {
        named.extend(EntryHead::decode(entry?.1).map(|head| head.number));
    }
    named.sort_unstable();
    named.dedup();
    let mut damaged = 0;
    let mut unreadable = HashSet::<u64, ahash::RandomState>::default();
    for body in tables.bodies.iter(txn)? {
        let (key, record) = body?;
        let number = tables::number(key).unwrap_or_default();
        match message::decode(record) {
            Some(message) if named.binary_search(&number).is_ok() => {
                give(QueueRecord::Message(number, message))?;
            }
            Some(_) => damaged += 1,
            None => {
                unreadable.insert(number);
            }
        }
    }
    drop(named);
    for entry in tables.entries.iter(txn)? {
        let (key, value) = entry?;
        let (Some((queue, seq)), Some(head)) = (tables::place(key), EntryHead::decode(value)) else {
            damaged += 1;
            continue;
        };
        let has_message = head.number == 0
            || (!unreadable.contains(&head.number)
                && tables.bodies.get(txn, &tables::number_key(head.number))?.is_some());
        match has_message {
            true => give(QueueRecord::Entry(queue, seq, head))?,
            false => damaged += 1,
        }
    }
    for received in tables.received.iter(txn)? {
        match tables::received(received?.0) {
            Some((queue, packet_id)) => give(QueueRecord::Received(queue, packet_id))?,
            None => damaged += 1,
        }
    }
    Ok(damaged)
}

/// Writes records into queues that are new; durable after it.
pub(crate) fn import(
    environment: &Environment,
    tables: &QueueTables,
    records: &[QueueRecord],
) -> Result<(), StoreError> {
    let mut buffer = Vec::new();
    let written = environment
        .writing(|txn| records.iter().try_for_each(|record| put(tables, txn, record, &mut buffer)));
    written.map_err(|e| environment.failed(&e))
}

/// Returns whether all records fit together.
pub(crate) fn is_whole(environment: &Environment, tables: &QueueTables) -> Result<bool, StoreError> {
    environment.reading(|txn| {
        let mut sound = true;
        let wrong = audit::audit(tables, txn, &mut |record| sound &= record)?;
        Ok(sound && wrong == 0)
    })
}

fn put(
    tables: &QueueTables,
    txn: &mut WriteTxn<'_>,
    record: &QueueRecord,
    buffer: &mut Vec<u8>,
) -> Result<(), heed::Error> {
    match record {
        QueueRecord::Message(number, message) => {
            message::encode(message, buffer);
            tables.add_body(txn, *number, buffer, 1)
        }
        QueueRecord::Entry(queue, seq, head) => {
            let Some(key): Option<EntryKey> = tables::entry_key(*queue, *seq) else { return Ok(()) };
            head.encode(buffer);
            tables.entries.put(txn, &key, buffer)?;
            if let Some(second) = head.swept() {
                tables.expiry.put(txn, &tables::expiry_key(second, &key), &[])?;
            }
            if head.number != 0 && !head.sole {
                let number = tables::number_key(head.number);
                let refs = tables.refs.get(txn, &number)?.and_then(tables::refs).unwrap_or(0);
                tables.refs.put(txn, &number, &(refs + 1).to_le_bytes())?;
            }
            Ok(())
        }
        QueueRecord::Received(queue, packet_id) => tables.set_received(txn, *queue, *packet_id, true),
    }
}
