//! `gateway.v1.Subscriber`.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::grpc::{
    Context,
    messages::{convert, encode::Form},
    proto::{gateway::v1, server::subscriber_server::Subscriber},
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
        let broker = &self.context.broker;
        let wanted = convert::subscribe(request.into_inner(), broker.limits())?;
        let options = StreamOptions {
            form: Form::Item,
            policy: wanted.policy,
            buffer: wanted.buffer,
            batch: wanted.batch,
        };
        let target = Arc::new(StreamTarget::new(broker.clone(), wanted.selector, options));
        let pace = Pace { linger: wanted.linger, heartbeat: wanted.heartbeat };
        let stream = Subscription::attach(broker, &self.context.streams, target, &wanted.filters, pace)?;
        Ok(Response::new(stream))
    }
}
