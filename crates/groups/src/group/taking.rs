//! From the group to a member.

use gateway_core::{LogRecord, Partition, Timestamp};
use thiserror::Error;

use super::{
    super::{
        ack_id::AckId,
        config::millis,
        member::{Gap, MemberKey},
        outstanding::OutstandingEntry,
        ranges::IdRange,
    },
    Group,
};

/// The member is no longer in the group: its lease has ended, or another stream has taken its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the member is not in the group any more")]
pub struct MemberGone;

/// Room for the messages of one call.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Messages.
    pub messages: usize,
    /// Bytes, as `SharedMessage::cost`; the first message is taken whatever it costs.
    pub bytes: usize,
}

/// Deliveries and news for a member.
#[derive(Debug, Default)]
pub struct TakenDeliveries {
    /// Deliveries that are void now.
    pub revoked: Vec<IdRange>,
    /// Messages it will not get.
    pub gaps: Vec<Gap>,
    /// Messages.
    pub deliveries: Vec<Delivery>,
    /// True if the member has asked for no more, and has settled everything.
    pub is_drained: bool,
}

impl TakenDeliveries {
    /// Returns whether there is nothing to tell the member.
    pub fn is_empty(&self) -> bool {
        self.revoked.is_empty() && self.gaps.is_empty() && self.deliveries.is_empty()
    }
}

/// A message for a member.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// Its number with the member: 1, 2, 3...
    pub id: u64,
    /// 1 with the first delivery.
    pub attempt: u32,
    /// Taken back then, unless it is acknowledged.
    pub deadline: Timestamp,
    /// Partition of the message.
    pub partition: Partition,
    /// The message and its place.
    pub record: LogRecord,
    /// The name by which the delivery is acknowledged without the member's stream.
    pub ack_id: AckId,
}

/// Messages of a partition that are taken before it is another's turn.
const ROW: usize = 32;

impl Group {
    /// Takes what is there for the member, within its credit and `room`. What it takes counts as delivered.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn take(
        &mut self,
        key: MemberKey,
        now: Timestamp,
        room: Room,
    ) -> Result<TakenDeliveries, MemberGone> {
        self.find(key)?;
        let (identity, deadline) = (self.identity, now.plus_millis(millis(self.config.ack_deadline)));
        let Some(member) = self.members[key.index as usize].as_mut() else { return Err(MemberGone) };
        let mut taken = TakenDeliveries {
            revoked: std::mem::take(&mut member.revoked).into_iter().collect(),
            gaps: std::mem::take(&mut member.gaps).into(),
            ..TakenDeliveries::default()
        };
        let (mut bytes, mut row) = (0, 0);
        while taken.deliveries.len() < room.messages && !self.config.paused {
            let Some(&index) = member.ready.front() else { break };
            let state = &mut self.partitions[usize::from(index)];
            let first =
                (state.owner == Some(key.index) && state.foreign == 0).then(|| state.ready.front()).flatten();
            let Some(first) = first else {
                state.listed = false;
                member.ready.pop_front();
                row = 0;
                continue;
            };
            let cost = first.cost;
            bytes += cost as usize;
            if !member.may_take(cost) || (bytes > room.bytes && !taken.deliveries.is_empty()) {
                break;
            }
            let Some(one) = state.ready.pop_front() else { break };
            member.ahead.sub(cost);
            member.outstanding.add(cost);
            let offset = one.record.offset;
            let attempt = one.attempts.saturating_add(1);
            let id = member.deliveries.push(index, offset, deadline);
            state.out.insert(OutstandingEntry::new(offset, one.key, key.index, id, attempt, cost));
            self.totals.delivered += 1;
            self.totals.redelivered += u64::from(attempt > 1);
            let ack_id = AckId {
                group: identity.group,
                generation: identity.generation,
                partition: Partition(index),
                offset,
                key: one.key,
                member: key.number,
                delivery: id,
            };
            taken.deliveries.push(Delivery {
                id,
                attempt,
                deadline,
                partition: Partition(index),
                record: one.record,
                ack_id,
            });
            row += 1;
            if row == ROW {
                member.ready.rotate_left(1);
                row = 0;
            }
        }
        taken.is_drained = member.draining && member.outstanding.messages == 0;
        Ok(taken)
    }
}
