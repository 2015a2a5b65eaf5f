//! What the calls of one connection hold, on the memory account: those who hold much are refused first.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use broker::{Account, MemoryKind};
use gateway_core::metrics::count;

/// The holdings of a connection.
#[derive(Debug)]
pub(in crate::grpc) struct Purse {
    account: Arc<Account>,
    held: AtomicUsize,
}

impl Purse {
    pub(in crate::grpc) fn new(account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self { account, held: AtomicUsize::new(0) })
    }

    /// Nothing so far.
    pub(in crate::grpc) fn open(self: &Arc<Self>) -> Holding {
        Holding { purse: Arc::clone(self), bytes: 0 }
    }
}

/// A part of what a connection holds; given back on drop.
#[derive(Debug)]
pub(in crate::grpc) struct Holding {
    purse: Arc<Purse>,
    bytes: usize,
}

impl Holding {
    /// Makes it `bytes`; false, and changes nothing, if it must grow and may not.
    pub(in crate::grpc) fn set(&mut self, bytes: usize) -> bool {
        let Purse { account, held } = &*self.purse;
        if bytes > self.bytes {
            let more = bytes - self.bytes;
            if !account.charge(MemoryKind::GrpcMessages, held.load(Relaxed), more) {
                count(|c| c.memory_grpc.add(1));
                return false;
            }
            held.fetch_add(more, Relaxed);
        } else {
            let less = self.bytes - bytes;
            held.fetch_sub(less, Relaxed);
            account.release(MemoryKind::GrpcMessages, less);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.set(0);
    }
}
