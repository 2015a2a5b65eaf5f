//! What the calls of one connection, or the streams of one caller, hold on the memory account: those who hold much are refused
//! first.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use broker::{Account, MemoryKind};
use gateway_core::{Budget, metrics::count};

/// The holdings of a connection, or of the streams of a caller.
#[derive(Debug)]
pub(in crate::grpc) struct Purse {
    account: Arc<Account>,
    kind: MemoryKind,
    held: AtomicUsize,
}

impl Purse {
    /// For the calls of a connection.
    pub(in crate::grpc) fn new(account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self { account, kind: MemoryKind::GrpcMessages, held: AtomicUsize::new(0) })
    }

    /// For all streams of a caller.
    pub(in crate::grpc) fn of_streams(account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self { account, kind: MemoryKind::GrpcStreams, held: AtomicUsize::new(0) })
    }

    /// What it is charged to.
    #[cfg(test)]
    pub(in crate::grpc) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Nothing so far.
    pub(in crate::grpc) fn open(self: &Arc<Self>) -> Holding {
        Holding { purse: Arc::clone(self), bytes: 0 }
    }

    /// Charges `bytes` more; false, and charges nothing, if they do not fit.
    pub(in crate::grpc) fn charge(&self, bytes: usize) -> bool {
        let Self { account, kind, held } = self;
        let fits = account.charge(*kind, held.load(Relaxed), bytes);
        if fits {
            held.fetch_add(bytes, Relaxed);
        }
        fits
    }

    /// Gives `bytes` back that were charged.
    pub(in crate::grpc) fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Relaxed);
        self.account.release(self.kind, bytes);
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
        if bytes > self.bytes {
            if !self.purse.charge(bytes - self.bytes) {
                count(|c| match self.purse.kind {
                    MemoryKind::GrpcStreams => c.memory_grpc_streams.add(1),
                    _ => c.memory_grpc.add(1),
                });
                return false;
            }
        } else {
            self.purse.release(self.bytes - bytes);
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

/// What is charged by others for a stream of the caller.
impl Budget for Purse {
    fn charge(&self, _: usize, bytes: usize) -> bool {
        Self::charge(self, bytes)
    }

    fn force(&self, bytes: usize) {
        self.held.fetch_add(bytes, Relaxed);
        self.account.force(self.kind, bytes);
    }

    fn release(&self, bytes: usize) {
        Self::release(self, bytes);
    }
}
