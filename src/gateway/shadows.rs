//! The store of device shadows, as of latest values: a database that `db_addr` names, or else the records in the data directory.

use std::{sync::Arc, time::Duration};

use broker::Reserved;
use cassandra::ScyllaShadows;
use config::Config;
use device_shadows::{DeviceShadows, ShadowOptions, ShadowService};
use disk::EmbeddedRecords;
use store::{RecordShadows, RecordStore as _, ShadowStore, StoreHealth};

/// The shadows, and the store of those that are on this disk.
#[derive(Clone)]
pub(super) struct OpenedShadows {
    pub(super) shadows: Arc<ShadowService>,
    on_disk: Option<Arc<EmbeddedRecords>>,
}

/// Shadows in the database, if there is one, else in `records`; `None` without either.
pub(super) fn open(
    config: &Config,
    records: Option<&Arc<EmbeddedRecords>>,
    database: Option<Arc<ScyllaShadows>>,
) -> Option<OpenedShadows> {
    let (store, on_disk): (Arc<dyn ShadowStore>, _) = match (database, records) {
        (Some(database), _) => (database, None),
        (None, Some(records)) => {
            (Arc::new(RecordShadows::new(Arc::clone(records) as _)), Some(Arc::clone(records)))
        }
        (None, None) => return None,
    };
    Some(OpenedShadows { shadows: ShadowService::new(store, options_of(config)), on_disk })
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

    /// The health of their store on this disk.
    pub(super) fn health(&self) -> Option<StoreHealth> {
        self.on_disk.as_ref().map(|store| store.health())
    }

    /// Bytes of the disk that they take; `None` in a database.
    pub(super) fn stored_bytes(&self) -> Option<u64> {
        self.on_disk.as_ref().map(|store| store.shadow_bytes())
    }
}
