//! State that the services share, and the parts of the process that they need.

use std::sync::Arc;

use auth::{Authority, abuse::BanRegistry, backends::BackendAuthenticator};
use bridges::BridgesStatus;
use broker::Broker;
use commands::CommandService;
use config::Config;
use consumer_groups::ConsumerGroups;
use device_shadows::ShadowService;
use edge::{reload::Reloads, tls::TlsStore};
use gateway_core::{Timestamp, metrics::MetricRow};
use store::{BoxFuture, LatestPage, LatestQuery, LatestValue, StoreError};
use telemetry::TraceClients;
use tokio::sync::{Semaphore, watch};
use values::{History, LatestCache, StoreCondition};

use crate::{
    bounds::GrpcConfig,
    publishing::{PublisherMemory, keys::RequestKeys, schedule::Schedule},
    stream::OpenStreams,
};

/// Parts of the process that the server needs beyond the broker.
#[derive(Clone)]
pub struct Hooks {
    /// The devices that are traced.
    pub traces: &'static TraceClients,
    /// Latest values; `None` if they are switched off.
    pub latest: Option<Arc<dyn LatestValues>>,
    /// History of the topics that have one; `None` if it is switched off.
    pub history: Option<Arc<History>>,
    /// Callers and their rights.
    pub backends: Arc<BackendAuthenticator>,
    /// Files that can be read again.
    pub reloads: Arc<Reloads>,
    /// Rules for devices; `None` if everything is allowed.
    pub authority: Option<Arc<Authority>>,
    /// Bans on devices and addresses.
    pub bans: Arc<BanRegistry>,
    /// Memory of the Publisher.
    pub publisher: PublisherMemory,
    /// Consumer groups, or the key of the configuration that switches them off.
    pub groups: Result<Arc<ConsumerGroups>, &'static str>,
    /// Commands, likewise.
    pub commands: Result<Arc<CommandService>, &'static str>,
    /// Device shadows, or the key of the configuration that switches them off.
    pub shadows: Result<Arc<ShadowService>, &'static str>,
    /// Probes of the stores of groups and shadows.
    pub stores: StoresAnswer,
    /// State of the process that operators may see.
    pub operated: Arc<Operated>,
}

/// Probes that tell whether a store answers, for the stores that can fall silent.
#[derive(Clone)]
pub struct StoresAnswer {
    /// Of consumer groups.
    pub groups: StoreProbe,
    /// Of device shadows.
    pub shadows: StoreProbe,
}

/// Probe that tells whether a store answers; it lasts as long as the process.
pub(crate) type StoreProbe = Arc<dyn Fn() -> bool + Send + Sync>;

/// State of the process that operators may see.
pub struct Operated {
    /// Version of the program.
    pub version: &'static str,
    /// Time at which the program started.
    pub started: Timestamp,
    /// The metrics now.
    pub metrics: Box<dyn Fn() -> Vec<MetricRow> + Send + Sync>,
    /// Current problems, a line each.
    pub problems: Box<dyn Fn() -> String + Send + Sync>,
    /// Bridges to other systems.
    pub bridges: BridgesStatus,
    /// Certificates in use.
    pub tls: Arc<TlsStore>,
    /// The configuration in effect.
    pub config: Arc<Config>,
}

/// Latest values, unwritten ones included.
pub trait LatestValues: Send + Sync + 'static {
    /// The value of `topic` of `device`, or without a device the newest over all devices.
    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>>;

    /// One page of values.
    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>>;

    /// Deletes the values of `device` on topics that match `filter`, and returns which there were.
    fn delete<'a>(
        &'a self,
        device: &'a str,
        filter: &'a str,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Arc<str>>, StoreError>>;

    /// Tells whether [`LatestValues::list`] works without device ids.
    fn lists_all(&self) -> bool {
        true
    }

    /// Returns the store's condition, now and when it changes; `None` if it is not known.
    fn condition(&self) -> Option<watch::Receiver<StoreCondition>> {
        None
    }
}

impl LatestValues for LatestCache {
    fn lists_all(&self) -> bool {
        Self::lists_all(self)
    }

    fn condition(&self) -> Option<watch::Receiver<StoreCondition>> {
        Some(Self::condition(self))
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        Box::pin(Self::get(self, topic, device))
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(Self::list(self, query))
    }

    fn delete<'a>(
        &'a self,
        device: &'a str,
        filter: &'a str,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Arc<str>>, StoreError>> {
        Box::pin(Self::delete(self, device, filter, now))
    }
}

/// State that every service shares.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) config: GrpcConfig,
    pub(crate) hooks: Hooks,
    pub(crate) streams: Arc<OpenStreams>,
    pub(crate) keys: Arc<RequestKeys>,
    pub(crate) schedule: Arc<Schedule>,
    /// Permit to walk over all sessions: one task at a time has it.
    pub(crate) walk: Arc<Semaphore>,
    pub(crate) shutdown: watch::Receiver<bool>,
}
