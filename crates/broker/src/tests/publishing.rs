use gateway_core::{Durability, Effort, Offer, Outcome, units::ByteSize};

use super::*;

#[test]
fn overlapping_subscriptions_give_one_copy_at_highest_qos_with_all_ids() {
    let mut bench = Bench::new(Limits::default());
    let device = bench.device("a");
    for (filter, qos, id, as_published) in [
        ("a/b", QoS::AtMostOnce, Some(1), false),
        ("a/+", QoS::ExactlyOnce, Some(2), false),
        ("a/#", QoS::AtLeastOnce, None, true),
        ("#", QoS::AtMostOnce, Some(2), false),
    ] {
        let request = SubscribeRequest { qos, id, retain_as_published: as_published, ..request(filter) };
        bench.try_subscribe(&device, &request).unwrap();
    }
    let published = bench.publish_with("a/b", "x", |message| {
        message.qos = QoS::ExactlyOnce;
        message.retain = true;
    });
    assert_eq!((published.matched, published.sent), (1, 1));
    let mut got = device.got();
    assert_eq!(got.len(), 1);
    got[0].ids.sort_unstable();
    assert_eq!(got[0].ids, [1, 2, 2]);
    assert_eq!((got[0].qos, got[0].retain), (QoS::ExactlyOnce, true));
    bench.publish("a/c", "y", QoS::AtMostOnce);
    assert_eq!(device.got()[0].ids, [2, 2]);
}

#[test]
fn no_local_concerns_each_subscription() {
    let mut bench = Bench::new(Limits::default());
    let (me, other) = (bench.device("me"), bench.device("other"));
    let no_local = SubscribeRequest { no_local: true, id: Some(1), ..request("a/b") };
    bench.try_subscribe(&me, &no_local).unwrap();
    assert_eq!(bench.publish_from(&me, "a/b", "own", false).matched, 0);
    assert_eq!(bench.publish_from(&other, "a/b", "foreign", false).matched, 1);
    assert_eq!(me.payloads(), ["foreign"]);
    let plain = SubscribeRequest { id: Some(2), qos: QoS::AtMostOnce, ..request("a/+") };
    bench.try_subscribe(&me, &plain).unwrap();
    bench.publish_from(&me, "a/b", "own", false);
    let got = me.got();
    assert_eq!((got[0].qos, got[0].ids.as_slice()), (QoS::AtMostOnce, [2].as_slice()));
    bench.publish_from(&other, "a/b", "foreign", false);
    let mut ids = me.got()[0].ids.clone();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
}

#[test]
fn subscribing_again_replaces_and_unsubscribing_removes() {
    let mut bench = Bench::new(Limits::default());
    let device = bench.device("a");
    bench.subscribe(&device, "a/b");
    let lower = SubscribeRequest { qos: QoS::AtMostOnce, ..request("a/b") };
    bench.try_subscribe(&device, &lower).unwrap();
    bench.publish("a/b", "x", QoS::ExactlyOnce);
    assert_eq!(device.got()[0].qos, QoS::AtMostOnce);
    assert_eq!(bench.broker.gauges().subscriptions, 1);
    assert!(bench.unsubscribe(&device, "a/b"));
    assert!(!bench.unsubscribe(&device, "a/b"));
    assert!(!bench.unsubscribe(&device, "$share/g/a/b"));
    assert_eq!(bench.publish("a/b", "x", QoS::AtMostOnce), Published::default());
    assert_eq!(bench.broker.gauges().subscriptions, 0);
}

#[test]
fn refused_filters_say_why() {
    let limits = Limits { max_subscriptions: 1, ..Limits::default() };
    let mut bench = Bench::new(limits);
    let device = bench.device("a");
    let mut refusal = |request: SubscribeRequest<'_>| bench.try_subscribe(&device, &request).err();
    assert_eq!(refusal(request("a/#/b")), Some(SubscribeError::Invalid));
    assert_eq!(refusal(request("$share/g")), Some(SubscribeError::Invalid));
    let shared = SubscribeRequest { no_local: true, ..request("$share/g/a") };
    assert_eq!(refusal(shared), Some(SubscribeError::NoLocalShared));
    assert_eq!(refusal(request("a")), None);
    assert_eq!(refusal(request("a")), None);
    assert_eq!(refusal(request("b")), Some(SubscribeError::Quota));
    assert_eq!(refusal(request("$share/g/b")), Some(SubscribeError::Quota));
}

#[test]
fn switched_off_features_are_refused() {
    let limits = Limits {
        wildcard_available: false,
        shared_available: false,
        subscription_id_available: false,
        max_qos: 1,
        ..Limits::default()
    };
    let mut bench = Bench::new(limits);
    let device = bench.device("a");
    let mut result =
        |request: SubscribeRequest<'_>| bench.try_subscribe(&device, &request).map(|made| made.qos);
    assert_eq!(result(request("a/+")), Err(SubscribeError::WildcardUnavailable));
    assert_eq!(result(request("$share/g/a")), Err(SubscribeError::SharedUnavailable));
    assert_eq!(result(SubscribeRequest { id: Some(1), ..request("a") }), Err(SubscribeError::IdUnavailable));
    assert_eq!(result(request("a")), Ok(QoS::AtLeastOnce));
}

