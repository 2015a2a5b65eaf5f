//! The wills of one session while they are being published.

use std::sync::Arc;

use gateway_core::Commit;

use crate::Will;

/// Wills of one session that are being published. Its record has the first of them until all are safe: the others are
/// of connections that had not been answered yet.
pub(crate) struct Leaving {
    will: Will,
    /// Number of these wills, plus one while the session's end keeps the record.
    left: u32,
    waiting: Option<Arc<Commit>>,
}

impl Leaving {
    pub(crate) fn new(will: Will) -> Self {
        Self { will, left: 1, waiting: None }
    }

    pub(crate) fn will(&self) -> &Will {
        &self.will
    }

    pub(crate) fn hold(&mut self) {
        self.left += 1;
    }

    /// One fewer; whether it was the last.
    pub(crate) fn release(&mut self) -> bool {
        self.left -= 1;
        self.left == 0
    }

    /// Adds a part to `commit` that is done when the record has changed. Whoever waited before was taken over and is
    /// refused.
    pub(crate) fn wait(&mut self, commit: &Arc<Commit>) {
        if let Some(earlier) = self.waiting.replace(commit.part()) {
            earlier.refuse();
        }
    }

    pub(crate) fn into_waiting(self) -> Option<Arc<Commit>> {
        self.waiting
    }
}
