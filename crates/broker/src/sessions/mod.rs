//! Sessions from their first connection to their end.
//!
//! [`lifecycle`] opens, closes and ends them; [`core`] is what routing keeps of each. They are found by client id
//! ([`registry`]), by number ([`slots`]), by deadline ([`timers`]) and by durable queue ([`owners`]). What remains to
//! be done after their end is an [`Aftermath`]; [`wills`] publishes wills. [`devices`] shows them to operators.

mod aftermath;
mod core;
mod devices;
mod lifecycle;
mod owners;
mod registry;
mod slots;
mod timers;
mod wills;

pub use self::{aftermath::Aftermath, core::SessionCore};
pub(crate) use self::{
    core::SessionState,
    owners::Owners,
    registry::{ClientLock, Registry, spread},
    slots::{SlotTable, Slots, TURN},
    timers::Timers,
};
