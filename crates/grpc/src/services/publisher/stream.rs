//! A publish stream at work: reads frames while the window has room, and answers in order.

use std::{collections::VecDeque, sync::Arc};

use prost::Message as _;
use tokio::{sync::mpsc, time::Instant};
use tonic::{Status, Streaming};

use super::issued::{Issued, publish_all, to_result};
use crate::{
    context::Context,
    proto::gateway::v1,
    server::{
        access::Call,
        caller_memory::{CallerMemory, MemoryReservation},
    },
};
use grpc_messages::{convert, status::Error};

/// One message of a publish stream whose result was not yet sent.
enum PendingResult {
    Done(Result<v1::PublishResponse, Error>),
    Waiting(Issued, Instant),
}

/// Next event of a publish stream.
enum StreamEvent {
    /// A frame, or the end of frames.
    Frame(Option<v1::PublishStreamRequest>),
    /// The first pending message has its result.
    Done(Result<v1::PublishResponse, Error>),
    /// The gateway shuts down.
    Stop,
}

/// A publish stream at work.
pub(super) struct PublishRun {
    context: Context,
    call: Arc<Call>,
    sender: mpsc::Sender<UnreadResponse>,
    /// In order of sequence; at most the window and one frame.
    pending: VecDeque<PendingResult>,
    /// Sequence of the first pending message.
    next: u64,
    window: usize,
    failures_only: bool,
    started: bool,
    /// Charge of the pending messages on the memory account.
    waiting: MemoryReservation,
    caller_memory: Arc<CallerMemory>,
}

/// A response that waits for the caller to read it, and what it is charged for.
pub(super) type UnreadResponse = (Result<v1::PublishStreamResponse, Status>, Option<MemoryReservation>);

impl PublishRun {
    /// A run that sends its answers to `sender`.
    pub(super) fn new(
        context: Context,
        call: Arc<Call>,
        sender: mpsc::Sender<UnreadResponse>,
        caller_memory: Arc<CallerMemory>,
    ) -> Self {
        Self {
            context,
            call,
            sender,
            pending: VecDeque::new(),
            next: 1,
            window: convert::DEFAULT_WINDOW,
            failures_only: false,
            started: false,
            waiting: caller_memory.open(),
            caller_memory,
        }
    }

    /// Reads frames while the window has room, and sends results in order, until the caller is done. When the gateway
    /// shuts down, the results of what was read are sent first.
    pub(super) async fn run(mut self, mut frames: Streaming<v1::PublishStreamRequest>) -> Result<(), Status> {
        let mut shutdown = self.context.shutdown.clone();
        let (mut reading, mut stopping) = (true, false);
        while reading || !self.pending.is_empty() {
            let room = self.pending.len() < self.window;
            let event = {
                let front = async {
                    match self.pending.front() {
                        Some(PendingResult::Waiting(issued, deadline)) => {
                            issued.finish(*deadline, &self.context.shutdown).await
                        }
                        // Results that are done are never left in front.
                        _ => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    result = front => StreamEvent::Done(result),
                    _ = shutdown.wait_for(|stop| *stop), if reading => StreamEvent::Stop,
                    frame = frames.message(), if reading && room => StreamEvent::Frame(frame.map_err(|status| {
                        crate::server::request_size::too_large(&status).map_or(status, Status::from)
                    })?),
                }
            };
            match event {
                StreamEvent::Frame(Some(frame)) => self.accept(frame).await?,
                StreamEvent::Frame(None) => reading = false,
                StreamEvent::Stop => (reading, stopping) = (false, true),
                StreamEvent::Done(result) => {
                    if let Some(front) = self.pending.front_mut() {
                        *front = PendingResult::Done(result);
                    }
                }
            }
            self.send_done().await?;
        }
        if stopping { Err(Error::ShuttingDown.into()) } else { Ok(()) }
    }

    async fn accept(&mut self, frame: v1::PublishStreamRequest) -> Result<(), Error> {
        if let Some(options) = frame.options {
            if self.started {
                return Err(Error::invalid("options", "are for the first frame only"));
            }
            (self.window, self.failures_only) = convert::publish_options(options)?;
        }
        self.started = true;
        convert::check_batch(&frame.requests)?;
        let deadline = Instant::now() + self.context.config.wait_timeout;
        let Context { broker, keys, schedule, .. } = &self.context;
        for issued in publish_all(broker, keys, schedule, &self.call, frame.requests).await {
            self.pending.push_back(match issued {
                Ok(issued) => match issued.ready() {
                    Some(result) => PendingResult::Done(result),
                    None => PendingResult::Waiting(issued, deadline),
                },
                Err(error) => PendingResult::Done(Err(error)),
            });
        }
        let fits = self.waiting.set(self.pending.capacity() * size_of::<PendingResult>());
        fits.then_some(()).ok_or(Error::MemoryBudget)
    }

    /// Sends the results in front that are known.
    async fn send_done(&mut self) -> Result<(), Status> {
        let mut response =
            v1::PublishStreamResponse { first_sequence: self.next, ..v1::PublishStreamResponse::default() };
        while let Some(front) = self.pending.pop_front() {
            let result = match front {
                PendingResult::Done(result) => result,
                PendingResult::Waiting(issued, deadline) => match issued.ready() {
                    Some(result) => result,
                    None => {
                        self.pending.push_front(PendingResult::Waiting(issued, deadline));
                        break;
                    }
                },
            };
            if !self.failures_only || convert::is_failure(&result) {
                let result = Some(to_result(result));
                response.results.push(v1::SequencedResult { sequence: self.next, result });
            }
            self.next += 1;
            response.count += 1;
        }
        if response.count > 0 {
            let mut holding = self.caller_memory.open();
            let size = response.encoded_len() + response.results.len() * size_of::<v1::SequencedResult>();
            if !holding.set(size) {
                return Err(Error::MemoryBudget.into());
            }
            // A caller that went away is noticed by the task around us.
            let _ = self.sender.send((Ok(response), Some(holding))).await;
        }
        Ok(())
    }
}
