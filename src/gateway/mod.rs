//! The whole gateway as one value: starts every part on given or configured sockets, and ends them in order.
//!
//! This is the wiring that `main` and embedding programs share; it decides nothing about messages.
//!
//! ```text
//! clustered   a gateway of a cluster: doors that stay, homes that come and go
//! homes       ways to the homes of a cluster; links: what other gateways bring
//! served      a home in service: its broker and services
//! doors       listeners and shards; listeners: TLS and sockets
//! common      what homes and doors share; admission: who is let in; evictions: whose right to be there has ended
//! home        everything that belongs to one data directory: stores, groups, commands, the Publisher's memory
//! values      latest values and history; shadows
//! api http    the listeners of backends and operators
//! sys ticks   what comes by itself
//! health metrics counters  what operators see
//! endings     the end of the parts
//! ```

mod admission;
mod api;
mod clustered;
mod commands;
mod common;
pub(crate) mod counters;
mod doors;
mod endings;
mod evictions;
mod groups;
mod health;
mod home;
mod homes;
mod http;
mod links;
mod listeners;
mod metrics;
mod served;
mod shadows;
mod stores;
mod sys;
mod sys_publisher;
mod ticks;
mod values;

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use broker::{Broker, CloseReason, Turn};
use config::{Address, Config, ConfigError};
use edge::{
    reload::Reloads,
    tls::{DevCertsError, TlsError},
};
use gateway_core::clock;
use store::StoreError;
use telemetry::ReadRows;
use thiserror::Error;
use tokio::sync::watch;
use tracing::{Instrument as _, info, info_span, warn};

use common::Common;
use doors::Doors;
use http::HttpPages;
use served::{OpenedHome, ServedHome};

pub use clustered::{ClusterGateway, ClusterPages, ClusterParts};
pub use home::HomeLedger;
pub use homes::HomeAddress;

use auth::{Authenticator, Authorizer, abuse::BansError};
use grpc::GrpcError;

