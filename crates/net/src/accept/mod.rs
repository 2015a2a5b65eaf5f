//! From a listening socket to a connection that owns a session.

pub(super) mod accept_loop;
mod barred;
pub(super) mod claim;
pub(super) mod error;
pub(super) mod handshake;
pub(super) mod listener;
pub(super) mod proxy;
pub(super) mod relayed;
pub(super) mod serving;
pub(super) mod unauthenticated;
pub(super) mod unix;
