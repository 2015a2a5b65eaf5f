//! The MQTT session, without sockets and without a clock: packets and time in, bytes and effects out.
//!
//! Two halves. [`Inbound`] holds what the peer sends (topic aliases, limits) and belongs to the connection's task.
//! [`Outbound`] holds what outlives the connection (in-flight window, packet ids, waiting deliveries, inbound QoS 2
//! ids) and sits behind one short lock of its owner, since other threads deliver into it. Inbound QoS 2 ids live there
//! too, so that a takeover never waits for the old task to hand them over.
//!
//! Others decide about rights: [`Permits`], lent with each packet, about what the client publishes, and the session's [`Gate`]
//! about what it gets.
//!
//! Must not know: tokio, sockets, the broker, stores.

mod alias;
mod answer;
mod buffers;
mod connect;
pub mod counters;
mod enhanced;
mod env;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod gate;
mod inbound;
mod outbound;
mod permits;
#[cfg(test)]
mod receipt_tests;
mod reservation;
#[cfg(test)]
mod tests;

pub use answer::{Reply, Violation};
pub use buffers::{recycle, take_buffer, trim_buffers};
pub use connect::{Accepted, ConnectPolicy, ConnectRefused, evaluate_connect};
pub use enhanced::{Enhanced, PresentedAuth};
pub use env::{Disk, Env};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::{fuzz_inbound, fuzz_session};
pub use gate::{Gate, TooManyGranted};
pub use inbound::{Effect, Filters, Inbound, InboundOwner, Incoming};
pub use outbound::{BacklogLoad, GATED, LinkParams, OUT_BUFFER, Outbound, StoredQueue};
pub(crate) use outbound::{Qos2Begin, WrongStep};
pub use permits::{Permits, PublishPermit};
