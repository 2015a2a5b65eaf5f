//! Requests to publish, each checked and routed, scheduled, or answered as before under its key.

use std::sync::Arc;

use broker::{Broker, Published, Turn};
use gateway_core::{Commit, Effort, Timestamp, clock::now};
use tokio::{sync::watch, time::Instant};

use crate::{
    proto::gateway::v1,
    publishing::{
        keys::{KeyClaim, Keyed, RequestKey, RequestKeys},
        routed::Routed,
        routing::{pause, route},
        schedule::Schedule,
    },
    server::access::Call,
};
use grpc_messages::{
    answers,
    convert::{self, Publication},
    status::Error,
    wait::Wait,
};

/// A message that was issued: by this call alone, or under a key that other calls may know.
pub(super) enum Issued {
    Own(Routed),
    Keyed(Keyed),
}

impl Issued {
    /// Returns the result if it is known; `None` if the caller must wait for it.
    pub(super) fn ready(&self) -> Option<Result<v1::PublishResponse, Error>> {
        match self {
            Self::Own(routed) => routed.ready(),
            Self::Keyed(keyed) => keyed.ready(),
        }
    }

    /// Waits until done, `deadline`, or the gateway shuts down. Cancel safe.
    pub(super) async fn finish(
        &self,
        deadline: Instant,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<v1::PublishResponse, Error> {
        match self {
            Self::Own(routed) => routed.finish(deadline, shutdown).await,
            Self::Keyed(keyed) => keyed.finish(deadline, shutdown).await,
        }
    }
}

/// Validates and routes one message; the caller flushes `turn`. Not to be cancelled for speed: if it is dropped, the
/// rest of the receivers get the message at once.
pub(super) async fn publish(
    broker: &Broker,
    keys: &Arc<RequestKeys>,
    schedule: &Arc<Schedule>,
    call: &Call,
    request: v1::PublishRequest,
    at: Timestamp,
    turn: &mut Turn,
) -> Result<Issued, Error> {
    let key = match request.idempotency_key.is_empty() {
        true => None,
        // Before anything is awaited.
        false => {
            turn.flush();
            RequestKey::of(call, &request).await?
        }
    };
    let publication = convert::publication(request, broker.limits())?;
    turn.effort.spend(Effort::REQUEST);
    check_scope(call, &publication)?;
    let Some(key) = key else {
        let routed = match publication.deliver_at {
            None => route(broker, &publication, at, turn).await?,
            Some(time) => routed_later(schedule.accept(publication, time, |_| None)?),
        };
        return Ok(Issued::Own(routed));
    };
    turn.effort.spend(Effort::REQUEST);
    let flight = match keys.claim(key)? {
        KeyClaim::First(flight) => flight,
        KeyClaim::Before(keyed) => return Ok(Issued::Keyed(keyed)),
    };
    let routed = match publication.deliver_at {
        None => route(broker, &publication, at, turn).await,
        Some(time) => {
            let record = |id: &str| Some(flight.record(&answers::scheduled_response(id)));
            schedule.accept(publication, time, record).map(routed_later)
        }
    };
    match routed {
        Ok(routed) => Ok(Issued::Keyed(flight.land(routed))),
        Err(error) => {
            flight.refuse(&error);
            Err(error)
        }
    }
}

/// Returns the result of a message that waits for its time, once it is on disk.
fn routed_later((id, commit): (String, Arc<Commit>)) -> Routed {
    commit.done();
    let published = Published::default();
    Routed {
        published,
        wait: Wait::Durable,
        receipt: None,
        commit: Some(commit),
        scheduled: Some(id),
        expiry: None,
    }
}

/// The topic must be in scope, and the device if there is one.
pub(in crate::services) fn check_scope(call: &Call, publication: &Publication) -> Result<(), Error> {
    call.check_topic("topic", &publication.topic)?;
    publication.device.as_ref().map_or(Ok(()), |device| call.check_device("device_id", device))
}

/// Returns a result as one of many.
pub(super) fn to_result(result: Result<v1::PublishResponse, Error>) -> v1::PublishResult {
    let result = match result {
        Ok(response) => v1::publish_result::Result::Response(response),
        Err(error) => v1::publish_result::Result::Error(error.to_item()),
    };
    v1::PublishResult { result: Some(result) }
}

/// Messages of a batch between two flushes: more would fill the queue of a receiver that keeps up.
const MESSAGES_PER_FLUSH: usize = 256;

/// Routes many messages, in turns of a few.
pub(super) async fn publish_all(
    broker: &Broker,
    keys: &Arc<RequestKeys>,
    schedule: &Arc<Schedule>,
    call: &Call,
    requests: Vec<v1::PublishRequest>,
) -> Vec<Result<Issued, Error>> {
    let mut turn = Turn::default();
    let at = now();
    let mut issued = Vec::with_capacity(requests.len());
    for request in requests {
        if turn.effort.is_spent() {
            pause(&mut turn).await;
        }
        issued.push(publish(broker, keys, schedule, call, request, at, &mut turn).await);
        if issued.len().is_multiple_of(MESSAGES_PER_FLUSH) {
            turn.flush();
        }
    }
    turn.flush();
    issued
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Duration};

    use broker::BrokerConfig;
    use grpc_messages::convert::MAX_BATCH;

    use super::*;
    use crate::publishing::{keys::KeyOptions, schedule::ScheduleOptions};

    /// One call would keep a thread of the services, and all calls on it, until the last of its messages is routed.
    #[test]
    fn a_large_batch_lets_other_calls_go_first() {
        let broker = Broker::new(BrokerConfig::default());
        let request = v1::PublishRequest { topic: "t".to_owned(), ..Default::default() };
        let call = Call::unlimited();
        let options = KeyOptions { most: 1, time: Duration::from_secs(1) };
        let keys = RequestKeys::open(options, None, broker.account(), watch::channel(false).1).unwrap();
        let options = ScheduleOptions { most: 1, bytes: 1 };
        let schedule = Schedule::open(options, None, &broker, None).unwrap();
        let mut all = pin!(publish_all(&broker, &keys, &schedule, &call, vec![request; MAX_BATCH]));
        let mut polls = 1;
        // Outside of a runtime a task that yields is woken at once.
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let results = loop {
            match all.as_mut().poll(&mut cx) {
                std::task::Poll::Ready(results) => break results,
                std::task::Poll::Pending => polls += 1,
            }
        };
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), MAX_BATCH);
        let least = MAX_BATCH * Effort::REQUEST as usize / Effort::TURN as usize;
        assert!(least > 1 && polls >= least, "{polls} polls");
    }
}
