//! Messages for consumer groups: which of them want a message ([`GroupFilter`], [`Selector`]), and one append for all.
//!
//! In the index all groups are one receiver among the streams, the log, so that devices are asked nothing and non-broker mode
//! withholds nothing. A filter that several groups have is one subscription; its identifier is the number of the filter, and
//! [`GroupIndex`] has the groups behind it. A match therefore costs what the match cache costs, and where there is no group
//! nothing matches.
//!
//! Invariants: a message is appended once, however many groups want it; a number of a filter is never used for another, so
//! that an old match cannot give a group what it does not want; under the table's lock only that of the sets is taken, and
//! those of the log.

mod group_events;
mod selector;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

use ahash::RandomState;
use gateway_core::{DropReason, GroupId, Message, NoRoom, Offer, Outcome, Partition, QoS, matches};
use hashbrown::{HashMap, HashSet};
use parking_lot::{Mutex, RwLock};
use store::{LogFull, PartitionedLog, StoreHealth};

use crate::{
    Delivered, Target, Turn,
    counters::count,
    events::Events,
    memory::{Account, MemoryKind},
    routing::Index,
    sessions::Slots,
    subscriber::{Options, Subscriber},
};

pub use group_events::{EventKinds, is_event, is_event_message};
pub use selector::{InScope, Selector};

/// Sets of more than one group that are remembered.
const MOST_SETS: usize = 1024;
/// Groups of one message that need no allocation to be collected.
const FEW: usize = 16;

/// Selection of the messages and events that a consumer group gets.
#[derive(Debug)]
pub struct GroupFilter {
    /// MQTT topic filters, valid and not shared; a message needs to match one.
    pub topics: Vec<String>,
    /// Devices, and what is left out.
    pub selector: Selector,
    /// The lowest QoS.
    pub min_qos: QoS,
    /// Also events of these kinds, of the devices that the selector wants.
    pub events: EventKinds,
}

impl GroupFilter {
    /// Returns whether the group gets a message on a topic that matches.
    fn wants(&self, message: &Message<'_>) -> bool {
        message.qos >= self.min_qos && self.selector.wants(message)
    }

    /// Returns whether the group gets the message, its topic included: for messages that were appended before the group was made.
    pub fn matches(&self, message: &Message<'_>) -> bool {
        self.wants(message) && self.topics.iter().any(|filter| matches(filter, message.topic))
            || self.matches_event(message)
    }
}

/// The log of consumer groups.
#[derive(Clone)]
pub struct GroupLog {
    /// The log.
    pub log: Arc<dyn PartitionedLog>,
    /// Bytes of memory that it may take, which are on the account as long as there is a group.
    pub memory: usize,
}

/// A group as the log's receiver knows it.
struct KnownGroup {
    id: GroupId,
    filter: Arc<GroupFilter>,
    /// The set of this group alone.
    alone: Arc<[GroupId]>,
    /// True while the group is full and refuses the messages that match.
    full: AtomicBool,
    /// Set while the group gets nothing, and nothing is refused for that.
    skipped: AtomicBool,
}

/// A group behind a topic filter.
struct FilteredGroup {
    kept: Arc<KnownGroup>,
    /// The filter is that of a group in whose place this one came. A match that was made just before may still name it, and
    /// what this group wants must not be lost for that.
    former: bool,
}

/// Groups by what they want.
#[derive(Default)]
struct GroupIndex {
    groups: BTreeMap<GroupId, Arc<KnownGroup>>,
    /// By number: the subscription identifier in the index.
    filters: HashMap<u32, Vec<FilteredGroup>, RandomState>,
}

impl GroupIndex {
    /// The groups that want a message which matched the filters of these numbers; some perhaps several times.
    fn wanting<'a>(
        &'a self,
        message: &'a Message<'_>,
        numbers: &'a [u32],
    ) -> impl Iterator<Item = &'a Arc<KnownGroup>> {
        let wants = numbers.iter().filter_map(|number| self.filters.get(number)).flatten();
        let wants = wants.filter(|wants| match wants.former {
            false => wants.kept.filter.wants(message),
            true => wants.kept.filter.matches(message),
        });
        wants.map(|wants| &wants.kept)
    }

    /// Drops filters of groups that are gone: no match that old is in use.
    fn forget_former(&mut self) {
        self.filters.retain(|_, list| {
            list.retain(|wants| !wants.former);
            !list.is_empty()
        });
    }
}

/// Changes of the groups, one at a time.
#[derive(Default)]
struct Registered {
    /// Number and reference in the index of each filter.
    filters: BTreeMap<String, (u32, Option<u32>)>,
    /// The last number given to a filter.
    last: u32,
}

