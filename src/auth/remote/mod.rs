//! Services of the user that decide who may connect, and what stands between them and the logins.

mod client;
mod guard;
mod http;

pub(super) use http::{HttpHook, Said};

/// What a service said about a device.
#[derive(Debug, Clone)]
enum Answer {
    /// This is who it is.
    Allow(super::Principal),
    /// It may not connect.
    Deny,
    /// It does not know the device.
    Ignore,
}
