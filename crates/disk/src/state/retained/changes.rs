//! Retained messages that are not written yet: the last change of each topic, and those that are parts of units.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::{Commit, Feeder, SharedMessage};
use hashbrown::HashMap;

use super::tables::RetainedTables;
use crate::{
    counters::count,
    pending::KeyChange,
    table::WriteTxn,
    waiting::{Changes, Tally},
};

/// A message, or `None` to remove that of a topic, and who waits.
pub(crate) struct RetainedOp {
    pub(crate) topic: Arc<str>,
    pub(crate) message: Option<Arc<SharedMessage>>,
    pub(crate) commit: Option<Arc<Commit>>,
}

/// Bytes counted for a removal besides its topic.
const OVERHEAD: usize = 100;

/// Changes by topic, and the parts of units. Numbers tell which change of a topic came last: one that came before another that is
/// written already, since its unit was open for longer, is not written any more.
#[derive(Default)]
pub(crate) struct RetainedChanges {
    topics: BTreeMap<Arc<str>, TopicChange>,
    /// Parts of units that nobody has closed, by the address of the unit.
    open: HashMap<usize, UnitChange, ahash::RandomState>,
    /// Parts of the units that this transaction writes, in the order of their numbers.
    closing: Vec<UnitChange>,
}

/// The change of a topic, with the numbers of its values.
#[derive(Default)]
struct TopicChange {
    change: KeyChange<Arc<SharedMessage>>,
    kept: u64,
    offered: u64,
}

/// The part of a unit: written with it or not at all.
struct UnitChange {
    topic: Arc<str>,
    message: Option<Arc<SharedMessage>>,
    unit: Arc<Commit>,
    number: u64,
    /// A later change of the topic is written.
    superseded: bool,
}

impl RetainedChanges {
    /// The units are in the next transaction.
    pub(crate) fn close_units(&mut self, units: impl Iterator<Item = usize>) {
        if self.open.is_empty() {
            return;
        }
        self.closing.extend(units.filter_map(|unit| self.open.remove(&unit)));
        self.closing.sort_unstable_by_key(|part| part.number);
    }

    fn put_unit(&mut self, op: RetainedOp, unit: Arc<Commit>, tally: &mut Tally) {
        let RetainedOp { topic, message, .. } = op;
        let part = UnitChange { topic, message, unit, number: tally.number(), superseded: false };
        match &part.message {
            Some(message) => tally.resize(Feeder::from(&**message), 0, part.bytes()),
            None => tally.bytes += part.bytes(),
        }
        self.open.insert(Arc::as_ptr(&part.unit).addr(), part);
    }

    fn put(&mut self, op: RetainedOp, tally: &mut Tally) {
        let topic = Arc::clone(&op.topic);
        let known = self.topics.get(&topic).map_or(0, |topic_change| bytes(&topic, &topic_change.change));
        let place = self.topics.entry(op.topic).or_default();
        let feeder = op.message.as_deref().map(Feeder::from);
        let number = tally.number();
        match (op.message, op.commit.is_some()) {
            (Some(message), true) => {
                place.change.offer(message);
                place.offered = number;
            }
            (message, _) => {
                place.change.keep(message);
                place.kept = number;
            }
        }
        let now = bytes(&topic, &place.change);
        match feeder {
            Some(feeder) => tally.resize(feeder, known, now),
            None => tally.bytes = tally.bytes + now - known,
        }
        tally.commits.extend(op.commit);
    }
}

impl TopicChange {
    /// The number of the value that is to be written.
    fn number(&self) -> u64 {
        if self.change.is_offer() { self.offered } else { self.kept }
    }

    fn merge(&mut self, later: Self) {
        self.change.merge(later.change);
        self.kept = self.kept.max(later.kept);
        self.offered = self.offered.max(later.offered);
    }
}

impl UnitChange {
    fn bytes(&self) -> usize {
        OVERHEAD + self.topic.len() + self.message.as_ref().map_or(0, |message| message.cost())
    }
}

