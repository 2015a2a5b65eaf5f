//! What operators learn about the stores on disk and about certificates.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use gateway_core::metrics::{Gauge, escape_label};
use store::{
    Condition, EmbeddedLatest, EmbeddedPublisher, EmbeddedQueues, EmbeddedRetained, EmbeddedSessions,
    PublisherStore as _, QueueStore as _, RetainedStore as _, SessionStore as _, StoreHealth,
};
use tokio::sync::watch;

use super::{groups, shadows};
use crate::{abuse::Bans, groups::Groups, tls::TlsStore};

/// The stores of sessions, queues and retained messages, and all files that were set aside at the start.
pub(super) struct StoreWatch {
    pub(super) durable: Option<Durable>,
    /// The engines of consumer groups, and the groups once they have begun.
    pub(super) engines: Option<groups::Opened>,
    pub(super) groups: OnceLock<Arc<Groups>>,
    pub(super) shadows: Option<shadows::Opened>,
    /// Latest values on this disk: all, or those that the database did not take.
    pub(super) latest: Option<Arc<EmbeddedLatest>>,
    pub(super) set_aside: Vec<PathBuf>,
    /// Latest values, if they are kept in a database.
    pub(super) database: Option<watch::Receiver<Condition>>,
    pub(super) tls: Arc<TlsStore>,
    pub(super) bans: Arc<Bans>,
}

pub(super) struct Durable {
    pub(super) sessions: Arc<EmbeddedSessions>,
    pub(super) queues: Arc<EmbeddedQueues>,
    pub(super) retained: Arc<EmbeddedRetained>,
    pub(super) publisher: Arc<EmbeddedPublisher>,
}

impl Durable {
    fn health(&self) -> [(&'static str, StoreHealth); 4] {
        [
            ("sessions", self.sessions.health()),
            ("queues", self.queues.health()),
            ("retained", self.retained.health()),
            ("publisher", self.publisher.health()),
        ]
    }
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
        let durable = self.durable.as_ref().map(Durable::health).into_iter().flatten();
        let groups = self.engines.as_ref().map(groups::Opened::health).into_iter().flatten();
        durable.chain(groups).chain(self.shadows.as_ref().and_then(shadows::Opened::health))
    }

    /// What is wrong, a line each; nothing if all is well.
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
            text.push_str(&format!("store: set aside: {}\n", file.display()));
        }
        text
    }

    pub(super) fn gauges(&self) -> Vec<Gauge> {
        let gauge = |name, help, labels, value: u64| (name, help, labels, value as f64);
        let none = String::new;
        let mut all = vec![gauge(
            "gateway_store_set_aside",
            "Damaged files that were set aside at the start",
            none(),
            self.set_aside.len() as u64,
        )];
        all.extend(self.bans.counts().map(|(source, count)| {
            let label = format!("source=\"{}\"", source.as_str());
            gauge("gateway_bans", "Bans, by where they come from", label, count as u64)
        }));
        #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
        let now = SystemTime::now();
        for (name, file, days) in self.tls.days_left(now) {
            let help = "Days until a certificate of a TLS use ends, below zero after that";
            let file = file.display().to_string();
            let label = format!("use=\"{}\",file=\"{}\"", escape_label(&name), escape_label(&file));
            all.push(("gateway_certificate_days_left", help, label, (days * 100.0).floor() / 100.0));
        }
        for (name, health) in self.health() {
            let label = format!("store=\"{name}\"");
            let sound = u64::from(health == StoreHealth::Sound);
            all.push(gauge("gateway_store_healthy", "1 while the store takes writes", label, sound));
        }
        if let (Some(engines), Some(groups)) = (&self.engines, self.groups.get()) {
            all.extend(engines.gauges(groups));
        }
        let Some(durable) = &self.durable else { return all };
        let queues = durable.queues.gauges();
        let waiting = queues.waiting_bytes as u64;
        all.push(gauge("gateway_store_waiting_bytes", "Bytes of messages not yet on disk", none(), waiting));
        all.push(gauge("gateway_store_queued", "Messages queued on disk", none(), queues.depth));
        all.push(gauge("gateway_store_sessions", "Sessions on disk", none(), durable.sessions.stored()));
        all
    }
}
