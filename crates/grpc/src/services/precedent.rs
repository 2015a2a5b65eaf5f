//! `rpcserver.PublishedPacketService`: the precedent's API as a thin layer over the same paths.

use std::sync::Arc;

use broker::{Selector, Turn};
use gateway_core::clock::now;
use tonic::{Request, Response, Status};

use super::publisher::issued::check_scope;
use crate::counters::count;
use crate::{
    context::Context,
    proto::{
        gateway::v1, precedent_server::published_packet_service_server::PublishedPacketService, rpcserver,
    },
    publishing::routing::direct,
    server::access::{Call, devices_of},
    stream::{StreamOptions, StreamTarget, StreamTimers, Subscription, size_of_filters, size_of_names},
};
use grpc_messages::convert::SlowPolicy;
use grpc_messages::{
    convert::{self, MAX_FILTERS, MAX_STREAM_BATCH},
    encode::StreamForm,
    status::{Error, drop_error},
};

/// The service.
pub(crate) struct PrecedentService {
    pub(crate) context: Context,
}

#[tonic::async_trait]
impl PublishedPacketService for PrecedentService {
    type StreamPublishedPayloadStream = Subscription;

    async fn stream_published_payload(
        &self,
        request: Request<rpcserver::PublishedPacketRequest>,
    ) -> Result<Response<Self::StreamPublishedPayloadStream>, Status> {
        let call = Call::of(request.extensions())?;
        let broker = &self.context.broker;
        let limits = broker.limits();
        let devices: Vec<_> = request.into_inner().device_id.into_iter().collect();
        convert::check_client_ids("device_id", &devices, limits)?;
        call.check_devices("device_id", &devices)?;
        let options = StreamOptions {
            form: StreamForm::Packet,
            policy: SlowPolicy::DropOldest,
            buffer: limits.stream_buffer.0,
            batch: MAX_STREAM_BATCH,
        };
        let selection = size_of_names(&devices);
        let selector =
            Selector::new(true).devices(devices, Vec::new()).within(devices_of(&call.caller().grant));
        let filters = call.narrow("topic", convert::or_all(Vec::new()), MAX_FILTERS)?;
        let mut slot = self.context.streams.open(&call)?;
        slot.select(selection + size_of_filters(&filters))?;
        let target = Arc::new(StreamTarget::new(Arc::clone(slot.caller_memory()), selector, options));
        Ok(Response::new(Subscription::attach(broker, slot, target, &filters, StreamTimers::default())))
    }

    async fn publish_payload_to_device(
        &self,
        request: Request<rpcserver::PublishRequest>,
    ) -> Result<Response<rpcserver::PublishResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        let broker = &self.context.broker;
        let publication = convert::publication(
            v1::PublishRequest {
                device_id: Some(request.device_id),
                topic: request.topic,
                payload: request.payload,
                ..v1::PublishRequest::default()
            },
            broker.limits(),
        )?;
        check_scope(&call, &publication)?;
        let published = {
            let mut turn = Turn::default();
            let device = publication.device.as_deref().unwrap_or_default();
            let message = publication.message(now());
            let outcome = broker.publish_to_device(device, &message, publication.offline, &mut turn);
            turn.flush();
            direct(outcome)?
        };
        // The old API has words for two outcomes only; the rest are failures.
        let code = match (published.sent, published.queued) {
            (1.., _) => "Success",
            (0, 1..) => "Queued",
            (0, 0) => {
                let error = published.reason.and_then(drop_error).unwrap_or(Error::DeviceOffline);
                return Err(error.into());
            }
        };
        count(|c| c.grpc_published.add(1));
        Ok(Response::new(rpcserver::PublishResponse { code: code.to_owned() }))
    }
}
