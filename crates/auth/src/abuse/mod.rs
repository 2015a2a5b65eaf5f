//! Measures against abusers of the gateway: bans, waits after failed logins, bans of clients that connect again and
//! again.
//!
//! The rules are in the crate `access`; here are their tables, their locks, which cover memory only, and the file in
//! which bans outlive the process. Net asks at two places: when a socket is accepted, before anything is read of it,
//! and at CONNECT.

mod bans;
mod guard;
mod logins;

pub use self::{
    bans::{BanError, BanOrigin, BanRegistry, BansError, ListedBan},
    guard::{AbuseGuard, Barred},
    logins::LoginName,
};
