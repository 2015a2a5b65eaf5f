//! `gateway.v1.Consumer`: members of consumer groups.
//!
//! A stream has two halves, so that acknowledgements are heard while nothing can be sent: a task reads what the member says,
//! and the response takes messages from the group and encodes them straight into the frame that goes out. Both know the member;
//! when either ends, the stream does.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll, Waker},
    time::Duration,
};

use ::groups::{AckId, AckResult, ClaimedPlace, Credit, Delivery, IdRange, MAX_CLAIMS, Nack, Ranges, Room};
use broker::is_event;
use consumer_groups::{ConsumerGroups, Joining, LiveMember, MemberBatch};
use gateway_core::{
    PARTITIONS,
    clock::{self, now},
};
use parking_lot::Mutex;
use tokio::{
    task::AbortHandle,
    time::{Instant, Sleep, sleep_until, timeout},
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::groups::{failed, log_id, name_of_free, offered};
use crate::counters::count;
use crate::{
    context::Context,
    proto::{
        gateway::v1::{self, consume_item::Item},
        server::consumer_server::Consumer,
    },
    server::{
        access::Call,
        deadline::{deadline, within},
        request_size::too_large,
    },
    stream::{RawMessage, StreamSlot},
};
use grpc_messages::{
    answers,
    consumed::{Consumed, DeliveryContent, MessageId},
    convert, groups,
    status::Error,
};

/// Messages, and bytes of them, in a frame.
const FRAME_MESSAGES: usize = 512;
const FRAME_BYTES: usize = 64 << 10;
/// Ids and ranges of one request.
const MAX_IDS: usize = 10_000;
/// Time for which a gone member with an id keeps its place, if it names none.
const LEASE: Duration = Duration::from_secs(10);
/// Longest wait for the first request.
const FIRST: Duration = Duration::from_secs(10);
/// Bounds and default of a Fetch: messages, bytes, and the wait for them.
const MAX_FETCH: usize = 10_000;
const DEFAULT_FETCH: usize = 100;
const MAX_FETCH_BYTES: usize = 3 << 20;
const MAX_FETCH_WAIT: Duration = Duration::from_secs(30);

/// The service.
pub(crate) struct ConsumerService {
    pub(crate) context: Context,
}

/// Message from the half that reads to the half that writes: how the stream ends.
#[derive(Default)]
struct ConsumerEnd {
    ended: Option<Result<(), Status>>,
    waker: Option<Waker>,
}

/// Reader of a member's requests, until its stream ends.
struct Hearing {
    member: Arc<Mutex<LiveMember>>,
    said: Arc<Mutex<ConsumerEnd>>,
    bounds: Credit,
}

impl Hearing {
    async fn run(self, mut requests: Streaming<v1::ConsumeRequest>) {
        let ended = loop {
            // A member that acknowledges and takes no answers would fill the memory.
            let ahead = self.member.lock().is_ahead();
            if let Some(answered) = ahead {
                answered.notified().await;
                continue;
            }
            match requests.message().await {
                Ok(Some(request)) => {
                    if let Err(error) = self.hear(request) {
                        break Err(error.into());
                    }
                }
                Ok(None) => break Ok(()),
                Err(status) => break Err(unread(status)),
            }
        };
        let waker = {
            let mut said = self.said.lock();
            said.ended = Some(ended);
            said.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Does what one request says. Answers come with what the member gets.
    fn hear(&self, request: v1::ConsumeRequest) -> Result<(), Error> {
        use v1::consume_request::Action;

        match request.action.ok_or_else(|| Error::invalid("action", "is missing"))? {
            Action::Open(_) => return Err(Error::invalid("open", "was sent already")),
            Action::Flow(flow) => self.member.lock().set_credit(credit(flow, self.bounds))?,
            Action::Ack(ack) => {
                let ranges = ranges("ack", &ack)?;
                self.member.lock().acknowledge(&ranges)?;
            }
            Action::Nack(v1::Nack { which, delay, reason, dead_letter }) => {
                groups::reason("nack.reason", &reason)?;
                let ranges = ranges("nack.which", &which.unwrap_or_default())?;
                let delay = groups::wait("nack.delay", delay)?;
                self.member.lock().nack(&ranges, &Nack { delay, reason, dead_letter })?;
            }
            Action::Extend(v1::Extend { which, deadline }) => {
                let ranges = ranges("extend.which", &which.unwrap_or_default())?;
                let deadline = groups::wait("extend.deadline", deadline)?;
                let deadline = deadline.ok_or_else(|| Error::invalid("extend.deadline", "is missing"))?;
                self.member.lock().extend(&ranges, deadline)?;
            }
            Action::Drain(v1::Drain {}) => self.member.lock().drain()?,
        }
        Ok(())
    }
}

/// Returns the answer to a request that could not be read.
fn unread(status: Status) -> Status {
    too_large(&status).map_or(status, Status::from)
}

fn ranges_to_proto(ranges: impl Iterator<Item = IdRange>) -> Vec<v1::DeliveryRange> {
    ranges.map(|IdRange { first, last }| v1::DeliveryRange { first, last }).collect()
}

fn ranges(field: &str, ack: &v1::Ack) -> Result<Ranges, Error> {
    if ack.delivery_ids.len() + ack.ranges.len() > MAX_IDS {
        return Err(Error::invalid(field, format!("has more than {MAX_IDS} ids and ranges")));
    }
    if ack.ranges.iter().any(|range| range.first > range.last) {
        return Err(Error::invalid(format!("{field}.ranges"), "has a range that ends before it begins"));
    }
    let single = ack.delivery_ids.iter().map(|id| IdRange { first: *id, last: *id });
    let whole = ack.ranges.iter().map(|range| IdRange { first: range.first, last: range.last });
    Ok(Ranges::of(single.chain(whole)))
}

fn credit(flow: v1::Flow, bounds: Credit) -> Credit {
    let default = Credit::default();
    let messages = match flow.max_outstanding_messages as usize {
        0 => default.messages,
        messages => messages,
    };
    let bytes = match usize::try_from(flow.max_outstanding_bytes).unwrap_or(usize::MAX) {
        0 => default.bytes,
        bytes => bytes,
    };
    Credit { messages: messages.min(bounds.messages), bytes: bytes.min(bounds.bytes) }
}

/// A stream of deliveries.
pub(crate) struct Consuming {
    state: StreamPhase,
    /// Last item of the stream, after everything else: its end.
    last: Option<Result<(), Status>>,
    slot: StreamSlot,
}

enum StreamPhase {
    Opening(Pin<Box<dyn Future<Output = Result<OpenMember, Status>> + Send>>),
    Open(Box<OpenMember>),
    Ended,
}

/// A member with a stream.
struct OpenMember {
    member: Arc<Mutex<LiveMember>>,
    said: Arc<Mutex<ConsumerEnd>>,
    /// Ends the reading half.
    hearing: AbortHandle,
    group: Arc<ConsumerGroups>,
    /// Its name.
    name: String,
    call: Arc<Call>,
    member_id: String,
    /// For ids of messages.
    log: u64,
    heartbeat: Option<(Duration, Pin<Box<Sleep>>)>,
    shutdown: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The first item.
    opened: Option<v1::Opened>,
}

impl Drop for OpenMember {
    fn drop(&mut self) {
        // With it the last handle of the member goes.
        self.hearing.abort();
    }
}

impl OpenMember {
    /// Adds what there is to a frame; how the stream ends after it, if it does.
    fn poll_frame(
        &mut self,
        cx: &mut TaskContext<'_>,
        out: &mut Vec<u8>,
        slot: &StreamSlot,
    ) -> Option<Result<(), Status>> {
        if let Some(opened) = self.opened.take() {
            item(out, Item::Opened(opened));
        }
        // Before the group is asked: what is over is not begun.
        if self.shutdown.as_mut().poll(cx).is_ready() {
            self.member.lock().part();
            return Some(Err(Error::ShuttingDown.into()));
        }
        let polled = self.member.lock().poll_next(cx, Room { messages: FRAME_MESSAGES, bytes: FRAME_BYTES });
        match polled {
            Poll::Ready(Ok(batch)) => {
                self.encode(out, &batch);
                slot.sent(batch.deliveries.len() as u64);
                if batch.is_drained {
                    return Some(Ok(()));
                }
            }
            Poll::Ready(Err(ended)) => {
                return Some(Err(failed(&self.call, "open.group", &self.name, ended.into()).into()));
            }
            Poll::Pending => {}
        }
        let mut said = self.said.lock();
        match &mut said.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        said.ended.take()
    }

    fn encode(&self, out: &mut Vec<u8>, batch: &MemberBatch) {
        for answer in &batch.answers {
            let (ok, lost) = (ranges_to_proto(answer.ok.iter()), ranges_to_proto(answer.lost.iter()));
            item(out, Item::AckResults(v1::AckResults { ok, lost }));
        }
        if !batch.revoked.is_empty() {
            item(out, Item::Revoked(v1::Revoked { void: ranges_to_proto(batch.revoked.iter().copied()) }));
        }
        for gap in &batch.gaps {
            item(out, Item::Gap(groups::gap(gap)));
        }
        let log = self.log;
        for delivery in &batch.deliveries {
            let id = MessageId::new(log, delivery.partition, delivery.record.offset);
            let message = delivery.record.message.borrow();
            let content = match is_event(&delivery.record) {
                true => DeliveryContent::Event(message.payload),
                false => DeliveryContent::Message(&message),
            };
            let Delivery { id: delivery_id, attempt, deadline, .. } = *delivery;
            Consumed { delivery_id, attempt, deadline, id, content }.encode(out);
        }
        count(|c| c.grpc_delivered.add(batch.deliveries.len() as u64));
    }

    /// A heartbeat, if one is due.
    fn poll_heartbeat(&mut self, cx: &mut TaskContext<'_>, out: &mut Vec<u8>) {
        let Some((span, sleep)) = &mut self.heartbeat else { return };
        if sleep.as_mut().poll(cx).is_ready() {
            sleep.as_mut().reset(Instant::now() + *span);
            // Registers for the next.
            let _ = sleep.as_mut().poll(cx);
            let time = Some(answers::time(clock::to_wall(now())));
            let status = self.group.get(&self.name).ok().map(|info| groups::status(&info.status));
            item(out, Item::Heartbeat(v1::GroupHeartbeat { time, status }));
        }
    }
}

impl Stream for Consuming {
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<Self::Item>> {
        if let Some(last) = self.last.take() {
            self.state = StreamPhase::Ended;
            return Poll::Ready(last.err().map(Err));
        }
        if let StreamPhase::Opening(opening) = &mut self.state {
            match std::task::ready!(opening.as_mut().poll(cx)) {
                Ok(open) => {
                    self.slot.reads(&open.name, &open.member_id);
                    self.state = StreamPhase::Open(Box::new(open));
                }
                Err(status) => {
                    self.state = StreamPhase::Ended;
                    return Poll::Ready(Some(Err(status)));
                }
            }
        }
        let Self { state, slot, .. } = &mut *self;
        let StreamPhase::Open(open) = state else { return Poll::Ready(None) };
        let mut out = Vec::new();
        let last = open.poll_frame(cx, &mut out, slot);
        if last.is_none() {
            open.poll_heartbeat(cx, &mut out);
        }
        if !out.is_empty() {
            self.last = last;
            return Poll::Ready(Some(Ok(RawMessage(out.into()))));
        }
        match last {
            Some(last) => {
                self.state = StreamPhase::Ended;
                Poll::Ready(last.err().map(Err))
            }
            None => Poll::Pending,
        }
    }
}

fn item(out: &mut Vec<u8>, item: Item) {
    let item = v1::ConsumeItem { item: Some(item) };
    // Fully qualified: the trait is only for encoding here.
    prost::Message::encode_raw(&v1::ConsumeResponse { items: vec![item] }, out);
}

/// Reads the first request, and joins.
async fn open(
    context: Context,
    call: Arc<Call>,
    mut requests: Streaming<v1::ConsumeRequest>,
) -> Result<OpenMember, Status> {
    let mut shutdown = context.shutdown.clone();
    let first = tokio::select! {
        first = timeout(FIRST, requests.message()) => first.map_err(|_| Error::RequestIncomplete)?,
        _ = shutdown.wait_for(|stop| *stop) => return Err(Error::ShuttingDown.into()),
    };
    let first = first.map_err(unread)?.and_then(|request| request.action);
    let Some(v1::consume_request::Action::Open(first)) = first else {
        return Err(Error::invalid("open", "is not the first request").into());
    };
    groups::member("open.member_id", &first.member_id)?;
    let lease = groups::wait("open.lease", first.lease)?.unwrap_or(LEASE);
    let heartbeat = convert::heartbeat("open.heartbeat_interval", first.heartbeat_interval)?;
    let all = Arc::clone(offered(&context)?);
    let outstanding = claimed(&first.outstanding, log_id(&context))?;
    let bounds = bounds(&context);
    let credit = credit(first.flow.unwrap_or_default(), bounds);
    let name = name_of_free(&context, &call, "open.group", first.group)?;
    let (member_id, lease) = match first.member_id.is_empty() {
        // Nobody else has it, so nobody can come back for what it had.
        true => (format!("stream-{:032x}", random()), Duration::ZERO),
        false => (first.member_id, lease),
    };
    let scope = call.scope().clone();
    let joining = Joining { name: &member_id, lease, credit, scope, outstanding: &outstanding };
    let mut member = all.open(&name, joining).map_err(Error::from)?;
    let void = match outstanding.is_empty() {
        true => Ranges::default(),
        false => {
            let resumed = member.resume(outstanding.len()).await;
            resumed.map_err(|ended| failed(&call, "open.group", &name, ended.into()))?
        }
    };
    let opened = v1::Opened {
        member_id: member_id.clone(),
        partitions: PARTITIONS as u32,
        resumed: member.is_resumed(),
        outstanding: outstanding.len() as u32,
        void: ranges_to_proto(void.iter()),
    };
    let member = Arc::new(Mutex::new(member));
    let said = Arc::<Mutex<ConsumerEnd>>::default();
    let hearing = Hearing { member: Arc::clone(&member), said: Arc::clone(&said), bounds };
    let hearing = tokio::spawn(hearing.run(requests)).abort_handle();
    Ok(OpenMember {
        member,
        said,
        hearing,
        group: all,
        name,
        call,
        member_id,
        log: log_id(&context),
        heartbeat: heartbeat.map(|span| (span, Box::pin(sleep_until(Instant::now() + span)))),
        shutdown: Box::pin(async move {
            let _ = shutdown.wait_for(|stop| *stop).await;
        }),
        opened: Some(opened),
    })
}

/// The places of messages that a member says it works on; those of another log have none.
fn claimed(ids: &[String], log: u64) -> Result<Vec<ClaimedPlace>, Error> {
    if ids.len() > MAX_CLAIMS {
        return Err(Error::invalid("open.outstanding", format!("has more than {MAX_CLAIMS} entries")));
    }
    let places = ids.iter().map(|id| {
        let (of, partition, offset) = MessageId::parse(id)?;
        Some((of == log).then_some((partition, offset)))
    });
    let places = places.collect::<Option<_>>();
    places.ok_or_else(|| Error::invalid("open.outstanding", "has a text that is not a message_id"))
}

/// Returns the most messages and bytes that a member may have unacknowledged.
fn bounds(context: &Context) -> Credit {
    let groups = &context.config.groups;
    Credit { messages: groups.max_outstanding_messages, bytes: groups.max_outstanding_bytes.0 }
}

#[tonic::async_trait]
impl Consumer for ConsumerService {
    type ConsumeStream = Consuming;

    async fn consume(
        &self,
        request: Request<Streaming<v1::ConsumeRequest>>,
    ) -> Result<Response<Self::ConsumeStream>, Status> {
        let call = Call::of(request.extensions())?;
        offered(&self.context)?;
        let slot = self.context.streams.open(&call)?;
        // The answer begins at once: some clients wait for that before they say anything.
        let opening = open(self.context.clone(), call, request.into_inner());
        Ok(Response::new(Consuming { state: StreamPhase::Opening(Box::pin(opening)), last: None, slot }))
    }

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<v1::FetchResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let all = offered(&self.context)?;
        let until = deadline(request.metadata(), MAX_FETCH_WAIT);
        let request = request.into_inner();
        let member = request.member_id;
        groups::member("member_id", &member)?;
        if member.is_empty() {
            return Err(Error::invalid("member_id", "is empty").into());
        }
        let messages = match request.max_messages as usize {
            0 => DEFAULT_FETCH,
            messages if messages <= MAX_FETCH => messages,
            _ => return Err(Error::invalid("max_messages", format!("is more than {MAX_FETCH}")).into()),
        };
        let bytes = match request.max_bytes as usize {
            0 => MAX_FETCH_BYTES,
            bytes if bytes <= MAX_FETCH_BYTES => bytes,
            _ => return Err(Error::invalid("max_bytes", format!("is more than {MAX_FETCH_BYTES}")).into()),
        };
        let wait = groups::wait("wait", request.wait)?.unwrap_or_default();
        if wait > MAX_FETCH_WAIT {
            return Err(Error::invalid("wait", "is more than 30 s").into());
        }
        let name = name_of_free(&self.context, &call, "group", request.group)?;
        let info = all.get(&name).map_err(Error::from)?;
        let lease = Duration::from_millis(info.definition.ack_deadline);
        let wait = wait.min(until.saturating_duration_since(Instant::now()));
        let mut shutdown = self.context.shutdown.clone();
        let room = Room { messages, bytes };
        let credit = bounds(&self.context);
        let scope = call.scope().clone();
        let joining = Joining { name: &member, lease, credit, scope, outstanding: &[] };
        let batch = tokio::select! {
            batch = all.fetch(&name, joining, room, wait) => batch,
            _ = shutdown.wait_for(|stop| *stop) => return Err(Error::ShuttingDown.into()),
        };
        let batch = batch.map_err(|error| failed(&call, "group", &name, error))?;
        let MemberBatch { deliveries, gaps, .. } = batch;
        count(|c| c.grpc_delivered.add(deliveries.len() as u64));
        let log = log_id(&self.context);
        Ok(Response::new(v1::FetchResponse {
            messages: deliveries.iter().map(|delivery| groups::delivery(delivery, log)).collect(),
            gaps: gaps.iter().map(groups::gap).collect(),
            status: Some(groups::status(&info.status)),
        }))
    }

    async fn acknowledge(
        &self,
        request: Request<v1::AcknowledgeRequest>,
    ) -> Result<Response<v1::AcknowledgeResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let v1::AcknowledgeRequest { group, ack_ids } = request;
        let ids = Ids::parse(&ack_ids)?;
        let name = name_of_free(&self.context, &call, "group", group)?;
        let all = offered(&self.context)?;
        let acknowledge = async { Ok(all.acknowledge(&name, &ids.valid).await?) };
        let results = within(&metadata, self.context.config.wait_timeout, acknowledge).await?;
        let results = ids.all(results);
        Ok(Response::new(v1::AcknowledgeResponse { results }))
    }

    async fn modify_lease(
        &self,
        request: Request<v1::ModifyLeaseRequest>,
    ) -> Result<Response<v1::ModifyLeaseResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let v1::ModifyLeaseRequest { group, ack_ids, deadline, reason } = request.into_inner();
        let ids = Ids::parse(&ack_ids)?;
        groups::reason("reason", &reason)?;
        let span = groups::wait("deadline", deadline)?;
        let span = span.ok_or_else(|| Error::invalid("deadline", "is missing"))?;
        let name = name_of_free(&self.context, &call, "group", group)?;
        let all = offered(&self.context)?;
        let results = match span.is_zero() {
            true => all.nack(&name, &ids.valid, &Nack { reason, ..Nack::default() }).await,
            false => all.extend(&name, &ids.valid, span).await,
        };
        let results = ids.all(results.map_err(Error::from)?);
        Ok(Response::new(v1::ModifyLeaseResponse { results }))
    }
}

