//! One of the 64 parts of the pending latest values: the entries of some devices behind one short lock.
//!
//! An entry is *dirty* (newer than the store), *in flight* (being written), both, or clean. Clean entries
//! stay for a few rounds so that a device that goes on publishing finds its buffer; they answer no reads.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use gateway_core::{ClientId, Message, Properties, QoS, Timestamp};
use hashbrown::{HashMap, HashTable};

use store::LatestValue;

/// Flush rounds that a clean entry outlives.
const IDLE_ROUNDS: u64 = 8;

/// A larger buffer is not kept in a clean entry.
const KEEP_BUFFER: usize = 4096;

/// Bytes of an entry besides its buffers: slot, index, queues.
const OVERHEAD: usize = 224;

/// Difference that a change of an entry makes to the process-wide sums.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) values: isize,
    pub(super) bytes: isize,
}

impl std::ops::AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.values += other.values;
        self.bytes += other.bytes;
    }
}

/// Effects of a recorded message.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) change: Sums,
    /// True if the message replaced a value that will now never be written.
    pub(super) coalesced: bool,
    /// True if the topic of the device was not in memory.
    pub(super) inserted: bool,
}

/// Why a value is not recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotRecorded {
    Excluded,
    Bytes,
    Share,
}

/// Sums of a device's entries in a stripe.
#[derive(Debug, Default)]
struct DeviceEntries {
    topics: u32,
    /// Bytes that its entries count for in the process-wide sum.
    charged: usize,
}

/// The process-wide bounds at the time of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct StripeBounds {
    /// Bytes still free before new dirty entries are refused; negative when over.
    pub(super) free: isize,
    /// Further bytes that entries already dirty may grow by.
    pub(super) growth: isize,
}

/// Names an entry taken for a flush.
#[derive(Debug, Clone, Copy)]
pub(super) struct TakenEntry(u32);

struct StripeEntry {
    hash: u64,
    device: ClientId,
    topic: Arc<str>,
    payload: Vec<u8>,
    properties: Option<Arc<Properties>>,
    received: Timestamp,
    /// Arrival of the oldest value that the store lacks.
    since: Timestamp,
    version: u64,
    /// Share of the entry in the process-wide sum; 0 when clean.
    charged: usize,
    qos: QoS,
    retain: bool,
    dirty: bool,
    in_flight: bool,
}

#[derive(Default)]
pub(super) struct Stripe {
    slots: Vec<Option<StripeEntry>>,
    free: Vec<u32>,
    index: HashTable<u32>,
    devices: HashMap<ClientId, DeviceEntries, ahash::RandomState>,
    dirty: VecDeque<u32>,
    /// Entries that became clean: in which round, which, and with which version.
    clean: VecDeque<(u64, u32, u64)>,
    clean_bytes: usize,
}

