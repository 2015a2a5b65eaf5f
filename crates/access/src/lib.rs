//! Identities and rights: principals, and decisions about them.
//!
//! Knows no sockets, no files being watched and no clock: time is an argument, and what was read comes as text or bytes.
//!
//! `bans` and `rules` know their parsers and are what these return, and passwords and SCRAM share their bounds: circles of two.

mod author;
pub mod backends;
mod backoff;
pub mod bans;
pub mod breaker;
pub mod certificate;
mod client_id;
mod flapping;
pub mod jwt;
#[cfg(any(test, feature = "fuzz"))]
pub mod login_fuzz;
pub mod passwords;
mod principal;
mod recent_digests;
mod recent_keys;
pub mod remote;
pub mod rules;
pub mod scram;

pub use author::Author;
pub use backoff::{Backoff, BackoffRule};
pub use client_id::{BadClientIdTemplate, ClientIdTemplate};
pub use flapping::Flapping;
pub use principal::{Method, Principal, Subject};
pub use recent_digests::{RecentDigests, ShortDigest};
pub use recent_keys::RecentKeys;
