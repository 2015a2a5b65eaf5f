//! Everything that belongs to one data directory: the state of sessions, small records (the Publisher's memory, stored commands,
//! consumer groups, shadows), and the log of consumer groups.
//!
//! [`Home::open`] takes the directory and reads nothing yet. [`Home::restore`] and [`Home::serve`] bring back what earlier
//! processes left, the one before anything can be published and the other before anybody connects. [`Home::close`] gives the
//! directory back: once its value and the broker's are dropped, the same process may open it again.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ::commands::{CommandRegistry, CommandService, ReplyDispatcher};
use broker::{Broker, GroupLog, Stores};
use cluster_node::{LedgerFigures, NodeStatus, RedoMemory};
use config::Config;
use consumer_groups::ConsumerGroups;
use disk::EmbeddedRecords;
use gateway_core::metrics::{MetricRow, figures};
use grpc::{GrpcConfig, PublisherMemory, TopicSpread};
use ledger::Shipping;
use net::NetShared;
use store::{ClockMark, DataDir, NoRecords, RecordStore, StoreHealth, Verify};
use tokio::{sync::watch, task::JoinSet};

use super::{StartError, commands::registry_options, groups, stores, ticks::keep_clock};

/// See the module.
pub(super) struct Home {
    clock: Option<Arc<ClockMark>>,
    stores: Option<stores::OpenedStores>,
    records: Option<Arc<EmbeddedRecords>>,
    log: Option<groups::OpenedGroups>,
    /// Once they are restored.
    groups: OnceLock<Arc<ConsumerGroups>>,
    /// Once they are served.
    registry: OnceLock<Arc<CommandRegistry>>,
    ledger: Option<Arc<dyn Fn() -> LedgerFigures + Send + Sync>>,
}

/// The ledger's side of a home in a cluster.
pub struct HomeLedger {
    /// Made of the records of the ledger.
    pub directory: Arc<DataDir>,
    /// Streams, by store.
    pub state: Arc<dyn Shipping>,
    /// See `state`.
    pub records: Arc<dyn Shipping>,
    /// See `state`.
    pub log: Arc<dyn Shipping>,
    /// See `state`; latest values go there after they were written.
    pub latest: Arc<dyn Shipping>,
    /// Tells whether this process may acknowledge, and admit clients.
    pub lease: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Memory of records on their way, to be charged to the account.
    pub redo: Arc<RedoMemory>,
    /// Time since this process last saw the gateway that served before alive; `None` if it has not.
    pub silent_for: Option<Duration>,
    /// Reads its figures.
    pub figures: Arc<dyn Fn() -> LedgerFigures + Send + Sync>,
}

/// An append that has waited for so long is told as a problem.
const SLOW_LEDGER: Duration = Duration::from_secs(3);

/// Services over a [`Home`]. A service that is switched off is the key of the configuration that does so.
pub(super) struct HomeServices {
    pub(super) commands: Result<Arc<CommandService>, &'static str>,
    pub(super) publisher: PublisherMemory,
}

/// Takes the data directory, if anything is kept in one: a bridge without a store has its mark there.
pub(super) fn directory(config: &Config) -> Result<Option<Arc<DataDir>>, StartError> {
    if !(config.latest.enabled || config.store.enabled || !config.bridges.is_empty()) {
        return Ok(None);
    }
    let verify = Verify { always: config.store.verify, limit: config.store.verify_limit.0 };
    let directory = DataDir::open_with(&config.data_dir, verify)?;
    cluster_node::leave_cluster(&directory)?;
    Ok(Some(directory))
}

impl Home {
    /// Opens all that is switched on. Without a directory everything is in memory, or off. The clock goes on first, before a
    /// deadline is made or read. Blocks on the disk, and on the ledger if there is one.
    pub(super) fn open(
        config: &Config,
        directory: Option<&Arc<DataDir>>,
        ledger: Option<&HomeLedger>,
    ) -> Result<Self, StartError> {
        let at_most = ledger.and_then(|ledger| ledger.silent_for);
        let clock = directory.map(|directory| Arc::new(ClockMark::resume(directory, at_most)));
        let stores = match directory {
            Some(directory) if config.store.enabled => Some(stores::open(config, directory, ledger)?),
            _ => None,
        };
        let has_records =
            config.store.enabled || (config.has_shadows().is_ok() && config.contact_points().is_empty());
        let records = match directory {
            Some(directory) if has_records => Some(stores::open_records(config, directory, ledger)?),
            _ => None,
        };
        let log = match (directory, &records) {
            (Some(directory), Some(records)) if config.has_groups() => {
                Some(groups::open(config, directory, records, ledger)?)
            }
            _ => None,
        };
        let ledger = ledger.map(|ledger| Arc::clone(&ledger.figures));
        Ok(Self { clock, stores, records, log, groups: OnceLock::new(), registry: OnceLock::new(), ledger })
    }

    /// Where the clock is kept.
    pub(super) fn clock(&self) -> Option<&Arc<ClockMark>> {
        self.clock.as_ref()
    }

