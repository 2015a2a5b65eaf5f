//! The homes of a cluster, as the doors for devices know them: an admitted device has its session in one of them, here or at another
//! gateway.

use std::sync::Arc;

use links::GatewayLink;

use crate::NetShared;

/// Knows the way to each home. Asked once for each CONNECT.
pub trait DeviceHomes: Send + Sync {
    /// The way to the home of a client.
    fn way(&self, client_id: &str) -> HomeWay;

    /// A home that is served here; `None` if it is not.
    fn here(&self, home: u32) -> Option<Arc<NetShared>>;
}

/// The way to a home.
pub enum HomeWay {
    /// Served here, by this broker.
    Here(Arc<NetShared>),
    /// Its number, and the link to the gateway that serves it.
    Elsewhere(u32, Arc<GatewayLink>),
    /// No gateway serves it now.
    Nobody,
}
