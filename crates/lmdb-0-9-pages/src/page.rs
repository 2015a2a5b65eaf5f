//! Parts of an LMDB file that are read without LMDB: numbers in a page, and the record of a tree. Layouts are those of `MDB_db` on
//! 64-bit machines.

/// Bytes of a page before its content.
pub(super) const PAGE_HEADER: usize = 16;

/// Record of a tree, as LMDB keeps it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Db {
    pub(super) flags: u16,
    pub(super) depth: u16,
    pub(super) branches: u64,
    pub(super) leaves: u64,
    pub(super) overflow: u64,
    pub(super) entries: u64,
    /// `u64::MAX` if it is empty.
    pub(super) root: u64,
}

impl Db {
    pub(super) const SIZE: usize = 48;

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            flags: u16_at(bytes, 4)?,
            depth: u16_at(bytes, 6)?,
            branches: u64_at(bytes, 8)?,
            leaves: u64_at(bytes, 16)?,
            overflow: u64_at(bytes, 24)?,
            entries: u64_at(bytes, 32)?,
            root: u64_at(bytes, 40)?,
        })
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at.checked_add(2)?)?.try_into().ok().map(u16::from_ne_bytes)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_ne_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_ne_bytes)
}
