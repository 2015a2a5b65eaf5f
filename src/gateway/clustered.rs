//! A gateway of a cluster: its doors are open as long as the process lives, and the homes that it serves come and go.
//!
//! Devices are authenticated at the doors, callers are checked there, and both go on to their home: here, or over a link to the gateway
//! that serves it. Without links the doors of devices are open only while the home is here.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use ::links::Members;
use auth::abuse::{AbuseGuard, BanRegistry};
use broker::{Broker, BrokerConfig};
use config::{Address, ByteSize, Config};
use edge::reload::Reloads;
use grpc::GrpcApi;
use grpc_homes::{HomeWays as _, over_homes, topic_spread};
use net::{DeviceHomes, NetShared};
use telemetry::ReadRows;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tracing::{info, warn};

use super::{
    HomeLedger, StartError, api,
    common::Common,
    doors::Doors,
    homes::{HomeAddress, HomeHere, Homes},
    http::HttpPages,
    links,
    listeners::PreparedListeners,
    metrics::{broker_rows, with_process},
    served::{OpenedHome, ServedHome},
};

/// Facts about the cluster, from whoever follows its ledger.
pub struct ClusterParts {
    /// Name of this node.
    pub node: String,
    /// Places of all homes, now and later; none as long as the ledger has not told.
    pub places: watch::Receiver<Vec<HomeAddress>>,
    /// Knows the nodes that may bring devices and calls.
    pub members: Arc<dyn Members>,
    /// See there.
    pub pages: ClusterPages,
}

/// Text of `/readyz`, and rows of `/metrics`, while this gateway serves no home.
pub struct ClusterPages {
    /// State of the node, on a line.
    pub state: Arc<dyn Fn() -> String + Send + Sync>,
    /// Figures of the cluster.
    pub rows: ReadRows,
}

/// See the module.
pub struct ClusterGateway {
    common: Common,
    prepared: PreparedListeners,
    homes: Arc<Homes>,
    doors: Doors,
    served: BTreeMap<u16, HomeInService>,
    addresses: Vec<(String, Address)>,
    has_links: bool,
    /// No new connections; streams end.
    draining: watch::Sender<bool>,
    /// Ends the listeners of devices, if these come and go with the home.
    closing: watch::Sender<bool>,
    /// Everything ends.
    stopping: watch::Sender<bool>,
    rows: ReadRows,
}

struct HomeInService {
    home: ServedHome,
    /// Calls that are still under way break off.
    gone: watch::Sender<bool>,
    draining: watch::Sender<bool>,
    stopping: watch::Sender<bool>,
}

/// A home that nothing is published to any more, and whose stores are closed. Connections of devices stay until it is dropped, so that
/// they find the next gateway serving.
pub struct ReleasedHome {
    home: ServedHome,
    gone: watch::Sender<bool>,
}

/// Part of the memory budget that the doors have; the homes share the rest.
const OF_DOORS: usize = 4;

impl ClusterGateway {
    /// Opens the doors. In a multi-thread Tokio runtime.
    ///
    /// # Errors
    /// As the start of a gateway alone.
    pub fn start(config: Config, parts: ClusterParts) -> Result<Self, StartError> {
        let ClusterParts { node, places, members, pages } = parts;
        let (common, prepared) = Common::open(config, None, None)?;
        let config = &common.config;
        let has_links = config.cluster.links.is_on();
        let homes = Homes::new(config, node, places);
        let ((draining, drain), (stopping, stop)) = (watch::channel(false), watch::channel(false));
        let closing = watch::Sender::new(true);
        let mut bound = prepared.bind_without_devices(config, BTreeMap::new())?;
        let shared = doors_of_devices(&common, &homes)?;
        let mut doors = Doors::start(&common, &shared)?;
        if has_links {
            bound.devices = prepared.bind_devices(config, &mut BTreeMap::new())?;
        }
        let addresses = bound.addresses()?;
        doors.accept(std::mem::take(&mut bound.devices), &drain);
        if let Some(links) = bound.links.take() {
            let served = links::serve(links, &common, &doors, members, Arc::clone(&homes), drain.clone())?;
            doors.spawn(served);
        }
        let account = shared.broker.account();
        let api = GrpcApi::standing_by(
            api::grpc_config(config),
            Arc::clone(account),
            Arc::clone(&common.admission.backends),
            config.limits.packet_timeout.0,
            over_homes(Arc::clone(&homes) as _, None, Arc::clone(account)),
            drain.clone(),
        );
        let ClusterPages { state, rows: standby_rows } = pages;
        let rows: ReadRows = {
            let (homes, broker) = (Arc::clone(&homes), shared.broker.clone());
            Arc::new(move || {
                let mut rows = homes.rows(broker_rows(&broker));
                if homes.all_here().is_empty() {
                    rows.extend(standby_rows());
                }
                with_process(rows)
            })
        };
        let (asked, standing) = (Arc::clone(&homes), Arc::clone(&homes));
        let pages = HttpPages {
            rows: Arc::clone(&rows),
            ready: Arc::new(move || ready(&asked, &*state)),
            stands_by: Arc::new(move || standing.all_here().is_empty()),
        };
        doors.answer(&common, bound, api, account, pages, (&drain, &stop));
        let served = BTreeMap::new();
        Ok(Self {
            common,
            prepared,
            homes,
            doors,
            served,
            addresses,
            has_links,
            draining,
            closing,
            stopping,
            rows,
        })
    }

