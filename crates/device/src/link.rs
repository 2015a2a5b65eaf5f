//! The connection that owns a session now, as other threads see it: its socket's writer, what the socket has not taken, and
//! the task to wake.

use std::{sync::Arc, task::Waker};

use broker::{Account, Charge, CloseReason, MemoryKind};
use session::{Outbound, recycle};
use tokio::net::tcp::OwnedWriteHalf;

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

/// Responsibility for the bytes that wait for a socket, behind its device's lock: a turn, a writing thread or the connection's
/// task. One of them will look at all waiting bytes; the tests try every interleaving of a few threads.
#[derive(Default)]
pub struct SendState {
    /// On the list of a turn, which flushes it.
    listed: bool,
    /// A thread writes. It looks again afterwards.
    writing: bool,
    /// The socket is full, or a thread has written enough: it is the owner's turn, who is woken or waits for the socket.
    left: bool,
}

/// Fate of bytes that now wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlushDuty {
    /// The caller's turn must flush it.
    Listed,
    /// The owner will: it waits for a full socket.
    Left,
    /// Somebody will soon.
    SeenTo,
}

/// Next step of a thread that has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextWrite {
    /// Nothing is left to write.
    Done,
    /// Writes again: more has come.
    Again,
    /// Leaves it to the owner, and wakes that, unless it is the owner.
    Leave,
}

impl SendState {
    /// Something waits now.
    #[inline]
    pub(super) fn list(&mut self) -> FlushDuty {
        if self.listed || self.writing {
            return FlushDuty::SeenTo;
        }
        if self.left {
            return FlushDuty::Left;
        }
        self.listed = true;
        FlushDuty::Listed
    }

    /// Returns whether a thread may write the waiting bytes: then it calls [`Self::start`] or [`Self::is_done`] under
    /// the same lock. A turn at its end takes the device from its list.
    #[inline]
    pub(super) fn may_write(&mut self, stays_listed: bool, owner: bool) -> bool {
        self.listed &= stays_listed;
        !self.writing && (owner || !self.left)
    }

    /// Nothing waits.
    pub(super) fn is_done(&mut self) {
        self.left = false;
    }

    /// The caller writes from now on, and then calls [`Self::stop`].
    #[inline]
    pub(super) fn start(&mut self) {
        self.writing = true;
    }

    /// The caller has written: everything that it took, if `complete`, and `more` waits. If the socket `failed` nobody writes
    /// any more. After the `last` of its rounds it lets others go on.
    #[inline]
    pub(super) fn stop(&mut self, complete: bool, failed: bool, more: bool, last: bool) -> NextWrite {
        self.writing = false;
        if complete {
            self.left = false;
        }
        if !complete || failed || (more && last) {
            self.left = !failed;
            return NextWrite::Leave;
        }
        if more { NextWrite::Again } else { NextWrite::Done }
    }

    /// Returns whether the owner writes next.
    #[inline]
    pub fn is_left(&self) -> bool {
        self.left
    }

    /// The owner writes by itself, behind layers of which others know nothing: whether it waits for the socket.
    pub fn leave(&mut self, left: bool) {
        self.left = left;
    }

    /// The owner has taken all that waited, behind its layers.
    pub fn take_all(&mut self) {
        (self.listed, self.left) = (false, false);
    }

    /// Returns whether a thread is writing.
    pub(super) fn is_writing(&self) -> bool {
        self.writing
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use loom::{
        model::Builder,
        sync::{Mutex, MutexGuard},
        thread,
    };

    use super::*;

    const ROUNDS: usize = 2;

    /// A device of which everything is counted in messages.
    #[derive(Default)]
    struct Model(Mutex<ModelLink>);

    #[derive(Default)]
    struct ModelLink {
        sending: SendState,
        buffered: usize,
        unsent: usize,
        written: usize,
        in_flight: bool,
        /// Bytes that the socket takes before it is full.
        room: usize,
        /// The owner was woken, or the socket wakes it once it has room.
        woken: bool,
        waits_for_room: bool,
    }

    impl Model {
        fn lock(&self) -> MutexGuard<'_, ModelLink> {
            self.0.lock().expect("nothing panics in a model")
        }

        /// A turn that delivers so many messages; the first goes early.
        fn deliver(&self, messages: usize) {
            let mut listed = false;
            for message in 0..messages {
                let mut link = self.lock();
                link.buffered += 1;
                listed |= link.sending.list() == FlushDuty::Listed;
                drop(link);
                if listed && message + 1 < messages {
                    self.write(true, false);
                }
            }
            if listed {
                self.write(false, false);
            }
        }

        /// As `write_rounds` does it.
        fn write(&self, stays_listed: bool, owner: bool) {
            for round in 1..=ROUNDS {
                let mut link = self.lock();
                if !link.sending.may_write(stays_listed, owner) {
                    return;
                }
                if link.unsent + link.buffered == 0 {
                    return link.sending.is_done();
                }
                link.sending.start();
                assert!(!std::mem::replace(&mut link.in_flight, true), "two threads write");
                if link.unsent == 0 {
                    link.unsent = std::mem::take(&mut link.buffered);
                }
                let wants = link.unsent;
                drop(link);
                let took = self.socket(wants);
                let mut link = self.lock();
                link.in_flight = false;
                link.written += took;
                link.unsent -= took;
                let (complete, more) = (link.unsent == 0, link.unsent == 0 && link.buffered > 0);
                let then = link.sending.stop(complete, false, more, round == ROUNDS);
                link.woken |= then == NextWrite::Leave && !owner;
                if owner && took == 0 {
                    link.waits_for_room = true;
                    return;
                }
                if then == NextWrite::Done || (then == NextWrite::Leave && !owner) {
                    return;
                }
            }
            // The owner goes on in its next poll.
            self.lock().woken |= owner;
        }

        /// A system call, without the lock: here it is taken for the count only.
        fn socket(&self, wants: usize) -> usize {
            let mut link = self.lock();
            let took = wants.min(link.room);
            link.room -= took;
            took
        }

        /// A poll of the connection's task.
        fn poll(&self) {
            let mut link = self.lock();
            link.woken = false;
            let is_left = link.sending.is_left();
            drop(link);
            if is_left {
                self.write(false, true);
            }
        }
    }

    #[test]
    fn whatever_waits_for_a_socket_is_written_by_somebody() {
        for (room, ends) in [(0, false), (1, false), (10, false), (0, true), (1, true), (10, true)] {
            let mut few = Builder::new();
            few.preemption_bound = Some(3);
            few.check(move || {
                let model = Arc::new(Model::default());
                model.lock().room = room;
                let threads = [1, 2].map(|messages| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || model.deliver(messages))
                });
                if ends {
                    // The end of a connection writes what it can, without being asked.
                    model.write(false, true);
                } else {
                    model.poll();
                }
                for thread in threads {
                    thread.join().expect("no panic");
                }
                model.lock().room = 10;
                loop {
                    let mut link = model.lock();
                    // The task of a connection is polled only if something wakes it.
                    let room_again = std::mem::take(&mut link.waits_for_room);
                    if !link.woken && !room_again {
                        break;
                    }
                    drop(link);
                    model.poll();
                }
                let link = model.lock();
                assert_eq!((link.written, link.unsent + link.buffered), (3, 0));
                assert!(!link.sending.listed && !link.sending.writing && !link.sending.left);
            });
        }
    }
}
