//! The subscription index: who subscribed to what, and who gets a message on a topic.
//!
//! Every filter has a number and one record. One hash table over filter texts serves subscribing and, since a topic has
//! no wildcards, the exact match too. Wildcard filters are in [`wildcard`] as well. Changes advance generations, which
//! tell each thread's [`cache`] that a remembered match is stale.
//!
//! [`cache`] and this file use each other: a lookup that misses is resolved here, into the cache's list.
//!
//! Lock order: this index's lock, then slots. Nothing is called under them that takes another lock, except a
//! group's list of members.

mod cache;
mod exact;
mod subscribers;
mod trie;
mod wildcard;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use ahash::RandomState;
use gateway_core::QoS;
use parking_lot::RwLock;

use crate::{
    SessionCore,
    sessions::Slots,
    shared::{SharedGroup, SharedGroups, SharedMember},
    subscriber::{GROUP, Options, Subscriber},
};

pub(crate) use cache::MatchCaches;
pub(crate) use cache::{MatchList, Matched};
use exact::FilterTable;
use wildcard::Wildcards;

const BUCKETS: usize = 4096;

/// Numbers that grow whenever the matches of a topic may have changed.
struct Generations {
    /// Wildcard filters and groups on them.
    global: AtomicU64,
    /// Exact filters, by hash of their text.
    exact: Box<[AtomicU32]>,
    /// Receivers that ended since the start.
    ended: AtomicU64,
}

impl Generations {
    fn bucket(&self, hash: u64) -> &AtomicU32 {
        &self.exact[(hash >> 40) as usize % BUCKETS]
    }
}

/// All subscriptions.
pub(crate) struct Index {
    /// Identity of this index, so that a cache never mixes two.
    id: u64,
    hasher: RandomState,
    generations: Generations,
    tables: RwLock<IndexTables>,
    /// Nothing is routed by it any more.
    gone: Arc<AtomicBool>,
}

struct IndexTables {
    filters: FilterTable,
    wildcards: Wildcards,
    groups: SharedGroups,
    subscriptions: usize,
}

/// Result of [`Index::subscribe`].
pub(crate) struct Added {
    /// Number of the filter, or [`GROUP`] and the group's id, for unsubscribing at the session's end.
    pub(crate) reference: u32,
    /// True if the subscription was there already and has been replaced [MQTT-3.8.4-3].
    pub(crate) existed: bool,
}

/// A subscription for `Devices`.
pub(crate) struct ListedSubscription {
    pub(crate) filter: String,
    pub(crate) options: Options,
}

