//! The other gateways, as far as the ledger knows them.

use std::{future::Future, pin::Pin, sync::Arc};

use cluster_node::NodeNames;
use links::Members;
use tokio::runtime::Handle;

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
