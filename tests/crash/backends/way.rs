//! A backend's way to whichever gateway serves.

use std::{net::SocketAddr, time::Duration};

use tokio::time::{sleep, timeout};
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint},
};

/// A call that takes longer is made again, at the other gateway: this one may stand still.
const CALL: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// Used in the runtime in which it was made.
pub(super) struct Way {
    addresses: [SocketAddr; 2],
    at: usize,
    channel: Channel,
}

fn channel(address: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
    endpoint.connect_timeout(Duration::from_secs(2)).connect_lazy()
}

/// Returns whether a status says nothing about the call but that it has to be made again.
pub(super) fn is_unanswered(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal
    )
}

impl Way {
    pub(super) fn new(addresses: [SocketAddr; 2]) -> Self {
        Self { addresses, at: 0, channel: channel(addresses[0]) }
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Goes to the other gateway.
    pub(super) async fn turn(&mut self) {
        self.at = 1 - self.at;
        self.channel = channel(self.addresses[self.at]);
        sleep(PAUSE).await;
    }

    /// Calls once; without an answer it goes to the other gateway.
    pub(super) async fn ask<T>(
        &mut self,
        call: impl AsyncFnOnce(Channel) -> Result<Response<T>, Status>,
    ) -> Result<T, Status> {
        let answer = match timeout(CALL, call(self.channel.clone())).await {
            Ok(answer) => answer.map(Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded("no answer")),
        };
        if answer.as_ref().is_err_and(is_unanswered) {
            self.turn().await;
        }
        answer
    }

    /// Calls until there is an answer, whatever it is.
    pub(super) async fn until_answered<T>(
        &mut self,
        mut call: impl AsyncFnMut(Channel) -> Result<Response<T>, Status>,
    ) -> Result<T, Status> {
        loop {
            match self.ask(async |channel| call(channel).await).await {
                Err(status) if is_unanswered(&status) => {}
                answer => return answer,
            }
        }
    }
}