impl Index {
    pub(crate) fn new(hasher: RandomState) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let exact = std::iter::repeat_with(|| AtomicU32::new(0)).take(BUCKETS).collect();
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            hasher,
            generations: Generations { global: AtomicU64::new(0), exact, ended: AtomicU64::new(0) },
            tables: RwLock::new(IndexTables {
                filters: FilterTable::default(),
                wildcards: Wildcards::default(),
                groups: SharedGroups::default(),
                subscriptions: 0,
            }),
            gone: Arc::default(),
        }
    }

    /// Nothing is routed by it any more: threads forget what they remember of it.
    pub(crate) fn end(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Adds or replaces the subscription of `entry.slot` to a valid filter. `None` if it would be new and `may_add` is
    /// false.
    pub(crate) fn subscribe(&self, filter: &str, entry: Subscriber, may_add: bool) -> Option<Added> {
        let mut tables = self.tables.write();
        let existed = tables.entry(filter, entry.slot, &self.hasher).is_some();
        if !existed && !may_add {
            return None;
        }
        tables.subscriptions += usize::from(!existed);
        Some(Added { reference: self.set(&mut tables, filter, entry), existed })
    }

    /// Removes the subscription of `slot` to `filter`; its reference if there was one.
    pub(crate) fn unsubscribe(&self, filter: &str, slot: u32) -> Option<u32> {
        let mut tables = self.tables.write();
        let number = tables.filters.find(filter, self.hasher.hash_one(filter))?;
        if !self.remove(&mut tables, number, slot) {
            return None;
        }
        tables.subscriptions -= 1;
        Some(number)
    }

    /// Adds or replaces a member of a shared group, named by its full text, made if needed.
    pub(crate) fn subscribe_shared(
        &self,
        full: &str,
        filter: &str,
        member: SharedMember,
        may_add: bool,
        make: impl FnOnce(u32) -> SharedGroup,
    ) -> Option<Added> {
        let mut tables = self.tables.write();
        let group = tables.groups.find(full);
        let existed = group.is_some_and(|group| group.has_member(member.slot()));
        if !existed && !may_add {
            return None;
        }
        tables.subscriptions += usize::from(!existed);
        let id = match tables.groups.find(full) {
            Some(group) => {
                group.set_member(member);
                group.id()
            }
            None => {
                let group = tables.groups.add(make);
                group.set_member(member);
                let id = group.id();
                // The members have the options; this subscriber only points at the group.
                let entry = Subscriber { slot: GROUP | id, id: 0, options: Options::stream() };
                self.set(&mut tables, filter, entry);
                id
            }
        };
        Some(Added { reference: GROUP | id, existed })
    }

    /// Removes a member of a shared group: its reference, and the group if that was its last member.
    pub(crate) fn unsubscribe_shared(
        &self,
        full: &str,
        slot: u32,
    ) -> Option<(u32, Option<Arc<SharedGroup>>)> {
        let mut tables = self.tables.write();
        let id = tables.groups.find(full)?.id();
        let gone = self.leave(&mut tables, id, slot)?;
        Some((GROUP | id, gone))
    }

    /// Removes all subscriptions of an ended session or stream; returns the groups that have no members left.
    pub(crate) fn remove_all(&self, references: &[u32], slot: u32) -> Vec<Arc<SharedGroup>> {
        let gone = self.remove_some(references, slot);
        self.note_ended();
        gone
    }

    /// As [`Self::remove_all`], for some of the subscriptions. Call [`Self::note_ended`] after the last of them.
    pub(crate) fn remove_some(&self, references: &[u32], slot: u32) -> Vec<Arc<SharedGroup>> {
        let mut gone = Vec::new();
        // In parts, so that no publisher waits long for the lock.
        for part in references.chunks(256) {
            let mut tables = self.tables.write();
            for reference in part {
                if reference & GROUP == 0 {
                    let removed = self.remove(&mut tables, *reference, slot);
                    tables.subscriptions -= usize::from(removed);
                } else if let Some(Some(group)) = self.leave(&mut tables, reference & !GROUP, slot) {
                    gone.push(group);
                }
            }
        }
        gone
    }

    /// A session or stream has no subscriptions left, and its slot may be given to another.
    pub(crate) fn note_ended(&self) {
        self.generations.ended.fetch_add(1, Ordering::Release);
    }

    /// The group of an id, if it still has members.
    pub(crate) fn group(&self, id: u32) -> Option<Arc<SharedGroup>> {
        self.tables.read().groups.get(id).cloned()
    }

    /// The group of this full filter.
    pub(crate) fn group_named(&self, full_name: &str) -> Option<Arc<SharedGroup>> {
        self.tables.read().groups.find(full_name).cloned()
    }

    /// All groups.
    pub(crate) fn groups(&self) -> Vec<Arc<SharedGroup>> {
        self.tables.read().groups.all().cloned().collect()
    }

    /// The groups among a session's references.
    pub(crate) fn groups_of(&self, references: &[u32]) -> Vec<Arc<SharedGroup>> {
        let mut shared = references.iter().filter(|id| *id & GROUP != 0).map(|id| id & !GROUP).peekable();
        if shared.peek().is_none() {
            return Vec::new();
        }
        let tables = self.tables.read();
        shared.filter_map(|id| tables.groups.get(id).cloned()).collect()
    }

    /// The groups of which a session is a member.
    pub(crate) fn groups_of_session(&self, core: &SessionCore) -> Vec<Arc<SharedGroup>> {
        self.groups_of(core.state.lock().subscriptions.as_slice())
    }

    /// Full filter and granted QoS of at most `most` subscriptions of a session, in no particular order.
    pub(crate) fn list_of_session(&self, core: &SessionCore, most: usize) -> Vec<(String, QoS)> {
        let listed = {
            let state = core.state.lock();
            let references = state.subscriptions.as_slice();
            self.list(&references[..references.len().min(most)], core.slot())
        };
        listed.into_iter().map(|entry| (entry.filter, entry.options.qos())).collect()
    }

    /// Filters and options of a session's references.
    pub(crate) fn list(&self, references: &[u32], slot: u32) -> Vec<ListedSubscription> {
        let tables = self.tables.read();
        let mut list = Vec::with_capacity(references.len());
        for reference in references {
            if reference & GROUP != 0 {
                let Some(group) = tables.groups.get(reference & !GROUP) else { continue };
                let Some(options) = group.member_options(slot) else { continue };
                list.push(ListedSubscription { filter: group.full_name().to_owned(), options });
                continue;
            }
            let Some(filter) = tables.filters.get(*reference) else { continue };
            let Some(entry) = filter.subscribers.get(slot) else { continue };
            list.push(ListedSubscription { filter: filter.text.to_string(), options: entry.options });
        }
        list
    }

    /// Subscriptions and shared groups.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let tables = self.tables.read();
        (tables.subscriptions, tables.groups.len())
    }

    /// Adds the subscriber under the lock; returns the filter's number.
    fn set(&self, tables: &mut IndexTables, filter: &str, entry: Subscriber) -> u32 {
        let hash = self.hasher.hash_one(filter);
        let (number, is_new) = tables.filters.set(filter, hash, entry);
        let wildcard = is_wildcard(filter);
        if is_new && wildcard {
            tables.wildcards.insert(number, filter, &self.hasher);
        }
        self.changed(wildcard, hash);
        number
    }

    /// Removes the subscriber under the lock; false if there was none.
    fn remove(&self, tables: &mut IndexTables, number: u32, slot: u32) -> bool {
        let Some((hash, removed)) = tables.filters.remove(number, slot, &self.hasher) else { return false };
        let wildcard = match &removed {
            exact::Removed::Filter(text) => {
                let wildcard = is_wildcard(text);
                if wildcard {
                    tables.wildcards.remove(number, text, &self.hasher);
                }
                wildcard
            }
            exact::Removed::Subscriber { wildcard } => *wildcard,
        };
        self.changed(wildcard, hash);
        true
    }

    /// `None` if the slot is no member; `Some(Some(group))` if it was the group's last.
    fn leave(&self, tables: &mut IndexTables, id: u32, slot: u32) -> Option<Option<Arc<SharedGroup>>> {
        let group = Arc::clone(tables.groups.get(id)?);
        if !group.remove_member(slot) {
            return None;
        }
        tables.subscriptions -= 1;
        if !group.is_empty() {
            return Some(None);
        }
        tables.groups.remove(id);
        let filter = group.filter();
        if let Some(number) = tables.filters.find(filter, self.hasher.hash_one(filter)) {
            self.remove(tables, number, GROUP | id);
        }
        Some(Some(group))
    }

    fn changed(&self, wildcard: bool, hash: u64) {
        if wildcard {
            self.generations.global.fetch_add(1, Ordering::Release);
        } else {
            self.generations.bucket(hash).fetch_add(1, Ordering::Release);
        }
    }

    /// Collects the subscribers that match `topic` and resolves them into `list`. Returns how many tables, nodes and
    /// subscribers it visited.
    fn resolve(
        &self,
        topic: &str,
        hash: u64,
        slots: &Slots,
        scratch: &mut Vec<Subscriber>,
        list: &mut Arc<MatchList>,
    ) -> usize {
        scratch.clear();
        match Arc::get_mut(list) {
            Some(list) => list.clear(),
            // A spread is still using the old list.
            None => *list = Arc::default(),
        }
        let tables = self.tables.read();
        let filters = &tables.filters;
        if let Some(number) = filters.find(topic, hash) {
            scratch.extend_from_slice(filters.subscribers(number));
        }
        let matches = |number| filters.get(number).is_some_and(|f| gateway_core::matches(&f.text, topic));
        let visited = tables.wildcards.find(topic, &self.hasher, matches, |number| {
            scratch.extend_from_slice(filters.subscribers(number));
        });
        // Slots are resolved under the index's lock: an ended session frees its slot only after its subscriptions are
        // removed, so no slot can stand for another session here.
        if let Some(list) = Arc::get_mut(list) {
            list.fill(scratch, &slots.read(), &tables.groups);
        }
        1 + visited + scratch.len()
    }
}

impl IndexTables {
    fn entry(&self, filter: &str, slot: u32, hasher: &RandomState) -> Option<Subscriber> {
        let number = self.filters.find(filter, hasher.hash_one(filter))?;
        self.filters.get(number)?.subscribers.get(slot)
    }
}

fn is_wildcard(filter: &str) -> bool {
    filter.bytes().any(|byte| byte == b'+' || byte == b'#')
}

#[cfg(test)]
mod tests;
