//! The writer thread: one transaction for all that arrived during the last commit.

use std::sync::Arc;

use gateway_core::ClientId;
use hashbrown::HashMap;
use heed::RwTxn;
use tokio::sync::{mpsc, oneshot};

use super::{read, tables::LatestTables};
use crate::{keys, record};
use store::{LatestValue, StoreError};

/// Values in one transaction, unless a single batch has more.
const MAX_COMMIT: usize = 20_000;

/// Devices whose number of topics is remembered.
const MAX_COUNTED: usize = 100_000;

/// A batch and whom to tell that it is durable.
pub(super) struct LatestJob {
    pub(super) batch: Arc<[LatestValue]>,
    /// Its values are to be removed, not written.
    pub(super) removal: bool,
    pub(super) done: oneshot::Sender<Result<(), StoreError>>,
}

/// Owns all write transactions.
pub(super) struct LatestWriter {
    shared: Arc<LatestTables>,
    topics_per_device: usize,
    /// Topics per device, counted from the table when first needed.
    topics: HashMap<ClientId, usize, ahash::RandomState>,
    buffer: Vec<u8>,
}

impl LatestWriter {
    pub(super) fn new(shared: Arc<LatestTables>, topics_per_device: usize) -> Self {
        Self { shared, topics_per_device, topics: HashMap::default(), buffer: Vec::new() }
    }

    /// Serves jobs until all senders are gone. No peer waits for what it writes, and new topics are the most work that one can
    /// make.
    pub(super) fn run(mut self, mut inbox: mpsc::Receiver<LatestJob>) {
        gateway_core::give_way();
        while let Some(first) = inbox.blocking_recv() {
            let mut values = first.batch.len();
            let mut jobs = vec![first];
            while values < MAX_COMMIT
                && let Ok(job) = inbox.try_recv()
            {
                values += job.batch.len();
                jobs.push(job);
            }
            // A caller that gave up writes again what it still needs.
            jobs.retain(|job| !job.done.is_closed());
            // Versions decide: a removal leaves what is newer, whichever came first.
            let (removals, writes): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.removal);
            if !writes.is_empty() {
                let result = self.commit(&writes);
                self.answer(writes, &result);
            }
            if !removals.is_empty() {
                let result = self.remove(&removals);
                self.answer(removals, &result);
            }
        }
    }

    fn answer(&self, jobs: Vec<LatestJob>, result: &Result<(), heed::Error>) {
        for job in jobs {
            // A caller that is gone wanted no answer.
            let _ = job.done.send(result.as_ref().copied().map_err(|e| self.shared.environment.failed(e)));
        }
    }

    fn remove(&mut self, jobs: &[LatestJob]) -> Result<(), heed::Error> {
        let shared = Arc::clone(&self.shared);
        shared.environment.writing(|txn| {
            for value in jobs.iter().flat_map(|job| job.batch.iter()) {
                self.drop_value(txn, value)?;
            }
            Ok(())
        })?;
        // Counted anew when needed.
        self.topics.clear();
        Ok(())
    }

    /// Removes one value, unless a newer one is there.
    fn drop_value(&self, txn: &mut RwTxn<'_>, value: &LatestValue) -> Result<(), heed::Error> {
        let (device, topic) = (value.device.as_str(), &*value.topic);
        let old = |record: Option<&[u8]>| {
            let head = record.and_then(record::decode_head);
            head.is_some_and(|head| head.device == device && head.version <= value.version)
        };
        let LatestTables { latest, newest, .. } = *self.shared;
        let name = keys::name(device, topic);
        let place = read::locate(latest, txn, &name, |head| head.device == device && head.topic == topic)?;
        if let Some(place) = place.filter(|place| old(place.record)) {
            let key = place.key;
            latest.delete(txn, &key)?;
        }
        let place = read::locate(newest, txn, topic.as_bytes(), |head| head.topic == topic)?;
        if let Some(place) = place.filter(|place| old(place.record)) {
            let key = place.key;
            newest.delete(txn, &key)?;
        }
        Ok(())
    }

    fn commit(&mut self, jobs: &[LatestJob]) -> Result<(), heed::Error> {
        let mut values: Vec<&LatestValue> = jobs.iter().flat_map(|job| job.batch.iter()).collect();
        values.sort_by(|a, b| (&a.device, &a.topic).cmp(&(&b.device, &b.topic)));
        let shared = Arc::clone(&self.shared);
        let (mut refused, mut again) = (0, false);
        let result = shared.environment.adding(|txn| {
            // Counts of a transaction that was rolled back are void.
            if again {
                self.topics.clear();
            }
            again = true;
            refused = 0;
            for value in &values {
                refused += u64::from(!self.put(txn, value)?);
            }
            Ok(())
        });
        match result {
            Err(_) => self.topics.clear(),
            Ok(()) if refused > 0 => store::counters::count(|c| c.latest_dropped_topics.add(refused)),
            Ok(()) => {}
        }
        result
    }

    /// Writes one value, unless a newer one is there. False if the device has too many topics.
    fn put(&mut self, txn: &mut RwTxn<'_>, value: &LatestValue) -> Result<bool, heed::Error> {
        let (device, topic) = (value.device.as_str(), &*value.topic);
        let name = keys::name(device, topic);
        let owns = |head: &record::RecordHead<'_>| head.device == device && head.topic == topic;
        let Some(place) = read::locate(self.shared.latest, txn, &name, owns)? else { return Ok(false) };
        if let Some(stored) = place.record.and_then(record::decode_head) {
            if stored.version >= value.version {
                return Ok(true);
            }
        } else if place.damaged {
            read::report_damage(&place.key);
        } else if !self.admit(txn, &value.device)? {
            return Ok(false);
        }
        let key = place.key;
        record::encode_value(value, &mut self.buffer);
        self.shared.latest.put(txn, &key, &self.buffer)?;
        self.put_newest(txn, value)?;
        Ok(true)
    }

    fn put_newest(&mut self, txn: &mut RwTxn<'_>, value: &LatestValue) -> Result<(), heed::Error> {
        let topic = &*value.topic;
        let place = read::locate(self.shared.newest, txn, topic.as_bytes(), |head| head.topic == topic)?;
        let Some(place) = place else { return Ok(()) };
        let stored = place.record.and_then(record::decode_head);
        if stored.is_some_and(|head| head.version >= value.version) {
            return Ok(());
        }
        let key = place.key;
        record::encode_newest(value.version, value.device.as_str(), topic, &mut self.buffer);
        self.shared.newest.put(txn, &key, &self.buffer)
    }

    /// Counts a new topic of `device`, if it may have one more.
    fn admit(&mut self, txn: &RwTxn<'_>, device: &ClientId) -> Result<bool, heed::Error> {
        if self.topics.len() > MAX_COUNTED {
            self.topics.clear();
        }
        let topics = match self.topics.get_mut(device) {
            Some(topics) => topics,
            None => {
                let stored = read::count_topics(self.shared.latest, txn, device.as_str())?;
                self.topics.entry(device.clone()).or_insert(stored)
            }
        };
        let admitted = *topics < self.topics_per_device;
        *topics += usize::from(admitted);
        Ok(admitted)
    }
}
