//! The table of retained messages: topic -> message, under the keys of [`keys`].

use std::ops::Bound;

use gateway_core::{SharedMessage, Timestamp};
use heed::RoTxn;

use crate::{
    counters::count, environment::Environment, format::RETAINED_TABLE, keys, table::Table, table::WriteTxn,
};
use store::encoding::message;

/// The tables.
#[derive(Clone, Copy)]
pub(crate) struct RetainedTables {
    retained: Table,
}

impl RetainedTables {
    /// Opens it, a new one in an empty environment.
    pub(crate) fn create(environment: &Environment, txn: &mut WriteTxn<'_>) -> Result<Self, heed::Error> {
        Ok(Self { retained: environment.table(txn, RETAINED_TABLE)? })
    }

    /// Sets the message of its topic; `buffer` is for its use.
    pub(super) fn set(
        &self,
        txn: &mut WriteTxn<'_>,
        message: &SharedMessage,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        let Some((key, _)) = self.locate(txn, &message.topic)? else {
            // Only by design: long topics with one hash.
            count(|c| c.store_refused_retained.add(1));
            gateway_core::warn_limited!(
                "too many long topics with one hash, a retained message is not stored"
            );
            return Ok(());
        };
        message::encode(message, buffer);
        self.retained.put(txn, &key, buffer)
    }

    /// The message of a topic. One that is damaged is reported.
    pub(super) fn get(&self, txn: &RoTxn<'_>, topic: &str) -> Result<Option<SharedMessage>, heed::Error> {
        let Some((key, true)) = self.locate(txn, topic)? else { return Ok(None) };
        let Some(bytes) = self.retained.get(txn, &key)? else { return Ok(None) };
        let message = message::decode(bytes);
        if message.is_none() {
            count(|c| c.store_damaged_records.add(1));
            gateway_core::error_limited!(topic, "stored retained message is damaged and was skipped");
        }
        Ok(message)
    }

    /// Removes the message of a topic.
    pub(super) fn clear(&self, txn: &mut WriteTxn<'_>, topic: &str) -> Result<(), heed::Error> {
        if let Some((key, true)) = self.locate(txn, topic)? {
            self.retained.delete(txn, &key)?;
        }
        Ok(())
    }

    /// Removes by key.
    pub(super) fn delete(&self, txn: &mut WriteTxn<'_>, key: &[u8]) -> Result<(), heed::Error> {
        self.retained.delete(txn, key).map(|_| ())
    }

    /// Gives every message in the order of topics to `into`; returns the keys of those that expired or are damaged.
    pub(super) fn restore(
        &self,
        txn: &RoTxn<'_>,
        now: Timestamp,
        into: &mut dyn FnMut(SharedMessage),
    ) -> Result<Vec<Vec<u8>>, heed::Error> {
        let mut useless = Vec::new();
        let mut give = |key: &[u8], bytes: &[u8]| match message::decode(bytes) {
            Some(message) if message.is_expired(now) => useless.push(key.to_vec()),
            Some(message) => into(message),
            None => {
                report(key);
                useless.push(key.to_vec());
            }
        };
        // Long topics with one beginning lie together, in the order of their hashes.
        let mut group: Vec<(&[u8], &[u8])> = Vec::new();
        for entry in self.retained.iter(txn)? {
            let (key, bytes) = entry?;
            if group.first().is_some_and(|(first, _)| keys::head(first) != keys::head(key)) {
                give_group(&mut group, &mut give);
            }
            if keys::is_long(key) {
                group.push((key, bytes));
            } else {
                give(key, bytes);
            }
        }
        give_group(&mut group, &mut give);
        Ok(useless)
    }

    /// Returns the key of a topic's message (true), or the one where it would go. `None` if all its places are taken.
    ///
    /// All places are looked at, so that a removed message leaves no gap that hides another.
    fn locate(&self, txn: &RoTxn<'_>, topic: &str) -> Result<Option<(Vec<u8>, bool)>, heed::Error> {
        let name = topic.as_bytes();
        if name.is_empty() {
            return Ok(None);
        }
        if name.len() < keys::CUT {
            return Ok(Some((name.to_vec(), true)));
        }
        let hash = keys::first_hash(name);
        let place = |probe: u32| {
            let mut key = keys::head(name).to_vec();
            key.extend_from_slice(&(hash + u128::from(probe)).to_be_bytes());
            key
        };
        let (first, last) = (place(0), place(keys::PROBES - 1));
        let range = (Bound::Included(first.as_slice()), Bound::Included(last.as_slice()));
        let (mut taken, mut free) = (0, 0);
        for entry in self.retained.range(txn, &range)? {
            let (key, bytes) = entry?;
            if message::decode(bytes).is_some_and(|message| *message.topic == *topic) {
                return Ok(Some((key.to_vec(), true)));
            }
            free += u32::from(key == place(free));
            taken += 1;
        }
        Ok((taken < keys::PROBES).then(|| (place(free), false)))
    }

    #[cfg(test)]
    pub(super) fn table(&self) -> Table {
        self.retained
    }
}

fn give_group(group: &mut Vec<(&[u8], &[u8])>, give: &mut impl FnMut(&[u8], &[u8])) {
    group.sort_by_cached_key(|(_, bytes)| message::decode(bytes).map(|message| message.topic));
    for (key, bytes) in group.drain(..) {
        give(key, bytes);
    }
}

fn report(key: &[u8]) {
    count(|c| c.store_damaged_records.add(1));
    gateway_core::error_limited!(
        topic = %String::from_utf8_lossy(keys::head(key)),
        "stored retained message is damaged and was removed"
    );
}
