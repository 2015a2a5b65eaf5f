//! Messages that were given up are listed, put back, and removed.

use std::sync::Arc;

use access::backends::Scope;
use bytes::Bytes;
use gateway_core::{Commit, GroupId, Partition};
use store::{PartitionedLog, StoreError};

use super::{ConsumerGroups, DeadLetter, GroupError, dead_letters, live::Live};

impl ConsumerGroups {
    /// Messages that were given up: at most `limit` behind `after`. A caller of limited scope may have those that
    /// [match](DeadLetter::matches).
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::Damaged`], [`GroupError::Store`].
    pub async fn dead_letters(
        &self,
        group: &str,
        scope: &Scope,
        after: Option<u64>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, GroupError> {
        let live = self.find_within(group, scope)?;
        let prefix = Bytes::from_static(&[dead_letters::LETTER]);
        let page = self.state.read(live.id, prefix, after.map(dead_letters::key), limit).await?;
        let wants = live.wants();
        page.iter().map(|record| dead_letters::decode(record, &*wants)).collect()
    }

    /// The number of the newest message that was given up and is kept.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn newest_dead_letter(&self, group: &str) -> Result<Option<u64>, GroupError> {
        Ok(self.find_oldest(group)?.with(|inner| inner.letters.newest()))
    }

    /// Appends letters again, for this group only, and removes them; `ids` that are not there, or that another call puts back
    /// just now, are passed over, and so is what the group's filter does not match. None is all. Returns how many. Cancelled, the letter that is under way is put back and removed all the same, and those
    /// behind it stay.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::Damaged`], [`GroupError::Store`]: those before the
    /// one that failed are requeued.
    pub async fn requeue(&self, group: &str, ids: &[u64], scope: &Scope) -> Result<u64, GroupError> {
        let live = self.find_within(group, scope)?;
        let ids = if ids.is_empty() { live.with(|inner| inner.letters.ids()) } else { ids.to_vec() };
        let mut count = 0;
        for id in ids {
            // In a task of its own: a call that is given up between the two writes would leave both.
            let one = tokio::spawn(put_back(Arc::clone(&self.log), Arc::clone(&live), id));
            count += u64::from(one.await.map_err(|_| GroupError::Gone)??);
        }
        Ok(count)
    }

    /// Removes letters; `ids` that are not there, and for a caller of limited scope those that the group's filter does not match,
    /// are passed over. None is all. Returns how many.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::Gone`], and for a caller of limited scope [`GroupError::Damaged`] and
    /// [`GroupError::Store`].
    pub async fn purge(&self, group: &str, ids: &[u64], scope: &Scope) -> Result<u64, GroupError> {
        let live = self.find_within(group, scope)?;
        let mut ids = if ids.is_empty() { live.with(|inner| inner.letters.ids()) } else { ids.to_vec() };
        if !scope.is_all() {
            let mut seen = Vec::new();
            for id in ids {
                if read(&live, id).await?.is_some_and(|letter| letter.matches) {
                    seen.push(id);
                }
            }
            ids = seen;
        }
        let (count, number) = live.with(|inner| {
            let removed: Vec<_> = ids.into_iter().filter_map(|id| inner.letters.remove(id)).collect();
            let count = removed.len() as u64;
            inner.changes.extend(removed);
            (count, Live::wait_number(inner))
        });
        live.written(number).await?;
        Ok(count)
    }
}

/// A letter that is being put back, by one call at a time.
struct LetterClaim<'a> {
    live: &'a Live,
    id: u64,
}

impl Drop for LetterClaim<'_> {
    fn drop(&mut self) {
        self.live.with(|inner| inner.letters.unclaim(self.id));
    }
}

async fn read(live: &Live, id: u64) -> Result<Option<DeadLetter>, GroupError> {
    let records = live.state.read(live.id, dead_letters::key(id), None, 1).await?;
    let wants = live.wants();
    records.first().map(|record| dead_letters::decode(record, &*wants)).transpose()
}

/// Appends a letter again, and removes it once that is on disk; false if it is not there, another call does it, or the group's
/// filter does not match it: who may have what the filter matches could not have it.
async fn put_back(log: Arc<dyn PartitionedLog>, live: Arc<Live>, id: u64) -> Result<bool, GroupError> {
    if !live.with(|inner| inner.letters.claim(id)) {
        return Ok(false);
    }
    let _claim = LetterClaim { live: &live, id };
    let Some(letter) = read(&live, id).await?.filter(|letter| letter.matches) else { return Ok(false) };
    let device = letter.message.client_id.as_ref().map(gateway_core::ClientId::as_str);
    let partition = Partition::of(device, &letter.message.topic);
    let commit = Commit::new();
    let part = commit.part();
    let groups: Arc<[GroupId]> = Arc::from([live.id]);
    if log.append(partition, &groups, &letter.message, Some(part)).is_err() {
        return Err(GroupError::Store(StoreError::Unavailable("the log takes nothing".to_owned())));
    }
    commit.done();
    let refused = || GroupError::Store(StoreError::Unavailable("the log refused the message".to_owned()));
    commit.wait().await.map_err(|_| refused())?;
    let (is_removed, number) = live.with(|inner| {
        let removed = inner.letters.remove(id);
        let is_removed = removed.is_some();
        inner.changes.extend(removed);
        (is_removed, Live::wait_number(inner))
    });
    live.written(number).await?;
    Ok(is_removed)
}
