//! Records of the Publisher that are not written yet: the last change of each.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use gateway_core::Commit;
use heed::RwTxn;

use super::tables::PublisherTables;
use crate::{
    counters::count,
    pending::KeyChange,
    waiting::{Changes, Tally},
};
use store::{PublisherChange, PublisherTable};

/// Changes that belong together, and who waits.
pub(super) struct PublisherOp {
    pub(super) changes: Vec<PublisherChange>,
    pub(super) commit: Option<Arc<Commit>>,
}

/// Bytes counted for a change besides key and value.
const OVERHEAD: usize = 100;

/// Changes by table and key.
#[derive(Default)]
pub(super) struct PublisherChanges(BTreeMap<(PublisherTable, Bytes), KeyChange<Bytes>>);

impl Changes for PublisherChanges {
    type Op = PublisherOp;
    type Tables = PublisherTables;

    fn push(&mut self, op: PublisherOp, tally: &mut Tally) {
        let PublisherOp { changes, commit } = op;
        // Removals make room, and are never more than what they remove.
        let is_refused = tally.is_full() && changes.iter().any(|change| change.value.is_some());
        if is_refused {
            count(|c| c.store_refused_publisher.add(1));
        }
        for PublisherChange { table, key, value } in changes {
            if is_refused && value.is_some() {
                continue;
            }
            let place = (table, key);
            let known = self.0.get(&place).map_or(0, |change| bytes(&place.1, change));
            let length = place.1.len();
            let change = self.0.entry(place).or_default();
            match (value, commit.is_some()) {
                (Some(value), true) => change.offer(value),
                (value, _) => change.keep(value),
            }
            let held: usize = change.values().map(Bytes::len).sum();
            tally.bytes = tally.bytes + OVERHEAD + length + held - known;
        }
        match commit {
            Some(commit) if is_refused => commit.refuse(),
            commit => tally.commits.extend(commit),
        }
    }

    fn merge(&mut self, later: Self) {
        for (place, later) in later.0 {
            self.0.entry(place).or_default().merge(later);
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|((_, key), change)| bytes(key, change)).sum()
    }

    fn has_offer(&self) -> bool {
        self.0.values().any(KeyChange::is_offer)
    }

    fn fail(&mut self) {
        self.0.retain(|_, change| change.fail());
    }

    fn apply(
        &self,
        tables: &mut PublisherTables,
        txn: &mut RwTxn<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        for ((table, key), change) in &self.0 {
            match change.target() {
                Some(Some(value)) => tables.put(txn, *table, key, value, buffer)?,
                Some(None) => tables.remove(txn, *table, key)?,
                None => {}
            }
        }
        Ok(())
    }
}

fn bytes(key: &[u8], change: &KeyChange<Bytes>) -> usize {
    OVERHEAD + key.len() + change.values().map(Bytes::len).sum::<usize>()
}
