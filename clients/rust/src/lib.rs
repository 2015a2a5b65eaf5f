//! Client of the gateway's gRPC API, over the generated clients of `mqtt-gateway-api`: what every backend would otherwise write
//! for itself.
//!
//! - [`Client`]: address, authority, token or a source of tokens, client certificate; the generated clients of all services with these.
//! - [`Client::publish`]: published once, however often it has to be sent.
//! - [`Following`]: subscriptions, watches of latest values, shadows and events that go on after a lost connection.
//! - [`Pages`]: devices, latest values and stored commands, read page by page.
//! - [`WatchedCommand`]: a stored command until it has ended.
//! - [`consume`]: messages of a group with acknowledgement, in order for each device, and an orderly end.
//! - [`Error`]: what the gateway refuses, by [`Reason`].
//!
//! The messages are those of the protos ([`v1`]); the protos say what each field means.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod backoff;
mod calls;
mod connect;
pub mod consume;
mod error;
mod follow;
mod pages;

pub use calls::{COMMAND_ID_BYTES, new_key};
pub use connect::{Caller, Client, Options};
pub use consume::{Delivery, GiveBack, Member};
pub use error::{Error, Reason};
pub use follow::{Following, Update, WatchedCommand};
pub use gateway_api::gateway::v1;
pub use pages::Pages;
pub use tonic::{Code, Request};
pub use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
