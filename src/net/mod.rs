//! Sockets, TLS, WebSocket, the connection task and flushing. The only layer that knows sockets.
//!
//! A PUBLISH goes: `connection` reads, `packets` checks it and calls the broker, the broker calls
//! `device` for each receiver, which encodes into that session's out-buffer; at the end of the turn
//! `flush` writes each touched buffer with one system call, and at once what a message that came alone left.

mod claim;
mod connection;
mod device;
mod durable;
mod ending;
mod flush;
mod handshake;
mod handshake_error;
mod layered;
mod layers;
mod limiter;
#[cfg(test)]
mod link_tests;
mod listener;
#[cfg(test)]
mod memory_tests;
mod packets;
mod partial;
mod proxy;
mod replay;
mod serving;
mod shard;
mod shared;
mod started;
mod timers;
mod tls;
mod unauthenticated;
mod unfinished;
mod unix;
mod websocket;
mod wheel;
#[cfg(test)]
mod work_tests;

use gateway_core::clock;

pub(crate) use listener::{BoundListener, accept_loop};
pub(crate) use shard::{ShardHandle, start_shards, tick_shards};
pub(crate) use shared::{Shared, session_maker};
