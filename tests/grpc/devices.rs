//! Devices: list, get, disconnect, trace.

use std::collections::VecDeque;

use mqtt_server::{internals::trace_clients, proto::gateway::v1};
use rumqttc::v5::mqttbytes::QoS;
use tonic::{Code, Streaming};

use crate::{client::Got, harness::*};

#[tokio::test(flavor = "multi_thread")]
async fn devices_are_listed_and_disconnected() {
    let setup = Setup::new().await;
    let mut events = setup.events("dev").await;
    let _device = setup.device("dev").await;
    let list = setup.devices().list_devices(v1::ListDevicesRequest::default()).await.unwrap().into_inner();
    assert_eq!((list.devices.len(), list.devices[0].device_id.as_str()), (1, "dev"));
    let get = v1::GetDeviceRequest { device_id: "dev".to_owned(), ..Default::default() };
    let found = setup.devices().get_device(get).await.unwrap().into_inner().device.unwrap();
    assert_eq!((found.online, found.session_expiry_seconds), (true, 600));
    assert_eq!(found.connection.unwrap().protocol_version(), v1::ProtocolVersion::V50);
    let disconnect = |id: &str| v1::DisconnectDeviceRequest {
        device_id: id.to_owned(),
        ..v1::DisconnectDeviceRequest::default()
    };
    setup.devices().disconnect_device(disconnect("dev")).await.unwrap();
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    let unknown = setup.devices().disconnect_device(disconnect("stranger")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

/// The failure: sessions held the broker as it held them, so an embedding program could not open its data directory again.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_go_of_sessions_and_of_their_directory() {
    let setup = Setup::with(|config| config.store.enabled = true).await;
    let device = setup.device("dev").await;
    device.client.subscribe("$share/group/#", QoS::AtLeastOnce).await.unwrap();
    soon("its place in the group", async {
        let request = || v1::GetDeviceRequest { device_id: "dev".to_owned(), ..Default::default() };
        while setup
            .devices()
            .get_device(request())
            .await
            .unwrap()
            .into_inner()
            .device
            .unwrap()
            .subscription_count
            == 0
        {}
    })
    .await;
    let setup = setup.restarted(|config| config.store.enabled = true).await;
    let list = setup.devices_page(v1::ListDevicesRequest::default()).await.unwrap();
    assert_eq!(list.devices.len(), 1, "its session is back");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_devices_hold_each_once_and_a_foreign_token_is_refused() {
    let setup = Setup::new().await;
    let mut events = setup.events("d3").await;
    let mut clients: Vec<_> = (0..7).map(|n| setup.raw(&format!("d{n}"), |_| {})).collect();
    drop(clients.remove(3));
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    for (size, online_only) in [(1, false), (3, false), (100, false), (2, true)] {
        let mut request = v1::ListDevicesRequest { page_size: size, online_only, ..Default::default() };
        let mut seen = Vec::new();
        loop {
            let page = setup.devices().list_devices(request.clone()).await.unwrap().into_inner();
            assert!(page.devices.len() <= size as usize);
            seen.extend(page.devices.into_iter().map(|device| (device.device_id, device.online)));
            if page.next_page_token.is_empty() {
                break;
            }
            request.page_token = page.next_page_token;
        }
        seen.sort_unstable();
        let all = (0..7).map(|n| (format!("d{n}"), n != 3)).filter(|(_, online)| *online || !online_only);
        assert_eq!(seen, all.collect::<Vec<_>>(), "{size} {online_only}");
    }
    let foreign = v1::ListDevicesRequest { page_token: "d3".to_owned(), ..Default::default() };
    let error = setup.devices().list_devices(foreign).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::InvalidArgument, "PAGE_TOKEN_INVALID".to_owned()));
    let list = |online_only, page_token| {
        setup.devices_page(v1::ListDevicesRequest {
            page_size: 2,
            online_only,
            page_token,
            ..Default::default()
        })
    };
    let token = list(false, String::new()).await.unwrap().next_page_token;
    let other = list(true, token.clone()).await.unwrap_err();
    assert_eq!(refusal(&other), (Code::InvalidArgument, "PAGE_TOKEN_MISMATCH".to_owned()));
    assert!(list(false, token).await.is_ok());
}

