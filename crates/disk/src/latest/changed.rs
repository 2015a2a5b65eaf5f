//! Changes that the ledger does not have yet: a table on disk, changed in the transaction of the value itself.
//!
//! Key in `latest` -> version of the change, and the key in `newest` that goes with it. A key that changes again has one entry, whose
//! version is the new one: what was shipped is taken out only if nothing came since. So nothing is forgotten, whatever
//! ends the process, and nothing of it is in memory. There are no more entries than values, but for removals, which have a bound.

use heed::RoTxn;

use super::tables::LatestTables;
use crate::table::{Table, WriteTxn};

/// Removals that may wait for the ledger, about. Beyond them one that is made is not told: a gateway that takes over has the value again.
pub(super) const MOST_REMOVALS: u64 = if cfg!(test) { 100 } else { 100_000 };

const VERSION: usize = 8;

/// Notes a change.
pub(super) fn note(
    changed: Table,
    txn: &mut WriteTxn<'_>,
    key: &[u8],
    version: u64,
    newest: Option<&[u8]>,
) -> Result<(), heed::Error> {
    changed.put(txn, key, &entry(version, newest))
}

/// An entry.
pub(super) fn entry(version: u64, newest: Option<&[u8]>) -> Vec<u8> {
    [&version.to_le_bytes(), newest.unwrap_or_default()].concat()
}

/// The key in `newest` of an entry.
pub(super) fn newest(entry: &[u8]) -> Option<&[u8]> {
    entry.get(VERSION..).filter(|key| !key.is_empty())
}

/// Returns whether a removal may be noted.
pub(super) fn admits_removal(
    tables: &LatestTables,
    txn: &RoTxn<'_>,
    key: &[u8],
) -> Result<bool, heed::Error> {
    let Some(changed) = tables.changed else { return Ok(true) };
    Ok(changed.len(txn)? < tables.latest.len(txn)? + MOST_REMOVALS || changed.get(txn, key)?.is_some())
}
