//! Sockets, TLS, WebSocket, the connection task and flushing. The only layer that knows sockets.
//!
//! A PUBLISH goes: `connection` reads, `packets` checks it and calls the broker, the broker calls
//! `device` for each receiver, which encodes into that session's out-buffer; at the end of the turn
//! `flush` writes each touched buffer with one system call, and at once what a message that came alone left.

mod clock;
mod connection;
mod device;
mod durable;
mod ending;
mod flush;
mod handshake;
mod layers;
mod limiter;
#[cfg(test)]
mod link_tests;
mod listener;
mod packets;
mod proxy;
mod replay;
mod serving;
mod shard;
mod shared;
mod timers;
mod tls;
mod unix;
mod websocket;
mod wheel;

pub use clock::now;
pub use listener::{BoundListener, accept_loop};
pub use shard::{ShardHandle, start_shards, tick_shards};
pub use shared::{Shared, session_maker};