    /// The store of small records.
    pub(super) fn records(&self) -> Option<&Arc<EmbeddedRecords>> {
        self.records.as_ref()
    }

    /// The stores as the broker needs them.
    pub(super) fn broker_stores(&self) -> Option<Stores> {
        self.stores.as_ref().map(|opened| opened.stores.clone())
    }

    /// The log as the broker needs it.
    pub(super) fn broker_log(&self) -> Option<GroupLog> {
        self.log.as_ref().map(groups::OpenedGroups::for_broker)
    }

    /// Brings sessions and retained messages back, then consumer groups: whatever is published from now on is appended for
    /// them. Returns the groups, or the key of the configuration that switches them off.
    pub(super) async fn restore(
        &self,
        config: &Config,
        broker: &Broker,
        shared: &Arc<NetShared>,
    ) -> Result<Result<Arc<ConsumerGroups>, &'static str>, StartError> {
        if let Some(stores) = &self.stores {
            stores.restore(broker, shared)?;
        }
        match &self.log {
            Some(log) => {
                let groups = log.start(config, broker).await?;
                Ok(Ok(Arc::clone(self.groups.get_or_init(|| groups))))
            }
            None if config.store.enabled => Ok(Err("groups.enabled")),
            None => Ok(Err("store.enabled")),
        }
    }

    /// Brings stored commands back, if `dispatcher` hears their replies, and what the Publisher remembers. Both go on until
    /// `drain`.
    pub(super) async fn serve(
        &self,
        config: &Config,
        limits: &GrpcConfig,
        (broker, spread): (&Broker, Option<TopicSpread>),
        dispatcher: Option<Arc<ReplyDispatcher>>,
        tasks: &mut JoinSet<()>,
        drain: &watch::Receiver<bool>,
    ) -> Result<HomeServices, StartError> {
        let records = self.records.clone().filter(|_| config.store.enabled);
        let records = records.map(|records| records as Arc<dyn RecordStore>);
        let commands = match dispatcher {
            Some(dispatcher) => {
                let store = records.clone().unwrap_or_else(|| Arc::new(NoRecords));
                let registry = CommandRegistry::open(registry_options(config), store, broker.account())?;
                let registry = self.registry.get_or_init(|| registry);
                let commands = CommandService::new(broker.clone(), dispatcher, Arc::clone(registry));
                tasks.spawn(Arc::clone(&commands).run(drain.clone()));
                Ok(commands)
            }
            None => Err("commands.enabled"),
        };
        let publisher = PublisherMemory::open_home(limits, records, broker, spread, drain).await?;
        Ok(HomeServices { commands, publisher })
    }

    /// Gives the directory back: answered changes of groups are written, every file is marked as closed, and the clock is kept.
    /// Nothing may be published or changed any more.
    pub(super) async fn close(&self) {
        if let Some(groups) = self.groups.get() {
            groups.stop().await;
        }
        if let Some(stores) = &self.stores {
            stores.note_closed();
        }
        if let Some(records) = &self.records {
            records.note_closed();
        }
        if let Some(clock) = &self.clock {
            keep_clock(clock).await;
        }
    }

    /// Ends the writers of a home that is another gateway's: what waits for them may be in its ledger or not, and nobody hears of it.
    pub(super) async fn give_up(&self) {
        if let Some(groups) = self.groups.get() {
            groups.give_up().await;
        }
        if let Some(registry) = self.registry.get() {
            registry.give_up();
        }
        if let Some(stores) = &self.stores {
            stores.give_up();
        }
        if let Some(records) = &self.records {
            records.give_up();
        }
        if let Some(log) = &self.log {
            log.log.give_up();
        }
    }

    /// Consumer groups, once they are restored.
    pub(super) fn groups(&self) -> Option<&ConsumerGroups> {
        self.groups.get().map(Arc::as_ref)
    }

    /// Returns whether the store of consumer groups answers. A store whose disk takes nothing does: groups read on, and
    /// the store tries again with each change.
    pub(super) fn groups_answer(&self) -> bool {
        let log = self.log.as_ref().map(|log| log.health().1);
        let records = self.records.as_ref().map(|records| records.health());
        log.is_some() && log.into_iter().chain(records).all(|health| health != StoreHealth::Damaged)
    }

    /// The health of its stores, by name.
    pub(super) fn health(&self) -> impl Iterator<Item = (&'static str, StoreHealth)> {
        let stores = self.stores.as_ref().map(stores::OpenedStores::health).into_iter();
        let records = self.records.as_ref().map(|records| ("records", records.health()));
        stores.chain(records).chain(self.log.as_ref().map(groups::OpenedGroups::health))
    }

    /// Returns the places to which damaged files were moved.
    pub(super) fn set_aside(&self) -> impl Iterator<Item = PathBuf> {
        let stores = self.stores.iter().flat_map(stores::OpenedStores::set_aside);
        stores.chain(self.records.iter().filter_map(|records| records.set_aside().cloned()))
    }

    /// What `/metrics` shows of it.
    pub(super) fn figures(&self) -> Vec<MetricRow> {
        let mut all = Vec::new();
        if let (Some(log), Some(groups)) = (&self.log, self.groups.get()) {
            all.extend(log.figures(groups));
        }
        if let Some(registry) = self.registry.get() {
            all.push(figures::COMMANDS_ACTIVE.is(registry.active() as f64));
        }
        all.extend(self.stores.iter().flat_map(stores::OpenedStores::figures));
        if let Some(ledger) = &self.ledger {
            let LedgerFigures {
                node,
                epoch,
                nodes,
                under_way,
                oldest,
                records,
                bytes,
                repeats,
                redo,
                stored,
            } = ledger();
            all.extend([
                figures::CLUSTER_ACTIVE.is(1.0),
                figures::CLUSTER_EPOCH.is(epoch as f64),
                figures::LEDGER_UNDER_WAY.is(under_way as f64),
                figures::LEDGER_OLDEST.is(oldest.as_secs_f64()),
                figures::LEDGER_RECORDS.is(records as f64),
                figures::LEDGER_APPENDED.is(bytes as f64),
                figures::LEDGER_REPEATS.is(repeats as f64),
                figures::LEDGER_REDO.is(redo as f64),
            ]);
            let others = nodes.iter().filter(|other| *other.name != *node);
            let parts = others.map(|other| (&*other.name, part(other))).chain([(&*node, "serves")]);
            all.extend(parts.map(|(name, part)| figures::CLUSTER_NODES.of([name, part], 1.0)));
            all.extend(stored.map(|(store, bytes)| figures::LEDGER_BYTES.of([store.name()], bytes as f64)));
        }
        all
    }

    /// A line about the ledger, if it does not answer in time.
    pub(super) fn ledger_problem(&self) -> Option<String> {
        let oldest = self.ledger.as_ref()?().oldest;
        let is_slow = oldest > SLOW_LEDGER;
        is_slow.then(|| {
            format!("ledger: no answer for {} s, acknowledgements of QoS 1 and 2 wait\n", oldest.as_secs())
        })
    }
}

