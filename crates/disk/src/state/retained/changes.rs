//! Retained messages that are not written yet: the last change of each topic.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::{Commit, Feeder, SharedMessage};
use heed::RwTxn;

use super::tables::RetainedTables;
use crate::{
    counters::count,
    pending::KeyChange,
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

/// Changes by topic.
#[derive(Default)]
pub(crate) struct RetainedChanges(BTreeMap<Arc<str>, KeyChange<Arc<SharedMessage>>>);

impl Changes for RetainedChanges {
    type Op = RetainedOp;
    type Tables = RetainedTables;

    fn push(&mut self, op: RetainedOp, tally: &mut Tally) {
        // A removal of a topic that waits already makes room, and another message of such a topic takes hardly any.
        let has_room = match (&op.message, self.0.contains_key(&op.topic)) {
            (Some(message), false) => tally.admits(message),
            (None, true) => true,
            _ => !tally.is_full(),
        };
        if !has_room {
            count(|c| c.store_refused_retained.add(1));
            if let Some(commit) = op.commit {
                commit.refuse();
            }
            return;
        }
        let topic = Arc::clone(&op.topic);
        let known = self.0.get(&topic).map_or(0, |change| bytes(&topic, change));
        let change = self.0.entry(op.topic).or_default();
        let feeder = op.message.as_deref().map(Feeder::from);
        match (op.message, op.commit.is_some()) {
            (Some(message), true) => change.offer(message),
            (message, _) => change.keep(message),
        }
        let now = bytes(&topic, change);
        match feeder {
            Some(feeder) => tally.resize(feeder, known, now),
            None => tally.bytes = tally.bytes + now - known,
        }
        tally.commits.extend(op.commit);
    }

    fn merge(&mut self, later: Self) {
        for (topic, later) in later.0 {
            self.0.entry(topic).or_default().merge(later);
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|(topic, change)| bytes(topic, change)).sum()
    }

    fn has_offer(&self) -> bool {
        self.0.values().any(KeyChange::is_offer)
    }

    fn fail(&mut self) {
        self.0.retain(|_, change| change.fail());
    }

    fn apply(
        &self,
        tables: &mut RetainedTables,
        txn: &mut RwTxn<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        for (topic, change) in &self.0 {
            match change.target() {
                Some(Some(message)) => tables.set(txn, message, buffer)?,
                Some(None) => tables.clear(txn, topic)?,
                None => {}
            }
        }
        Ok(())
    }
}

fn bytes(topic: &str, change: &KeyChange<Arc<SharedMessage>>) -> usize {
    OVERHEAD + topic.len() + change.values().map(|message| message.cost()).sum::<usize>()
}
