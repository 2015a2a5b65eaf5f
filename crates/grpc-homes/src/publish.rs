//! Messages, each to the homes of its receivers: one for a device to the home of that device, one for a topic to every home, where
//! it reaches the devices of that home. A request key goes with it everywhere, so a repeated call is exact at each home.

use grpc_messages::{
    convert,
    status::{ERROR_DOMAIN, Error},
};
use prost::Message as _;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::channel::{CallHomes, PassedOn};
use grpc::proto::gateway::v1;

/// `Publisher/Publish`.
pub(super) async fn one(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::PublishRequest,
) -> Result<v1::PublishResponse, Status> {
    let homes = homes_of(&cluster, &request);
    let _held = cluster.hold(cost(&request, homes.len()))?;
    let requests = homes.into_iter().map(|home| (home, request.clone()));
    let mut tally = Tally::default();
    for (home, result) in cluster.ask_each(&call, requests).await {
        tally.add(home, result.map_err(PublishFailure::from));
    }
    tally.finish().map_err(Status::from)
}

/// `Publisher/PublishBatch`.
pub(super) async fn batch(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::PublishBatchRequest,
) -> Result<v1::PublishBatchResponse, Status> {
    convert::check_batch(&request.requests)?;
    let mut tallies = Vec::with_capacity(request.requests.len());
    let mut parts: Vec<BatchPart> = cluster.all().map(|_| BatchPart::default()).collect();
    let mut bytes = 0;
    for (place, request) in request.requests.into_iter().enumerate() {
        let homes = homes_of(&cluster, &request);
        bytes += cost(&request, homes.len());
        for home in homes {
            parts[usize::from(home)].add(place, request.clone());
        }
        tallies.push(Tally::default());
    }
    let _held = cluster.hold(bytes)?;
    let (places, requests): (Vec<_>, Vec<_>) = cluster
        .all()
        .zip(parts)
        .filter(|(_, part)| !part.places.is_empty())
        .map(|(home, part)| (part.places, (home, v1::PublishBatchRequest { requests: part.requests })))
        .unzip();
    let answers = cluster.ask_each::<_, v1::PublishBatchResponse>(&call, requests).await;
    for (places, (home, answer)) in places.into_iter().zip(answers) {
        match answer {
            Ok(answer) => {
                for (place, result) in places.into_iter().zip(answer.results) {
                    tallies[place].add(home, of_result(result));
                }
            }
            Err(status) => {
                for place in places {
                    tallies[place].add(home, Err(PublishFailure::from(status.clone())));
                }
            }
        }
    }
    let results = tallies.into_iter().map(|tally| to_result(tally.finish())).collect();
    Ok(v1::PublishBatchResponse { results })
}

/// `Publisher/CancelScheduled`.
pub(super) async fn cancel_scheduled(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::CancelScheduledRequest,
) -> Result<v1::CancelScheduledResponse, Status> {
    let named = request.schedule_id.split_once('.').and_then(|(home, id)| Some((home.parse().ok()?, id)));
    let Some((home, id)) = named.filter(|(home, _)| *home < cluster.count()) else {
        return Err(Error::ScheduleNotFound.into());
    };
    let request = v1::CancelScheduledRequest { schedule_id: id.to_owned() };
    cluster.ask(home, &call, request).await
}

/// The id of a scheduled message, with its home: two homes may make the same.
pub(super) fn scheduled_at(home: u16, id: &str) -> String {
    format!("{home}.{id}")
}

/// The messages of a batch for one home, and their places in the batch.
#[derive(Default)]
struct BatchPart {
    places: Vec<usize>,
    requests: Vec<v1::PublishRequest>,
}

impl BatchPart {
    fn add(&mut self, place: usize, request: v1::PublishRequest) {
        self.places.push(place);
        self.requests.push(request);
    }
}

/// The homes that a message goes to. One for a topic that is for later is kept by the home of the topic.
pub(super) fn homes_of(cluster: &CallHomes, request: &v1::PublishRequest) -> Vec<u16> {
    match &request.device_id {
        Some(device) => vec![cluster.of(device)],
        None if request.deliver_at.is_some() => vec![cluster.of(&request.topic)],
        None => cluster.all().collect(),
    }
}

/// Outcome of a message, from those at its homes.
#[derive(Debug, Default)]
pub(super) struct Tally {
    response: Option<v1::PublishResponse>,
    failure: Option<PublishFailure>,
}

