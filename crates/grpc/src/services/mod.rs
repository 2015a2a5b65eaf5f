//! The services of `gateway.v1`, and that of the precedent.

mod bans;
pub(super) mod commands;
pub(super) mod consumer;
pub(super) mod delete;
pub(super) mod devices;
pub(super) mod events;
mod explain;
pub(super) mod groups;
pub(super) mod health;
pub(super) mod history;
pub(super) mod operations;
pub(super) mod precedent;
pub(super) mod publisher;
mod rules;
pub(super) mod security;
pub(super) mod shadows;
pub(super) mod state;
mod streams;
pub(super) mod subscriber;
mod tenants;
