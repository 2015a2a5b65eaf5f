//! Reports to publishers that wait for their messages.

use std::sync::Arc;

use gateway_core::{DropReason, Receipt};

/// A position in the stream of bytes: when the socket has taken everything before it, `receipt` is told.
#[derive(Debug)]
pub(super) struct ReceiptMark {
    pub(super) end: u64,
    /// Packet id, 0 at QoS 0.
    pub(super) id: u16,
    pub(super) receipt: Arc<Receipt>,
}

/// The receiver has answered with `code`.
pub(super) fn answered(receipt: Option<&Arc<Receipt>>, code: u8) {
    if let Some(receipt) = receipt {
        receipt.update(|state| state.answered(code));
    }
}

/// The delivery was given up.
pub(super) fn dropped(receipt: Option<&Arc<Receipt>>, reason: DropReason) {
    if let Some(receipt) = receipt {
        receipt.update(|state| state.given_up(reason));
    }
}
