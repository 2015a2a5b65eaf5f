//! Configuration of a group, and the bounds that hold whatever is configured.

use std::time::Duration;

use gateway_core::{GroupId, SharedMessage};

/// Key by which messages keep their order among each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum OrderKey {
    /// Messages of one device; messages without a device by topic.
    #[default]
    Device,
    /// Messages of one device on one topic.
    DeviceTopic,
    /// None.
    None,
}

/// Rules by which a group delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Never changes.
    pub order_key: OrderKey,
    /// Time that a delivered message may stay unacknowledged.
    pub ack_deadline: Duration,
    /// Deliveries that end badly before a message is given up; 0 is no limit.
    pub max_attempts: u32,
    /// Pause before the second delivery; it doubles from there.
    pub min_backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
    /// Nothing is delivered.
    pub paused: bool,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            order_key: OrderKey::Device,
            ack_deadline: Duration::from_secs(30),
            max_attempts: 0,
            min_backoff: Duration::from_secs(1),
            max_backoff: Duration::from_mins(1),
            paused: false,
        }
    }
}

impl GroupConfig {
    /// The pause after this number of deliveries, in milliseconds.
    pub(crate) fn backoff(&self, attempts: u32) -> u64 {
        let doubled = 1_u64.checked_shl(attempts.saturating_sub(1)).unwrap_or(u64::MAX);
        millis(self.min_backoff).saturating_mul(doubled).min(millis(self.max_backoff))
    }

    /// Tells whether a message is given up after this number of deliveries that ended badly.
    pub(crate) fn gives_up(&self, attempts: u32) -> bool {
        self.max_attempts != 0 && attempts >= self.max_attempts
    }
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Number of a group, and its life under this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupIdentity {
    /// Its number.
    pub group: GroupId,
    /// Of this life of it, drawn by chance: nothing of an earlier process is taken for something of this one.
    pub life: u32,
    /// Grows with every seek.
    pub generation: u32,
    /// Drawn by chance when the group is made, and kept: who may choose the ids of devices cannot choose which share a key.
    pub seed: u64,
}

impl GroupIdentity {
    /// Returns the order key of a message, as a number.
    pub(crate) fn key(&self, order: OrderKey, offset: u64, message: &SharedMessage) -> u64 {
        let device = message.client_id.as_ref().map(|id| id.as_str().as_bytes());
        match (order, device) {
            (OrderKey::None, _) => offset,
            (OrderKey::Device, Some(device)) => mix(self.seed, device),
            (_, None) => mix(!self.seed, message.topic.as_bytes()),
            (OrderKey::DeviceTopic, Some(device)) => mix(mix(self.seed, device), message.topic.as_bytes()),
        }
    }
}

/// Folded multiplication, eight bytes at a time. What it gives is kept on disk and must never change.
fn mix(seed: u64, bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        #[expect(clippy::cast_possible_truncation, reason = "both halves are used")]
        let low = product as u64;
        low ^ (product >> 64) as u64
    };
    let length = bytes.len() as u64;
    let mut hash = seed ^ FACTOR;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = fold(hash ^ u64::from_le_bytes(word), FACTOR ^ hash.rotate_left(32));
    }
    fold(hash ^ length, seed ^ 0xd6e8_feb8_6659_fd93)
}

/// Bounds on the messages that a member may have unacknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credit {
    /// Messages, at least one.
    pub messages: usize,
    /// Bytes, as [`SharedMessage::cost`]; one message is delivered whatever it costs.
    pub bytes: usize,
}

impl Default for Credit {
    fn default() -> Self {
        Self { messages: 1_000, bytes: 16 << 20 }
    }
}

/// The model meets every bound: its own are small.
const SMALL: bool = cfg!(test);

/// Members of a group at most.
pub const MAX_MEMBERS: usize = 1_024;
/// Messages that a member may have unacknowledged at most, whatever it asks for.
pub const MAX_CREDIT: usize = 100_000;
/// Lagging keys at which a partition reads nothing new.
pub(crate) const MAX_LAGGING: usize = if SMALL { 2 } else { 256 };
/// Messages of a lagging key whose places are remembered; those after them are found by reading the partition again.
pub(crate) const MAX_REMEMBERED: usize = if SMALL { 2 } else { 64 };
/// Remembered places of messages to be delivered again at which a group reads nothing new.
pub(crate) const MAX_WAITING: usize = if SMALL { 12 } else { 131_072 };
/// Messages being given up at which a partition reads nothing new.
pub(crate) const MAX_DYING: usize = if SMALL { 2 } else { 64 };
/// Gaps that a member is told of one by one; later ones of a partition are joined to them.
pub(crate) const MAX_GAPS: usize = 512;
/// Bytes of messages that are read for a member and wait for it to take them. One message may always be read.
pub const MAX_AHEAD: usize = if SMALL { 2_000 } else { 2 << 20 };
/// Ranges of void deliveries that are remembered to answer late acknowledgements.
pub(crate) const MAX_VOID: usize = 1_024;
/// Messages that a member which comes back may name as those that it still works on.
pub const MAX_CLAIMS: usize = 10_000;
/// The longest that a message is kept from members after it was given back, in milliseconds: an hour, as members may ask for.
pub(crate) const MAX_PAUSE: u64 = 3_600_000;
/// Bytes of the reason of a nack that are kept.
pub const MAX_REASON: usize = 256;
/// Records of one read at most.
pub(crate) const READ_RECORDS: usize = 256;
/// Bytes of one read at most.
pub(crate) const READ_BYTES: usize = 1 << 20;
/// Deadlines that one [`tick`](crate::Group::tick) looks at.
pub(crate) const TICK_WORK: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_never_change_and_depend_on_every_byte() {
        assert_eq!(mix(1, b"device-1"), 16_159_038_805_958_106_507);
        assert_eq!(mix(7, b"sensor-00042"), 8_729_326_108_071_294_898);
        let keys: std::collections::HashSet<u64> =
            (0..10_000).map(|device| mix(3, format!("d{device}").as_bytes())).collect();
        assert_eq!(keys.len(), 10_000);
        assert_ne!(mix(1, b"a"), mix(1, b"a\0"), "a zero at the end counts");
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let config = GroupConfig::default();
        assert_eq!([1, 2, 3, 7, 99].map(|n| config.backoff(n)), [1_000, 2_000, 4_000, 60_000, 60_000]);
    }
}
