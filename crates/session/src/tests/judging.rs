//! A client's requests and messages are judged before anything is done about them.

use codec::Connect;

use super::{
    super::inbound::{PublishError, PublishRefusal, refusal},
    *,
};

fn connect() -> Connect {
    Connect { keep_alive: 60, ..Connect::new(Protocol::V5, "c") }
}

fn policy(limits: &Limits) -> ConnectPolicy<'_> {
    let response_information = "devices/{client_id}";
    let assigned_id = &|| "made".to_owned();
    ConnectPolicy { limits, non_broker: true, assigned_id, response_information, bridge_mark: "0123" }
}

/// [MQTT-3.1.2-28], and no client is told a topic that is not its own.
#[test]
fn response_information_is_given_on_request_and_names_the_own_topic() {
    let limits = Limits::default();
    let told = |client_id: &str, protocol, ask| {
        let policy = ConnectPolicy { non_broker: false, ..policy(&limits) };
        let connect = Connect {
            client_id: client_id.to_owned(),
            protocol,
            request_response_information: ask,
            ..connect()
        };
        evaluate_connect(&connect, &policy).unwrap().connack.response_information
    };
    assert_eq!(told("c", Protocol::V5, true).as_deref(), Some("devices/c"));
    assert_eq!(told("", Protocol::V5, true).as_deref(), Some("devices/made"));
    assert_eq!(told("c", Protocol::V5, false), None);
    assert_eq!(told("c", Protocol::V4, true), None);
    for client_id in ["a/b", "+", "#"] {
        assert_eq!(told(client_id, Protocol::V5, true), None, "{client_id}");
    }
}

#[test]
fn connect_is_granted_within_the_limits_or_refused() {
    let limits = Limits { keep_alive_max: 30, session_expiry_max: 100, ..Limits::default() };
    let policy = policy(&limits);
    let refused = |connect: Connect| evaluate_connect(&connect, &policy).err();

    let accepted =
        evaluate_connect(&Connect { session_expiry: Some(u32::MAX), ..connect() }, &policy).unwrap();
    assert_eq!((accepted.expiry, accepted.keep_alive), (100, 30));
    assert_eq!((accepted.connack.session_expiry, accepted.connack.server_keep_alive), (Some(100), Some(30)));

    let assigned = evaluate_connect(&Connect { client_id: String::new(), ..connect() }, &policy).unwrap();
    assert_eq!(assigned.connack.assigned_client_id.as_deref(), Some("made"));

    let invalid = Some(ConnectRefused(Some(reason::CLIENT_IDENTIFIER_NOT_VALID)));
    let empty = Connect { client_id: String::new(), clean_start: false, protocol: Protocol::V4, ..connect() };
    assert_eq!(refused(empty), invalid);
    assert_eq!(refused(Connect { client_id: "a/b".to_owned(), ..connect() }), invalid);
    assert_eq!(refused(Connect { client_id: "x".repeat(300), ..connect() }), invalid);
    // [MQTT-4.12.0-5]
    let method = Connect { auth_method: Some("SCRAM".to_owned()), ..connect() };
    let accepted = evaluate_connect(&method, &policy).unwrap();
    assert_eq!(accepted.connack.auth_method.as_deref(), Some("SCRAM"));
}

