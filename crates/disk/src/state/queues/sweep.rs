//! Removing stretches of queues and what has expired, a bounded number of entries in each transaction.

use std::ops::Bound;

use gateway_core::QueueId;
use heed::RoTxn;

use super::{
    batch::QueueCut,
    tables::{self, EntryHead, EntryKey, QueueTables},
};
use crate::table::WriteTxn;
use store::Expiry;

/// Entries of a queue that are still to be removed.
#[derive(Debug, Clone)]
pub(super) struct Sweep {
    pub(super) queue: QueueId,
    next: EntryKey,
    /// Last entry concerned: entries after it were added later.
    last: EntryKey,
}

impl Sweep {
    /// Finds the entries of now that `cut` removes; `None` if there are none.
    pub(super) fn new(
        tables: &QueueTables,
        txn: &WriteTxn<'_>,
        cut: QueueCut,
    ) -> Result<Option<Self>, heed::Error> {
        let (queue, from, count) = match cut {
            QueueCut::Trim { queue, from, count } => (queue, from, count),
            QueueCut::Purge { queue } => (queue, 0, usize::MAX),
            QueueCut::NoteSent { .. } => return Ok(None),
        };
        let (Some(next), Some(end)) = (tables::entry_key(queue, from), tables::last_key(queue)) else {
            return Ok(None);
        };
        let range = (Bound::Included(&next[..]), Bound::Included(&end[..]));
        let last = if count == usize::MAX {
            tables.entries.rev_range(txn, &range)?.next().transpose()?
        } else {
            tables.entries.range(txn, &range)?.take(count).last().transpose()?
        };
        let last = last.and_then(|(key, _)| EntryKey::try_from(key).ok());
        Ok(last.map(|last| Self { queue, next, last }))
    }

    /// Returns whether the sweep may still remove an entry at this place of its queue, or hides it until then.
    pub(super) fn covers(&self, seq: u64) -> bool {
        tables::entry_key(self.queue, seq).is_some_and(|key| key <= self.last)
    }

    /// Removes up to `room` entries: how many, and whether all are gone.
    pub(super) fn run(
        &mut self,
        tables: &QueueTables,
        txn: &mut WriteTxn<'_>,
        room: usize,
    ) -> Result<(usize, bool), heed::Error> {
        let mut removed = 0;
        let mut keys: Vec<EntryKey> = Vec::new();
        while removed < room {
            let wanted = (room - removed).min(1000);
            let range = (Bound::Included(&self.next[..]), Bound::Included(&self.last[..]));
            for entry in tables.entries.range(txn, &range)?.take(wanted) {
                keys.extend(EntryKey::try_from(entry?.0));
            }
            let Some(&last) = keys.last() else { return Ok((removed, true)) };
            for key in keys.drain(..) {
                tables.remove(txn, &key)?;
                removed += 1;
            }
            self.next = last;
        }
        Ok((removed, false))
    }
}

/// Removes up to `room` entries whose second has come, unless `keeps` says otherwise: adds (queue, messages, bytes) to
/// `expired`. True if more are due.
pub(super) fn expire(
    tables: &QueueTables,
    txn: &mut WriteTxn<'_>,
    now: u64,
    room: usize,
    keeps: &dyn Expiry,
    expired: &mut Vec<(QueueId, usize, u64)>,
) -> Result<bool, heed::Error> {
    let mut due = Vec::new();
    let mut more = false;
    for entry in tables.expiry.iter(txn)? {
        let (key, _) = entry?;
        let place = tables::expiry(key);
        if place.is_some_and(|(second, ..)| second > now) {
            break;
        }
        if due.len() == room {
            more = true;
            break;
        }
        due.push((key.to_vec(), place));
    }
    due.sort_unstable_by_key(|(_, place)| place.map(|(_, queue, seq)| (queue, seq)));
    for (key, place) in due {
        tables.expiry.delete(txn, &key)?;
        let Some((_, queue, seq)) = place else { continue };
        let Some(entry) = tables::entry_key(queue, seq) else { continue };
        if let Some(head) = tables.entries.get(txn, &entry)?.and_then(EntryHead::decode)
            && keeps.keeps(queue, seq, head.qos)
        {
            tables.note_sent(txn, &entry, head)?;
            continue;
        }
        let Some(head) = tables.remove(txn, &entry)? else { continue };
        match expired.last_mut() {
            Some((last, messages, bytes)) if *last == queue => {
                *messages += 1;
                *bytes += u64::from(head.cost);
            }
            _ => expired.push((queue, 1, head.cost.into())),
        }
    }
    Ok(more)
}

/// The second at which the next message expires.
pub(super) fn first_due(tables: &QueueTables, txn: &RoTxn<'_>) -> Result<Option<u64>, heed::Error> {
    let first = tables.expiry.first(txn)?;
    Ok(first.and_then(|(key, _)| tables::expiry(key)).map(|(second, ..)| second))
}
