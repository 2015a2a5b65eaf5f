//! From a message to its receivers.
//!
//! Subscriptions ([`subscribe`]) put filters into the [`index`]; a message that the stores and the log accept ([`admission`]) is
//! matched there, and handed to each receiver ([`delivery`]). In non-broker mode [`namespace`] says which filters a device may
//! have. Messages that members of shared groups gave back are given to others ([`redelivery`]).

mod admission;
mod delivery;
mod index;
mod namespace;
mod published;
mod redelivery;
mod subscribe;
mod turn;

pub(crate) use self::{
    admission::{admit_to_store, refusal},
    delivery::{Deliverer, SpreadProgress, deliver_direct},
    index::{Index, MatchCaches, MatchList},
    redelivery::Redelivery,
    subscribe::SubscriptionRules,
};
pub use self::{
    published::{DirectOutcome, Offline, Published, Shortage},
    subscribe::{SubscribeError, SubscribeRequest, Subscribed},
    turn::Turn,
};
