//! Quotas of identities and tenants: what is within them is let in, what is beyond is not, and nothing leaks.

use gateway_core::{Quotas, units::ByteSize};

use super::*;

/// Identities may have `identity`, the tenant `full` what it says, any other tenant much.
fn bench_with(identity: Quotas, full: Quotas, stores: Option<Stores>) -> Bench {
    let any = Quotas { connections: 1000, ..Quotas::default() };
    let broker = Broker::new(BrokerConfig {
        limits: Arc::new(Limits { identity, ..Limits::default() }),
        stores,
        tenants: BTreeMap::from([("full".to_owned(), full), ("*".to_owned(), any)]),
        ..BrokerConfig::default()
    });
    Bench { broker, turn: Turn::default(), now: Timestamp(1_000_000) }
}

fn bench(full: Quotas) -> Bench {
    bench_with(Quotas::default(), full, None)
}

impl Bench {
    /// A device of the tenant.
    fn enter(&mut self, id: &str, tenant: &str, expiry: u32) -> Result<Device, Counted> {
        self.enter_with(id, tenant, Connect { expiry, ..Connect::default() })
    }

    fn enter_with(&mut self, id: &str, tenant: &str, connect: Connect) -> Result<Device, Counted> {
        let quota_holders = self.broker.quota_holders(None, id, tenant);
        let opened = self.try_open(id, Connect { quota_holders, ..connect });
        opened.map(|(device, _)| device).map_err(|exceeded| exceeded.what)
    }

    /// Connections, sessions and subscriptions of the tenant `full`.
    fn used(&self) -> [usize; 3] {
        let full = self.broker.tenants().find(|holder| holder.name() == "full").unwrap();
        [Counted::Connections, Counted::Sessions, Counted::Subscriptions].map(|what| full.used(what))
    }

    fn retained_used(&self) -> [usize; 2] {
        let full = self.broker.tenants().find(|holder| holder.name() == "full").unwrap();
        [Counted::RetainedMessages, Counted::RetainedBytes].map(|what| full.used(what))
    }

    fn retain(&mut self, device: &Device, topic: &str, payload: &str) {
        let core = device.session.core();
        let origin =
            Origin { kind: OriginKind::Device, client_id: Some(core.client_id()), slot: core.slot() };
        let mut message = Message::new(topic, payload.as_bytes(), self.now, origin);
        message.retain = true;
        self.broker.publish(&message, &mut self.turn);
    }

    fn has(&self, topic: &str) -> bool {
        ready(self.broker.retained(topic, self.now)).unwrap().is_some()
    }
}

#[test]
fn a_full_tenant_lets_nobody_in_and_costs_another_nothing() {
    let mut bench = bench(Quotas { connections: 2, ..Quotas::default() });
    let a = bench.enter("a", "full", 0).unwrap();
    let _b = bench.enter("b", "full", 0).unwrap();
    assert_eq!(bench.enter("c", "full", 0).err(), Some(Counted::Connections));
    bench.enter("c", "other", 0).unwrap();
    assert_eq!(bench.used(), [2, 2, 0], "a refusal leaves nothing");
    bench.close(&a);
    bench.enter("d", "full", 0).unwrap();
    assert_eq!(bench.used(), [2, 2, 0]);
}

/// The failure: a device that lost its network cannot come back, because its own dead connection has its place.
#[test]
fn who_takes_over_his_own_session_needs_no_second_place() {
    let mut bench = bench(Quotas { connections: 1, sessions: 1, subscriptions: 1, ..Quotas::default() });
    let first = bench.enter("a", "full", 3600).unwrap();
    bench.subscribe(&first, "x");
    let second = bench.enter("a", "full", 3600).unwrap();
    assert!(second.present);
    assert_eq!(bench.used(), [1, 1, 1]);
    bench.close(&first);
    assert_eq!(bench.used(), [1, 1, 1], "the end of the earlier connection counts for nothing");
    let anew = Connect { clean: true, expiry: 3600, ..Connect::default() };
    let third = bench.enter_with("a", "full", anew).unwrap();
    assert!(!third.present);
    assert_eq!(bench.used(), [1, 1, 0]);
    bench.close(&third);
    assert_eq!(bench.used(), [0, 1, 0]);
    let fourth = bench.enter("a", "full", 0).unwrap();
    bench.close(&fourth);
    assert_eq!(bench.used(), [0, 0, 0]);
}

