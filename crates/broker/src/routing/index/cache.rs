//! Receivers that a topic matches, resolved once and remembered per thread.
//!
//! A hit is one hash probe and two atomic loads: no lock, no allocation, no reference count. A list is stale once a
//! generation of the index has moved on. It may hold a receiver that has ended, which must treat further deliveries as
//! dropped.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use gateway_core::{Effort, QoS};
use hashbrown::HashTable;

use super::Index;
use crate::{
    Target,
    sessions::{SlotTable, Slots},
    shared::{SharedGroup, SharedGroups},
    subscriber::{GROUP, Subscriber},
};

/// Most topics remembered.
const MAX_TOPICS: usize = 4096;
/// Most receivers remembered over all topics, not counting those of the last topic.
const MAX_TARGETS: usize = 1 << 18;
/// A full cache keeps what it has and starts over after this many lookups of other topics.
const MAX_MISSES: usize = 16 * MAX_TOPICS;
/// Room kept for the receivers of a topic that is not remembered.
const SPARE_TARGETS: usize = 256;
/// Longer topics are never remembered.
const MAX_TOPIC_BYTES: usize = 1024;
/// After this many receivers have ended, the cache starts over to release them.
const MAX_ENDED: u64 = 256;

/// Most indexes that a thread remembers topics of: a process has one for each of its homes.
const MAX_INDEXES: usize = 16;

/// A thread's caches, one for each index.
#[derive(Default)]
pub(crate) struct MatchCaches {
    all: Vec<MatchCache>,
    /// Place of the one that was used last.
    last: usize,
}

impl MatchCaches {
    /// The receivers of `topic` now. See [`MatchCache::find`].
    pub(crate) fn find(
        &mut self,
        index: &Index,
        slots: &Slots,
        topic: &str,
        effort: &mut Effort,
    ) -> &Arc<MatchList> {
        if self.all.get(self.last).is_none_or(|cache| cache.index != index.id) {
            self.last = self.place_of(index);
        }
        self.all[self.last].find(index, slots, topic, effort)
    }

    fn place_of(&mut self, index: &Index) -> usize {
        if let Some(place) = self.all.iter().position(|cache| cache.index == index.id) {
            return place;
        }
        if self.all.len() >= MAX_INDEXES {
            self.all.clear();
        }
        let gone = Arc::clone(&index.gone);
        self.all.push(MatchCache { index: index.id, gone, ..MatchCache::default() });
        self.all.len() - 1
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.iter().map(|cache| cache.topics.len()).sum()
    }

    /// Forgets indexes that nothing is routed by any more.
    pub(crate) fn trim(&mut self) {
        self.all.retain(|cache| !cache.gone.load(Ordering::Relaxed));
    }
}

/// Cache of topic -> targets, validated by the index's generations.
#[derive(Default)]
struct MatchCache {
    index: u64,
    gone: Arc<AtomicBool>,
    ended: u64,
    places: HashTable<u32>,
    topics: Vec<Cached>,
    targets: usize,
    /// Misses since the cache became full.
    misses: usize,
    /// For topics that are not remembered.
    spare: Arc<MatchList>,
    scratch: Vec<Subscriber>,
}

struct Cached {
    topic: Box<str>,
    hash: u64,
    global: u64,
    exact: u32,
    list: Arc<MatchList>,
}

/// The receivers of one topic: each session and stream once, and shared groups.
#[derive(Default)]
pub(crate) struct MatchList {
    pub(crate) targets: Vec<Matched>,
    pub(crate) groups: Box<[Arc<SharedGroup>]>,
    ids: Box<[u32]>,
}

/// One receiver with its overlapping subscriptions merged.
pub(crate) struct Matched {
    pub(crate) target: Arc<dyn Target>,
    pub(crate) slot: u32,
    pub(crate) stream: bool,
    all: Merged,
    /// Without the No Local subscriptions; the same as `all` if there are none.
    foreign: Option<Merged>,
}

/// Overlapping subscriptions of one receiver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merged {
    /// Highest granted QoS [MQTT-3.3.4-2].
    pub(crate) qos: QoS,
    pub(crate) retain_as_published: bool,
    first: u32,
    ids: u32,
}

impl Matched {
    /// Returns the delivery that the receiver gets from the sender of `slot`: its No Local subscriptions don't count for its own
    /// messages [MQTT-3.8.3-3].
    pub(crate) fn for_sender(&self, slot: u32) -> Option<Merged> {
        if self.slot == slot { self.foreign } else { Some(self.all) }
    }
}

impl MatchList {
    /// Receivers and groups.
    pub(crate) fn len(&self) -> usize {
        self.targets.len() + self.groups.len()
    }

    /// Releases everything but some capacity. Must not be called under a lock: a receiver may be dropped here.
    pub(super) fn clear(&mut self) {
        self.targets.clear();
        self.targets.shrink_to(SPARE_TARGETS);
        self.groups = Box::default();
    }

