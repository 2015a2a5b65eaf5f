//! While memory is short, the largest holders give some back.

use std::{cmp::Reverse, sync::atomic::Ordering::Relaxed};

use super::account::FLOOR;
use crate::{Broker, sessions::TURN};

/// Slots visited by one tick.
const LOOK: u32 = 64 * TURN;
/// Sessions that one tick asks to give memory back.
const ASKED: usize = 64;
/// Sessions that hold less are not asked.
const LARGE: usize = 4 * FLOOR;

/// Shedding.
impl Broker {
    /// Asks the largest holders in the next stretch of slots, one after the other, until memory is no longer short.
    pub(crate) fn shed(&self) {
        let inner = &*self.inner;
        if !inner.account.is_short() {
            return;
        }
        let end = inner.slots.end();
        let from = inner.shed_from.load(Relaxed);
        let from = if from < end { from } else { 0 };
        inner.shed_from.store(from + LOOK, Relaxed);
        let mut large = Vec::new();
        for turn in (from..end.min(from + LOOK)).step_by(TURN as usize) {
            for session in inner.slots.sessions(turn, TURN) {
                let held = session.held();
                if held >= LARGE {
                    large.push((held, session));
                }
            }
        }
        large.sort_unstable_by_key(|(held, _)| Reverse(*held));
        for (_, session) in large.into_iter().take(ASKED) {
            if !inner.account.is_short() {
                return;
            }
            session.give_back();
        }
    }
}
