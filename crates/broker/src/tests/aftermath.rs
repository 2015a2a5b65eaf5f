//! Ends of sessions that leave much to do.

use gateway_core::Effort;

use super::*;

/// One step may overspend, by as many receivers as are served between two checks of the effort.
const MOST: u64 = Effort::TURN as u64 + 50_000;

/// Ends the session of `device`, in steps if `goes_on`; returns how many there were.
fn end(bench: &mut Bench, device: &Device, goes_on: bool) -> usize {
    let closed = Closed { publish_will: true, expiry: Some(0), reason: "test" };
    bench.turn.flush();
    bench.turn.effort.renew();
    let aftermath = bench.broker.closed(&device.session, device.epoch, closed, bench.now, &mut bench.turn);
    let mut aftermath = aftermath.expect("much to do");
    assert!(bench.turn.effort.spent() <= MOST, "{:?}", bench.turn.effort);
    assert!(!bench.broker.is_quiet(), "not all is done");
    let mut steps = 1;
    let mut done = !goes_on;
    while !done {
        bench.turn.flush();
        bench.turn.effort.renew();
        steps += 1;
        done = aftermath.go_on(&mut bench.turn);
        assert!(bench.turn.effort.spent() <= MOST, "{:?}", bench.turn.effort);
    }
    steps
}

/// The failure: the end of a client with 10,000 filters blocks its thread for tens of milliseconds, and ten such
/// clients block it for longer.
#[test]
fn a_session_with_many_filters_ends_in_steps_or_at_once_when_dropped() {
    const FILTERS: usize = 3_000;
    for goes_on in [true, false] {
        let mut bench = Bench::new(Limits::default());
        let device = bench.device("d");
        for number in 0..FILTERS {
            bench.subscribe(&device, &format!("{number}/+"));
        }
        let steps = end(&mut bench, &device, goes_on);
        assert!(!goes_on || steps >= FILTERS * Effort::FILTER as usize / Effort::TURN as usize, "{steps}");
        let gauges = bench.broker.gauges();
        assert_eq!((gauges.subscriptions, gauges.sessions), (0, 0));
        assert!(device.is_ended() && bench.broker.is_quiet());
        assert_eq!(bench.broker.account().held(MemoryKind::Filters), 0);
        assert_eq!(bench.publish("7/x", "p", QoS::AtMostOnce).matched, 0);
    }
}

/// The failure: a will for 15,000 receivers is delivered, and written to as many sockets, in one go.
#[test]
fn a_will_for_very_many_is_handed_out_in_steps_each_gets_it_once() {
    const RECEIVERS: usize = 3_000;
    for goes_on in [true, false] {
        let mut bench = Bench::new(Limits::default());
        let receivers: Vec<_> = (0..RECEIVERS).map(|number| bench.device(&format!("r{number}"))).collect();
        for device in &receivers {
            bench.subscribe(device, "will/d");
        }
        // The match itself is not divided; this one is remembered for the will.
        bench.publish("will/d", "before", QoS::AtMostOnce);
        for receiver in &receivers {
            assert_eq!(receiver.payloads(), ["before"]);
        }
        let device = bench.connect(
            "d",
            Connect {
                clean: false,
                expiry: 100,
                will: Some(will("will/d", "gone", 30)),
                ..Connect::default()
            },
        );
        end(&mut bench, &device, goes_on);
        for receiver in &receivers {
            assert_eq!(receiver.payloads(), ["gone"]);
        }
        assert_eq!(bench.broker.gauges().sessions, RECEIVERS);
    }
}

/// The failure: the client of a new session is answered while the old session is still on disk.
#[test]
fn who_starts_clean_is_answered_when_the_old_session_is_gone_from_disk() {
    let disk = Arc::new(wills::Disk::default());
    let mut bench = wills::bench(&disk);
    let old = bench.device("d");
    for number in 0..3_000 {
        bench.subscribe(&old, &format!("{number}/+"));
    }
    let request = OpenRequest {
        client_id: ClientId::new("d"),
        clean_start: true,
        expiry: 0,
        will: None,
        info: info(),
        parties: Default::default(),
        now: bench.now,
    };
    let make = |core| -> Arc<dyn Session> { Arc::new(TestSession { core, receiver: Receiver::default() }) };
    bench.turn = Turn::default();
    let opened = ready(bench.broker.open(request, make, &mut bench.turn)).unwrap();
    let commit = opened.commit.expect("something is on disk");
    let is_done = || commit.poll(std::task::Waker::noop()).is_some();
    assert!(!is_done() && disk.count() == 1);
    drop(opened.aftermath);
    assert!(is_done() && disk.count() == 0);
}
