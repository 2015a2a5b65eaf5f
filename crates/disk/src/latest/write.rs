//! The writer of latest values: chooses batches, writes them, tells their callers.

use std::{collections::VecDeque, mem, sync::Arc};

use gateway_core::ClientId;
use hashbrown::HashMap;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{changed, read, tables::LatestTables};
use crate::{
    committer::{EnvironmentWriter, Inbox},
    counters::count,
    keys, record,
    table::WriteTxn,
};
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
    /// Its place among the few batches that wait.
    pub(super) place: OwnedSemaphorePermit,
}

/// Batches that wait; their places bound them.
#[derive(Default)]
pub(super) struct LatestInbox(Vec<LatestJob>);

impl Inbox for LatestInbox {
    type Op = LatestJob;

    fn push(&mut self, job: LatestJob) {
        self.0.push(job);
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// The writer's.
pub(super) struct LatestWork {
    tables: LatestTables,
    topics_per_device: usize,
    waiting: VecDeque<LatestJob>,
    /// Batches in the transaction: all to be written, or all to be removed.
    chosen: Vec<LatestJob>,
    /// Topics per device, counted from the table when first needed.
    topics: HashMap<ClientId, usize, ahash::RandomState>,
    /// A transaction was begun with `topics` as they are.
    begun: bool,
    /// Values of it that are of too many topics.
    refused: u64,
    /// Removals of it of which the ledger will not hear.
    untold: u64,
    buffer: Vec<u8>,
}

impl LatestWork {
    pub(super) fn new(tables: LatestTables, topics_per_device: usize) -> Self {
        Self {
            tables,
            topics_per_device,
            waiting: VecDeque::new(),
            chosen: Vec::new(),
            topics: HashMap::default(),
            begun: false,
            refused: 0,
            untold: 0,
            buffer: Vec::new(),
        }
    }

    fn adds_values(&self, chosen: &[LatestJob]) -> bool {
        chosen.iter().any(|job| !job.removal)
    }

    fn answer(&mut self, result: &Result<(), StoreError>) {
        for job in self.chosen.drain(..) {
            // A caller that is gone wanted no answer.
            let _ = job.done.send(result.clone());
            drop(job.place);
        }
    }

    fn write(&mut self, txn: &mut WriteTxn<'_>, jobs: &[LatestJob]) -> Result<(), heed::Error> {
        let mut values: Vec<&LatestValue> = jobs.iter().flat_map(|job| job.batch.iter()).collect();
        values.sort_by(|a, b| (&a.device, &a.topic).cmp(&(&b.device, &b.topic)));
        for value in values {
            self.refused += u64::from(!self.put(txn, value)?);
        }
        Ok(())
    }

    fn remove(&mut self, txn: &mut WriteTxn<'_>, jobs: &[LatestJob]) -> Result<(), heed::Error> {
        // Counted anew when needed.
        self.topics.clear();
        jobs.iter().flat_map(|job| job.batch.iter()).try_for_each(|value| self.drop_value(txn, value))
    }

    /// Removes one value, unless a newer one is there.
    fn drop_value(&mut self, txn: &mut WriteTxn<'_>, value: &LatestValue) -> Result<(), heed::Error> {
        let (device, topic) = (value.device.as_str(), &*value.topic);
        let old = |record: Option<&[u8]>| {
            let head = record.and_then(record::decode_head);
            head.is_some_and(|head| head.device == device && head.version <= value.version)
        };
        let LatestTables { latest, newest, changed } = self.tables;
        let name = keys::name(device, topic);
        let place = read::locate(latest, txn, &name, |head| head.device == device && head.topic == topic)?;
        let place = place.map(|place| (old(place.record), place.key));
        let newest_place = read::locate(newest, txn, topic.as_bytes(), |head| head.topic == topic)?;
        let newest_place = newest_place.map(|place| (old(place.record), place.key));
        let mut is_changed = false;
        for (table, place) in [(latest, &place), (newest, &newest_place)] {
            if let Some((true, key)) = place {
                table.delete(txn, key)?;
                is_changed = true;
            }
        }
        let (Some(changed), Some((_, key)), true) = (changed, place, is_changed) else { return Ok(()) };
        if !changed::admits_removal(&self.tables, txn, &key)? {
            self.untold += 1;
            return Ok(());
        }
        let newest = newest_place.as_ref().map(|(_, key)| &key[..]);
        changed::note(changed, txn, &key, value.version, newest)
    }

    /// Writes one value, unless a newer one is there. False if the device has too many topics.
    fn put(&mut self, txn: &mut WriteTxn<'_>, value: &LatestValue) -> Result<bool, heed::Error> {
        let (device, topic) = (value.device.as_str(), &*value.topic);
        let name = keys::name(device, topic);
        let owns = |head: &record::ValueHead<'_>| head.device == device && head.topic == topic;
        let Some(place) = read::locate(self.tables.latest, txn, &name, owns)? else { return Ok(false) };
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
        self.tables.latest.put(txn, &key, &self.buffer)?;
        let newest = self.put_newest(txn, value)?;
        if let Some(changed) = self.tables.changed {
            changed::note(changed, txn, &key, value.version, newest.as_deref())?;
        }
        Ok(true)
    }

    /// Returns the key of the topic, if it has one.
    fn put_newest(
        &mut self,
        txn: &mut WriteTxn<'_>,
        value: &LatestValue,
    ) -> Result<Option<Vec<u8>>, heed::Error> {
        let topic = &*value.topic;
        let place = read::locate(self.tables.newest, txn, topic.as_bytes(), |head| head.topic == topic)?;
        let Some(place) = place else { return Ok(None) };
        let stored = place.record.and_then(record::decode_head);
        let is_newer = stored.is_some_and(|head| head.version >= value.version);
        let key = place.key;
        if !is_newer {
            record::encode_newest(value.version, value.device.as_str(), topic, &mut self.buffer);
            self.tables.newest.put(txn, &key, &self.buffer)?;
        }
        Ok(Some(key))
    }

    /// Counts a new topic of `device`, if it may have one more.
    fn admit(&mut self, txn: &WriteTxn<'_>, device: &ClientId) -> Result<bool, heed::Error> {
        if self.topics.len() > MAX_COUNTED {
            self.topics.clear();
        }
        let topics = match self.topics.get_mut(device) {
            Some(topics) => topics,
            None => {
                let stored = read::count_topics(self.tables.latest, txn, device.as_str())?;
                self.topics.entry(device.clone()).or_insert(stored)
            }
        };
        let admitted = *topics < self.topics_per_device;
        *topics += usize::from(admitted);
        Ok(admitted)
    }
}

/// No peer waits for what it writes, and new topics are the most work that one can make.
impl EnvironmentWriter for LatestWork {
    type Inbox = LatestInbox;

    const GIVES_WAY: bool = true;

    fn accept(&mut self, inbox: &mut LatestInbox) {
        self.waiting.extend(inbox.0.drain(..));
    }

    /// Versions decide: a removal leaves what is newer, whichever came first. A ledger gets them later, in records of
    /// their own.
    fn plan(&mut self, _redo: usize) -> bool {
        // A caller that gave up writes again what it still needs.
        self.waiting.retain(|job| !job.done.is_closed());
        let removal = self.waiting.iter().all(|job| job.removal);
        let mut values = 0;
        for job in mem::take(&mut self.waiting) {
            if job.removal == removal && values < MAX_COMMIT {
                values += job.batch.len();
                self.chosen.push(job);
            } else {
                self.waiting.push_back(job);
            }
        }
        self.begun = false;
        !self.chosen.is_empty()
    }

    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error> {
        // Counts of a transaction that was rolled back are void.
        if mem::replace(&mut self.begun, true) {
            self.topics.clear();
        }
        (self.refused, self.untold) = (0, 0);
        let chosen = mem::take(&mut self.chosen);
        let result = match self.adds_values(&chosen) {
            true => self.write(txn, &chosen),
            false => self.remove(txn, &chosen),
        };
        self.chosen = chosen;
        result
    }

    fn adds(&self) -> bool {
        self.adds_values(&self.chosen)
    }

    fn committed(&mut self) {
        if self.refused > 0 {
            store::counters::count(|c| c.latest_dropped_topics.add(self.refused));
        }
        if self.untold > 0 {
            count(|c| c.ledger_latest_dropped_removals.add(self.untold));
        }
        self.answer(&Ok(()));
    }

    fn failed(&mut self) {
        self.topics.clear();
        self.answer(&Err(StoreError::Unavailable("the disk does not take latest values".to_owned())));
    }

    fn more(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn close(&mut self) {
        self.chosen.extend(self.waiting.drain(..));
        self.answer(&Err(StoreError::closed()));
    }
}
