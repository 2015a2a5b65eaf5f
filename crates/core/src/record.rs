//! Records that consumer groups read: messages in the partitions of a log.

use std::{fmt, sync::Arc};

use super::SharedMessage;

/// Number of partitions of a log. Fixed, as the partition of a device follows from it.
pub const PARTITIONS: usize = 256;

/// A part of the log whose messages are in order. All of a device are in the same one, for ever and on every gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition(pub u8);

impl Partition {
    /// Returns the partition for messages of this device; without one, for messages on this topic.
    pub fn of(device: Option<&str>, topic: &str) -> Self {
        // FNV-1a. It must never change: a device's messages would be in two partitions, and out of order.
        let key = device.unwrap_or(topic).bytes();
        let hash = key.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        // The lowest bits of FNV depend on the lowest bits of the bytes only.
        Self((hash ^ (hash >> 32) ^ (hash >> 16)).to_le_bytes()[0])
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).map(Self)
    }
}

/// A consumer group. Never used twice in a data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// A message as the log has it.
#[derive(Clone)]
pub struct LogRecord {
    /// Its place in its partition: grows with each, not always by one.
    pub offset: u64,
    /// The groups that wanted it when it was appended.
    pub groups: Arc<[GroupId]>,
    /// The message. Its slot has lost its meaning, and nobody waits for a receipt.
    pub message: Arc<SharedMessage>,
}

impl fmt::Debug for LogRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LogRecord {{ {} on {}, {:?} }}", self.offset, self.message.topic, self.groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_device_is_never_changes_and_devices_are_spread() {
        assert_eq!(Partition::of(Some("device-1"), "a"), Partition::of(Some("device-1"), "b"));
        assert_eq!(Partition::of(None, "device-1"), Partition::of(Some("device-1"), ""));
        let known = ["", "device-1", "0"].map(|device| Partition::of(Some(device), "").0);
        assert_eq!(known, [227, 161, 226]);
        let mut counts = [0; PARTITIONS];
        for device in 0..25_600 {
            counts[usize::from(Partition::of(Some(&format!("sensor-{device:05}")), "").0)] += 1;
        }
        assert!(counts.iter().all(|&count| (50..200).contains(&count)), "{counts:?}");
    }
}
