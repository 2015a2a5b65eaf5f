//! Events: the life of a device as a watcher sees it.

use mqtt_server::proto::gateway::v1::{self, event::Detail};

use crate::{client::Got, harness::*};

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_sees_a_device_connect_subscribe_be_taken_over_and_go() {
    let setup = Setup::new().await;
    let mut events = setup.events("dev").await;
    let mut first = setup.raw("dev", |_| {});
    first.subscribe("a/+");
    drop(setup.raw("another", |_| {}));
    let seen = details(&mut events, 2).await;
    let Detail::Connected(connected) = &seen[0] else { panic!("{seen:?}") };
    assert!(!connected.session_present);
    let connection = connected.connection.as_ref().unwrap();
    assert_eq!(
        (connection.listener.as_str(), connection.protocol_version()),
        ("tcp", v1::ProtocolVersion::V50)
    );
    let subscription = v1::DeviceSubscription {
        topic_filter: "a/+".to_owned(),
        qos: v1::Qos::AtMostOnce.into(),
        restricted: false,
    };
    assert_eq!(seen[1], Detail::Subscribed(subscription));

    let second = setup.raw("dev", |_| {});
    assert_eq!((first.next(), first.next()), (Got::Disconnect(0x8E), Got::Closed));
    let seen = details(&mut events, 2).await;
    assert_eq!(seen[0], Detail::TakenOver(v1::TakenOver {}));
    let Detail::Connected(connected) = &seen[1] else { panic!("{seen:?}") };
    assert!(connected.session_present);

    drop(second);
    let lost = Detail::Disconnected(v1::Disconnected { reason: "peer_closed".to_owned() });
    assert_eq!(details(&mut events, 1).await, [lost]);
    let end = v1::DisconnectDeviceRequest {
        device_id: "dev".to_owned(),
        discard_session: true,
        ..Default::default()
    };
    setup.devices().disconnect_device(end).await.unwrap();
    let ended = Detail::SessionEnded(v1::SessionEnded { reason: "administrative".to_owned() });
    assert_eq!(details(&mut events, 1).await, [ended]);
}

#[tokio::test(flavor = "multi_thread")]
async fn drops_are_told_by_reason_and_kinds_are_filtered() {
    let setup = Setup::with(|config| config.limits.offline_messages = 2).await;
    let mut all = setup.events("dev").await;
    let request = v1::WatchEventsRequest {
        kinds: vec![v1::EventKind::Dropped.into()],
        device_id_prefixes: vec!["d".to_owned()],
        ..v1::WatchEventsRequest::default()
    };
    let mut client = v1::events_client::EventsClient::new(setup.channel.clone());
    let mut drops = client.watch_events(request).await.unwrap().into_inner();
    drop(setup.raw("dev", |_| {}));
    until(&mut all, |detail| matches!(detail, Detail::Disconnected(_))).await;
    let requests = (0..7).map(|_| to_device("dev", "x")).collect();
    setup.publisher().publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
    let mut count = 0;
    while count < 5 {
        for detail in details(&mut drops, 1).await {
            let Detail::Dropped(dropped) = detail else { panic!("{detail:?}") };
            assert_eq!(dropped.reason(), v1::DropReason::QueueFull);
            count += dropped.count;
        }
    }
    assert_eq!(count, 5);
}

/// Rules out a watcher that misses what happened while it was cut off, or is told twice; a token is good for other
/// filters, and one of a heartbeat is as good as one of an event.
#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_that_comes_again_is_told_each_event_once() {
    let setup = Setup::new().await;
    let watch = async |resume_token: &str, kinds: &[v1::EventKind]| {
        let request = v1::WatchEventsRequest {
            kinds: kinds.iter().map(|kind| (*kind).into()).collect(),
            device_ids: vec!["dev".to_owned()],
            resume_token: resume_token.to_owned(),
            heartbeat_interval: Some(prost_types::Duration { seconds: 0, nanos: 100_000_000 }),
            ..v1::WatchEventsRequest::default()
        };
        let mut client = v1::events_client::EventsClient::new(setup.channel.clone());
        client.watch_events(request).await.map(tonic::Response::into_inner)
    };
    let mut first = watch("", &[]).await.unwrap();
    let begin = soon("a beginning", first.message()).await.unwrap().unwrap();
    assert!(begin.items.is_empty() && !begin.resume_token.is_empty());
    let mut beat = String::new();
    while beat.is_empty() {
        let response = soon("a heartbeat", first.message()).await.unwrap().unwrap();
        let is_beat =
            |item: &v1::WatchEventsItem| matches!(item.item, Some(v1::watch_events_item::Item::Heartbeat(_)));
        assert!(response.items.iter().all(is_beat), "{response:?}");
        beat = response.resume_token;
    }
    drop(first);

    let mut client = setup.raw("dev", |_| {});
    drop(setup.raw("another", |_| {}));
    for filter in ["a", "b", "c"] {
        client.subscribe(filter);
    }
    let mut seen = Vec::new();
    let mut token = beat;
    // Cut off after each response.
    while seen.len() < 4 {
        let mut events = watch(&token, &[]).await.unwrap();
        for _ in 0..2 {
            let response = soon("events", events.message()).await.unwrap().unwrap();
            for item in response.items {
                match item.item {
                    Some(v1::watch_events_item::Item::Event(event)) => seen.push(event.detail.unwrap()),
                    Some(v1::watch_events_item::Item::Heartbeat(_)) => {}
                    other => panic!("{other:?}"),
                }
            }
            token = response.resume_token;
        }
    }
    let filters: Vec<_> = seen[1..]
        .iter()
        .map(|detail| match detail {
            Detail::Subscribed(subscribed) => subscribed.topic_filter.as_str(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(matches!(seen[0], Detail::Connected(_)), "{seen:?}");
    assert_eq!(filters, ["a", "b", "c"]);

    let mut connected = watch(&begin.resume_token, &[v1::EventKind::Connected]).await.unwrap();
    until(&mut connected, |detail| matches!(detail, Detail::Connected(_))).await;
    let old = watch("AAAAAAAAAAAAAAAAAAAAAA", &[]).await.unwrap_err();
    assert_eq!(refusal(&old), (tonic::Code::OutOfRange, "OLD_TOKEN".to_owned()));
    let bad = watch("nonsense", &[]).await.unwrap_err();
    assert_eq!(refusal(&bad), (tonic::Code::InvalidArgument, "INVALID_FIELD".to_owned()));
}