    /// Resolves subscribers into the list, which is empty; sorts them in place.
    pub(super) fn fill(&mut self, entries: &mut [Subscriber], slots: &SlotTable, groups: &SharedGroups) {
        entries.sort_by_key(|entry| entry.slot);
        let shared = entries.partition_point(|entry| entry.slot & GROUP == 0);
        let (direct, shared) = entries.split_at(shared);
        self.groups = shared.iter().filter_map(|entry| groups.get(entry.slot & !GROUP).cloned()).collect();
        self.targets.reserve_exact(direct.len());
        let mut ids = Vec::new();
        for entries in direct.chunk_by(|a, b| a.slot == b.slot) {
            let slot = entries[0].slot;
            let Some(target) = slots.get(slot) else { continue };
            let Some(all) = merge(entries.iter(), &mut ids) else { continue };
            let no_local = entries.iter().any(|entry| entry.options.no_local());
            let foreign = if no_local {
                merge(entries.iter().filter(|entry| !entry.options.no_local()), &mut ids)
            } else {
                Some(all)
            };
            let stream = entries[0].options.is_stream();
            self.targets.push(Matched { target: Arc::clone(target), slot, stream, all, foreign });
        }
        self.ids = ids.into_boxed_slice();
    }

    /// Subscription identifiers of a merged entry of this list.
    pub(crate) fn ids(&self, merged: &Merged) -> &[u32] {
        self.ids.get(merged.first as usize..(merged.first + merged.ids) as usize).unwrap_or_default()
    }
}

impl MatchCache {
    /// The receivers of `topic` now. A lookup that was not remembered costs effort by the tables, nodes and subscribers
    /// it visited.
    fn find(&mut self, index: &Index, slots: &Slots, topic: &str, effort: &mut Effort) -> &Arc<MatchList> {
        let hash = index.hasher.hash_one(topic);
        // Read before resolving: a change in between makes the list stale at once, never wrongly fresh.
        let global = index.generations.global.load(Ordering::Acquire);
        let exact = index.generations.bucket(hash).load(Ordering::Acquire);
        let topics = &self.topics;
        let same = |place: &u32| topics.get(*place as usize).is_some_and(|cached| &*cached.topic == topic);
        if let Some(place) = self.places.find(hash, same) {
            let place = *place as usize;
            if topics[place].global == global && topics[place].exact == exact {
                return &self.topics[place].list;
            }
            let cached = &mut self.topics[place];
            self.targets -= cached.list.targets.len();
            let visited = index.resolve(topic, hash, slots, &mut self.scratch, &mut cached.list);
            effort.spend_each(Effort::NODE, visited);
            self.targets += cached.list.targets.len();
            (cached.global, cached.exact) = (global, exact);
            return &cached.list;
        }
        if !self.has_room(index) || topic.len() > MAX_TOPIC_BYTES {
            let visited = index.resolve(topic, hash, slots, &mut self.scratch, &mut self.spare);
            effort.spend_each(Effort::NODE, visited);
            return &self.spare;
        }
        let mut list = Arc::default();
        let visited = index.resolve(topic, hash, slots, &mut self.scratch, &mut list);
        effort.spend_each(Effort::NODE, visited);
        self.targets += list.targets.len();
        let place = self.topics.len();
        self.topics.push(Cached { topic: Box::from(topic), hash, global, exact, list });
        let topics = &self.topics;
        let rehash = |place: &u32| topics.get(*place as usize).map_or(0, |cached| cached.hash);
        self.places.insert_unique(hash, place as u32, rehash);
        &self.topics[place].list
    }

    /// Returns whether a topic that was not found may be remembered. Starts over if that is due.
    fn has_room(&mut self, index: &Index) -> bool {
        let full = self.topics.len() >= MAX_TOPICS || self.targets > MAX_TARGETS;
        self.misses += usize::from(full);
        let ended = index.generations.ended.load(Ordering::Acquire);
        let start_over = self.misses > MAX_MISSES || ended.wrapping_sub(self.ended) > MAX_ENDED;
        if start_over {
            self.clear();
            self.ended = ended;
        }
        start_over || !full
    }

    fn clear(&mut self) {
        self.places.clear();
        self.topics.clear();
        self.targets = 0;
        self.misses = 0;
        self.spare = Arc::default();
    }
}

/// `None` if there are no subscribers.
fn merge<'a>(entries: impl Iterator<Item = &'a Subscriber>, ids: &mut Vec<u32>) -> Option<Merged> {
    let first = ids.len() as u32;
    let mut merged: Option<Merged> = None;
    for entry in entries {
        let (qos, as_published) = (entry.options.qos(), entry.options.retain_as_published());
        let so_far = merged.get_or_insert(Merged { qos, retain_as_published: false, first, ids: 0 });
        so_far.qos = so_far.qos.max(qos);
        so_far.retain_as_published |= as_published;
        if entry.id != 0 {
            ids.push(entry.id);
            so_far.ids += 1;
        }
    }
    merged
}
