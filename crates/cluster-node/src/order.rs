//! An order that a home goes to another node, by an operator: a row among the signs of life, which every node reads.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cluster::{Clock, read_view};
use ledger::{Beat, Ledger, Unknown};

use crate::{HOME, NodeError, clock::MachineClock};

/// Its place among the nodes, which have no such name.
const NAME: &str = "@takeover";

/// Time between two looks of the node that serves.
const LOOK: Duration = Duration::from_secs(1);

/// An order of a certain epoch; with the next one it is carried out, or void.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    /// Node that is to serve; empty is any other.
    pub(crate) to: String,
}

impl Order {
    /// The order among signs of life, if there is one of that epoch.
    pub(crate) fn find(beats: &[Beat], epoch: u64) -> Option<Self> {
        let beat = beats.iter().find(|beat| &*beat.node == NAME && beat.incarnation == epoch)?;
        Some(Self { to: String::from_utf8_lossy(&beat.about).into_owned() })
    }

    /// Returns whether it names this node.
    pub(crate) fn is_to(&self, node: &str) -> bool {
        self.to == node
    }
}

/// Returns whether a row is a node's.
pub(crate) fn is_node(beat: &Beat) -> bool {
    &*beat.node != NAME
}

/// Orders that the home goes from the node that has it now to `to`, or to any other if that is empty. The one that serves hands it
/// over; if it does not, `to` takes it. Returns the epoch that ends.
///
/// # Errors
/// The view cannot be used, or the ledger does not answer.
pub async fn order_takeover(ledger: &Arc<dyn Ledger>, to: &str) -> Result<u64, NodeError> {
    let (_, view) = read_view(&**ledger, &MachineClock).await?;
    let epoch = view.home(HOME)?.epoch;
    let about = Bytes::copy_from_slice(to.as_bytes());
    let order = Beat { node: NAME.into(), incarnation: epoch, number: 0, about };
    let failed = |unknown: Unknown| NodeError::Unanswered(unknown.0);
    ledger.beat(&order).await.map_err(failed)?;
    Ok(epoch)
}

/// Waits for an order that takes the home of that epoch from `node`, and gives `seen` all beats, each second.
pub(crate) async fn ordered_away(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    node: &str,
    epoch: u64,
    mut seen: impl FnMut(&[Beat]),
) {
    loop {
        clock.sleep(LOOK).await;
        let Ok(beats) = ledger.beats().await else { continue };
        seen(&beats);
        if Order::find(&beats, epoch).is_some_and(|order| !order.is_to(node)) {
            return;
        }
    }
}
