//! Threads of a store.

use std::thread::{self, JoinHandle};

/// Waits for a store's thread to end, unless it is the current one: a task that the store wakes may be the last to hold it.
pub fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != thread::current().id() {
        let _ = thread.join();
    }
}
