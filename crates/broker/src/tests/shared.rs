use std::time::Duration;

use gateway_core::{
    QueueId, Receipt, ReceiptState, Yielded,
    limits::SharedStrategy,
    units::{ByteSize, Span},
};

use super::*;

const FILTER: &str = "$share/g/t/#";

fn group_of(strategy: SharedStrategy, members: usize) -> (Bench, Vec<Device>) {
    let limits = Limits { shared_strategy: strategy, group_queue_messages: 3, ..Limits::default() };
    let mut bench = Bench::new(limits);
    let devices: Vec<Device> = (0..members).map(|number| bench.device(&format!("m{number}"))).collect();
    for device in &devices {
        bench.subscribe(device, FILTER);
    }
    (bench, devices)
}

fn counts(devices: &[Device]) -> Vec<usize> {
    devices.iter().map(|device| device.got().len()).collect()
}

#[test]
fn each_strategy_chooses_its_way() {
    let (mut bench, devices) = group_of(SharedStrategy::RoundRobin, 3);
    for _ in 0..9 {
        assert_eq!(bench.publish("t/x", "m", QoS::AtMostOnce).sent, 1);
    }
    assert_eq!(counts(&devices), [3, 3, 3]);

    let (mut bench, devices) = group_of(SharedStrategy::Random, 3);
    for _ in 0..300 {
        bench.publish("t/x", "m", QoS::AtMostOnce);
    }
    let random = counts(&devices);
    assert_eq!(random.iter().sum::<usize>(), 300);
    assert!(random.iter().all(|count| *count > 30), "{random:?}");

    let (mut bench, devices) = group_of(SharedStrategy::HashTopic, 3);
    for _ in 0..5 {
        bench.publish("t/x", "m", QoS::AtMostOnce);
    }
    let mut by_topic = counts(&devices);
    by_topic.sort_unstable();
    assert_eq!(by_topic, [0, 0, 5]);
    for number in 0..100 {
        bench.publish(&format!("t/{number}"), "m", QoS::AtMostOnce);
    }
    assert!(counts(&devices).iter().all(|count| *count > 5));

    let (mut bench, devices) = group_of(SharedStrategy::HashClient, 3);
    let from = bench.device("from");
    for number in 0..5 {
        bench.publish_from(&from, &format!("t/{number}"), "m", false);
    }
    let mut by_client = counts(&devices);
    by_client.sort_unstable();
    assert_eq!(by_client, [0, 0, 5]);

    let (mut bench, devices) = group_of(SharedStrategy::Sticky, 3);
    for _ in 0..5 {
        bench.publish("t/x", "m", QoS::AtMostOnce);
    }
    assert_eq!(counts(&devices), [5, 0, 0]);
    devices[0].set_offline(true);
    bench.publish("t/x", "m", QoS::AtMostOnce);
    devices[0].set_offline(false);
    bench.publish("t/x", "m", QoS::AtMostOnce);
    assert_eq!(counts(&devices), [0, 2, 0]);

    let (mut bench, devices) = group_of(SharedStrategy::LeastInflight, 3);
    for (device, load) in devices.iter().zip([5, 1, 9]) {
        device.set_load(load);
    }
    for _ in 0..4 {
        bench.publish("t/x", "m", QoS::AtMostOnce);
    }
    assert_eq!(counts(&devices), [0, 4, 0]);
}

#[test]
fn a_group_has_its_own_strategy_by_name() {
    let mut limits = Limits::default();
    limits.shared_groups.insert("g".to_owned(), SharedStrategy::Sticky);
    let mut bench = Bench::new(limits);
    let (a, b) = (bench.device("a"), bench.device("b"));
    for device in [&a, &b] {
        bench.subscribe(device, FILTER);
    }
    for _ in 0..3 {
        bench.publish("t", "m", QoS::AtMostOnce);
    }
    assert_eq!(counts(&[a, b]), [3, 0]);
}

#[test]
fn shared_and_plain_subscriptions_are_separate_deliveries() {
    let (mut bench, devices) = group_of(SharedStrategy::RoundRobin, 1);
    bench.subscribe(&devices[0], "t/x");
    bench.subscribe(&devices[0], "$share/h/t/x");
    let published = bench.publish("t/x", "m", QoS::AtLeastOnce);
    assert_eq!((published.matched, published.sent), (3, 3));
    let groups: std::collections::BTreeSet<u32> = devices[0].got().iter().map(|got| got.group).collect();
    assert_eq!(groups.len(), 3);
    assert_eq!(bench.broker.gauges().shared_groups, 2);
    assert!(bench.unsubscribe(&devices[0], FILTER));
    assert_eq!(bench.publish("t/x", "m", QoS::AtLeastOnce).matched, 2);
    assert_eq!(bench.broker.gauges().shared_groups, 1);
}

