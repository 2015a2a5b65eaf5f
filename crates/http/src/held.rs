//! Bytes that requests, answers and logins hold on the memory account.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::body::Body;
use broker::{Account, MemoryKind};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};

/// Bytes of an answer that are handed on at once.
const PIECE: usize = 16 << 10;

/// The memory budget, or the part of it that HTTP has, is used up.
#[derive(Debug)]
pub(super) struct NoMemory;

/// Bytes that something holds; given back on drop.
pub(super) struct HeldBytes {
    account: Arc<Account>,
    bytes: usize,
}

impl HeldBytes {
    pub(super) fn new(account: &Arc<Account>) -> Self {
        Self { account: Arc::clone(account), bytes: 0 }
    }

    /// Holds `bytes` more.
    ///
    /// # Errors
    /// There is no room; nothing has changed, and it is counted.
    pub(super) fn more(&mut self, bytes: usize) -> Result<(), NoMemory> {
        if !self.account.charge(MemoryKind::Http, self.bytes, bytes) {
            broker::counters::count(|c| c.memory_http.add(1));
            return Err(NoMemory);
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Holds at least `bytes`.
    ///
    /// # Errors
    /// As [`Self::more`].
    pub(super) fn at_least(&mut self, bytes: usize) -> Result<(), NoMemory> {
        self.more(bytes.saturating_sub(self.bytes))
    }

    /// Gives back what it holds beyond `bytes`.
    pub(super) fn at_most(&mut self, bytes: usize) {
        let over = self.bytes.saturating_sub(bytes);
        self.account.release(MemoryKind::Http, over);
        self.bytes -= over;
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.account.release(MemoryKind::Http, self.bytes);
    }
}

/// A body that is held until its last piece was handed on, which is when what was before it has been read.
pub(super) fn paced(bytes: Bytes, held: HeldBytes) -> Body {
    Body::new(Paced { left: bytes, _held: held })
}

struct Paced {
    left: Bytes,
    _held: HeldBytes,
}

impl HttpBody for Paced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.left.is_empty() {
            return Poll::Ready(None);
        }
        let piece = self.left.len().min(PIECE);
        let piece = self.left.split_to(piece);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_on_the_account_until_it_is_given_back() {
        let account = Arc::new(Account::new(1 << 20));
        let now = || account.held(MemoryKind::Http);
        let mut held = HeldBytes::new(&account);
        held.more(1_000).unwrap();
        held.at_least(3_000).unwrap();
        held.at_least(10).unwrap();
        assert_eq!(now(), 3_000);
        held.at_most(500);
        held.at_most(2_000);
        assert_eq!(now(), 500);
        // The share of HTTP is an eighth.
        assert!(held.more(1 << 20).is_err());
        assert_eq!(now(), 500, "what was refused is not held");
        drop(held);
        assert_eq!(now(), 0);
    }
}
