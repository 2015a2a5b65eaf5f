//! Between proto messages and the gateway's types: pure functions.

pub(super) mod answers;
pub(super) mod commands;
pub(super) mod consumed;
pub(super) mod convert;
pub(super) mod encode;
pub(super) mod groups;
pub(super) mod page;
