//! Streams over several homes: everything once, an end that is told, and nothing left behind.

use std::sync::atomic::Ordering::SeqCst;

use prost_types::Duration;
use tonic::Streaming;

use super::{bench, reason};
use grpc::proto::{
    gateway::v1::{
        self, events_client::EventsClient, publisher_client::PublisherClient, shadows_client::ShadowsClient,
        state_client::StateClient, subscriber_client::SubscriberClient,
    },
    rpcserver::{self, published_packet_service_client::PublishedPacketServiceClient},
};

/// The payloads of so many messages.
async fn payloads(stream: &mut Streaming<v1::SubscribeResponse>, count: usize) -> Vec<String> {
    let mut found = Vec::new();
    while found.len() < count {
        for item in stream.message().await.unwrap().unwrap().items {
            if let Some(v1::subscribe_item::Item::Message(message)) = item.item {
                found.push(String::from_utf8_lossy(&message.payload).into_owned());
            }
        }
    }
    found.sort();
    found
}

fn publish(payload: &str) -> v1::PublishRequest {
    v1::PublishRequest {
        topic: "t".to_owned(),
        payload: payload.as_bytes().to_vec().into(),
        ..Default::default()
    }
}

/// The failure: what backends publish comes once for each home, or devices of other homes are missing.
#[tokio::test]
async fn a_subscription_sees_all_homes_and_each_message_once() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    let mut subscriber = SubscriberClient::new(bench.front.clone());
    let mut all = subscriber.subscribe(v1::SubscribeRequest::default()).await.unwrap().into_inner();
    let some =
        v1::SubscribeRequest { device_ids: vec!["d1".to_owned(), "d4".to_owned()], ..Default::default() };
    let before = bench.homes.open.load(SeqCst);
    let mut some = subscriber.subscribe(some).await.unwrap().into_inner();
    assert_eq!(bench.homes.open.load(SeqCst) - before, 1, "one home has both devices");
    let response = publisher.publish(publish("backend")).await.unwrap().into_inner();
    assert_eq!((response.matched, response.outcome()), (1, v1::Outcome::Sent), "one stream has it");
    for device in ["d0", "d1", "d2", "d4"] {
        bench.homes.say(device, "t", device);
    }
    publisher.publish(publish("end")).await.unwrap();
    assert_eq!(payloads(&mut all, 6).await, ["backend", "d0", "d1", "d2", "d4", "end"]);
    assert_eq!(payloads(&mut some, 2).await, ["d1", "d4"]);

    let mut precedent = PublishedPacketServiceClient::new(bench.front.clone());
    let request = rpcserver::PublishedPacketRequest { device_id: None };
    let mut packets = precedent.stream_published_payload(request).await.unwrap().into_inner();
    for device in ["d0", "d1", "d2"] {
        bench.homes.say(device, "t", device);
    }
    let mut devices = Vec::new();
    while devices.len() < 3 {
        devices.push(packets.message().await.unwrap().unwrap().device_id);
    }
    devices.sort();
    assert_eq!(devices, ["d0", "d1", "d2"]);
}

/// The failure: a stream that goes on as if it saw all, or streams at homes that nobody reads any more.
#[tokio::test]
async fn a_stream_ends_with_a_home_and_leaves_nothing_behind() {
    let bench = bench(3).await;
    let mut subscriber = SubscriberClient::new(bench.front.clone());
    let mut stream = subscriber.subscribe(v1::SubscribeRequest::default()).await.unwrap().into_inner();
    assert_eq!(bench.homes.open.load(SeqCst), 3);
    bench.homes.set_away(1, true);
    let ended = stream.message().await.unwrap_err();
    assert_eq!(reason(&ended), "NOT_ACTIVE");
    assert!(stream.message().await.unwrap().is_none());
    assert_eq!(bench.homes.open.load(SeqCst), 0, "the other homes are left");
    let refused = subscriber.subscribe(v1::SubscribeRequest::default()).await.unwrap_err();
    assert_eq!(reason(&refused), "NOT_ACTIVE");
    assert_eq!(bench.homes.open.load(SeqCst), 0);
    bench.homes.set_away(1, false);
    let stream = subscriber.subscribe(v1::SubscribeRequest::default()).await.unwrap();
    drop(stream);
    assert_eq!(bench.homes.open.load(SeqCst), 0, "a caller that leaves, leaves every home");
}

/// The failure: a heartbeat from each home, or none.
#[tokio::test(start_paused = true)]
async fn a_silent_stream_has_one_heartbeat_for_an_interval() {
    let bench = bench(3).await;
    let interval = Duration { seconds: 1, nanos: 0 };
    let request = v1::SubscribeRequest { heartbeat_interval: Some(interval), ..Default::default() };
    let mut stream =
        SubscriberClient::new(bench.front.clone()).subscribe(request).await.unwrap().into_inner();
    let began = tokio::time::Instant::now();
    for beats in 1..=3 {
        let items = stream.message().await.unwrap().unwrap().items;
        assert!(matches!(items[0].item, Some(v1::subscribe_item::Item::Heartbeat(_))));
        assert_eq!(began.elapsed().as_secs(), beats);
    }
}

