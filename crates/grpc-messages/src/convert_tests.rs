use broker::Published;
use gateway_core::DropReason;
use prost::Message as _;

use super::*;
use crate::answers;

fn limits() -> Limits {
    Limits::default()
}

fn refused(request: v1::PublishRequest) -> String {
    match publication(request, &limits()) {
        Err(Error::Invalid { field, .. }) => field,
        other => panic!("not refused as invalid: {other:?}"),
    }
}

fn to(topic: &str) -> v1::PublishRequest {
    v1::PublishRequest { topic: topic.into(), ..v1::PublishRequest::default() }
}

#[test]
fn a_publish_keeps_every_field() {
    let request = v1::PublishRequest {
        device_id: Some("dev".into()),
        topic: "a/b".into(),
        payload: Bytes::from_static(b"x"),
        qos: v1::Qos::ExactlyOnce.into(),
        properties: Some(v1::Properties {
            payload_format: v1::PayloadFormat::Text.into(),
            content_type: Some("text/plain".into()),
            response_topic: Some("r/1".into()),
            correlation_data: Some(Bytes::from_static(b"\0")),
            user_properties: [("b", "1"), ("a", "2"), ("b", "3")]
                .map(|(name, value)| v1::UserProperty { name: name.into(), value: value.into() })
                .into(),
        }),
        expiry_seconds: Some(60),
        wait: v1::Wait::Acked.into(),
        offline: v1::Offline::Fail.into(),
        ..v1::PublishRequest::default()
    };
    let publication = publication(request.clone(), &limits()).unwrap();
    assert_eq!(publication.device.as_deref(), Some("dev"));
    assert_eq!((publication.wait, publication.offline), (Wait::Acked, broker::Offline::Fail));
    let message = publication.message(Timestamp(5_000));
    assert_eq!((message.topic, message.payload, message.qos), ("a/b", &b"x"[..], QoS::ExactlyOnce));
    assert_eq!(message.expires, Some(Timestamp(65_000)));
    let properties = message.properties.unwrap();
    assert_eq!(properties.payload_format, Some(1));
    let names: Vec<_> = properties.user.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["b", "a", "b"]);
    assert_eq!(Some(answers::properties_to_proto(properties)), request.properties);
}

#[test]
fn unspecified_values_have_their_documented_defaults() {
    let publication = publication(to("t"), &limits()).unwrap();
    assert_eq!(publication.qos, QoS::AtLeastOnce);
    assert_eq!((publication.wait, publication.offline), (Wait::Accepted, broker::Offline::Queue));
    assert!(publication.properties.is_none() && publication.expiry.is_none());

    let subscribe = subscribe(v1::SubscribeRequest::default(), &limits()).unwrap();
    assert_eq!(subscribe.filters, ["#"]);
    assert_eq!(subscribe.policy, SlowPolicy::DropOldest);
    assert_eq!((subscribe.buffer, subscribe.batch), (limits().stream_buffer.0, 64 << 10));
    assert!(subscribe.linger == Linger::Adaptive && subscribe.heartbeat.is_none());
}

#[test]
fn bad_publishes_are_refused_by_field() {
    assert_eq!(refused(to("")), "topic");
    assert_eq!(refused(to("a/#")), "topic");
    assert_eq!(refused(to("$SYS/x")), "topic");
    assert_eq!(refused(to(&"a/".repeat(200))), "topic");
    assert_eq!(refused(to(&"a".repeat(5_000))), "topic");
    assert_eq!(refused(v1::PublishRequest { qos: 9, ..to("t") }), "qos");
    assert_eq!(refused(v1::PublishRequest { wait: 9, ..to("t") }), "wait");
    assert_eq!(refused(v1::PublishRequest { offline: -1, ..to("t") }), "offline");
    for offline in [v1::Offline::Fail, v1::Offline::Drop] {
        assert_eq!(refused(v1::PublishRequest { offline: offline.into(), ..to("t") }), "offline");
    }
    assert_eq!(refused(v1::PublishRequest { expiry_seconds: Some(0), ..to("t") }), "expiry_seconds");
    let device_id = Some(String::new());
    assert_eq!(refused(v1::PublishRequest { device_id, ..to("t") }), "device_id");
    let device_id = Some("d".to_owned());
    assert_eq!(refused(v1::PublishRequest { device_id, retain: true, ..to("t") }), "retain");
    let payload = vec![0; (1 << 20) + 1].into();
    assert_eq!(refused(v1::PublishRequest { payload, ..to("t") }), "payload");

    let with = |properties| v1::PublishRequest { properties: Some(properties), ..to("t") };
    let response_topic = Some("a/+".to_owned());
    let bad = v1::Properties { response_topic, ..v1::Properties::default() };
    assert_eq!(refused(with(bad)), "properties.response_topic");
    let user_properties = vec![v1::UserProperty { name: "a".into(), value: "\0".into() }];
    let bad = v1::Properties { user_properties, ..v1::Properties::default() };
    assert_eq!(refused(with(bad)), "properties.user_properties[0].value");
    let correlation_data = Some(vec![0; 65_536].into());
    let bad = v1::Properties { correlation_data, ..v1::Properties::default() };
    assert_eq!(refused(with(bad)), "properties.correlation_data");
}

