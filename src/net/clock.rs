//! The one place of this layer that reads the wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::types::Timestamp;

/// Milliseconds since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "the layer's clock")]
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
