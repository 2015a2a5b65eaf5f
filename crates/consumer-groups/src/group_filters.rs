//! Access to a group's messages: a caller's scope must cover the group's filter, and each of its former filters as long as
//! a message that came under that filter is not settled.
//!
//! A replaced filter is remembered with the place in the log at which its messages end. That place is known once all
//! messages submitted before the change have ended; until then the filter counts. From then on it counts while the group
//! has anything unsettled before that place, so also after a seek that goes back there. The filter is forgotten when the
//! log has nothing from before that place any more. Dead letters are another matter: they are copies, and each is held
//! against a scope by itself.

use access::backends::Scope;
use broker::is_event_message;
use gateway_core::{ClientId, Partition, SharedMessage};
use serde::{Deserialize, Serialize};
use store::{PartitionBounds, PartitionedLog};

use super::GroupMessageFilter;

/// Filters that are remembered one by one.
const MOST: usize = 16;
/// The place of a filter whose end is not known yet.
const OPEN: u64 = u64::MAX;

/// Tells whether all messages of a group with this filter lie within a scope: each topic filter in one of the scope's, and
/// devices named where the scope limits them.
pub fn in_scope(scope: &Scope, filter: &GroupMessageFilter) -> bool {
    if scope.is_all() {
        return true;
    }
    if scope.topics().is_some() && filter.events.iter().any(|name| tells_filters(name)) {
        return false;
    }
    let devices = filter.devices.iter().cloned();
    let devices: Vec<String> =
        devices.chain(filter.device_prefixes.iter().map(|prefix| format!("{prefix}*"))).collect();
    let devices = (!devices.is_empty()).then_some(devices);
    Scope::new(Some(filter.topics.clone()), devices).is_ok_and(|wanted| scope.covers(&wanted))
}

/// Tells whether a message, or an event, of a group lies within a scope: if the filter is [`in_scope`], all its messages
/// do.
pub fn message_in_scope(scope: &Scope, message: &SharedMessage) -> bool {
    if scope.is_all() {
        return true;
    }
    let device = message.client_id.as_ref().map(ClientId::as_str);
    if is_event_message(message) {
        // The topic that it has is the gateway's own.
        let name = message.topic.rsplit('/').next().unwrap_or_default();
        let tells = scope.topics().is_some() && tells_filters(name);
        return !tells && device.is_some_and(|device| scope.has_device(device));
    }
    scope.has_message(device, &message.topic)
}

/// Tells whether events of this kind name filters of devices, which may be any.
fn tells_filters(name: &str) -> bool {
    matches!(name, "subscribed" | "unsubscribed")
}

/// The filters that have let in what a group has.
#[derive(Debug, Default)]
pub struct GroupFilters {
    filters: Vec<GroupMessageFilter>,
    /// And others.
    more: bool,
}

impl GroupFilters {
    pub(super) fn new(filter: &GroupMessageFilter, former: &FormerFilters) -> Self {
        let counts = || former.0.iter().filter(|former| former.counts);
        let filters = counts().filter_map(|former| former.filter.clone());
        Self {
            filters: std::iter::once(filter.clone()).chain(filters).collect(),
            more: counts().any(|former| former.filter.is_none()),
        }
    }

    /// Tells whether a caller of this scope may have all messages of the group.
    pub fn is_within(&self, scope: &Scope) -> bool {
        scope.is_all() || !self.more && self.filters.iter().all(|filter| in_scope(scope, filter))
    }
}

/// A filter that a group no longer has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FormerFilter {
    /// `None` for several, of which no limited scope is known to cover all.
    filter: Option<GroupMessageFilter>,
    /// Nothing in the log from here on was let in by it.
    until: u64,
    /// Something before that place is not settled. Found again at each start.
    #[serde(skip)]
    counts: bool,
}

/// Filters that a group no longer has, that which was replaced first at the front.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct FormerFilters(Vec<FormerFilter>);

