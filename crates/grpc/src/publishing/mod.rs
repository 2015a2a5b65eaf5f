//! Work of the Publisher for a message: routing now, or when its time has come, and once for each key.
//!
//! ```text
//! keys      messages that are published once however often they are asked for
//! schedule  messages that are published later
//! routing   to those who subscribe, or to one device
//! routed    a message that was routed, and the wait for what becomes of it
//! ```

pub(crate) mod keys;
pub(crate) mod routed;
pub(crate) mod routing;
pub(crate) mod schedule;

use std::{sync::Arc, time::Duration};

use broker::Broker;
use store::{RecordStore, StoreError};
use tokio::sync::watch;

use self::{
    keys::{KeyOptions, RequestKeys},
    schedule::{Schedule, ScheduleOptions, TopicSpread},
};
use crate::{bounds::GrpcConfig, error::GrpcError};

/// Interval at which expired keys are removed.
const SWEEP: Duration = Duration::from_secs(1);

/// Memory of the Publisher: the keys of requests and their answers, and messages that wait for their time.
#[derive(Clone)]
pub struct PublisherMemory {
    pub(crate) keys: Arc<RequestKeys>,
    pub(crate) schedule: Arc<Schedule>,
}

impl PublisherMemory {
    /// Reads what is in `store`, or begins with nothing if there is none. From then on, until `shutdown` holds true, messages are
    /// published when their time has come, and keys are forgotten whose time is over.
    ///
    /// # Errors
    /// [`GrpcError::Store`].
    pub async fn open(
        config: &GrpcConfig,
        store: Option<Arc<dyn RecordStore>>,
        broker: &Broker,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<Self, GrpcError> {
        Self::open_home(config, store, broker, None, shutdown).await
    }

    /// As [`Self::open`], at a home of a cluster: messages for topics are published by `spread`.
    ///
    /// # Errors
    /// [`GrpcError::Store`].
    pub async fn open_home(
        config: &GrpcConfig,
        store: Option<Arc<dyn RecordStore>>,
        broker: &Broker,
        spread: Option<TopicSpread>,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<Self, GrpcError> {
        let keys = open_keys(config, store.clone(), broker, shutdown).await?;
        let schedule = open_schedule(config, store, broker, spread, shutdown).await?;
        Ok(Self { keys, schedule })
    }
}

/// Reads the keys that are remembered, and lets those go whose time is over, until `shutdown`.
async fn open_keys(
    config: &GrpcConfig,
    store: Option<Arc<dyn RecordStore>>,
    broker: &Broker,
    shutdown: &watch::Receiver<bool>,
) -> Result<Arc<RequestKeys>, GrpcError> {
    let options = KeyOptions { most: config.max_keys, time: config.key_time };
    let (account, stop) = (Arc::clone(broker.account()), shutdown.clone());
    let opened = tokio::task::spawn_blocking(move || RequestKeys::open(options, store, &account, stop)).await;
    let keys = opened.map_err(|e| StoreError::Unavailable(format!("read of keys did not finish: {e}")))??;
    let (swept, mut stop) = (Arc::clone(&keys), shutdown.clone());
    tokio::spawn(async move {
        while tokio::time::timeout(SWEEP, stop.wait_for(|stop| *stop)).await.is_err() {
            swept.sweep();
        }
    });
    Ok(keys)
}

/// Reads the messages that wait for their time, and publishes each when it comes, until `shutdown`.
async fn open_schedule(
    config: &GrpcConfig,
    store: Option<Arc<dyn RecordStore>>,
    broker: &Broker,
    spread: Option<TopicSpread>,
    shutdown: &watch::Receiver<bool>,
) -> Result<Arc<Schedule>, GrpcError> {
    let options = ScheduleOptions { most: config.max_scheduled, bytes: config.scheduled_bytes };
    let reader = broker.clone();
    let opened = tokio::task::spawn_blocking(move || Schedule::open(options, store, &reader, spread)).await;
    let schedule = opened.map_err(|e| StoreError::Unavailable(format!("read did not finish: {e}")))??;
    tokio::spawn(Arc::clone(&schedule).run(broker.clone(), shutdown.clone()));
    Ok(schedule)
}
