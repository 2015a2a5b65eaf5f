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