impl Changes for RetainedChanges {
    type Op = RetainedOp;
    type Tables = RetainedTables;

    fn push(&mut self, op: RetainedOp, tally: &mut Tally) {
        let unit = op.commit.clone().filter(|commit| commit.is_unit());
        let is_known = unit.is_none() && self.topics.contains_key(&op.topic);
        // A removal of a topic that waits already makes room, and another message of such a topic takes hardly any.
        let has_room = match (&op.message, is_known) {
            (Some(message), false) => tally.admits(message),
            (None, true) => true,
            _ => !tally.is_full(),
        };
        match (has_room, unit) {
            (true, Some(unit)) => self.put_unit(op, unit, tally),
            (true, None) => self.put(op, tally),
            (false, _) => {
                count(|c| c.store_refused_retained.add(1));
                if let Some(commit) = op.commit {
                    commit.refuse();
                }
            }
        }
    }

    fn merge(&mut self, later: Self) {
        for (topic, later) in later.topics {
            self.topics.entry(topic).or_default().merge(later);
        }
        self.open.extend(later.open);
    }

    fn is_empty(&self) -> bool {
        self.topics.is_empty() && self.closing.is_empty()
    }

    fn bytes(&self) -> usize {
        let topics = self.topics.iter().map(|(topic, waiting)| bytes(topic, &waiting.change));
        let units = self.open.values().chain(&self.closing).map(UnitChange::bytes);
        topics.chain(units).sum()
    }

    fn has_offer(&self) -> bool {
        self.topics.values().any(|waiting| waiting.change.is_offer())
            || self.closing.iter().any(|part| part.message.is_some())
    }

    fn fail(&mut self) {
        self.topics.retain(|_, waiting| waiting.change.fail());
        // A removal is carried out some time, unless something came after it.
        let removals = self.closing.iter().filter(|part| part.message.is_none() && !part.superseded);
        for part in removals {
            let place = self.topics.entry(Arc::clone(&part.topic)).or_default();
            if place.number() < part.number {
                place.change.keep(None);
                place.kept = part.number;
            }
        }
    }

    fn refused(&mut self, all: bool) -> Vec<Arc<Commit>> {
        let open = all.then(|| std::mem::take(&mut self.open)).into_iter().flat_map(HashMap::into_values);
        self.closing.drain(..).chain(open).map(|part| part.unit).collect()
    }

    fn apply(
        &self,
        tables: &mut RetainedTables,
        txn: &mut WriteTxn<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        for (topic, waiting) in &self.topics {
            match waiting.change.target() {
                Some(Some(message)) => tables.set(txn, message, buffer)?,
                Some(None) => tables.clear(txn, topic)?,
                None => {}
            }
        }
        for part in &self.closing {
            let is_last = self.topics.get(&part.topic).is_none_or(|waiting| waiting.number() < part.number);
            match &part.message {
                _ if part.superseded || !is_last => {}
                Some(message) => tables.set(txn, message, buffer)?,
                None => tables.clear(txn, &part.topic)?,
            }
        }
        Ok(())
    }

    fn clear(&mut self, done: &mut Vec<Arc<Commit>>) {
        if !self.open.is_empty() {
            let mut written: HashMap<&str, u64, ahash::RandomState> = HashMap::default();
            written.extend(self.closing.iter().map(|part| (&*part.topic, part.number)));
            for part in self.open.values_mut() {
                let topic = self.topics.get(&part.topic).map(TopicChange::number);
                let last = topic.max(written.get(&*part.topic).copied());
                part.superseded |= last.is_some_and(|last| last > part.number);
            }
        }
        self.topics.clear();
        done.extend(self.closing.drain(..).map(|part| part.unit));
    }
}

fn bytes(topic: &str, change: &KeyChange<Arc<SharedMessage>>) -> usize {
    OVERHEAD + topic.len() + change.values().map(|message| message.cost()).sum::<usize>()
}
