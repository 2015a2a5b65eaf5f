//! The tables of sessions, and how each change is written.

use std::ops::Bound;

use gateway_core::QueueId;
use heed::RoTxn;

use super::record;
use crate::{
    counters::count,
    environment::Environment,
    format::SESSION_TABLES,
    keys::{PROBES, first_hash},
    table::Table,
    table::WriteTxn,
};
use store::{StoredSession, StoredSubscription};

/// Key: number of a session or group with its home, big-endian, so that the order of keys is that of homes and numbers.
pub(super) const NUMBER: usize = 8;

/// The tables.
#[derive(Clone, Copy)]
pub(crate) struct SessionTables {
    /// Number -> session.
    pub(super) sessions: Table,
    /// Number and hash of the filter -> subscription. Of filters with one hash the later takes the next free one.
    pub(super) subscriptions: Table,
    /// Number -> full name.
    pub(super) groups: Table,
}

impl SessionTables {
    /// Opens them, new ones in an empty environment.
    pub(crate) fn create(environment: &Environment, txn: &mut WriteTxn<'_>) -> Result<Self, heed::Error> {
        let [sessions, subscriptions, groups] = SESSION_TABLES;
        let mut table = |name| environment.table(txn, name);
        Ok(Self { sessions: table(sessions)?, subscriptions: table(subscriptions)?, groups: table(groups)? })
    }

    /// Sessions.
    pub(crate) fn count(&self, txn: &RoTxn<'_>) -> Result<u64, heed::Error> {
        self.sessions.len(txn)
    }

    /// Adds or replaces a session's record; `buffer` is for its use, here and below.
    pub(super) fn put(
        &self,
        txn: &mut WriteTxn<'_>,
        session: &StoredSession,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        record::encode_session(session, buffer);
        self.sessions.put(txn, &key(session.queue), buffer)
    }

    /// Removes a session and its subscriptions.
    pub(super) fn remove(&self, txn: &mut WriteTxn<'_>, queue: QueueId) -> Result<(), heed::Error> {
        self.sessions.delete(txn, &key(queue))?;
        let (first, last) = (subscription_key(queue, 0), subscription_key(queue, u128::MAX));
        let range = (Bound::Included(&first[..]), Bound::Included(&last[..]));
        self.subscriptions.delete_range(txn, &range)?;
        Ok(())
    }

    /// Adds or replaces a subscription.
    pub(super) fn subscribe(
        &self,
        txn: &mut WriteTxn<'_>,
        queue: QueueId,
        subscription: &StoredSubscription,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        let Some((key, _)) = self.locate(txn, queue, &subscription.filter)? else {
            // Only by design: filters of one session with one hash. They harm nobody else.
            count(|c| c.store_refused_sessions.add(1));
            gateway_core::warn_limited!(
                session = queue.0,
                "too many filters with one hash, a subscription is not stored"
            );
            return Ok(());
        };
        record::encode_subscription(subscription, buffer);
        self.subscriptions.put(txn, &key, buffer)
    }

    /// Removes a subscription.
    pub(super) fn unsubscribe(
        &self,
        txn: &mut WriteTxn<'_>,
        queue: QueueId,
        filter: &str,
    ) -> Result<(), heed::Error> {
        if let Some((key, true)) = self.locate(txn, queue, filter)? {
            self.subscriptions.delete(txn, &key)?;
        }
        Ok(())
    }

    /// Gives a group a queue.
    pub(super) fn put_group(
        &self,
        txn: &mut WriteTxn<'_>,
        queue: QueueId,
        full_name: &str,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        record::encode_group(full_name, buffer);
        self.groups.put(txn, &key(queue), buffer)
    }

    /// Removes a group's queue.
    pub(super) fn remove_group(&self, txn: &mut WriteTxn<'_>, queue: QueueId) -> Result<(), heed::Error> {
        self.groups.delete(txn, &key(queue)).map(|_| ())
    }

    /// Returns the key of a subscription (true), or the one where it would go. `None` if all its places are taken.
    ///
    /// All places are looked at, so that a removed subscription leaves no gap that hides another.
    fn locate(
        &self,
        txn: &RoTxn<'_>,
        queue: QueueId,
        filter: &str,
    ) -> Result<Option<([u8; NUMBER + 16], bool)>, heed::Error> {
        let hash = first_hash(filter.as_bytes());
        let place = |probe: u32| subscription_key(queue, hash + u128::from(probe));
        let (first, last) = (place(0), place(PROBES - 1));
        let range = (Bound::Included(first.as_slice()), Bound::Included(last.as_slice()));
        let mut taken = 0;
        let mut free = 0;
        for entry in self.subscriptions.range(txn, &range)? {
            let (at, bytes) = entry?;
            if record::filter(bytes) == Some(filter) {
                return Ok(at.try_into().ok().map(|key| (key, true)));
            }
            free += u32::from(at == place(free));
            taken += 1;
        }
        Ok((taken < PROBES).then(|| (place(free), false)))
    }
}

/// The key of a session or group.
pub(crate) fn key(queue: QueueId) -> [u8; NUMBER] {
    queue.0.to_be_bytes()
}

/// The number in a key.
pub(super) fn number(key: &[u8]) -> Option<QueueId> {
    let number = key.first_chunk::<NUMBER>()?;
    Some(QueueId(u64::from_be_bytes(*number)))
}

/// The key of a subscription.
pub(super) fn subscription_key(queue: QueueId, hash: u128) -> [u8; NUMBER + 16] {
    let mut bytes = [0; NUMBER + 16];
    bytes[..NUMBER].copy_from_slice(&key(queue));
    bytes[NUMBER..].copy_from_slice(&hash.to_be_bytes());
    bytes
}