#[test]
fn a_used_up_budget_refuses_qos_1_and_leaves_qos_0_to_the_targets() {
    const BUDGET: usize = 1 << 20;
    let limits = Limits { memory_budget: ByteSize(BUDGET), ..Limits::default() };
    let mut bench = Bench::new(limits);
    let device = bench.device("a");
    bench.subscribe(&device, "t");
    let left = BUDGET - bench.broker.account().used();
    bench.broker.account().force(MemoryKind::Queued, left);
    assert!(!bench.broker.account().charge(MemoryKind::Queued, 0, 1));
    assert_eq!(bench.publish("t", "x", QoS::AtLeastOnce).refused, Some(Shortage::Memory));
    assert!(device.got().is_empty());
    assert_eq!(bench.publish("t", "x", QoS::AtMostOnce).sent, 1);
    bench.broker.account().release(MemoryKind::Queued, left);
    assert_eq!(bench.publish("t", "x", QoS::AtLeastOnce).sent, 1);
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
}

#[test]
fn a_message_to_one_device_follows_the_offline_policy() {
    let mut bench = Bench::new(Limits::default());
    let device = bench.device("a");
    let message = Message::new("any/topic", b"x", bench.now, Origin::BACKEND);
    let mut send = |offline| bench.broker.publish_to_device("a", &message, offline, &mut bench.turn);
    assert_eq!(send(Offline::Fail), DirectOutcome::Done(Outcome::Sent));
    device.set_offline(true);
    assert_eq!(send(Offline::Fail), DirectOutcome::DeviceOffline);
    assert_eq!(send(Offline::Drop), DirectOutcome::Done(Outcome::Dropped(DropReason::Offline)));
    assert_eq!(send(Offline::Queue), DirectOutcome::Done(Outcome::Queued));
    assert_eq!(device.got().len(), 2);
    let unknown = bench.broker.publish_to_device("b", &message, Offline::Queue, &mut bench.turn);
    assert_eq!(unknown, DirectOutcome::UnknownDevice);
}

#[test]
fn streams_get_what_their_filters_match_until_dropped() {
    let mut bench = Bench::new(Limits::default());
    let stream = Arc::new(TestStream::default());
    let filters = ["a/#".to_owned(), "a/b".to_owned(), "a/b".to_owned()];
    let handle = bench.broker.attach_stream(Arc::clone(&stream) as Arc<dyn Target>, &filters);
    assert_eq!(bench.publish("a/b", "1", QoS::ExactlyOnce).sent, 1);
    assert_eq!(bench.broker.gauges().streams, 1);
    drop(handle);
    assert_eq!(bench.publish("a/b", "2", QoS::ExactlyOnce).sent, 0);
    assert_eq!(stream.payloads(), ["1"]);
    assert_eq!((bench.broker.gauges().streams, bench.broker.gauges().subscriptions), (0, 0));
}

#[test]
fn dirty_targets_are_flushed_once_per_turn_end() {
    let mut bench = Bench::new(Limits::default());
    let device = bench.device("a");
    bench.subscribe(&device, "t");
    bench.publish("t", "x", QoS::AtMostOnce);
    assert_eq!(bench.turn.dirty.len(), 1);
    bench.turn.flush();
    assert_eq!(device.test.receiver.flushes.load(SeqCst), 1);
}

#[test]
fn a_stream_that_leaves_a_message_out_is_neither_a_match_nor_a_drop() {
    struct Picky;
    impl Target for Picky {
        fn deliver(&self, _: &Message<'_>, _: Offer<'_>) -> Delivered {
            Delivered { outcome: Outcome::Ignored, flush: false }
        }
        fn flush(self: Arc<Self>) {}
        fn is_online(&self) -> bool {
            true
        }
        fn load(&self) -> usize {
            0
        }
    }
    let mut bench = Bench::new(Limits::default());
    let _handle = bench.broker.attach_stream(Arc::new(Picky), &["#".to_owned()]);
    assert_eq!(bench.publish("t", "1", QoS::AtLeastOnce), Published::default());
    let device = bench.device("a");
    bench.subscribe(&device, "t");
    let published = bench.publish("t", "2", QoS::AtLeastOnce);
    assert_eq!((published.matched, published.sent, published.dropped), (1, 1, 0));
}

#[test]
fn a_topics_rule_goes_before_its_listener_and_that_before_the_default() {
    let topics = vec![("a/#".to_owned(), Durability::Interval), ("#".to_owned(), Durability::None)];
    let rules = DurabilityRules { topics, default: Durability::Always };
    assert_eq!(rules.of("a/b", Some(Durability::Always)), Durability::Interval, "the first rule");
    assert_eq!(rules.of("b", None), Durability::None);
    let rules = DurabilityRules { topics: Vec::new(), default: Durability::Interval };
    assert_eq!(rules.of("b", Some(Durability::None)), Durability::None);
    assert_eq!(rules.of("b", None), Durability::Interval);
}

