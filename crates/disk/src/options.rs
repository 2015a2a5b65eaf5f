//! Setup of a small store.

use std::{fmt, sync::Arc};

use super::environment::{CommitHook, EnvironmentOptions};
use ledger::Shipping;

/// Settings of one store.
#[derive(Clone)]
pub struct DurableOptions {
    /// First size of the memory map, a multiple of the page size. It doubles when full; memory and disk are only used
    /// as data comes.
    pub map_size: usize,
    /// Largest size of the memory map; beyond it commits fail.
    pub max_map_size: usize,
    /// While more bytes than this wait for the disk, what would add to them is refused.
    pub max_waiting_bytes: usize,
    /// For tests of failing and slow disks.
    pub hook: Option<CommitHook>,
    /// A ledger that has each transaction before it is committed.
    pub shipping: Option<Arc<dyn Shipping>>,
}

impl Default for DurableOptions {
    fn default() -> Self {
        Self {
            map_size: 1 << 30,
            max_map_size: usize::MAX,
            max_waiting_bytes: 64 << 20,
            hook: None,
            shipping: None,
        }
    }
}

impl fmt::Debug for DurableOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableOptions")
            .field("map_size", &self.map_size)
            .field("max_map_size", &self.max_map_size)
            .field("max_waiting_bytes", &self.max_waiting_bytes)
            .finish_non_exhaustive()
    }
}

impl DurableOptions {
    /// The options of the environment `name` with this many tables.
    pub(super) fn environment(&self, name: &'static str, tables: u32) -> EnvironmentOptions {
        EnvironmentOptions {
            name,
            map_size: self.map_size,
            max_map_size: self.max_map_size,
            tables,
            hook: self.hook.clone(),
            shipping: self.shipping.clone(),
        }
    }
}