/// [MQTT-3.1.3-5] of both versions, [MQTT-3.2.2-12], [MQTT-3.2.2-13], [MQTT-3.1.2-28], [MQTT-4.12.0-6].
#[test]
fn client_ids_and_wills_are_judged_by_the_limits() {
    let limits = Limits { max_qos: 1, retain_available: false, ..Limits::default() };
    let policy = policy(&limits);
    let all = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    for (from, len) in [(0, 23), (20, 23), (39, 23), (0, 1), (61, 1)] {
        for protocol in [Protocol::V3, Protocol::V4, Protocol::V5] {
            let client_id = all[from..from + len].to_owned();
            let accepted = evaluate_connect(&Connect { client_id, protocol, ..connect() }, &policy);
            let connack = accepted.unwrap_or_else(|refused| panic!("{refused:?}")).connack;
            assert_eq!((connack.response_information, connack.auth_method), (None, None));
        }
    }
    let will = |qos, retain| codec::ConnectWill {
        topic: "w".to_owned(),
        payload: b"x".as_slice().into(),
        qos,
        retain,
        delay: 0,
        expiry: None,
        properties: None,
    };
    let topic = |topic: String| codec::ConnectWill { topic, ..will(QoS::AtMostOnce, false) };
    let refused_topic = Some(ConnectRefused(Some(reason::TOPIC_NAME_INVALID)));
    for (will, expected) in [
        (will(QoS::AtLeastOnce, false), None),
        (topic("/".repeat(limits.max_topic_levels - 1)), None),
        (topic("/".repeat(limits.max_topic_levels)), refused_topic),
        (topic("t".repeat(limits.max_topic_bytes)), None),
        (topic("t".repeat(limits.max_topic_bytes + 1)), refused_topic),
        (topic("$SYS/x".to_owned()), refused_topic),
        (will(QoS::ExactlyOnce, false), Some(ConnectRefused(Some(reason::QOS_NOT_SUPPORTED)))),
        (will(QoS::AtMostOnce, true), Some(ConnectRefused(Some(reason::RETAIN_NOT_SUPPORTED)))),
    ] {
        let connect = Connect { will: Some(will), ..connect() };
        assert_eq!(evaluate_connect(&connect, &policy).err(), expected);
    }
}

#[test]
fn inbound_publish_is_checked_and_its_alias_resolved() {
    let limits =
        Limits { max_qos: 1, retain_available: false, validate_payload_format: true, ..Limits::default() };
    let mut inbound = Inbound::new(Protocol::V5, 0);
    let mut check = |publish: Publish<'_>| inbound.check_publish(&publish, &limits);
    assert_eq!(check(publish("t")), Ok(None));
    assert_eq!(
        check(Publish { alias: Some(3), ..publish("") }),
        Err(PublishError::Fatal(reason::PROTOCOL_ERROR))
    );
    assert_eq!(check(Publish { alias: Some(3), ..publish("t") }), Ok(None));
    assert_eq!(check(Publish { alias: Some(3), ..publish("") }).unwrap().as_deref(), Some("t"));
    let alias_high = Publish { alias: Some(65), ..publish("t") };
    assert_eq!(check(alias_high), Err(PublishError::Fatal(reason::TOPIC_ALIAS_INVALID)));
    let qos2 = Publish { qos: QoS::ExactlyOnce, ..publish("t") };
    assert_eq!(check(qos2), Err(PublishError::Fatal(reason::QOS_NOT_SUPPORTED)));
    let retained = Publish { retain: true, ..publish("t") };
    assert_eq!(check(retained), Err(PublishError::Fatal(reason::RETAIN_NOT_SUPPORTED)));
    let text = Some(Arc::new(Properties { payload_format: Some(1), ..Properties::default() }));
    let broken = Publish { properties: text, ..publish("t") };
    assert_eq!(check(broken), Err(PublishError::Refused(reason::PAYLOAD_FORMAT_INVALID)));
    assert_eq!(check(publish("$SYS/x")), Err(PublishError::Refused(reason::TOPIC_NAME_INVALID)));
}

/// 3.1.1: [MQTT-3.3.5-2]; 5.0: a reason code where there is an acknowledgement; 3.1 acknowledges what it will never take.
#[test]
fn a_refused_publish_is_answered_or_ends_the_connection() {
    use PublishRefusal::{Acknowledge, Close, Drop};
    for qos in [QoS::AtMostOnce, QoS::AtLeastOnce, QoS::ExactlyOnce] {
        let acknowledged = qos != QoS::AtMostOnce;
        for code in [reason::NOT_AUTHORIZED, reason::TOPIC_NAME_INVALID, reason::QUOTA_EXCEEDED] {
            assert_eq!(refusal(Protocol::V4, qos, code), Close);
            let with_code = if acknowledged { Acknowledge(code) } else { Close };
            assert_eq!(refusal(Protocol::V5, qos, code), with_code);
            let as_if_taken = if acknowledged { Acknowledge(reason::SUCCESS) } else { Drop };
            let may_come_again = code == reason::QUOTA_EXCEEDED;
            let expected = if may_come_again { Close } else { as_if_taken };
            assert_eq!(refusal(Protocol::V3, qos, code), expected);
        }
    }
}

