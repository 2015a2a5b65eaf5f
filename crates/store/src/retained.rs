//! Durable retained messages: one per topic.

use std::sync::Arc;

use gateway_core::{Commit, SharedMessage};

use super::{BoxFuture, StoreError, StoreHealth};

/// Messages that were asked for.
pub type LoadedRetained = Vec<Option<Arc<SharedMessage>>>;

/// Keeps retained messages.
pub trait RetainedStore: Send + Sync {
    /// Sets the message of its topic; without blocking. A later change of the topic replaces one not yet written, whose
    /// part of a [`Commit`] then ends with the later one. The store ends its part once the change is durable.
    fn set(&self, message: Arc<SharedMessage>, commit: Option<Arc<Commit>>);

    /// Removes the message of a topic, as [`Self::set`].
    fn clear(&self, topic: Arc<str>, commit: Option<Arc<Commit>>);

    /// Reads the messages of these topics as they are on disk, in their order; `None` where there is none. Changes that
    /// are not written yet are not seen. Cancel safe.
    fn load(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>>;

    /// Reads everything, in order of topic. For the start: blocks on the disk.
    fn restore(&self, into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError>;

    /// Its health.
    fn health(&self) -> StoreHealth;
}