/// Error that stops the gateway from starting.
#[derive(Debug, Error)]
pub enum StartError {
    /// The configuration is not usable; nothing was opened.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Development certificates cannot be made.
    #[error("development certificates: {0}")]
    DevCerts(#[from] DevCertsError),
    /// A certificate or key is not usable.
    #[error("tls for {name}: {error}")]
    Tls {
        /// Name of the listener.
        name: String,
        /// The fault and its fix.
        error: TlsError,
    },
    /// Bans cannot be read.
    #[error(transparent)]
    Bans(#[from] BansError),
    /// An address cannot be bound.
    #[error("bind {key} = {address}: {error}; {}", unbound(.error))]
    Bind {
        /// Configuration key.
        key: String,
        /// The address.
        address: String,
        /// The system's answer.
        error: io::Error,
    },
    /// The data directory cannot be used.
    #[error("{}", unopened(.0))]
    Store(#[from] StoreError),
    /// A thread or socket cannot be made.
    #[error("start threads: {0}")]
    Io(#[from] io::Error),
}

impl From<auth::ChainError> for StartError {
    fn from(error: auth::ChainError) -> Self {
        match error {
            auth::ChainError::Config(error) => Self::Config(error),
            auth::ChainError::Io(error) => Self::Io(error),
        }
    }
}

impl From<GrpcError> for StartError {
    fn from(error: GrpcError) -> Self {
        match error {
            GrpcError::Store(error) => Self::Store(error),
            other => Self::Io(io::Error::other(other)),
        }
    }
}

/// Returns the error of a store that cannot be opened, with the remedy if the disk is full.
fn unopened(error: &StoreError) -> String {
    let text = match error {
        StoreError::Unavailable(text) => text.clone(),
        other => format!("open data_dir: {other}"),
    };
    let met = |words: &[&str]| words.iter().any(|words| text.contains(words));
    let why = if met(&["No space left on device", "Disk quota exceeded"]) {
        ""
    } else if met(&["Input/output error"]) {
        // LMDB reports a write that was cut short with this error.
        "the disk may be full, "
    } else {
        return text;
    };
    format!("{text}; {why}make room on that disk, or choose another directory with --data-dir")
}

/// Returns advice on an address that cannot be bound.
fn unbound(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            "this machine has no such address, choose another address of its own"
        }
        io::ErrorKind::PermissionDenied => {
            "choose another address, ports below 1024 need CAP_NET_BIND_SERVICE"
        }
        _ => "choose another address or stop what uses it",
    }
}

/// Builds a [`Gateway`].
pub struct Builder {
    config: Config,
    auth: Option<Arc<dyn Authenticator>>,
    authorizer: Option<Arc<dyn Authorizer>>,
    sockets: BTreeMap<String, TcpListener>,
}

impl Builder {
    /// Uses `socket`, which already listens, for the MQTT listener of this name (`default` is the one of
    /// `addr`), or for `grpc` or `http`.
    #[must_use]
    pub fn socket(mut self, name: &str, socket: TcpListener) -> Self {
        self.sockets.insert(name.to_owned(), socket);
        self
    }

    /// Decides who may connect, on every listener and in place of `[auth]` and of the listeners' own settings.
    #[must_use]
    pub fn authenticator(mut self, auth: Arc<dyn Authenticator>) -> Self {
        self.auth = Some(auth);
        self
    }

    /// Decides what devices may do, in place of `authorization.rules` and of the service of `auth.grpc`, neither of which is
    /// asked about topics then.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use mqtt_server::{
    ///     Gateway,
    ///     auth::{Authorizer, RuleGrant, Subject, Subscribing},
    /// };
    ///
    ///     /// Devices publish below their own name, and hear what is for all.
    /// struct OwnTopics;
    ///
    /// impl Authorizer for OwnTopics {
    ///     fn publish(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
    ///         let mut levels = topic.split('/');
    ///         if levels.next() == Some("devices") && levels.next() == Some(subject.client_id) {
    ///             RuleGrant::ALLOWED.with_limits(1, false, 64 << 10)
    ///         } else {
    ///             RuleGrant::DENIED
    ///         }
    ///     }
    ///
    ///     fn receive(&self, _subject: &Subject<'_>, topic: &str) -> RuleGrant {
    ///         if topic.starts_with("news/") { RuleGrant::ALLOWED } else { RuleGrant::DENIED }
    ///     }
    ///
    ///     fn subscribe(&self, _subject: &Subject<'_>, filter: &str) -> Subscribing {
    ///         if filter.starts_with("news/") { Subscribing::Allowed } else { Subscribing::DENIED }
    ///     }
    /// }
    ///
    /// let gateway = Gateway::builder(Default::default()).authorizer(Arc::new(OwnTopics));
    /// # drop(gateway);
    /// ```
    #[must_use]
    pub fn authorizer(mut self, authorizer: Arc<dyn Authorizer>) -> Self {
        self.authorizer = Some(authorizer);
        self
    }

    /// Starts everything. Returns when all listeners accept. Needs a multi-thread Tokio runtime.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left running.
    pub async fn start(self) -> Result<Gateway, StartError> {
        self.start_all().instrument(info_span!("start")).await
    }

    async fn start_all(self) -> Result<Gateway, StartError> {
        let Self { config, auth, authorizer, sockets } = self;
        let (common, prepared) = Common::open(config, auth, authorizer)?;
        let opened = OpenedHome::open(&common, Arc::clone(&common.config), None)?;
        let bound = prepared.bind(&common.config, sockets)?;
        let addresses = bound.addresses()?;
        let ((draining, drain), (stopping, stop)) = (watch::channel(false), watch::channel(false));
        let (home, api) = opened.serve(&common, None, &drain, &stop).await?;
        common.admission.charge_to(home.broker.account());
        let mut doors = Doors::start(&common, &home.shared)?;
        let mut bound = bound;
        doors.accept(std::mem::take(&mut bound.devices), &drain);
        let pages = HttpPages { rows: home.metrics(), ready: home.ready(), stands_by: Arc::new(|| false) };
        doors.answer(&common, bound, api, home.broker.account(), pages, (&drain, &stop));
        Ok(Gateway { common, home, doors, addresses, draining, stopping })
    }
}

/// A running gateway.
pub struct Gateway {
    common: Common,
    home: ServedHome,
    doors: Doors,
    addresses: Vec<(String, Address)>,
    /// No new connections; streams end.
    draining: watch::Sender<bool>,
    /// Everything ends.
    stopping: watch::Sender<bool>,
}

impl Gateway {
    /// A gateway with this configuration.
    pub fn builder(config: Config) -> Builder {
        Builder { config, auth: None, authorizer: None, sockets: BTreeMap::new() }
    }

    /// Returns the addresses it listens on: listener name, `grpc` or `http`, and address.
    pub fn addresses(&self) -> &[(String, Address)] {
        &self.addresses
    }

    /// The IP address of one listener; none for a Unix socket.
    pub fn address(&self, name: &str) -> Option<SocketAddr> {
        match self.addresses.iter().find(|(known, _)| known == name) {
            Some((_, Address::Ip(address))) => Some(*address),
            _ => None,
        }
    }

    /// All files that can be read again: certificates, and the files that an embedding program adds.
    pub fn reloads(&self) -> &Arc<Reloads> {
        &self.common.reloads
    }

    /// For tests of this repository; anything may change. Programs that embed the gateway use the gRPC API.
    #[doc(hidden)]
    pub fn broker(&self) -> &Broker {
        &self.home.broker
    }

    /// Reads what `/metrics` shows, for an exporter; usable until and after the end.
    pub fn metrics(&self) -> ReadRows {
        self.home.metrics()
    }

    /// A function that tells how long the most sluggish shard has shown no sign of life. Up to a second is ordinary:
    /// each is woken once a second. For a watchdog; usable until the end.
    pub fn silence(&self) -> impl Fn() -> Duration + Send + Sync + use<> {
        self.doors.silence()
    }

    /// Ends everything in order: no new connections, streams end, a CONNECT that comes whole only now or waits for the
    /// disk is refused (0x88, in v3 code 3), v5 clients get DISCONNECT 0x8B spread over the window, wills are published,
    /// latest values, sessions and queues are written. Bounded by `shutdown.deadline`.
    pub async fn shutdown(self) {
        self.end().instrument(info_span!("shutdown")).await;
    }

    async fn end(mut self) {
        let deadline = self.common.config.shutdown.deadline.0;
        let end = tokio::time::Instant::now() + deadline;
        let _ = self.draining.send(true);
        let Self { common, home, doors, .. } = &mut self;
        let drained = async { tokio::join!(drain(common, home), doors.callers_told()) };
        // A quarter is kept for the latest values.
        if tokio::time::timeout(deadline * 3 / 4, drained).await.is_err() {
            warn!(?deadline, "connections still open shortly before the shutdown deadline, they end now");
        }
        let _ = self.stopping.send(true);
        self.doors.end(deadline).await;
        self.home.finish(end).await;
        self.doors.shut().await;
        self.home.close().await;
        info!("stopped");
    }
}

/// Ends the connections of a home, and publishes its wills.
async fn drain(common: &Common, home: &ServedHome) {
    let ServedHome { broker, shared, .. } = home;
    // Nobody connects after this: only the sessions now online are left to end.
    shared.refuse_connects().await;
    let sessions = broker.online_sessions();
    let window = common.config.shutdown.disconnect_window.0;
    let steps = sessions.len().div_ceil(100).max(1);
    let pause = window / u32::try_from(steps).unwrap_or(u32::MAX);
    for chunk in sessions.chunks(100) {
        for (session, epoch) in chunk {
            session.close(*epoch, CloseReason::ServerShutdown);
        }
        if sessions.len() > 100 {
            tokio::time::sleep(pause).await;
        }
    }
    drop(sessions);
    while !broker.is_quiet() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut turn = Turn::default();
    let wills = broker.shutdown_wills(clock::now(), &mut turn);
    turn.flush();
    if let Some(wills) = wills {
        wills.settle().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Grpc, Http, Latest};

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn an_early_subscriber_gets_what_sys_answers_only_once() {
        let config = Config {
            non_tls: true,
            insecure_grpc: true,
            grpc: Grpc { tls: false, ..Grpc::default() },
            http: Http { enabled: false, ..Http::default() },
            latest: Latest { enabled: false, ..Latest::default() },
            ..Config::default()
        };
        let socket = || TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let builder = Gateway::builder(config).socket("default", socket()).socket("grpc", socket());
        let gateway = builder.start().await.unwrap();
        for name in ["version", "time"] {
            let topic = format!("$SYS/broker/{name}");
            assert!(gateway.broker().retained(&topic, clock::now()).await.unwrap().is_some(), "{topic}");
        }
        gateway.shutdown().await;
    }
}
