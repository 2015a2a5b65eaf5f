//! Subscriptions that a backend makes for a device.

use std::{fs, net::Shutdown};

use access::backends::Role;
use codec::Connect;
use gateway_core::{Protocol, QoS};
use mqtt_server::proto::gateway::v1::{self, devices_client::DevicesClient};
use tokio::task::block_in_place;
use tonic::{Code, Status};

use crate::{
    access::{Guarded, audit::channel},
    client::{Client, Got, hello},
    harness::*,
    support::Server,
};

fn wanted(filter: &str) -> v1::SubscribeDeviceRequest {
    v1::SubscribeDeviceRequest {
        device_id: "dev".to_owned(),
        topic_filter: filter.to_owned(),
        ..v1::SubscribeDeviceRequest::default()
    }
}

async fn subscribe(
    setup: &Setup,
    request: v1::SubscribeDeviceRequest,
) -> Result<v1::SubscribeDeviceResponse, Status> {
    soon("a subscription", setup.devices().subscribe_device(request)).await.map(tonic::Response::into_inner)
}

async fn unsubscribe(setup: &Setup, filter: &str) -> bool {
    let request =
        v1::UnsubscribeDeviceRequest { device_id: "dev".to_owned(), topic_filter: filter.to_owned() };
    soon("an end of it", setup.devices().unsubscribe_device(request)).await.unwrap().into_inner().existed
}

async fn retain(setup: &Setup, topic: &str) {
    setup.publish(v1::PublishRequest { retain: true, ..to(topic, "kept") }).await.unwrap();
}

fn next(client: &mut Client) -> Got {
    block_in_place(|| client.next())
}

fn publish(topic: &str, payload: &str) -> Got {
    Got::Publish(topic.to_owned(), payload.as_bytes().to_vec())
}

/// Rules out a subscription of which the device gets nothing, or only what comes later; for clients of both versions, which did
/// nothing but connect.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscribed_device_gets_what_is_retained_and_what_comes_later() {
    let setup = Setup::new().await;
    retain(&setup, "a/old").await;
    for protocol in [Protocol::V5, Protocol::V4] {
        let mut client = block_in_place(|| Client::connect(setup.mqtt, protocol, "dev"));
        let made = subscribe(&setup, wanted("a/+")).await.unwrap();
        assert_eq!((made.granted_qos(), made.replaced), (v1::Qos::AtLeastOnce, false));
        assert_eq!(next(&mut client), publish("a/old", "kept"));
        setup.publish(to("a/new", "1")).await.unwrap();
        assert_eq!(next(&mut client), publish("a/new", "1"));

        let again = v1::SubscribeDeviceRequest {
            qos: v1::Qos::AtMostOnce.into(),
            retain_handling: v1::RetainHandling::SendIfNew.into(),
            ..wanted("a/+")
        };
        let made = subscribe(&setup, again).await.unwrap();
        assert_eq!((made.granted_qos(), made.replaced), (v1::Qos::AtMostOnce, true));
        assert_eq!(block_in_place(|| client.ping()), [], "it is not new");

        assert!(unsubscribe(&setup, "a/+").await);
        assert!(!unsubscribe(&setup, "a/+").await);
        setup.publish(to("a/new", "2")).await.unwrap();
        assert_eq!(block_in_place(|| client.ping()), [], "it is over");
        assert!(unsubscribe_by_device_is_the_same(&setup, &mut client).await);
    }
}

/// The device removes what the backend made.
async fn unsubscribe_by_device_is_the_same(setup: &Setup, client: &mut Client) -> bool {
    subscribe(setup, wanted("b")).await.unwrap();
    let packet = codec::Unsubscribe { packet_id: 7, user: Vec::new(), filters: vec!["b".to_owned()] };
    block_in_place(|| {
        client.send(&codec::Packet::Unsubscribe(packet));
        assert_eq!(client.next(), Got::Other(0xB0), "UNSUBACK");
    });
    !unsubscribe(setup, "b").await
}

