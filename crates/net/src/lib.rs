//! Sockets, TLS, WebSocket, and the connection task. The crate that knows listeners and layers.
//!
//! ```text
//! accept       from a listening socket to a connection that owns a session
//! connection   the task of a connection: reads, has the session handle frames, does what that leaves, ends
//! layers       TLS and WebSocket, and the socket below them
//! quic         what is in the place of a socket for MQTT over QUIC
//! evict        ends connections that may no longer be
//! shard        threads with their runtimes; local (buffers and turn of a thread), timers, wheel (keep alive)
//! shared       what all connections share
//! ```
//!
//! A PUBLISH goes: `connection` reads and lets the session's inbound half handle the frame, `connection::frames` hands its
//! message to the broker, which calls the crate `device` for each receiver; that encodes into the receiver's out-buffer, and
//! at the end of the turn `device::flush` writes each touched buffer with one system call.

mod accept;
mod connection;
pub mod counters;
mod evict;
mod homes;
mod layers;
mod local;
#[cfg(feature = "quic")]
mod quic;
mod shard;
mod shared;
#[cfg(test)]
mod test_util;
mod timers;
mod wheel;

pub use accept::{
    accept_loop::accept_loop,
    listener::{BoundListener, listen, probe_silent_peers},
    relayed::RelayDoor,
};
pub use homes::{DeviceHomes, HomeWay};
#[cfg(feature = "quic")]
pub use quic::ALPN;
pub use shard::{Pulse, ShardHandle, start_shards, tick_shards};
pub use shared::NetShared;
