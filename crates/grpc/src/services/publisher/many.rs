//! One message to many devices: each its own result, told as it becomes known.
//!
//! Devices are taken in steps, and no more of them than the window wait at once: neither a thread of the services nor a queue is
//! taken by one call. A caller that reads slowly, or not at all, holds up its own call. Once it is gone nothing more is issued.

use std::{collections::HashSet, sync::Arc, vec};

use broker::Turn;
use gateway_core::{Effort, ReceiptState, SharedMessage, clock::now};
use prost::Message as _;
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
    time::Instant,
};
use tonic::Status;

use super::issued::to_result;
use crate::counters::count;
use crate::{
    context::Context,
    proto::gateway::v1,
    publishing::{
        routed::Routed,
        routing::{pause, route_to_device},
    },
    server::{
        access::Call,
        caller_memory::{CallerMemory, MemoryReservation},
    },
};
use grpc_messages::{
    convert::{self, MAX_BATCH, Publication},
    status::{Error, Reached, ReachedLevel},
};

/// Devices at once whose result is waited for.
const WINDOW: usize = 1_000;
/// Results of one frame, and about their bytes: clients take no more than some MiB at once.
const FRAME: usize = 256;
const FRAME_BYTES: usize = 64 << 10;
/// Bytes of a result besides the device's id.
const RESULT: usize = 128;
/// Bytes counted for a device that is waited for, with its task.
const WAITING: usize = 1 << 10;
/// Effort of one step, which looks at 256 sessions.
const LOOK: u32 = 256 * Effort::NODE;

/// A frame that waits for the caller to read it, and what it is charged for.
pub(super) type UnreadFrame = (Result<v1::PublishToDevicesResponse, Status>, Option<MemoryReservation>);

/// A device and its result.
type DeviceOutcome = (String, Result<v1::PublishResponse, Error>);

/// A valid request.
pub(super) struct MultiPublish {
    publication: Publication,
    targets: Targets,
    failures_only: bool,
    bytes: usize,
}

/// Devices that are still to get the message.
enum Targets {
    Listed(vec::IntoIter<String>),
    Prefixed { prefix: String, next: Option<u32>, found: vec::IntoIter<String> },
}

impl Targets {
    fn is_empty(&self) -> bool {
        match self {
            Self::Listed(ids) => ids.len() == 0,
            Self::Prefixed { next, found, .. } => next.is_none() && found.len() == 0,
        }
    }
}

impl MultiPublish {
    /// Validates a request. Devices that are out of scope are refused one by one when it is their turn.
    pub(super) fn new(
        request: v1::PublishToDevicesRequest,
        context: &Context,
        call: &Call,
    ) -> Result<Self, Error> {
        let limits = context.broker.limits();
        let bytes = request.encoded_len() + request.device_ids.capacity() * size_of::<String>();
        let v1::PublishToDevicesRequest { message, device_ids, device_id_prefix: prefix, detail } = request;
        let mut message = message.ok_or_else(|| Error::invalid("message", "is missing"))?;
        if message.device_id.is_some() {
            return Err(Error::invalid("message.device_id", "is said by device_ids or device_id_prefix"));
        }
        if !message.idempotency_key.is_empty() {
            return Err(Error::invalid("message.idempotency_key", "is for one message"));
        }
        if message.deliver_at.is_some() {
            return Err(Error::invalid("message.deliver_at", "is for one message"));
        }
        if device_ids.is_empty() == prefix.is_empty() {
            return Err(Error::invalid("device_ids", "or device_id_prefix must be set, and not both"));
        }
        if device_ids.len() > MAX_BATCH {
            return Err(Error::invalid("device_ids", format!("has more than {MAX_BATCH} items")));
        }
        convert::check_client_ids("device_ids", &device_ids, limits)?;
        if !prefix.is_empty() {
            convert::check_client_id("device_id_prefix", &prefix, limits)?;
        }
        let mut seen = HashSet::with_capacity(device_ids.len());
        if let Some(twice) = device_ids.iter().position(|id| !seen.insert(id.as_str())) {
            return Err(Error::invalid(format!("device_ids[{twice}]"), "is there twice"));
        }
        drop(seen);
        let detail: v1::ResultDetail = convert::known(detail, "detail")?;
        // A message to one device stands for all in the checks; the device's id is filled in later.
        message.device_id = Some("-".to_owned());
        let publication = convert::publication(message, limits)?;
        call.check_topic("message.topic", &publication.topic)?;
        let targets = match prefix.is_empty() {
            true => Targets::Listed(device_ids.into_iter()),
            false => Targets::Prefixed { prefix, next: Some(1), found: Vec::new().into_iter() },
        };
        Ok(Self { publication, targets, failures_only: detail == v1::ResultDetail::Failures, bytes })
    }
}

/// A call at work.
pub(super) struct ManyRun {
    context: Context,
    call: Arc<Call>,
    sender: mpsc::Sender<UnreadFrame>,
    many: MultiPublish,
    message: Arc<SharedMessage>,
    /// Of the call, if it has one.
    deadline: Option<Instant>,
    waiting: JoinSet<DeviceOutcome>,
    /// Not yet sent.
    known: Vec<v1::DeviceResult>,
    /// About its bytes.
    known_bytes: usize,
    /// Devices that the message was given to, or refused for.
    issued: u64,
    /// Charge of the call on the memory account.
    held: MemoryReservation,
    caller_memory: Arc<CallerMemory>,
}

