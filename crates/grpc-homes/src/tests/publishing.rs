//! Messages of backends: every receiver gets each once, and the answers are added.

use std::sync::atomic::Ordering::SeqCst;

use tokio_stream::StreamExt as _;
use tonic::{Code, codec::CompressionEncoding::Gzip};
use tonic_types::StatusExt as _;

use super::{bench, in_seconds, reason};
use grpc::proto::gateway::v1::{self, publisher_client::PublisherClient};

fn to_topic(topic: &str, payload: &str) -> v1::PublishRequest {
    v1::PublishRequest {
        topic: topic.to_owned(),
        payload: payload.as_bytes().to_vec().into(),
        ..Default::default()
    }
}

fn to_device(device: &str, payload: &str) -> v1::PublishRequest {
    v1::PublishRequest { device_id: Some(device.to_owned()), ..to_topic("direct", payload) }
}

/// The failure: a device of another home misses the message, or gets it twice when the call is repeated.
#[tokio::test]
async fn a_message_for_a_topic_reaches_every_home_once() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let mut sessions = Vec::new();
    for device in ["a0", "a1", "b1", "a2"] {
        sessions.push(bench.homes.connect(device, &["t/#"]).await);
    }
    let request = v1::PublishRequest { idempotency_key: "k".to_owned(), ..to_topic("t/1", "one") };
    let response = publisher.publish(request.clone()).await.unwrap().into_inner();
    assert_eq!((response.outcome(), response.matched, response.sent), (v1::Outcome::Sent, 4, 4));
    assert_eq!(publisher.publish(request.clone()).await.unwrap().into_inner(), response);
    for session in &sessions {
        assert_eq!(session.take(), ["one"]);
    }
    let other = v1::PublishRequest { payload: b"two".as_slice().into(), ..request.clone() };
    assert_eq!(reason(&publisher.publish(other).await.unwrap_err()), "IDEMPOTENCY_KEY_REUSED");

    let direct = publisher.publish(to_device("b1", "for one")).await.unwrap().into_inner();
    assert_eq!((direct.outcome(), direct.matched), (v1::Outcome::Sent, 1));
    let got: Vec<_> = sessions.iter().map(|session| session.take().len()).collect();
    assert_eq!(got, [0, 0, 1, 0]);
    let nobody = publisher.publish(to_topic("u", "x")).await.unwrap().into_inner();
    assert_eq!(nobody.outcome(), v1::Outcome::NoMatch);
}

/// The failure: success, although a home has not got the message; or the repeated call reaches the others again.
#[tokio::test]
async fn a_message_fails_while_a_home_is_away_and_is_completed_later() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let sessions = [bench.homes.connect("a0", &["t"]).await, bench.homes.connect("a1", &["t"]).await];
    bench.homes.set_away(1, true);
    let request = v1::PublishRequest { idempotency_key: "k".to_owned(), ..to_topic("t", "x") };
    let away = publisher.publish(request.clone()).await.unwrap_err();
    assert_eq!((away.code(), reason(&away).as_str()), (Code::Unavailable, "NOT_ACTIVE"));
    assert!(away.get_details_retry_info().is_some());
    assert!(publisher.publish(to_device("a0", "y")).await.is_ok(), "its home is there");
    bench.homes.set_away(1, false);
    let response = publisher.publish(request).await.unwrap().into_inner();
    assert_eq!(response.sent, 2);
    assert_eq!(sessions.map(|session| session.take()), [vec!["x", "y"], vec!["x"]]);
}

