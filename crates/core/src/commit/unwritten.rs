//! Entries on their way to the disk that may be settled before they are there. Also compiled into the models, with
//! another `sync`.

use super::sync::{
    Mutex,
    atomic::{AtomicU8, Ordering::AcqRel, Ordering::Acquire},
};

const WAITING: u8 = 0;
const TAKEN: u8 = 1;
const SETTLED: u8 = 2;

/// Something to be written unless its receiver acknowledges it first: exactly one of the two happens to it.
#[derive(Debug)]
pub(crate) struct Unwritten<T> {
    content: Mutex<Option<T>>,
    state: AtomicU8,
}

impl<T> Unwritten<T> {
    pub(crate) fn new(content: T) -> Self {
        Self { content: Mutex::new(Some(content)), state: AtomicU8::new(WAITING) }
    }

    /// The writer takes it; `None` if there is nothing left to write.
    pub(crate) fn take(&self) -> Option<T> {
        self.move_to(TAKEN).then(|| self.content.lock().take())?
    }

    /// Notes that the receiver has acknowledged the content. True if the writer has not taken it and never will.
    pub(crate) fn settle(&self) -> bool {
        let settled = self.move_to(SETTLED);
        if settled {
            let content = self.content.lock().take();
            drop(content);
        }
        settled
    }

    /// Looks at it, unless it was taken or settled.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        self.content.lock().as_ref().map(look)
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.state.load(Acquire) == SETTLED
    }

    fn move_to(&self, state: u8) -> bool {
        self.state.compare_exchange(WAITING, state, AcqRel, Acquire).is_ok()
    }
}
