//! `gateway.v1.Publisher`. Each frame or call is one turn: routed and flushed before anything is awaited.

use std::{collections::VecDeque, pin::Pin, sync::Arc};

use broker::{Broker, DirectOutcome, Published, Routing, Shortage, Spread, Turn};
use gateway_core::{
    Commit, Durability, Effort, Outcome, Receipt, ReceiptState, Refused, Timestamp, metrics::count,
};
use prost::Message as _;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tokio_stream::{Stream, StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::grpc::{
    Context,
    messages::{
        answers,
        convert::{self, MAX_BATCH, Publication, Wait},
    },
    now,
    proto::{gateway::v1, server::publisher_server::Publisher},
    server::{
        access::Call,
        calls::Standing,
        deadline::deadline,
        purse::{Holding, Purse},
    },
    status::{Error, Level, Reached, drop_error},
};

const DEFAULT_WINDOW: usize = 1_000;
const MAX_WINDOW: usize = 10_000;
/// Response frames of a publish stream that wait for the caller to read them.
const RESPONSE_FRAMES: usize = 16;

/// The service.
pub(in crate::grpc) struct PublisherService {
    pub(in crate::grpc) context: Context,
}

/// A message that was routed, and perhaps a receipt to wait for.
struct Routed {
    published: Published,
    wait: Wait,
    receipt: Option<Arc<Receipt>>,
    /// What must be on disk first.
    commit: Option<Arc<Commit>>,
}

impl Routed {
    /// What is known now; `None` if it must be waited for.
    fn ready(&self) -> Option<Result<v1::PublishResponse, Error>> {
        if let Some(commit) = &self.commit {
            return Some(
                commit.result()?.map_err(|Refused| Error::StoreRefused).and_then(|()| self.response(None)),
            );
        }
        let state = match &self.receipt {
            None => None,
            Some(receipt) => Some(receipt.state()).filter(|state| self.is_done(state)).map(Some)?,
        };
        Some(self.response(state))
    }

    fn response(&self, state: Option<ReceiptState>) -> Result<v1::PublishResponse, Error> {
        Ok(answers::publish_response(self.published, self.wait, state))
    }

    /// Whether every receiver that took it while online did its part. Offline sessions are not waited for.
    fn is_done(&self, state: &ReceiptState) -> bool {
        let reached = match self.wait {
            Wait::Accepted | Wait::Durable => return true,
            Wait::Sent => state.sent,
            Wait::Acked => state.acked.saturating_add(state.rejected),
        };
        reached.saturating_add(state.dropped) >= self.published.sent
    }

    /// Waits until done, `deadline`, or the gateway shuts down. Cancel safe.
    async fn finish(
        &self,
        deadline: Instant,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<v1::PublishResponse, Error> {
        if let Some(result) = self.ready() {
            return result;
        }
        let mut shutdown = shutdown.clone();
        tokio::select! {
            biased;
            result = self.wait() => result,
            // A sender that is gone counts as asking.
            _ = shutdown.wait_for(|stop| *stop) => Err(Error::CutShort(self.reached())),
            () = sleep_until(deadline) => Err(Error::Deadline(self.reached())),
        }
    }

    /// Waits until done, however long that takes. Cancel safe.
    async fn wait(&self) -> Result<v1::PublishResponse, Error> {
        if let Some(commit) = &self.commit {
            return commit
                .wait()
                .await
                .map_err(|Refused| Error::StoreRefused)
                .and_then(|()| self.response(None));
        }
        match &self.receipt {
            Some(receipt) => self.response(Some(receipt.wait(|state| self.is_done(state)).await)),
            None => self.response(None),
        }
    }

    /// How far it came by now.
    fn reached(&self) -> Reached {
        let state = self.receipt.as_ref().map_or_else(ReceiptState::default, |receipt| receipt.state());
        let waits_for_the_disk = self.commit.is_some();
        let all_sent = state.sent.saturating_add(state.dropped) >= self.published.sent;
        let level = if all_sent && !waits_for_the_disk { Level::Sent } else { Level::Accepted };
        Reached { level, state }
    }
}

/// Lets the other calls of this thread go first.
async fn pause(turn: &mut Turn) {
    turn.flush();
    turn.effort.renew();
    tokio::task::yield_now().await;
}

/// Validates and routes one message; the caller flushes `turn`. Not to be cancelled for speed: if it is dropped, the
/// rest of the receivers get the message at once.
async fn publish(
    broker: &Broker,
    call: &Call,
    request: v1::PublishRequest,
    at: Timestamp,
    turn: &mut Turn,
) -> Result<Routed, Error> {
    let publication = convert::publication(request, broker.limits())?;
    turn.effort.spend(Effort::REQUEST);
    check_scope(call, &publication)?;
    route(broker, &publication, at, turn).await
}

/// The topic must be in scope, and the device if there is one.
pub(in crate::grpc) fn check_scope(call: &Call, publication: &Publication) -> Result<(), Error> {
    call.check_topic("topic", &publication.topic)?;
    publication.device.as_ref().map_or(Ok(()), |device| call.check_device("device_id", device))
}

async fn route(
    broker: &Broker,
    publication: &Publication,
    at: Timestamp,
    turn: &mut Turn,
) -> Result<Routed, Error> {
    let receipt = matches!(publication.wait, Wait::Sent | Wait::Acked).then(Arc::<Receipt>::default);
    let mut message = publication.message(at);
    message.receipt = receipt.as_ref();
    message.durability = match publication.wait {
        Wait::Durable => Durability::Always,
        // Nobody waits for the disk.
        _ => broker.durability(&publication.topic, None).max(Durability::Interval),
    };
    let (published, commit) = match &publication.device {
        None => match broker.publish_some(&message, turn) {
            Routing::Done(published) => (published, message.issued().cloned()),
            Routing::More(spread) => spread_all(spread, turn).await,
        },
        Some(device) => {
            let outcome = broker.publish_to_device(device, &message, publication.offline, turn);
            (direct(outcome)?, message.issued().cloned())
        }
    };
    if let Some(commit) = &commit {
        commit.done();
    }
    if let Some(refusal) = published.refused {
        return Err(refused(refusal));
    }
    count(|c| c.grpc_published.add(1));
    Ok(Routed { published, wait: publication.wait, receipt: receipt.filter(|_| published.sent > 0), commit })
}

/// Hands a message to the rest of its receivers.
async fn spread_all(mut spread: Box<Spread>, turn: &mut Turn) -> (Published, Option<Arc<Commit>>) {
    loop {
        pause(turn).await;
        if let Some(published) = spread.go_on(turn) {
            return (published, spread.commit().cloned());
        }
    }
}

fn refused(refusal: Shortage) -> Error {
    match refusal {
        Shortage::Memory => Error::MemoryBudget,
        Shortage::Store => Error::StoreRefused,
    }
}

/// The result of a message to one device in the form of a routed one.
pub(in crate::grpc) fn direct(outcome: DirectOutcome) -> Result<Published, Error> {
    let one = Published { matched: 1, ..Published::default() };
    match outcome {
        DirectOutcome::UnknownDevice => Err(Error::DeviceNotFound),
        DirectOutcome::DeviceOffline => Err(Error::DeviceOffline),
        DirectOutcome::Refused(refusal) => Err(refused(refusal)),
        DirectOutcome::Done(Outcome::Sent) => Ok(Published { sent: 1, ..one }),
        DirectOutcome::Done(Outcome::Ignored) => Ok(Published::default()),
        DirectOutcome::Done(Outcome::Queued) => Ok(Published { queued: 1, ..one }),
        DirectOutcome::Done(Outcome::Dropped(reason)) => match drop_error(reason) {
            Some(error) => Err(error),
            None => Ok(Published { dropped: 1, reason: Some(reason), ..one }),
        },
    }
}

fn to_result(result: Result<v1::PublishResponse, Error>) -> v1::PublishResult {
    let result = match result {
        Ok(response) => v1::publish_result::Result::Response(response),
        Err(error) => v1::publish_result::Result::Error(error.to_item()),
    };
    v1::PublishResult { result: Some(result) }
}

/// Messages of a batch between two flushes: more would fill the queue of a receiver that keeps up.
const MESSAGES_PER_FLUSH: usize = 256;

/// Routes many messages, in turns of a few.
async fn publish_all(
    broker: &Broker,
    call: &Call,
    requests: Vec<v1::PublishRequest>,
) -> Vec<Result<Routed, Error>> {
    let mut turn = Turn::default();
    let at = now();
    let mut routed = Vec::with_capacity(requests.len());
    for request in requests {
        if turn.effort.is_spent() {
            pause(&mut turn).await;
        }
        routed.push(publish(broker, call, request, at, &mut turn).await);
        if routed.len().is_multiple_of(MESSAGES_PER_FLUSH) {
            turn.flush();
        }
    }
    turn.flush();
    routed
}

#[tonic::async_trait]
impl Publisher for PublisherService {
    async fn publish(
        &self,
        request: Request<v1::PublishRequest>,
    ) -> Result<Response<v1::PublishResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let deadline = deadline(request.metadata(), self.context.config.wait_timeout);
        let routed = {
            let mut turn = Turn::default();
            let routed = publish(&self.context.broker, &call, request.into_inner(), now(), &mut turn).await;
            turn.flush();
            routed?
        };
        Ok(Response::new(routed.finish(deadline, &self.context.shutdown).await?))
    }

    async fn publish_batch(
        &self,
        request: Request<v1::PublishBatchRequest>,
    ) -> Result<Response<v1::PublishBatchResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let deadline = deadline(request.metadata(), self.context.config.wait_timeout);
        let requests = request.into_inner().requests;
        check_batch(&requests)?;
        let mut results = Vec::with_capacity(requests.len());
        for routed in publish_all(&self.context.broker, &call, requests).await {
            results.push(to_result(match routed {
                Ok(routed) => routed.finish(deadline, &self.context.shutdown).await,
                Err(error) => Err(error),
            }));
        }
        Ok(Response::new(v1::PublishBatchResponse { results }))
    }

    type PublishStreamStream = Pin<Box<dyn Stream<Item = Result<v1::PublishStreamResponse, Status>> + Send>>;

    async fn publish_stream(
        &self,
        request: Request<Streaming<v1::PublishStreamRequest>>,
    ) -> Result<Response<Self::PublishStreamStream>, Status> {
        let call = Call::of(request.extensions())?;
        let slot = self.context.streams.open(None)?;
        let (sender, receiver) = mpsc::channel(RESPONSE_FRAMES);
        let purse = match request.extensions().get::<Arc<Standing>>() {
            Some(standing) => Arc::clone(standing.purse()),
            None => Purse::new(Arc::clone(self.context.broker.account())),
        };
        let run = PublishRun {
            context: self.context.clone(),
            call,
            sender: sender.clone(),
            pending: VecDeque::new(),
            next: 1,
            window: DEFAULT_WINDOW,
            failures_only: false,
            started: false,
            waiting: purse.open(),
            purse,
        };
        tokio::spawn(async move {
            let _slot = slot;
            let ended = tokio::select! {
                result = run.run(request.into_inner()) => result,
                () = sender.closed() => return,
            };
            if let Err(status) = ended {
                let _ = sender.send((Err(status), None)).await;
            }
        });
        // From here on the answer's bytes are charged.
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(|(response, _)| response))))
    }
}

