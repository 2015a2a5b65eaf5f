//! Shared subscriptions: groups of sessions of which one gets each message [MQTT-4.8.2-4].
//!
//! A [`SharedGroup`] chooses the member; what no member takes is put into its [`queue`] and later given to members by
//! [`waiting`]. [`groups`] are found by number and by name.

mod group;
mod groups;
mod queue;
mod waiting;

pub(crate) use self::{
    group::{DeliveryContext, SharedGroup, SharedMember},
    groups::SharedGroups,
    queue::{Most, QueuedMessage},
};