/// Sections 3.2.2.3.11 to 3.2.2.3.13 of 5.0: what CONNACK said is not there is a protocol error with a code of its own.
#[test]
fn a_subscribe_for_what_is_switched_off_is_an_error_in_5_0_only() {
    let off = Limits {
        wildcard_available: false,
        shared_available: false,
        subscription_id_available: false,
        ..Limits::default()
    };
    let check = |protocol, filter: &str, id, limits: &Limits| {
        let wanted = |filter: &str| codec::SubscribeFilter {
            filter: filter.to_owned(),
            qos: QoS::AtMostOnce,
            no_local: false,
            retain_as_published: false,
            retain_handling: 0,
        };
        let filters = vec![wanted("plain"), wanted(filter)];
        let subscribe = codec::Subscribe { packet_id: 1, id, user: Vec::new(), filters };
        Inbound::new(protocol, 0).check_subscribe(&subscribe, limits)
    };
    for (filter, id, code) in [
        ("a/+", None, reason::WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED),
        ("#", None, reason::WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED),
        ("$share/g/a", None, reason::SHARED_SUBSCRIPTIONS_NOT_SUPPORTED),
        ("a", Some(1), reason::SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED),
    ] {
        assert_eq!(check(Protocol::V5, filter, id, &off), Err(code), "{filter}");
        assert_eq!(check(Protocol::V5, filter, id, &Limits::default()), Ok(()), "{filter}");
        assert_eq!(check(Protocol::V4, filter, None, &off), Ok(()), "{filter}");
    }
    assert_eq!(check(Protocol::V5, "a", None, &off), Ok(()));
}

/// Clients that are no bridges are not told which gateway it is.
#[test]
fn only_a_bridge_is_told_the_mark_of_the_gateway() {
    let limits = Limits::default();
    let mark = |value: &str| (gateway_core::BRIDGE_MARK.to_owned(), value.to_owned());
    let told = |user, protocol| {
        let connect = Connect { user, protocol, ..connect() };
        evaluate_connect(&connect, &policy(&limits)).unwrap().connack.user
    };
    assert_eq!(told(vec![mark("4567")], Protocol::V5), [mark("0123")]);
    assert_eq!(told(Vec::new(), Protocol::V5), []);
    assert_eq!(told(vec![mark("4567")], Protocol::V4), []);
}

/// The failures: a Mosquitto cannot say that its bridge is connected; or whoever sets the bit writes to `$SYS` as it likes.
#[test]
fn a_bridge_writes_one_connection_state_and_nothing_else_of_sys() {
    let limits = Limits::default();
    let state = |name: &str| format!("$SYS/broker/connection/{name}/state");
    let client = |protocol, bridge, will: Option<&str>| {
        let will = will.map(|topic| codec::ConnectWill {
            topic: topic.to_owned(),
            payload: bytes::Bytes::new(),
            qos: QoS::AtLeastOnce,
            retain: true,
            delay: 0,
            expiry: None,
            properties: None,
        });
        Connect { bridge, will, protocol, ..connect() }
    };
    let allowed = |connect: &Connect, topics: &[&str]| -> Vec<bool> {
        let mut inbound = Inbound::new(connect.protocol, 0).for_client(connect);
        topics.iter().map(|topic| inbound.check_publish(&publish(topic), &limits).is_ok()).collect()
    };
    let (one, other) = (state("one"), state("other"));
    let topics = [&*one, &*other, &*one, "$SYS/broker/version", "$SYS/broker/connection//state", "t"];
    let own = [true, false, true, false, false, true];
    assert_eq!(allowed(&client(Protocol::V4, true, None), &topics), own, "the first");
    assert_eq!(allowed(&client(Protocol::V4, true, Some(&one)), &topics), own);
    assert_eq!(allowed(&client(Protocol::V5, false, Some(&one)), &topics), own, "that of the will");
    let none = [false, false, false, false, false, true];
    assert_eq!(allowed(&client(Protocol::V4, false, None), &topics), none);
    assert_eq!(allowed(&client(Protocol::V5, false, Some("t")), &topics), none);
    for (topic, may) in [(&*one, true), ("$SYS/broker/version", false)] {
        let connect = client(Protocol::V4, false, Some(topic));
        assert_eq!(evaluate_connect(&connect, &policy(&limits)).is_ok(), may, "a will on {topic}");
    }
}
