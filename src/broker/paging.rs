//! Reading a shared group's queue from disk. No task waits for it: what the store answers goes to the group in the
//! store's own thread, so that it does not matter which member asked, or whether that is still there.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire},
    },
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::Mutex;

use super::{
    Inner,
    durable::{Durable, READ_MESSAGES},
    shared::{GroupPage, Waiting},
};
use crate::{
    store::{BoxFuture, Loaded, StoreError},
    types::{Page, QueueId},
};

/// A page that is being read.
struct Reading {
    inner: Weak<Inner>,
    group: u32,
    queue: QueueId,
    /// None when it is done.
    answer: Mutex<Option<BoxFuture<'static, Result<Loaded, StoreError>>>>,
    /// Wakes that were not followed by a poll yet; who makes it 1 polls.
    wakes: AtomicUsize,
}

impl Durable {
    /// Reads a group's queue from place `from` on, and gives it what was read. The caller holds no lock of the group.
    pub(super) fn read_group(&self, group: u32, queue: QueueId, from: u64) {
        let answer = self.queues().load(queue, from, READ_MESSAGES, Page::BYTES);
        let (inner, answer) = (self.inner.clone(), Mutex::new(Some(answer)));
        Arc::new(Reading { inner, group, queue, answer, wakes: AtomicUsize::new(0) }).wake();
    }
}

impl Wake for Reading {
    fn wake(self: Arc<Self>) {
        if self.wakes.fetch_add(1, AcqRel) > 0 {
            // Somebody polls, and will do it again.
            return;
        }
        let waker = Waker::from(Arc::clone(&self));
        loop {
            let seen = self.wakes.load(Acquire);
            let mut place = self.answer.lock();
            let Some(answer) = place.as_mut() else { return };
            if let Poll::Ready(result) = answer.as_mut().poll(&mut Context::from_waker(&waker)) {
                *place = None;
                drop(place);
                return self.end(result);
            }
            drop(place);
            if self.wakes.fetch_sub(seen, AcqRel) == seen {
                return;
            }
        }
    }
}

impl Reading {
    fn end(&self, result: Result<Loaded, StoreError>) {
        let Some(inner) = self.inner.upgrade() else { return };
        let Some(durable) = &inner.durable else { return };
        let Some(group) = inner.index.group(self.group) else { return };
        match result {
            Ok(loaded) => {
                let page = inner.group_page(durable, self.queue, group.full_name(), loaded);
                group.loaded(page, &inner.budget);
            }
            Err(error) => {
                tracing::warn!(group = group.full_name(), %error, "queue cannot be read, trying again");
                durable.stall_reading(self.group);
            }
        }
    }
}

impl Inner {
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
