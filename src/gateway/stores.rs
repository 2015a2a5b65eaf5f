//! The state of sessions and small records, on disk: opened before anything else, read before any listener opens.

use std::{path::PathBuf, sync::Arc, time::Instant};

use broker::{Broker, DurabilityRules, Restored, Stores};
use config::Config;
use disk::{DurableOptions, EmbeddedRecords, EmbeddedState, RecordOptions, StateOptions};
use gateway_core::{
    clock,
    metrics::{MetricRow, figures},
};
use store::{DataDir, StateStore as _, StoreHealth};
use tokio::runtime::Handle;
use tracing::{info, warn};

use super::{StartError, home::HomeLedger};
use net::{self, NetShared};

/// The stores, not yet read.
pub(super) struct OpenedStores {
    pub(super) stores: Stores,
    state: Arc<EmbeddedState>,
}

/// The most messages of a queue that wait in memory or are being read, besides those in flight.
const AT_HAND: usize = 1024;

/// Opens the stores in the data directory. Called in the runtime that the broker gives its reading to.
pub(super) fn open(
    config: &Config,
    directory: &Arc<DataDir>,
    ledger: Option<&HomeLedger>,
) -> Result<OpenedStores, StartError> {
    let waiting = config.limits.waiting_for_disk().0;
    let state = Arc::new(EmbeddedState::open(
        directory,
        &StateOptions {
            max_waiting_bytes: config.store.max_waiting_bytes.0.min(waiting / 12 * 7),
            max_waiting_changes: waiting / 6,
            lazy_interval: config.store.interval.0,
            clock: clock::now,
            shipping: ledger.map(|ledger| Arc::clone(&ledger.state)),
            begun: usize::from(config.limits.max_inflight) + AT_HAND,
            ..StateOptions::default()
        },
    )?);
    let stores = Stores { state: Arc::clone(&state) as _, runtime: Handle::current() };
    Ok(OpenedStores { stores, state })
}

/// Opens the store of small records: idempotency keys, scheduled messages, commands, consumer groups, and shadows unless a
/// database has them.
pub(super) fn open_records(
    config: &Config,
    directory: &Arc<DataDir>,
    ledger: Option<&HomeLedger>,
) -> Result<Arc<EmbeddedRecords>, StartError> {
    let options = RecordOptions::default();
    let durable = DurableOptions {
        max_waiting_bytes: config.limits.waiting_for_disk().0 / 12,
        shipping: ledger.map(|ledger| Arc::clone(&ledger.records)),
        ..options.durable
    };
    let options = RecordOptions {
        durable,
        // Records of groups are small: what members have outstanding bounds them.
        max_waiting_groups: config.log_memory().0.0,
        max_shadow_bytes: config.shadow.max_total_bytes.0 as u64,
        // Waiting shadows are on the memory account before they come here.
        ..options
    };
    Ok(Arc::new(EmbeddedRecords::open(directory, &options)?))
}

/// Returns the durability that messages must reach before they are acknowledged, by topic.
pub(super) fn rules(config: &Config) -> DurabilityRules {
    let rules = config.store.rules.iter();
    DurabilityRules {
        topics: rules.map(|rule| (rule.filter.clone(), rule.durability.into())).collect(),
        default: config.store.durability.into(),
    }
}

impl OpenedStores {
    /// Their health, by name.
    pub(super) fn health(&self) -> (&'static str, StoreHealth) {
        ("state", self.state.health())
    }

    /// Nothing more is written.
    pub(super) fn note_closed(&self) {
        self.state.note_closed();
    }

    /// See [`EmbeddedState::give_up`].
    pub(super) fn give_up(&self) {
        self.state.give_up();
    }

    /// What `/metrics` shows of them.
    pub(super) fn figures(&self) -> [MetricRow; 3] {
        let queues = self.state.gauges();
        [
            figures::STORE_WAITING_BYTES.is(queues.waiting_bytes as f64),
            figures::STORE_QUEUED.is(queues.depth as f64),
            figures::STORE_SESSIONS.is(self.state.stored() as f64),
        ]
    }

    /// Returns the places to which damaged files were moved.
    pub(super) fn set_aside(&self) -> impl Iterator<Item = PathBuf> {
        self.state.set_aside().into_iter().cloned()
    }

    /// Brings back what earlier processes left. Blocks on the disk.
    #[expect(clippy::disallowed_methods, reason = "the time it took is logged")]
    pub(super) fn restore(&self, broker: &Broker, shared: &Arc<NetShared>) -> Result<(), StartError> {
        let begin = Instant::now();
        let moved = self.state.regroup()?;
        let Restored {
            sessions,
            expired,
            subscriptions,
            refused_subscriptions,
            messages,
            retained,
            refused_retained,
            left_retained,
        } = broker.restore(shared.session_maker(), self.state.has_lost_sessions(), clock::now())?;
        if left_retained > 0 {
            warn!(
                left_retained,
                "retained messages beyond limits.retained_messages or retained_bytes are not served"
            );
        }
        self.state.begin_expiry(broker.queue_expiry());
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
