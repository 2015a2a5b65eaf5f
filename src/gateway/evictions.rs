//! Ends connections whose right to be there has ended: a ban, a revoked certificate, a client id that the rules now give to
//! another.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use auth::{Authority, Connected, ConnectionCheck, abuse::BanRegistry};
use broker::CloseReason;
use config::Config;
use edge::tls::{Revocations, TlsStore};
use gateway_core::clock;
use net::NetShared;
use tokio::{sync::watch, task::JoinSet};
use tracing::info;

use super::listeners::tls_use;

/// The shortest time between two walks over all connections, however often bans are made.
const PAUSE: Duration = Duration::from_millis(100);
/// Factor between the last walk and the pause after it, if that is longer than the usual pause: clients that flap are
/// banned by themselves, and must not keep a thread busy.
const SHARE: u32 = 10;

/// The three checks of connections, and a task for each that looks at all when something has changed.
pub(super) fn watch(
    shared: &Arc<NetShared>,
    tls: &TlsStore,
    config: &Config,
    authority: Option<Arc<Authority>>,
    bans: Arc<BanRegistry>,
    tasks: &mut JoinSet<()>,
) {
    if let Some(revoked) = RevokedCertificates::new(tls, config) {
        shared.add_connection_check(Arc::new(revoked));
        tasks.spawn(watch_revocations(tls.revocations_changed(), Arc::clone(shared)));
    }
    if let Some(authority) = authority {
        shared.add_connection_check(Arc::clone(&authority) as _);
        if let Some(replaced) = authority.replacements() {
            tasks.spawn(watch_rules(replaced, Arc::clone(shared)));
        }
    }
    shared.add_connection_check(Arc::clone(&bans) as _);
    tasks.spawn(watch_bans(bans, Arc::clone(shared)));
}

/// Contents of the revocation lists of each listener.
struct RevokedCertificates(BTreeMap<String, Arc<Revocations>>);

impl RevokedCertificates {
    /// Of the listeners of devices; `None` if none has a list.
    fn new(tls: &TlsStore, config: &Config) -> Option<Self> {
        let names = config.effective_listeners().into_iter().map(|(_, listener)| listener.name);
        let with_list = |name: String| tls.revocations(&tls_use(&name)).map(|list| (name, list));
        let listeners: BTreeMap<_, _> = names.filter_map(with_list).collect();
        (!listeners.is_empty()).then_some(Self(listeners))
    }
}

impl ConnectionCheck for RevokedCertificates {
    fn verdict(&self, connected: &Connected<'_>) -> Option<CloseReason> {
        let certificate = connected.identity()?.certificate.as_ref()?;
        let revocations = self.0.get(connected.info.listener.as_str())?;
        revocations.has(certificate).then_some(CloseReason::NotAuthorized)
    }
}

async fn watch_revocations(mut changed: watch::Receiver<()>, shared: Arc<NetShared>) {
    while changed.changed().await.is_ok() {
        let evicted = shared.evict().await;
        info!(evicted, "revocation lists have changed, devices with a revoked certificate were disconnected");
    }
}

async fn watch_rules(mut replaced: watch::Receiver<()>, shared: Arc<NetShared>) {
    while replaced.changed().await.is_ok() {
        let evicted = shared.evict().await;
        if evicted > 0 {
            info!(
                evicted,
                "rules have changed, devices under client ids that are not theirs were disconnected"
            );
        }
    }
}

async fn watch_bans(bans: Arc<BanRegistry>, shared: Arc<NetShared>) {
    loop {
        bans.changed.notified().await;
        let begun = clock::now();
        let evicted = shared.evict().await;
        let took = Duration::from_millis(clock::now().0.saturating_sub(begun.0));
        if evicted > 0 {
            info!(evicted, "bans have changed, devices that they hit were disconnected");
        }
        tokio::time::sleep(PAUSE.max(took * SHARE)).await;
    }
}
