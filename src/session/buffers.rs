//! A small pool of out-buffers per thread, so that an idle session keeps none.

use std::cell::RefCell;

const POOLED: usize = 128;
const LARGEST: usize = 128 << 10;
const FRESH: usize = 512;

thread_local! {
    static POOL: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer with some capacity.
pub fn take_buffer() -> Vec<u8> {
    POOL.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(FRESH))
}

/// Gives a buffer back; large ones are freed.
pub fn recycle(mut buffer: Vec<u8>) {
    if buffer.capacity() == 0 || buffer.capacity() > LARGEST {
        return;
    }
    buffer.clear();
    POOL.with_borrow_mut(|pool| {
        if pool.len() < POOLED {
            pool.push(buffer);
        }
    });
}
