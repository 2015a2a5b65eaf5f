//! Tables that keep half of a hash with each entry, so that growing them reads no text.

/// A table's hash from the half that is kept: the table takes its tag from the top bits and the position from the low
/// ones.
pub(crate) fn widen(half: u32) -> u64 {
    u64::from(half).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
