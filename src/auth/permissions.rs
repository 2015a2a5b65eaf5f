//! What one connection may do.

use std::sync::Arc;

use super::Principal;

/// What one connection may do, by who it is.
#[derive(Debug, Clone)]
pub(crate) struct Permissions {
    _principal: Arc<Principal>,
}

impl Permissions {
    pub(crate) fn new(principal: Arc<Principal>) -> Self {
        Self { _principal: principal }
    }

    /// May it publish to `topic`?
    pub(crate) fn may_publish(&self, _topic: &str) -> bool {
        true
    }

    /// May it subscribe to `filter`?
    pub(crate) fn may_subscribe(&self, _filter: &str) -> bool {
        true
    }
}
