//! Bridges: messages to and from other systems.
//!
//! ```text
//! outward     takes from a group, delivers, acknowledges; whatever the other side is
//! work        what is in hand of it
//! search      which message the other side fails for
//! status      how a bridge is, and what `/metrics` shows
//! inward      what comes in becomes a message of the gateway, and is acknowledged when it is safe
//! kafka       Apache Kafka, with the feature of this name
//! mqtt        another broker
//! webhook     a service that takes POST
//! mark        what shows that a message went through a bridge
//! secret      files with secrets
//! ```
//!
//! A bridge that leads out is a member of a durable group that it makes for itself: what the group keeps on the disk is its
//! queue, with a bound of its own. Devices wait for the log as they do for any group, and never for the other side.

mod inward;
#[cfg(feature = "kafka")]
mod kafka;
mod mark;
mod mqtt;
mod outward;
mod search;
mod secret;
mod status;
mod webhook;
mod work;

use std::sync::Arc;

use broker::Broker;
#[cfg(feature = "kafka")]
use config::KafkaBridge;
use config::{Bridge, Config, ConfigError, Direction, Problem};
use consumer_groups::{ConsumerGroups, Info};
use gateway_core::metrics::MetricRow;
use tokio::{sync::watch, task::JoinSet};
use tracing::warn;

pub use self::status::{BridgeReport, LastFailure, LastRefusal, Reachability};
use self::{
    inward::BridgePublisher,
    mark::entry,
    mqtt::{Dial, MqttIn, MqttOut},
    outward::{BridgeSink, Outward, group_of, make_group},
    status::BridgeStatus,
    webhook::Webhook,
};

/// All bridges, before they begin.
pub struct PlannedBridges {
    all: Vec<Planned>,
}

struct Planned {
    config: Bridge,
    status: Arc<BridgeStatus>,
    side: Side,
}

/// The other side, by its kind.
enum Side {
    #[cfg(feature = "kafka")]
    Kafka(Box<KafkaBridge>),
    Mqtt(Box<Dial>),
    Webhook(Box<Webhook>),
}

/// The state of all bridges, to be shown.
#[derive(Clone, Default)]
pub struct BridgesStatus(Vec<(Direction, Arc<BridgeStatus>)>);