/// Rules out an answer before the disk has the subscription: the gateway is killed as soon as it has answered. The
/// device, which was away all the time, gets what was retained before and what came later.
#[tokio::test(flavor = "multi_thread")]
async fn an_answered_subscription_survives_kill_9_with_what_is_retained() {
    let server = block_in_place(Server::start);
    let away = |server: &Server| {
        let connect = Connect { clean_start: false, session_expiry: Some(600), ..hello(Protocol::V5, "dev") };
        Client::connect_with(server.ports.tcp, connect)
    };
    let mut client = block_in_place(|| away(&server));
    block_in_place(|| {
        client.publish_acked("a/old", b"kept", true);
        client.stream.shutdown(Shutdown::Both).unwrap();
    });
    let subscribe = async |server: &Server, filter: &str| {
        let mut devices = DevicesClient::new(channel(server, None).await);
        let made =
            soon("a subscription", devices.subscribe_device(wanted(filter))).await.unwrap().into_inner();
        assert!(!made.replaced, "{filter}");
    };
    subscribe(&server, "a/+").await;
    let server = block_in_place(|| server.kill_and_restart(&[], ""));
    // Nobody has seen the device since.
    subscribe(&server, "$share/g/s").await;
    let server = block_in_place(|| server.kill_and_restart(&[], ""));
    block_in_place(|| {
        let mut other = Client::connect(server.ports.tcp, Protocol::V5, "other");
        other.publish_acked("a/new", b"1", false);
        other.publish_acked("s", b"2", false);
    });
    let mut client = block_in_place(|| away(&server));
    let mut got: Vec<Got> = (0..3).map(|_| next(&mut client)).collect();
    got.sort_by_key(|got| format!("{got:?}"));
    assert_eq!(got, [publish("a/new", "1"), publish("a/old", "kept"), publish("s", "2")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_for_devices_hold_for_subscriptions_on_their_behalf() {
    let setup = Setup::with(|config| {
        config.limits.max_subscriptions = 2;
        config.limits.max_qos = 1;
        config.limits.shared_available = false;
    })
    .await;
    let missing = subscribe(&setup, wanted("a")).await.unwrap_err();
    assert_eq!(refusal(&missing), (Code::NotFound, "DEVICE_NOT_FOUND".to_owned()));
    let mut client = block_in_place(|| setup.raw("dev", |_| {}));
    assert_eq!(block_in_place(|| client.subscribe_with("a", QoS::AtMostOnce, None)), 0);
    let most = v1::SubscribeDeviceRequest { qos: v1::Qos::ExactlyOnce.into(), ..wanted("b") };
    assert_eq!(subscribe(&setup, most).await.unwrap().granted_qos(), v1::Qos::AtLeastOnce);
    let with = |filter: &str, change: fn(&mut v1::SubscribeDeviceRequest)| {
        let mut request = wanted(filter);
        change(&mut request);
        request
    };
    let rows = [
        (wanted("c"), Code::ResourceExhausted, "SUBSCRIPTION_QUOTA"),
        (wanted("a/#/b"), Code::InvalidArgument, "INVALID_FIELD"),
        (wanted(""), Code::InvalidArgument, "INVALID_FIELD"),
        (wanted("$share/g/a"), Code::FailedPrecondition, "FILTER_NOT_SUPPORTED"),
        (
            with("a", |request| request.subscription_identifier = Some(0)),
            Code::InvalidArgument,
            "INVALID_FIELD",
        ),
        (with("a", |request| request.retain_handling = 9), Code::InvalidArgument, "INVALID_FIELD"),
    ];
    for (request, code, reason) in rows {
        let refused = subscribe(&setup, request.clone()).await.unwrap_err();
        assert_eq!(refusal(&refused), (code, reason.to_owned()), "{request:?}");
    }
}

/// Rules out a backend that gives a device what the rules keep from it, or what the backend itself may not have.
#[tokio::test(flavor = "multi_thread")]
async fn neither_rules_nor_the_scope_of_the_caller_are_got_around() {
    let dir = tempfile::tempdir().unwrap();
    let rules = dir.path().join("rules");
    fs::write(&rules, "[[rules]]\nallow = \"all\"\ntopics = [\"a/#\"]\n").unwrap();
    let guarded = Guarded::with(
        &[("all", Role::Operator, None, None), ("some", Role::Operator, Some(&["a/b/#"]), Some(&["d*"]))],
        |config| config.authorization.rules = Some(rules.clone()),
    )
    .await;
    let _client = block_in_place(|| guarded.setup.raw("dev", |_| {}));
    let _other = block_in_place(|| guarded.setup.raw("other", |_| {}));
    let ask = async |who: &str, device: &str, filter: &str| {
        let mut devices = DevicesClient::new(guarded.channel(who));
        let request = v1::SubscribeDeviceRequest { device_id: device.to_owned(), ..wanted(filter) };
        devices.subscribe_device(request).await.map(drop).map_err(|status| refusal(&status))
    };
    let denied = |reason: &str| Err((Code::PermissionDenied, reason.to_owned()));
    assert_eq!(ask("all", "dev", "a/#").await, Ok(()));
    let by_rules = Err((Code::FailedPrecondition, "FILTER_NOT_ALLOWED".to_owned()));
    assert_eq!(ask("all", "dev", "b").await, by_rules);
    assert_eq!(ask("some", "dev", "a/b/+").await, Ok(()));
    assert_eq!(ask("some", "dev", "$share/g/a/b/c").await, Ok(()));
    assert_eq!(ask("some", "dev", "a/#").await, denied("OUT_OF_SCOPE"));
    assert_eq!(ask("some", "other", "a/b/c").await, denied("OUT_OF_SCOPE"));
    let end = v1::UnsubscribeDeviceRequest { device_id: "dev".to_owned(), topic_filter: "a/#".to_owned() };
    let mut devices = DevicesClient::new(guarded.channel("some"));
    let refused = devices.unsubscribe_device(end).await.map(drop).map_err(|status| refusal(&status));
    assert_eq!(refused, denied("OUT_OF_SCOPE"));
}
