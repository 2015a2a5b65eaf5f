//! The MQTT session, without sockets and without a clock: packets and time in, bytes and effects out.
//!
//! Two halves. [`Inbound`] holds what the peer sends (topic aliases, limits) and belongs to the connection's task.
//! [`Outbound`] holds what outlives the connection (in-flight window, packet ids, waiting deliveries, inbound QoS 2
//! ids) and sits behind one short lock of its owner, since other threads deliver into it. Inbound QoS 2 ids live there
//! too, so that a takeover never waits for the old task to hand them over.
//!
//! Must not know: tokio, sockets, the broker, stores.

mod acks;
mod alias;
mod backlog;
mod buffers;
mod connect;
pub mod counters;
mod durable;
mod enhanced;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod gate;
mod inbound;
mod inflight;
mod ledger;
mod outbound;
mod pending;
mod permits;
#[cfg(test)]
mod receipt_tests;
mod sending;
#[cfg(test)]
mod tests;

pub(crate) use acks::WrongStep;
pub use buffers::{recycle, take_buffer, trim_buffers};
pub use connect::{Accepted, ConnectPolicy, ConnectRefused, evaluate_connect};
pub use durable::{BacklogLoad, Disk, StoredQueue};
pub use enhanced::{Enhanced, PresentedAuth};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::{fuzz_inbound, fuzz_session};
pub use gate::{Gate, TooManyGranted};
pub use inbound::{Effect, Filters, Inbound, InboundOwner, Incoming, Reply, Violation};

pub(crate) use outbound::Qos2Begin;
pub use outbound::{Env, GATED, LinkParams, OUT_BUFFER, Outbound};
pub use permits::{Permits, PublishPermit};
