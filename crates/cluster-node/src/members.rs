//! Names of the nodes of a cluster.

use std::{sync::Arc, time::Duration};

use cluster::Order;
use ledger::Ledger;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

/// Names that were read are good for so long.
const FRESH: Duration = Duration::from_secs(1);

/// Time for the ledger's answer; without one the names that were read last count.
const ANSWER: Duration = Duration::from_secs(3);

/// The nodes that have ever given a sign of life, as the ledger has them.
pub struct NodeNames {
    ledger: Arc<dyn Ledger>,
    /// Read last, and when.
    known: Mutex<Option<(Instant, Vec<Arc<str>>)>>,
}

impl NodeNames {
    /// The nodes of this ledger.
    pub fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger, known: Mutex::default() }
    }

    /// Returns whether there is a node of this name. Asks the ledger at most once a second, however often it is called. Cancel safe.
    pub async fn has(&self, name: &str) -> bool {
        let mut known = self.known.lock().await;
        let is_fresh = known.as_ref().is_some_and(|(read, _)| read.elapsed() < FRESH);
        if !is_fresh && let Ok(Ok(beats)) = timeout(ANSWER, self.ledger.beats()).await {
            let nodes = beats.iter().filter(|beat| Order::is_node(beat));
            *known = Some((Instant::now(), nodes.map(|beat| Arc::clone(&beat.node)).collect()));
        }
        known.as_ref().is_some_and(|(_, names)| names.iter().any(|known| **known == *name))
    }
}
