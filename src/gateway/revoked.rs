//! Cuts off devices whose certificate is revoked while they are connected.

use std::{collections::BTreeMap, sync::Arc};

use broker::CloseReason;
use edge::tls::{Revocations, TlsStore};
use tokio::sync::watch;
use tracing::info;

use super::parts::tls_use;
use auth::{Connected, ConnectionCheck};

/// Contents of the revocation lists of each listener.
pub(super) struct RevokedCertificates(BTreeMap<String, Arc<Revocations>>);

impl RevokedCertificates {
    /// Of these listeners; `None` if none has a list.
    pub(super) fn new<'a>(tls: &TlsStore, listeners: impl Iterator<Item = &'a str>) -> Option<Self> {
        let with_list = |name: &str| Some((name.to_owned(), tls.revocations(&tls_use(name))?));
        let listeners: BTreeMap<_, _> = listeners.filter_map(with_list).collect();
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

/// Looks at every connection when a list has changed. Never ends; cancel it by dropping.
pub(super) async fn watch(mut changed: watch::Receiver<()>, shared: Arc<net::NetShared>) {
    while changed.changed().await.is_ok() {
        let evicted = shared.evict().await;
        info!(evicted, "revocation lists have changed, devices with a revoked certificate were disconnected");
    }
}
