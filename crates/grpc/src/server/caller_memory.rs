//! Charges of the calls of one connection, or of the streams of one caller, on the memory account: whoever holds much is
//! refused first. Until it has shown credentials, a connection holds a part of the memory for all unauthenticated ones.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use broker::{Account, MemoryKind};
use gateway_core::Budget;

use super::unauthenticated::{UnauthenticatedMemory, UnauthenticatedPart};

/// The holdings of a connection, or of the streams of a caller.
#[derive(Debug)]
pub struct CallerMemory {
    account: Arc<Account>,
    kind: MemoryKind,
    held: AtomicUsize,
    /// Of a connection that has, or had, yet to show credentials.
    unauthenticated: Option<UnauthenticatedPart>,
}

impl CallerMemory {
    /// For calls whose caller is known.
    pub fn new(account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self::empty(account, MemoryKind::GrpcMessages))
    }

    /// For the calls of a connection that has yet to show credentials.
    pub(super) fn unauthenticated(account: Arc<Account>, all: &Arc<UnauthenticatedMemory>) -> Arc<Self> {
        let empty = Self::empty(account, MemoryKind::GrpcMessages);
        Arc::new(Self { unauthenticated: Some(all.open()), ..empty })
    }

    /// For all streams of a caller.
    pub(crate) fn of_streams(account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self::empty(account, MemoryKind::GrpcStreams))
    }

    fn empty(account: Arc<Account>, kind: MemoryKind) -> Self {
        Self { account, kind, held: AtomicUsize::new(0), unauthenticated: None }
    }

    /// Returns the charged account.
    #[cfg(test)]
    pub(crate) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Nothing so far.
    pub fn open(self: &Arc<Self>) -> MemoryReservation {
        MemoryReservation { caller_memory: Arc::clone(self), bytes: 0 }
    }

    /// Charges `bytes` more; false, and charges nothing, if they do not fit.
    pub(crate) fn charge(&self, bytes: usize) -> bool {
        let Self { account, kind, held, unauthenticated } = self;
        if let Some(taken) = unauthenticated.as_ref().and_then(|part| part.take(bytes)) {
            return taken;
        }
        let fits = account.charge(*kind, held.load(Relaxed), bytes);
        if fits {
            held.fetch_add(bytes, Relaxed);
        }
        fits
    }

    /// Gives `bytes` back that were charged.
    pub(crate) fn release(&self, bytes: usize) {
        if self.unauthenticated.as_ref().is_some_and(|part| part.give_back(bytes)) {
            return;
        }
        self.held.fetch_sub(bytes, Relaxed);
        self.account.release(self.kind, bytes);
    }

    /// The connection has shown credentials: all that it holds is charged to the account from now on, with `own` made `bytes`
    /// if it is less. False, and changes nothing, if the account has no room.
    pub(super) fn authenticate(&self, own: &mut MemoryReservation, bytes: usize) -> bool {
        let more = bytes.saturating_sub(own.bytes);
        let Some(part) = &self.unauthenticated else { return own.set(own.bytes + more) };
        let charged = part.authenticate(|held| {
            let charged = self.account.charge(self.kind, 0, held + more);
            if charged {
                self.held.store(held + more, Relaxed);
                own.bytes += more;
            } else {
                broker::counters::count(|c| c.memory_grpc.add(1));
            }
            charged
        });
        charged.unwrap_or(true)
    }

    /// Waits until others need the memory and the connection has to close. Never ends once it has shown credentials. Cancel safe.
    pub(super) async fn closed(&self) {
        match &self.unauthenticated {
            Some(part) => part.closed().await,
            None => std::future::pending().await,
        }
    }

    fn count_refusal(&self) {
        let is_unauthenticated = self.unauthenticated.as_ref().is_some_and(|part| !part.is_authenticated());
        broker::counters::count(|c| match self.kind {
            MemoryKind::GrpcStreams => c.memory_grpc_streams.add(1),
            _ if is_unauthenticated => c.memory_grpc_unauthenticated.add(1),
            _ => c.memory_grpc.add(1),
        });
    }
}

/// A part of what a connection holds; given back on drop.
#[derive(Debug)]
pub struct MemoryReservation {
    caller_memory: Arc<CallerMemory>,
    bytes: usize,
}

impl MemoryReservation {
    /// Of what it is a part.
    pub(super) fn caller_memory(&self) -> &Arc<CallerMemory> {
        &self.caller_memory
    }

    /// Makes it `bytes`; false, and changes nothing, if it must grow and may not.
    pub fn set(&mut self, bytes: usize) -> bool {
        if bytes > self.bytes {
            if !self.caller_memory.charge(bytes - self.bytes) {
                self.caller_memory.count_refusal();
                return false;
            }
        } else if bytes < self.bytes {
            self.caller_memory.release(self.bytes - bytes);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Memory that other modules charge for a stream of the caller.
impl Budget for CallerMemory {
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
