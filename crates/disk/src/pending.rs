//! The pending change of one key, in which a later one replaces an earlier.

/// The waiting changes of one key. Whoever waits for an offered value is told when it cannot be written, and it is
/// forgotten then; all else is written some time.
#[derive(Debug)]
pub(super) struct KeyChange<T> {
    /// Write this, or remove what is there.
    kept: Option<Option<T>>,
    /// Write this instead, but only once: it is dropped if the write fails.
    offered: Option<T>,
}

impl<T> Default for KeyChange<T> {
    fn default() -> Self {
        Self { kept: None, offered: None }
    }
}

impl<T> KeyChange<T> {
    /// To be written, tried until it succeeds. `None` removes.
    pub(super) fn keep(&mut self, value: Option<T>) {
        *self = Self { kept: Some(value), offered: None };
    }

    /// To be written; tried once.
    pub(super) fn offer(&mut self, value: T) {
        self.offered = Some(value);
    }

    /// Returns the value to write (`Some(None)`: removed), if there is one.
    pub(super) fn target(&self) -> Option<Option<&T>> {
        match &self.offered {
            Some(value) => Some(Some(value)),
            None => self.kept.as_ref().map(Option::as_ref),
        }
    }

    /// Returns whether there is a new value to write that somebody waits for.
    pub(super) fn is_offer(&self) -> bool {
        self.offered.is_some()
    }

    /// Adds what came later.
    pub(super) fn merge(&mut self, later: Self) {
        if later.kept.is_some() {
            *self = later;
        } else if later.offered.is_some() {
            self.offered = later.offered;
        }
    }

    /// The offered value could not be written. Whether something is left to write.
    pub(super) fn fail(&mut self) -> bool {
        self.offered = None;
        self.kept.is_some()
    }

    /// The values in memory.
    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.kept.iter().flatten().chain(&self.offered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_offer_leaves_what_was_to_be_kept() {
        let mut change = KeyChange::default();
        change.offer(1);
        assert!(!change.fail() && change.target().is_none());
        change.keep(Some(2));
        change.offer(3);
        assert_eq!(change.target(), Some(Some(&3)));
        assert!(change.fail());
        assert_eq!(change.target(), Some(Some(&2)));
        let mut later = KeyChange::default();
        later.offer(4);
        change.merge(later);
        assert_eq!(change.target(), Some(Some(&4)));
        let mut later = KeyChange::default();
        later.keep(None);
        change.merge(later);
        assert_eq!(change.target(), Some(None), "a removal that came later wins over an offer");
    }
}
