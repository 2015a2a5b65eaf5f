//! Tells one waiting publisher (a gRPC call) what became of its message.

use std::{
    future::poll_fn,
    task::{Poll, Waker},
};

use parking_lot::Mutex;

/// Why a delivery was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// The receiver is offline and the message may not wait for it.
    Offline,
    /// The receiver's queue is full (count or bytes).
    QueueFull,
    /// The process-wide memory budget is used up.
    Memory,
    /// The message expired before it could be sent.
    Expired,
    /// The frame would exceed the receiver's Maximum Packet Size [MQTT-3.1.2-24].
    TooLarge,
    /// The connection ended before the bytes left (QoS 0).
    ConnectionLost,
    /// The session ended.
    SessionEnded,
    /// The rules no longer allow its receiver to have it.
    NotAuthorized,
    /// An operator has emptied the queue.
    Purged,
}

/// Progress of the deliveries of one message that connected receivers took. What was dropped or queued for an offline
/// session when the message was routed is not counted here but in the result of routing. Each delivery counts once in
/// `sent`, and once in one of `acked`, `rejected` and `dropped`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiptState {
    /// Frames handed to the operating system.
    pub sent: u32,
    /// Acknowledged by the receiver: PUBACK or PUBCOMP. At QoS 0 equal to `sent`.
    pub acked: u32,
    /// Refused by the receiver: PUBACK or PUBREC with a reason code of 0x80 or more.
    pub rejected: u32,
    /// Given up.
    pub dropped: u32,
    /// Reason of the last drop.
    pub reason: Option<DropReason>,
    /// Last reason code in a PUBACK or PUBREC, if one came; if any refused the message, that of a refusal.
    pub code: Option<u8>,
}

impl ReceiptState {
    /// The receiver of one delivery has answered with `code`.
    pub fn answered(&mut self, code: u8) {
        if code >= 0x80 {
            self.rejected += 1;
            self.code = Some(code);
        } else {
            self.acked += 1;
            self.code = self.code.filter(|code| *code >= 0x80).or(Some(code));
        }
    }

    /// One delivery was given up.
    pub fn given_up(&mut self, reason: DropReason) {
        self.dropped += 1;
        self.reason = Some(reason);
    }
}

/// Shared between the waiting caller and the sessions that hold its message.
#[derive(Debug, Default)]
pub struct Receipt {
    inner: Mutex<(ReceiptState, Option<Waker>)>,
}

impl Receipt {
    /// Changes the state and wakes the waiting caller.
    pub fn update(&self, change: impl FnOnce(&mut ReceiptState)) {
        let waker = {
            let mut inner = self.inner.lock();
            change(&mut inner.0);
            inner.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The state now.
    pub fn state(&self) -> ReceiptState {
        self.inner.lock().0
    }

    /// Waits until `done` holds. One caller at a time. Cancel safe.
    pub async fn wait(&self, done: impl Fn(&ReceiptState) -> bool) -> ReceiptState {
        poll_fn(|cx| {
            let mut inner = self.inner.lock();
            if done(&inner.0) {
                return Poll::Ready(inner.0);
            }
            inner.1 = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}