/// The part of a gateway that does not serve.
fn part(node: &NodeStatus) -> &'static str {
    match node.beaten {
        None => "silent",
        Some(_) if node.is_warm => "warm",
        Some(_) => "copying",
    }
}

#[cfg(test)]
mod tests {
    use auth::{
        AllowAll,
        abuse::{AbuseGuard, BanRegistry},
    };
    use broker::{BrokerConfig, Turn};
    use gateway_core::{Message, Origin, OriginKind, QoS, clock};
    use tokio::time::sleep;

    use super::*;
    use crate::gateway::api::grpc_config;

    /// Of three processes one after the other; each must find what the one before has left.
    async fn live_once(config: &Config, directory: Arc<DataDir>, is_first: bool) {
        let home = Home::open(config, Some(&directory), None).unwrap();
        let broker = Broker::new(BrokerConfig {
            stores: home.broker_stores(),
            log: home.broker_log(),
            durability: stores::rules(config),
            ..BrokerConfig::default()
        });
        let bans = Arc::new(BanRegistry::open(&config.bans, None).unwrap());
        let guard = AbuseGuard::new(&config.bans, bans);
        let shared =
            NetShared::new(broker.clone(), Arc::new(AllowAll), None, guard, String::new(), String::new());
        let groups = home.restore(config, &broker, &shared).await.unwrap();
        assert!(groups.is_ok() && home.groups().is_some());
        let (draining, drain) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let dispatcher = super::super::commands::dispatcher(config);
        let limits = grpc_config(config);
        let served =
            home.serve(config, &limits, (&broker, None), dispatcher, &mut tasks, &drain).await.unwrap();
        assert!(served.commands.is_ok());

        let found = broker.retained("kept", clock::now()).await.unwrap();
        assert_eq!(found.is_none(), is_first);
        let backend = Origin { kind: OriginKind::Backend, ..Origin::SERVER };
        let mut message = Message::new("kept", b"value", clock::now(), backend);
        message.retain = true;
        message.qos = QoS::AtLeastOnce;
        let mut turn = Turn::default();
        broker.publish(&message, &mut turn);
        turn.flush();

        draining.send(true).unwrap();
        broker.stores().unwrap().flush().await;
        tasks.shutdown().await;
        home.close().await;
        shared.end();
    }

    /// The failures: something of a home outlives it, so that this process cannot open its directory again; what it kept is
    /// not there.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_home_is_given_back_and_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config { data_dir: folder.path().to_owned(), ..Config::default() };
        live_once(&config, directory(&config).unwrap().unwrap(), true).await;
        for _ in 0..2 {
            // Tasks that were told to end let go of it a moment later.
            let mut tries = 0;
            let again = loop {
                match directory(&config) {
                    Ok(directory) => break directory.unwrap(),
                    Err(error) => assert!(tries < 500, "{error}"),
                }
                tries += 1;
                sleep(Duration::from_millis(10)).await;
            };
            live_once(&config, again, false).await;
        }
    }
}
