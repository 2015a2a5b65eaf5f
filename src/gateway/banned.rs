//! Ends the connections of those who are banned while they are connected.

use std::{sync::Arc, time::Duration};

use gateway_core::clock;
use tracing::info;

use auth::abuse::BanRegistry;

/// The shortest time between two walks over all connections, however often bans are made.
const PAUSE: Duration = Duration::from_millis(100);
/// Factor between the last walk and the pause after it, if that is longer than the usual pause: clients that flap are
/// banned by themselves, and must not keep a thread busy.
const SHARE: u32 = 10;

/// Looks at every connection when there is a new ban. Never ends; cancel it by dropping.
pub(super) async fn watch(bans: Arc<BanRegistry>, shared: Arc<net::NetShared>) {
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
