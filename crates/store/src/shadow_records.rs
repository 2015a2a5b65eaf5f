//! Shadows in a store of records: the key is device, NUL, name; the value is version, time of the last change, whether there is a
//! document, the document.
//!
//! Neither name has a NUL, so a device's records are neighbours, in the order of their names.

use std::sync::Arc;

use bytes::{BufMut as _, Bytes, BytesMut};
use gateway_core::{ClientId, Timestamp};

use super::{
    BoxFuture, Expect, MAX_SHADOW_DEVICE, MAX_SHADOW_NAME, RecordChange, RecordKind, RecordOutcome,
    RecordRange, RecordStore, RecordWrite, ShadowPut, ShadowRecord, ShadowStore, StoreError,
};

const DELETED: u8 = 0;
const PRESENT: u8 = 1;

/// Bytes before the document.
const HEAD: usize = 17;

/// A [`ShadowStore`] over a store of records.
pub struct RecordShadows(Arc<dyn RecordStore>);

impl RecordShadows {
    /// Shadows in `records`.
    pub fn new(records: Arc<dyn RecordStore>) -> Self {
        Self(records)
    }

    async fn write(&self, change: RecordChange) -> Result<ShadowPut, StoreError> {
        Ok(match self.0.write(RecordWrite { changes: vec![change], fence: None }).await? {
            RecordOutcome::Done => ShadowPut::Written,
            RecordOutcome::Conflict | RecordOutcome::Fenced => ShadowPut::Conflict,
            RecordOutcome::Full => ShadowPut::Full,
        })
    }
}

/// Change that writes a shadow if the stored one has the version `expected`.
///
/// # Errors
/// A name that is too long, or a device without one.
pub fn shadow_change(record: &ShadowRecord, expected: u64) -> Result<RecordChange, StoreError> {
    let key = key(record.device.as_str(), &record.name).ok_or_else(|| {
        StoreError::Unavailable("the name of a shadow or of its device is too long".to_owned())
    })?;
    let document = record.document.as_ref();
    let mut value = BytesMut::with_capacity(HEAD + document.map_or(0, Bytes::len));
    value.put_u64_le(record.version);
    value.put_u64_le(record.changed.0);
    value.put_u8(if document.is_some() { PRESENT } else { DELETED });
    value.extend_from_slice(document.map_or(&[], |document| document));
    let change = RecordChange::put(RecordKind::Shadows, key, value.freeze());
    Ok(RecordChange { expect: Expect::Version(expected), ..change })
}

/// Shadow in a record, with as much of its document as is there; `None` if it is not one.
pub fn shadow_record(key: &[u8], value: &Bytes) -> Option<ShadowRecord> {
    let nul = key.iter().position(|&byte| byte == 0)?;
    let device = std::str::from_utf8(&key[..nul]).ok()?;
    let name = std::str::from_utf8(&key[nul + 1..]).ok()?;
    let (version, rest) = value.split_first_chunk::<8>()?;
    let (changed, rest) = rest.split_first_chunk::<8>()?;
    let document = match *rest.first()? {
        DELETED => None,
        PRESENT => Some(value.slice(HEAD..)),
        _ => return None,
    };
    Some(ShadowRecord {
        device: ClientId::new(device),
        name: Arc::from(name),
        version: u64::from_le_bytes(*version),
        changed: Timestamp(u64::from_le_bytes(*changed)),
        document,
    })
}

/// Returns whether the value is of a deleted shadow.
pub fn is_deleted_shadow(value: &[u8]) -> bool {
    value.get(HEAD - 1) == Some(&DELETED)
}

/// `None` if a name is too long to be one, or empty.
fn key(device: &str, name: &str) -> Option<Bytes> {
    let fits = (1..=MAX_SHADOW_DEVICE).contains(&device.len()) && name.len() <= MAX_SHADOW_NAME;
    fits.then(|| full_key(device, name))
}

fn full_key(device: &str, name: &str) -> Bytes {
    Bytes::from([device.as_bytes(), &[0], name.as_bytes()].concat())
}

impl ShadowStore for RecordShadows {
    fn get<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ShadowRecord>, StoreError>> {
        Box::pin(async move {
            let Some(key) = key(device, name) else { return Ok(None) };
            let Some(value) = self.0.get(RecordKind::Shadows, key.clone()).await? else { return Ok(None) };
            let damaged = || StoreError::Damaged("the record of a shadow".to_owned());
            shadow_record(&key, &value).ok_or_else(damaged).map(Some)
        })
    }

    fn put(&self, record: ShadowRecord, expected: u64) -> BoxFuture<'_, Result<ShadowPut, StoreError>> {
        Box::pin(async move { self.write(shadow_change(&record, expected)?).await })
    }

    fn forget<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
        version: u64,
    ) -> BoxFuture<'a, Result<ShadowPut, StoreError>> {
        Box::pin(async move {
            let Some(key) = key(device, name) else { return Ok(ShadowPut::Conflict) };
            let value = self.0.get(RecordKind::Shadows, key.clone()).await?;
            let is_left =
                |value: &Bytes| is_deleted_shadow(value) && value.starts_with(&version.to_le_bytes());
            let Some(value) = value.filter(is_left) else { return Ok(ShadowPut::Conflict) };
            let removal = RecordChange::remove(RecordKind::Shadows, key);
            self.write(RecordChange { expect: Expect::Value(value), ..removal }).await
        })
    }

    fn list<'a>(
        &'a self,
        device: &'a str,
        after: Option<&'a str>,
        limit: usize,
        documents: bool,
    ) -> BoxFuture<'a, Result<Vec<ShadowRecord>, StoreError>> {
        let read = self.0.read_sound(RecordRange {
            after: after.map(|after| full_key(device, after)),
            limit,
            value_bytes: if documents { usize::MAX } else { HEAD },
            ..RecordRange::of(RecordKind::Shadows, full_key(device, ""))
        });
        Box::pin(async move {
            let records = read.await?;
            Ok(records.iter().filter_map(|(key, value)| shadow_record(key, value)).collect())
        })
    }
}
