//! Links to the other gateways, as far as the ledger knows them.

use std::{future::Future, pin::Pin, sync::Arc};

use cluster_node::{NodeNames, NodeState, Phase};
use config::Config;
use links::{GatewayLink, LinkTarget, Members};
use tokio::{runtime::Handle, sync::watch};

use super::LedgerEngine;

/// The nodes of the ledger.
struct LedgerMembers {
    names: Arc<NodeNames>,
    /// Runtime of the ledger.
    runtime: Handle,
}

impl Members for LedgerMembers {
    fn has<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>> {
        let (names, name) = (Arc::clone(&self.names), name.to_owned());
        let asked = self.runtime.spawn(async move { names.has(&name).await });
        Box::pin(async move { asked.await.unwrap_or(false) })
    }
}

/// The members of the cluster of this ledger.
pub(super) fn members(engine: &LedgerEngine) -> Arc<dyn Members> {
    let names = Arc::new(NodeNames::new(Arc::clone(&engine.ledger)));
    Arc::new(LedgerMembers { names, runtime: engine.handle().clone() })
}

/// A link to the gateway that serves, as `state` has it now and later; `None` if links are switched off.
pub(super) fn link(
    config: &Config,
    engine: &LedgerEngine,
    mut state: watch::Receiver<NodeState>,
) -> Option<Arc<GatewayLink>> {
    let settings = &config.cluster.links;
    if !settings.is_on() {
        return None;
    }
    let (told, target) = watch::channel(None);
    engine.handle().spawn(async move {
        loop {
            let next = target_of(&state.borrow_and_update());
            told.send_if_modified(|target| {
                let changed = *target != next;
                *target = next;
                changed
            });
            if state.changed().await.is_err() {
                return;
            }
        }
    });
    Some(Arc::new(GatewayLink::new(target, settings.client_files(), config.tls.open_key_files)))
}

/// The gateway that serves, if it is another one and has links.
fn target_of(state: &NodeState) -> Option<LinkTarget> {
    // While the ledger does not answer, the gateway that served last goes on.
    let stands_by = matches!(state.phase, Phase::Standby | Phase::Unreachable);
    let is_known = stands_by && !state.active.is_empty() && !state.link.is_empty();
    is_known.then(|| LinkTarget { name: state.active.clone(), address: state.link.clone() })
}