#[test]
fn nothing_leaks_however_connections_end() {
    let limits = Quotas { connections: 3, sessions: 3, subscriptions: 30, ..Quotas::default() };
    let mut bench = bench_with(limits.clone(), limits, None);
    for round in 0..300u32 {
        let id = format!("d{}", round % 3);
        let connect = Connect {
            clean: round % 5 == 0,
            expiry: if round % 2 == 0 { 3600 } else { 0 },
            ..Connect::default()
        };
        let tenant = if round % 7 == 0 { "other" } else { "full" };
        let device = bench.enter_with(&id, tenant, connect).unwrap();
        bench.subscribe(&device, &format!("f{}", round % 4));
        match round % 4 {
            0 => bench.close(&device),
            // Once more, and one that ends later than its successor begins.
            1 => (0..2).for_each(|_| bench.close(&device)),
            2 => drop(bench.broker.disconnect(&id, 0x98, round % 3 == 0, bench.now, &mut bench.turn)),
            _ => {}
        }
    }
    for id in ["d0", "d1", "d2"] {
        let device = bench.enter(id, "full", 3600).unwrap();
        bench.close(&device);
    }
    assert_eq!(bench.used()[..2], [0, 3]);
    for id in ["d0", "d1", "d2"] {
        bench.broker.disconnect(id, 0x98, true, bench.now, &mut bench.turn);
    }
    assert_eq!(bench.used(), [0, 0, 0]);
    bench.pass(3601);
    for number in 0..5000 {
        bench.broker.quota_holders(Some(&number.to_string()), "c", "full");
    }
    assert!(bench.broker.inner.quota_holders.others_len() < 10, "nobody is remembered who has nothing");
    let those: Vec<_> =
        (0..100).map(|number| bench.broker.quota_holders(Some(&number.to_string()), "c", "full")).collect();
    for number in 0..5000 {
        bench.broker.quota_holders(Some(&(number % 1000).to_string()), "c", "full");
        assert!(bench.broker.inner.quota_holders.others_len() <= 2 * those.len() + 3);
    }
    let again = bench.broker.quota_holders(Some("7"), "c", "full");
    assert!(Arc::ptr_eq(&again[0], &those[7][0]), "who has something keeps it");
}

#[test]
fn sessions_count_until_they_expire_and_move_with_their_device() {
    let mut bench = bench(Quotas { sessions: 1, ..Quotas::default() });
    let a = bench.enter("a", "full", 100).unwrap();
    bench.subscribe(&a, "x");
    bench.close(&a);
    assert_eq!(bench.enter("b", "full", 100).err(), Some(Counted::Sessions));
    bench.pass(101);
    bench.broker.tick(bench.now, &mut bench.turn);
    let b = bench.enter("b", "full", 100).unwrap();
    bench.subscribe(&b, "x");
    assert_eq!(bench.used(), [1, 1, 1]);
    let b = bench.enter("b", "other", 100).unwrap();
    assert_eq!(bench.used(), [0, 0, 0], "it is another's now");
    bench.enter("a", "full", 100).unwrap();
    let moves = bench.enter("b", "full", 100);
    assert_eq!(moves.err(), Some(Counted::Sessions));
    bench.subscribe(&b, "y");
    assert_eq!(bench.used(), [1, 1, 0], "a refused move leaves all as it was");
}

#[test]
fn subscriptions_are_refused_beyond_the_quota_but_may_be_replaced() {
    let mut bench = bench(Quotas { subscriptions: 2, ..Quotas::default() });
    let a = bench.enter("a", "full", 3600).unwrap();
    let b = bench.enter("b", "full", 3600).unwrap();
    bench.subscribe(&a, "x");
    bench.subscribe(&b, "$share/g/x");
    for filter in ["y", "y/+", "$share/g/y"] {
        assert_eq!(bench.try_subscribe(&a, &request(filter)).err(), Some(SubscribeError::Quota));
    }
    for (device, filter) in [(&a, "x"), (&b, "$share/g/x")] {
        assert!(bench.try_subscribe(device, &request(filter)).is_ok());
    }
    assert_eq!(bench.used(), [2, 2, 2]);
    assert!(bench.unsubscribe(&a, "x") && !bench.unsubscribe(&a, "x"));
    bench.subscribe(&a, "y");
    assert_eq!(bench.used(), [2, 2, 2]);
    bench.broker.disconnect("a", 0x98, true, bench.now, &mut bench.turn);
    assert_eq!(bench.used(), [1, 1, 1]);
}

