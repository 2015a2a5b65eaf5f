//! The stores' twin in memory, beside a runtime for what the broker reads.

use std::{ops::Deref, sync::Arc};

use gateway_core::{Journal as _, QueueEntry, QueueId, QueueOp};
use store::MemoryState;
use tokio::runtime::{Builder, Handle, Runtime};

use super::*;

thread_local! {
    /// The runtime of one test: each test has a thread of its own.
    static RUNTIME: Runtime = Builder::new_current_thread().build().expect("a runtime");
}

fn runtime() -> Handle {
    RUNTIME.with(|runtime| runtime.handle().clone())
}

/// Lets the broker take up the pages it has read.
pub(super) fn go_on() {
    RUNTIME.with(|runtime| runtime.block_on(tokio::task::yield_now()));
}

/// A disk whose commits a test makes.
#[derive(Clone, Default)]
pub(super) struct Disk(pub(super) Arc<MemoryState>);

impl Deref for Disk {
    type Target = MemoryState;

    fn deref(&self) -> &MemoryState {
        &self.0
    }
}

impl Disk {
    /// One that writes at once.
    pub(super) fn prompt() -> Self {
        Self(Arc::new(MemoryState::prompt()))
    }

    pub(super) fn stores(&self) -> Stores {
        Stores { state: Arc::clone(&self.0) as _, runtime: runtime() }
    }

    pub(super) fn append(&self, queue: QueueId, place: u64, message: &Message<'_>, qos: QoS) {
        let commit = message.commit().cloned();
        let entry = QueueEntry::new(queue, place, Arc::clone(message.share()), qos, commit);
        self.submit(QueueOp::Append(Arc::new(entry)));
    }

    pub(super) fn set_failing(&self, failing: bool) {
        self.fault(|faults| faults.failing = failing);
    }

    pub(super) fn set_unreadable(&self, unreadable: bool) {
        self.fault(|faults| faults.unreadable = unreadable);
    }

    /// While on, reads wait for [`Self::answer`].
    pub(super) fn set_holding(&self, holding: bool) {
        self.fault(|faults| faults.holding = holding);
    }

    pub(super) fn answer(&self) {
        self.0.answer();
        go_on();
    }

    /// Writes what was submitted, or fails to. False if there was nothing to do.
    pub(super) fn commit(&self) -> bool {
        let busy = self.0.commit();
        go_on();
        busy
    }

    /// Payloads of a queue, in order.
    pub(super) fn payloads(&self, queue: QueueId) -> Vec<String> {
        self.contents(|disk| {
            let entries = disk.entries.range((queue, 0)..=(queue, u64::MAX));
            let messages = entries.filter_map(|(_, (entry, _))| entry.message.as_ref());
            messages.map(|message| String::from_utf8_lossy(&message.payload).into_owned()).collect()
        })
    }

    /// Removes the first entry as expired; returns what it cost.
    pub(super) fn expire_first(&self, queue: QueueId) -> u64 {
        let entry = self.change(|disk| {
            let key = *disk.entries.range((queue, 0)..).next().expect("an entry").0;
            disk.entries.remove(&key)
        });
        entry.and_then(|(entry, _)| entry.message).expect("a message").cost() as u64
    }

    /// Returns the number of references to the retained message of a topic, the disk's included.
    pub(super) fn references(&self, topic: &str) -> usize {
        self.contents(|disk| Arc::strong_count(&disk.retained[topic]))
    }

    /// Number of sessions.
    pub(super) fn sessions(&self) -> usize {
        self.contents(|disk| disk.sessions.len())
    }

    /// Payloads of the wills in sessions.
    pub(super) fn wills(&self) -> Vec<String> {
        self.contents(|disk| {
            let wills = disk.sessions.values().filter_map(|session| session.will.as_ref());
            wills.map(|will| String::from_utf8_lossy(&will.message.payload).into_owned()).collect()
        })
    }
}