/// The failure: each receiver costs little, but all of them together block a shard for tens of milliseconds.
#[test]
fn many_receivers_get_a_message_once_each_in_parts_or_when_dropped() {
    const RECEIVERS: usize = 6_000;
    let mut bench = Bench::new(Limits::default());
    let devices: Vec<_> = (0..RECEIVERS).map(|number| bench.device(&format!("d{number}"))).collect();
    for (number, device) in devices.iter().enumerate() {
        // Some through groups of their own.
        bench.subscribe(
            device,
            &if number % 10 == 0 { format!("$share/g{number}/t") } else { "t".to_owned() },
        );
    }
    let got = || devices.iter().map(|device| device.got().len()).sum::<usize>();
    let mut message = Message::new("t", b"p", bench.now, Origin::BACKEND);
    message.qos = QoS::AtLeastOnce;
    for goes_on in [true, false] {
        bench.turn.effort.renew();
        let Routing::More(mut spread) = bench.broker.publish_some(&message, &mut bench.turn) else {
            panic!("all at once");
        };
        // Most of what a receiver costs is the system call that will write to it.
        let most = 10 + Effort::TURN as usize / Effort::CALL as usize;
        let first = got();
        assert!((1..most).contains(&first), "{first}");
        let mut published = None;
        while goes_on && published.is_none() {
            bench.turn.flush();
            bench.turn.effort.renew();
            published = spread.go_on(&mut bench.turn);
            assert!(bench.turn.effort.spent() <= u64::from(Effort::TURN) + 50_000, "{:?}", bench.turn.effort);
        }
        drop(spread);
        assert_eq!(first + got(), RECEIVERS);
        if let Some(published) = published {
            assert_eq!((published.matched, published.sent), (RECEIVERS as u32, RECEIVERS as u32));
        }
    }
}

/// Filters of 13 levels can have wildcards in 8,192 ways, and a topic would be looked up in each of these.
#[test]
fn match_cost_does_not_grow_with_the_filter_shapes_that_clients_choose() {
    let mut bench = Bench::new(Limits::default());
    let shapes = Limits::default().max_filter_shapes;
    for client in 0..10 {
        let device = bench.device(&format!("d{client}"));
        let mut refused = 0;
        for number in 0..1 << 13 {
            let level = |n: u32| if number >> ((n + client) % 13) & 1 == 1 { "+" } else { "x" };
            let filter = (0..13).map(level).collect::<Vec<_>>().join("/");
            match bench.try_subscribe(&device, &request(&filter)) {
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error, SubscribeError::Quota);
                    refused += 1;
                }
            }
        }
        // The first two are not counted, nor is the filter without a wildcard.
        assert!(refused >= (1 << 13) - shapes - 3, "{refused} refused");
        // A filter refused for its shape does not count.
        bench.subscribe(&device, "y/x/x/x");
        assert!(bench.unsubscribe(&device, "y/x/x/x"));
    }
    bench.turn.effort.renew();
    let topic = ["x"; 13].join("/");
    bench.publish(&topic, "p", QoS::AtMostOnce);
    let nodes = bench.turn.effort.spent() / u64::from(Effort::NODE);
    assert!(nodes <= 10 * 13 * (shapes as u64 + 3), "{nodes} nodes and entries");
}

#[test]
fn a_shape_that_is_given_up_may_be_replaced() {
    let mut bench = Bench::new(Limits { max_filter_shapes: 1, ..Limits::default() });
    let device = bench.device("d");
    for filter in ["1", "2", "a/+", "b/+", "3"] {
        bench.subscribe(&device, filter);
    }
    let other = |bench: &mut Bench| bench.try_subscribe(&device, &request("+/a")).map(drop);
    assert_eq!(other(&mut bench), Err(SubscribeError::Quota));
    assert!(bench.unsubscribe(&device, "a/+"));
    assert_eq!(other(&mut bench), Err(SubscribeError::Quota), "another filter has the shape");
    assert!(bench.unsubscribe(&device, "b/+"));
    assert_eq!(other(&mut bench), Ok(()));
}

/// The failure: history that waits for a database that is away is on top of `limits.memory_budget`.
#[test]
fn what_waits_for_the_history_is_set_aside_from_the_budget() {
    let limits = Arc::new(Limits { memory_budget: ByteSize(160 << 20), ..Limits::default() });
    struct Nothing;
    impl Recorder for Nothing {
        fn record(&self, _: &Message<'_>, _: &mut Effort) {}
    }
    let limit = |history| {
        let broker =
            Broker::new(BrokerConfig { limits: Arc::clone(&limits), history, ..BrokerConfig::default() });
        broker.account().limit() >> 20
    };
    assert_eq!((limit(None), limit(Some(Arc::new(Nothing) as Arc<dyn Recorder>))), (160, 150));
}
