//! `gateway.v1.Commands`.

use std::sync::Arc;

use ::commands::{CommandDigest, CommandRecord, CommandRegistry, CommandService as All, Spec};
use aws_lc_rs::digest::{SHA256, digest};
use gateway_core::clock;
use prost::Message as _;
use tokio::sync::broadcast::error::RecvError;
use tonic::{Request, Response, Status};

use crate::{
    context::Context,
    proto::{gateway::v1, server::commands_server::Commands},
    server::{
        access::Call,
        deadline::{deadline, within},
    },
    stream::{ResponseQueue, StreamEnd, responses},
};
use grpc_messages::{
    commands, convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// The service.
pub(crate) struct CommandsService {
    pub(crate) context: Context,
}

/// The device must be in the caller's scope, and the topic that the command has.
fn check_scope(all: &All, call: &Call, spec: &Spec) -> Result<(), Error> {
    call.check_device("spec.device_id", &spec.device)?;
    if all.is_of_replies(&spec.name) {
        return Err(Error::invalid("spec.name", "makes the topic of a reply, use another"));
    }
    call.check_topic("spec.name", &all.topic_of(spec))
}

/// Tells whether a command is in the caller's scope.
fn in_scope(all: &All, call: &Call, record: &CommandRecord) -> bool {
    let scope = call.scope();
    scope.has_device(&record.spec.device)
        // Lists check thousands of commands: the topic is made only where a scope could leave it out.
        && (scope.topics().is_none() || scope.has_topic(&all.topic_of(&record.spec)))
}

impl CommandsService {
    fn all(&self) -> Result<&Arc<All>, Error> {
        self.context.hooks.commands.as_ref().map_err(|key| Error::CommandsOff(key))
    }

    fn registry(&self) -> Result<(&Arc<All>, &Arc<CommandRegistry>), Error> {
        let all = self.all()?;
        Ok((all, all.registry()))
    }

    /// A command that the caller may see. Nobody learns which others there are.
    fn find(&self, call: &Call, id: &str) -> Result<(&Arc<CommandRegistry>, Arc<CommandRecord>), Error> {
        let (all, registry) = self.registry()?;
        let record = registry.get(id).filter(|record| in_scope(all, call, record));
        Ok((registry, record.ok_or(Error::CommandNotFound)?))
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
        Ok(Response::new(v1::SendResponse { reply: Some(commands::reply(&reply.answer)) }))
    }

    async fn start_command(
        &self,
        request: Request<v1::StartCommandRequest>,
    ) -> Result<Response<v1::StartCommandResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (all, registry) = self.registry()?;
        let (metadata, _, request) = request.into_parts();
        let mut content = CommandDigest::default();
        content.copy_from_slice(digest(&SHA256, &request.encode_to_vec()).as_ref());
        let v1::StartCommandRequest { command_id, spec, start_time, expire_time, retry_interval } = request;
        let id = commands::id(command_id)?;
        let spec = commands::spec(spec, self.context.broker.limits())?;
        check_scope(all, &call, &spec)?;
        // The same again is answered although its time may be over.
        let known = id.as_deref().and_then(|id| registry.get(id));
        let times = match known {
            Some(record) => record.machine.times(),
            None => commands::times(start_time, expire_time, retry_interval, clock::now())?,
        };
        let start = async { Ok(registry.start(id, spec, times, content).await?) };
        let record = within(&metadata, self.context.config.wait_timeout, start).await?;
        Ok(Response::new(v1::StartCommandResponse { command: Some(commands::command(&record)) }))
    }

    async fn get_command(
        &self,
        request: Request<v1::GetCommandRequest>,
    ) -> Result<Response<v1::GetCommandResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (_, record) = self.find(&call, &request.into_inner().command_id)?;
        Ok(Response::new(v1::GetCommandResponse { command: Some(commands::command(&record)) }))
    }

    async fn list_commands(
        &self,
        request: Request<v1::ListCommandsRequest>,
    ) -> Result<Response<v1::ListCommandsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (all, registry) = self.registry()?;
        let mut request = request.into_inner();
        let limit = convert::page_size(std::mem::take(&mut request.page_size))?;
        let token = std::mem::take(&mut request.page_token);
        let device = Some(request.device_id.as_str()).filter(|device| !device.is_empty());
        if let Some(device) = device {
            convert::check_client_id("device_id", device, self.context.broker.limits())?;
            call.check_device("device_id", device)?;
        }
        let pages = RequestPages::of("ListCommands", &request);
        let before = pages.start(&token)?;
        let before = before.map(|start| start.parse::<u64>().map_err(|_| Error::PageTokenInvalid));
        let wanted = |record: &CommandRecord| in_scope(all, &call, record);
        let (found, next) = registry.list(device, request.active_only, before.transpose()?, limit, wanted);
        let (list, cut) = fit(found.iter().map(|(_, record)| commands::command(record)), PAGE_BYTES);
        // The page that follows has what is below the last one here.
        let next = if cut { found.get(list.len() - 1).map(|(number, _)| *number) } else { next };
        let next_page_token = pages.token(next.map(|number| number.to_string()).as_deref());
        Ok(Response::new(v1::ListCommandsResponse { commands: list, next_page_token }))
    }

    async fn cancel_command(
        &self,
        request: Request<v1::CancelCommandRequest>,
    ) -> Result<Response<v1::CancelCommandResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let (registry, record) = self.find(&call, &request.command_id)?;
        let cancel = async { Ok(registry.cancel(&record.id).await?) };
        let record = within(&metadata, self.context.config.wait_timeout, cancel).await?;
        Ok(Response::new(v1::CancelCommandResponse { command: Some(commands::command(&record)) }))
    }

    type WatchCommandStream = ResponseQueue;

    async fn watch_command(
        &self,
        request: Request<v1::WatchCommandRequest>,
    ) -> Result<Response<Self::WatchCommandStream>, Status> {
        let call = Call::of(request.extensions())?;
        let (registry, record) = self.find(&call, &request.into_inner().command_id)?;
        let slot = self.context.streams.open(&call)?;
        let (first, mut changes) = registry.watch(&record.id).ok_or(Error::CommandNotFound)?;
        let (registry, id) = (Arc::clone(registry), record.id.clone());
        let mut shutdown = self.context.shutdown.clone();
        // Behind what waits here the registry's own bound holds.
        let (sender, queue) = responses(slot);
        tokio::spawn(async move {
            let mut told = first;
            loop {
                let response = v1::WatchCommandResponse { command: Some(commands::command(&told)) };
                if let Err(end) = sender.send(response, 1).await {
                    return sender.end(end).await;
                }
                if told.machine.state().is_final() {
                    return;
                }
                let Some(changes) = &mut changes else { return };
                let next = tokio::select! {
                    next = changes.recv() => Some(next),
                    _ = shutdown.wait_for(|stop| *stop) => None,
                    () = sender.closed() => return,
                };
                let Some(next) = next else {
                    return sender.end(StreamEnd::Error(Error::ShuttingDown)).await;
                };
                told = match next {
                    Ok(record) => record,
                    Err(RecvError::Lagged(_) | RecvError::Closed) => match registry.get(&id) {
                        Some(record) => record,
                        None => return,
                    },
                };
            }
        });
        Ok(Response::new(queue))
    }
}
