//! Reads of queues. Pages of a shared group's queue are read for no particular task: a task of their own hands the store's answer
//! on, so that it does not matter which task asked, or whether it is still there.

use std::sync::Weak;

use gateway_core::{ClientId, JournalPage, OriginKind, QueueId, QueueOp, StoredEntry};
use store::{Loaded, StoreError};

use super::{Durable, READ_MESSAGES};
use crate::counters::count;

impl Durable {
    /// Runs a short future in the background. It may be dropped unfinished when the process ends.
    pub(crate) fn run(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.stores.runtime.spawn(future);
    }

    /// Reads a group's queue from place `from` on, and has the group given what was read.
    pub(crate) fn read_group(&self, group: u32, queue: QueueId, from: u64) {
        let answer = self.state().load(queue, from, READ_MESSAGES, JournalPage::BYTES);
        let answers = Weak::clone(&self.answers);
        self.run(async move {
            let result = answer.await;
            if let Some(answers) = answers.upgrade() {
                answers.take_read(group, queue, result);
            }
        });
    }

    /// Reads a session's queue from place `from` on: about `bytes` of it, but at least one message. Cancel safe.
    pub(crate) async fn read_session(
        &self,
        client_id: &ClientId,
        queue: QueueId,
        from: u64,
        bytes: usize,
    ) -> Result<JournalPage, StoreError> {
        let Loaded { entries, next, end, damaged } =
            self.state().load(queue, from, READ_MESSAGES, bytes).await?;
        if damaged > 0 {
            tracing::error!(%client_id, queue = queue.0, damaged, "messages of this session are damaged and were skipped");
        }
        let entries = self.allowed(queue, entries);
        let entries = entries.into_iter().map(|entry| self.read_back(entry)).collect();
        Ok(JournalPage { entries, next, end })
    }

    /// Keeps what may be delivered of what was read from a queue and removes the rest: in non-broker mode, what devices
    /// had sent.
    pub(crate) fn allowed(&self, queue: QueueId, mut entries: Vec<StoredEntry>) -> Vec<StoredEntry> {
        if self.non_broker {
            entries.retain(|entry| {
                let blocked =
                    entry.message.as_ref().is_some_and(|message| message.kind == OriginKind::Device);
                if blocked {
                    count(|c| c.non_broker_blocked.add(1));
                    self.state().submit(QueueOp::Remove { queue, seq: entry.seq, unit: None });
                }
                !blocked
            });
        }
        entries
    }

    fn read_back(&self, entry: StoredEntry) -> StoredEntry<u32> {
        entry.with_group(|group| {
            let group = Some(group).filter(|group| *group != QueueId::NONE);
            group.and_then(|group| self.group_of(group)).unwrap_or(0)
        })
    }
}
