//! Sessions from their first connection to their end.
//!
//! Routing knows them, and all other receivers, as [`Target`]s ([`target`]). [`Sessions`] opens, closes and ends them
//! ([`lifecycle`]); [`core`] is the broker's part of each, and [`wills`] are the rules of its record while a will leaves it.
//! Sessions are found by client id ([`registry`]), by number ([`slots`]) and by deadline ([`timers`]). [`devices`] shows them to
//! operators, and [`shed`] has the largest give memory back.
//!
//! [`target`] and [`core`] use each other: a session has its core, and the core the facts of its connection.

mod core;
mod devices;
mod leaving;
mod lifecycle;
mod registry;
mod shed;
mod slots;
mod target;
mod timers;
mod wills;

pub(crate) use self::{
    core::SessionState,
    devices::SessionTotals,
    lifecycle::{EndedSession, SessionOpening, Sessions},
    slots::{SlotTable, Slots},
};
pub use self::{
    core::{OpenRequest, SessionCore},
    devices::{DeviceFilter, DeviceInfo, DevicePage},
    lifecycle::Closed,
    target::*,
};
