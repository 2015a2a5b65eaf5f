//! Messages with `deliver_at`: on disk, listed, cancelled, and published when their time has come.

use std::time::{Duration, SystemTime};

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{self, publisher_client::PublisherClient};
use tokio::task::block_in_place;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::{access::Guarded, client::Got, harness::*};

#[expect(clippy::disallowed_methods, reason = "as a backend says it, by the wall clock")]
fn at(away: Duration, request: v1::PublishRequest) -> v1::PublishRequest {
    v1::PublishRequest { deliver_at: Some((SystemTime::now() + away).into()), ..request }
}

const DAY: Duration = Duration::from_secs(86_400);

async fn list(setup: &Setup) -> Vec<v1::ScheduledMessage> {
    let answer = setup.publisher().list_scheduled(v1::ListScheduledRequest::default()).await.unwrap();
    answer.into_inner().messages
}

async fn cancel(setup: &Setup, id: &str) -> Result<(), Status> {
    let request = v1::CancelScheduledRequest { schedule_id: id.to_owned() };
    setup.publisher().cancel_scheduled(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_waits_for_its_time_and_expires_from_then_on() {
    let setup = Setup::new().await;
    let mut device = block_in_place(|| setup.raw("dev", |_| {}));
    let later = setup.publish(at(DAY, to_device("dev", "tomorrow"))).await.unwrap();
    assert_eq!(later.outcome(), v1::Outcome::Scheduled);
    let soon_due = v1::PublishRequest { expiry_seconds: Some(1), ..to_device("dev", "now") };
    let first = setup.publish(at(Duration::from_millis(1_500), soon_due)).await.unwrap();
    assert_eq!(block_in_place(|| device.next()), Got::Publish("cmd".to_owned(), b"now".to_vec()));
    let left = list(&setup).await;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!((left[0].schedule_id.as_str(), left[0].payload_bytes), (later.schedule_id.as_str(), 8));
    assert_eq!((left[0].device_id(), left[0].topic.as_str()), ("dev", "cmd"));
    for id in [first.schedule_id.as_str(), "", "0", "zzzzzzzzzzzzzzzz"] {
        let error = cancel(&setup, id).await.unwrap_err();
        assert_eq!(refusal(&error), (Code::NotFound, "SCHEDULE_NOT_FOUND".to_owned()), "{id}");
    }
    cancel(&setup, &later.schedule_id).await.unwrap();
    assert!(list(&setup).await.is_empty());
    let past = v1::PublishRequest { deliver_at: Some(SystemTime::UNIX_EPOCH.into()), ..to("cmd", "x") };
    setup.publish(v1::PublishRequest { device_id: Some("dev".to_owned()), ..past }).await.unwrap();
    assert_eq!(block_in_place(|| device.next()), Got::Publish("cmd".to_owned(), b"x".to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_scheduled_and_cancelled_stays_so_over_a_restart() {
    let setup = Setup::new().await;
    let keyed = v1::PublishRequest { idempotency_key: "k".to_owned(), retain: true, ..to("due", "soon") };
    let keyed = at(Duration::from_millis(300), keyed);
    let soon_due = setup.publish(keyed.clone()).await.unwrap();
    let kept = setup.publish(at(DAY, to("t", "kept"))).await.unwrap();
    let gone = setup.publish(at(2 * DAY, to("t", "gone"))).await.unwrap();
    cancel(&setup, &gone.schedule_id).await.unwrap();
    let setup = setup.restarted(|_| {}).await;
    // Before or after the restart, it was published.
    let published = async {
        let request = v1::GetRetainedRequest { topic: "due".to_owned() };
        while setup.state().get_retained(request.clone()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon("a message that was due", published).await;
    assert_eq!(setup.publish(keyed).await.unwrap(), soon_due, "the key still has its message");
    let left = list(&setup).await;
    assert_eq!(left.iter().map(|found| &found.schedule_id).collect::<Vec<_>>(), [&kept.schedule_id]);
    let next = setup.publish(at(3 * DAY, to("t", "new"))).await.unwrap();
    assert!(next.schedule_id > gone.schedule_id, "no id means two messages");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_be_scheduled_is_bounded_and_needs_a_disk() {
    let setup = Setup::with(|config| {
        config.grpc.scheduled_messages = 2;
        config.grpc.scheduled_bytes = "2 KiB".parse().unwrap();
    })
    .await;
    let too_far = at(31 * DAY, to("t", "x"));
    let waits = v1::PublishRequest { wait: v1::Wait::Acked.into(), ..at(DAY, to("t", "x")) };
    for request in [too_far, waits] {
        let error = setup.publish(request).await.unwrap_err();
        assert_eq!(refusal(&error), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));
    }
    let full = (Code::ResourceExhausted, "SCHEDULE_FULL".to_owned());
    let large = setup.publish(at(DAY, to("t", &"x".repeat(2_000)))).await.unwrap_err();
    assert_eq!(refusal(&large), full);
    let first = setup.publish(at(DAY, to("t", "1"))).await.unwrap();
    setup.publish(at(DAY, to("t", "2"))).await.unwrap();
    assert_eq!(refusal(&setup.publish(at(DAY, to("t", "3"))).await.unwrap_err()), full);
    cancel(&setup, &first.schedule_id).await.unwrap();
    setup.publish(at(DAY, to("t", "3"))).await.unwrap();
    let setup = setup.restarted(|config| config.store.enabled = false).await;
    let error = setup.publish(at(DAY, to("t", "x"))).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::FailedPrecondition, "SCHEDULE_NEEDS_STORE".to_owned()));
    assert_eq!(error.get_details_error_info().unwrap().metadata["key"], "store.enabled");
    assert!(list(&setup).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_lists_and_cancels_in_its_scope_only() {
    let lamps: &[&str] = &["lamp-*"];
    let tokens = [("all", Role::Publisher, None, None), ("lamps", Role::Publisher, None, Some(lamps))];
    let guarded = Guarded::with(&tokens, |_| {}).await;
    let mut all = PublisherClient::new(guarded.channel("all"));
    let mut ids = Vec::new();
    for device in ["lamp-1", "lock-1", "lamp-2"] {
        let answer = all.publish(at(DAY, to_device(device, "x"))).await.unwrap();
        ids.push(answer.into_inner().schedule_id);
    }
    let mut client = PublisherClient::new(guarded.channel("lamps"));
    let mut seen = Vec::new();
    let mut request = v1::ListScheduledRequest { page_size: 1, ..Default::default() };
    loop {
        let page = client.list_scheduled(request.clone()).await.unwrap().into_inner();
        seen.extend(page.messages.into_iter().map(|found| found.schedule_id));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(seen, [ids[0].as_str(), ids[2].as_str()]);
    let mut cancel = async |id: &str| {
        client.cancel_scheduled(v1::CancelScheduledRequest { schedule_id: id.to_owned() }).await.map(drop)
    };
    let error = cancel(&ids[1]).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::NotFound, "SCHEDULE_NOT_FOUND".to_owned()));
    cancel(&ids[0]).await.unwrap();
}
