//! What is read from disk for no task in particular: pages of a shared group's queue. What the store answers goes where
//! it belongs in the store's own thread, so that it does not matter who asked, or whether that is still there.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire},
    },
    task::{Context, Wake, Waker},
};

use gateway_core::{Page, QueueId};
use parking_lot::Mutex;
use store::{BoxFuture, Loaded, StoreError};

use crate::{
    Inner,
    durable::{Durable, READ_MESSAGES},
    shared::{GroupPage, Waiting},
};

/// A future that goes on by itself, in the threads of those who wake it.
struct Errand {
    /// None when it is done.
    future: Mutex<Option<BoxFuture<'static, ()>>>,
    /// Wakes that were not followed by a poll yet; who makes it 1 polls.
    wakes: AtomicUsize,
}

/// Lets a short future go on by itself. The caller holds no lock that it takes.
pub(crate) fn run(future: impl Future<Output = ()> + Send + 'static) {
    Arc::new(Errand { future: Mutex::new(Some(Box::pin(future))), wakes: AtomicUsize::new(0) }).wake();
}

impl Wake for Errand {
    fn wake(self: Arc<Self>) {
        if self.wakes.fetch_add(1, AcqRel) > 0 {
            // Somebody polls, and will do it again.
            return;
        }
        let waker = Waker::from(Arc::clone(&self));
        loop {
            let seen = self.wakes.load(Acquire);
            let mut place = self.future.lock();
            let Some(future) = place.as_mut() else { return };
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                // Its count stays, so that nobody comes here again.
                *place = None;
                return;
            }
            drop(place);
            if self.wakes.fetch_sub(seen, AcqRel) == seen {
                return;
            }
        }
    }
}

impl Durable {
    /// Reads a group's queue from place `from` on, and gives it what was read. The caller holds no lock of the group.
    pub(crate) fn read_group(&self, group: u32, queue: QueueId, from: u64) {
        let answer = self.queues().load(queue, from, READ_MESSAGES, Page::BYTES);
        let inner = Weak::clone(&self.inner);
        run(async move {
            let result = answer.await;
            if let Some(inner) = inner.upgrade() {
                inner.read(group, queue, result);
            }
        });
    }
}

impl Inner {
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
        let waiting = |message, place| Waiting { message, place };
        let messages = entries.into_iter().filter_map(|entry| Some(waiting(entry.message?, entry.seq)));
        GroupPage { messages: messages.collect(), next, end }
    }
}