/// The failure: results of other messages than those in their places.
#[tokio::test]
async fn a_batch_has_each_result_in_its_place_and_keeps_its_order() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let session = bench.homes.connect("a1", &["t"]).await;
    bench.homes.connect("a2", &["t"]).await;
    bench.homes.set_away(0, true);
    let requests = vec![
        to_device("a1", "1"),
        to_topic("t", "2"),
        to_device("none-2", "3"),
        to_device("a0", "4"),
        to_device("a2", "5"),
        v1::PublishRequest { topic: "+".to_owned(), ..to_device("a1", "6") },
        to_device("a1", "7"),
    ];
    let answer = publisher.publish_batch(v1::PublishBatchRequest { requests }).await.unwrap().into_inner();
    let words = answer.results.into_iter().map(|result| match result.result.unwrap() {
        v1::publish_result::Result::Response(response) => response.outcome().as_str_name().to_owned(),
        v1::publish_result::Result::Error(error) => error.reason,
    });
    let expected = [
        "OUTCOME_SENT",
        "NOT_ACTIVE",
        "DEVICE_NOT_FOUND",
        "NOT_ACTIVE",
        "OUTCOME_SENT",
        "INVALID_FIELD",
        "OUTCOME_SENT",
    ];
    assert_eq!(words.collect::<Vec<_>>(), expected);
    assert_eq!(session.take(), ["1", "2", "7"]);
}

/// The failure: results out of order, a message that is lost with the home of another, or a home that stays lost.
#[tokio::test]
async fn a_stream_of_messages_outlives_a_home_that_breaks_off() {
    let bench = bench(2).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let sessions = [bench.homes.connect("a0", &["t"]).await, bench.homes.connect("a1", &["t"]).await];
    let (sender, receiver) = tokio::sync::mpsc::channel(10);
    let frames = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = publisher.publish_stream(frames).await.unwrap().into_inner();
    let mut next = 1;
    let mut told = Vec::new();
    for (payload, is_away) in [("1", false), ("2", true), ("3", false)] {
        bench.homes.set_away(1, is_away);
        let requests = vec![to_device("a0", payload), to_topic("t", payload), to_device("a1", payload)];
        sender.send(v1::PublishStreamRequest { requests, options: None }).await.unwrap();
        let end = next + 3;
        while next < end {
            let answer = answers.message().await.unwrap().unwrap();
            assert_eq!(answer.first_sequence, next);
            for result in answer.results {
                assert_eq!(result.sequence, next);
                next += 1;
                told.push(match result.result.unwrap().result.unwrap() {
                    v1::publish_result::Result::Response(response) => response.sent.to_string(),
                    v1::publish_result::Result::Error(error) => error.reason,
                });
            }
        }
    }
    assert_eq!(told, ["1", "2", "1", "1", "NOT_ACTIVE", "NOT_ACTIVE", "1", "2", "1"]);
    drop(sender);
    assert!(answers.message().await.unwrap().is_none(), "ends with its caller");
    assert_eq!(bench.homes.open.load(SeqCst), 0, "and so at the homes");
    assert_eq!(sessions[0].take(), ["1", "1", "2", "2", "3", "3"]);
    let mut got = sessions[1].take();
    // A message of which its caller is told that its home was away may have come all the same.
    got.retain(|payload| payload != "2");
    assert_eq!(got, ["1", "1", "3", "3"]);
}

