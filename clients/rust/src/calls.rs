//! Calls that are repeated while the gateway cannot be reached, where that does no harm.

use std::{future::Future, time::Duration};

use gateway_api::gateway::v1::{
    CancelCommandRequest, Command, CommandSpec, Device, GetCommandRequest, GetDeviceRequest,
    GetLatestRequest, GetShadowRequest, LatestValue, PublishRequest, PublishResponse, Reply, SendRequest,
    Shadow, StartCommandRequest, UpdateShadowRequest, Wait,
};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    Client, Error, Reason,
    backoff::{Backoff, random},
};

/// Kept back of a call's time at most, so that the gateway's word that it is over comes before this client's own.
const GRACE: Duration = Duration::from_millis(500);

/// The longest id of a command, and the longest idempotency key.
pub const COMMAND_ID_BYTES: usize = 128;

/// A key that nobody else makes, for [`PublishRequest::idempotency_key`] or the id of a command.
pub fn new_key() -> String {
    format!("{:016x}{:016x}", random(), random())
}

impl Client {
    /// Publishes once. The request gets an idempotency key unless it has one, and is sent again with that key while the gateway
    /// cannot be reached, at most for the client's patience: however often it is sent, it is published once.
    ///
    /// # Errors
    /// What the gateway refuses, and the last failure when the patience is over; the message may be published then or not. The error
    /// has the key ([`Error::idempotency_key`]): the same request with it goes on where this one has stopped, for as long as the
    /// gateway remembers the key.
    pub async fn publish(&self, mut request: PublishRequest) -> Result<PublishResponse, Error> {
        if request.idempotency_key.is_empty() {
            request.idempotency_key = new_key();
        }
        let published = self.again_within(|left| {
            let (mut publisher, mut call) = (self.publisher(), tonic::Request::new(request.clone()));
            call.set_timeout(left - GRACE.min(left / 10));
            async move { Ok(publisher.publish(call).await?.into_inner()) }
        });
        published.await.map_err(|error| error.of_key(&request.idempotency_key))
    }

    /// The same, until every receiver that is online has acknowledged the message.
    ///
    /// # Errors
    /// As [`Self::publish`]. [`Reason::WaitIncomplete`] when the patience is over before all have: [`Error::level`] tells what was
    /// reached.
    pub async fn publish_and_wait(&self, request: PublishRequest) -> Result<PublishResponse, Error> {
        self.publish(PublishRequest { wait: Wait::Acked.into(), ..request }).await
    }

    /// Sends a command and waits for the device's answer, whatever its status; at most `wait_for_device` for the device, and
    /// `within` for everything. Not repeated.
    ///
    /// # Errors
    /// What the gateway refuses, and no answer in time.
    pub async fn command(
        &self,
        spec: CommandSpec,
        wait_for_device: Option<Duration>,
        within: Duration,
    ) -> Result<Reply, Error> {
        let wait_for_device = wait_for_device.and_then(|wait| wait.try_into().ok());
        let mut request = tonic::Request::new(SendRequest { spec: Some(spec), wait_for_device });
        request.set_timeout(within);
        Ok(self.commands().send(request).await?.into_inner().reply.unwrap_or_default())
    }

    /// Starts a command that the gateway keeps until the device has answered or it expires. Repeated under the same id, which is
    /// made unless the request has one.
    ///
    /// # Errors
    /// What the gateway refuses, and the last failure when the patience is over.
    pub async fn start_command(&self, mut request: StartCommandRequest) -> Result<Command, Error> {
        if request.command_id.is_empty() {
            request.command_id = new_key();
        }
        self.again(|| {
            let (mut commands, request) = (self.commands(), request.clone());
            async move { Ok(commands.start_command(request).await?.into_inner().command.unwrap_or_default()) }
        })
        .await
    }

    /// A stored command; none if there is none, or no longer.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub async fn stored_command(&self, command_id: &str) -> Result<Option<Command>, Error> {
        let got = self
            .again(|| {
                let (mut commands, command_id) = (self.commands(), command_id.to_owned());
                async move {
                    Ok(commands.get_command(GetCommandRequest { command_id }).await?.into_inner().command)
                }
            })
            .await;
        none_if(got, &Reason::CommandNotFound)
    }

    /// Cancels a stored command. Not repeated.
    ///
    /// # Errors
    /// What the gateway refuses; [`Reason::CommandEnded`] if it has ended.
    pub async fn cancel_command(&self, command_id: &str) -> Result<Command, Error> {
        let request = CancelCommandRequest { command_id: command_id.to_owned() };
        Ok(self.commands().cancel_command(request).await?.into_inner().command.unwrap_or_default())
    }

    /// A device that has a session; none otherwise.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub async fn device(&self, device_id: &str) -> Result<Option<Device>, Error> {
        let request = GetDeviceRequest { device_id: device_id.to_owned(), ..GetDeviceRequest::default() };
        let got = self
            .again(|| {
                let (mut devices, request) = (self.devices(), request.clone());
                async move { Ok(devices.get_device(request).await?.into_inner().device) }
            })
            .await;
        none_if(got, &Reason::DeviceNotFound)
    }

    /// The latest value of a topic, of a device or over all; none if there is none.
    ///
    /// # Errors
    /// What the gateway refuses, and the last failure when the patience is over.
    pub async fn latest(&self, device_id: Option<&str>, topic: &str) -> Result<Option<LatestValue>, Error> {
        let request = GetLatestRequest { topic: topic.to_owned(), device_id: device_id.map(str::to_owned) };
        let got = self
            .again(|| {
                let (mut state, request) = (self.state(), request.clone());
                async move { Ok(state.get_latest(request).await?.into_inner().value) }
            })
            .await;
        none_if(got, &Reason::ValueNotFound)
    }

    /// A shadow; none if there is none. The classic one has no name.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub async fn shadow(&self, device_id: &str, name: &str) -> Result<Option<Shadow>, Error> {
        let got = self
            .again(|| {
                let (device_id, name) = (device_id.to_owned(), name.to_owned());
                let (mut shadows, request) = (self.shadows(), GetShadowRequest { device_id, name });
                async move { Ok(shadows.get_shadow(request).await?.into_inner().shadow) }
            })
            .await;
        none_if(got, &Reason::ShadowNotFound)
    }

    /// Changes a shadow. Not repeated by itself: with an expected version a repetition tells whether the first was heard.
    ///
    /// # Errors
    /// What the gateway refuses; [`Reason::VersionConflict`] has the version there is in its metadata.
    pub async fn update_shadow(&self, request: UpdateShadowRequest) -> Result<Shadow, Error> {
        Ok(self.shadows().update_shadow(request).await?.into_inner().shadow.unwrap_or_default())
    }

    /// Makes the call until it succeeds, fails for good, or the patience is over.
    pub(crate) async fn again<T, F>(&self, call: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.again_within(|_| call()).await
    }

    /// The same, where each call is told the time that is left.
    async fn again_within<T, F>(&self, call: impl Fn(Duration) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let end = Instant::now() + self.patience;
        let mut backoff = Backoff::default();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let error = match timeout(left, call(left)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => return Err(Error::no_answer(self.patience)),
            };
            let pause = backoff.after(error.retry_after());
            if !error.is_temporary() || Instant::now() + pause >= end {
                return Err(error);
            }
            sleep(pause).await;
        }
    }
}

/// Turns an error with this `reason` into `None`: nothing is there, which is an answer.
fn none_if<T>(got: Result<Option<T>, Error>, reason: &Reason) -> Result<Option<T>, Error> {
    match got {
        Err(error) if error.reason() == reason => Ok(None),
        got => got,
    }
}