impl FormerFilters {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The group had the filter `old`, and has `new`.
    pub(super) fn add(&mut self, old: &GroupMessageFilter, new: &GroupMessageFilter) {
        // A filter that is changed to and fro is remembered twice, not more often.
        self.0.retain(|former| former.filter.as_ref().is_none_or(|filter| filter != old && filter != new));
        self.0.push(FormerFilter { filter: Some(old.clone()), until: OPEN, counts: true });
        if self.0.len() > MOST {
            let second = self.0.remove(1);
            let first = &mut self.0[0];
            first.filter = None;
            first.until = first.until.max(second.until);
            first.counts |= second.counts;
        }
    }

    /// All that was let in by a filter that was replaced until now is before this place. True if one was open.
    pub(super) fn close(&mut self, until: u64) -> bool {
        let open = self.0.iter_mut().filter(|former| former.until == OPEN);
        open.map(|former| former.until = until).count() > 0
    }

    /// Looks again at those that are `chosen`. True if one counts now that did not, or no longer.
    pub(super) fn recheck(
        &mut self,
        chosen: impl Fn(bool) -> bool,
        is_unsettled: impl Fn(u64) -> bool,
    ) -> bool {
        let mut changed = false;
        for former in self.0.iter_mut().filter(|former| chosen(former.counts)) {
            let counts = former.until == OPEN || is_unsettled(former.until);
            changed |= counts != former.counts;
            former.counts = counts;
        }
        changed
    }

    /// Forgets those that cannot count again. True if there were any.
    pub(super) fn forget(&mut self, is_gone: impl Fn(u64) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|former| former.counts || !is_gone(former.until));
        self.0.len() < before
    }

    /// Tells whether a caller of this scope may have the messages there, given the places before which the group would be
    /// unsettled.
    pub(super) fn is_within(&self, scope: &Scope, is_unsettled: impl Fn(u64) -> bool) -> bool {
        let covers =
            |former: &FormerFilter| former.filter.as_ref().is_some_and(|filter| in_scope(scope, filter));
        let counts = |former: &&FormerFilter| former.until == OPEN || is_unsettled(former.until);
        scope.is_all() || self.0.iter().filter(counts).all(covers)
    }
}

/// Bounds of each partition.
pub(super) fn bounds(log: &dyn PartitionedLog) -> Vec<PartitionBounds> {
    Partition::all().map(|partition| log.bounds(partition)).collect()
}