impl Stripe {
    /// Records a message. Once it is accepted, `stamp` gives its version and its wall-clock time of arrival, so that
    /// versions grow per entry.
    pub(super) fn record(
        &mut self,
        hash: u64,
        device: &ClientId,
        message: &Message<'_>,
        bounds: StripeBounds,
        excluded: impl FnOnce() -> bool,
        stamp: impl FnOnce() -> (u64, Timestamp),
    ) -> Result<Recorded, NotRecorded> {
        let found = self.find(hash, device.as_str(), message.topic);
        let inserted = found.is_none();
        let slot = match found {
            Some(slot) => slot,
            None => {
                if excluded() {
                    return Err(NotRecorded::Excluded);
                }
                // Exactly what the entry will count for, so that nothing below refuses what was inserted.
                let properties = message.properties.map_or(0, |p| properties_size(p));
                let names = device.as_str().len() + message.topic.len();
                let size = (OVERHEAD + names + message.payload.len() + properties) as isize;
                if bounds.free < size {
                    return Err(NotRecorded::Bytes);
                }
                if !self.is_within_share(device, size, bounds) {
                    return Err(NotRecorded::Share);
                }
                self.insert(hash, device, message.topic)
            }
        };
        let Some(entry) = self.slots[slot as usize].as_mut() else { return Err(NotRecorded::Excluded) };
        let pending = entry.dirty || entry.in_flight;
        let grown = message.payload.len().saturating_sub(entry.payload.capacity()) as isize;
        let size = entry.size() as isize;
        let refused = if pending {
            grown > 0 && bounds.free.saturating_add(bounds.growth) < grown
        } else {
            bounds.free < size + grown
        };
        if refused {
            return Err(NotRecorded::Bytes);
        }
        if !pending && !self.is_within_share(device, size + grown, bounds) {
            return Err(NotRecorded::Share);
        }
        let Some(entry) = self.slots[slot as usize].as_mut() else { return Err(NotRecorded::Excluded) };
        if !pending {
            self.clean_bytes -= entry.size().min(self.clean_bytes);
        }
        entry.fill(message, stamp());
        let change = entry.charge();
        let coalesced = entry.dirty;
        if !pending {
            entry.since = entry.received;
        }
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push_back(slot);
        }
        if change.bytes != 0
            && let Some(entries) = self.devices.get_mut(device)
        {
            entries.charged = entries.charged.saturating_add_signed(change.bytes);
        }
        Ok(Recorded { change, coalesced, inserted })
    }

    /// Tells whether the device may hold so many bytes more: at most 16 times the free room, as in [`gateway_core::Shares`]. A
    /// device alone must be able to fill as much as makes the spill begin.
    fn is_within_share(&self, device: &ClientId, bytes: isize, bounds: StripeBounds) -> bool {
        let own = self.devices.get(device).map_or(0, |entries| entries.charged);
        own as isize + bytes <= bounds.free.saturating_mul(16)
    }

    fn discharge(&mut self, slot: u32) {
        let Some(entry) = self.slots[slot as usize].as_mut() else { return };
        if let Some(entries) = self.devices.get_mut(&entry.device) {
            entries.charged -= entry.charged.min(entries.charged);
        }
        entry.charged = 0;
    }

    /// Copies dirty values to `out` and marks them in flight, until `bytes` or `count` is reached. An entry in flight
    /// is not taken again before it has landed: of two flights the first to land could free the slot of the other.
    pub(super) fn take(
        &mut self,
        count: usize,
        bytes: usize,
        out: &mut Vec<(TakenEntry, LatestValue)>,
    ) -> usize {
        let mut taken = 0;
        let limit = out.len() + count;
        for _ in 0..self.dirty.len() {
            if out.len() >= limit || taken >= bytes {
                break;
            }
            let Some(slot) = self.dirty.pop_front() else { break };
            let Some(entry) = self.slots[slot as usize].as_mut() else { continue };
            if entry.in_flight {
                self.dirty.push_back(slot);
                continue;
            }
            entry.dirty = false;
            entry.in_flight = true;
            taken += entry.payload.len() + OVERHEAD;
            out.push((TakenEntry(slot), entry.value()));
        }
        taken
    }

    /// Ends the flight of an entry. `written` tells whether the store has what was taken. A clean entry stays
    /// for a while unless it is large or clean entries exceed `keep_bytes`.
    pub(super) fn landed(&mut self, taken: TakenEntry, written: bool, round: u64, keep_bytes: usize) -> Sums {
        let Some(entry) = self.slots[taken.0 as usize].as_mut() else { return Sums::default() };
        entry.in_flight = false;
        if entry.dirty {
            if written {
                entry.since = entry.received;
            }
            return Sums::default();
        }
        if !written {
            entry.dirty = true;
            self.dirty.push_back(taken.0);
            return Sums::default();
        }
        let change = Sums { values: -1, bytes: -(entry.charged as isize) };
        self.discharge(taken.0);
        let Some(entry) = self.slots[taken.0 as usize].as_mut() else { return change };
        let size = entry.size();
        if entry.payload.capacity() > KEEP_BUFFER || self.clean_bytes + size > keep_bytes {
            self.remove(taken.0);
        } else {
            self.clean_bytes += size;
            self.clean.push_back((round, taken.0, entry.version));
        }
        change
    }

    /// Drops the pending values of these topics of `device`, unless newer than `version`. None of them may be in
    /// flight.
    pub(super) fn forget(&mut self, device: &str, topics: &[(u64, &str)], version: u64) -> Sums {
        let mut change = Sums::default();
        let mut forgotten = Vec::new();
        for (hash, topic) in topics {
            let Some(slot) = self.find(*hash, device, topic) else { continue };
            let Some(entry) = self.slots[slot as usize].as_ref() else { continue };
            debug_assert!(!entry.in_flight, "forgotten on its way to the store");
            if entry.dirty && !entry.in_flight && entry.version <= version {
                change += Sums { values: -1, bytes: -(entry.charged as isize) };
                forgotten.push(slot);
            }
        }
        // Their slots may be reused, so no queue may name them.
        self.dirty.retain(|slot| !forgotten.contains(slot));
        forgotten.into_iter().for_each(|slot| self.remove(slot));
        change
    }

    /// Removes entries that have been clean for some rounds, looking at `count` at most. True if more remain.
    pub(super) fn evict(&mut self, round: u64, count: usize) -> bool {
        for _ in 0..count {
            let Some(&(since, slot, version)) = self.clean.front() else { return false };
            if since + IDLE_ROUNDS > round {
                return false;
            }
            self.clean.pop_front();
            let entry = self.slots[slot as usize].as_ref();
            if let Some(entry) = entry.filter(|e| e.version == version && !e.dirty && !e.in_flight) {
                self.clean_bytes -= entry.size().min(self.clean_bytes);
                self.remove(slot);
            }
        }
        true
    }

    /// The pending value of (device, topic).
    pub(super) fn get(&self, hash: u64, device: &str, topic: &str) -> Option<LatestValue> {
        let slot = self.find(hash, device, topic)?;
        self.pending(slot as usize).map(StripeEntry::value)
    }

    /// Calls `visit` for the pending entries among `count` slots from `from`. False after the last slot.
    pub(super) fn visit(&self, from: usize, count: usize, mut visit: impl FnMut(Unflushed<'_>)) -> bool {
        let to = (from + count).min(self.slots.len());
        for slot in from..to {
            if let Some(entry) = self.pending(slot) {
                visit(Unflushed(entry));
            }
        }
        to < self.slots.len()
    }

    /// Entries, clean ones too.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    fn pending(&self, slot: usize) -> Option<&StripeEntry> {
        self.slots[slot].as_ref().filter(|entry| entry.dirty || entry.in_flight)
    }

    fn find(&self, hash: u64, device: &str, topic: &str) -> Option<u32> {
        let same = |slot: &u32| {
            let entry = self.slots[*slot as usize].as_ref();
            entry.is_some_and(|e| e.hash == hash && *e.topic == *topic && e.device.as_str() == device)
        };
        self.index.find(hash, same).copied()
    }

    fn insert(&mut self, hash: u64, device: &ClientId, topic: &str) -> u32 {
        let entry = StripeEntry {
            hash,
            device: device.clone(),
            topic: Arc::from(topic),
            payload: Vec::new(),
            properties: None,
            received: Timestamp::default(),
            since: Timestamp::default(),
            version: 0,
            charged: 0,
            qos: QoS::AtMostOnce,
            retain: false,
            dirty: false,
            in_flight: false,
        };
        // Counted as clean until it is filled.
        self.clean_bytes += entry.size();
        self.devices.entry(device.clone()).or_default().topics += 1;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                (self.slots.len() - 1) as u32
            }
        };
        self.slots[slot as usize] = Some(entry);
        let slots = &self.slots;
        self.index.insert_unique(hash, slot, |slot| slots[*slot as usize].as_ref().map_or(0, |e| e.hash));
        slot
    }

    fn remove(&mut self, slot: u32) {
        self.discharge(slot);
        let Some(entry) = self.slots[slot as usize].take() else { return };
        if let Ok(found) = self.index.find_entry(entry.hash, |s| *s == slot) {
            found.remove();
        }
        if let Some(entries) = self.devices.get_mut(&entry.device) {
            entries.topics -= 1;
            if entries.topics == 0 {
                self.devices.remove(&entry.device);
            }
        }
        self.free.push(slot);
        if self.index.is_empty() {
            // An outage of the store may have made it large.
            *self = Self::default();
        }
    }
}

