//! A small pool of out-buffers per thread, so that an idle session keeps none.

use std::cell::RefCell;

/// Bytes that one thread's pool holds.
const POOLED: usize = 4 << 20;
const LARGEST: usize = 128 << 10;
const FRESH: usize = 512;

#[derive(Default)]
struct Pool {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

/// An empty buffer with some capacity.
pub fn take_buffer() -> Vec<u8> {
    POOL.with_borrow_mut(|pool| {
        let Some(buffer) = pool.buffers.pop() else { return Vec::with_capacity(FRESH) };
        pool.bytes -= buffer.capacity();
        buffer
    })
}

/// Gives a buffer back; large ones are freed.
pub fn recycle(mut buffer: Vec<u8>) {
    let size = buffer.capacity();
    if size == 0 || size > LARGEST {
        return;
    }
    buffer.clear();
    POOL.with_borrow_mut(|pool| {
        if pool.bytes + size <= POOLED {
            pool.bytes += size;
            pool.buffers.push(buffer);
        }
    });
}

/// Frees half of what this thread's pool holds. Called once a second, it frees the buffers of a burst and leaves steady
/// traffic nearly all of its own.
pub fn trim_buffers() {
    POOL.with_borrow_mut(|pool| {
        pool.buffers.truncate(pool.buffers.len() / 2);
        pool.bytes = pool.buffers.iter().map(Vec::capacity).sum();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_nobody_uses_empties() {
        let buffers: Vec<_> = (0..100).map(|_| take_buffer()).collect();
        buffers.into_iter().for_each(recycle);
        assert_eq!(POOL.with_borrow(|pool| (pool.buffers.len(), pool.bytes)), (100, 100 * FRESH));
        (0..7).for_each(|_| trim_buffers());
        assert_eq!(POOL.with_borrow(|pool| (pool.buffers.len(), pool.bytes)), (0, 0));
    }
}