impl Tally {
    /// Adds what became of the message at a home.
    pub(super) fn add(&mut self, home: u16, result: Result<v1::PublishResponse, PublishFailure>) {
        match result {
            Ok(mut response) => {
                if !response.schedule_id.is_empty() {
                    response.schedule_id = scheduled_at(home, &response.schedule_id);
                }
                self.response = Some(match self.response.take() {
                    Some(before) => sum(before, response),
                    None => response,
                });
            }
            Err(failure) => {
                self.failure = Some(match self.failure.take() {
                    Some(before) => before.with(failure),
                    None => failure,
                });
            }
        }
    }

    /// The sum of the receivers, and the least level of all. A message that failed anywhere has failed; it may have reached the
    /// devices of other homes.
    pub(super) fn finish(self) -> Result<v1::PublishResponse, PublishFailure> {
        match (self.failure, self.response) {
            (Some(mut failure), response) => {
                if let Some(response) = response {
                    failure.count(&response);
                }
                Err(failure)
            }
            (None, Some(response)) => Ok(response),
            (None, None) => Err(Error::Internal.into()),
        }
    }
}

/// The outcome for more receivers: that of the one that came farthest, as among the receivers of one home.
fn sum(one: v1::PublishResponse, two: v1::PublishResponse) -> v1::PublishResponse {
    let rank = |response: &v1::PublishResponse| match response.outcome() {
        v1::Outcome::Unspecified | v1::Outcome::NoMatch => 0,
        v1::Outcome::Dropped => 1,
        v1::Outcome::Queued => 2,
        v1::Outcome::Sent => 3,
        v1::Outcome::Acked => 4,
        v1::Outcome::Rejected => 5,
        v1::Outcome::Scheduled => 6,
    };
    let outcome = if rank(&two) > rank(&one) { two.outcome } else { one.outcome };
    let refuses = |code: &Option<u32>| code.is_some_and(|code| code >= 0x80);
    let reason_code = match two.reason_code {
        None => one.reason_code,
        some if refuses(&one.reason_code) && !refuses(&some) => one.reason_code,
        some => some,
    };
    v1::PublishResponse {
        outcome,
        drop_reason: if two.drop_reason == 0 { one.drop_reason } else { two.drop_reason },
        matched: one.matched.saturating_add(two.matched),
        sent: one.sent.saturating_add(two.sent),
        queued: one.queued.saturating_add(two.queued),
        dropped: one.dropped.saturating_add(two.dropped),
        reason_code,
        rejected: one.rejected.saturating_add(two.rejected),
        schedule_id: if two.schedule_id.is_empty() { one.schedule_id } else { two.schedule_id },
    }
}

/// Why a message failed at a home.
#[derive(Debug)]
pub(super) struct PublishFailure {
    pub(super) item: v1::ItemError,
    /// As it came, with all details.
    status: Option<Box<Status>>,
}

impl From<Error> for PublishFailure {
    fn from(error: Error) -> Self {
        Self { item: error.to_item(), status: Some(Box::new(error.into())) }
    }
}

impl From<Status> for PublishFailure {
    fn from(status: Status) -> Self {
        let info = status.get_details_error_info();
        let (reason, metadata) = info.map(|info| (info.reason, info.metadata)).unwrap_or_default();
        let item = v1::ItemError {
            code: status.code().into(),
            reason,
            message: status.message().to_owned(),
            metadata,
        };
        Self { item, status: Some(Box::new(status)) }
    }
}

impl From<PublishFailure> for Status {
    fn from(failure: PublishFailure) -> Self {
        let PublishFailure { item, status } = failure;
        status.map_or_else(
            || {
                let details = ErrorDetails::with_error_info(item.reason, ERROR_DOMAIN, item.metadata);
                Self::with_error_details(Code::from_i32(item.code), item.message, details)
            },
            |status| *status,
        )
    }
}

/// Counts that an error has of a message whose wait ended early.
const COUNTS: [&str; 3] = ["sent", "acked", "rejected"];

impl PublishFailure {
    /// The level that the message reached, as a rank; 0 is none.
    fn level(&self) -> u8 {
        match self.item.metadata.get("level").map(String::as_str) {
            None => 0,
            Some("SENT") => 2,
            Some(_) => 1,
        }
    }

    /// The failure at one home and another: the lesser level, and what was reached at both.
    fn with(self, other: Self) -> Self {
        let (mut kept, left) = if other.level() < self.level() { (other, self) } else { (self, other) };
        let of = |name: &str| {
            left.item.metadata.get(name).and_then(|count| count.parse().ok()).unwrap_or_default()
        };
        kept.add(COUNTS.map(of));
        kept
    }

