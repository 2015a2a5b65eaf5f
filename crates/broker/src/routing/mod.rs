//! From a message to its receivers.
//!
//! Subscriptions ([`subscribe`], [`streams`]) put filters into the [`index`]; a message is published ([`publish`]), matched
//! there, and handed to each receiver ([`spread`]). In non-broker mode [`namespace`] says which filters a device may have.

mod index;
mod namespace;
mod publish;
mod spread;
mod streams;
mod subscribe;

pub(crate) use index::{Index, MatchCache};
pub use spread::{Routing, Spread};
pub use streams::StreamHandle;