#[test]
fn a_full_or_absent_member_is_passed_over() {
    let (mut bench, devices) = group_of(SharedStrategy::Sticky, 3);
    devices[0].set_room(Some(0));
    devices[1].set_offline(true);
    assert_eq!(bench.publish("t", "m", QoS::AtLeastOnce).sent, 1);
    assert_eq!(counts(&devices), [0, 0, 1]);
    devices[2].set_room(Some(0));
    let published = bench.publish("t", "m", QoS::AtLeastOnce);
    assert_eq!((published.dropped, published.reason), (1, Some(DropReason::QueueFull)));
    assert_eq!(counts(&devices), [0, 0, 0]);
}

/// The failure: it waits for ever at the front of the group's queue, and what members may have waits behind it.
#[test]
fn what_no_member_may_have_is_dropped_and_blocks_nothing() {
    let (mut bench, mut devices) = group_of(SharedStrategy::RoundRobin, 2);
    devices[0].set_denied(true);
    for qos in [QoS::AtMostOnce, QoS::AtLeastOnce, QoS::AtMostOnce, QoS::AtLeastOnce] {
        assert_eq!(bench.publish("t", "m", qos).sent, 1);
    }
    assert_eq!(counts(&devices), [0, 4], "another member may have it");
    devices[1].set_denied(true);
    let dropped = || gateway_core::counters::totals().dropped_not_authorized;
    for qos in [QoS::AtMostOnce, QoS::AtLeastOnce] {
        let before = dropped();
        let published = bench.publish("t", "m", qos);
        assert_eq!((published.dropped, published.reason), (1, Some(DropReason::NotAuthorized)));
        assert!(dropped() > before);
    }
    // Messages published while no member is connected to refuse them.
    devices.iter().for_each(|device| bench.close(device));
    for payload in ["1", "2"] {
        assert_eq!(bench.publish("t", payload, QoS::AtLeastOnce).queued, 1);
    }
    devices[1].set_denied(false);
    devices[0] = bench.device("m0");
    assert_eq!(counts(&devices), [0, 2], "kept by the session of the one that may");
    devices[1].set_denied(true);
    bench.close(&devices[0]);
    assert_eq!(bench.publish("t", "3", QoS::AtLeastOnce).queued, 1);
    devices[0] = bench.device("m0");
    devices[0].set_denied(false);
    assert_eq!(bench.publish("t", "4", QoS::AtLeastOnce).sent, 1);
    assert_eq!(devices[0].payloads(), ["4"], "nothing is left in front of it");
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
}

#[test]
fn a_message_is_not_dropped_because_every_persistent_member_is_behind() {
    let (mut bench, devices) = group_of(SharedStrategy::RoundRobin, 2);
    for device in &devices {
        device.set_durable();
        device.set_room(Some(0));
    }
    let published = bench.publish("t", "1", QoS::AtLeastOnce);
    assert_eq!((published.queued, published.dropped), (1, 0));
    assert!(devices.iter().all(|device| device.nudges() > 0), "nobody else would tell them");
    assert_eq!(bench.publish("t", "0", QoS::AtMostOnce).dropped, 1, "QoS 0 does not wait");
    devices[0].set_room(None);
    bench.publish("t", "2", QoS::AtLeastOnce);
    assert_eq!(devices[0].payloads(), ["1", "2"]);
}

#[test]
fn the_group_queue_keeps_messages_in_order_until_a_member_returns() {
    let (mut bench, mut devices) = group_of(SharedStrategy::RoundRobin, 2);
    for device in &devices {
        bench.close(device);
    }
    assert_eq!(bench.publish("t", "0", QoS::AtMostOnce).reason, Some(DropReason::Offline));
    for payload in ["1", "2", "3"] {
        assert_eq!(bench.publish("t", payload, QoS::AtLeastOnce).queued, 1);
    }
    assert_eq!(bench.publish("t", "4", QoS::AtLeastOnce).reason, Some(DropReason::QueueFull));
    assert!(bench.broker.gauges().queued_bytes > 0);
    assert_eq!(counts(&devices), [0, 0]);
    devices[0].set_room(Some(2));
    devices[0] = bench.device("m0");
    assert_eq!(devices[0].payloads(), ["1", "2"]);
    devices[1] = bench.device("m1");
    assert_eq!(devices[1].payloads(), ["3"]);
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
}

#[test]
fn the_group_queue_is_bounded_in_bytes_too() {
    let mut bench = Bench::new(Limits { group_queue_bytes: ByteSize(1_000), ..Limits::default() });
    let mut device = bench.device("m0");
    bench.subscribe(&device, FILTER);
    bench.close(&device);
    let large = "l".repeat(600);
    let dropped = || gateway_core::counters::totals().dropped_queue_full;
    for _ in 0..2 {
        assert_eq!(bench.publish("t", &large, QoS::AtLeastOnce).queued, 1);
        let before = dropped();
        assert_eq!(bench.publish("t", &large, QoS::AtLeastOnce).reason, Some(DropReason::QueueFull));
        assert!(dropped() > before);
        assert_eq!(bench.publish("t", "small", QoS::AtLeastOnce).queued, 1, "there is room for it");
        device = bench.device("m0");
        assert_eq!(device.payloads(), [large.as_str(), "small"], "and all of it again when it is empty");
        bench.close(&device);
    }
}

