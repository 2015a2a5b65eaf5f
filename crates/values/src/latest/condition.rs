//! Condition of the store, and one line in the log for each change of it.

use std::sync::Arc;

use tokio::{sync::watch, time::Instant};

use store::StoreError;

/// Condition of the store, as the last contact showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreCondition {
    /// The store was not asked yet.
    Unknown,
    /// The store takes values.
    Up,
    /// The store takes no values.
    Down {
        /// Why the last contact failed; for operators, on one line.
        reason: Arc<str>,
        /// Since when.
        since: Instant,
    },
}

impl StoreCondition {
    /// Why values do not go to the store; `None` if they do.
    pub fn trouble(&self) -> Option<&str> {
        match self {
            Self::Unknown => Some("not reached yet"),
            Self::Up => None,
            Self::Down { reason, .. } => Some(reason),
        }
    }
}

/// The [`StoreCondition`], for those who wait for it to change.
pub(super) struct ConditionWatch(watch::Sender<StoreCondition>);

impl ConditionWatch {
    /// `remote`: nothing is known before the first contact.
    pub(super) fn new(remote: bool) -> Self {
        Self(watch::Sender::new(if remote { StoreCondition::Unknown } else { StoreCondition::Up }))
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<StoreCondition> {
        self.0.subscribe()
    }

    pub(super) fn is_up(&self) -> bool {
        *self.0.borrow() == StoreCondition::Up
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(*self.0.borrow(), StoreCondition::Down { .. })
    }

    /// A contact failed; `waiting` values are in memory.
    pub(super) fn failed(&self, error: &StoreError, waiting: usize) {
        let reason: Arc<str> = error.to_string().replace(['\r', '\n'], " ").into();
        if self.is_down() {
            tracing::debug!(%error, waiting, "latest values still cannot be written");
            // Nobody is woken: the store is as it was, but for the reason.
            self.0.send_if_modified(|condition| {
                if let StoreCondition::Down { reason: last, .. } = condition {
                    *last = reason;
                }
                false
            });
            return;
        }
        tracing::warn!(%error, waiting, "latest values cannot be written, they wait in memory");
        self.0.send_replace(StoreCondition::Down { reason, since: Instant::now() });
    }

    /// All that waited, `waiting` values, was written, or a sign of life came.
    pub(super) fn succeeded(&self, waiting: usize) {
        if self.is_up() {
            return;
        }
        match self.0.send_replace(StoreCondition::Up) {
            StoreCondition::Down { since, .. } => {
                tracing::info!(waiting, after = ?since.elapsed(), "latest values are written again");
            }
            _ => tracing::info!("the store of latest values answers"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The failure: operators read why the store went away, while it is another fault that keeps it away.
    #[test]
    fn the_reason_is_that_of_the_last_failure() {
        let condition = ConditionWatch::new(true);
        let mut seen = condition.subscribe();
        for (number, reason) in ["refused", "no keyspace"].into_iter().enumerate() {
            condition.failed(&StoreError::Unavailable(reason.to_owned()), 1);
            assert!(seen.borrow().trouble().is_some_and(|trouble| trouble.contains(reason)));
            assert_eq!(seen.has_changed().unwrap(), number == 0, "one change of state");
            seen.mark_unchanged();
        }
        condition.succeeded(1);
        assert_eq!(seen.borrow_and_update().trouble(), None);
    }
}
