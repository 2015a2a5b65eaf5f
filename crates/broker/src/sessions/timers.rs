//! Times at which sessions without a connection expire or publish their will: one entry per such session.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::Timestamp;
use parking_lot::Mutex;

use super::core::SessionState;
use crate::Session;

/// Sessions by their next deadline. The key is computed from the session's state, so that nobody has to remember it.
#[derive(Default)]
pub(crate) struct SessionTimers {
    due: Mutex<BTreeMap<(Timestamp, u32), Arc<dyn Session>>>,
}

impl SessionTimers {
    /// Changes `state` and moves the session's entry along. The caller holds the state's lock.
    pub(crate) fn update<R>(
        &self,
        session: &Arc<dyn Session>,
        state: &mut SessionState,
        change: impl FnOnce(&mut SessionState) -> R,
    ) -> R {
        let before = state.deadline();
        let result = change(state);
        let after = state.deadline();
        if before == after {
            return result;
        }
        let slot = session.core().slot();
        let mut due = self.due.lock();
        let removed = before.and_then(|at| due.remove(&(at, slot)));
        if let Some(at) = after {
            due.insert((at, slot), Arc::clone(session));
        }
        drop(due);
        drop(removed);
        result
    }

    /// Adds a session of an earlier process. The caller holds the state's lock.
    pub(crate) fn schedule(&self, session: &Arc<dyn Session>, state: &SessionState) {
        if let Some(at) = state.deadline() {
            self.due.lock().insert((at, session.core().slot()), Arc::clone(session));
        }
    }

    /// The earliest session whose deadline has passed, still scheduled.
    pub(crate) fn first_due(&self, now: Timestamp) -> Option<(Timestamp, Arc<dyn Session>)> {
        let due = self.due.lock();
        let ((at, _), session) = due.first_key_value()?;
        (*at <= now).then(|| (*at, Arc::clone(session)))
    }

    /// Lets go of all sessions.
    pub(crate) fn clear(&self) {
        let due = std::mem::take(&mut *self.due.lock());
        drop(due);
    }

    /// The session whose deadline is nearest.
    pub(crate) fn first(&self) -> Option<Arc<dyn Session>> {
        self.due.lock().first_key_value().map(|(_, session)| Arc::clone(session))
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.due.lock().len()
    }
}
