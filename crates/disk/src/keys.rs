//! Keys of at most 511 bytes (LMDB's limit) for names of any length, in the order of the names.
//!
//! A name shorter than [`CUT`] bytes is its own key. Of a longer one the key is the first [`CUT`] bytes
//! and a hash of all; the record holds the full names. All long names with the same first [`CUT`] bytes
//! form one group of neighbouring keys, and nothing else lies between them: groups and short names are in
//! the order of their names, and only within a group must a reader sort. When two names of a group have
//! the same hash, the later one takes the next free hash ([`PROBES`] at most).

/// Length at which long names are cut.
pub(super) const CUT: usize = 480;

/// Number of hashes that a long name may try.
pub(super) const PROBES: u32 = 8;

const LONG: usize = CUT + 16;

/// The name of a latest value: device, NUL, topic. Sorts by device, then topic, as neither has a NUL.
pub(super) fn name(device: &str, topic: &str) -> Vec<u8> {
    let mut name = Vec::with_capacity(device.len() + 1 + topic.len());
    name.extend_from_slice(device.as_bytes());
    name.push(0);
    name.extend_from_slice(topic.as_bytes());
    name
}

/// Returns whether a key is of a long name.
pub(super) fn is_long(key: &[u8]) -> bool {
    key.len() >= LONG
}

/// The part of a long key that its group shares, or the beginning of any name.
pub(super) fn head(name: &[u8]) -> &[u8] {
    &name[..name.len().min(CUT)]
}

/// The key of `name` at the given probe (0 unless another name had the hash first).
pub(super) fn key(name: &[u8], probe: u32) -> Vec<u8> {
    if name.len() < CUT {
        return name.to_vec();
    }
    let mut key = Vec::with_capacity(LONG);
    key.extend_from_slice(head(name));
    key.extend_from_slice(&fnv1a(name).wrapping_add(probe.into()).to_be_bytes());
    key
}

/// Device and topic of a short key.
pub(super) fn names(key: &[u8]) -> Option<(&str, &str)> {
    if is_long(key) {
        return None;
    }
    let nul = key.iter().position(|&b| b == 0)?;
    let device = std::str::from_utf8(&key[..nul]).ok()?;
    let topic = std::str::from_utf8(&key[nul + 1..]).ok()?;
    Some((device, topic))
}

/// The first of the [`PROBES`] neighbouring hashes of `name`, none of which wraps around.
pub(super) fn first_hash(name: &[u8]) -> u128 {
    fnv1a(name).min(u128::MAX - u128::from(PROBES))
}

/// FNV-1a, 128 bits: fixed for all versions of the file.
fn fnv1a(bytes: &[u8]) -> u128 {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for &byte in bytes {
        hash ^= u128::from(byte);
        hash = hash.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013B);
    }
    hash
}
