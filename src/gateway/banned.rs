//! Ends the connections of those who are banned while they are connected.

use std::{sync::Arc, time::Duration};

use tracing::info;

use crate::{abuse::Bans, net};

/// Between two walks over all connections, however often bans are made.
const PAUSE: Duration = Duration::from_millis(100);

/// Looks at every connection when there is a new ban. Never ends; cancel it by dropping.
pub(super) async fn watch(bans: Arc<Bans>, shared: Arc<net::Shared>) {
    loop {
        bans.changed.notified().await;
        let evicted = shared.evict().await;
        if evicted > 0 {
            info!(evicted, "bans have changed, devices that they hit were disconnected");
        }
        tokio::time::sleep(PAUSE).await;
    }
}
