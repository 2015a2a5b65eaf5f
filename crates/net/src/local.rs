//! Buffers and turn that the connections of one thread share.

use std::{cell::Cell, future::Future, pin::pin, task::Context};

use broker::Turn;
use gateway_core::{Effort, Timestamp};

const READ_BUFFER: usize = 64 << 10;

/// Longest turn of a thread that does not park, in milliseconds of a clock read once per poll: half of it on average.
const TURN: u64 = 1;

/// Work that one poll may do and still be run again before the sockets are looked at. A look costs about a hundredth of it.
const MUCH: u64 = Effort::TURN as u64 / 8;

/// Receivers that wait to be written to, at most, when a poll ends: the others of the thread wait for all these writes.
const MOST_DIRTY: usize = 1024;

/// Buffers that a thread's connections share: a connection takes them for the time of one poll.
pub(crate) struct ShardLocal {
    /// Bytes as read.
    pub(crate) read: Box<[u8]>,
    /// Bytes after TLS and WebSocket.
    pub(crate) plain: Vec<u8>,
    pub(crate) work: PacketWork,
}

/// Output of handling packets.
#[derive(Default)]
pub(crate) struct PacketWork {
    /// Answers of the connection being processed.
    pub(crate) answers: Vec<u8>,
    /// The turn: flushed when the thread is about to park, and after [`TURN`].
    pub(crate) turn: Turn,
    /// Time at which packets were last handled.
    pub(crate) now: Timestamp,
    /// Time at which a poll of this turn first left something to flush.
    began: Option<Timestamp>,
}

thread_local! {
    static LOCAL: Cell<Option<Box<ShardLocal>>> = const { Cell::new(None) };
}

impl ShardLocal {
    /// Takes this thread's. Nobody else on the thread may need it before [`Self::put_back`].
    pub(crate) fn take() -> Box<Self> {
        LOCAL.take().unwrap_or_else(|| {
            let read = vec![0; READ_BUFFER].into_boxed_slice();
            Box::new(Self { read, plain: Vec::new(), work: PacketWork::default() })
        })
    }

    pub(crate) fn put_back(self: Box<Self>) {
        LOCAL.set(Some(self));
    }
}

impl PacketWork {
    /// Ends a connection's poll: flushes a turn that has lasted [`TURN`]. A thread that always has work never parks,
    /// and its collected output must not wait for that.
    pub(crate) fn end_poll(&mut self) {
        if self.turn.dirty.is_empty() {
            return;
        }
        let began = *self.began.get_or_insert(self.now);
        if began.plus_millis(TURN) <= self.now || self.turn.dirty.len() > MOST_DIRTY {
            self.flush();
        }
    }

    /// Makes the task of a connection go on, if it has done much behind the others of its thread.
    pub(crate) fn go_on(&self, cx: &mut Context<'_>) {
        if self.turn.effort.spent() < MUCH {
            cx.waker().wake_by_ref();
        } else {
            go_on_after_others(cx);
        }
    }

    /// Flushes the turn.
    pub(crate) fn flush(&mut self) {
        self.began = None;
        self.turn.flush();
    }
}

/// Wakes the task of `cx` when the thread has looked at its sockets, behind those that have something to do by then.
pub(crate) fn go_on_after_others(cx: &mut Context<'_>) {
    let polled = pin!(tokio::task::yield_now()).poll(cx);
    debug_assert!(polled.is_pending(), "it would not be woken");
}

/// Lets go of receivers of homes that have gone.
pub(crate) fn trim_turn() {
    if let Some(mut local) = LOCAL.take() {
        local.work.turn.trim();
        local.put_back();
    }
}

/// Flushes what this thread's turn collected.
pub(crate) fn flush_turn() {
    if let Some(mut local) = LOCAL.take() {
        local.work.flush();
        local.put_back();
    }
}
