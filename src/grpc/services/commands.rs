//! `gateway.v1.Commands`.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::{
    commands::{Commands as All, Spec},
    grpc::{
        Context,
        messages::{commands, convert},
        proto::{gateway::v1, server::commands_server::Commands},
        server::{access::Call, deadline::deadline},
        status::Error,
    },
};

/// The service.
pub(in crate::grpc) struct CommandsService {
    pub(in crate::grpc) context: Context,
}

/// The device must be in the caller's scope, and the topic that the command has.
fn check_scope(all: &All, call: &Call, spec: &Spec) -> Result<(), Error> {
    call.check_device("spec.device_id", &spec.device)?;
    call.check_topic("spec.name", &all.topic_of(spec))
}

impl CommandsService {
    fn all(&self) -> Result<&Arc<All>, Error> {
        self.context.hooks.commands.as_ref().map_err(|key| Error::CommandsOff(key))
    }
}

#[tonic::async_trait]
impl Commands for CommandsService {
    async fn send(&self, request: Request<v1::SendRequest>) -> Result<Response<v1::SendResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let deadline = deadline(request.metadata(), self.context.config.wait_timeout);
        let all = self.all()?;
        let v1::SendRequest { spec, wait_for_device } = request.into_inner();
        let spec = commands::spec(spec, self.context.broker.limits())?;
        let wait = convert::span("wait_for_device", wait_for_device)?;
        check_scope(all, &call, &spec)?;
        let sent = all.send(&spec, wait, deadline, &self.context.shutdown).await;
        let reply = sent.map_err(|failed| Error::Command { why: failed.why, stage: failed.stage })?;
        Ok(Response::new(v1::SendResponse { reply: Some(commands::reply(&reply)) }))
    }
}
