//! Keys of the table `groups`: group (4 bytes, big-endian) and 0 -> its epoch; group, 1 and key -> the record. Values are records as
//! `fields` has them.

use gateway_core::GroupId;

pub(super) const EPOCH: u8 = 0;
pub(super) const RECORD: u8 = 1;

pub(super) fn key(group: GroupId, kind: u8, name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(5 + name.len());
    key.extend_from_slice(&group.0.to_be_bytes());
    key.push(kind);
    key.extend_from_slice(name);
    key
}

/// Group and kind of a key.
pub(super) fn split(key: &[u8]) -> Option<(GroupId, u8)> {
    let (group, rest) = key.split_first_chunk::<4>()?;
    Some((GroupId(u32::from_be_bytes(*group)), *rest.first()?))
}
