//! Where latest values are kept: in a database that `db_addr` names, else in the data directory.

use std::{path::PathBuf, sync::Arc};

use tracing::info;

use super::StartError;
use crate::{
    config::Config,
    store::{
        DataDir, EmbeddedLatest, EmbeddedOptions, Latest, LatestOptions, LatestStore, ScyllaLatest,
        ScyllaOptions, VersionMark,
    },
};

/// Latest values, not yet running.
pub(super) struct Opened {
    pub(super) latest: Arc<Latest>,
    /// Where a damaged file was moved.
    pub(super) set_aside: Option<PathBuf>,
}

/// Opens what is in the data directory; a database is connected to later, by the first write or read.
pub(super) fn open(config: &Config, directory: &Arc<DataDir>) -> Result<Opened, StartError> {
    let (store, set_aside) = match config.contact_points() {
        none if none.is_empty() => embedded(config, directory)?,
        contact_points => (database(config, contact_points)?, None),
    };
    let options = LatestOptions {
        flush_interval: config.latest.flush_interval.0,
        max_bytes: config.latest.max_bytes.0,
        topics_per_device: config.latest.topics_per_device,
        excluded: config.latest.excluded.clone(),
        version_start: 0,
        mark: Some(Arc::new(VersionMark::open(directory)?)),
        ..LatestOptions::default()
    };
    Ok(Opened { latest: Latest::new(store, options), set_aside })
}

fn embedded(
    config: &Config,
    directory: &Arc<DataDir>,
) -> Result<(Arc<dyn LatestStore>, Option<PathBuf>), StartError> {
    let topics_per_device = config.latest.topics_per_device;
    let options = EmbeddedOptions { topics_per_device, ..EmbeddedOptions::default() };
    let store = EmbeddedLatest::open(directory, &options)?;
    let aside = store.set_aside().cloned();
    Ok((Arc::new(store), aside))
}

fn database(config: &Config, contact_points: Vec<String>) -> Result<Arc<dyn LatestStore>, StartError> {
    info!(nodes = contact_points.join(","), "latest values are kept in the database");
    let options = ScyllaOptions {
        contact_points,
        topics_per_device: config.latest.topics_per_device,
        ..ScyllaOptions::default()
    };
    Ok(Arc::new(ScyllaLatest::new(options)?))
}
