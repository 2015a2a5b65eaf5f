//! The store of device shadows, as of latest values: a database that `db_addr` names, or else the data directory.

use std::{path::PathBuf, sync::Arc, time::Duration};

use broker::Reserved;
use cassandra::ScyllaShadows;
use config::Config;
use device_shadows::{DeviceShadows, ShadowOptions, ShadowService};
use disk::{DurableOptions, EmbeddedShadows};
use store::{DataDir, ShadowStore, StoreHealth};

use super::StartError;

/// The shadows, and the store of those that are on this disk.
#[derive(Clone)]
pub(super) struct OpenedShadows {
    pub(super) shadows: Arc<ShadowService>,
    on_disk: Option<Arc<EmbeddedShadows>>,
}

/// Opens them in the database, if there is one, else in the data directory. Blocks on the disk.
pub(super) fn open(
    config: &Config,
    directory: &Arc<DataDir>,
    database: Option<Arc<ScyllaShadows>>,
) -> Result<OpenedShadows, StartError> {
    if let Some(store) = database {
        return Ok(OpenedShadows { shadows: ShadowService::new(store, options_of(config)), on_disk: None });
    }
    // Waiting shadows are on the memory account before they come here.
    let options = DurableOptions { map_size: 64 << 20, ..DurableOptions::default() };
    let on_disk =
        Arc::new(EmbeddedShadows::open(directory, &options, config.shadow.max_total_bytes.0 as u64)?);
    let store: Arc<dyn ShadowStore> = Arc::clone(&on_disk) as _;
    Ok(OpenedShadows { shadows: ShadowService::new(store, options_of(config)), on_disk: Some(on_disk) })
}

/// Longest time that a request may wait for earlier ones.
const MAX_WAIT: Duration = Duration::from_secs(10);

fn options_of(config: &Config) -> ShadowOptions {
    let shadow = &config.shadow;
    ShadowOptions {
        topics: ::shadow::ShadowTopics::new(&shadow.topic_prefix).expect("the configuration was validated"),
        limits: ::shadow::DocumentLimits { bytes: shadow.max_bytes.0, depth: shadow.max_depth },
        max_names: shadow.max_named,
        max_requests: shadow.max_requests,
        max_wait: MAX_WAIT,
    }
}

impl OpenedShadows {
    /// Returns the receiver of messages from devices.
    pub(super) fn reserved(&self) -> Arc<dyn Reserved> {
        Arc::new(DeviceShadows(Arc::clone(&self.shadows)))
    }

    /// Returns the place to which a damaged file was moved.
    pub(super) fn set_aside(&self) -> Option<PathBuf> {
        self.on_disk.as_ref().and_then(|store| store.set_aside().cloned())
    }

    /// The health of the store on this disk, by name.
    pub(super) fn health(&self) -> Option<(&'static str, StoreHealth)> {
        self.on_disk.as_ref().map(|store| ("shadows", store.health()))
    }

    /// Bytes of the disk that they take; `None` in a database.
    pub(super) fn stored_bytes(&self) -> Option<u64> {
        self.on_disk.as_ref().map(|store| store.stored_bytes())
    }

    /// Nothing more is written.
    pub(super) fn note_closed(&self) {
        if let Some(store) = &self.on_disk {
            store.note_closed();
        }
    }
}