/// The log as a receiver of messages.
pub(crate) struct LogTarget {
    log: Arc<dyn PartitionedLog>,
    /// Bytes of memory that the log may take.
    memory: usize,
    slot: u32,
    table: RwLock<GroupIndex>,
    registered: Mutex<Registered>,
    /// Sets of several groups, so that not every message makes one.
    sets: RwLock<HashSet<Arc<[GroupId]>, RandomState>>,
    groups: AtomicUsize,
    /// Groups that are full.
    full: AtomicUsize,
    feed: group_events::Feed,
}

impl fmt::Debug for LogTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogTarget").field("groups", &self.groups).finish_non_exhaustive()
    }
}

/// Groups in order and without repetition, nearly always few.
struct GroupSet {
    few: [GroupId; FEW],
    count: usize,
    many: Vec<GroupId>,
}

impl GroupSet {
    fn new() -> Self {
        Self { few: [GroupId(0); FEW], count: 0, many: Vec::new() }
    }

    fn add(&mut self, group: GroupId) {
        if self.count < FEW {
            self.few[self.count] = group;
            self.count += 1;
            return;
        }
        if self.many.is_empty() {
            self.many.extend_from_slice(&self.few);
        }
        self.many.push(group);
    }

    fn sorted(&mut self) -> &[GroupId] {
        if !self.many.is_empty() {
            self.many.sort_unstable();
            self.many.dedup();
            return &self.many;
        }
        let few = &mut self.few[..self.count];
        few.sort_unstable();
        let mut unique = few.len().min(1);
        for next in 1..few.len() {
            if few[next] != few[unique - 1] {
                few[unique] = few[next];
                unique += 1;
            }
        }
        &few[..unique]
    }
}

/// Destination of a message: the groups for which it is appended.
enum LogDestination {
    Nobody,
    /// By groups that take nothing now.
    Full,
    By(Arc<[GroupId]>),
}

impl LogTarget {
    /// Makes the log a receiver with a slot of its own.
    pub(crate) fn register(log: GroupLog, slots: &Slots) -> Arc<Self> {
        let slot = slots.reserve();
        let target = Arc::new(Self::new(log, slot));
        slots.set(slot, Arc::clone(&target) as Arc<dyn Target>);
        target
    }

    fn new(GroupLog { log, memory }: GroupLog, slot: u32) -> Self {
        Self {
            log,
            memory,
            slot,
            table: RwLock::default(),
            registered: Mutex::default(),
            sets: RwLock::default(),
            groups: AtomicUsize::new(0),
            full: AtomicUsize::new(0),
            feed: group_events::Feed::default(),
        }
    }

    /// The groups that want a message which matched the filters of these numbers.
    fn wanted(&self, table: &GroupIndex, message: &Message<'_>, numbers: &[u32]) -> LogDestination {
        let mut first: Option<&Arc<KnownGroup>> = None;
        let mut more = None;
        let mut full = false;
        for kept in table.wanting(message, numbers) {
            if kept.skipped.load(Relaxed) || message.qos == QoS::AtMostOnce && kept.full.load(Relaxed) {
                full = true;
                continue;
            }
            match (first, &mut more) {
                (None, _) => first = Some(kept),
                (Some(first), None) if first.id == kept.id => {}
                (Some(first), none) => {
                    let groups = none.get_or_insert_with(|| {
                        let mut groups = GroupSet::new();
                        groups.add(first.id);
                        groups
                    });
                    groups.add(kept.id);
                }
            }
        }
        match (first, more) {
            (None, _) if full => LogDestination::Full,
            (None, _) => LogDestination::Nobody,
            (Some(first), None) => LogDestination::By(Arc::clone(&first.alone)),
            (Some(_), Some(mut groups)) => LogDestination::By(self.set(groups.sorted())),
        }
    }

    /// A set of groups, shared with earlier messages where that is possible.
    fn set(&self, groups: &[GroupId]) -> Arc<[GroupId]> {
        if let Some(set) = self.sets.read().get(groups) {
            return Arc::clone(set);
        }
        let set: Arc<[GroupId]> = groups.into();
        let mut sets = self.sets.write();
        if sets.len() < MOST_SETS {
            sets.insert(Arc::clone(&set));
        }
        set
    }

    /// The log itself.
    pub(crate) fn log(&self) -> &Arc<dyn PartitionedLog> {
        &self.log
    }