fn check_batch(requests: &[v1::PublishRequest]) -> Result<(), Error> {
    if requests.len() > MAX_BATCH {
        return Err(Error::invalid("requests", format!("has more than {MAX_BATCH} items")));
    }
    Ok(())
}

/// One message of a publish stream whose result was not yet sent.
enum Unanswered {
    Done(Result<v1::PublishResponse, Error>),
    Waiting(Routed, Instant),
}

/// What a publish stream does next.
enum StreamEvent {
    /// A frame, or the end of frames.
    Frame(Option<v1::PublishStreamRequest>),
    /// The first pending message has its result.
    Done(Result<v1::PublishResponse, Error>),
    /// The gateway shuts down.
    Stop,
}

/// A publish stream at work.
struct PublishRun {
    context: Context,
    call: Arc<Call>,
    sender: mpsc::Sender<Unread>,
    /// In order of sequence; at most the window and one frame.
    pending: VecDeque<Unanswered>,
    /// Sequence of the first pending message.
    next: u64,
    window: usize,
    failures_only: bool,
    started: bool,
    /// What is pending, on the memory account.
    waiting: Holding,
    purse: Arc<Purse>,
}

/// A response that waits for the caller to read it, and what it is charged for.
type Unread = (Result<v1::PublishStreamResponse, Status>, Option<Holding>);

