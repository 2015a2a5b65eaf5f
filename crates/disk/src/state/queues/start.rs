//! Reading the queues, and putting them in order, before the first session comes back.

use std::ops::Bound;

use gateway_core::{QoS, QueueId};
use hashbrown::HashMap;

use super::tables::{self, EntryHead, EntryKey, QueueTables};
use crate::{environment::Environment, table::WriteTxn};
use store::{QueueSummary, StoreError};

/// Entries moved in one transaction.
const MAX_MOVED: usize = 10_000;

/// All queues with entries or received identifiers, in order. Of each the first `begun` entries may have been sent.
pub(super) fn summaries(
    environment: &Environment,
    tables: &QueueTables,
    begun: usize,
) -> Result<Vec<QueueSummary>, StoreError> {
    environment.reading(|txn| {
        let mut queues: Vec<QueueSummary> = Vec::new();
        for entry in tables.entries.iter(txn)? {
            let (key, value) = entry?;
            let Some((queue, seq)) = tables::place(key) else { continue };
            // A damaged value is met when the entry is loaded.
            let cost = EntryHead::decode_cost(value).unwrap_or(0);
            if queues.last().is_none_or(|last| last.queue != queue) {
                queues.push(QueueSummary { queue, first: seq, ..QueueSummary::default() });
            }
            let Some(summary) = queues.last_mut() else { continue };
            summary.messages += 1;
            summary.bytes += u64::from(cost);
            summary.next = seq + 1;
            if summary.messages <= begun {
                summary.begun = seq + 1;
                if EntryHead::is_exact(value) {
                    summary.exact = seq + 1;
                }
            }
        }
        let mut with_received: Vec<QueueSummary> = Vec::new();
        let mut known = std::mem::take(&mut queues).into_iter().peekable();
        for entry in tables.received.iter(txn)? {
            let Some((queue, packet_id)) = tables::received(entry?.0) else { continue };
            while let Some(summary) = known.next_if(|summary| summary.queue <= queue) {
                with_received.push(summary);
            }
            if with_received.last().is_none_or(|last| last.queue != queue) {
                with_received.push(QueueSummary { queue, ..QueueSummary::default() });
            }
            if let Some(summary) = with_received.last_mut() {
                summary.received.push(packet_id);
            }
        }
        with_received.extend(known);
        Ok(with_received)
    })
}

/// Moves what shared groups had given to a member at QoS 1 and it did not acknowledge to the end of the group's queue,
/// in the order of the messages [MQTT-4.8.2-5]. QoS 2 stays with its member [MQTT-4.8.2-4].
pub(super) fn regroup(environment: &Environment, tables: &QueueTables) -> Result<usize, StoreError> {
    let mut moves: Vec<(QueueId, u64, EntryKey)> = environment.reading(|txn| {
        let mut moves = Vec::new();
        for entry in tables.entries.iter(txn)? {
            let (key, value) = entry?;
            if !EntryHead::has_group(value) {
                continue;
            }
            if let (Some(head), Ok(key)) = (EntryHead::decode(value), EntryKey::try_from(key))
                && head.qos == QoS::AtLeastOnce
                && head.number != 0
            {
                moves.push((head.group, head.number, key));
            }
        }
        Ok(moves)
    })?;
    moves.sort_unstable();
    let mut next = HashMap::<QueueId, u64, ahash::RandomState>::default();
    for moves in moves.chunks(MAX_MOVED) {
        let before = next.clone();
        let moved = environment.writing(|txn| {
            next.clone_from(&before);
            for &(group, _, key) in moves {
                let seq = match next.get(&group) {
                    Some(&seq) => seq,
                    None => end(tables, txn, group)?,
                };
                move_entry(tables, txn, &key, group, seq)?;
                next.insert(group, seq + 1);
            }
            Ok(())
        });
        moved.map_err(|e| environment.failed(&e))?;
    }
    Ok(moves.len())
}

/// One more than the last place in use.
fn end(tables: &QueueTables, txn: &WriteTxn<'_>, queue: QueueId) -> Result<u64, heed::Error> {
    let (Some(first), Some(last)) = (tables::entry_key(queue, 0), tables::last_key(queue)) else {
        return Ok(0);
    };
    let range = (Bound::Included(&first[..]), Bound::Included(&last[..]));
    let last = tables.entries.rev_range(txn, &range)?.next().transpose()?;
    Ok(last.and_then(|(key, _)| tables::place(key)).map_or(0, |(_, seq)| seq + 1))
}

fn move_entry(
    tables: &QueueTables,
    txn: &mut WriteTxn<'_>,
    key: &EntryKey,
    group: QueueId,
    seq: u64,
) -> Result<(), heed::Error> {
    let (Some(to), Some(head)) =
        (tables::entry_key(group, seq), tables.entries.get(txn, key)?.and_then(EntryHead::decode))
    else {
        return Ok(());
    };
    tables.entries.delete(txn, key)?;
    if let Some(second) = head.swept() {
        tables.expiry.delete(txn, &tables::expiry_key(second, key))?;
    }
    // The next receiver has not had the message, and has other subscription identifiers.
    let head = EntryHead { group: QueueId::NONE, ids: None, sent: false, ..head };
    if let Some(second) = head.swept() {
        tables.expiry.put(txn, &tables::expiry_key(second, &to), &[])?;
    }
    let mut value = Vec::new();
    head.encode(&mut value);
    tables.entries.put(txn, &to, &value)
}
