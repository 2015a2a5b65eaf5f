//! Bytes of a relayed device: a stream of HTTP/2 that reads and writes like a socket.
//!
//! One direction is the body of a request, the other that of its answer. HTTP/2 gives each a window of its own, so that a device
//! that does not read stops nobody but itself. A stream without traffic holds no buffer.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{BodyError, LinkBody};

/// Bytes that wait for HTTP/2 to take them.
const MOST_WAITING: usize = 32 << 10;

/// Reads and writes the bytes of a relayed device. Dropped, it ends the relay.
pub struct RelayStream {
    incoming: LinkBody,
    /// Rest of the frame that was read last.
    rest: Bytes,
    writer: RelayWriter,
}

/// Bytes on their way from a [`RelayWriter`] to its [`Outgoing`].
#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    /// Nothing more is written.
    ended: bool,
    /// Nobody takes them any more.
    left: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// The writing side of a relay.
pub(crate) struct RelayWriter(Arc<Mutex<Waiting>>);

/// Body with the bytes that are written to a [`RelayWriter`].
pub(crate) struct Outgoing(Arc<Mutex<Waiting>>);

/// One direction of a relay.
pub(crate) fn outgoing() -> (RelayWriter, Outgoing) {
    let waiting = Arc::<Mutex<Waiting>>::default();
    (RelayWriter(Arc::clone(&waiting)), Outgoing(waiting))
}

impl RelayStream {
    /// A stream that reads from the body of the other side.
    pub(crate) fn new(incoming: LinkBody, writer: RelayWriter) -> Self {
        Self { incoming, rest: Bytes::new(), writer }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

/// Remembers the task of `cx`.
fn remember(waker: &mut Option<Waker>, cx: &Context<'_>) {
    if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
        *waker = Some(cx.waker().clone());
    }
}

impl RelayWriter {
    fn end(&self) {
        let mut waiting = self.0.lock();
        waiting.ended = true;
        wake(&mut waiting.reader);
    }
}

impl Drop for RelayWriter {
    fn drop(&mut self) {
        self.end();
    }
}

impl AsyncRead for RelayStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.rest.is_empty() {
            let Some(frame) = std::task::ready!(Pin::new(&mut self.incoming).poll_frame(cx)) else {
                return Poll::Ready(Ok(()));
            };
            let frame = frame.map_err(|error| io::Error::new(io::ErrorKind::ConnectionReset, error))?;
            if let Ok(data) = frame.into_data() {
                self.rest = data;
            }
        }
        let taken = self.rest.len().min(buffer.remaining());
        buffer.put_slice(&self.rest.split_to(taken));
        if self.rest.is_empty() {
            // The frame is not kept until the next one comes.
            self.rest = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RelayStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut waiting = self.writer.0.lock();
        if waiting.left || waiting.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let taken = bytes.len().min(MOST_WAITING.saturating_sub(waiting.bytes.len()));
        if taken == 0 && !bytes.is_empty() {
            remember(&mut waiting.writer, cx);
            return Poll::Pending;
        }
        waiting.bytes.extend_from_slice(&bytes[..taken]);
        wake(&mut waiting.reader);
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer.end();
        Poll::Ready(Ok(()))
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut waiting = self.0.lock();
        if !waiting.bytes.is_empty() {
            let bytes = std::mem::take(&mut waiting.bytes);
            wake(&mut waiting.writer);
            return Poll::Ready(Some(Ok(Frame::data(bytes.into()))));
        }
        if waiting.ended {
            return Poll::Ready(None);
        }
        remember(&mut waiting.reader, cx);
        Poll::Pending
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        let mut waiting = self.0.lock();
        waiting.left = true;
        wake(&mut waiting.writer);
    }
}
