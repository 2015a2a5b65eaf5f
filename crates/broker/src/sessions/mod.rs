//! Sessions from their first connection to their end.
//!
//! [`lifecycle`] opens, closes and ends them; [`core`] is what routing keeps of each. They are found by client id
//! ([`registry`]), by number ([`slots`]) and by deadline ([`timers`]). What remains to
//! be done after their end is a [`SessionCleanup`]; [`wills`] publishes wills. [`devices`] shows them to
//! operators.
//!
//! [`lifecycle`], [`SessionCleanup`] and [`wills`] use each other: an end may publish wills, and a published will completes an
//! end. The other files know none of these three.

mod cleanup;
mod core;
mod devices;
mod leaving;
mod lifecycle;
mod registry;
mod shed;
mod slots;
mod timers;
mod wills;

pub use self::{cleanup::SessionCleanup, core::SessionCore};
pub(crate) use self::{
    core::SessionState,
    registry::{ClientLock, SessionRegistry},
    shed::Shedding,
    slots::{SlotTable, Slots},
    timers::SessionTimers,
};
