//! Refusal of a QoS 1 or 2 message as a whole, before any receiver has it.

use gateway_core::{Message, NoRoom};
use store::StoreHealth;

use super::{Index, Shortage, Turn};
use crate::{durable::Durable, memory::Account, sessions::Slots};

/// Returns why a message must be refused, if it must; counted. `admit` asks those who would have to keep it.
pub(crate) fn refusal(
    message: &Message<'_>,
    account: &Account,
    admit: impl FnOnce() -> Result<(), NoRoom>,
) -> Option<Shortage> {
    if !account.has_room(message.payload.len() + message.topic.len()) {
        gateway_core::counters::count(|c| c.refused_memory.add(1));
        return Some(Shortage::Memory);
    }
    let Err(reason) = admit() else { return None };
    gateway_core::counters::count(|c| match reason {
        NoRoom::Full | NoRoom::QosZero => c.refused_store.add(1),
        NoRoom::Share => c.refused_share.add(1),
    });
    Some(Shortage::Store)
}

/// Refuses a message that matches a session which keeps it on disk while the store does not take it.
pub(crate) fn admit_to_store(
    message: &Message<'_>,
    durable: &Durable,
    index: &Index,
    slots: &Slots,
    turn: &mut Turn,
) -> Result<(), NoRoom> {
    let store = durable.state();
    if store.health() == StoreHealth::Sound && store.admit(message).is_ok() {
        return Ok(());
    }
    let Turn { matches, effort, .. } = turn;
    let list = matches.find(index, slots, message.topic, effort);
    let concerned = list.targets.iter().any(|matched| matched.target.is_durable())
        || list.groups.iter().any(|group| group.is_durable());
    // Asked last: while the disk fails only a few messages are let through to try it, and those must really be
    // written.
    if concerned { store.admit(message) } else { Ok(()) }
}
