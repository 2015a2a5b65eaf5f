//! Turns: what a thread does between two waits, and the receivers that have something to write then.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use gateway_core::Effort;

use super::MatchCaches;
use crate::Target;

/// Everything that a thread collects between two waits.
#[derive(Default)]
pub struct Turn {
    /// Targets with bytes to flush.
    pub dirty: Vec<Arc<dyn Target>>,
    /// This thread's match caches.
    pub(crate) matches: MatchCaches,
    /// Effort that the running task may still make before it yields. Renewed at the beginning of each poll.
    pub effort: Effort,
}

impl Turn {
    /// Lets go of receivers of brokers that have ended. Worth calling now and then on a thread that keeps its turn.
    pub fn trim(&mut self) {
        self.matches.trim();
    }

    /// Flushes the targets that joined the list since it had `from` of them, so that a message need not wait for the
    /// rest of the turn. They stay on the list, and what further deliveries leave goes out at the turn's end: a turn
    /// writes to a target at most twice.
    pub fn flush_early(&mut self, from: usize) {
        self.effort.spend_each(Effort::CALL, self.dirty.len().saturating_sub(from));
        for target in self.dirty.get(from..).unwrap_or_default() {
            let _ = catch_unwind(AssertUnwindSafe(|| target.flush_early()));
        }
    }

    /// Flushes every target on the list, in order, so that deliveries go out before the acknowledgement that follows
    /// them. Call it before the turn ends. A target that panics keeps its bytes; the others are flushed.
    pub fn flush(&mut self) {
        // Draining nothing costs 50 instructions.
        if self.dirty.is_empty() {
            return;
        }
        self.effort.spend_each(Effort::CALL, self.dirty.len());
        for target in self.dirty.drain(..) {
            // The panic hook has reported it.
            let _ = catch_unwind(AssertUnwindSafe(|| target.flush()));
        }
    }
}

/// A turn that a panic cuts short is flushed all the same: a target on this list is put on no other until it is
/// flushed.
impl Drop for Turn {
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use gateway_core::{Message, Offer, Outcome};

    use super::*;
    use crate::Delivered;

    /// Counts its flushes; one that is `broken` panics.
    #[derive(Default)]
    struct Flushed {
        count: AtomicUsize,
        early: AtomicUsize,
        broken: bool,
    }

    impl Target for Flushed {
        fn deliver(&self, _: &Message<'_>, _: Offer<'_>) -> Delivered {
            Delivered { outcome: Outcome::Sent, flush: true }
        }
        fn flush(self: Arc<Self>) {
            self.count.fetch_add(1, SeqCst);
            assert!(!self.broken, "a target that fails");
        }
        fn flush_early(&self) {
            self.early.fetch_add(1, SeqCst);
            assert!(!self.broken, "a target that fails");
        }
        fn is_online(&self) -> bool {
            true
        }
        fn load(&self) -> usize {
            0
        }
    }

    #[test]
    fn a_panic_between_delivery_and_flush_leaves_no_target_unflushed() {
        let targets: [Arc<Flushed>; 3] = Default::default();
        let turn_of = |targets: &[Arc<Flushed>]| {
            let mut turn = Turn::default();
            turn.dirty.extend(targets.iter().map(|target| Arc::clone(target) as Arc<dyn Target>));
            turn
        };
        let result = catch_unwind(AssertUnwindSafe(|| {
            let _turn = turn_of(&targets);
            panic!("handling a packet fails");
        }));
        assert!(result.is_err());
        assert!(targets.iter().all(|target| target.count.load(SeqCst) == 1));
    }

    /// The failure: a turn with a thousand receivers takes milliseconds that no task is charged for.
    #[test]
    fn what_is_written_is_charged_to_the_turn_that_writes() {
        let mut turn = Turn::default();
        turn.dirty.extend((0..10).map(|_| Arc::<Flushed>::default() as Arc<dyn Target>));
        turn.flush_early(7);
        assert_eq!(turn.effort.spent(), 3 * u64::from(Effort::CALL));
        turn.flush();
        turn.flush();
        assert_eq!(turn.effort.spent(), 13 * u64::from(Effort::CALL));
    }

    #[test]
    fn a_target_that_panics_when_flushed_keeps_no_other_from_it() {
        let broken = Arc::new(Flushed { broken: true, ..Flushed::default() });
        let other = Arc::new(Flushed::default());
        let mut turn = Turn::default();
        turn.dirty.extend([Arc::clone(&broken) as Arc<dyn Target>, Arc::clone(&other) as Arc<dyn Target>]);
        turn.flush_early(0);
        assert_eq!((broken.early.load(SeqCst), other.early.load(SeqCst)), (1, 1));
        turn.flush();
        assert_eq!((broken.count.load(SeqCst), other.count.load(SeqCst)), (1, 1));
        // The list may have been flushed since its length was noted.
        turn.flush_early(2);
        assert_eq!((broken.early.load(SeqCst), other.early.load(SeqCst)), (1, 1));
    }
}