/// The failure: options that are taken, or refused, where one gateway does otherwise.
#[tokio::test]
async fn a_stream_of_messages_has_the_same_options() {
    let bench = bench(2).await;
    bench.homes.connect("a0", &[]).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let options =
        |window| Some(v1::PublishStreamOptions { window, detail: v1::ResultDetail::Failures.into() });
    let requests = vec![to_device("a0", "x"), to_device("no1", "x"), to_device("a0", "x")];
    let frame = v1::PublishStreamRequest { requests, options: options(1) };
    let frames = tokio_stream::iter([frame.clone()]);
    let mut answers = publisher.publish_stream(frames).await.unwrap().into_inner();
    let (mut count, mut failures) = (0, Vec::new());
    while let Some(answer) = answers.message().await.unwrap() {
        count += answer.count;
        failures.extend(answer.results.into_iter().map(|result| result.sequence));
    }
    assert_eq!((count, failures), (3, vec![2]));
    let too_wide = v1::PublishStreamRequest { options: options(10_001), ..Default::default() };
    for frames in [vec![too_wide], vec![frame.clone(), frame]] {
        let mut answers = publisher.publish_stream(tokio_stream::iter(frames)).await.unwrap().into_inner();
        let refused = loop {
            match answers.message().await {
                Ok(answer) => assert!(answer.is_some(), "not refused"),
                Err(status) => break status,
            }
        };
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
}

/// The failure: a device is left out, or the count of one home is told as that of all.
#[tokio::test]
async fn a_message_to_many_devices_goes_to_each_at_its_home() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    for device in ["a0", "a1", "a2", "b2"] {
        bench.homes.connect(device, &[]).await;
    }
    let listed = |ids: &[&str]| v1::PublishToDevicesRequest {
        message: Some(to_topic("t", "x")),
        device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Default::default()
    };
    let prefixed = v1::PublishToDevicesRequest { device_id_prefix: "a".to_owned(), ..listed(&[]) };
    for (request, expected) in [
        (listed(&["a0", "b2", "c1"]), vec!["a0", "b2", "c1"]),
        (listed(&["a1"]), vec!["a1"]),
        (prefixed.clone(), vec!["a0", "a1", "a2"]),
    ] {
        let mut answers = publisher.publish_to_devices(request).await.unwrap().into_inner();
        let (mut devices, mut issued) = (Vec::new(), 0);
        while let Some(answer) = answers.next().await {
            let answer = answer.unwrap();
            devices.extend(answer.results.into_iter().map(|result| result.device_id));
            issued = answer.issued;
        }
        devices.sort();
        assert_eq!(issued, expected.len() as u64);
        assert_eq!(devices, expected);
    }
    let both = v1::PublishToDevicesRequest { device_ids: vec!["a0".to_owned()], ..prefixed };
    for bad in [listed(&[]), both, listed(&["a0", "a0"])] {
        let refused = publisher.publish_to_devices(bad).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
}

/// The failure: a message for later that cannot be cancelled, since two homes have one of its id.
#[tokio::test]
async fn a_message_for_later_is_cancelled_by_its_id() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let later = |request| v1::PublishRequest { deliver_at: in_seconds(3_600), ..request };
    let mut ids = Vec::new();
    for device in ["a0", "a1", "a2"] {
        let response = publisher.publish(later(to_device(device, "x"))).await.unwrap().into_inner();
        assert_eq!(response.outcome(), v1::Outcome::Scheduled);
        ids.push(response.schedule_id);
    }
    let list = async |publisher: &mut PublisherClient<_>, device: &str| {
        let request = v1::ListScheduledRequest { device_id: device.to_owned(), ..Default::default() };
        let messages = publisher.list_scheduled(request).await.unwrap().into_inner().messages;
        let mut ids: Vec<_> = messages.into_iter().map(|message| message.schedule_id).collect();
        ids.sort();
        ids
    };
    ids.sort();
    assert_eq!(list(&mut publisher, "").await, ids);
    assert_eq!(list(&mut publisher, "a1").await, [ids[1].clone()]);
    let request = v1::CancelScheduledRequest { schedule_id: ids[1].clone() };
    publisher.cancel_scheduled(request.clone()).await.unwrap();
    assert_eq!(reason(&publisher.cancel_scheduled(request).await.unwrap_err()), "SCHEDULE_NOT_FOUND");
    for bad in ["", "7", "9.0000000000000001", "x.1"] {
        let request = v1::CancelScheduledRequest { schedule_id: bad.to_owned() };
        assert_eq!(reason(&publisher.cancel_scheduled(request).await.unwrap_err()), "SCHEDULE_NOT_FOUND");
    }
    assert_eq!(list(&mut publisher, "").await, [ids[0].clone(), ids[2].clone()]);
}

