//! The receiver of messages: a session as all threads see it. The broker delivers into its outbound half, and whoever has
//! delivered writes to its socket, unless only the connection's task may (TLS, WebSocket).
//!
//! ```text
//! device       the session's object: outbound half and link behind one lock, for the broker and for the connection
//! link         the connection that owns the session now, and responsibility for the bytes that wait, tried in every interleaving
//! flush        the write of an out-buffer, with one system call
//! replay_work  what connections are to do for subscriptions that they have not asked for
//! trace        packets as those see them who trace a client
//! ```
//!
//! A [`Device`] is the one object of a client id: the broker knows it by its traits `Session` and `Target`, a connection by its
//! link, and people as the device.
//!
//! Knows sessions and the broker's [`Target`](broker::Target). Must not know: listeners, shards, permissions, stores.

pub mod counters;
mod device;
pub mod flush;
mod link;
#[cfg(test)]
mod link_tests;
#[cfg(test)]
mod memory_tests;
mod replay_work;
#[cfg(any(test, feature = "test-util"))]
pub mod test_util;
pub mod trace;

pub use device::{Device, DeviceContext, DeviceSlot, Flushing, HEARD, PAUSED, Reception, session_maker};
pub use link::{Link, SocketWriter, Unsent};
