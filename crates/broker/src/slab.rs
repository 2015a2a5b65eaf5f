//! Numbered storage that grows by chunks, so that a large table is never copied and values never move.

const CHUNK: usize = 256;

/// Values by number. Numbers of removed values are reused.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Vec<Vec<Option<T>>>,
    free: Vec<u32>,
    next: u32,
}

impl<T> Slab<T> {
    /// An empty slab whose first number is `first`.
    pub(super) fn starting_at(first: u32) -> Self {
        let mut slab = Self { chunks: Vec::new(), free: Vec::new(), next: 0 };
        while slab.next < first {
            slab.extend();
        }
        slab
    }

    /// Takes a number that has no value yet; [`Self::set`] gives it one.
    pub(super) fn reserve(&mut self) -> u32 {
        match self.free.pop() {
            Some(number) => number,
            None => self.extend(),
        }
    }

    /// Puts a value at a reserved number.
    pub(super) fn set(&mut self, number: u32, value: T) {
        if let Some(place) = self.place(number) {
            *place = Some(value);
        }
    }

    /// Stores a value and returns its number.
    pub(super) fn insert(&mut self, value: T) -> u32 {
        let number = self.reserve();
        self.set(number, value);
        number
    }

    /// The value at `number`.
    pub(super) fn get(&self, number: u32) -> Option<&T> {
        let number = number as usize;
        self.chunks.get(number / CHUNK)?.get(number % CHUNK)?.as_ref()
    }

    /// The values among `count` numbers from `from`, with their numbers.
    pub(super) fn range(&self, from: u32, count: u32) -> impl Iterator<Item = (u32, &T)> {
        let end = from.saturating_add(count).min(self.next);
        (from..end).filter_map(|number| Some((number, self.get(number)?)))
    }

    /// The first number that was never given out.
    pub(super) fn end(&self) -> u32 {
        self.next
    }

    /// The value at `number`, to change it.
    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.place(number)?.as_mut()
    }

    /// Frees a reserved number, with or without a value.
    pub(super) fn remove(&mut self, number: u32) -> Option<T> {
        let value = self.place(number)?.take();
        self.free.push(number);
        value
    }

    fn place(&mut self, number: u32) -> Option<&mut Option<T>> {
        let number = number as usize;
        self.chunks.get_mut(number / CHUNK)?.get_mut(number % CHUNK)
    }

    fn extend(&mut self) -> u32 {
        let number = self.next;
        self.next += 1;
        if (number as usize).is_multiple_of(CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        if let Some(chunk) = self.chunks.last_mut() {
            chunk.push(None);
        }
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_and_are_reused_after_removal() {
        let mut slab = Slab::starting_at(1);
        let numbers: Vec<u32> = (0..600).map(|value| slab.insert(value)).collect();
        assert_eq!(numbers[0], 1);
        assert_eq!(slab.get(numbers[599]), Some(&599));
        assert_eq!(slab.remove(numbers[300]), Some(300));
        assert_eq!(slab.get(numbers[300]), None);
        assert_eq!(slab.reserve(), numbers[300]);
        slab.set(numbers[300], 7);
        assert_eq!(slab.get_mut(numbers[300]), Some(&mut 7));
        let numbers: Vec<u32> = slab.range(299, 3).map(|(number, _)| number).collect();
        assert_eq!(numbers, [299, 300, 301]);
        assert_eq!((slab.range(600, 9).count(), slab.end()), (1, 601));
        assert_eq!(slab.get(0), None);
        assert_eq!(slab.get(100_000), None);
    }
}