/// A pending entry, seen under the lock.
pub(super) struct Unflushed<'a>(&'a StripeEntry);

impl Unflushed<'_> {
    pub(super) fn names(&self) -> (&ClientId, &Arc<str>) {
        (&self.0.device, &self.0.topic)
    }

    pub(super) fn version(&self) -> u64 {
        self.0.version
    }

    /// Since when it waits.
    pub(super) fn since(&self) -> Timestamp {
        self.0.since
    }

    pub(super) fn value(&self) -> LatestValue {
        self.0.value()
    }
}

impl StripeEntry {
    fn size(&self) -> usize {
        let properties = self.properties.as_ref().map_or(0, |p| properties_size(p));
        OVERHEAD + self.topic.len() + self.device.as_str().len() + self.payload.capacity() + properties
    }

    fn fill(&mut self, message: &Message<'_>, (version, received): (u64, Timestamp)) {
        let length = message.payload.len();
        if self.payload.capacity() > KEEP_BUFFER && self.payload.capacity() / 4 > length {
            self.payload = Vec::new();
        }
        self.payload.clear();
        self.payload.reserve_exact(length);
        self.payload.extend_from_slice(message.payload);
        if self.properties.is_some() || message.properties.is_some() {
            self.properties = message.properties.cloned();
        }
        self.qos = message.qos;
        self.retain = message.retain;
        self.received = received;
        self.version = version;
    }

