//! The remains of a connection whose peer was told something last. If unread bytes are left when a socket is closed,
//! the system answers with a reset, and a client that stops at its first failed write never reads the reason. So the
//! client's further bytes are read and forgotten for a moment, while the connection keeps its place among the others.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead as _, ReadBuf},
    net::tcp::OwnedReadHalf,
};

use crate::{
    counters::count,
    layers::socket::Socket,
    local::{ShardLocal, go_on_after_others},
    timers,
};

/// Longest time that a closed connection lingers.
pub(crate) const LONGEST: Duration = Duration::from_secs(2);

/// Bytes that are read, at most: about what a fast client has under way. The rest stays with the system, and the client's
/// writes wait instead of failing.
const MOST: usize = 1 << 20;

/// Reads before other tasks have their turn.
const READS_PER_POLL: usize = 4;

/// The reading side of a socket whose writing side is closed; no buffer, no layer.
#[derive(Debug)]
pub(crate) struct Remains {
    read: OwnedReadHalf,
    left: usize,
}

impl Remains {
    /// For a socket whose writing side is closed already.
    pub(crate) fn new(read: OwnedReadHalf) -> Self {
        Self { read, left: MOST }
    }

    /// Closes the writing side. `None` for a stream of QUIC, whose end says the reason, and for a relayed client.
    pub(crate) fn of(socket: Socket) -> Option<Self> {
        match socket {
            // Dropped, the other half ends what is sent.
            Socket::Stream(read, _) => Some(Self::new(read)),
            #[cfg(feature = "quic")]
            Socket::Quic(_) => None,
            Socket::Relayed(_) => None,
        }
    }

    /// Waits until the peer closes, for `longest` at most. Cancel safe: the socket is closed on drop.
    pub(crate) async fn linger(mut self, longest: Duration) {
        let closed = poll_fn(move |cx| self.poll_closed(cx));
        // Without an answer in time it is closed all the same.
        let _ = timers::timeout(longest, closed).await;
    }

    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        for _ in 0..READS_PER_POLL {
            if self.left == 0 {
                return Poll::Pending;
            }
            match self.poll_read(cx) {
                Poll::Ready(0) => return Poll::Ready(()),
                Poll::Ready(read) => self.left = self.left.saturating_sub(read),
                Poll::Pending => return Poll::Pending,
            }
        }
        go_on_after_others(cx);
        Poll::Pending
    }

    /// Reads once into the thread's buffer; 0 at the end and after a failure.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        let mut local = ShardLocal::take();
        let mut buffer = ReadBuf::new(&mut local.read);
        let polled = Pin::new(&mut self.read).poll_read(cx, &mut buffer);
        let read = buffer.filled().len();
        local.put_back();
        count(|c| c.bytes_in.add(read as u64));
        polled.map(|result| if result.is_ok() { read } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::AsyncWriteExt as _,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    /// Both ends of a socket, of which ours has ended what it sends.
    async fn remains() -> (Remains, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
        let address = listener.local_addr().expect("its address");
        let (peer, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (ours, _) = accepted.expect("a connection");
        (Remains::of(ours.into()).expect("no QUIC"), peer.expect("a connection"))
    }

    #[tokio::test]
    async fn the_end_of_the_peer_ends_the_wait() {
        let (remains, mut peer) = remains().await;
        peer.write_all(&[7; 100_000]).await.expect("it is read");
        drop(peer);
        remains.linger(Duration::from_secs(600)).await;
    }

    #[tokio::test]
    async fn a_peer_that_goes_on_sending_is_read_up_to_a_bound() {
        let (mut remains, mut peer) = remains().await;
        let sends = tokio::spawn(async move { while peer.write_all(&[7; 65_536]).await.is_ok() {} });
        poll_fn(|cx| {
            let polled = remains.poll_closed(cx);
            assert!(polled.is_pending(), "the peer is there");
            if remains.left == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        remains.linger(Duration::from_millis(1)).await;
        sends.await.expect("its writes fail once the socket is closed");
    }
}
