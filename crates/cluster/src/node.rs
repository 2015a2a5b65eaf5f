//! This process, as the cluster knows it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use bytes::Bytes;
use ledger::{Beat, Owner};
use parking_lot::Mutex;

/// A process of a node: its name, and a number that was drawn at its start.
#[derive(Debug)]
pub struct Node {
    name: Arc<str>,
    incarnation: u64,
    beats: AtomicU64,
    about: Mutex<Bytes>,
}

impl Node {
    /// `incarnation` is drawn at each start of the process, so that no process is taken for one before it.
    pub fn new(name: &str, incarnation: u64) -> Self {
        Self { name: name.into(), incarnation, beats: AtomicU64::new(0), about: Mutex::default() }
    }

    /// Name of the node.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Number of this process.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Sets what the next beats tell about it: small.
    pub fn set_about(&self, about: Bytes) {
        *self.about.lock() = about;
    }

    /// The next sign of life. A standby sends one each second by [`ledger::Ledger::beat`]; a tenure does so by itself.
    pub fn next_beat(&self) -> Beat {
        Beat {
            node: Arc::clone(&self.name),
            incarnation: self.incarnation,
            number: self.beats.fetch_add(1, Relaxed) + 1,
            about: self.about.lock().clone(),
        }
    }

    /// This process as the owner of a home.
    pub fn owner(&self, home: u16, epoch: u64) -> Owner {
        Owner { home, node: Arc::clone(&self.name), incarnation: self.incarnation, epoch }
    }
}
