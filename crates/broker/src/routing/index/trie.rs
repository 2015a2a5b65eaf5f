//! Wildcard filters of uncommon shapes: a trie over interned level texts, edges in one hash table.
//!
//! Cost of a match is at most the number of nodes, whatever filters peers choose: each node is visited once.

use ahash::RandomState;
use hashbrown::HashTable;

use crate::slab::Slab;

const ROOT: u32 = 0;
/// A level text that no filter has.
const UNKNOWN: u32 = u32::MAX;
/// The level `+`.
const PLUS: u32 = u32::MAX - 1;
/// No filter here.
const NONE: u32 = u32::MAX;

struct TrieSegment {
    text: Box<str>,
    uses: u32,
}

struct TrieNode {
    parent: u32,
    segment: u32,
    /// Edges below.
    children: u32,
    /// Filter that ends here.
    exact: u32,
    /// Filter that ends in `#` below here.
    multi: u32,
}

struct Edge {
    parent: u32,
    segment: u32,
    child: u32,
}

/// The trie. An empty one allocates nothing.
pub(super) struct Trie {
    segments: Slab<TrieSegment>,
    names: HashTable<u32>,
    nodes: Slab<TrieNode>,
    edges: HashTable<Edge>,
    filters: usize,
}

impl Default for Trie {
    fn default() -> Self {
        Self {
            segments: Slab::starting_at(0),
            names: HashTable::new(),
            nodes: Slab::starting_at(0),
            edges: HashTable::new(),
            filters: 0,
        }
    }
}

impl Trie {
    pub(super) fn insert(&mut self, number: u32, filter: &str, hasher: &RandomState) {
        if self.nodes.get(ROOT).is_none() {
            let root = TrieNode { parent: ROOT, segment: UNKNOWN, children: 0, exact: NONE, multi: NONE };
            self.nodes.insert(root);
        }
        let mut at = ROOT;
        let mut multi = false;
        for level in filter.split('/') {
            if level == "#" {
                multi = true;
                break;
            }
            at = self.step_or_make(at, level, hasher);
        }
        if let Some(node) = self.nodes.get_mut(at) {
            *(if multi { &mut node.multi } else { &mut node.exact }) = number;
        }
        self.filters += 1;
    }

    pub(super) fn remove(&mut self, filter: &str, hasher: &RandomState) {
        let mut at = ROOT;
        let mut multi = false;
        for level in filter.split('/') {
            if level == "#" {
                multi = true;
                break;
            }
            let Some(child) = self.child(at, self.segment(level, hasher), hasher) else { return };
            at = child;
        }
        let Some(node) = self.nodes.get_mut(at) else { return };
        let place = if multi { &mut node.multi } else { &mut node.exact };
        if *place == NONE {
            return;
        }
        *place = NONE;
        self.filters -= 1;
        self.prune(at, hasher);
    }

    /// Calls `found` with every filter that matches `topic`. Returns how many nodes it visited.
    pub(super) fn find(&self, topic: &str, hasher: &RandomState, mut found: impl FnMut(u32)) -> usize {
        let mut visited = 0;
        if self.filters == 0 {
            return visited;
        }
        let levels: Vec<u32> = topic.split('/').map(|level| self.segment(level, hasher)).collect();
        let system = topic.starts_with('$');
        let mut stack = vec![(ROOT, 0usize)];
        while let Some((at, depth)) = stack.pop() {
            let Some(node) = self.nodes.get(at) else { continue };
            visited += 1;
            // A leading wildcard does not match `$` topics [MQTT-4.7.2-1].
            let wildcard = !(system && depth == 0);
            if node.multi != NONE && wildcard {
                found(node.multi);
            }
            let Some(segment) = levels.get(depth) else {
                if node.exact != NONE {
                    found(node.exact);
                }
                continue;
            };
            if node.children == 0 {
                continue;
            }
            if wildcard && let Some(child) = self.child(at, PLUS, hasher) {
                stack.push((child, depth + 1));
            }
            if *segment != UNKNOWN
                && let Some(child) = self.child(at, *segment, hasher)
            {
                stack.push((child, depth + 1));
            }
        }
        visited
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.filters == 0 && self.edges.is_empty() && self.names.is_empty()
    }

    fn segment(&self, level: &str, hasher: &RandomState) -> u32 {
        if level == "+" {
            return PLUS;
        }
        let hash = hasher.hash_one(level);
        let same = |number: &u32| self.segments.get(*number).is_some_and(|segment| &*segment.text == level);
        self.names.find(hash, same).copied().unwrap_or(UNKNOWN)
    }

    fn child(&self, parent: u32, segment: u32, hasher: &RandomState) -> Option<u32> {
        let hash = hasher.hash_one((parent, segment));
        let edge = self.edges.find(hash, |edge| edge.parent == parent && edge.segment == segment)?;
        Some(edge.child)
    }

    fn step_or_make(&mut self, parent: u32, level: &str, hasher: &RandomState) -> u32 {
        let mut segment = self.segment(level, hasher);
        if let Some(child) = self.child(parent, segment, hasher) {
            return child;
        }
        if segment == UNKNOWN {
            segment = self.segments.insert(TrieSegment { text: Box::from(level), uses: 0 });
            let segments = &self.segments;
            let rehash =
                |number: &u32| hasher.hash_one(segments.get(*number).map_or("", |segment| &*segment.text));
            self.names.insert_unique(hasher.hash_one(level), segment, rehash);
        }
        if let Some(segment) = self.segments.get_mut(segment) {
            segment.uses += 1;
        }
        let child = self.nodes.insert(TrieNode { parent, segment, children: 0, exact: NONE, multi: NONE });
        let edge = Edge { parent, segment, child };
        let rehash = |edge: &Edge| hasher.hash_one((edge.parent, edge.segment));
        self.edges.insert_unique(rehash(&edge), edge, rehash);
        if let Some(node) = self.nodes.get_mut(parent) {
            node.children += 1;
        }
        child
    }

    /// Removes nodes that hold nothing, from `at` upwards.
    fn prune(&mut self, mut at: u32, hasher: &RandomState) {
        while at != ROOT {
            let Some(node) = self.nodes.get(at) else { return };
            if node.children > 0 || node.exact != NONE || node.multi != NONE {
                return;
            }
            let (parent, segment) = (node.parent, node.segment);
            let hash = hasher.hash_one((parent, segment));
            if let Ok(edge) = self.edges.find_entry(hash, |edge| edge.child == at) {
                edge.remove();
            }
            self.nodes.remove(at);
            self.forget_segment(segment, hasher);
            if let Some(node) = self.nodes.get_mut(parent) {
                node.children -= 1;
            }
            at = parent;
        }
    }

    fn forget_segment(&mut self, number: u32, hasher: &RandomState) {
        let Some(segment) = self.segments.get_mut(number) else { return };
        segment.uses -= 1;
        if segment.uses > 0 {
            return;
        }
        let hash = hasher.hash_one(&*segment.text);
        if let Ok(entry) = self.names.find_entry(hash, |other| *other == number) {
            entry.remove();
        }
        self.segments.remove(number);
    }
}
