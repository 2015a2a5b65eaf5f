//! Ports of servers that are started by number, and again on the same one.

use std::{
    hash::{BuildHasher as _, RandomState},
    net::{Ipv4Addr, TcpListener},
};

/// The first of so many ports in a row that are free now. They are below those that the system gives to clients, one of
/// which might have it while nobody listens.
pub(crate) fn free_ports(count: u16) -> u16 {
    let is_free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    (0..1_000_u32)
        .map(|attempt| 12_000 + (RandomState::new().hash_one(attempt) % 18_000) as u16)
        .find(|first| (*first..first + count).all(is_free))
        .expect("ports that are free")
}
