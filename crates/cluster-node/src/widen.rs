//! A cluster of an earlier version gets the streams that this one has more.

use std::time::Duration;

use cluster::{Clock, Order, Suspicion, Tenure, ViewError};
use ledger::{Beat, Ledger};

use crate::{STREAMS, about::About, clock::MachineClock};

/// Time between two looks at the nodes.
const LOOK: Duration = Duration::from_secs(1);

/// Gives the view its further streams as soon as every node that gives a sign of life knows them: one that does not could neither keep its
/// copy nor take the home over. Ends with that, or when the home is lost.
pub(crate) async fn widen(ledger: &dyn Ledger, tenure: &Tenure) {
    let clock = MachineClock;
    let mut suspicion = Suspicion::default();
    loop {
        if let Ok(beats) = ledger.beats().await {
            suspicion.observe(&beats, clock.now());
            let knows = |beat: &Beat| {
                About::of(beat).streams >= STREAMS
                    || suspicion.suspects(&beat.node, beat.incarnation, clock.now())
            };
            if beats.iter().filter(|beat| Order::is_node(beat)).all(knows) {
                match tenure.widen().await {
                    Ok(()) => return tracing::info!("latest values go to the ledger from now on"),
                    Err(ViewError::NotOwner { .. }) => return,
                    Err(error) => gateway_core::warn_limited!(%error, "the cluster's view cannot be changed"),
                }
            }
        }
        clock.sleep(LOOK).await;
    }
}