/// The ids of deliveries in a request.
struct Ids {
    valid: Vec<AckId>,
    /// For each id of the request, in order, true if it is valid.
    is_valid: Vec<bool>,
}

impl Ids {
    fn parse(ids: &[String]) -> Result<Self, Error> {
        if ids.len() > MAX_IDS {
            return Err(Error::invalid("ack_ids", format!("has more than {MAX_IDS} entries")));
        }
        let parsed: Vec<Option<AckId>> = ids.iter().map(|id| id.parse().ok()).collect();
        let is_valid = parsed.iter().map(Option::is_some).collect();
        Ok(Self { valid: parsed.into_iter().flatten().collect(), is_valid })
    }

    /// The results of all, of which those of the valid ones are given.
    fn all(&self, results: Vec<AckResult>) -> Vec<i32> {
        let mut results = results.into_iter();
        let result = |is_valid: &bool| if *is_valid { results.next() } else { None };
        let all = self.is_valid.iter().map(result).collect::<Vec<_>>();
        all.into_iter().map(|result| groups::ack_result(result.unwrap_or(AckResult::Invalid))).collect()
    }
}

/// A number that nobody can guess and nobody else has.
fn random() -> u128 {
    let hasher = ahash::RandomState::new();
    u128::from(hasher.hash_one(0)) << 64 | u128::from(ahash::RandomState::new().hash_one(1))
}
