//! Room for all shadows together.
//!
//! Counted are keys and values, large ones in whole pages as they are stored. While little is free a device may hold no more
//! than twice as much as is free, as in [`gateway_core::Shares`], so that a few devices leave room for the others. What remains
//! of deleted shadows goes first when there is none.

use std::{
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use heed::RoTxn;

use crate::{environment::PAGE, table::Table, table::WriteTxn};
use store::encoding::fields;

/// Records that are looked at for one change in search of remains of deleted shadows.
const LOOK: usize = 256;

/// Bytes counted for a record besides key and value.
const OVERHEAD: usize = 32;

/// A larger record is in pages of its own.
const LARGE: usize = PAGE / 2;

/// Bytes that a record counts for.
pub(super) fn size(key: &[u8], value_bytes: usize) -> u64 {
    let bytes = key.len() + value_bytes;
    let stored = if bytes < LARGE { bytes } else { key.len() + value_bytes.next_multiple_of(PAGE) };
    (stored + OVERHEAD) as u64
}

/// Bytes that all records count for.
pub(super) fn filled(table: Table, txn: &RoTxn<'_>) -> Result<u64, heed::Error> {
    table.iter(txn)?.map(|entry| entry.map(|(key, value)| size(key, value.len()))).sum()
}

/// The bound, what there is, and how far the search for remains is.
pub(super) struct ShadowRoom {
    max_bytes: u64,
    /// As of the last commit, for others too.
    committed: Arc<AtomicU64>,
    /// The same with what the transaction has changed.
    filled: u64,
    /// The key after which the search goes on.
    looked: Vec<u8>,
}

impl ShadowRoom {
    /// Room for `max_bytes`, of which `committed` are taken.
    pub(super) fn new(max_bytes: u64, committed: Arc<AtomicU64>) -> Self {
        let filled = committed.load(Relaxed);
        Self { max_bytes, committed, filled, looked: Vec::new() }
    }

    /// A transaction begins.
    pub(super) fn begun(&mut self) {
        self.filled = self.committed.load(Relaxed);
    }

    /// The transaction is durable.
    pub(super) fn committed(&self) {
        self.committed.store(self.filled, Relaxed);
    }

    /// Notes that records of `before` bytes have `now`.
    pub(super) fn note(&mut self, before: u64, now: u64) {
        self.filled = (self.filled + now).saturating_sub(before);
    }

    /// Tells whether the record under `key` may grow by so many bytes.
    pub(super) fn admits(
        &mut self,
        table: Table,
        txn: &mut WriteTxn<'_>,
        key: &[u8],
        growth: u64,
    ) -> Result<bool, heed::Error> {
        if self.filled + growth > self.max_bytes {
            self.forget_deleted(table, txn, key)?;
        }
        let free = self.max_bytes.saturating_sub(self.filled);
        if growth > free {
            store::counters::count(|c| c.shadow_refused_full.add(1));
            return Ok(false);
        }
        let may_hold = free.saturating_mul(2);
        if self.filled <= may_hold || held(table, txn, key)? + growth <= may_hold {
            return Ok(true);
        }
        store::counters::count(|c| c.shadow_refused_share.add(1));
        Ok(false)
    }

    /// Removes what remains of some deleted shadows, but not of that under `key`. A shadow that is made again begins at version
    /// 1 then.
    fn forget_deleted(
        &mut self,
        table: Table,
        txn: &mut WriteTxn<'_>,
        key: &[u8],
    ) -> Result<(), heed::Error> {
        let mut deleted = Vec::new();
        let mut last = None;
        let begin = if self.looked.is_empty() { Bound::Unbounded } else { Bound::Excluded(&self.looked[..]) };
        for entry in table.range(txn, &(begin, Bound::Unbounded))?.take(LOOK) {
            let (found, value) = entry?;
            let is_deleted = |value: fields::Input<'_>| store::is_deleted_shadow(value.0);
            if found != key && fields::open(value).is_some_and(is_deleted) {
                deleted.push((found.to_vec(), size(found, value.len())));
            }
            last = Some(found.to_vec());
        }
        self.looked = last.unwrap_or_default();
        for (key, bytes) in deleted {
            table.delete(txn, &key)?;
            self.note(bytes, 0);
        }
        Ok(())
    }
}

/// Bytes of the records of the device whose record is under `key`.
fn held(table: Table, txn: &RoTxn<'_>, key: &[u8]) -> Result<u64, heed::Error> {
    let Some(nul) = key.iter().position(|&byte| byte == 0) else { return Ok(0) };
    let of_device = table.prefix_iter(txn, &key[..=nul])?;
    of_device.map(|entry| entry.map(|(key, value)| size(key, value.len()))).sum()
}
