//! Wildcard filters by shape: level count, positions of `+`, whether it ends in `#`.
//!
//! All filters of one shape that match a topic agree on their literal levels, so a topic needs one hash probe per
//! shape. Peers choose the shapes, so there are at most [`MAX_SHAPES`]; filters of further shapes go to a [`Trie`].
//! Levels are hashed with random keys, so that a peer cannot construct collisions.

use ahash::RandomState;
use hashbrown::HashTable;

use super::trie::Trie;

/// Most shapes with a table of their own.
pub(super) const MAX_SHAPES: usize = 32;
/// Filters with more levels go to the trie.
const MAX_LEVELS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WildcardShape {
    /// Levels before a final `#`.
    levels: usize,
    /// Bit n: level n is `+`.
    plus: u64,
    /// Ends in `#`.
    multi: bool,
}

impl WildcardShape {
    fn of(filter: &str) -> Option<Self> {
        let mut shape = Self { levels: 0, plus: 0, multi: false };
        for level in filter.split('/') {
            if level == "#" {
                shape.multi = true;
                break;
            }
            if shape.levels == MAX_LEVELS {
                return None;
            }
            if level == "+" {
                shape.plus |= 1 << shape.levels;
            }
            shape.levels += 1;
        }
        Some(shape)
    }

    /// Returns whether a topic of `depth` levels can match; `system` is a topic that starts with `$` [MQTT-4.7.2-1].
    fn can_match(self, depth: usize, system: bool) -> bool {
        if system && (self.plus & 1 == 1 || self.levels == 0) {
            return false;
        }
        // `a/#` matches `a` too, hence not `>` [MQTT-4.7.1-2].
        if self.multi { depth >= self.levels } else { depth == self.levels }
    }

    /// Hash of the literal levels.
    fn hash(self, levels: &[u64]) -> u64 {
        let mut hash = 0u64;
        for (position, level) in levels[..self.levels].iter().enumerate() {
            let level = if self.plus >> position & 1 == 1 { 1 } else { *level };
            hash = (hash.rotate_left(23) ^ level).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        hash ^ hash >> 32
    }
}

/// Hashes of the first levels of a topic or filter.
struct LevelHashes {
    hashes: [u64; MAX_LEVELS],
    depth: usize,
}

impl LevelHashes {
    /// Inline, so that the array is not copied.
    #[inline]
    fn of(text: &str, hasher: &RandomState) -> Self {
        let mut levels = Self { hashes: [0; MAX_LEVELS], depth: 0 };
        // Levels are short: comparing bytes finds their ends faster than `str::split`.
        for level in text.as_bytes().split(|byte| *byte == b'/') {
            if let Some(hash) = levels.hashes.get_mut(levels.depth) {
                *hash = hasher.hash_one(level);
            }
            levels.depth += 1;
        }
        levels
    }
}

struct ShapeTable {
    shape: WildcardShape,
    /// Literal hash and filter number.
    filters: HashTable<(u64, u32)>,
}

/// Filters with `+` or `#`, by number.
#[derive(Default)]
pub(super) struct Wildcards {
    shapes: Vec<ShapeTable>,
    trie: Trie,
}

impl Wildcards {
    /// Adds a filter that is not there yet.
    pub(super) fn insert(&mut self, number: u32, filter: &str, hasher: &RandomState) {
        let Some(shape) = WildcardShape::of(filter) else {
            self.trie.insert(number, filter, hasher);
            return;
        };
        let position = self.shapes.iter().position(|table| table.shape == shape);
        let position = match position {
            Some(position) => position,
            None if self.shapes.len() < MAX_SHAPES => {
                self.shapes.push(ShapeTable { shape, filters: HashTable::new() });
                self.shapes.len() - 1
            }
            None => {
                self.trie.insert(number, filter, hasher);
                return;
            }
        };
        let hash = shape.hash(&LevelHashes::of(filter, hasher).hashes);
        self.shapes[position].filters.insert_unique(hash, (hash, number), |(hash, _)| *hash);
    }

    /// Removes a filter.
    pub(super) fn remove(&mut self, number: u32, filter: &str, hasher: &RandomState) {
        let Some(shape) = WildcardShape::of(filter) else {
            self.trie.remove(filter, hasher);
            return;
        };
        // The shape may have got its table only after this filter went to the trie: look in both.
        if let Some(position) = self.shapes.iter().position(|table| table.shape == shape) {
            let filters = &mut self.shapes[position].filters;
            let hash = shape.hash(&LevelHashes::of(filter, hasher).hashes);
            if let Ok(entry) = filters.find_entry(hash, |(_, other)| *other == number) {
                entry.remove();
                if filters.is_empty() {
                    self.shapes.swap_remove(position);
                } else if filters.capacity() > 1024 && filters.len() * 4 < filters.capacity() {
                    filters.shrink_to(filters.len() * 2, |(hash, _)| *hash);
                }
                return;
            }
        }
        self.trie.remove(filter, hasher);
    }

    /// Calls `found` with the number of each filter that matches `topic`. `matches` decides whether a filter of equal
    /// hash really matches. Returns how many tables and nodes it visited.
    pub(super) fn find(
        &self,
        topic: &str,
        hasher: &RandomState,
        matches: impl Fn(u32) -> bool,
        mut found: impl FnMut(u32),
    ) -> usize {
        if !self.shapes.is_empty() {
            let levels = LevelHashes::of(topic, hasher);
            let system = topic.starts_with('$');
            for table in &self.shapes {
                if !table.shape.can_match(levels.depth, system) {
                    continue;
                }
                let hash = table.shape.hash(&levels.hashes);
                let hit = table.filters.find(hash, |(other, number)| *other == hash && matches(*number));
                if let Some((_, number)) = hit {
                    found(*number);
                }
            }
        }
        self.shapes.len() + self.trie.find(topic, hasher, found)
    }

    #[cfg(test)]
    pub(super) fn shapes(&self) -> usize {
        self.shapes.len()
    }

    #[cfg(test)]
    pub(super) fn trie_is_empty(&self) -> bool {
        self.trie.is_empty()
    }
}
