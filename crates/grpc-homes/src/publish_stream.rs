//! `Publisher/PublishStream` over several homes. Each has a stream of its own, opened with its first message, so that order holds
//! at every home; results are told in the order of the caller. A home that breaks off fails the messages that it has not answered,
//! and is tried again with the next.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
};

use grpc_messages::{convert, status::Error};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::{Stream as _, StreamExt as _, wrappers::ReceiverStream};
use tonic::{Status, Streaming, codegen::BoxFuture};

use super::{
    channel::{CallHomes, PassedOn},
    merged::Responses,
    publish::{PublishFailure, Tally, cost, homes_of, of_result, to_result},
};
use grpc::{MemoryReservation, proto::gateway::v1};

/// Responses that wait for the caller to read them.
const RESPONSES: usize = 16;
/// Frames that wait for a home. Each has a message that waits for its result, and of those there are no more than the window and
/// a frame.
const FRAMES: usize = convert::MAX_WINDOW + 1;

/// A response that waits for the caller to read it, and its charge.
type UnreadResponse = (Result<v1::PublishStreamResponse, Status>, Option<MemoryReservation>);

/// Opens a stream.
pub(super) async fn open(
    cluster: CallHomes,
    call: PassedOn,
    requests: Streaming<v1::PublishStreamRequest>,
) -> Result<Responses<v1::PublishStreamResponse>, Status> {
    let (sender, receiver) = mpsc::channel(RESPONSES);
    let held = cluster.hold(0)?;
    let run = HomePublishRun {
        homes: cluster.all().map(|_| None).collect(),
        cluster,
        call,
        sender: sender.clone(),
        pending: VecDeque::new(),
        next: 1,
        window: convert::DEFAULT_WINDOW,
        failures_only: false,
        started: false,
        bytes: 0,
        held,
    };
    tokio::spawn(async move {
        let ended = tokio::select! {
            result = run.run(requests) => result,
            () = sender.closed() => return,
        };
        if let Err(status) = ended {
            let _ = sender.send((Err(status), None)).await;
        }
    });
    Ok(Box::pin(ReceiverStream::new(receiver).map(|(response, _)| response)))
}

/// A message whose result was not yet sent.
struct UnansweredMessage {
    /// Homes that have not answered.
    left: usize,
    tally: Tally,
    bytes: usize,
}

/// A stream at work.
struct HomePublishRun {
    cluster: CallHomes,
    call: PassedOn,
    sender: mpsc::Sender<UnreadResponse>,
    /// By home: its stream, if it is open.
    homes: Vec<Option<HomeStream>>,
    /// In order of sequence; at most the window and one frame.
    pending: VecDeque<UnansweredMessage>,
    /// Sequence of the first pending message.
    next: u64,
    window: usize,
    failures_only: bool,
    started: bool,
    /// Cost of the pending messages.
    bytes: usize,
    held: MemoryReservation,
}

/// Next event of a publish stream.
enum HomeStreamEvent {
    /// A frame, or the end of frames.
    Frame(Option<v1::PublishStreamRequest>),
    /// An answer of a home, or the end of its stream.
    Answer(u16, Option<Result<v1::PublishStreamResponse, Status>>),
}

impl HomePublishRun {
    /// Reads frames while the window has room, and sends results in order, until the caller is done.
    async fn run(mut self, mut frames: Streaming<v1::PublishStreamRequest>) -> Result<(), Status> {
        let mut reading = true;
        while reading || !self.pending.is_empty() {
            let room = self.pending.len() < self.window;
            let event = tokio::select! {
                (home, answer) = next_answer(&mut self.homes) => HomeStreamEvent::Answer(home, answer),
                frame = frames.message(), if reading && room => HomeStreamEvent::Frame(frame?),
            };
            match event {
                HomeStreamEvent::Frame(Some(frame)) => self.accept(frame)?,
                HomeStreamEvent::Frame(None) => {
                    reading = false;
                    for home in self.homes.iter_mut().flatten() {
                        home.frames = None;
                    }
                }
                HomeStreamEvent::Answer(home, answer) => self.note(home, answer),
            }
            self.send_done().await?;
        }
        Ok(())
    }

    /// Gives the messages of a frame to their homes.
    fn accept(&mut self, frame: v1::PublishStreamRequest) -> Result<(), Error> {
        if let Some(options) = frame.options {
            if self.started {
                return Err(Error::invalid("options", "are for the first frame only"));
            }
            (self.window, self.failures_only) = convert::publish_options(options)?;
        }
        self.started = true;
        convert::check_batch(&frame.requests)?;
        let mut parts: Vec<(Vec<u64>, Vec<v1::PublishRequest>)> =
            self.homes.iter().map(|_| Default::default()).collect();
        for request in frame.requests {
            let sequence = self.next + self.pending.len() as u64;
            let homes = homes_of(&self.cluster, &request);
            let bytes = cost(&request, homes.len()) + size_of::<UnansweredMessage>();
            let message = UnansweredMessage { left: homes.len(), tally: Tally::default(), bytes };
            for home in homes {
                let (sequences, requests) = &mut parts[usize::from(home)];
                sequences.push(sequence);
                requests.push(request.clone());
            }
            self.bytes += message.bytes;
            self.pending.push_back(message);
        }
        if !self.held.set(self.bytes) {
            return Err(Error::MemoryBudget);
        }
        for (home, (sequences, requests)) in self.cluster.all().zip(parts) {
            if !requests.is_empty() {
                self.give(home, &sequences, requests);
            }
        }
        Ok(())
    }