    /// Tells whether the message would be taken, whoever wants it: nearly always.
    fn is_calm(&self, message: &Message<'_>) -> bool {
        self.groups.load(Relaxed) == 0
            || self.full.load(Relaxed) == 0
                && self.log.health() == StoreHealth::Sound
                && self.log.admit(message).is_ok()
    }

    /// Tells whether a message that matched these filters can be taken, if it is wanted.
    fn admit(&self, message: &Message<'_>, numbers: &[u32]) -> Result<(), NoRoom> {
        let full = {
            let table = self.table.read();
            let mut wanting = table.wanting(message, numbers).peekable();
            if wanting.peek().is_none() {
                return Ok(());
            }
            wanting.any(|kept| kept.full.load(Relaxed))
        };
        if full {
            return Err(NoRoom::Full);
        }
        // Asked last: while the disk fails only a few messages are let through to try it.
        self.log.admit(message)
    }

    /// Appends the message for all groups that want it.
    fn append(&self, message: &Message<'_>, numbers: &[u32]) -> Outcome {
        // Until it is submitted: what is marked for a group must not be behind a change of it, see [`LogTarget::replace`].
        let table = self.table.read();
        let groups = match self.wanted(&table, message, numbers) {
            LogDestination::Nobody => return Outcome::Ignored,
            LogDestination::Full => {
                count(|c| c.groups_dropped_full.add(1));
                return Outcome::Dropped(DropReason::QueueFull);
            }
            LogDestination::By(groups) => groups,
        };
        let device = message.origin.client_id.map(|id| id.as_str());
        let partition = Partition::of(device, message.topic);
        let shared = message.share().without_receipt();
        let commit = message.plain_part();
        let appended = self.log.append(partition, &groups, &shared, commit.clone());
        drop(table);
        match appended {
            Ok(()) => {
                count(|c| c.groups_appended.add(1));
                Outcome::Queued
            }
            Err(LogFull) => {
                count(|c| c.groups_dropped_log.add(1));
                if let Some(commit) = commit {
                    commit.refuse();
                }
                Outcome::Dropped(DropReason::QueueFull)
            }
        }
    }
}

impl Target for LogTarget {
    fn deliver(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered {
        Delivered { outcome: self.append(message, offer.ids), flush: false }
    }

    fn flush(self: Arc<Self>) {}

    fn is_online(&self) -> bool {
        true
    }

    fn load(&self) -> usize {
        0
    }
}

/// Refusal of messages.
impl LogTarget {
    /// Refuses a message that a consumer group wants and cannot have: then nobody gets it.
    #[inline]
    pub(crate) fn admit_matched(
        &self,
        message: &Message<'_>,
        index: &Index,
        slots: &Slots,
        turn: &mut Turn,
    ) -> Result<(), NoRoom> {
        if self.is_calm(message) { Ok(()) } else { self.admit_when_busy(message, index, slots, turn) }
    }

    #[cold]
    fn admit_when_busy(
        &self,
        message: &Message<'_>,
        index: &Index,
        slots: &Slots,
        turn: &mut Turn,
    ) -> Result<(), NoRoom> {
        let Turn { matches, effort, .. } = turn;
        let list = matches.find(index, slots, message.topic, effort);
        let matched = list.targets.iter().find(|matched| matched.slot == self.slot);
        let merged = matched.and_then(|matched| matched.for_sender(message.origin.slot));
        merged.map_or(Ok(()), |merged| self.admit(message, list.ids(&merged)))
    }
}

/// Parts of the broker that a change of the groups concerns.
#[derive(Clone, Copy)]
pub(crate) struct GroupSurroundings<'a> {
    pub(crate) index: &'a Index,
    pub(crate) account: &'a Account,
    pub(crate) events: &'a Events,
}

/// Changes of the groups.
impl LogTarget {
    /// From now on messages that match `filter` are appended for the group.
    pub(crate) fn keep_for(&self, group: GroupId, filter: Arc<GroupFilter>, parts: GroupSurroundings<'_>) {
        self.keep(None, group, filter, parts);
    }

    /// The same in the place of the group `old`, for which nothing is appended from now on. A message that is published after
    /// this has returned is judged by the new filter, and all that was marked for the old group is submitted to the log.
    pub(crate) fn replace(
        &self,
        old: GroupId,
        group: GroupId,
        filter: Arc<GroupFilter>,
        parts: GroupSurroundings<'_>,
    ) {
        self.keep(Some(old), group, filter, parts);
        self.sets.write().retain(|set| !set.contains(&old));
    }

