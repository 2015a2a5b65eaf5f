//! Connections between the gateways of a cluster: HTTP/2 over TLS, where both sides show a certificate of the cluster's authority.
//! A device that connects to one gateway is relayed over them to the gateway that has its home, byte for byte, and a backend's call
//! is passed on.
//!
//! Knows the configuration and the identities of devices and callers. Must not know MQTT, gRPC, the broker or a ledger.
//!
//! ```text
//! listener  lets the members of the cluster in, and nobody else
//! link      to one other gateway
//! stream    bytes of a relayed device, both ways
//! device    facts about a relayed device
//! caller    facts about the caller of a call that is passed on
//! gone      answers of a home that goes
//! tls       settings, and the names in a certificate
//! ```

mod caller;
pub mod counters;
mod device;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod gone;
mod link;
mod listener;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

pub use caller::PassedCaller;
pub use device::RelayedDevice;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_links;
pub use gone::until_gone;
pub use link::{GatewayLink, LinkError, LinkTarget};
pub use listener::{LinkHandler, LinkListener, Members, not_here};
pub use stream::RelayStream;

/// An error of a body, as text.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// Body of a request or answer on a link.
pub type LinkBody = UnsyncBoxBody<Bytes, BodyError>;

/// A request on a link.
pub type LinkRequest = hyper::Request<LinkBody>;

/// An answer on a link.
pub type LinkAnswer = hyper::Response<LinkBody>;

/// Path of a request that opens a relay.
const RELAY: &str = "/gateway.links.v1/relay";

/// Header with a [`RelayedDevice`].
const DEVICE: &str = "gateway-device";

/// Header with a [`PassedCaller`].
const CALLER: &str = "gateway-caller";

/// Header with the number of the home that a call is for; without it, 0.
const HOME: &str = "gateway-home";

/// Bytes that a gateway sends for one relay or call before the other has taken any of them: what a device that does not read, or
/// a backend, makes its gateway hold.
pub const STREAM_WINDOW: u32 = 64 << 10;

/// Largest list of headers: a caller's metadata, or a device's identity with many claims.
const HEADER_LIST: u32 = 64 << 10;

/// Longest header with a device or a caller: a scope may have a hundred long filters, and the caller's own metadata goes beside it.
const MOST_HEADER: usize = 40 << 10;
