//! Ends the connections of devices whose client ids the rules no longer let them connect with.

use std::sync::Arc;

use tracing::info;

use auth::Authority;

/// Looks at every connection when the rules were replaced. Never ends; cancel it by dropping.
pub(super) async fn watch(authority: Arc<Authority>, shared: Arc<net::NetShared>) {
    loop {
        authority.replaced().await;
        let evicted = shared.evict().await;
        if evicted > 0 {
            info!(
                evicted,
                "rules have changed, devices under client ids that are not theirs were disconnected"
            );
        }
    }
}
