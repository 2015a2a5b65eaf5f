//! Reads from disk that serve no particular task: pages of a shared group's queue. A task of their own hands the store's answer
//! to the group, so that it does not matter which task asked, or whether it is still there.

use std::sync::Weak;

use gateway_core::{JournalPage, QueueId};
use store::{Loaded, StoreError};

use super::{Durable, READ_MESSAGES};
use crate::{
    BrokerInner,
    shared::{GroupPage, QueuedMessage},
};

impl Durable {
    /// Runs a short future in the background. It may be dropped unfinished when the process ends.
    pub(crate) fn run(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.stores.runtime.spawn(future);
    }

    /// Reads a group's queue from place `from` on, and gives it what was read.
    pub(crate) fn read_group(&self, group: u32, queue: QueueId, from: u64) {
        let answer = self.queues().load(queue, from, READ_MESSAGES, JournalPage::BYTES);
        let inner = Weak::clone(&self.inner);
        self.run(async move {
            let result = answer.await;
            if let Some(inner) = inner.upgrade() {
                inner.read(group, queue, result);
            }
        });
    }
}

impl BrokerInner {
    fn read(&self, group: u32, queue: QueueId, result: Result<Loaded, StoreError>) {
        let Some((durable, found)) = self.durable.as_ref().zip(self.index.group(group)) else { return };
        match result {
            Ok(loaded) => {
                let page = self.group_page(durable, queue, found.full_name(), loaded);
                found.loaded(page, &self.account);
            }
            Err(error) => {
                gateway_core::warn_limited!(group = found.full_name(), %error, "queue cannot be read, trying again");
                durable.stall_reading(group);
            }
        }
    }

    fn group_page(&self, durable: &Durable, queue: QueueId, name: &str, loaded: Loaded) -> GroupPage {
        let Loaded { entries, next, end, damaged } = loaded;
        if damaged > 0 {
            tracing::error!(
                group = name,
                queue = queue.0,
                damaged,
                "messages of this group are damaged and were skipped"
            );
        }
        let entries = self.allowed(durable, queue, entries);
        let waiting = |message, place| QueuedMessage { message, place };
        let messages = entries.into_iter().filter_map(|entry| Some(waiting(entry.message?, entry.seq)));
        GroupPage { messages: messages.collect(), next, end }
    }
}
