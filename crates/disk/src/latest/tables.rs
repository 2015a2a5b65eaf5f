//! The tables of latest values. `latest`: device and topic -> record. `newest`: topic -> the device that wrote it last. Both change in
//! one transaction, and so does `changed`, if there is a ledger. Keys are explained in `keys`, records in `record`.

use store::StoreError;

use crate::{environment::Environment, format::CHANGED, table::Table};

#[derive(Clone, Copy)]
pub(super) struct LatestTables {
    pub(super) latest: Table,
    pub(super) newest: Table,
    /// See `changed`.
    pub(super) changed: Option<Table>,
}

/// Number of tables, with `changed`.
pub(super) const TABLES: u32 = 3;

impl LatestTables {
    /// Opens or creates them, in the newest format; `changed` if it is wanted.
    pub(super) fn open(environment: &Environment, is_shipped: bool) -> Result<Self, StoreError> {
        environment.open_tables(|txn| {
            let latest = environment.table(txn, "latest")?;
            let newest = environment.table(txn, "newest")?;
            let changed = if is_shipped { Some(environment.table(txn, CHANGED)?) } else { None };
            Ok(Self { latest, newest, changed })
        })
    }
}