    fn keep(
        &self,
        old: Option<GroupId>,
        group: GroupId,
        filter: Arc<GroupFilter>,
        parts: GroupSurroundings<'_>,
    ) {
        let mut registered = self.registered.lock();
        // In the index first: a number without groups means nothing yet.
        let numbers: Vec<u32> =
            filter.topics.iter().map(|topic| self.number(&mut registered, topic, parts.index)).collect();
        {
            let mut table = self.table.write();
            match old.and_then(|old| table.groups.remove(&old)) {
                Some(old) if old.full.load(Relaxed) => drop(self.full.fetch_sub(1, Relaxed)),
                Some(_) => {}
                None if self.groups.fetch_add(1, Relaxed) == 0 => {
                    parts.account.force(MemoryKind::Log, self.memory);
                }
                None => {}
            }
            let alone = Arc::new([group]);
            let (full, skipped) = (AtomicBool::new(false), AtomicBool::new(false));
            let kept = Arc::new(KnownGroup { id: group, filter, alone, full, skipped });
            table.groups.insert(group, Arc::clone(&kept));
            table.forget_former();
            for wants in table.filters.values_mut().flatten().filter(|wants| Some(wants.kept.id) == old) {
                *wants = FilteredGroup { kept: Arc::clone(&kept), former: true };
            }
            for number in numbers {
                let list = table.filters.entry(number).or_default();
                match list.iter_mut().find(|wants| wants.kept.id == group) {
                    Some(wants) => wants.former = false,
                    None => list.push(FilteredGroup { kept: Arc::clone(&kept), former: false }),
                }
            }
        }
        self.drop_unused(&mut registered, parts.index);
        self.follow_events(parts.events);
    }

    /// From now on nothing is appended for the group. False if nothing was before.
    pub(crate) fn keep_no_more_for(&self, group: GroupId, parts: GroupSurroundings<'_>) -> bool {
        let mut registered = self.registered.lock();
        let former = {
            let mut table = self.table.write();
            table.forget_former();
            for list in table.filters.values_mut() {
                list.retain(|wants| wants.kept.id != group);
            }
            table.groups.remove(&group)
        };
        self.drop_unused(&mut registered, parts.index);
        self.sets.write().retain(|set| !set.contains(&group));
        self.follow_events(parts.events);
        let Some(former) = former else { return false };
        if self.groups.fetch_sub(1, Relaxed) == 1 {
            parts.account.release(MemoryKind::Log, self.memory);
        }
        if former.full.load(Relaxed) {
            self.full.fetch_sub(1, Relaxed);
        }
        true
    }

    /// Sets whether the group is full and refuses: QoS 1 and 2 messages that it wants are refused before any receiver has them,
    /// those of QoS 0 are not appended for it.
    pub(crate) fn set_full(&self, group: GroupId, full: bool) {
        let _one_at_a_time = self.registered.lock();
        let table = self.table.read();
        let Some(kept) = table.groups.get(&group) else { return };
        let was_full = kept.full.swap(full, Relaxed);
        if full && !was_full {
            self.full.fetch_add(1, Relaxed);
        } else if was_full && !full {
            self.full.fetch_sub(1, Relaxed);
        }
    }

    /// Skips the group for now, or no longer: messages that it wants are not appended for it, and none is refused for that.
    pub(crate) fn set_skipped(&self, group: GroupId, skipped: bool) {
        let _one_at_a_time = self.registered.lock();
        if let Some(kept) = self.table.read().groups.get(&group) {
            kept.skipped.store(skipped, Relaxed);
        }
    }

    /// The number of a filter, which is put into the index if it is not there.
    fn number(&self, registered: &mut Registered, filter: &str, index: &Index) -> u32 {
        if let Some((number, _)) = registered.filters.get(filter) {
            return *number;
        }
        registered.last += 1;
        let number = registered.last;
        let entry = Subscriber { slot: self.slot, id: number, options: Options::stream() };
        let added = index.subscribe(filter, entry, true);
        registered.filters.insert(filter.to_owned(), (number, added.map(|added| added.reference)));
        number
    }

    /// Takes filters that no group has now out of the index.
    fn drop_unused(&self, registered: &mut Registered, index: &Index) {
        let table = self.table.read();
        let is_used = |number: &u32| {
            table.filters.get(number).is_some_and(|list| list.iter().any(|wants| !wants.former))
        };
        let unused = registered.filters.extract_if(.., |_, (number, _)| !is_used(number));
        let references: Vec<u32> = unused.filter_map(|(_, (_, reference))| reference).collect();
        drop(table);
        let gone = index.remove_some(&references, self.slot);
        debug_assert!(gone.is_empty(), "the log is in no shared group");
    }
}
