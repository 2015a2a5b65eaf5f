//! Memory of records on their way to the ledger.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use gateway_core::Budget;

/// Copies of a transaction's changes while they are on their way: those that the transaction noted, those that the stream's task has,
/// and the record, of which all rows are parts.
const COPIES: usize = 3;

/// Bytes of a home's records that are on their way. Each stream has one record under way, and the stores bound what they put into one,
/// so that it is counted and never refused.
#[derive(Default)]
pub struct RedoMemory {
    held: AtomicUsize,
    account: OnceLock<Arc<dyn Budget + Send + Sync>>,
}

impl RedoMemory {
    /// Charges records that begin from now on to `account`, also beyond its bound. Once.
    pub fn charge_to(&self, account: Arc<dyn Budget + Send + Sync>) {
        let _ = self.account.set(account);
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Holds the memory of a record with that many bytes of changes until the value is dropped.
    pub(crate) fn hold(&self, changes: usize) -> HeldRedo<'_> {
        let bytes = changes.saturating_mul(COPIES);
        self.held.fetch_add(bytes, Relaxed);
        let account = self.account.get();
        if let Some(account) = account {
            account.force(bytes);
        }
        HeldRedo { memory: self, account, bytes }
    }
}

/// Memory of a record; given back on drop.
pub(crate) struct HeldRedo<'a> {
    memory: &'a RedoMemory,
    /// None if the record began before there was one.
    account: Option<&'a Arc<dyn Budget + Send + Sync>>,
    bytes: usize,
}

impl Drop for HeldRedo<'_> {
    fn drop(&mut self) {
        self.memory.held.fetch_sub(self.bytes, Relaxed);
        if let Some(account) = self.account {
            account.release(self.bytes);
        }
    }
}