impl PublishRun {
    /// Reads frames while the window has room, and sends results in order, until the caller is done. When the gateway
    /// shuts down, the results of what was read are sent first.
    async fn run(mut self, mut frames: Streaming<v1::PublishStreamRequest>) -> Result<(), Status> {
        let mut shutdown = self.context.shutdown.clone();
        let (mut reading, mut stopping) = (true, false);
        while reading || !self.pending.is_empty() {
            let room = self.pending.len() < self.window;
            let event = {
                let front = async {
                    match self.pending.front() {
                        Some(Unanswered::Waiting(routed, deadline)) => {
                            routed.finish(*deadline, &self.context.shutdown).await
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
                        crate::grpc::server::request_size::too_large(&status).map_or(status, Status::from)
                    })?),
                }
            };
            match event {
                StreamEvent::Frame(Some(frame)) => self.accept(frame).await?,
                StreamEvent::Frame(None) => reading = false,
                StreamEvent::Stop => (reading, stopping) = (false, true),
                StreamEvent::Done(result) => {
                    if let Some(front) = self.pending.front_mut() {
                        *front = Unanswered::Done(result);
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
            self.window = match options.window as usize {
                0 => DEFAULT_WINDOW,
                window if window <= MAX_WINDOW => window,
                _ => return Err(Error::invalid("options.window", format!("is more than {MAX_WINDOW}"))),
            };
            let detail: v1::ResultDetail = convert::known(options.detail, "options.detail")?;
            self.failures_only = detail == v1::ResultDetail::Failures;
        }
        self.started = true;
        check_batch(&frame.requests)?;
        let deadline = Instant::now() + self.context.config.wait_timeout;
        for routed in publish_all(&self.context.broker, &self.call, frame.requests).await {
            self.pending.push_back(match routed {
                Ok(routed) => match routed.ready() {
                    Some(result) => Unanswered::Done(result),
                    None => Unanswered::Waiting(routed, deadline),
                },
                Err(error) => Unanswered::Done(Err(error)),
            });
        }
        let fits = self.waiting.set(self.pending.capacity() * size_of::<Unanswered>());
        fits.then_some(()).ok_or(Error::MemoryBudget)
    }

    /// Sends the results in front that are known.
    async fn send_done(&mut self) -> Result<(), Status> {
        let mut response =
            v1::PublishStreamResponse { first_sequence: self.next, ..v1::PublishStreamResponse::default() };
        while let Some(front) = self.pending.pop_front() {
            let result = match front {
                Unanswered::Done(result) => result,
                Unanswered::Waiting(routed, deadline) => match routed.ready() {
                    Some(result) => result,
                    None => {
                        self.pending.push_front(Unanswered::Waiting(routed, deadline));
                        break;
                    }
                },
            };
            let silent = self.failures_only
                && matches!(&result, Ok(response) if !matches!(
                    response.outcome(),
                    v1::Outcome::Dropped | v1::Outcome::Rejected
                ));
            if !silent {
                let result = Some(to_result(result));
                response.results.push(v1::SequencedResult { sequence: self.next, result });
            }
            self.next += 1;
            response.count += 1;
        }
        if response.count > 0 {
            let mut holding = self.purse.open();
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

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Duration};

    use broker::BrokerConfig;
    use gateway_core::DropReason;

    use super::*;

    #[test]
    fn direct_results_are_outcomes_or_errors() {
        let done = |outcome| direct(DirectOutcome::Done(outcome));
        assert_eq!(direct(DirectOutcome::UnknownDevice), Err(Error::DeviceNotFound));
        assert_eq!(direct(DirectOutcome::DeviceOffline), Err(Error::DeviceOffline));
        assert_eq!(direct(DirectOutcome::Refused(Shortage::Store)), Err(Error::StoreRefused));
        assert_eq!(done(Outcome::Dropped(DropReason::TooLarge)), Err(Error::PacketTooLarge));
        assert_eq!(done(Outcome::Dropped(DropReason::QueueFull)), Err(Error::QueueFull));
        assert_eq!(done(Outcome::Sent).unwrap().sent, 1);
        assert_eq!(done(Outcome::Queued).unwrap().queued, 1);
        assert_eq!(done(Outcome::Dropped(DropReason::Offline)).unwrap().dropped, 1);
    }

    /// One call would keep a thread of the services, and all calls on it, until the last of its messages is routed.
    #[test]
    fn a_large_batch_lets_other_calls_go_first() {
        let broker = Broker::new(BrokerConfig {
            limits: Arc::default(),
            non_broker: false,
            namespace: String::new(),
            listener_strategies: Default::default(),
            latest: None,
            history: None,
            stores: None,
            log: None,
            durability: Default::default(),
            judge_will: None,
            tenants: Default::default(),
        });
        let request = v1::PublishRequest { topic: "t".to_owned(), ..Default::default() };
        let call = Call::unlimited();
        let mut all = pin!(publish_all(&broker, &call, vec![request; MAX_BATCH]));
        let mut polls = 1;
        // Outside of a runtime a task that yields is woken at once.
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let results = loop {
            match all.as_mut().poll(&mut cx) {
                std::task::Poll::Ready(results) => break results,
                std::task::Poll::Pending => polls += 1,
            }
        };
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), MAX_BATCH);
        let least = MAX_BATCH * Effort::REQUEST as usize / Effort::TURN as usize;
        assert!(least > 1 && polls >= least, "{polls} polls");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_with_all_online_receivers_or_at_the_deadline() {
        let receipt = Arc::new(Receipt::default());
        let published = Published { matched: 3, sent: 2, queued: 1, ..Published::default() };
        let routed =
            Routed { published, wait: Wait::Acked, receipt: Some(Arc::clone(&receipt)), commit: None };
        assert!(routed.ready().is_none());
        receipt.update(|state| state.sent = 2);
        let deadline = Instant::now() + Duration::from_secs(1);
        let (stop, shutdown) = watch::channel(false);
        let Err(Error::Deadline(reached)) = routed.finish(deadline, &shutdown).await else { panic!() };
        assert_eq!(reached.level, Level::Sent);
        stop.send_replace(true);
        assert_eq!(routed.finish(deadline, &shutdown).await, Err(Error::CutShort(reached)));

        receipt.update(|state| {
            state.acked = 1;
            state.dropped = 1;
            state.reason = Some(DropReason::ConnectionLost);
            state.code = Some(16);
        });
        let response = routed.ready().unwrap().unwrap();
        assert_eq!(response.outcome(), v1::Outcome::Acked);
        assert_eq!((response.sent, response.dropped, response.reason_code), (1, 1, Some(16)));
        assert_eq!(response.drop_reason(), v1::DropReason::ConnectionLost);
        let done = routed.finish(deadline, &shutdown).await.unwrap();
        assert_eq!(
            done.outcome(),
            v1::Outcome::Acked,
            "what is known is told, also at shutdown and too late"
        );

        receipt.update(|state| {
            state.acked = 0;
            state.answered(0x97);
        });
        let response = routed.ready().unwrap().unwrap();
        assert_eq!((response.outcome(), response.rejected), (v1::Outcome::Rejected, 1));
        assert_eq!(response.reason_code, Some(0x97));
    }
}
