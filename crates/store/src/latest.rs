//! Traits: the latest value of every topic of every device.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, Properties, QoS, Timestamp};

use super::{BoxFuture, StoreError};

/// The last payload of a (device, topic).
#[derive(Debug, Clone, PartialEq)]
pub struct LatestValue {
    /// Device that sent the value.
    pub device: ClientId,
    /// On which topic.
    pub topic: Arc<str>,
    /// Payload.
    pub payload: Bytes,
    /// QoS of the publish.
    pub qos: QoS,
    /// RETAIN as the device set it.
    pub retain: bool,
    /// MQTT 5 properties, if any.
    pub properties: Option<Arc<Properties>>,
    /// Time at which the gateway received the value.
    pub received: Timestamp,
    /// Order of writes: grows with every value of the process, never goes back.
    pub version: u64,
    /// Id of the gateway that recorded it; `None` is this one.
    pub server: Option<Arc<str>>,
}

/// Selects the latest values to list.
#[derive(Debug, Clone, Default)]
pub struct LatestQuery {
    /// Only these devices; empty is all.
    pub devices: Vec<String>,
    /// Only topics that match this MQTT filter.
    pub filter: Option<String>,
    /// Most values in the page (1 to 10,000).
    pub limit: usize,
    /// `next` of the page before.
    pub page_token: String,
}

/// One page of latest values, ordered by device, then topic.
///
/// A page may hold fewer values than the limit, even none, and still have a `next`: it also ends after a number of
/// bytes, or after some work without a match.
#[derive(Debug, Clone, Default)]
pub struct LatestPage {
    /// The values.
    pub values: Vec<LatestValue>,
    /// Token of the next page, a [`PageToken`](super::PageToken) of the last key this page covers; empty at the end.
    pub next: String,
}

/// Keeps the latest value of every (device, topic).
///
/// A value with a lower `version` than the stored one never replaces it.
pub trait LatestStore: Send + Sync + 'static {
    /// Writes all of `batch`. Durable when it returns `Ok`; with [`StoreError::Partly`] all but the values named there
    /// are. A value that the store can never take is dropped and counted, and does not fail the rest. Idempotent.
    /// Dropped before it is done, it may or may not write, but leaves nothing behind that grows with every such call.
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Removes the values of these devices and topics, unless they are newer than `version` there says; durable when it
    /// returns `Ok`. Where one was the newest of its topic over all devices, none is until the next is written.
    /// Idempotent. Called while no [`LatestStore::upsert`] of an older version is under way.
    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The value of `topic` of `device`, or without a device the newest over all devices.
    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>>;

    /// One page of values.
    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>>;

    /// Returns whether [`LatestStore::list`] works without device ids; if not, it fails with [`StoreError::NeedsDevices`].
    fn lists_all(&self) -> bool {
        true
    }
}

/// A [`LatestStore`] on this machine that keeps what another one does not take.
pub trait SpillStore: LatestStore {
    /// Returns the number of values. Quick.
    fn count(&self) -> usize;

    /// About the bytes that they take on the disk.
    fn bytes(&self) -> u64;
}
