//! Options of [`LatestCache`](super::LatestCache).

use std::{sync::Arc, time::Duration};

use super::ReadWatch;
use store::VersionMark;

/// Options of [`LatestCache`](super::LatestCache).
#[derive(Debug, Clone)]
pub struct LatestOptions {
    /// Time between two flushes.
    pub flush_interval: Duration,
    /// Bytes of values not yet in the store. Values that already wait may be replaced by larger ones up to a
    /// quarter more.
    pub max_bytes: usize,
    /// Most of these bytes that may wait in memory, if that is less.
    pub max_memory: usize,
    /// Topics in memory per device; the store has its own bound over time.
    pub topics_per_device: usize,
    /// MQTT filters of topics that are not kept.
    pub excluded: Vec<String>,
    /// Versions start above this.
    pub version_start: u64,
    /// Microseconds added to every version, under 1,000: gateways that share a store have their own.
    pub version_offset: u64,
    /// The ceiling of versions on disk; versions start above it, too.
    pub mark: Option<Arc<VersionMark>>,
    /// A batch not written within this time has failed and is tried again.
    pub write_timeout: Duration,
    /// A read not answered within this time has failed.
    pub read_timeout: Duration,
    /// Watch over reads, shared with the other users of the same database.
    pub reads: Arc<ReadWatch>,
    /// Time that the store has at shutdown before the rest goes to the spill.
    pub last_write: Duration,
    /// Time that a store on another machine may go without a write before it is asked for a sign of life; `None` for a local one.
    pub probe: Option<Duration>,
    /// While the store is away the spill takes more than `max_bytes`.
    pub spill_running: bool,
    /// While the store is away, reads are answered from memory and spill as if it were empty.
    pub memory_reads: bool,
}

impl LatestOptions {
    /// Bytes of values that may wait in memory.
    pub(super) fn in_memory(&self) -> usize {
        self.max_bytes.min(self.max_memory)
    }
}

impl Default for LatestOptions {
    fn default() -> Self {
        Self {
            flush_interval: Duration::from_millis(250),
            max_bytes: 256 << 20,
            max_memory: usize::MAX,
            topics_per_device: 10_000,
            excluded: Vec::new(),
            version_start: 0,
            version_offset: 0,
            mark: None,
            write_timeout: Duration::from_secs(30),
            read_timeout: Duration::from_secs(10),
            reads: Arc::default(),
            last_write: Duration::from_secs(1),
            probe: None,
            spill_running: false,
            memory_reads: false,
        }
    }
}
