//! The connection that owns a session now, as other threads see it: its socket's writer, what the socket has not taken, and
//! the task to wake.

use std::{sync::Arc, task::Waker};

use broker::{Account, Charge, CloseReason, MemoryKind};
use session::{Outbound, recycle};
use tokio::net::tcp::OwnedWriteHalf;

use super::sending::SendState;

/// The connection that owns the session now.
pub struct Link {
    pub epoch: u32,
    /// Wakes the connection's task.
    pub waker: Waker,
    /// Plain TCP: any thread writes. `None` inside while a thread is writing.
    pub writer: SocketWriter,
    /// Taken from the out-buffer and not completely written: the socket was full.
    pub unsent: Option<Box<Unsent>>,
    pub sending: SendState,
    /// The owner wants to be woken when there is room again.
    pub notify_room: bool,
    /// Something waits elsewhere for the owner: in the queue of a shared group, or as replay work.
    pub elsewhere: bool,
    pub close: Option<CloseReason>,
}

/// A buffer of which the socket has taken a part.
pub struct Unsent {
    pub bytes: Vec<u8>,
    pub written: usize,
    /// Charge of this buffer and of the bytes behind it, once the socket was full.
    charge: Option<Charge>,
}

/// Bytes that are charged at once for a buffer that grows.
const STEP: usize = 16 << 10;
/// Bytes that may wait uncharged behind full layers, or for a rate: thousands of devices that share a rate all wait
/// with a little.
const FREE: usize = 1 << 10;

impl Unsent {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, written: 0, charge: None }
    }

    /// None, behind layers that are full: what waits for them is charged.
    pub fn standing(account: &Arc<Account>) -> Self {
        let mut unsent = Self::new(Vec::new());
        unsent.stands(account);
        unsent
    }

    /// Bytes that it has of the memory account.
    pub(super) fn charged(&self) -> usize {
        self.charge.as_ref().map_or(0, Charge::bytes)
    }

    /// The socket is full: from now on the buffer is charged, when [`Link::settle_unsent`] is called next.
    pub fn stands(&mut self, account: &Arc<Account>) {
        self.charge.get_or_insert_with(|| Charge::new(account, MemoryKind::Replies));
    }

    /// Charges the buffer, if it stands, and the `behind` bytes of the next; false if memory does not allow it.
    fn settle(&mut self, behind: usize) -> bool {
        let Some(charge) = &mut self.charge else { return true };
        if self.bytes.capacity() == 0 && behind <= FREE {
            return true;
        }
        let held = self.bytes.capacity() + behind;
        held <= charge.bytes() || charge.set(held.next_multiple_of(STEP))
    }

    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.written..]
    }
}

/// Threads that may write to the socket.
pub enum SocketWriter {
    /// Any thread that flushes.
    Direct(Option<OwnedWriteHalf>),
    /// Only the owner (TLS, WebSocket).
    Owner,
}

impl Link {
    pub fn new(epoch: u32, waker: Waker, writer: SocketWriter) -> Self {
        Self {
            epoch,
            waker,
            writer,
            unsent: None,
            sending: SendState::default(),
            notify_room: false,
            elsewhere: false,
            close: None,
        }
    }
}

impl Link {
    /// Charges what the full socket has not taken, with `behind` bytes in the next buffer; ends the connection if memory
    /// does not allow it: a peer that does not read is who gives back.
    pub fn settle_unsent(&mut self, behind: usize) {
        let Some(unsent) = self.unsent.as_mut().filter(|_| self.close.is_none()) else { return };
        if !unsent.settle(behind) {
            broker::counters::count(|c| c.memory_replies.add(1));
            self.close = Some(CloseReason::Memory);
            self.waker.wake_by_ref();
        }
    }

    /// Gathers everything unsent after `writing`, and counts whole QoS 0 messages in it.
    pub(super) fn take_unsent(&mut self, out: &mut Outbound) -> u64 {
        let rest = out.take_out();
        let started = self
            .unsent
            .as_ref()
            .map_or(0, |unsent| codec::count_unwritten_qos0(&unsent.bytes, unsent.written));
        let lost = started + codec::count_unwritten_qos0(&rest, 0);
        recycle(rest);
        lost
    }
}