    /// Opens a home, and serves it from now on. With `None` the home is in the data directory of the configuration, below `homes` if there are several, and has no ledger.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn open_home(&mut self, number: u16, ledger: Option<HomeLedger>) -> Result<(), StartError> {
        let config = Arc::new(home_config(&self.common.config, number, self.homes.count()));
        let ((draining, drain), (stopping, stop)) = (watch::channel(false), watch::channel(false));
        let opened = OpenedHome::open(&self.common, config, ledger)?;
        let account = self.doors.shared.broker.account();
        let spread = (self.homes.count() > 1)
            .then(|| topic_spread(Arc::clone(&self.homes) as _, number, Arc::clone(account)));
        let (home, api) = opened.serve(&self.common, spread, &drain, &stop).await?;
        if !self.has_links {
            let devices = self.prepared.bind_devices(&self.common.config, &mut BTreeMap::new())?;
            for device in &devices {
                info!(listener = device.name(), address = %device.address(), "listening");
                self.addresses.push((device.name().to_owned(), device.address().clone()));
            }
            self.closing = watch::Sender::new(false);
            self.doors.accept(devices, &self.closing.subscribe());
        }
        let (shared, api) = (Arc::clone(&home.shared), api.without_listener());
        let (gone, is_gone) = watch::channel(false);
        let (rows, ready) = (home.rows(), home.ready());
        let bans = Arc::clone(&home.watch.bans);
        self.homes.set(number, Some(HomeHere { shared, api, rows, ready, bans, gone: is_gone }));
        self.look_at_bans();
        self.served.insert(number, HomeInService { home, gone, draining, stopping });
        Ok(())
    }

    /// Lets go of a home that goes to another gateway: nobody connects any more, callers are told, what waits is written. No will is
    /// published. Returns when the stores may be cut off. Bounded by `shutdown.deadline`.
    pub async fn release_home(&mut self, number: u16) -> Option<ReleasedHome> {
        let deadline = self.common.config.shutdown.deadline.0;
        let end = Instant::now() + deadline;
        let HomeInService { mut home, gone, draining, stopping } = self.withdraw(number)?;
        let _ = draining.send(true);
        if timeout(deadline / 2, home.shared.refuse_connects()).await.is_err() {
            warn!("a client is still being let in, its connection ends later");
        }
        let _ = stopping.send(true);
        home.finish(end).await;
        home.close_for_other(deadline / 4).await;
        Some(ReleasedHome { home, gone })
    }

    /// Ends a home that is another gateway's already: its connections end unanswered.
    pub async fn give_up_home(&mut self, number: u16) {
        let Some(HomeInService { home, gone, draining, stopping }) = self.withdraw(number) else { return };
        // Before anything that would give callers an answer.
        let _ = gone.send(true);
        if timeout(LONGEST_END, home.shared.refuse_connects()).await.is_err() {
            warn!("a client is still being let in, its connection ends later");
        }
        home.give_up().await;
        let _ = (draining.send(true), stopping.send(true));
    }

    /// The doors know the bans of all homes that are here.
    fn look_at_bans(&self) {
        let homes = self.homes.all_here();
        let bans = homes.iter().map(|home| Arc::clone(&home.bans)).collect();
        self.doors.shared.guard.set_homes(bans);
    }

    /// Nobody finds the home here any more.
    fn withdraw(&mut self, number: u16) -> Option<HomeInService> {
        self.homes.set(number, None);
        self.look_at_bans();
        if !self.has_links {
            self.closing.send_replace(true);
            let kept: BTreeSet<_> = ["grpc", "http"].into();
            self.addresses.retain(|(name, _)| kept.contains(name.as_str()));
        }
        self.served.remove(&number)
    }

    /// Numbers of the homes that it serves.
    pub fn serves(&self) -> Vec<u16> {
        self.served.keys().copied().collect()
    }

    /// Returns the addresses it listens on: listener name, `grpc` or `http`, and address.
    pub fn addresses(&self) -> &[(String, Address)] {
        &self.addresses
    }

    /// All files that can be read again.
    pub fn reloads(&self) -> &Arc<Reloads> {
        &self.common.reloads
    }

    /// Reads what `/metrics` shows; usable until and after the end.
    pub fn metrics(&self) -> ReadRows {
        Arc::clone(&self.rows)
    }

    /// A function that tells how long the most sluggish shard has shown no sign of life; usable until the end.
    pub fn silence(&self) -> impl Fn() -> Duration + Send + Sync + use<> {
        self.doors.silence()
    }

    /// For tests of this repository; anything may change.
    #[doc(hidden)]
    pub fn broker(&self, number: u16) -> Option<&Broker> {
        self.served.get(&number).map(|served| &served.home.broker)
    }

    /// Lets nobody in any more: the process is about to end.
    pub fn begin_end(&self) {
        let _ = self.draining.send(true);
    }

    /// Ends the doors, and homes that were not released: those as after a crash. Bounded by `shutdown.deadline`.
    pub async fn end(mut self) {
        let deadline = self.common.config.shutdown.deadline.0;
        self.begin_end();
        for number in self.serves() {
            self.give_up_home(number).await;
        }
        if timeout(deadline / 2, self.doors.callers_told()).await.is_err() {
            warn!(?deadline, "callers still there at half of the shutdown deadline, they end now");
        }
        let _ = self.stopping.send(true);
        self.doors.end(deadline).await;
        self.doors.shut().await;
        info!("stopped");
    }
}