#[test]
fn an_identity_is_capped_across_its_devices() {
    let identity = Quotas { connections: 1, ..Quotas::default() };
    let mut bench = bench_with(identity, Quotas::default(), None);
    let mut enter = |id: &str, user: Option<&str>| {
        let quota_holders = bench.broker.quota_holders(user, id, "any");
        let opened = bench.try_open(id, Connect { quota_holders, ..Connect::default() });
        opened.map(drop).map_err(|exceeded| exceeded.to_string())
    };
    enter("a", Some("bob")).unwrap();
    assert_eq!(enter("b", Some("bob")).unwrap_err(), "user \"bob\" has used up its connections");
    enter("b", Some("eve")).unwrap();
    enter("a", Some("bob")).unwrap();
    // A client that takes a user's name as its client id has no part in that user's quotas.
    enter("bob", None).unwrap();
    enter("a", Some("bob")).unwrap();
}

#[test]
fn retained_messages_count_for_who_set_them() {
    let mut bench = bench(Quotas { retained_messages: 2, ..Quotas::default() });
    let full = bench.enter("a", "full", 0).unwrap();
    let other = bench.enter("b", "other", 0).unwrap();
    bench.retain(&full, "1", "x");
    bench.retain(&full, "2", "x");
    bench.retain(&full, "3", "x");
    bench.retain(&other, "4", "x");
    assert_eq!(["1", "2", "3", "4"].map(|topic| bench.has(topic)), [true, true, false, true]);
    bench.retain(&full, "2", "longer than before");
    assert_eq!(bench.retained_used()[0], 2, "in the place of its own");
    bench.retain(&other, "2", "x");
    bench.retain(&full, "3", "x");
    assert_eq!((bench.has("3"), bench.retained_used()[0]), (true, 2), "the other has made room");
    bench.publish_with("1", "x", |message| message.retain = true);
    bench.retain(&full, "3", "");
    assert_eq!(bench.retained_used(), [0, 0], "a backend's is nobody's");
}

#[test]
fn bytes_of_retained_messages_are_given_back_as_they_go() {
    let mut bench = bench(Quotas { retained_bytes: ByteSize(4000), ..Quotas::default() });
    let full = bench.enter("a", "full", 0).unwrap();
    bench.retain(&full, "1", &"x".repeat(3000));
    let large = bench.retained_used()[1];
    bench.retain(&full, "2", &"x".repeat(3000));
    assert!(!bench.has("2") && large > 3000);
    bench.retain(&full, "1", "x");
    bench.retain(&full, "2", &"x".repeat(3000));
    assert!(bench.has("2"));
    let mut message = Message::new("2", b"x", bench.now, Origin::BACKEND);
    message.retain = true;
    message.expires = Some(bench.now);
    bench.broker.publish(&message, &mut bench.turn);
    bench.retain(&full, "1", "");
    assert_eq!(bench.retained_used(), [0, 0]);
}

/// The failure: a device fills the store for others through wills, one for each connection.
#[test]
fn the_will_of_a_session_that_has_ended_counts_too() {
    let mut bench = bench(Quotas { retained_messages: 1, ..Quotas::default() });
    for topic in ["1", "2"] {
        let mut message = Message::new(topic, b"gone", Timestamp(0), Origin::SERVER);
        message.retain = true;
        let will =
            Will { message: Arc::clone(message.share()), expiry: None, delay: 0, charge: None, author: None };
        let device = bench.enter_with("a", "full", Connect { will: Some(will), ..Connect::default() });
        bench.close(&device.unwrap());
    }
    assert_eq!((bench.has("1"), bench.has("2"), bench.retained_used()[0]), (true, false, 1));
    assert_eq!(bench.used(), [0, 0, 0]);
}

/// In virtual time.
#[test]
fn a_rate_is_shared_by_all_who_are_one_quota_holder() {
    let bench = bench(Quotas { byte_rate: ByteSize(1000), message_rate_out: 10, ..Quotas::default() });
    let (one, two) =
        (bench.broker.quota_holders(None, "a", "full"), bench.broker.quota_holders(None, "b", "full"));
    let other = bench.broker.quota_holders(None, "c", "other");
    let at = Timestamp(5_000);
    assert_eq!(one[0].take_input(1, 1000, at), 0.0);
    assert_eq!(two[0].take_input(1, 500, at), 0.5);
    assert_eq!(other[0].take_input(1, 1_000_000, at), 0.0);
    assert_eq!((one[0].take_output(10, 1_000_000, at), two[0].take_output(1, 1, at)), (0.0, 0.1));
    assert_eq!(two[0].take_input(1, 0, Timestamp(5_500)), 0.0);
}