    /// Counts the entry, which is now pending, at its present size.
    fn charge(&mut self) -> Sums {
        let size = self.size();
        let values = isize::from(self.charged == 0);
        let change = Sums { values, bytes: size as isize - self.charged as isize };
        self.charged = size;
        change
    }

    fn value(&self) -> LatestValue {
        LatestValue {
            device: self.device.clone(),
            topic: Arc::clone(&self.topic),
            payload: Bytes::copy_from_slice(&self.payload),
            qos: self.qos,
            retain: self.retain,
            properties: self.properties.clone(),
            received: self.received,
            version: self.version,
            server: None,
        }
    }
}

/// About the bytes of properties in memory.
pub(super) fn properties_size(properties: &Properties) -> usize {
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let user: usize = properties.user.iter().map(|(name, value)| name.len() + value.len() + 48).sum();
    let correlation = properties.correlation_data.as_ref().map_or(0, Bytes::len);
    128 + text(&properties.content_type) + text(&properties.response_topic) + correlation + user
}

#[cfg(test)]
mod tests {
    use gateway_core::Origin;

    use super::*;

    /// A device that publishes while a batch is being filled from its stripe.
    #[test]
    fn a_value_changed_in_flight_is_not_taken_twice_and_lands_in_place() {
        let mut stripe = Stripe::default();
        let device = ClientId::new("d");
        let record = |stripe: &mut Stripe, version| {
            // Too large to stay once it is clean.
            let message = Message::new("t", &[b'x'; 2 * KEEP_BUFFER], Timestamp(0), Origin::SERVER);
            let bounds = StripeBounds { free: 1 << 20, growth: 0 };
            stripe
                .record(1, &device, &message, bounds, || false, || (version, Timestamp(0)))
                .expect("room for it");
        };
        let take = |stripe: &mut Stripe| {
            let mut out = Vec::new();
            stripe.take(10, usize::MAX, &mut out);
            out
        };
        record(&mut stripe, 1);
        let first = take(&mut stripe);
        record(&mut stripe, 2);
        assert_eq!((first.len(), take(&mut stripe).len()), (1, 0));
        stripe.landed(first[0].0, true, 1, 0);
        let second = take(&mut stripe);
        assert_eq!(second.iter().map(|(_, value)| value.version).collect::<Vec<_>>(), [2]);
        stripe.landed(second[0].0, true, 1, 0);
        assert!(stripe.get(1, "d", "t").is_none(), "it is written");
    }
}