    /// Counts the receivers at a home where it did not fail.
    fn count(&mut self, response: &v1::PublishResponse) {
        let is_acked = matches!(response.outcome(), v1::Outcome::Acked | v1::Outcome::Rejected);
        let acked = if is_acked { response.sent.saturating_sub(response.rejected) } else { 0 };
        self.add([response.sent, acked, response.rejected]);
    }

    fn add(&mut self, more: [u32; 3]) {
        if self.level() == 0 {
            return;
        }
        for (name, more) in COUNTS.into_iter().zip(more) {
            let count = self.item.metadata.entry(name.to_owned()).or_default();
            *count = count.parse::<u32>().unwrap_or_default().saturating_add(more).to_string();
        }
        // No longer as it came.
        self.status = None;
    }
}

/// The result of an item of a batch.
pub(super) fn of_result(result: v1::PublishResult) -> Result<v1::PublishResponse, PublishFailure> {
    match result.result {
        Some(v1::publish_result::Result::Response(response)) => Ok(response),
        Some(v1::publish_result::Result::Error(item)) => Err(PublishFailure { item, status: None }),
        None => Err(Error::Internal.into()),
    }
}

/// A result as an item of a batch.
pub(super) fn to_result(result: Result<v1::PublishResponse, PublishFailure>) -> v1::PublishResult {
    let result = match result {
        Ok(response) => v1::publish_result::Result::Response(response),
        Err(failure) => v1::publish_result::Result::Error(failure.item),
    };
    v1::PublishResult { result: Some(result) }
}

/// Bytes that a message holds while it is on its way to so many homes.
pub(super) fn cost(request: &v1::PublishRequest, homes: usize) -> usize {
    (request.encoded_len() + size_of_val(request)) * homes
}

#[cfg(test)]
mod tests {
    use gateway_core::ReceiptState;
    use grpc_messages::status::{Reached, ReachedLevel};
    use v1::Outcome::{Acked, Dropped, NoMatch, Queued, Rejected, Sent};

    use super::*;

    fn told(outcome: v1::Outcome, reason_code: Option<u32>) -> v1::PublishResponse {
        let matched = u32::from(outcome != NoMatch);
        v1::PublishResponse { outcome: outcome.into(), matched, reason_code, ..Default::default() }
    }

    /// The failure: an outcome that depends on which home answers first, or that no single gateway would tell.
    #[test]
    fn the_outcome_is_that_of_the_receiver_that_came_farthest() {
        let farthest = [
            (NoMatch, Dropped),
            (NoMatch, Queued),
            (Dropped, Queued),
            (Dropped, Sent),
            (Queued, Sent),
            (Queued, Acked),
            (NoMatch, Acked),
            (Acked, Rejected),
        ];
        for (less, more) in farthest {
            for (one, two) in [(less, more), (more, less)] {
                let sum = sum(told(one, None), told(two, None));
                assert_eq!(sum.outcome(), more, "{one:?} {two:?}");
                assert_eq!(sum.matched, u32::from(less != NoMatch) + 1);
            }
        }
        for (one, two, code) in [
            (Some(0), None, 0),
            (Some(16), Some(0x97), 0x97),
            (Some(0x97), Some(16), 0x97),
            (None, Some(0), 0),
        ] {
            assert_eq!(sum(told(Acked, one), told(Acked, two)).reason_code, Some(code));
        }
    }

    /// The failure: an error of the gateway's own is told as a matter of time, with details that are lost.
    #[test]
    fn another_error_comes_before_a_wait_that_ended_early() {
        let late = || {
            let reached = Reached { level: ReachedLevel::Sent, state: ReceiptState::default() };
            PublishFailure::from(Status::from(Error::Deadline(reached)))
        };
        for order in [false, true] {
            let mut tally = Tally::default();
            let away = || PublishFailure::from(Status::from(Error::HomeNotServed { home: 1 }));
            let failures = if order { [late(), away()] } else { [away(), late()] };
            for (home, failure) in (0..).zip(failures) {
                tally.add(home, Err(failure));
            }
            let status = Status::from(tally.finish().unwrap_err());
            assert_eq!(status.get_details_error_info().unwrap().reason, "NOT_ACTIVE");
            assert!(status.get_details_retry_info().is_some());
        }
    }
}
