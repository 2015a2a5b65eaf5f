//! A group as others see it.

use std::sync::Arc;

use access::backends::Scope;
use gateway_core::{GroupId, Partition, Timestamp};
use groups::GroupTotals;

use super::{Definition, in_scope, live::Live};

/// A group as others see it.
#[derive(Debug, Clone)]
pub struct Info {
    /// Its number.
    pub id: GroupId,
    /// Definition, as asked for.
    pub definition: Definition,
    /// Some of its messages may have come under other filters, which no limited scope is known to cover.
    pub had_other_filters: bool,
    /// Groups in whose place it came, that still have messages or letters.
    pub predecessors: usize,
    /// Version of the definition: differs after each change.
    pub etag: String,
    /// Time of the group's creation.
    pub created: Timestamp,
    /// Current numbers of the group.
    pub status: GroupStatus,
}

impl Info {
    /// Tells whether a caller of this scope may have all messages of the group.
    pub fn is_within(&self, scope: &Scope) -> bool {
        let is_known = !self.had_other_filters && self.predecessors == 0;
        scope.is_all() || is_known && in_scope(scope, &self.definition.filter)
    }
}

/// Current numbers of a group.
#[derive(Debug, Clone, Copy, Default)]
pub struct GroupStatus {
    /// Messages that are not acknowledged, delivered or not. About, after a seek.
    pub lag_messages: u64,
    /// Their cost.
    pub lag_bytes: u64,
    /// Time at which the oldest of them was received, about.
    pub oldest: Option<Timestamp>,
    /// Delivered and not acknowledged.
    pub outstanding: usize,
    /// Members, those in their lease included.
    pub members: usize,
    /// Given up and kept.
    pub dead_letters: usize,
    /// Removed unacknowledged since the group was made.
    pub lost: u64,
    /// Events since the process began.
    pub totals: GroupTotals,
}

/// A group as others see it, of all that have its name: the oldest first, the group itself last. What waits in its predecessors
/// is the group's.
pub(super) fn info(all: &[Arc<Live>]) -> Option<Info> {
    let (newest, predecessors) = all.split_last()?;
    let mut info = Info { predecessors: predecessors.len(), ..one(newest) };
    for before in predecessors {
        let before = one(before).status;
        let status = &mut info.status;
        status.lag_messages += before.lag_messages;
        status.lag_bytes += before.lag_bytes;
        status.outstanding += before.outstanding;
        status.members += before.members;
        status.dead_letters += before.dead_letters;
        status.lost += before.lost;
        status.oldest = before.oldest.into_iter().chain(status.oldest).min();
    }
    Some(info)
}

/// Costs a look at each partition and each member, however much waits in them, and one search for a time: every call of Fetch
/// and every heartbeat wants it, and a list does for each of its groups.
fn one(live: &Live) -> Info {
    let (mut info, floor) = live.with(|inner| {
        let (lag_messages, lag_bytes) = live.lag(inner);
        let status = inner.logic.status();
        // As it was last written: the place itself is found by looking at all that waits.
        let floor = Partition::all()
            .zip(&inner.floors)
            .filter(|&(partition, _)| !inner.logic.is_idle(partition))
            .map(|(_, &floor)| floor)
            .min();
        let info = Info {
            id: live.id,
            definition: inner.kept.definition.clone(),
            had_other_filters: inner.kept.had_other_filters,
            predecessors: 0,
            etag: inner.kept.etag.to_string(),
            created: inner.kept.created(),
            status: GroupStatus {
                lag_messages,
                lag_bytes,
                oldest: None,
                outstanding: status.outstanding.messages,
                members: status.members,
                dead_letters: inner.letters.len(),
                lost: inner.lost + status.totals.lost,
                totals: status.totals,
            },
        };
        (info, floor.filter(|_| lag_messages > 0))
    });
    info.status.oldest = floor.and_then(|floor| live.log.time_at(floor));
    info
}
