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