impl PlannedBridges {
    /// Reads the files that bridges name.
    ///
    /// # Errors
    /// Every file and value that cannot be used, with its key.
    pub fn open(config: &Config) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let mut all = Vec::new();
        for (name, bridge) in &config.bridges {
            let (kind, side) = match (&bridge.mqtt, &bridge.webhook) {
                #[cfg(feature = "kafka")]
                _ if let Some(kafka) = &bridge.kafka => {
                    let tried = kafka::settings(name, kafka);
                    ("kafka", tried.map(|_| Side::Kafka(Box::new(kafka.clone()))))
                }
                (Some(mqtt), _) => {
                    ("mqtt", Dial::new(name, mqtt, bridge.deadline.0).map(|dial| Side::Mqtt(Box::new(dial))))
                }
                (None, Some(webhook)) => (
                    "webhook",
                    Webhook::new(name, webhook, bridge.deadline.0).map(|out| Side::Webhook(Box::new(out))),
                ),
                (None, None) => continue,
            };
            let direction = match bridge.direction {
                Direction::Out => "out",
                Direction::In => "in",
            };
            match side {
                Ok(side) => {
                    let status = Arc::new(BridgeStatus::new(name, kind, direction));
                    all.push(Planned { config: bridge.clone(), status, side });
                }
                Err((key, text)) => {
                    let (problem, fix) =
                        text.split_once("; ").unwrap_or((&text, "name a file that is there"));
                    problems.push(Problem::new(format!("bridges.{name}.{kind}.{key}"), "", problem, fix));
                }
            }
        }
        if problems.is_empty() { Ok(Self { all }) } else { Err(ConfigError(problems)) }
    }

    /// Their state, to be shown.
    pub fn status(&self) -> BridgesStatus {
        let all = self.all.iter();
        BridgesStatus(all.map(|planned| (planned.config.direction, Arc::clone(&planned.status))).collect())
    }

    /// Makes the groups of those that lead out, so that nothing is missing that is published from now on, and begins. `mark`
    /// names this gateway for ever. Each ends by itself when `drain` says so.
    pub async fn start(
        self,
        groups: Option<&Arc<ConsumerGroups>>,
        broker: &Broker,
        mark: String,
        drain: &watch::Receiver<bool>,
    ) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if let Some(groups) = groups {
            self.tell_left(groups);
        }
        let number = groups.map_or(0, |groups| groups.log_id());
        for Planned { config, status, side } in self.all {
            if config.direction == Direction::In {
                let door =
                    BridgePublisher { broker: broker.clone(), mark: mark.clone(), entry: entry(&mark) };
                let most = broker.limits().max_packet_size.0;
                match side {
                    #[cfg(feature = "kafka")]
                    Side::Kafka(kafka) => {
                        // A number that does not change while the log is there.
                        let member = if number == 0 { mark.clone() } else { format!("{number:016x}") };
                        let side = kafka::KafkaIn::new(
                            *kafka,
                            config.clone(),
                            Arc::clone(&status),
                            door,
                            most,
                            member,
                        );
                        tasks.spawn(inward::run(side, config, status, drain.clone()));
                    }
                    Side::Mqtt(dial) => {
                        let side =
                            MqttIn::new(dial.marked(&mark), config.clone(), Arc::clone(&status), door, most);
                        tasks.spawn(inward::run(side, config, status, drain.clone()));
                    }
                    Side::Webhook(_) => {}
                }
                continue;
            }
            let Some(groups) = groups else { continue };
            if let Err(error) = make_group(groups, status.name(), &config).await {
                // Its task tries again.
                let group = group_of(status.name());
                warn!(bridge = status.name(), group, %error, "the group of a bridge cannot be made");
            }
            let (groups, drain) = (Arc::clone(groups), drain.clone());
            match side {
                #[cfg(feature = "kafka")]
                Side::Kafka(kafka) => {
                    let most = broker.limits().max_packet_size.0;
                    let out = kafka::KafkaOut::new(
                        *kafka,
                        &config,
                        Arc::clone(&status),
                        number,
                        mark.clone(),
                        most,
                    );
                    run(&mut tasks, Outward { config, status, groups, out, drain });
                }
                Side::Mqtt(dial) => {
                    let out = MqttOut::new(dial.marked(&mark), Arc::clone(&status));
                    run(&mut tasks, Outward { config, status, groups, out, drain });
                }
                Side::Webhook(webhook) => {
                    let out = webhook.of_log(number);
                    run(&mut tasks, Outward { config, status, groups, out, drain });
                }
            }
        }
        tasks
    }

    /// A group whose bridge is gone keeps messages that nobody takes.
    fn tell_left(&self, groups: &ConsumerGroups) {
        for info in groups.list(None, usize::MAX) {
            let Some(bridge) = info.definition.labels.get("bridge") else { continue };
            let known = self
                .all
                .iter()
                .any(|planned| planned.config.direction == Direction::Out && planned.status.name() == bridge);
            if !known && info.definition.name == group_of(bridge) {
                let group = info.definition.name;
                warn!(
                    group,
                    "the bridge of this group is no longer configured; delete the group, or it keeps messages"
                );
            }
        }
    }
}

fn run<O: BridgeSink + 'static>(tasks: &mut JoinSet<()>, outward: Outward<O>) {
    tasks.spawn(outward.run());
}

/// A bridge as it is shown, with the group that is its queue.
pub struct ShownBridge {
    pub seen: BridgeReport,
    pub direction: Direction,
    /// Of a bridge out whose group is there.
    pub group: Option<Info>,
}

impl BridgesStatus {
    /// All of them, by name.
    pub fn shown(&self, groups: Option<&ConsumerGroups>) -> Vec<ShownBridge> {
        let shown = |(direction, status): &(Direction, Arc<BridgeStatus>)| {
            let group = groups.filter(|_| *direction == Direction::Out);
            let group = group.and_then(|groups| groups.get(&group_of(status.name())).ok());
            ShownBridge { seen: status.seen(), direction: *direction, group }
        };
        self.0.iter().map(shown).collect()
    }

    /// Tells whether a group of this name is, or would be, the queue of one of them.
    pub fn own_group(&self, group: &str) -> bool {
        let mut out = self.0.iter().filter(|(direction, _)| *direction == Direction::Out);
        out.any(|(_, status)| group_of(status.name()) == group)
    }

    /// Writes the rows that `/metrics` shows.
    pub fn rows(&self, groups: Option<&ConsumerGroups>, rows: &mut Vec<MetricRow>) {
        for (direction, status) in &self.0 {
            let info = groups.and_then(|groups| groups.get(&group_of(status.name())).ok());
            let lag = info.filter(|_| *direction == Direction::Out);
            let lag = lag.map(|info| (info.status.lag_messages, info.status.lag_bytes));
            status.rows(lag.unwrap_or_default(), rows);
        }
    }
}