#[test]
fn subscriptions_are_bounded_and_checked() {
    let field = |request| match subscribe(request, &limits()) {
        Err(Error::Invalid { field, .. }) => field,
        other => panic!("not refused: {other:?}"),
    };
    let base = v1::SubscribeRequest::default;
    let span = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
    let many = |n: usize| (0..n).map(|n| format!("d{n}")).collect::<Vec<_>>();
    assert_eq!(field(v1::SubscribeRequest { device_ids: many(1_001), ..base() }), "request");
    let bad = v1::SubscribeRequest { topic_filters: vec!["a".into(), "a/#/b".into()], ..base() };
    assert_eq!(field(bad), "topic_filters[1]");
    let bad = v1::SubscribeRequest { topic_filters: vec!["$share/g/a".into()], ..base() };
    assert_eq!(field(bad), "topic_filters[0]");
    let wild = (0..101).map(|n| format!("{n}/#")).collect();
    let bad = v1::SubscribeRequest { exclude_topic_filters: wild, ..base() };
    assert_eq!(field(bad), "exclude_topic_filters");
    assert_eq!(field(v1::SubscribeRequest { linger: span(10, 1), ..base() }), "linger");
    let bad = v1::SubscribeRequest { heartbeat_interval: span(0, 99_999_999), ..base() };
    assert_eq!(field(bad), "heartbeat_interval");
    assert_eq!(field(v1::SubscribeRequest { linger: span(-1, 0), ..base() }), "linger");
    for bytes in [1, 4_095, (4 << 20) + 1, u32::MAX] {
        assert_eq!(field(v1::SubscribeRequest { buffer_bytes: bytes, ..base() }), "buffer_bytes");
    }
    for (buffer_bytes, max_batch_bytes) in [(0, 65_537), (8_192, 2_049)] {
        let bad = v1::SubscribeRequest { buffer_bytes, max_batch_bytes, ..base() };
        assert_eq!(field(bad), "max_batch_bytes");
    }
    let small = v1::SubscribeRequest { buffer_bytes: 8_192, linger: span(0, 0), ..base() };
    let small = subscribe(small, &limits()).unwrap();
    assert_eq!((small.buffer, small.batch), (8_192, 2_048));
    assert_eq!(small.linger, Linger::Fixed(Duration::ZERO), "asked for none, not unset");
}

#[test]
fn outcomes_follow_what_receivers_did() {
    let outcome = |published| {
        let response = answers::publish_response(published, Wait::Accepted, None);
        (response.outcome(), response.drop_reason())
    };
    let none = v1::DropReason::Unspecified;
    let base = Published::default;
    assert_eq!(outcome(base()), (v1::Outcome::NoMatch, none));
    assert_eq!(outcome(Published { matched: 2, sent: 1, queued: 1, ..base() }), (v1::Outcome::Sent, none));
    assert_eq!(outcome(Published { matched: 1, queued: 1, ..base() }), (v1::Outcome::Queued, none));
    let dropped = Published { matched: 1, dropped: 1, reason: Some(DropReason::QueueFull), ..base() };
    assert_eq!(outcome(dropped), (v1::Outcome::Dropped, v1::DropReason::QueueFull));
}

#[test]
fn arbitrary_bytes_never_panic() {
    let seeds = [
        v1::PublishRequest {
            device_id: Some("d".into()),
            topic: "a/b".into(),
            payload: Bytes::from_static(&[0; 200]),
            properties: Some(v1::Properties {
                content_type: Some("x".into()),
                user_properties: vec![v1::UserProperty { name: "a".into(), value: "b".into() }; 3],
                ..v1::Properties::default()
            }),
            expiry_seconds: Some(7),
            ..v1::PublishRequest::default()
        }
        .encode_to_vec(),
        v1::SubscribeRequest {
            device_ids: vec!["a".into()],
            device_id_prefixes: vec!["a".into(), "ab".into()],
            topic_filters: vec!["a/+".into()],
            exclude_topic_filters: vec!["a/b".into(), "c/#".into()],
            ..v1::SubscribeRequest::default()
        }
        .encode_to_vec(),
        Vec::new(),
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..20_000 {
        let mut data = seeds[round % seeds.len()].clone();
        for _ in 0..random() % 4 {
            match (random() % 3, data.len() as u64) {
                (0, _) | (_, 0) => data.push(random() as u8),
                (1, len) => data[(random() % len) as usize] = random() as u8,
                (_, len) => data.truncate((random() % len) as usize),
            }
        }
        crate::fuzz_convert(&data);
    }
}
