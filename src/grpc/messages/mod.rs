//! Between proto messages and the gateway's types: pure functions.

pub(super) mod answers;
#[cfg_attr(not(test), expect(dead_code, reason = "the services of groups come next"))]
pub(super) mod consumed;
pub(super) mod convert;
pub(super) mod encode;
pub(super) mod page;
