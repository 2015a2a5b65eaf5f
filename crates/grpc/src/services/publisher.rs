//! `gateway.v1.Publisher`. Each frame or call is one turn: routed and flushed before anything is awaited.
//!
//! ```text
//! issued    requests, each checked and routed
//! stream    PublishStream at work
//! many      PublishToDevices at work
//! ```

pub(super) mod issued;
mod many;
mod stream;

use std::{pin::Pin, sync::Arc};

use broker::Turn;
use gateway_core::{
    Timestamp,
    clock::{self, now},
};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use self::{
    issued::{publish, publish_all, to_result},
    many::{ManyRun, MultiPublish},
    stream::PublishRun,
};
use crate::{
    context::Context,
    proto::{gateway::v1, server::publisher_server::Publisher},
    publishing::schedule::ScheduledPublish,
    server::{
        access::Call,
        caller_memory::CallerMemory,
        connection_calls::ConnectionCalls,
        deadline::{deadline, within},
    },
};
use grpc_messages::{answers, convert, page::RequestPages, status::Error};

/// Response frames of a publish stream that wait for the caller to read them.
const RESPONSE_FRAMES: usize = 16;

/// The service.
pub(crate) struct PublisherService {
    pub(crate) context: Context,
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
        convert::check_batch(&requests)?;
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