/// Tells whether there is anything between a place in each partition and `until`.
pub(super) fn is_between(place: impl Fn(Partition) -> u64, bounds: &[PartitionBounds], until: u64) -> bool {
    Partition::all().zip(bounds).any(|(partition, bounds)| place(partition) < bounds.end.min(until))
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, sync::Arc};

    use gateway_core::{Message, Origin, OriginKind, Timestamp};

    use super::*;

    fn list(entries: &[&str]) -> Vec<String> {
        entries.iter().map(|&entry| entry.to_owned()).collect()
    }

    fn of(topics: &[&str]) -> GroupMessageFilter {
        GroupMessageFilter { topics: list(topics), ..GroupMessageFilter::default() }
    }

    /// Otherwise a caller would get by a group what it may not have by a stream.
    #[test]
    fn a_group_is_in_scope_only_if_all_that_it_gets_is() {
        let topics = Scope::new(Some(list(&["a/#", "b"])), None).unwrap();
        let devices = Scope::new(None, Some(list(&["lamp-*"]))).unwrap();
        let filter = |topics: &[&str], ids: &[&str], prefixes: &[&str]| GroupMessageFilter {
            devices: list(ids),
            device_prefixes: list(prefixes),
            ..of(topics)
        };
        for (scope, wanted, expected) in [
            (&Scope::ALL, filter(&["#"], &[], &[]), true),
            (&topics, filter(&["a/+", "b"], &[], &[]), true),
            (&topics, filter(&["#"], &[], &[]), false),
            (&topics, filter(&["a/1", "c"], &[], &[]), false),
            (&devices, filter(&["#"], &[], &[]), false),
            (&devices, filter(&["#"], &["lamp-1"], &["lamp-2"]), true),
            (&devices, filter(&["#"], &["lamp-1", "door"], &[]), false),
            (&devices, filter(&["#"], &[], &["la"]), false),
        ] {
            assert_eq!(in_scope(scope, &wanted), expected, "{wanted:?}");
        }
        let events = |name: &str| GroupMessageFilter { events: list(&[name]), ..of(&["b"]) };
        assert!(in_scope(&topics, &events("connected")) && !in_scope(&topics, &events("subscribed")));
    }

    #[test]
    fn a_letter_is_in_scope_as_the_filter_that_let_it_in() {
        let both = Scope::new(Some(list(&["a/#"])), Some(list(&["lamp-*"]))).unwrap();
        let devices = Scope::new(None, Some(list(&["lamp-*"]))).unwrap();
        let lamp = ClientId::new("lamp-1");
        let door = ClientId::new("door");
        let message = |kind, device: Option<&ClientId>, topic: &str| {
            let origin = Origin { kind, client_id: device, slot: 0 };
            Arc::clone(Message::new(topic, b"x", Timestamp(1), origin).share())
        };
        for (scope, kind, device, topic, expected) in [
            (&both, OriginKind::Device, Some(&lamp), "a/1", true),
            (&both, OriginKind::Device, Some(&lamp), "b", false),
            (&both, OriginKind::Device, Some(&door), "a/1", false),
            (&both, OriginKind::Backend, None, "a/1", false),
            (&both, OriginKind::Server, Some(&lamp), "$events/connected", true),
            (&both, OriginKind::Server, Some(&lamp), "$events/subscribed", false),
            (&both, OriginKind::Server, Some(&door), "$events/connected", false),
            (&devices, OriginKind::Server, Some(&lamp), "$events/subscribed", true),
            // Not an event, whatever it is called.
            (&both, OriginKind::Device, Some(&lamp), "$events/connected", false),
            (&Scope::ALL, OriginKind::Backend, None, "b", true),
        ] {
            let message = message(kind, device, topic);
            assert_eq!(message_in_scope(scope, &message), expected, "{message:?}");
        }
    }

    #[test]
    fn filters_that_are_remembered_are_bounded_and_none_is_lost() {
        let scope = Scope::new(Some(list(&["a/#"])), None).unwrap();
        let mut former = FormerFilters::default();
        let covers = |former: &FormerFilters, current: &str| {
            GroupFilters::new(&of(&[current]), former).is_within(&scope)
        };
        for round in 0..20 {
            former.add(&of(&["a/1"]), &of(&["a/2"]));
            former.add(&of(&["a/2"]), &of(&["a/1"]));
            assert!(former.0.len() <= 2 && covers(&former, "a/1"), "{round}");
        }
        // One of another, then many that the caller may have.
        former.add(&of(&["a/1"]), &of(&["b"]));
        former.add(&of(&["b"]), &of(&["a/3"]));
        assert!(former.close(10));
        for n in 3..50 {
            let (old, new) = (format!("a/{n}"), format!("a/{}", n + 1));
            former.add(&of(&[&old]), &of(&[&new]));
            assert!(former.0.len() <= MOST && !covers(&former, &new), "{n}");
        }
        let settled = Cell::new(10);
        former.recheck(|_| true, |until| until > settled.get());
        assert!(!covers(&former, "a/50"), "those that are open are among those that are not known");
        assert!(former.close(20) && !former.close(30), "once");
        settled.set(20);
        former.recheck(|counts| counts, |until| until > settled.get());
        assert!(covers(&former, "a/50"));
        settled.set(15);
        former.recheck(|_| true, |until| until > settled.get());
        assert!(!covers(&former, "a/50"), "moved back");
        assert!(!former.forget(|_| true), "what counts stays");
        former.recheck(|_| true, |_| false);
        assert!(former.forget(|until| until <= 20) && former.is_empty());
    }
}