    /// Gives messages to a home, whose stream is opened if it is not.
    fn give(&mut self, home: u16, sequences: &[u64], requests: Vec<v1::PublishRequest>) {
        let place = usize::from(home);
        let is_new = self.homes[place].is_none();
        let options = is_new.then(|| v1::PublishStreamOptions {
            window: u32::try_from(convert::MAX_WINDOW).unwrap_or(u32::MAX),
            detail: v1::ResultDetail::All.into(),
        });
        let stream =
            self.homes[place].get_or_insert_with(|| HomeStream::open(&self.cluster, &self.call, home));
        stream.order.extend(sequences);
        let frame = v1::PublishStreamRequest { requests, options };
        // One that takes no more has ended, which fails what it has not answered.
        if let Some(frames) = &stream.frames
            && let Err(mpsc::error::TrySendError::Full(_)) = frames.try_send(frame)
        {
            self.fail(home, &Error::MemoryBudget.into());
        }
    }

    /// Notes the results that a home has told.
    fn note(&mut self, home: u16, answer: Option<Result<v1::PublishStreamResponse, Status>>) {
        match answer {
            Some(Ok(response)) => {
                for told in response.results {
                    let sequence =
                        self.homes[usize::from(home)].as_mut().and_then(|home| home.order.pop_front());
                    if let (Some(sequence), Some(result)) = (sequence, told.result) {
                        self.tell(home, sequence, of_result(result));
                    }
                }
            }
            Some(Err(status)) => self.fail(home, &status),
            None => self.fail(home, &Status::from(Error::Internal)),
        }
    }

    /// Ends the stream of a home, and fails what it has not answered.
    fn fail(&mut self, home: u16, status: &Status) {
        let Some(stream) = self.homes[usize::from(home)].take() else { return };
        for sequence in stream.order {
            self.tell(home, sequence, Err(PublishFailure::from(status.clone())));
        }
    }

    fn tell(&mut self, home: u16, sequence: u64, result: Result<v1::PublishResponse, PublishFailure>) {
        let at = sequence.checked_sub(self.next).and_then(|at| usize::try_from(at).ok());
        if let Some(message) = at.and_then(|at| self.pending.get_mut(at)) {
            message.left -= 1;
            message.tally.add(home, result);
        }
    }

    /// Sends the results in front that are known.
    async fn send_done(&mut self) -> Result<(), Status> {
        let mut response = v1::PublishStreamResponse { first_sequence: self.next, ..Default::default() };
        while let Some(message) = self.pending.pop_front_if(|message| message.left == 0) {
            let result = message.tally.finish();
            if !self.failures_only || convert::is_failure(&result) {
                let result = Some(to_result(result));
                response.results.push(v1::SequencedResult { sequence: self.next, result });
            }
            self.next += 1;
            response.count += 1;
            self.bytes -= message.bytes;
        }
        if response.count > 0 {
            // The charge never grows here.
            self.held.set(self.bytes);
            let size = response.encoded_len() + response.results.len() * size_of::<v1::SequencedResult>();
            let held = self.cluster.hold(size)?;
            // A caller that went away is noticed by the task around us.
            let _ = self.sender.send((Ok(response), Some(held))).await;
        }
        Ok(())
    }
}

/// The stream of a home.
struct HomeStream {
    /// Gone once the caller is done.
    frames: Option<mpsc::Sender<v1::PublishStreamRequest>>,
    answers: HomeAnswers,
    /// Sequences of the messages that it has and has not answered, in its order.
    order: VecDeque<u64>,
}

/// Answers of a home.
enum HomeAnswers {
    Opening(BoxFuture<Streaming<v1::PublishStreamResponse>, Status>),
    Open(Box<Streaming<v1::PublishStreamResponse>>),
}

impl HomeStream {
    fn open(cluster: &CallHomes, call: &PassedOn, home: u16) -> Self {
        let (frames, receiver) = mpsc::channel(FRAMES);
        let (cluster, call) = (cluster.clone(), call.clone());
        let opening = async move { cluster.stream(home, &call, ReceiverStream::new(receiver)).await };
        let answers = HomeAnswers::Opening(Box::pin(opening));
        Self { frames: Some(frames), answers, order: VecDeque::new() }
    }

    fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<v1::PublishStreamResponse, Status>>> {
        loop {
            match &mut self.answers {
                HomeAnswers::Opening(opening) => match ready!(opening.as_mut().poll(cx)) {
                    Ok(open) => self.answers = HomeAnswers::Open(Box::new(open)),
                    Err(status) => return Poll::Ready(Some(Err(status))),
                },
                HomeAnswers::Open(open) => return Pin::new(&mut **open).poll_next(cx),
            }
        }
    }
}

/// The next answer of a home. Never ready while none is open. Cancel safe.
async fn next_answer(
    homes: &mut [Option<HomeStream>],
) -> (u16, Option<Result<v1::PublishStreamResponse, Status>>) {
    std::future::poll_fn(|cx| {
        for (home, stream) in (0..).zip(homes.iter_mut()) {
            if let Some(stream) = stream
                && let Poll::Ready(answer) = stream.poll_answer(cx)
            {
                return Poll::Ready((home, answer));
            }
        }
        Poll::Pending
    })
    .await
}
