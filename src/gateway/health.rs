//! Health of the stores on disk and of certificates, for operators.

use std::{path::PathBuf, sync::Arc, time::SystemTime};

use ::values::{History, StoreCondition};
use broker::Broker;
use disk::{EmbeddedLatest, LatestLedgerFigures};
use edge::tls::TlsStore;
use gateway_core::{
    clock,
    metrics::{MetricRow, figures},
};
use store::StoreHealth;
use tokio::sync::watch;

use super::{home::Home, shadows, values};
use auth::abuse::BanRegistry;
use bridges::BridgesStatus;

/// The stores of the gateway, with all files that were set aside at the start, and what else can be unwell.
pub(super) struct StoreWatch {
    pub(super) home: Arc<Home>,
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
    /// Notes that nothing more is written. What is at home says so itself.
    pub(super) fn note_closed(&self) {
        if let Some(latest) = &self.latest {
            latest.note_closed();
        }
    }

    /// The health of all stores on this disk that others wait for, by name.
    fn health(&self) -> impl Iterator<Item = (&'static str, StoreHealth)> {
        self.home.health()
    }

    /// Returns whether the store of shadows answers, the one on this disk or the database. A store whose disk takes nothing does.
    pub(super) fn shadows_answer(&self) -> bool {
        let Some(shadows) = &self.shadows else { return false };
        match (shadows.health(), &self.database) {
            (Some(health), _) => health != StoreHealth::Damaged,
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
        text.extend(self.home.ledger_problem());
        for file in &self.set_aside {
            let what = if file.ends_with("data.mdb") { "gone, and begun anew" } else { "set aside" };
            text.push_str(&format!("store: {what}: {}\n", file.display()));
        }
        text
    }

    pub(super) fn figures(&self) -> Vec<MetricRow> {
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
        all.extend(self.history.iter().flat_map(|history| values::history_figures(history)));
        if let Some(stored) = self.shadows.as_ref().and_then(shadows::OpenedShadows::stored_bytes) {
            all.push(figures::SHADOW_STORED_BYTES.is(stored as f64));
        }
        all.extend(self.home.figures());
        if let Some(LatestLedgerFigures { waiting, lag }) =
            self.latest.as_ref().and_then(|latest| latest.ledger_figures())
        {
            all.push(figures::LEDGER_LATEST_WAITING.is(waiting as f64));
            all.push(figures::LEDGER_LATEST_LAG.is(lag.as_secs_f64()));
        }
        all
    }
}