/// The failure: events of one home only, or a token that forgets the others.
#[tokio::test]
async fn events_of_all_homes_go_on_from_a_token() {
    let bench = bench(3).await;
    let mut events = EventsClient::new(bench.front.clone());
    let devices = async |stream: &mut Streaming<v1::WatchEventsResponse>, count: usize| {
        let (mut found, mut token) = (Vec::new(), String::new());
        while found.len() < count {
            let response = stream.message().await.unwrap().unwrap();
            token = response.resume_token;
            for item in response.items {
                match item.item.unwrap() {
                    v1::watch_events_item::Item::Event(event) => found.push(event.device_id),
                    other => panic!("{other:?}"),
                }
            }
        }
        found.sort();
        (found, token)
    };
    let request = |resume_token: &str| v1::WatchEventsRequest {
        kinds: vec![v1::EventKind::Connected.into()],
        resume_token: resume_token.to_owned(),
        ..Default::default()
    };
    let mut stream = events.watch_events(request("")).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert!(first.items.is_empty() && !first.resume_token.is_empty());
    for device in ["d0", "d1", "d2"] {
        bench.homes.connect(device, &[]).await;
    }
    let (found, token) = devices(&mut stream, 3).await;
    assert_eq!(found, ["d0", "d1", "d2"]);
    drop(stream);
    for device in ["e2", "e1"] {
        bench.homes.connect(device, &[]).await;
    }
    let mut stream = events.watch_events(request(&token)).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().unwrap().items.is_empty());
    assert_eq!(devices(&mut stream, 2).await.0, ["e1", "e2"], "what came meanwhile, at both homes");
    let mut stream = events.watch_events(request(&first.resume_token)).await.unwrap().into_inner();
    assert_eq!(devices(&mut stream, 5).await.0, ["d0", "d1", "d2", "e1", "e2"]);
    for bad in ["x", "x.y.z", "a.b", token.split_once('.').unwrap().0] {
        let refused = events.watch_events(request(bad)).await.unwrap_err();
        assert_eq!(reason(&refused), "INVALID_FIELD", "{bad}");
    }
    let parts: Vec<_> = token.split('.').collect();
    let strange = [parts[0], "AAAAAAAAAAAAAAAAAAAAAA", parts[2]].join(".");
    assert_eq!(reason(&events.watch_events(request(&strange)).await.unwrap_err()), "OLD_TOKEN");
}

/// The failure: a snapshot that is said to be complete when one home has sent its own.
#[tokio::test]
async fn a_snapshot_ends_once_and_behind_the_values_of_all_homes() {
    let bench = bench(3).await;
    let devices = ["d0", "d1", "d2", "e2"];
    let mut shadows = ShadowsClient::new(bench.front.clone());
    for device in devices {
        bench.homes.say(device, "t", "x");
        let update = v1::UpdateShadowRequest {
            device_id: device.to_owned(),
            desired: Some("{\"a\":1}".to_owned()),
            ..Default::default()
        };
        shadows.update_shadow(update).await.unwrap();
    }
    for only in [vec![], vec!["d1".to_owned(), "e2".to_owned()]] {
        let expected: Vec<_> = match only.is_empty() {
            true => devices.to_vec(),
            false => vec!["d1", "e2"],
        };
        let request = v1::WatchLatestRequest { device_ids: only, ..Default::default() };
        let mut watch =
            StateClient::new(bench.front.clone()).watch_latest(request).await.unwrap().into_inner();
        let mut found = Vec::new();
        'snapshot: loop {
            for item in watch.message().await.unwrap().unwrap().items {
                match item.item.unwrap() {
                    v1::watch_latest_item::Item::Value(value) => found.push(value.device_id),
                    v1::watch_latest_item::Item::SnapshotEnd(_) => break 'snapshot,
                    other => panic!("{other:?}"),
                }
            }
        }
        found.sort();
        assert_eq!(found, expected);
        bench.homes.say("d1", "t", "changed");
        let changed = watch.message().await.unwrap().unwrap().items;
        assert!(matches!(
            &changed[..],
            [v1::WatchLatestItem { item: Some(v1::watch_latest_item::Item::Value(_)) }]
        ));
    }
    let device_ids = devices.map(str::to_owned).to_vec();
    let request = v1::WatchShadowRequest { device_ids, ..Default::default() };
    let mut watch = shadows.watch_shadow(request).await.unwrap().into_inner();
    let mut found = Vec::new();
    'shadows: loop {
        for item in watch.message().await.unwrap().unwrap().items {
            match item.item.unwrap() {
                v1::watch_shadow_item::Item::Shadow(shadow) => found.push(shadow.device_id),
                v1::watch_shadow_item::Item::SnapshotEnd(_) => break 'shadows,
                other => panic!("{other:?}"),
            }
        }
    }
    found.sort();
    assert_eq!(found, devices);
}
