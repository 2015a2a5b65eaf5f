//! Responses that a task makes for a stream: encoded, and on the memory account until the caller takes them.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::{super::server::caller_memory::MemoryReservation, Error, RawMessage, StreamSlot};

/// Responses that may wait; behind them their maker does.
const RESPONSES: usize = 2;

/// Queue into which a task puts its responses. The stream keeps its place for as long as this sender exists.
pub(crate) struct ResponseSender {
    sender: mpsc::Sender<QueuedResponse>,
    slot: StreamSlot,
}

/// The stream of what a [`ResponseSender`] was given.
pub(crate) struct ResponseQueue(mpsc::Receiver<QueuedResponse>);

struct QueuedResponse {
    response: Result<RawMessage, Error>,
    _held: Option<MemoryReservation>,
}

/// Why no more is sent.
#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// The caller is gone.
    Gone,
    /// The caller is to be told.
    Error(Error),
}

impl From<Error> for StreamEnd {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// A queue for the stream that has this place.
pub(crate) fn responses(slot: StreamSlot) -> (ResponseSender, ResponseQueue) {
    let (sender, receiver) = mpsc::channel(RESPONSES);
    (ResponseSender { sender, slot }, ResponseQueue(receiver))
}

impl ResponseSender {
    /// The place of the stream.
    pub(crate) fn slot(&self) -> &StreamSlot {
        &self.slot
    }

    /// Puts a response of `messages` messages into the queue, as soon as there is room in it.
    ///
    /// # Errors
    /// The caller is gone, or has so much unread that there is no memory for more.
    pub(crate) async fn send(&self, response: impl prost::Message, messages: u64) -> Result<(), StreamEnd> {
        let mut held = self.slot.caller_memory().open();
        let bytes = response.encode_to_vec();
        // Only the bytes wait.
        drop(response);
        if !held.set(bytes.capacity()) {
            return Err(Error::MemoryBudget.into());
        }
        let queued = QueuedResponse { response: Ok(RawMessage(bytes.into())), _held: Some(held) };
        self.slot.sending(messages, self.sender.send(queued)).await.map_err(|_| StreamEnd::Gone)
    }

    /// Ends the stream; a caller that is not gone is told why.
    pub(crate) async fn end(self, end: StreamEnd) {
        if let StreamEnd::Error(error) = end {
            let _ = self.sender.send(QueuedResponse { response: Err(error), _held: None }).await;
        }
    }

    /// Waits until the caller is gone. Cancel safe.
    pub(crate) async fn closed(&self) {
        self.sender.closed().await;
    }
}

impl Stream for ResponseQueue {
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let queued = ready!(self.0.poll_recv(cx));
        // From here on the answer's bytes are charged.
        Poll::Ready(queued.map(|queued| queued.response.map_err(Status::from)))
    }
}
