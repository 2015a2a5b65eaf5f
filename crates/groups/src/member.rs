//! A reader of a group: a stream, or a caller of Fetch.

use std::{collections::VecDeque, sync::Arc};

use gateway_core::{Partition, Timestamp};

use super::{
    config::{Credit, MAX_AHEAD, MAX_GAPS},
    deliveries::Deliveries,
    ranges::Ranges,
};

/// Names one stay of a member: a stream of it, or its fetches as long as they follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemberKey {
    pub(crate) index: u32,
    /// Never used twice, also by later processes.
    pub number: u64,
}

/// Number of messages, and their cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Messages.
    pub messages: usize,
    /// Bytes, as `SharedMessage::cost`.
    pub bytes: usize,
}

impl Amount {
    pub(crate) fn add(&mut self, cost: u32) {
        self.messages += 1;
        self.bytes += cost as usize;
    }

    pub(crate) fn sub(&mut self, cost: u32) {
        debug_assert!(self.messages > 0 && self.bytes >= cost as usize, "{self:?} less {cost}");
        self.messages = self.messages.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(cost as usize);
    }
}

/// A message that a member says it was delivered before, and works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Claim {
    pub(crate) partition: u8,
    pub(crate) offset: u64,
    /// The number of the delivery from now on.
    pub(crate) id: u64,
}

/// Messages that a member will not get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// Partition of the messages.
    pub partition: Partition,
    /// The first place.
    pub from: u64,
    /// One more than the last.
    pub until: u64,
    /// Why.
    pub reason: GapReason,
    /// Number of the group's messages among them, if known.
    pub count: Option<u64>,
}

impl Gap {
    /// This and another, which is told with it.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            from: self.from.min(other.from),
            until: self.until.max(other.until),
            count: self.count.zip(other.count).map(|(one, other)| one + other),
            ..self
        }
    }
}

/// Why no more messages can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapReason {
    /// Retention has removed them.
    Removed,
    /// The messages were damaged on disk.
    Damaged,
}

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: Arc<str>,
    pub(crate) number: u64,
    /// In milliseconds; 0 if everything is given back when the stream ends.
    pub(crate) lease: u64,
    /// Time at which the member goes; `None` while its stream is there.
    pub(crate) lease_until: Option<Timestamp>,
    /// Of an earlier process: it may acknowledge what it was delivered there.
    pub(crate) is_restored: bool,
    /// True for a member of an earlier process that has not come back since.
    pub(crate) is_missing: bool,
    /// Messages that the member says it works on, as far as they are not known yet.
    pub(crate) claims: VecDeque<Claim>,
    /// Numbers of what it named and does not have.
    pub(crate) refused: Ranges,
    /// Has no stream, now or ever: it lives from lease to lease.
    pub(crate) fetches: bool,
    pub(crate) credit: Credit,
    pub(crate) outstanding: Amount,
    /// Read for it and not delivered yet.
    pub(crate) ahead: Amount,
    pub(crate) deliveries: Deliveries,
    /// Partitions with messages for it.
    pub(crate) ready: VecDeque<u8>,
    /// Partitions to be read for it.
    pub(crate) hungry: VecDeque<u8>,
    /// Deliveries that it must be told are void.
    pub(crate) revoked: Ranges,
    pub(crate) gaps: VecDeque<Gap>,
    pub(crate) draining: bool,
    /// Is to be woken already.
    pub(crate) woken: bool,
    /// Number of partitions that the member owns.
    pub(crate) partitions: usize,
}

impl Member {
    /// One that has nothing.
    pub(crate) fn new(name: Arc<str>, number: u64, lease: u64) -> Self {
        Self {
            name,
            number,
            lease,
            lease_until: None,
            is_restored: false,
            is_missing: false,
            claims: VecDeque::new(),
            refused: Ranges::default(),
            fetches: false,
            credit: Credit::default(),
            outstanding: Amount::default(),
            ahead: Amount::default(),
            deliveries: Deliveries::default(),
            ready: VecDeque::new(),
            hungry: VecDeque::new(),
            revoked: Ranges::default(),
            gaps: VecDeque::new(),
            draining: false,
            woken: false,
            partitions: 0,
        }
    }

    /// Returns whether the member reads now.
    pub(crate) fn is_here(&self) -> bool {
        self.fetches || self.lease_until.is_none()
    }

    /// Returns whether a message of this cost may be read for the member. Messages that it does not take are not kept for it
    /// beyond a bound, whatever credit it gave.
    pub(crate) fn has_room(&self, cost: u32) -> bool {
        let messages = self.outstanding.messages + self.ahead.messages;
        let bytes = self.outstanding.bytes + self.ahead.bytes + cost as usize;
        messages < self.credit.messages
            && (messages == 0 || bytes <= self.credit.bytes)
            && (self.ahead.messages == 0 || self.ahead.bytes + cost as usize <= MAX_AHEAD)
    }

    /// Returns whether a message of this cost may be delivered to the member.
    pub(crate) fn may_take(&self, cost: u32) -> bool {
        let Amount { messages, bytes } = self.outstanding;
        messages < self.credit.messages && (messages == 0 || bytes + cost as usize <= self.credit.bytes)
    }

    pub(crate) fn add_gap(&mut self, gap: Gap) {
        let full = self.gaps.len() >= MAX_GAPS;
        let mut same = self.gaps.iter_mut().rev().filter(|other| other.partition == gap.partition);
        if let Some(last) = same.next()
            && (full || (last.until == gap.from && last.reason == gap.reason))
        {
            *last = last.with(gap);
        } else {
            // One of each partition fits beside as many others.
            self.gaps.push_back(gap);
        }
    }
}
