//! Reading everything at the start: sessions and subscriptions lie in one order and are joined on the way.

use std::sync::Arc;

use gateway_core::QueueId;
use hashbrown::HashMap;
use heed::RoTxn;

use super::{
    record,
    tables::{SessionTables, number},
};
use crate::counters::count;
use store::Restore;

/// Records found that nobody can use; they are removed after reading.
#[derive(Default)]
pub(super) struct UnusableRecords {
    /// Damaged sessions, older sessions without a will of a client id that has a newer one, and numbers that only have
    /// subscriptions. In order.
    pub(super) sessions: Vec<QueueId>,
    /// Keys of damaged subscriptions of other sessions.
    pub(super) subscriptions: Vec<Vec<u8>>,
    /// Keys of damaged groups.
    pub(super) groups: Vec<Vec<u8>>,
}

impl UnusableRecords {
    /// Returns whether nothing is to be removed.
    pub(super) fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.subscriptions.is_empty() && self.groups.is_empty()
    }

    fn session(&mut self, queue: QueueId) {
        if self.sessions.last() != Some(&queue) {
            self.sessions.push(queue);
        }
    }
}

/// Gives everything to `into`.
pub(super) fn restore(
    tables: &SessionTables,
    txn: &RoTxn<'_>,
    into: &mut dyn Restore,
) -> Result<UnusableRecords, heed::Error> {
    let mut unusable = UnusableRecords::default();
    let older = older(tables, txn)?;
    let mut older = older.iter().copied().peekable();
    let mut listener = Arc::new(String::new());
    let mut subscriptions = tables.subscriptions.iter(txn)?;
    let mut next = subscriptions.next().transpose()?;
    for entry in tables.sessions.iter(txn)? {
        let (key, bytes) = entry?;
        while let Some((place, _)) = next
            && place < key
        {
            unusable.session(number(place).unwrap_or(QueueId::NONE));
            next = subscriptions.next().transpose()?;
        }
        let Some(queue) = number(key) else { continue };
        let session = record::decode_session(queue, bytes, &mut listener);
        if session.is_none() {
            damaged_session(queue, bytes);
        }
        let replaced = older.next_if_eq(&queue).is_some();
        let session = session.filter(|session| !replaced || session.will.is_some());
        let mut own = Vec::new();
        let mut bad = Vec::new();
        while let Some((place, bytes)) = next
            && place.starts_with(key)
        {
            match record::decode_subscription(bytes) {
                Some(subscription) => own.push(subscription),
                None => bad.push(place.to_vec()),
            }
            next = subscriptions.next().transpose()?;
        }
        let Some(session) = session else {
            unusable.session(queue);
            continue;
        };
        if !bad.is_empty() {
            count(|c| c.store_damaged_records.add(bad.len() as u64));
            tracing::error!(
                session = queue.0,
                client_id = %session.client_id,
                subscriptions = bad.len(),
                "subscriptions of a stored session are damaged and were removed"
            );
            unusable.subscriptions.append(&mut bad);
        }
        if replaced {
            own.clear();
        }
        into.session(session, own);
    }
    while let Some((place, _)) = next {
        unusable.session(number(place).unwrap_or(QueueId::NONE));
        next = subscriptions.next().transpose()?;
    }
    for entry in tables.groups.iter(txn)? {
        let (key, bytes) = entry?;
        match (number(key), record::decode_group(bytes)) {
            (Some(queue), Some(full_name)) => into.group(queue, full_name),
            (queue, _) => {
                count(|c| c.store_damaged_records.add(1));
                tracing::error!(
                    group = queue.map(|queue| queue.0),
                    "stored shared group is damaged and was removed"
                );
                unusable.groups.push(key.to_vec());
            }
        }
    }
    Ok(unusable)
}

/// Numbers of sessions whose client id also has a later one, in order. A process that ended between writing the new
/// session and removing the old leaves such.
fn older(tables: &SessionTables, txn: &RoTxn<'_>) -> Result<Vec<QueueId>, heed::Error> {
    let sessions = usize::try_from(tables.sessions.len(txn)?).unwrap_or(0);
    let mut newest: HashMap<&str, QueueId, ahash::RandomState> =
        HashMap::with_capacity_and_hasher(sessions, ahash::RandomState::new());
    let mut older = Vec::new();
    for entry in tables.sessions.iter(txn)? {
        let (key, bytes) = entry?;
        if let (Some(queue), Some(client_id)) = (number(key), record::client_id(bytes)) {
            older.extend(newest.insert(client_id, queue));
        }
    }
    older.sort_unstable();
    Ok(older)
}

fn damaged_session(queue: QueueId, bytes: &[u8]) {
    count(|c| c.store_damaged_records.add(1));
    tracing::error!(
        session = queue.0,
        client_id = record::likely_client_id(bytes),
        "stored session is damaged and was removed"
    );
}