impl ManyRun {
    /// A run that sends its answers to `sender`.
    pub(super) fn new(
        context: Context,
        call: Arc<Call>,
        sender: mpsc::Sender<UnreadFrame>,
        many: MultiPublish,
        deadline: Option<Instant>,
        caller_memory: Arc<CallerMemory>,
    ) -> Self {
        let message = Arc::clone(many.publication.message(now()).share());
        let (waiting, known, held) = (JoinSet::new(), Vec::new(), caller_memory.open());
        Self {
            context,
            call,
            sender,
            many,
            message,
            deadline,
            waiting,
            known,
            known_bytes: 0,
            issued: 0,
            held,
            caller_memory,
        }
    }

    /// Issues the message to one device after the other and tells what becomes of it. Dropped, nothing more is issued, and
    /// what was issued goes its way.
    pub(super) async fn run(mut self) -> Result<(), Status> {
        let mut stopping = false;
        loop {
            let more = !stopping && !self.is_late() && self.issue().await?;
            stopping |= *self.context.shutdown.borrow();
            self.send(false).await?;
            if more && self.waiting.len() < WINDOW {
                tokio::task::yield_now().await;
            } else if !self.waiting.is_empty() {
                let joined = self.waiting.join_next().await;
                self.note(joined);
            } else if !more {
                break;
            }
            while !self.is_full()
                && let Some(joined) = self.waiting.try_join_next()
            {
                self.note(Some(joined));
            }
        }
        let is_complete = self.many.targets.is_empty();
        self.send(true).await?;
        match is_complete {
            true => Ok(()),
            false if stopping => Err(Error::ShuttingDown.into()),
            false => {
                let reached = Reached { level: ReachedLevel::Accepted, state: ReceiptState::default() };
                Err(Error::Deadline(reached).into())
            }
        }
    }

    /// Gives the message to some more devices; false if it was the last. All are flushed.
    async fn issue(&mut self) -> Result<bool, Error> {
        let mut turn = Turn::default();
        let mut more = true;
        while self.waiting.len() < WINDOW && !self.is_full() {
            if turn.effort.is_spent() {
                pause(&mut turn).await;
            }
            if self.is_late() {
                more = false;
                break;
            }
            match self.next(&mut turn) {
                Next::Device(id) => self.issue_to(id, &mut turn),
                Next::Look => {}
                Next::End => {
                    more = false;
                    break;
                }
            }
        }
        turn.flush();
        let bytes = self.many.bytes
            + self.waiting.len() * WAITING
            + self.known.len() * size_of::<v1::DeviceResult>()
            + self.known_bytes;
        self.held.set(bytes).then_some(more).ok_or(Error::MemoryBudget)
    }

    fn is_full(&self) -> bool {
        self.known.len() >= FRAME || self.known_bytes >= FRAME_BYTES
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    fn issue_to(&mut self, id: String, turn: &mut Turn) {
        self.issued += 1;
        turn.effort.spend(Effort::REQUEST);
        let routed = self.call.check_device("device_ids", &id).and_then(|()| {
            route_to_device(&self.context.broker, &self.many.publication, &self.message, &id, turn)
        });
        match routed {
            Err(error) => self.tell(id, Err(error)),
            Ok(routed) => match routed.ready() {
                Some(result) => self.tell(id, result),
                None => self.follow(id, routed),
            },
        }
    }

    fn follow(&mut self, id: String, routed: Routed) {
        let default = || Instant::now() + self.context.config.wait_timeout;
        let (deadline, shutdown) = (self.deadline.unwrap_or_else(default), self.context.shutdown.clone());
        self.waiting.spawn(async move { (id, routed.finish(deadline, &shutdown).await) });
    }

    fn next(&mut self, turn: &mut Turn) -> Next {
        match &mut self.many.targets {
            Targets::Listed(ids) => ids.next().map_or(Next::End, Next::Device),
            Targets::Prefixed { prefix, next, found } => {
                if let Some(id) = found.next() {
                    return Next::Device(id);
                }
                let Some(start) = *next else { return Next::End };
                turn.effort.spend(LOOK);
                let mut ids = Vec::new();
                let scope = self.call.scope();
                *next = self.context.broker.ids_step(start, |id| {
                    if id.starts_with(prefix.as_str()) && scope.has_device(id) {
                        ids.push(id.to_owned());
                    }
                });
                *found = ids.into_iter();
                Next::Look
            }
        }
    }

    fn note(&mut self, joined: Option<Result<DeviceOutcome, JoinError>>) {
        if let Some(Ok((id, result))) = joined {
            self.tell(id, result);
        }
    }

    fn tell(&mut self, device_id: String, result: Result<v1::PublishResponse, Error>) {
        if !self.many.failures_only || convert::is_failure(&result) {
            self.known_bytes += device_id.len() + RESULT;
            self.known.push(v1::DeviceResult { device_id, result: Some(to_result(result)) });
        }
    }

    /// Sends what is known, if there is anything or it is the last frame.
    async fn send(&mut self, last: bool) -> Result<(), Status> {
        if self.known.is_empty() && !last {
            return Ok(());
        }
        self.known_bytes = 0;
        let results = std::mem::take(&mut self.known);
        let response = v1::PublishToDevicesResponse { results, issued: self.issued };
        let mut holding = self.caller_memory.open();
        let size = response.encoded_len() + response.results.len() * size_of::<v1::DeviceResult>();
        if !holding.set(size) {
            return Err(Error::MemoryBudget.into());
        }
        let sent = self.sender.send((Ok(response), Some(holding))).await;
        sent.map_err(|_| Status::cancelled("the caller is gone"))
    }
}

impl Drop for ManyRun {
    fn drop(&mut self) {
        count(|c| c.grpc_fanout_devices.add(self.issued));
        if self.sender.is_closed() {
            tracing::debug!(
                issued = self.issued,
                "a publish to many devices was cancelled, the rest gets nothing"
            );
        }
    }
}

/// Next item of the run.
enum Next {
    Device(String),
    /// No device in this step.
    Look,
    End,
}
