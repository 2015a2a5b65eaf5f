//! A message that was routed, and the wait for what becomes of it.

use std::{convert::Infallible, sync::Arc, time::Duration};

use broker::{Broker, Published};
use gateway_core::{Commit, CommitRefused, Receipt, ReceiptState, Timestamp, clock};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::proto::gateway::v1;
use grpc_messages::{
    answers,
    status::{Error, Reached, ReachedLevel},
    wait::Wait,
};

/// A message that was routed, and perhaps a receipt to wait for.
pub(crate) struct Routed {
    pub(crate) published: Published,
    pub(crate) wait: Wait,
    pub(crate) receipt: Option<Arc<Receipt>>,
    /// Commit that must be on disk first.
    pub(crate) commit: Option<Arc<Commit>>,
    /// The id of a message that waits for its time.
    pub(crate) scheduled: Option<String>,
    /// Expiry of the message, after which its only receiver no longer needs it.
    pub(crate) expiry: Option<Box<MessageExpiry>>,
}

/// The end of a message to one device.
pub(crate) struct MessageExpiry {
    pub(crate) broker: Broker,
    pub(crate) device: String,
    pub(crate) at: Timestamp,
}

impl MessageExpiry {
    /// Waits for it, and has the session tell if the message still waits there: else nobody would be told before the device
    /// takes something again. Then never ready.
    async fn pass(&self) -> Infallible {
        let left = self.at.0.saturating_sub(clock::now().0);
        tokio::time::sleep(Duration::from_millis(left)).await;
        self.broker.tell_expired(&self.device);
        std::future::pending().await
    }
}

impl Routed {
    /// The same, to one device until then.
    pub(crate) fn until(mut self, broker: &Broker, device: &str, at: Timestamp) -> Self {
        let expiry = || MessageExpiry { broker: broker.clone(), device: device.to_owned(), at };
        self.expiry = self.receipt.as_ref().map(|_| Box::new(expiry()));
        self
    }

    /// Returns the result if it is known; `None` if the caller must wait for it.
    pub(crate) fn ready(&self) -> Option<Result<v1::PublishResponse, Error>> {
        if let Some(commit) = &self.commit {
            return Some(
                commit
                    .result()?
                    .map_err(|CommitRefused| Error::StoreRefused)
                    .and_then(|()| self.response(None)),
            );
        }
        let state = match &self.receipt {
            None => None,
            Some(receipt) => Some(receipt.state()).filter(|state| self.is_done(state)).map(Some)?,
        };
        Some(self.response(state))
    }

    fn response(&self, state: Option<ReceiptState>) -> Result<v1::PublishResponse, Error> {
        if let Some(id) = &self.scheduled {
            return Ok(answers::scheduled_response(id));
        }
        Ok(answers::publish_response(self.published, self.wait, state))
    }

    /// Tells whether every receiver that took the message while online did its part. Offline sessions are not waited for.
    fn is_done(&self, state: &ReceiptState) -> bool {
        let reached = match self.wait {
            Wait::Accepted | Wait::Durable => return true,
            Wait::Sent => state.sent,
            Wait::Acked => state.acked.saturating_add(state.rejected),
        };
        reached.saturating_add(state.dropped) >= self.published.sent
    }

    /// Waits until done, `deadline`, or the gateway shuts down. Cancel safe.
    pub(crate) async fn finish(
        &self,
        deadline: Instant,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<v1::PublishResponse, Error> {
        if let Some(result) = self.ready() {
            return result;
        }
        let mut shutdown = shutdown.clone();
        tokio::select! {
            biased;
            result = self.wait() => result,
            // A sender that is gone counts as asking.
            _ = shutdown.wait_for(|stop| *stop) => Err(Error::CutShort(self.reached())),
            () = sleep_until(deadline) => Err(Error::Deadline(self.reached())),
        }
    }

    /// Waits until done, however long that takes. Cancel safe.
    pub(crate) async fn wait(&self) -> Result<v1::PublishResponse, Error> {
        if let Some(commit) = &self.commit {
            return commit
                .wait()
                .await
                .map_err(|CommitRefused| Error::StoreRefused)
                .and_then(|()| self.response(None));
        }
        match &self.receipt {
            Some(receipt) => {
                let told = receipt.wait(|state| self.is_done(state));
                let state = match &self.expiry {
                    None => told.await,
                    Some(expiry) => tokio::select! {
                        biased;
                        state = told => state,
                        never = expiry.pass() => match never {},
                    },
                };
                self.response(Some(state))
            }
            None => self.response(None),
        }
    }

    /// Returns how far the message has come by now.
    pub(crate) fn reached(&self) -> Reached {
        let state = self.receipt.as_ref().map_or_else(ReceiptState::default, |receipt| receipt.state());
        let waits_for_the_disk = self.commit.is_some();
        let all_sent = state.sent.saturating_add(state.dropped) >= self.published.sent;
        let level = if all_sent && !waits_for_the_disk { ReachedLevel::Sent } else { ReachedLevel::Accepted };
        Reached { level, state }
    }
}

#[cfg(test)]
mod tests {
    use gateway_core::DropReason;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_with_all_online_receivers_or_at_the_deadline() {
        let receipt = Arc::new(Receipt::default());
        let published = Published { matched: 3, sent: 2, queued: 1, ..Published::default() };
        let routed = Routed {
            published,
            wait: Wait::Acked,
            receipt: Some(Arc::clone(&receipt)),
            commit: None,
            scheduled: None,
            expiry: None,
        };
        assert!(routed.ready().is_none());
        receipt.update(|state| state.sent = 2);
        let deadline = Instant::now() + Duration::from_secs(1);
        let (stop, shutdown) = watch::channel(false);
        let Err(Error::Deadline(reached)) = routed.finish(deadline, &shutdown).await else { panic!() };
        assert_eq!(reached.level, ReachedLevel::Sent);
        stop.send_replace(true);
        assert_eq!(routed.finish(deadline, &shutdown).await, Err(Error::CutShort(reached)));

        receipt.update(|state| {
            state.acked = 1;
            state.dropped = 1;
            state.reason = Some(DropReason::ConnectionLost);
            state.code = Some(16);
        });
        let response = routed.ready().unwrap().unwrap();
        assert_eq!(response.outcome(), v1::Outcome::Acked);
        assert_eq!((response.sent, response.dropped, response.reason_code), (1, 1, Some(16)));
        assert_eq!(response.drop_reason(), v1::DropReason::ConnectionLost);
        let done = routed.finish(deadline, &shutdown).await.unwrap();
        assert_eq!(
            done.outcome(),
            v1::Outcome::Acked,
            "what is known is told, also at shutdown and too late"
        );

        receipt.update(|state| {
            state.acked = 0;
            state.answered(0x97);
        });
        let response = routed.ready().unwrap().unwrap();
        assert_eq!((response.outcome(), response.rejected), (v1::Outcome::Rejected, 1));
        assert_eq!(response.reason_code, Some(0x97));
    }
}
