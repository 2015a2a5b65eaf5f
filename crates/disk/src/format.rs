//! The format of each store, as it is noted in its environment: its tables, and the list of its upgrades, one for each format that
//! was ever replaced. The tools read the newest format only.

use heed::{Env, RoTxn, RwTxn, WithoutTls, types::Bytes};
use ledger::Position;
use lmdb_0_9_pages::{Entry, Layout};

/// The table of the format.
pub(super) const META: &str = "meta";
const FORMAT: &[u8] = b"format";
/// Key of the CRC-32 of these records: damage must not pass for a newer format, which would be refused.
pub(super) const SUM: &[u8] = b"sum";

/// Key of the environment's place in the ledger of a cluster: the [position](Position) of the last record that is in it. Outside a
/// cluster there is none.
pub(super) const POSITION: &[u8] = b"position";

/// No format is so high; without a sum, as older versions left it, this is damage.
const IMPOSSIBLE: u32 = 1000;

/// Rewrites what is there from one format to the next.
pub(super) type FormatUpgrade = fn(&Env<WithoutTls>, &mut RwTxn<'_>) -> Result<(), heed::Error>;

/// The tables of queues, in the order of `QueueTables`.
pub(super) const QUEUE_TABLES: [&str; 5] = ["bodies", "refs", "entries", "received", "expiry"];
/// The tables of sessions, in the order of `SessionTables`.
pub(super) const SESSION_TABLES: [&str; 3] = ["sessions", "subscriptions", "shared_groups"];
/// The table of retained messages.
pub(super) const RETAINED_TABLE: &str = "retained";

/// The tables of the state of sessions.
pub(super) const STATE_TABLES: [&str; 9] = {
    let ([a, b, c, d, e], [f, g, h]) = (QUEUE_TABLES, SESSION_TABLES);
    [a, b, c, d, e, f, g, h, RETAINED_TABLE]
};

/// The tables of small records, in the order of their kinds.
pub(super) const RECORD_TABLES: [&str; 5] = ["answers", "scheduled", "commands", "groups", "shadows"];

/// Table of the changes of latest values that a ledger does not have yet. As [`META`] it is an environment's note on itself: no record
/// has it, and a file that lacks it is whole. Outside a cluster there is none.
pub(super) const CHANGED: &str = "changed";

/// Tables that mean nothing without each other.
type Part = &'static [&'static str];

/// A store: its folder, its tables in the newest format by parts, and its upgrades from format 1 on.
type StoreFormat = (&'static str, &'static [Part], &'static [FormatUpgrade]);

const STORES: &[StoreFormat] = &[
    ("latest", &[&["latest", "newest"]], &[]),
    (
        "state",
        &[
            &["bodies", "refs", "entries", "expiry"],
            &["received"],
            &["sessions", "subscriptions"],
            &["shared_groups"],
            &["retained"],
        ],
        &[],
    ),
    ("records", &[&["answers"], &["scheduled"], &["commands"], &["groups"], &["shadows"]], &[]),
];

/// The upgrades of a store.
pub(super) fn upgrades(store: &str) -> &'static [FormatUpgrade] {
    STORES.iter().find(|(name, ..)| *name == store).map_or(&[], |(.., upgrades)| *upgrades)
}

/// The parts of a store in the newest format, without the table of the format; none of a store that is not known.
pub(super) fn parts(store: &str) -> &'static [Part] {
    STORES.iter().find(|(name, ..)| *name == store).map_or(&[], |(_, parts, _)| *parts)
}

/// The tables of all parts.
pub(super) fn tables(store: &str) -> impl Iterator<Item = &'static str> {
    parts(store).iter().copied().flatten().copied()
}

/// Facts that the file of a store is expected to have.
pub(super) fn layout(store: &str) -> Layout<'static> {
    Layout { tables: tables(store).collect(), note: META, is_sound }
}

/// Returns whether the records of the format are as they were written.
fn is_sound(records: &[Entry]) -> bool {
    let value = |wanted: &[u8]| records.iter().find(|(key, _)| key == wanted).map(|(_, value)| &value[..]);
    match (value(FORMAT), value(SUM)) {
        (Some(format), Some(sum)) => *sum == crc32fast::hash(format).to_le_bytes(),
        (Some(format), None) => format.try_into().is_ok_and(|bytes| u32::from_le_bytes(bytes) < IMPOSSIBLE),
        (None, _) => records.is_empty(),
    }
}

/// The records of the format, and a position for an environment that has none.
pub(super) fn note(format: u32) -> [(&'static [u8], Vec<u8>); 3] {
    let format = format.to_le_bytes();
    let sum = crc32fast::hash(&format).to_le_bytes();
    [(FORMAT, format.into()), (SUM, sum.into()), (POSITION, Position::NONE.into())]
}

/// The format after all upgrades.
pub(super) const fn newest(upgrades: &[FormatUpgrade]) -> u32 {
    upgrades.len() as u32 + 1
}

/// Why a store cannot be read as it is, if it has another format than the newest.
pub(super) fn problem(
    store: &str,
    env: &Env<WithoutTls>,
    txn: &RoTxn<'_, WithoutTls>,
) -> Result<Option<String>, heed::Error> {
    let newest = newest(upgrades(store));
    Ok(match found(env, txn)? {
        Some(found) if found > newest => Some(refusal(store, found, newest)),
        Some(found) if found < newest => {
            Some(format!("{store} have format {found}: start this version on it first"))
        }
        _ => None,
    })
}

/// Why a store cannot be copied, if a newer version wrote it: what is meant by its tables is not known.
pub(super) fn newer(
    store: &str,
    env: &Env<WithoutTls>,
    txn: &RoTxn<'_, WithoutTls>,
) -> Result<Option<String>, heed::Error> {
    let newest = newest(upgrades(store));
    let found = found(env, txn)?.filter(|found| *found > newest);
    Ok(found.map(|found| refusal(store, found, newest)))
}

/// The format of what is there; `None` in a new environment.
pub(super) fn found(env: &Env<WithoutTls>, txn: &RoTxn<'_, WithoutTls>) -> Result<Option<u32>, heed::Error> {
    let Some(meta) = env.open_database::<Bytes, Bytes>(txn, Some(META))? else { return Ok(None) };
    let format = meta.get(txn, FORMAT)?;
    Ok(format.map(|bytes| bytes.try_into().map_or(u32::MAX, u32::from_le_bytes)))
}

/// Text for a store of a newer format.
pub(super) fn refusal(store: &str, found: u32, newest: u32) -> String {
    format!("{store} have format {found}, this version reads up to {newest}: use the version that wrote them")
}
