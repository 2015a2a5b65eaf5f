//! Selects the messages that a stream or a consumer group wants, beyond the topic filters that the index matches.

use std::{collections::HashSet, fmt, sync::Arc};

use ahash::RandomState;
use gateway_core::{Message, OriginKind, has_wildcard, matches};

type Set = HashSet<String, RandomState>;

/// Tells whether a device is in a caller's scope. Asked for each message: must neither block nor take long.
pub type InScope = dyn Fn(&str) -> bool + Send + Sync;

/// Device and exclusion rules of one stream or group.
#[derive(Default)]
pub struct Selector {
    devices: Set,
    /// Sorted, and none is a prefix of another, so that one probe decides.
    prefixes: Vec<String>,
    excluded_devices: Set,
    excluded_topics: Set,
    excluded_filters: Vec<String>,
    devices_only: bool,
    /// Only these devices; of other messages the scope is held by the filters.
    within: Option<Arc<InScope>>,
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Selector");
        shown.field("devices", &self.devices).field("prefixes", &self.prefixes);
        shown.field("devices_only", &self.devices_only).finish_non_exhaustive()
    }
}

impl Selector {
    /// All messages, or only those of devices.
    pub fn new(devices_only: bool) -> Self {
        Self { devices_only, ..Self::default() }
    }

    /// Only these devices, or those with one of these prefixes; nothing given is no restriction.
    #[must_use]
    pub fn devices(mut self, devices: Vec<String>, mut prefixes: Vec<String>) -> Self {
        self.devices = devices.into_iter().collect();
        prefixes.sort_unstable();
        prefixes.dedup_by(|later, kept| later.starts_with(kept.as_str()));
        self.prefixes = prefixes;
        self
    }

    /// Only devices in this scope; `None` is all.
    #[must_use]
    pub fn within(mut self, scope: Option<Arc<InScope>>) -> Self {
        self.within = scope;
        self
    }

    /// Without these devices, and without topics that match these filters.
    #[must_use]
    pub fn exclude(mut self, devices: Vec<String>, filters: Vec<String>) -> Self {
        self.excluded_devices = devices.into_iter().collect();
        let wild = |filter: &String| has_wildcard(filter);
        let (filters, topics): (Vec<_>, Vec<_>) = filters.into_iter().partition(wild);
        self.excluded_filters = filters;
        self.excluded_topics = topics.into_iter().collect();
        self
    }

    /// Returns whether `message` is wanted.
    pub fn wants(&self, message: &Message<'_>) -> bool {
        if self.devices_only && message.origin.kind != OriginKind::Device {
            return false;
        }
        let device = message.origin.client_id.map(|id| id.as_str());
        self.wants_device(device)
            && (self.excluded_topics.is_empty() || !self.excluded_topics.contains(message.topic))
            && !self.excluded_filters.iter().any(|filter| matches(filter, message.topic))
    }

    /// The rules about devices alone.
    pub fn wants_device(&self, device: Option<&str>) -> bool {
        if let Some(in_scope) = &self.within
            && !device.is_some_and(|device| in_scope(device))
        {
            return false;
        }
        let Some(device) = device else { return self.devices.is_empty() && self.prefixes.is_empty() };
        if !self.excluded_devices.is_empty() && self.excluded_devices.contains(device) {
            return false;
        }
        if self.devices.is_empty() && self.prefixes.is_empty() {
            return true;
        }
        self.devices.contains(device) || {
            let after = self.prefixes.partition_point(|prefix| prefix.as_str() <= device);
            after > 0 && device.starts_with(self.prefixes[after - 1].as_str())
        }
    }
}
