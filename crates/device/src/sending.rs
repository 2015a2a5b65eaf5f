//! Responsibility for the bytes that wait for a socket: a turn, a writing thread or the connection's task. One of them
//! will look at all waiting bytes; the tests try every interleaving of a few threads.

/// The state of one link, behind its device's lock.
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

        /// As `flush.rs` does it.
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
