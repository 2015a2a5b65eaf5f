//! gRPC streams: receivers that are not sessions.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    Broker, Target,
    subscriber::{Options, Subscriber},
};

/// Keeps a gRPC stream registered; dropping it removes the stream.
pub struct StreamHandle {
    broker: Broker,
    slot: u32,
    references: Box<[u32]>,
    detached: AtomicBool,
}

impl StreamHandle {
    /// Registers a stream for MQTT filters, which are valid.
    pub(super) fn attach(broker: &Broker, target: Arc<dyn Target>, filters: &[String]) -> Self {
        let inner = &broker.inner;
        let slot = inner.sessions.slots.reserve();
        inner.sessions.slots.set(slot, target);
        inner.streams.fetch_add(1, Ordering::Relaxed);
        let entry = Subscriber { slot, id: 0, options: Options::stream() };
        let added = filters.iter().filter_map(|filter| inner.index.subscribe(filter, entry, true));
        // A filter given twice is one subscription.
        let references = added.filter(|added| !added.existed).map(|added| added.reference).collect();
        Self { broker: broker.clone(), slot, references, detached: AtomicBool::new(false) }
    }

    /// Removes the stream before the handle is dropped.
    pub fn detach(&self) {
        if self.detached.swap(true, Ordering::AcqRel) {
            return;
        }
        let inner = &self.broker.inner;
        // A stream is in no shared group.
        inner.index.remove_all(&self.references, self.slot);
        inner.sessions.slots.free(self.slot);
        inner.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.detach();
    }
}
