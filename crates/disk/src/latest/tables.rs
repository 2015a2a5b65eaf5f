//! The tables of latest values. `latest`: device and topic -> record. `newest`: topic -> the device that wrote it last. Both change in
//! one transaction. Keys are explained in `keys`, records in `record`.

use std::sync::Arc;

use store::{DataDir, StoreError};

use crate::environment::{Environment, EnvironmentOptions, Table};

pub(super) struct LatestTables {
    pub(super) environment: Environment,
    pub(super) latest: Table,
    pub(super) newest: Table,
}

impl LatestTables {
    /// Opens the environment in the folder `latest` of the data directory, with a first memory map of so many bytes.
    pub(super) fn open(directory: &Arc<DataDir>, map_size: usize) -> Result<Self, StoreError> {
        let settings =
            EnvironmentOptions { name: "latest", map_size, max_map_size: usize::MAX, tables: 2, hook: None };
        let environment = Environment::open(directory, settings)?;
        let (latest, newest) = environment.open_tables(|txn| {
            let latest = environment.env.create_database(txn, Some("latest"))?;
            Ok((latest, environment.env.create_database(txn, Some("newest"))?))
        })?;
        Ok(Self { environment, latest, newest })
    }
}
