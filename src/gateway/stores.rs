//! Sessions, queues and retained messages on disk: opened before anything else, read before any listener opens.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use tracing::info;

use super::StartError;
use crate::{
    broker::{Broker, DurabilityRules, Restored, Stores},
    config::Config,
    net::{self, Shared},
    store::{DataDir, DurableOptions, EmbeddedQueues, EmbeddedRetained, EmbeddedSessions, QueueOptions},
    types::QueueId,
};

/// The stores, not yet read.
pub(super) struct Opened {
    pub(super) stores: Stores,
    queues: Arc<EmbeddedQueues>,
    /// Whoever is told of messages that expire on disk.
    told: Arc<OnceLock<QueueExpired>>,
}

type QueueExpired = Box<dyn Fn(QueueId, usize, u64) + Send + Sync>;

/// Opens the stores in the data directory.
pub(super) fn open(config: &Config, directory: &Arc<DataDir>) -> Result<Opened, StartError> {
    let told: Arc<OnceLock<QueueExpired>> = Arc::default();
    let tell = Arc::clone(&told);
    let durable = DurableOptions::default();
    let queues = Arc::new(EmbeddedQueues::open(
        directory,
        &QueueOptions {
            max_waiting_bytes: config.store.max_waiting_bytes.0,
            lazy_interval: config.store.interval.0,
            clock: net::now,
            expired: Some(Arc::new(move |queue, messages, bytes| {
                if let Some(expired) = tell.get() {
                    expired(queue, messages, bytes);
                }
            })),
            ..QueueOptions::default()
        },
    )?);
    let stores = Stores {
        sessions: Arc::new(EmbeddedSessions::open(directory, &durable)?),
        queues: Arc::clone(&queues) as _,
        retained: Arc::new(EmbeddedRetained::open(directory, &durable)?),
    };
    Ok(Opened { stores, queues, told })
}

/// Which messages are acknowledged when.
pub(super) fn rules(config: &Config) -> DurabilityRules {
    let rules = config.store.rules.iter();
    DurabilityRules {
        topics: rules.map(|rule| (rule.filter.clone(), rule.durability.into())).collect(),
        default: config.store.durability.into(),
    }
}

impl Opened {
    /// Brings back what earlier processes left. Blocks on the disk.
    #[expect(clippy::disallowed_methods, reason = "the time it took is logged")]
    pub(super) async fn restore(self, broker: &Broker, shared: &Arc<Shared>) -> Result<(), StartError> {
        let begin = Instant::now();
        let moved = self.queues.regroup()?;
        let Restored {
            sessions,
            expired,
            subscriptions,
            refused_subscriptions,
            messages,
            retained,
            refused_retained,
        } = broker.restore(net::session_maker(shared), net::now()).await?;
        let _ = self.told.set(Box::new(broker.queue_expired()));
        info!(
            sessions,
            expired,
            subscriptions,
            refused_subscriptions,
            messages,
            moved_to_groups = moved,
            retained,
            refused_retained,
            took = ?begin.elapsed(),
            "sessions restored"
        );
        Ok(())
    }
}
