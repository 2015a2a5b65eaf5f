//! Check that the tables of queues fit each other: every entry has its message, and every message its entries.

use heed::{Env, RoTxn, WithoutTls};

use super::tables::{self, EntryHead, EntryKey, QueueTables};
use crate::{format::QUEUE_TABLES, table::Table};
use store::encoding::message;

/// The tables of an environment that is only read; none if it was never used.
pub(crate) fn tables(env: &Env<WithoutTls>, txn: &RoTxn<'_>) -> Result<Option<QueueTables>, heed::Error> {
    let mut found = Vec::new();
    for name in QUEUE_TABLES {
        found.extend(env.open_database(txn, Some(name))?.map(Table::only_read));
    }
    let &[bodies, refs, entries, received, expiry] = &found[..] else { return Ok(None) };
    Ok(Some(QueueTables { bodies, refs, entries, received, expiry }))
}

/// Looks at everything and tells `seen` whether each record is sound. Returns how much else is wrong: messages that
/// entries name but that are missing, and counts and times that belong to no entry. Needs 8 bytes of memory per entry.
pub(crate) fn audit(
    tables: &QueueTables,
    txn: &RoTxn<'_>,
    seen: &mut dyn FnMut(bool),
) -> Result<u64, heed::Error> {
    // Number of the message, and in the lowest bit whether the entry shares it with others.
    let mut named = Vec::new();
    for entry in tables.entries.iter(txn)? {
        let (key, value) = entry?;
        let head = EntryHead::decode(value);
        let (Ok(key), Some(head)) = (EntryKey::try_from(key), head) else {
            seen(false);
            continue;
        };
        if head.number != 0 {
            named.push(head.number << 1 | u64::from(!head.sole));
        }
        let expires = match head.swept() {
            Some(second) => tables.expiry.get(txn, &tables::expiry_key(second, &key))?.is_some(),
            None => true,
        };
        seen(expires);
    }
    named.sort_unstable();
    let mut named = named.into_iter().peekable();
    let (mut wrong, mut counted) = (0, 0);
    for body in tables.bodies.iter(txn)? {
        let (key, record) = body?;
        let number = tables::number(key).unwrap_or_default();
        while named.next_if(|name| name >> 1 < number).is_some() {
            wrong += 1;
        }
        let (mut entries, mut shared) = (0, false);
        while let Some(name) = named.next_if(|name| name >> 1 == number) {
            entries += 1;
            shared |= name & 1 == 1;
        }
        let refs = tables.refs.get(txn, key)?;
        counted += u64::from(refs.is_some());
        let fits = match refs {
            Some(refs) => shared && tables::refs(refs) == Some(entries),
            None => entries == 1,
        };
        seen(fits && message::decode(record).is_some());
    }
    wrong += named.count() as u64;
    wrong += tables.refs.len(txn)?.saturating_sub(counted);
    for received in tables.received.iter(txn)? {
        seen(tables::received(received?.0).is_some());
    }
    for due in tables.expiry.iter(txn)? {
        let (key, _) = due?;
        let sound = match tables::expiry(key) {
            Some((second, queue, seq)) => match tables::entry_key(queue, seq) {
                Some(entry) => {
                    let head = tables.entries.get(txn, &entry)?.and_then(EntryHead::decode);
                    head.is_some_and(|head| head.swept() == Some(second))
                }
                None => false,
            },
            None => false,
        };
        wrong += u64::from(!sound);
    }
    Ok(wrong)
}

/// Counts the records that [`audit`] will report.
pub(crate) fn records(tables: &QueueTables, txn: &RoTxn<'_>) -> Result<u64, heed::Error> {
    let mut records = 0;
    for table in [tables.entries, tables.bodies, tables.received] {
        records += table.len(txn)?;
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use std::ops::Bound;

    use crate::table::WriteTxn;
    use gateway_core::{Journal as _, QoS, QueueEntry, QueueId, QueueOp};

    use super::*;
    use crate::state::{
        EmbeddedState, StateOptions,
        queues::tests::{message, open},
    };

    /// Records and what is wrong after `change`.
    fn after(change: impl Fn(&QueueTables, &mut WriteTxn<'_>) -> Result<(), heed::Error>) -> (u64, u64) {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path(), &StateOptions::default());
        let shared = message(b"shared", Some(1_900_000_000_000));
        for queue in 1..4 {
            let add = |seq, message| {
                let entry = QueueEntry::new(QueueId(queue), seq, message, QoS::AtLeastOnce, None);
                store.submit(QueueOp::Append(Arc::new(entry)));
            };
            add(0, Arc::clone(&shared));
            add(1, message(b"own", None));
        }
        drop(store);
        let store = open(dir.path(), &StateOptions::default());
        store.environment.writing(|txn| change(&store.tables.queues, txn)).unwrap();
        found(&store)
    }

    fn found(store: &EmbeddedState) -> (u64, u64) {
        let (mut records, mut wrong) = (0, 0);
        let more = store.environment.reading(|txn| {
            audit(&store.tables.queues, txn, &mut |sound| {
                records += 1;
                wrong += u64::from(!sound);
            })
        });
        (records, wrong + more.unwrap())
    }

    #[test]
    fn whatever_is_missing_or_too_many_is_found() {
        assert_eq!(after(|_, _| Ok(())), (10, 0));
        let first =
            |table: Table, txn: &WriteTxn<'_>| table.first(txn).map(|found| found.unwrap().0.to_vec());
        let last = |table: Table, txn: &WriteTxn<'_>| table.last(txn).map(|found| found.unwrap().0.to_vec());
        let lost_body = after(|t, txn| t.bodies.delete(txn, &last(t.bodies, txn)?).map(|_| ()));
        assert_eq!(lost_body, (9, 1));
        let lost_entry = after(|t, txn| t.entries.delete(txn, &last(t.entries, txn)?).map(|_| ()));
        assert_eq!(lost_entry, (9, 1), "a body without an entry");
        let wrong_count = after(|t, txn| t.refs.put(txn, &first(t.refs, txn)?, &2u32.to_le_bytes()));
        assert_eq!(wrong_count, (10, 1));
        let lost_count =
            after(|t, txn| t.refs.delete_range(txn, &(Bound::Unbounded, Bound::Unbounded)).map(drop));
        assert_eq!(lost_count, (10, 1));
        let idle_count = after(|t, txn| t.refs.put(txn, &tables::number_key(99), &2u32.to_le_bytes()));
        assert_eq!(idle_count, (10, 1));
        let lost_expiry = after(|t, txn| t.expiry.delete(txn, &first(t.expiry, txn)?).map(|_| ()));
        assert_eq!(lost_expiry, (10, 1));
        let idle_expiry = after(|t, txn| {
            t.expiry.put(txn, &tables::expiry_key(5, &tables::entry_key(QueueId(9), 0).unwrap()), &[])
        });
        assert_eq!(idle_expiry, (10, 1));
    }
}
