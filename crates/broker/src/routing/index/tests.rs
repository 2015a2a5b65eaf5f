use std::collections::{BTreeMap, BTreeSet};

use gateway_core::{Effort, Message, Offer, Outcome, QoS, matches};

use super::{wildcard::MAX_SHAPES, *};
use crate::{Delivered, Target};

struct Nobody;

impl Target for Nobody {
    fn deliver(&self, _: &Message<'_>, _: Offer<'_>) -> Delivered {
        Delivered { outcome: Outcome::Sent, flush: false }
    }
    fn flush(self: Arc<Self>) {}
    fn is_online(&self) -> bool {
        true
    }
    fn load(&self) -> usize {
        0
    }
}

/// A small repeatable generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    fn topic(&mut self, depth: usize) -> String {
        let words = ["a", "b", "c", ""];
        let levels: Vec<&str> = (0..=self.below(depth)).map(|_| words[self.below(words.len())]).collect();
        let topic = levels.join("/");
        match self.below(12) {
            0 => format!("$SYS/{topic}"),
            _ if topic.is_empty() => "a".to_owned(),
            _ => topic,
        }
    }

    fn filter(&mut self, depth: usize) -> String {
        let topic = self.topic(depth);
        let mut levels: Vec<&str> = topic.split('/').collect();
        for level in &mut levels {
            if self.below(3) == 0 {
                *level = "+";
            }
        }
        if self.below(3) == 0 {
            levels.push("#");
        }
        let filter = levels.join("/");
        if filter.is_empty() || self.below(40) == 0 { "#".to_owned() } else { filter }
    }
}

fn entry(slot: u32, id: u32) -> Subscriber {
    Subscriber { slot, id, options: Options::new(QoS::AtLeastOnce, false, false) }
}

/// Leaves no room for another topic.
fn fill(cache: &mut MatchCaches, index: &Index, slots: &Slots) {
    for number in 0..4096 {
        cache.find(index, slots, &format!("filled/{number}"), &mut Effort::default());
    }
}

/// The index agrees with the matching rule through subscribes, unsubscribes and a cache that lives on.
fn agrees_with_the_rule(seed: u64, depth: usize, steps: usize, max_subscriptions: usize) -> usize {
    let mut random = Random(seed);
    let index = Index::new(RandomState::new());
    let slots = Slots::default();
    for _ in 0..8 {
        let slot = slots.reserve();
        slots.set(slot, Arc::new(Nobody));
    }
    let mut cache = MatchCaches::default();
    if seed % 2 == 1 {
        fill(&mut cache, &index, &slots);
    }
    let mut model: BTreeMap<(String, u32), u32> = BTreeMap::new();
    let mut most_shapes = 0;
    for step in 0..steps {
        let slot = 1 + random.below(8) as u32;
        if random.below(5) < 3 && model.len() < max_subscriptions {
            let filter = random.filter(depth);
            let id = step as u32 + 1;
            let added = index.subscribe(&filter, entry(slot, id), true).unwrap();
            assert_eq!(added.existed, model.insert((filter, slot), id).is_some());
        } else if let Some(key) = model.keys().nth(random.below(model.len().max(1))).cloned() {
            assert!(index.unsubscribe(&key.0, key.1).is_some(), "seed {seed}: {key:?}");
            model.remove(&key);
        }
        let topic = random.topic(depth);
        let mut expected: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for ((filter, slot), id) in &model {
            if matches(filter, &topic) {
                expected.entry(*slot).or_default().insert(*id);
            }
        }
        let list = cache.find(&index, &slots, &topic, &mut Effort::default());
        let found: BTreeMap<u32, BTreeSet<u32>> = list
            .targets
            .iter()
            .map(|matched| {
                let merged = matched.for_sender(0).unwrap();
                (matched.slot, list.ids(&merged).iter().copied().collect())
            })
            .collect();
        assert_eq!(found, expected, "seed {seed} step {step} topic {topic}");
        assert_eq!(list.targets.len(), expected.len());
        most_shapes = most_shapes.max(index.tables.read().wildcards.shapes());
    }
    assert_eq!(index.counts().0, model.len());
    for (filter, slot) in model.keys() {
        assert!(index.unsubscribe(filter, *slot).is_some());
    }
    let tables = index.tables.read();
    assert_eq!(tables.wildcards.shapes(), 0);
    assert!(tables.wildcards.trie_is_empty());
    most_shapes
}

