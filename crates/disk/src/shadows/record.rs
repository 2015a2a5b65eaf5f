//! A record: checksum and format, version, time of the last change, whether there is a document, the document. Device and name
//! are in its key.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, Timestamp};

use crate::counters::count;
use crate::{fields, keys};
use store::ShadowRecord;

const DELETED: u8 = 0;
const PRESENT: u8 = 1;

pub(super) fn encode(record: &ShadowRecord, out: &mut Vec<u8>) {
    fields::begin(out);
    out.extend_from_slice(&record.version.to_le_bytes());
    out.extend_from_slice(&record.changed.0.to_le_bytes());
    match &record.document {
        None => out.push(DELETED),
        Some(document) => {
            out.push(PRESENT);
            out.extend_from_slice(document);
        }
    }
    fields::seal(out);
}

/// `None` if damaged. Without `document` it is left empty.
pub(super) fn decode(key: &[u8], value: &[u8], document: bool) -> Option<ShadowRecord> {
    let (device, name) = keys::names(key)?;
    let mut input = fields::open(value)?;
    let (version, changed) = (input.u64()?, Timestamp(input.u64()?));
    let document = match input.u8()? {
        DELETED => None,
        PRESENT if document => Some(Bytes::copy_from_slice(input.0)),
        PRESENT => Some(Bytes::new()),
        _ => return None,
    };
    Some(ShadowRecord { device: ClientId::new(device), name: Arc::from(name), version, changed, document })
}

/// Version, and whether it is what is left of a deleted one; `None` if damaged.
pub(super) fn head(value: &[u8]) -> Option<(u64, bool)> {
    let mut input = fields::open(value)?;
    let (version, _) = (input.u64()?, input.u64()?);
    Some((version, input.u8()? == DELETED))
}

/// Returns whether a record is as it was written; for the tools.
pub(crate) fn is_sound(key: &[u8], value: &[u8]) -> bool {
    decode(key, value, false).is_some()
}

/// Counts and says that a record cannot be read.
pub(super) fn report_damage(key: &[u8]) {
    count(|c| c.store_damaged_records.add(1));
    let key = String::from_utf8_lossy(key);
    gateway_core::error_limited!(%key, "stored shadow is damaged");
}
