//! While memory is short, the largest holders give some back.

use std::{
    cmp::Reverse,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use super::slots::{Slots, TURN};
use crate::memory::{Account, FLOOR};

/// Slots visited by one tick.
const LOOK: u32 = 64 * TURN;
/// Sessions that one tick asks to give memory back.
const ASKED: usize = 64;
/// Sessions that hold less are not asked.
const LARGE: usize = 4 * FLOOR;

/// Progress of the search for large holders.
#[derive(Default)]
pub(crate) struct Shedding {
    /// The slot where the next look begins.
    from: AtomicU32,
}

impl Shedding {
    /// Asks the largest holders in the next stretch of slots, one after the other, until memory is no longer short.
    pub(crate) fn shed(&self, slots: &Slots, account: &Account) {
        if !account.is_short() {
            return;
        }
        let end = slots.end();
        let from = self.from.load(Relaxed);
        let from = if from < end { from } else { 0 };
        self.from.store(from + LOOK, Relaxed);
        let mut large = Vec::new();
        for turn in (from..end.min(from + LOOK)).step_by(TURN as usize) {
            for session in slots.sessions(turn, TURN) {
                let held = session.held();
                if held >= LARGE {
                    large.push((held, session));
                }
            }
        }
        large.sort_unstable_by_key(|(held, _)| Reverse(*held));
        for (_, session) in large.into_iter().take(ASKED) {
            if !account.is_short() {
                return;
            }
            session.give_back();
        }
    }
}