#[test]
fn matching_follows_the_rule_with_few_shapes() {
    for seed in 0..20 {
        let shapes = agrees_with_the_rule(seed, 2, 1500, 30);
        assert!(shapes < MAX_SHAPES);
    }
}

#[test]
fn matching_follows_the_rule_with_more_shapes_than_tables() {
    for seed in 100..110 {
        let shapes = agrees_with_the_rule(seed, 7, 1500, 400);
        assert_eq!(shapes, MAX_SHAPES);
    }
}

#[test]
fn filters_with_very_many_levels_match() {
    let index = Index::new(RandomState::new());
    let slots = Slots::default();
    let slot = slots.reserve();
    slots.set(slot, Arc::new(Nobody));
    let topic = ["a"; 100].join("/");
    let plus = ["+"; 100].join("/");
    let below = format!("{}/#", ["a"; 64].join("/"));
    let deep = format!("{}/#", ["a"; 99].join("/"));
    let mut cache = MatchCaches::default();
    for filter in [plus.as_str(), &below, &deep, "a/#", "#"] {
        index.subscribe(filter, entry(slot, 0), true);
        assert_eq!(cache.find(&index, &slots, &topic, &mut Effort::default()).targets.len(), 1, "{filter}");
        index.unsubscribe(filter, slot);
        assert_eq!(cache.find(&index, &slots, &topic, &mut Effort::default()).targets.len(), 0, "{filter}");
    }
}

#[test]
fn a_change_makes_only_concerned_cache_entries_stale() {
    let index = Index::new(RandomState::new());
    let slots = Slots::default();
    let slot = slots.reserve();
    slots.set(slot, Arc::new(Nobody));
    let mut cache = MatchCaches::default();
    let global = || index.generations.global.load(Ordering::Relaxed);
    let targets = |cache: &mut MatchCaches, topic| {
        cache.find(&index, &slots, topic, &mut Effort::default()).targets.len()
    };
    assert_eq!(targets(&mut cache, "a"), 0);
    let before = global();
    index.subscribe("a", entry(slot, 0), true);
    assert_eq!(global(), before);
    assert_eq!(targets(&mut cache, "a"), 1);
    index.subscribe("b/+", entry(slot, 0), true);
    assert_ne!(global(), before);
    assert_eq!(targets(&mut cache, "b/c"), 1);
    let references = [index.subscribe("x", entry(slot, 0), true).unwrap().reference];
    assert_eq!(targets(&mut cache, "x"), 1);
    index.remove_all(&references, slot);
    assert_eq!(targets(&mut cache, "x"), 0);
}

#[test]
fn a_full_cache_is_bounded_keeps_what_it_has_and_starts_over_in_the_end() {
    let index = Index::new(RandomState::new());
    let slots = Slots::default();
    let mut cache = MatchCaches::default();
    let long = "x".repeat(2000);
    cache.find(&index, &slots, &long, &mut Effort::default());
    assert_eq!(cache.len(), 0);
    fill(&mut cache, &index, &slots);
    assert_eq!(cache.len(), 4096);
    for number in 0..60_000 {
        cache.find(&index, &slots, &format!("t/{number}"), &mut Effort::default());
        assert_eq!(cache.len(), 4096);
    }
    for number in 0..10_000 {
        cache.find(&index, &slots, &format!("filled/{}", number % 4096), &mut Effort::default());
    }
    assert_eq!(cache.len(), 4096);
    for number in 60_000..67_000 {
        cache.find(&index, &slots, &format!("t/{number}"), &mut Effort::default());
    }
    assert!((1..4096).contains(&cache.len()), "{}", cache.len());
}

#[test]
fn the_cache_lets_go_of_ended_receivers() {
    let index = Index::new(RandomState::new());
    let slots = Slots::default();
    let mut cache = MatchCaches::default();
    let target = Arc::new(Nobody);
    for number in 0..400 {
        let slot = slots.reserve();
        slots.set(slot, Arc::clone(&target) as Arc<dyn Target>);
        let topic = format!("e/{number}");
        let reference = index.subscribe(&topic, entry(slot, 0), true).unwrap().reference;
        cache.find(&index, &slots, &topic, &mut Effort::default());
        index.remove_all(&[reference], slot);
        slots.free(slot);
    }
    assert!(Arc::strong_count(&target) < 300, "{}", Arc::strong_count(&target));
}
