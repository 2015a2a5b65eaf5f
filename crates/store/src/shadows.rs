//! Documents of device shadows.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, Timestamp};

use super::{BoxFuture, StoreError};

/// The longest client id of a device that has shadows, in bytes.
pub const MAX_SHADOW_DEVICE: usize = 400;

/// The longest name of a shadow, in bytes.
pub const MAX_SHADOW_NAME: usize = 64;

/// A shadow, or what is left of a deleted one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShadowRecord {
    /// Device of the shadow; 1 to [`MAX_SHADOW_DEVICE`] bytes.
    pub device: ClientId,
    /// Name of the shadow among the device's; empty is the classic one. At most [`MAX_SHADOW_NAME`] bytes.
    pub name: Arc<str>,
    /// Its version, from 1.
    pub version: u64,
    /// Time of the last change, by the wall clock.
    pub changed: Timestamp,
    /// Its content, which only the caller reads. `None` is a deleted one, of which the version is remembered.
    pub document: Option<Bytes>,
}

/// Outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowPut {
    /// The write is made.
    Written,
    /// Nothing is changed: the stored version is another than expected.
    Conflict,
    /// Nothing is changed: the store has no room for more, or not for more of this device.
    Full,
}

/// Keeps shadows. A write is made only on the version that it was made from, so that of two who change the same shadow at the
/// same time, also two gateways on one database, neither loses what the other did.
pub trait ShadowStore: Send + Sync + 'static {
    /// The record. What [`Self::put`] has returned for is seen.
    fn get<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ShadowRecord>, StoreError>>;

    /// Writes the record if the stored one has the version `expected`; 0 is that there is none. Durable when it returns
    /// [`ShadowPut::Written`]. After an error, and dropped before it is done, it may or may not be made.
    fn put(&self, record: ShadowRecord, expected: u64) -> BoxFuture<'_, Result<ShadowPut, StoreError>>;

    /// Removes what is left of a deleted shadow, if the stored record is one and has this version. Durable when it returns.
    fn forget<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
        version: u64,
    ) -> BoxFuture<'a, Result<ShadowPut, StoreError>>;

    /// Records of the device in the order of their names, deleted ones included, behind the name `after` if given: at most
    /// `limit`, and fewer where they are large. None means that there are no more. Without `documents` they are left empty where
    /// there is one.
    fn list<'a>(
        &'a self,
        device: &'a str,
        after: Option<&'a str>,
        limit: usize,
        documents: bool,
    ) -> BoxFuture<'a, Result<Vec<ShadowRecord>, StoreError>>;
}
