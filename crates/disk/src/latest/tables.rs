//! The tables of latest values. `latest`: device and topic -> record. `newest`: topic -> the device that wrote it last. Both change in
//! one transaction. Keys are explained in `keys`, records in `record`.

use store::StoreError;

use crate::{environment::Environment, table::Table};

#[derive(Clone, Copy)]
pub(super) struct LatestTables {
    pub(super) latest: Table,
    pub(super) newest: Table,
}

impl LatestTables {
    /// Opens or creates them, in the newest format.
    pub(super) fn open(environment: &Environment) -> Result<Self, StoreError> {
        environment.open_tables(|txn| {
            let latest = environment.table(txn, "latest")?;
            Ok(Self { latest, newest: environment.table(txn, "newest")? })
        })
    }
}
