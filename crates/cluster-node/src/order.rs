//! Orders of an operator that homes go to other nodes.

use std::sync::Arc;

use cluster::{Clock, Move, Order, Watcher, moves, read_view};
use ledger::{Beat, Ledger, Unknown};

use crate::{NodeError, about::About, clock::MachineClock, status::watch_beats};

/// Orders that a home goes from the node that has it now to `to`, or to any other if that is empty. The one that serves hands it
/// over; if it does not, `to` takes it. Returns the epoch that ends. If nodes have unequal numbers of homes then, they move by and by
/// until they have not.
///
/// # Errors
/// The view cannot be used, the cluster has no such home, or the ledger does not answer.
pub async fn order_takeover(ledger: &Arc<dyn Ledger>, home: u16, to: &str) -> Result<u64, NodeError> {
    let (_, view) = read_view(&**ledger, &MachineClock).await?;
    let epoch = view.home(home)?.epoch;
    write(ledger, Order { home, epoch, to: to.into() }).await?;
    Ok(epoch)
}

/// Orders all moves at once that make nodes with warm copies have equal numbers of homes, or nearly so, and returns them. Takes some
/// seconds.
///
/// # Errors
/// As [`order_takeover`].
pub async fn rebalance(ledger: &Arc<dyn Ledger>) -> Result<Vec<Move>, NodeError> {
    // No node has this name.
    let mut watcher = Watcher::new(&"".into(), 0);
    let beats = watch_beats(ledger, |beats| watcher.observe(beats, MachineClock.now())).await?;
    let (_, view) = read_view(&**ledger, &MachineClock).await?;
    let has_ended = |beat: &Beat| About::of(beat).process.is_some_and(|process| process.has_ended());
    let now = MachineClock.now();
    let look = watcher.look(Arc::new(view), &beats, has_ended, (now, now));
    let moves = moves(&look);
    for Move { home, to, .. } in &moves {
        let epoch = look.view.home(*home)?.epoch;
        write(ledger, Order { home: *home, epoch, to: Arc::clone(to) }).await?;
    }
    Ok(moves)
}

async fn write(ledger: &Arc<dyn Ledger>, order: Order) -> Result<(), NodeError> {
    let failed = |unknown: Unknown| NodeError::Unanswered(unknown.0);
    ledger.beat(&order.beat()).await.map_err(failed)?;
    Ok(())
}
