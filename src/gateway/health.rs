//! Health of the stores on disk and of certificates, for operators.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use broker::Broker;
use commands::CommandRegistry;
use consumer_groups::ConsumerGroups;
use disk::{EmbeddedLatest, EmbeddedPublisher, EmbeddedQueues, EmbeddedRetained, EmbeddedSessions};
use edge::tls::TlsStore;
use gateway_core::{
    clock,
    metrics::{Row, figures},
};
use store::{PublisherStore as _, QueueStore as _, RetainedStore as _, SessionStore as _, StoreHealth};
use tokio::sync::watch;
use values::{History, StoreCondition};

use super::{groups, history, shadows};
use auth::abuse::BanRegistry;
use bridges::BridgesStatus;

/// The stores of sessions, queues and retained messages, and all files that were set aside at the start.
pub(super) struct StoreWatch {
    pub(super) durable: Option<DurableStores>,
    /// The engines of consumer groups, and the groups once they have begun.
    pub(super) engines: Option<groups::OpenedGroups>,
    pub(super) groups: OnceLock<Arc<ConsumerGroups>>,
    /// Stored commands, once there are any.
    pub(super) registry: OnceLock<Arc<CommandRegistry>>,
    pub(super) shadows: Option<shadows::OpenedShadows>,
    /// History of the topics that have one.
    pub(super) history: Option<Arc<History>>,
    /// Latest values on this disk: all, or those that the database did not take.
    pub(super) latest: Option<Arc<EmbeddedLatest>>,
    pub(super) set_aside: Vec<PathBuf>,
    /// Latest values, if they are kept in a database.
    pub(super) database: Option<watch::Receiver<StoreCondition>>,
    pub(super) tls: Arc<TlsStore>,
    pub(super) bans: Arc<BanRegistry>,
    pub(super) bridges: BridgesStatus,
}

pub(super) struct DurableStores {
    pub(super) sessions: Arc<EmbeddedSessions>,
    pub(super) queues: Arc<EmbeddedQueues>,
    pub(super) retained: Arc<EmbeddedRetained>,
    pub(super) publisher: Arc<EmbeddedPublisher>,
}

impl DurableStores {
    fn health(&self) -> [(&'static str, StoreHealth); 4] {
        [
            ("sessions", self.sessions.health()),
            ("queues", self.queues.health()),
            ("retained", self.retained.health()),
            ("publisher", self.publisher.health()),
        ]
    }
}

/// Time for which the loss of a retained message counts as a problem of the gateway, in milliseconds.
const REFUSAL_TOLD: u64 = 600_000;

/// A line about retained messages, if one was not stored lately since a limit was reached.
pub(super) fn retained_problem(broker: &Broker) -> String {
    let refused = broker.retained_refused();
    let lately = refused.filter(|(at, _)| clock::now().0.saturating_sub(at.0) < REFUSAL_TOLD);
    lately
        .map_or_else(String::new, |(_, key)| format!("retained messages are not stored: {key} is reached\n"))
}

impl StoreWatch {
    /// Notes that nothing more is written.
    pub(super) fn note_closed(&self) {
        if let Some(latest) = &self.latest {
            latest.note_closed();
        }
        if let Some(durable) = &self.durable {
            durable.sessions.note_closed();
            durable.queues.note_closed();
            durable.retained.note_closed();
            durable.publisher.note_closed();
        }
        if let Some(engines) = &self.engines {
            engines.note_closed();
        }
        if let Some(shadows) = &self.shadows {
            shadows.note_closed();
        }
    }

    /// The health of all stores on this disk that others wait for, by name.
    fn health(&self) -> impl Iterator<Item = (&'static str, StoreHealth)> {
        let durable = self.durable.as_ref().map(DurableStores::health).into_iter().flatten();
        let groups = self.engines.as_ref().map(groups::OpenedGroups::health).into_iter().flatten();
        durable.chain(groups).chain(self.shadows.as_ref().and_then(shadows::OpenedShadows::health))
    }

    /// Returns whether the store of consumer groups answers. A store whose disk takes nothing does: groups read on, and
    /// the store tries again with each change.
    pub(super) fn groups_answer(&self) -> bool {
        self.engines.as_ref().is_some_and(|engines| {
            engines.health().into_iter().all(|(_, health)| health != StoreHealth::Damaged)
        })
    }

    /// Returns whether the store of shadows answers, likewise: the one on this disk, or the database.
    pub(super) fn shadows_answer(&self) -> bool {
        let Some(shadows) = &self.shadows else { return false };
        match (shadows.health(), &self.database) {
            (Some((_, health)), _) => health != StoreHealth::Damaged,
            (None, Some(database)) => *database.borrow() == StoreCondition::Up,
            (None, None) => true,
        }
    }

    /// Returns the present problems, a line each; an empty text if all is well.
    pub(super) fn problems(&self) -> String {
        let mut text = String::new();
        for (name, health) in self.health() {
            match health {
                StoreHealth::Sound => {}
                StoreHealth::Failing => text.push_str(&format!("store: failing: {name}\n")),
                StoreHealth::Damaged => {
                    text.push_str(&format!("store: damaged, set aside at the next start: {name}\n"));
                }
            }
        }
        if let Some(trouble) =
            self.database.as_ref().and_then(|database| database.borrow().trouble().map(str::to_owned))
        {
            text.push_str(&format!("database: degraded: {trouble}\n"));
        }
        for file in &self.set_aside {
            let what = if file.ends_with("data.mdb") { "gone, and begun anew" } else { "set aside" };
            text.push_str(&format!("store: {what}: {}\n", file.display()));
        }
        text
    }

    pub(super) fn figures(&self) -> Vec<Row> {
        let mut all = vec![figures::STORE_SET_ASIDE.is(self.set_aside.len() as f64)];
        all.extend(
            self.bans.counts().map(|(source, count)| figures::BANS.of([source.as_str()], count as f64)),
        );
        #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
        let now = SystemTime::now();
        for (name, file, days) in self.tls.days_left(now) {
            let file = file.display().to_string();
            all.push(figures::CERTIFICATE_DAYS.of([&name, &file], (days * 100.0).floor() / 100.0));
        }
        for (name, health) in self.health() {
            let sound = u8::from(health == StoreHealth::Sound);
            all.push(figures::STORE_HEALTHY.of([name], sound.into()));
        }
        all.extend(self.history.iter().flat_map(|history| history::figures(history)));
        if let (Some(engines), Some(groups)) = (&self.engines, self.groups.get()) {
            all.extend(engines.figures(groups));
        }
        if let Some(registry) = self.registry.get() {
            all.push(figures::COMMANDS_ACTIVE.is(registry.active() as f64));
        }
        if let Some(stored) = self.shadows.as_ref().and_then(shadows::OpenedShadows::stored_bytes) {
            all.push(figures::SHADOW_STORED_BYTES.is(stored as f64));
        }
        let Some(durable) = &self.durable else { return all };
        let queues = durable.queues.gauges();
        all.push(figures::STORE_WAITING_BYTES.is(queues.waiting_bytes as f64));
        all.push(figures::STORE_QUEUED.is(queues.depth as f64));
        all.push(figures::STORE_SESSIONS.is(durable.sessions.stored() as f64));
        all
    }
}
