//! `gateway.v1.Subscriber`.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::streams;
use crate::grpc::{
    Context,
    messages::{
        convert::{self, MAX_FILTERS},
        encode::StreamForm,
    },
    proto::{gateway::v1, server::subscriber_server::Subscriber},
    server::access::{Call, devices_of},
    stream::{Pace, StreamOptions, StreamTarget, Subscription},
};

/// The service.
pub(in crate::grpc) struct SubscriberService {
    pub(in crate::grpc) context: Context,
}

#[tonic::async_trait]
impl Subscriber for SubscriberService {
    type SubscribeStream = Subscription;

    async fn subscribe(
        &self,
        request: Request<v1::SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let call = Call::of(request.extensions())?;
        let broker = &self.context.broker;
        let request = request.into_inner();
        convert::check_entries(request.device_ids.len())?;
        call.check_devices("device_ids", &request.device_ids)?;
        let wanted = convert::subscribe(request, broker.limits())?;
        let filters = call.narrow("topic_filters", wanted.filters, MAX_FILTERS)?;
        let selector = wanted.selector.within(devices_of(&call.caller().grant));
        let options = StreamOptions {
            form: StreamForm::Item,
            policy: wanted.policy,
            buffer: wanted.buffer,
            batch: wanted.batch,
        };
        let target = Arc::new(StreamTarget::new(broker.clone(), selector, options));
        let pace = Pace { linger: wanted.linger, heartbeat: wanted.heartbeat };
        let stream = Subscription::attach(broker, (&self.context.streams, &call), target, &filters, pace)?;
        Ok(Response::new(stream))
    }

    async fn list_streams(
        &self,
        request: Request<v1::ListStreamsRequest>,
    ) -> Result<Response<v1::ListStreamsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        Ok(Response::new(streams::rank(&self.context, &call, request.get_ref())?))
    }
}
