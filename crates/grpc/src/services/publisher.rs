//! `gateway.v1.Publisher`. Each frame or call is one turn: routed and flushed before anything is awaited.
//!
//! ```text
//! routed    a message that was routed, and the wait for what becomes of it
//! keys      messages that are published once however often they are asked for
//! stream    PublishStream at work
//! many      PublishToDevices at work
//! scheduled messages that are published later
//! ```

pub(crate) mod keys;
mod many;
mod routed;
pub(crate) mod scheduled;
mod stream;

use std::{pin::Pin, sync::Arc};

use broker::{Broker, DirectOutcome, Published, Routing, Shortage, Spread, Turn};
use gateway_core::{Commit, Durability, Effort, Outcome, Receipt, SharedMessage, Timestamp, clock};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_stream::{Stream, StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use self::{
    keys::{KeyClaim, Keyed, RequestKey, RequestKeys},
    many::{ManyRun, MultiPublish},
    routed::Routed,
    scheduled::{Schedule, ScheduledPublish},
    stream::PublishRun,
};
use crate::{
    Context,
    counters::count,
    now,
    proto::{gateway::v1, server::publisher_server::Publisher},
    server::{
        access::Call,
        caller_memory::CallerMemory,
        calls::ConnectionCalls,
        deadline::{deadline, within},
    },
};
use grpc_messages::{
    answers,
    convert::{self, MAX_BATCH, Publication, Wait},
    page::RequestPages,
    status::{Error, drop_error},
};

/// Response frames of a publish stream that wait for the caller to read them.
const RESPONSE_FRAMES: usize = 16;

/// The service.
pub(crate) struct PublisherService {
    pub(crate) context: Context,
}

/// Lets the other calls of this thread go first.
pub(crate) async fn pause(turn: &mut Turn) {
    turn.flush();
    turn.effort.renew();
    tokio::task::yield_now().await;
}

/// A message that was issued: by this call alone, or under a key that other calls may know.
enum Issued {
    Own(Routed),
    Keyed(Keyed),
}

impl Issued {
    /// Returns the result if it is known; `None` if the caller must wait for it.
    fn ready(&self) -> Option<Result<v1::PublishResponse, Error>> {
        match self {
            Self::Own(routed) => routed.ready(),
            Self::Keyed(keyed) => keyed.ready(),
        }
    }

    /// Waits until done, `deadline`, or the gateway shuts down. Cancel safe.
    async fn finish(
        &self,
        deadline: Instant,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<v1::PublishResponse, Error> {
        match self {
            Self::Own(routed) => routed.finish(deadline, shutdown).await,
            Self::Keyed(keyed) => keyed.finish(deadline, shutdown).await,
        }
    }
}

/// Validates and routes one message; the caller flushes `turn`. Not to be cancelled for speed: if it is dropped, the
/// rest of the receivers get the message at once.
async fn publish(
    broker: &Broker,
    keys: &Arc<RequestKeys>,
    schedule: &Arc<Schedule>,
    call: &Call,
    request: v1::PublishRequest,
    at: Timestamp,
    turn: &mut Turn,
) -> Result<Issued, Error> {
    let key = match request.idempotency_key.is_empty() {
        true => None,
        // Before anything is awaited.
        false => {
            turn.flush();
            RequestKey::of(call, &request).await?
        }
    };
    let publication = convert::publication(request, broker.limits())?;
    turn.effort.spend(Effort::REQUEST);
    check_scope(call, &publication)?;
    let Some(key) = key else {
        let routed = match publication.deliver_at {
            None => route(broker, &publication, at, turn).await?,
            Some(time) => routed_later(schedule.accept(publication, time, |_| None)?),
        };
        return Ok(Issued::Own(routed));
    };
    turn.effort.spend(Effort::REQUEST);
    let flight = match keys.claim(key)? {
        KeyClaim::First(flight) => flight,
        KeyClaim::Before(keyed) => return Ok(Issued::Keyed(keyed)),
    };
    let routed = match publication.deliver_at {
        None => route(broker, &publication, at, turn).await,
        Some(time) => {
            let record = |id: &str| Some(flight.record(&answers::scheduled_response(id)));
            schedule.accept(publication, time, record).map(routed_later)
        }
    };
    match routed {
        Ok(routed) => Ok(Issued::Keyed(flight.land(routed))),
        Err(error) => {
            flight.refuse(&error);
            Err(error)
        }
    }
}

/// Returns the result of a message that waits for its time, once it is on disk.
fn routed_later((id, commit): (String, Arc<Commit>)) -> Routed {
    commit.done();
    let published = Published::default();
    Routed {
        published,
        wait: Wait::Durable,
        receipt: None,
        commit: Some(commit),
        scheduled: Some(id),
        expiry: None,
    }
}

/// The topic must be in scope, and the device if there is one.
pub(crate) fn check_scope(call: &Call, publication: &Publication) -> Result<(), Error> {
    call.check_topic("topic", &publication.topic)?;
    publication.device.as_ref().map_or(Ok(()), |device| call.check_device("device_id", device))
}

async fn route(
    broker: &Broker,
    publication: &Publication,
    at: Timestamp,
    turn: &mut Turn,
) -> Result<Routed, Error> {
    let receipt = receipt(publication);
    let mut message = publication.message(at);
    message.receipt = receipt.as_ref();
    message.durability = durability(broker, publication);
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
    let expires = message.expires;
    drop(message);
    let routed = routed(publication, published, receipt, commit)?;
    let device = publication.device.as_deref();
    Ok(match device.zip(expires) {
        None => routed,
        Some((device, at)) => routed.until(broker, device, at),
    })
}

/// Hands to one device what is shared by all that get it.
fn route_to_device(
    broker: &Broker,
    publication: &Publication,
    shared: &Arc<SharedMessage>,
    device: &str,
    turn: &mut Turn,
) -> Result<Routed, Error> {
    let receipt = receipt(publication);
    let awaited = receipt.as_ref().map(|receipt| shared.with_receipt(Arc::clone(receipt)));
    let mut message = awaited.as_ref().unwrap_or(shared).borrow_at(now());
    message.durability = durability(broker, publication);
    let outcome = broker.publish_to_device(device, &message, publication.offline, turn);
    let commit = message.issued().cloned();
    let routed = routed(publication, direct(outcome)?, receipt, commit)?;
    Ok(match message.expires {
        None => routed,
        Some(at) => routed.until(broker, device, at),
    })
}

/// Returns a receipt that records how far a message comes, if the caller waits for that.
fn receipt(publication: &Publication) -> Option<Arc<Receipt>> {
    matches!(publication.wait, Wait::Sent | Wait::Acked).then(Arc::<Receipt>::default)
}

fn durability(broker: &Broker, publication: &Publication) -> Durability {
    match publication.wait {
        Wait::Durable => Durability::Always,
        // Nobody waits for the disk.
        _ => broker.durability(&publication.topic, None).max(Durability::Interval),
    }
}

fn routed(
    publication: &Publication,
    published: Published,
    receipt: Option<Arc<Receipt>>,
    commit: Option<Arc<Commit>>,
) -> Result<Routed, Error> {
    if let Some(commit) = &commit {
        commit.done();
    }
    if let Some(refusal) = published.refused {
        return Err(refused(refusal));
    }
    count(|c| c.grpc_published.add(1));
    Ok(Routed {
        published,
        wait: publication.wait,
        receipt: receipt.filter(|_| published.sent > 0),
        commit,
        scheduled: None,
        expiry: None,
    })
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
pub(crate) fn direct(outcome: DirectOutcome) -> Result<Published, Error> {
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
    keys: &Arc<RequestKeys>,
    schedule: &Arc<Schedule>,
    call: &Call,
    requests: Vec<v1::PublishRequest>,
) -> Vec<Result<Issued, Error>> {
    let mut turn = Turn::default();
    let at = now();
    let mut issued = Vec::with_capacity(requests.len());
    for request in requests {
        if turn.effort.is_spent() {
            pause(&mut turn).await;
        }
        issued.push(publish(broker, keys, schedule, call, request, at, &mut turn).await);
        if issued.len().is_multiple_of(MESSAGES_PER_FLUSH) {
            turn.flush();
        }
    }
    turn.flush();
    issued
}

impl PublisherService {
    /// Returns the charges of the connection of a request.
    fn caller_memory<T>(&self, request: &Request<T>) -> Arc<CallerMemory> {
        match request.extensions().get::<Arc<ConnectionCalls>>() {
            Some(connection_calls) => Arc::clone(connection_calls.caller_memory()),
            None => CallerMemory::new(Arc::clone(self.context.broker.account())),
        }
    }
}

#[tonic::async_trait]
impl Publisher for PublisherService {
    async fn publish(
        &self,
        request: Request<v1::PublishRequest>,
    ) -> Result<Response<v1::PublishResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let deadline = deadline(request.metadata(), self.context.config.wait_timeout);
        let issued = {
            let Context { broker, keys, schedule, .. } = &self.context;
            let mut turn = Turn::default();
            let issued = publish(broker, keys, schedule, &call, request.into_inner(), now(), &mut turn).await;
            turn.flush();
            issued?
        };
        Ok(Response::new(issued.finish(deadline, &self.context.shutdown).await?))
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
        let Context { broker, keys, schedule, .. } = &self.context;
        for issued in publish_all(broker, keys, schedule, &call, requests).await {
            results.push(to_result(match issued {
                Ok(issued) => issued.finish(deadline, &self.context.shutdown).await,
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
        let slot = self.context.streams.open(&call)?;
        let (sender, receiver) = mpsc::channel(RESPONSE_FRAMES);
        let caller_memory = self.caller_memory(&request);
        let run = PublishRun::new(self.context.clone(), call, sender.clone(), caller_memory);
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

    async fn list_scheduled(
        &self,
        request: Request<v1::ListScheduledRequest>,
    ) -> Result<Response<v1::ListScheduledResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let mut request = request.into_inner();
        let (size, token) = (std::mem::take(&mut request.page_size), std::mem::take(&mut request.page_token));
        let limit = convert::page_size(size)?;
        let pages = RequestPages::of("ListScheduled", &request);
        let after = pages.start(&token)?;
        let after = after.as_deref().map(|after| place(after).ok_or(Error::PageTokenInvalid)).transpose()?;
        let wanted = |entry: &ScheduledPublish| {
            let device = entry.publication.device.as_deref();
            is_in_scope(&call, entry) && (request.device_id.is_empty() || device == Some(&*request.device_id))
        };
        let (found, next) = self.context.schedule.list(after, limit, wanted);
        let next = next.map(|(at, id)| format!("{} {id}", at.0));
        let messages = found.into_iter().map(|(id, entry)| scheduled_to_proto(id, &entry)).collect();
        let next_page_token = pages.token(next.as_deref());
        Ok(Response::new(v1::ListScheduledResponse { messages, next_page_token }))
    }

    async fn cancel_scheduled(
        &self,
        request: Request<v1::CancelScheduledRequest>,
    ) -> Result<Response<v1::CancelScheduledResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let id = request.schedule_id;
        call.about(&id);
        let schedule = &self.context.schedule;
        // A caller out of whose scope it is does not learn that it exists.
        if !schedule.get(&id).is_some_and(|entry| is_in_scope(&call, &entry)) {
            return Err(Error::ScheduleNotFound.into());
        }
        let cancelled = schedule.cancel(&id);
        within(&metadata, self.context.config.wait_timeout, cancelled).await?;
        Ok(Response::new(v1::CancelScheduledResponse {}))
    }

    type PublishToDevicesStream =
        Pin<Box<dyn Stream<Item = Result<v1::PublishToDevicesResponse, Status>> + Send>>;

    async fn publish_to_devices(
        &self,
        request: Request<v1::PublishToDevicesRequest>,
    ) -> Result<Response<Self::PublishToDevicesStream>, Status> {
        let call = Call::of(request.extensions())?;
        // Without one each device has the default, counted from its own message.
        let end = request.metadata().contains_key("grpc-timeout");
        let end = end.then(|| deadline(request.metadata(), self.context.config.wait_timeout));
        let caller_memory = self.caller_memory(&request);
        let many = MultiPublish::new(request.into_inner(), &self.context, &call)?;
        let slot = self.context.streams.open(&call)?;
        let (sender, receiver) = mpsc::channel(RESPONSE_FRAMES);
        let run = ManyRun::new(self.context.clone(), call, sender.clone(), many, end, caller_memory);
        tokio::spawn(async move {
            let _slot = slot;
            let ended = tokio::select! {
                biased;
                () = sender.closed() => return,
                result = run.run() => result,
            };
            if let Err(status) = ended {
                let _ = sender.send((Err(status), None)).await;
            }
        });
        // From here on the answer's bytes are charged.
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(|(response, _)| response))))
    }
}

/// Parses the place at which a page begins.
fn place(text: &str) -> Option<(Timestamp, u64)> {
    let (at, id) = text.split_once(' ')?;
    Some((Timestamp(at.parse().ok()?), id.parse().ok()?))
}

fn is_in_scope(call: &Call, entry: &ScheduledPublish) -> bool {
    let device = entry.publication.device.as_deref();
    call.scope().has_topic(&entry.publication.topic) && device.is_none_or(|id| call.scope().has_device(id))
}

fn scheduled_to_proto(schedule_id: String, entry: &ScheduledPublish) -> v1::ScheduledMessage {
    let ScheduledPublish { publication, at, created, .. } = entry;
    v1::ScheduledMessage {
        schedule_id,
        device_id: publication.device.clone(),
        topic: publication.topic.clone(),
        qos: answers::qos_to_proto(publication.qos),
        payload_bytes: publication.payload.len() as u64,
        deliver_time: Some(answers::time(clock::to_wall(*at))),
        create_time: Some(answers::time(clock::to_wall(*created))),
    }
}

fn check_batch(requests: &[v1::PublishRequest]) -> Result<(), Error> {
    if requests.len() > MAX_BATCH {
        return Err(Error::invalid("requests", format!("has more than {MAX_BATCH} items")));
    }
    Ok(())
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
        let broker = Broker::new(BrokerConfig::default());
        let request = v1::PublishRequest { topic: "t".to_owned(), ..Default::default() };
        let call = Call::unlimited();
        let options = keys::KeyOptions { most: 1, time: Duration::from_secs(1) };
        let keys = RequestKeys::open(options, None, broker.account(), watch::channel(false).1).unwrap();
        let options = scheduled::ScheduleOptions { most: 1, bytes: 1 };
        let schedule = Schedule::open(options, None, &broker).unwrap();
        let mut all = pin!(publish_all(&broker, &keys, &schedule, &call, vec![request; MAX_BATCH]));
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
}