#[test]
fn messages_in_the_group_queue_beyond_the_age_limit_are_dropped() {
    let mut bench = Bench::new(Limits { offline_age: Span(Duration::from_secs(10)), ..Limits::default() });
    let mut device = bench.device("m0");
    bench.subscribe(&device, FILTER);
    bench.close(&device);
    bench.publish("t", "old", QoS::AtLeastOnce);
    bench.pass(6);
    bench.publish("t", "new", QoS::AtLeastOnce);
    bench.pass(4);
    device = bench.device("m0");
    assert_eq!(device.payloads(), ["new"]);
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
}

#[test]
fn what_a_member_left_in_the_queue_goes_before_the_next_message() {
    let (mut bench, mut devices) = group_of(SharedStrategy::RoundRobin, 1);
    bench.close(&devices[0]);
    for payload in ["1", "2"] {
        bench.publish("t", payload, QoS::AtLeastOnce);
    }
    devices[0].set_room(Some(1));
    devices[0] = bench.device("m0");
    assert_eq!(devices[0].payloads(), ["1"]);
    devices[0].set_room(None);
    bench.publish("t", "3", QoS::AtLeastOnce);
    assert_eq!(devices[0].payloads(), ["2", "3"]);
}

#[test]
fn expired_messages_in_the_queue_are_dropped() {
    let (mut bench, mut devices) = group_of(SharedStrategy::RoundRobin, 1);
    bench.close(&devices[0]);
    let expires = Some(bench.now.plus_secs(5));
    bench.publish_with("t", "old", |message| {
        message.qos = QoS::AtLeastOnce;
        message.expires = expires;
    });
    bench.publish("t", "new", QoS::AtLeastOnce);
    bench.pass(5);
    devices[0] = bench.device("m0");
    assert_eq!(devices[0].payloads(), ["new"]);
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
}

#[test]
fn what_a_leaving_member_held_goes_to_another_or_to_the_queue() {
    let (mut bench, devices) = group_of(SharedStrategy::Sticky, 2);
    bench.publish("t", "m", QoS::AtLeastOnce);
    let group = devices[0].got()[0].group;
    let message = |payload: &str| {
        let mut message = Message::new("t", payload.as_bytes(), Timestamp(0), Origin::BACKEND);
        message.qos = QoS::AtLeastOnce;
        Arc::clone(message.share())
    };
    devices[0].hold(group, message("1"));
    devices[0].hold(group, message("2"));
    bench.close(&devices[0]);
    assert_eq!(devices[1].payloads(), ["1", "2"]);
    devices[1].hold(group, message("3"));
    bench.close(&devices[1]);
    let queued = bench.broker.inner.index.group(group).unwrap().queue_len();
    assert_eq!(queued, 1);
    // The first session ends; the other still shares the group.
    bench.broker.disconnect("m0", 0, true, bench.now, &mut bench.turn);
    let back = bench.device("m1");
    assert_eq!(back.payloads(), ["3"]);
    // The group and all it holds end with the last member.
    bench.close(&back);
    let receipt = Arc::new(Receipt::default());
    let mut last = Message::new("t", b"4", bench.now, Origin::BACKEND);
    last.qos = QoS::AtLeastOnce;
    last.receipt = Some(&receipt);
    assert_eq!(bench.broker.publish(&last, &mut bench.turn).queued, 1);
    bench.broker.disconnect("m1", 0, true, bench.now, &mut bench.turn);
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
    assert!(bench.broker.inner.index.group(group).is_none());
    assert_eq!(receipt.state(), ReceiptState::default(), "what is queued is not waited for");
    bench.broker.inner.redelivery(bench.now).redeliver(
        vec![Yielded { group, message: message("5"), place: None }],
        QueueId::NONE,
        &mut bench.turn.dirty,
    );
    assert_eq!(bench.broker.gauges().shared_groups, 0);
}

#[test]
fn a_new_group_never_gets_messages_of_an_old_one() {
    let (mut bench, devices) = group_of(SharedStrategy::RoundRobin, 1);
    bench.publish("t", "m", QoS::AtLeastOnce);
    let old = devices[0].got()[0].group;
    bench.unsubscribe(&devices[0], FILTER);
    bench.subscribe(&devices[0], "$share/other/#");
    let message = Message::new("t", b"late", bench.now, Origin::BACKEND);
    let late = Yielded { group: old, message: Arc::clone(message.share()), place: None };
    bench.broker.inner.redelivery(bench.now).redeliver(vec![late], QueueId::NONE, &mut bench.turn.dirty);
    assert!(devices[0].got().is_empty());
}