/// The failure: a message for later reaches the devices of one home only, or those of others twice once that one is back.
#[tokio::test]
async fn a_message_for_later_reaches_every_home_once() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let mut sessions = Vec::new();
    for device in ["a0", "a1", "a2"] {
        sessions.push(bench.homes.connect(device, &["t1"]).await);
    }
    bench.homes.set_away(2, true);
    let request = v1::PublishRequest { deliver_at: in_seconds(0), ..to_topic("t1", "x") };
    let scheduled = publisher.publish(request).await.unwrap().into_inner();
    assert_eq!(scheduled.outcome(), v1::Outcome::Scheduled);
    assert!(scheduled.schedule_id.starts_with("1."), "the home of its topic keeps it");
    let scheduled = async |publisher: &mut PublisherClient<_>| {
        let request = v1::ListScheduledRequest::default();
        publisher.list_scheduled(request).await.unwrap().into_inner().messages.len()
    };
    while sessions[0].count() == 0 || sessions[1].count() == 0 {
        tokio::task::yield_now().await;
    }
    bench.homes.set_away(2, false);
    while scheduled(&mut publisher).await > 0 || sessions[2].count() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    for session in sessions {
        assert_eq!(session.take(), ["x"]);
    }
}

/// The failure: a level that not all receivers have reached, or the receivers of one home told as all.
#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_early_tells_the_least_level_and_all_receivers() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    for device in ["a0", "a1", "b1"] {
        bench.homes.connect(device, &["t"]).await;
    }
    let request = |wait: v1::Wait| {
        let message = v1::PublishRequest { wait: wait.into(), ..to_topic("t", "x") };
        let mut request = tonic::Request::new(message);
        request.set_timeout(std::time::Duration::from_secs(1));
        request
    };
    let sent = publisher.publish(request(v1::Wait::Sent)).await.unwrap().into_inner();
    assert_eq!((sent.outcome(), sent.sent), (v1::Outcome::Sent, 3));
    // The devices never acknowledge, and there is none at the third home.
    let late = publisher.publish(request(v1::Wait::Acked)).await.unwrap_err();
    assert_eq!((late.code(), reason(&late).as_str()), (Code::DeadlineExceeded, "WAIT_INCOMPLETE"));
    let metadata = late.get_details_error_info().unwrap().metadata;
    assert_eq!((metadata["level"].as_str(), metadata["sent"].as_str()), ("SENT", "3"));
}

/// The failure: a packed request is not read, or an answer comes in a form that its caller does not take.
#[tokio::test]
async fn packed_requests_are_merged_like_others() {
    let bench = bench(2).await;
    bench.homes.connect("a0", &["t"]).await;
    for accepts in [false, true] {
        let mut publisher = PublisherClient::new(bench.front.clone()).send_compressed(Gzip);
        if accepts {
            publisher = publisher.accept_compressed(Gzip);
        }
        let requests = vec![to_topic("t", "x"), to_device("a0", "y")];
        let answer = publisher.publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
        assert_eq!(answer.metadata().get("grpc-encoding").is_some(), accepts);
        assert_eq!(answer.into_inner().results.len(), 2);
        assert!(publisher.publish(to_device("a0", "z")).await.is_ok());
    }
}

/// The failure: homes go on with what its caller has given up.
#[tokio::test]
async fn a_call_that_is_cancelled_ends_at_every_home() {
    let bench = bench(2).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    bench.homes.connect("a0", &[]).await;
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let frames = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = publisher.publish_stream(frames).await.unwrap().into_inner();
    let requests = vec![to_topic("t", "x")];
    sender.send(v1::PublishStreamRequest { requests, options: None }).await.unwrap();
    assert_eq!(answers.message().await.unwrap().unwrap().count, 1);
    assert_eq!(bench.homes.open.load(SeqCst), 2);
    drop(answers);
    while bench.homes.open.load(SeqCst) > 0 {
        tokio::task::yield_now().await;
    }
    // And one that waits for its devices.
    let waiting = v1::PublishRequest { wait: v1::Wait::Acked.into(), ..to_device("a0", "x") };
    let calls = bench.homes.calls[0].load(SeqCst);
    tokio::select! {
        biased;
        _ = publisher.publish(waiting) => panic!("nobody acknowledges"),
        () = async {
            while bench.homes.calls[0].load(SeqCst) == calls {
                tokio::task::yield_now().await;
            }
        } => {}
    }
    assert_eq!(bench.homes.running.load(SeqCst), 0);
}
