//! A bound on the bytes that the other end of a connection of ours may send, and so on the work that it can cause:
//! interim answers, headers, pings and all other frames that its protocol allows without end.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use gateway_core::{Timestamp, clock};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::counters::count;

/// Bytes that a read costs at least: many that bring one byte each are as much work.
const LEAST_READ: usize = 64;

/// Bytes that may still come, on one connection or on several that follow each other.
#[derive(Debug)]
pub struct Allowance(Mutex<AllowanceBucket>);

#[derive(Debug)]
struct AllowanceBucket {
    left: usize,
    /// Most bytes that questions add up to.
    most: usize,
    /// Bytes that each second brings, and as many as that adds up to.
    per_second: usize,
    idle_most: usize,
    at: Timestamp,
}

/// The other end has sent more than it was asked for.
#[derive(Debug, thiserror::Error)]
#[error("the service sends more than it was asked for")]
pub struct TooMuch;

impl Allowance {
    /// Nothing but what questions add, up to `most` bytes.
    pub(crate) fn per_question(most: usize) -> Arc<Self> {
        Self::new(most, 0, 0)
    }

    /// With `per_second` bytes more each second, while less than `idle_most` are left.
    pub fn new(most: usize, per_second: usize, idle_most: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(AllowanceBucket {
            left: idle_most,
            most,
            per_second,
            idle_most,
            at: clock::now(),
        })))
    }

    /// Allows `bytes` more, for a question.
    pub fn add(&self, bytes: usize) {
        let mut bucket = self.0.lock();
        bucket.left = bucket.left.saturating_add(bytes).min(bucket.most.max(bucket.left));
    }

    /// Tells whether anything may come.
    ///
    /// # Errors
    /// [`TooMuch`] has come.
    pub fn check(&self) -> Result<(), TooMuch> {
        let mut bucket = self.0.lock();
        bucket.refill(clock::now());
        if bucket.left == 0 { Err(TooMuch) } else { Ok(()) }
    }

    fn take(&self, bytes: usize) {
        let mut bucket = self.0.lock();
        bucket.left = bucket.left.saturating_sub(bytes.max(LEAST_READ));
    }
}

impl AllowanceBucket {
    fn refill(&mut self, now: Timestamp) {
        let millis = usize::try_from(now.0.saturating_sub(self.at.0)).unwrap_or(usize::MAX);
        let bytes = self.per_second.saturating_mul(millis) / 1_000;
        // A fraction of a byte waits.
        if bytes > 0 || self.per_second == 0 {
            self.at = now;
            self.left = self.left.max(self.left.saturating_add(bytes).min(self.idle_most));
        }
    }
}

/// A stream that is read within an [`Allowance`]; beyond it, reading fails.
pub struct Metered<T> {
    inner: T,
    allowance: Arc<Allowance>,
}

impl<T> Metered<T> {
    /// Reads `inner` within `allowance`.
    pub fn new(inner: T, allowance: Arc<Allowance>) -> Self {
        Self { inner, allowance }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Err(error) = self.allowance.check() {
            count(|c| c.remote_too_much.add(1));
            return Poll::Ready(Err(io::Error::other(error)));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        let bytes = buffer.filled().len() - before;
        if bytes > 0 {
            self.allowance.take(bytes);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// The failure: a service that never ends its answer keeps a core busy for as long as it likes.
    #[tokio::test]
    async fn reading_ends_where_more_comes_than_was_asked_for() {
        let allowance = Allowance::per_question(1_000);
        let (mut theirs, ours) = duplex(1 << 16);
        let mut ours = Metered::new(ours, Arc::clone(&allowance));
        theirs.write_all(&[7; 5_000]).await.expect("write");
        let mut bytes = [0; 400];
        assert!(ours.read(&mut bytes).await.is_err(), "nothing was asked");
        for _ in 0..3 {
            allowance.add(10_000);
            assert_eq!(ours.read(&mut bytes).await.expect("read"), 400);
            assert_eq!(ours.read(&mut bytes).await.expect("read"), 400);
            assert_eq!(ours.read(&mut bytes).await.expect("read"), 400, "what is there is read");
            assert!(ours.read(&mut bytes).await.is_err());
        }
        allowance.add(1_000);
        let mut reads = 0;
        while ours.read(&mut bytes[..1]).await.is_ok() {
            reads += 1;
        }
        assert_eq!(reads, 16, "single bytes cost more");
    }

    #[test]
    fn time_brings_back_a_little_and_questions_more() {
        let mut bucket =
            AllowanceBucket { left: 0, most: 1_000, per_second: 10, idle_most: 50, at: Timestamp(0) };
        bucket.refill(Timestamp(99));
        assert_eq!(bucket.left, 0);
        bucket.refill(Timestamp(100));
        assert_eq!(bucket.left, 1);
        bucket.refill(Timestamp(60_000));
        assert_eq!(bucket.left, 50);
        bucket.left = 700;
        bucket.refill(Timestamp(120_000));
        assert_eq!(bucket.left, 700, "what questions have added stays");
    }
}