/// Time for those that are being let in while their home goes.
const LONGEST_END: Duration = Duration::from_secs(2);

impl ReleasedHome {
    /// Ends the connections of its devices, without a trace.
    pub async fn end(self) {
        let _ = self.gone.send(true);
        self.home.give_up().await;
    }
}

/// The shared state of the doors for devices. No session is ever opened in its broker, which has the limits and a memory account.
fn doors_of_devices(common: &Common, homes: &Arc<Homes>) -> Result<Arc<NetShared>, StartError> {
    let config = &common.config;
    let mut limits = config.limits.clone();
    limits.memory_budget = ByteSize(limits.budget().0 / OF_DOORS);
    let broker = Broker::new(BrokerConfig {
        limits: Arc::new(limits),
        non_broker: config.non_broker,
        namespace: config.namespace.clone(),
        tenants: config.tenants.clone(),
        ..BrokerConfig::default()
    });
    common.admission.charge_to(broker.account());
    let (authenticator, authority) = (&common.admission.authenticator, &common.admission.authority);
    let bans = Arc::new(BanRegistry::open(&config.bans, None)?);
    let guard = AbuseGuard::before_homes(&config.bans, Arc::clone(&bans));
    common.reloads.add(bans);
    // A home answers bridges with its own mark.
    let mark = String::new();
    let shared = NetShared::new(
        broker,
        Arc::clone(authenticator),
        authority.clone(),
        guard,
        config.response_pattern(),
        mark,
    );
    shared.lead_to(Arc::clone(homes) as Arc<dyn DeviceHomes>);
    Ok(shared)
}

/// The settings of one home of so many: its share of memory, and bridges only at the first.
fn home_config(config: &Config, number: u16, count: u16) -> Config {
    let mut config = config.clone();
    let budget = config.limits.budget().0;
    config.limits.memory_budget = ByteSize((budget - budget / OF_DOORS) / usize::from(count.max(1)));
    if number > 0 {
        config.bridges.clear();
    }
    if count > 1 {
        config.data_dir = config.data_dir.join("homes").join(number.to_string());
    }
    config
}

/// Text of `/readyz`.
fn ready(homes: &Homes, state: &(dyn Fn() -> String + Send + Sync)) -> Result<String, String> {
    let here = homes.all_here();
    let mut text = String::new();
    for home in &here {
        text.push_str(&(home.ready)()?);
    }
    if here.is_empty() {
        text = state() + "\n";
    }
    if homes.has_a_way() { Ok(text) } else { Err(state()) }
}
