//! `gateway.v1.Subscriber`.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::streams;
use crate::{
    context::Context,
    proto::{gateway::v1, server::subscriber_server::Subscriber},
    server::access::{Call, devices_of},
    stream::{StreamOptions, StreamTarget, StreamTimers, Subscription, size_of_filters, size_of_names},
};
use grpc_messages::{
    convert::{self, MAX_FILTERS},
    encode::StreamForm,
};

/// The service.
pub(crate) struct SubscriberService {
    pub(crate) context: Context,
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
        let names = [&request.device_ids, &request.device_id_prefixes, &request.exclude_device_ids];
        let selection =
            size_of_names(names.into_iter().flatten()) + size_of_names(&request.exclude_topic_filters);
        let wanted = convert::subscribe(request, broker.limits())?;
        let filters = call.narrow("topic_filters", wanted.filters, MAX_FILTERS)?;
        let selector = wanted.selector.within(devices_of(&call.caller().grant));
        let options = StreamOptions {
            form: StreamForm::Item,
            policy: wanted.policy,
            buffer: wanted.buffer,
            batch: wanted.batch,
        };
        let mut slot = self.context.streams.open(&call)?;
        slot.select(selection + size_of_filters(&filters))?;
        let target = Arc::new(StreamTarget::new(Arc::clone(slot.caller_memory()), selector, options));
        let pace = StreamTimers { linger: wanted.linger, heartbeat: wanted.heartbeat };
        Ok(Response::new(Subscription::attach(broker, slot, target, &filters, pace)))
    }

    async fn list_streams(
        &self,
        request: Request<v1::ListStreamsRequest>,
    ) -> Result<Response<v1::ListStreamsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        Ok(Response::new(streams::rank(&self.context, &call, request.get_ref())?))
    }
}