/// The failure: a filter is forgotten, or lets somebody through whom another forbids.
#[tokio::test(flavor = "multi_thread")]
async fn devices_are_listed_by_each_filter_and_by_all_together() {
    let setup = Setup::new().await;
    let mut events = setup.events("lamp-2").await;
    let mut clients: Vec<_> = ["lamp-1", "lamp-2", "door-1"].map(|id| setup.raw(id, |_| {})).into();
    let old = |connect: &mut codec::Connect| connect.protocol = gateway_core::Protocol::V4;
    clients.push(setup.raw("lamp-old", old));
    drop(clients.remove(1));
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    let ids = async |request: v1::ListDevicesRequest| {
        let page = setup.devices_page(request).await.unwrap();
        assert_eq!(page.next_page_token, "");
        let mut ids: Vec<_> = page.devices.into_iter().map(|device| device.device_id).collect();
        ids.sort_unstable();
        ids.join(" ")
    };
    let all = v1::ListDevicesRequest::default;
    let prefix = |prefix: &str| v1::ListDevicesRequest { device_id_prefix: prefix.to_owned(), ..all() };
    assert_eq!(ids(prefix("lamp-")).await, "lamp-1 lamp-2 lamp-old");
    assert_eq!(ids(prefix("lampe")).await, "");
    let old = v1::ProtocolVersion::V311.into();
    assert_eq!(ids(v1::ListDevicesRequest { protocol_version: old, ..all() }).await, "lamp-old");
    assert_eq!(ids(v1::ListDevicesRequest { protocol_version: old, ..prefix("door") }).await, "");
    let get = v1::GetDeviceRequest { device_id: "lamp-1".to_owned(), ..Default::default() };
    let shown = setup.devices().get_device(get).await.unwrap().into_inner().device.unwrap();
    let listener = shown.connection.unwrap().listener;
    assert_eq!(ids(v1::ListDevicesRequest { listener, ..all() }).await, "door-1 lamp-1 lamp-2 lamp-old");
    assert_eq!(ids(v1::ListDevicesRequest { listener: "nowhere".to_owned(), ..all() }).await, "");
    assert_eq!(ids(v1::ListDevicesRequest { common_name: "nobody".to_owned(), ..all() }).await, "");
    // A device that is not connected has no time of connection.
    let since = shown.state_time.unwrap();
    let begin = Some(prost_types::Timestamp { seconds: 0, nanos: 0 });
    let (after, before) = (Some(since), Some(since));
    assert_eq!(
        ids(v1::ListDevicesRequest { connected_after: begin, ..prefix("lamp") }).await,
        "lamp-1 lamp-old"
    );
    assert_eq!(ids(v1::ListDevicesRequest { connected_after: after, ..prefix("lamp-1") }).await, "lamp-1");
    assert_eq!(ids(v1::ListDevicesRequest { connected_before: before, ..prefix("lamp-1") }).await, "");
    assert_eq!(ids(v1::ListDevicesRequest { connected_before: begin, ..all() }).await, "");
    for wrong in [
        v1::ListDevicesRequest { protocol_version: 9, ..all() },
        v1::ListDevicesRequest {
            connected_after: Some(prost_types::Timestamp { seconds: -1, nanos: 0 }),
            ..all()
        },
    ] {
        let error = setup.devices_page(wrong).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
}

/// One device with many long filters must not make the list fail for clients that take 4 MiB, nor its own page.
#[tokio::test(flavor = "multi_thread")]
async fn many_long_subscriptions_are_counted_shown_in_part_and_listed_in_pages() {
    let setup = Setup::new().await;
    let mut greedy = setup.raw("greedy", |_| {});
    let filter = |n: usize| format!("{n:04}/{}", "x".repeat(4_000));
    for n in 0..1_000 {
        greedy.subscribe(&filter(n));
    }
    for (view, shown) in [(v1::DeviceView::Unspecified, 0), (v1::DeviceView::Full, 16)] {
        let request = v1::ListDevicesRequest { view: view.into(), ..Default::default() };
        let device = setup.devices_page(request).await.unwrap().devices.remove(0);
        assert_eq!((device.subscription_count, device.subscriptions.len()), (1_000, shown));
    }
    let get = v1::GetDeviceRequest { device_id: "greedy".to_owned(), ..Default::default() };
    let device = setup.devices().get_device(get).await.unwrap().into_inner().device.unwrap();
    assert_eq!(device.subscriptions.len(), 16);

    let mut request = v1::ListSubscriptionsRequest {
        device_id: "greedy".to_owned(),
        page_size: 1_000,
        ..Default::default()
    };
    let mut seen = Vec::new();
    loop {
        let page = setup.devices().list_subscriptions(request.clone()).await.unwrap().into_inner();
        seen.extend(page.subscriptions.into_iter().map(|subscription| subscription.topic_filter));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert!(seen.into_iter().eq((0..1_000).map(filter)), "each once, in order");
    request.device_id = "stranger".to_owned();
    request.page_token.clear();
    assert_eq!(setup.devices().list_subscriptions(request).await.unwrap_err().code(), Code::NotFound);
}

/// State kept for a device goes with one call, and nothing of any other's.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_device_leaves_no_session_value_or_retained_message() {
    use v1::watch_latest_item::Item;

    let setup = Setup::new().await;
    let mut seen = setup.subscribe(v1::SubscribeRequest::default()).await;
    for id in ["gone", "stays"] {
        let mut client = setup.raw(id, |_| {});
        client.subscribe("cmd/#");
        client.publish_acked(&format!("state/{id}"), b"on", true);
        client.publish_acked(&format!("{id}/t"), b"1", false);
        for _ in 0..2 {
            seen.next().await;
        }
    }
    let watch = v1::WatchLatestRequest { topic_filters: vec!["+/t".to_owned()], ..Default::default() };
    let mut watch = setup.state().watch_latest(watch).await.unwrap().into_inner();
    let mut items = Vec::new();
    while !matches!(items.last(), Some(Item::SnapshotEnd(_))) {
        let response = soon("a snapshot", watch.message()).await.unwrap().unwrap();
        items.extend(response.items.into_iter().filter_map(|item| item.item));
    }
    assert_eq!(items.len(), 3);

    let delete = v1::DeleteDeviceRequest { device_id: "gone".to_owned() };
    let deleted = setup.devices().delete_device(delete.clone()).await.unwrap().into_inner();
    let all = v1::DeleteDeviceResponse { session_ended: true, latest_values: 2, retained_messages: 1 };
    assert_eq!(deleted, all);
    let response = soon("a removal", watch.message()).await.unwrap().unwrap();
    let removed = v1::RemovedValue { device_id: "gone".to_owned(), topic: "gone/t".to_owned() };
    assert_eq!(response.items[0].item, Some(Item::Removed(removed)));
    let again = setup.devices().delete_device(delete).await.unwrap().into_inner();
    assert_eq!(again, v1::DeleteDeviceResponse::default());

    let values =
        setup.state().list_latest(v1::ListLatestRequest::default()).await.unwrap().into_inner().values;
    let left: Vec<_> = values.iter().map(|value| value.topic.as_str()).collect();
    assert_eq!(left, ["state/stays", "stays/t"]);
    let retained =
        setup.state().list_retained(v1::ListRetainedRequest::default()).await.unwrap().into_inner();
    assert_eq!(retained.messages.iter().map(|m| m.topic.as_str()).collect::<Vec<_>>(), ["state/stays"]);
    let devices = setup.devices_page(v1::ListDevicesRequest::default()).await.unwrap().devices;
    assert_eq!(devices.iter().map(|d| d.device_id.as_str()).collect::<Vec<_>>(), ["stays"]);

    let delete = |topic: &str, topic_filter: &str| v1::DeleteLatestRequest {
        device_id: "stays".to_owned(),
        topic: topic.to_owned(),
        topic_filter: topic_filter.to_owned(),
    };
    for bad in [delete("", ""), delete("a", "a"), delete("a/#", ""), delete("", "a/#/b")] {
        assert_eq!(setup.state().delete_latest(bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    for (request, count) in [(delete("stays/t", ""), 1), (delete("stays/t", ""), 0), (delete("", "#"), 1)] {
        assert_eq!(setup.state().delete_latest(request).await.unwrap().into_inner().count, count);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_sends_its_code_and_ends_the_session_only_when_asked() {
    let setup = Setup::new().await;
    for (discard, code) in [(false, None), (true, Some(0x8F))] {
        let mut client = setup.raw("dev", |_| {});
        let request = v1::DisconnectDeviceRequest {
            device_id: "dev".to_owned(),
            reason_code: code,
            discard_session: discard,
        };
        setup.devices().disconnect_device(request).await.unwrap();
        let expected = u8::try_from(code.unwrap_or(0x98)).unwrap();
        assert_eq!(client.next(), Got::Disconnect(expected));
        assert_eq!(client.next(), Got::Closed);
        let get = v1::GetDeviceRequest { device_id: "dev".to_owned(), ..Default::default() };
        let found = setup.devices().get_device(get).await.map(|_| ()).map_err(|error| refusal(&error));
        let gone = Err((Code::NotFound, "DEVICE_NOT_FOUND".to_owned()));
        assert_eq!(found, if discard { gone } else { Ok(()) });
    }
    for bad in [0, 127, 256] {
        let request = v1::DisconnectDeviceRequest {
            device_id: "dev".to_owned(),
            reason_code: Some(bad),
            discard_session: false,
        };
        assert_eq!(
            setup.devices().disconnect_device(request).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tracing_of_one_client_is_switched_by_rpc() {
    let setup = Setup::new().await;
    let set = |enabled| v1::SetDeviceTraceRequest { device_id: "traced by the test".to_owned(), enabled };
    let traced = |id: &str| trace_clients().is_traced(id);
    assert!(!traced("traced by the test"));
    setup.devices().set_device_trace(set(true)).await.unwrap();
    assert!(traced("traced by the test") && !traced("another"));
    setup.devices().set_device_trace(set(false)).await.unwrap();
    assert!(!traced("traced by the test"));
    let nobody = setup.devices().set_device_trace(v1::SetDeviceTraceRequest::default()).await.unwrap_err();
    assert_eq!(nobody.code(), Code::InvalidArgument);
}

/// The next packet of a trace.
async fn traced(
    stream: &mut Streaming<v1::TracePacketsResponse>,
    seen: &mut VecDeque<v1::TracedPacket>,
) -> v1::TracedPacket {
    while seen.is_empty() {
        let response = soon("a packet", stream.message()).await.unwrap().expect("a trace that goes on");
        seen.extend(response.items.into_iter().map(|item| match item.item {
            Some(v1::trace_packets_item::Item::Packet(packet)) => packet,
            other => panic!("{other:?}"),
        }));
    }
    seen.pop_front().expect("a packet")
}

/// Fails if a packet of either direction is missing from a trace, is of somebody else, or shows what was not asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_trace_shows_every_packet_of_its_device_and_no_other() {
    use v1::{PacketDirection::*, PacketType as Kind};
    let setup = Setup::new().await;
    let id = "watched by the test";
    let begin = async |payload_bytes| {
        let request = v1::TracePacketsRequest { device_id: id.to_owned(), payload_bytes };
        let mut stream = setup.devices().trace_packets(request).await.unwrap().into_inner();
        let first = soon("the beginning", stream.message()).await.unwrap().expect("a response");
        assert!(first.items.is_empty());
        stream
    };
    let mut bare = begin(0).await;
    let mut with_payloads = begin(3).await;
    let mut other = setup.raw("another", |_| {});
    other.subscribe("t/#");
    let mut device = setup.raw(id, |_| {});
    device.subscribe("t/#");
    other.publish("t/1", b"hello", gateway_core::QoS::AtMostOnce, false);
    device.next();
    device.publish_acked("u/2", b"", true);
    let wanted = [
        (FromDevice, Kind::Connect, ""),
        (ToDevice, Kind::Connack, ""),
        (FromDevice, Kind::Subscribe, ""),
        (ToDevice, Kind::Suback, ""),
        (ToDevice, Kind::Publish, "t/1"),
        (FromDevice, Kind::Publish, "u/2"),
        (ToDevice, Kind::Puback, ""),
    ];
    for (stream, shown) in [(&mut bare, ""), (&mut with_payloads, "hel")] {
        let mut seen = VecDeque::new();
        for (direction, kind, topic) in wanted {
            let packet = traced(stream, &mut seen).await;
            assert_eq!((packet.direction(), packet.r#type()), (direction, kind), "{packet:?}");
            assert!(packet.size > 0 && packet.time.is_some() && !packet.malformed && !packet.withheld);
            let publish = packet.publish.unwrap_or_default();
            assert_eq!(publish.topic, topic);
            match (kind, topic) {
                (Kind::Subscribe, _) => assert_eq!(packet.topic_filters, ["t/#"]),
                (Kind::Suback | Kind::Connack, _) => assert_eq!(packet.reason_codes.len(), 1),
                (_, "t/1") => assert_eq!((publish.payload_size, &publish.payload[..]), (5, shown.as_bytes())),
                (_, "u/2") => assert!(publish.retain && packet.packet_id.is_some()),
                _ => {}
            }
        }
        assert!(seen.is_empty(), "of somebody else: {seen:?}");
    }
    assert!(trace_clients().any());
    drop((bare, with_payloads));
    // The gateway hears of it soon, and from then on no packet costs anything.
    soon("the end of the trace", async {
        while trace_clients().any() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
