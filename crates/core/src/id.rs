//! Small value types: client id, quality of service, protocol level, timestamp.

use std::{fmt, sync::Arc};

/// A device's MQTT client identifier. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(Arc<str>);

impl ClientId {
    /// Wraps an identifier that the caller has already validated as UTF-8 without NUL.
    pub fn new(id: &str) -> Self {
        Self(Arc::from(id))
    }

    /// The identifier as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::borrow::Borrow<str> for ClientId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// Quality of service of a PUBLISH or a subscription.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum QoS {
    /// At most once.
    #[default]
    AtMostOnce = 0,
    /// At least once.
    AtLeastOnce = 1,
    /// Exactly once.
    ExactlyOnce = 2,
}

impl QoS {
    /// The level for its two wire bits; `None` for the reserved value 3.
    pub fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::AtMostOnce),
            1 => Some(Self::AtLeastOnce),
            2 => Some(Self::ExactlyOnce),
            _ => None,
        }
    }
}

/// MQTT protocol level of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Protocol {
    /// MQTT 3.1 (`MQIsdp`, level 3).
    V3 = 3,
    /// MQTT 3.1.1 (level 4).
    V4 = 4,
    /// MQTT 5.0 (level 5).
    V5 = 5,
}

impl Protocol {
    /// Returns whether packets of this level carry MQTT 5 properties.
    pub fn is_v5(self) -> bool {
        self == Self::V5
    }
}

/// Milliseconds since the Unix epoch. Read once per turn by the layer that owns time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// This time plus `millis`, saturating.
    #[must_use]
    pub fn plus_millis(self, millis: u64) -> Self {
        Self(self.0.saturating_add(millis))
    }

    /// This time plus `seconds`, saturating.
    #[must_use]
    pub fn plus_secs(self, seconds: u32) -> Self {
        Self(self.0.saturating_add(u64::from(seconds) * 1000))
    }

    /// Whole seconds from this time until `later`, 0 if `later` has passed.
    pub fn secs_until(self, later: Self) -> u32 {
        u32::try_from(later.0.saturating_sub(self.0).div_ceil(1000)).unwrap_or(u32::MAX)
    }
}
