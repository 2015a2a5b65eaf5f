//! Members without a stream: each call names the deliveries that it is about.

use std::time::Duration;

use groups::{AckId, AckResult, Nack, Room};

use super::{
    ConsumerGroups, GroupError, Joining, LiveMember, MemberBatch, MemberEnd, MemberMemory,
    live::{GroupInner, Live, STEP},
    member::HELD,
    resuming::find_named,
};

/// Time for which a Fetch reads for more than it has at once.
const GATHER: Duration = Duration::from_millis(4);

/// The least time after which a call that waits renews its lease.
const SHORTEST_STEP: Duration = Duration::from_millis(10);

impl ConsumerGroups {
    /// Returns the next batch of a member without a stream; waits up to `wait` for one. The member's name stays its own for
    /// `lease` from each call on. Cancel safe, but messages that were taken in a cancelled call come again after their
    /// deadline.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::TooManyMembers`], [`GroupError::Memory`],
    /// [`GroupError::Fenced`], [`GroupError::Gone`].
    pub async fn fetch(
        &self,
        group: &str,
        joining: Joining<'_>,
        room: Room,
        wait: Duration,
    ) -> Result<MemberBatch, GroupError> {
        let held = MemberMemory::take(&self.marker, HELD)?;
        let lease = joining.lease;
        let mut member = LiveMember::join(&self.find_oldest(group)?, joining, true, held)?;
        // If filling takes longer than this, what is there is the answer, even for a caller that does not want to wait.
        if let Ok(filled) = tokio::time::timeout(GATHER, member.fill(room)).await {
            filled?;
        }
        // A call that waits for longer than its lease keeps its name all the while.
        let step = (lease / 2).max(SHORTEST_STEP);
        let mut left = wait;
        loop {
            let part = left.min(step);
            match tokio::time::timeout(part, something(&mut member, room)).await {
                Ok(batch) => return Ok(batch?),
                Err(_) if part == left => return Ok(MemberBatch::default()),
                Err(_) => left -= part,
            }
            member.renew()?;
        }
    }

    /// Acknowledges by name; returns once that is on disk. Cancel safe: what was asked for is done.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::Gone`].
    pub async fn acknowledge(&self, group: &str, ids: &[AckId]) -> Result<Vec<AckResult>, GroupError> {
        let live = self.find_oldest(group)?;
        find_named(&live, ids).await?;
        let now = (self.options.clock)();
        let results = in_steps(&live, ids, |inner, id| inner.logic.acknowledge_id(id, now));
        let number = live.with(|inner| Live::wait_number(inner));
        live.written(number).await?;
        Ok(results)
    }

    /// Gives deliveries so long from now on, by name.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub async fn extend(
        &self,
        group: &str,
        ids: &[AckId],
        time: Duration,
    ) -> Result<Vec<AckResult>, GroupError> {
        let live = self.find_oldest(group)?;
        find_named(&live, ids).await?;
        let now = (self.options.clock)();
        let results = in_steps(&live, ids, |inner, id| inner.logic.extend_id(id, time, now));
        live.timer.notify_one();
        Ok(results)
    }

    /// Gives deliveries back, by name.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub async fn nack(&self, group: &str, ids: &[AckId], nack: &Nack) -> Result<Vec<AckResult>, GroupError> {
        let live = self.find_oldest(group)?;
        find_named(&live, ids).await?;
        let now = (self.options.clock)();
        let results = in_steps(&live, ids, |inner, id| inner.logic.nack_id(id, nack, now));
        live.timer.notify_one();
        Ok(results)
    }
}

/// The next batch that has something for a member without a stream: nobody can be told what is revoked of one.
async fn something(member: &mut LiveMember, room: Room) -> Result<MemberBatch, MemberEnd> {
    loop {
        let batch = member.next(room).await?;
        if !batch.deliveries.is_empty() || !batch.gaps.is_empty() {
            return Ok(batch);
        }
    }
}

/// Does something with each delivery, of which there may be many: others come to the group's lock in between.
fn in_steps(
    live: &Live,
    ids: &[AckId],
    mut act: impl FnMut(&mut GroupInner, &AckId) -> AckResult,
) -> Vec<AckResult> {
    let mut results = Vec::with_capacity(ids.len());
    for step in ids.chunks(STEP) {
        live.with(|inner| results.extend(step.iter().map(|id| act(inner, id))));
    }
    results
}
