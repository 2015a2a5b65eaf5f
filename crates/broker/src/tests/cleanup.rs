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
    let cleanup = bench.broker.closed(&device.session, device.epoch, closed, bench.now, &mut bench.turn);
    let mut cleanup = cleanup.expect("much to do");
    assert!(bench.turn.effort.spent() <= MOST, "{:?}", bench.turn.effort);
    assert!(!bench.broker.is_quiet(), "not all is done");
    let mut steps = 1;
    let mut done = !goes_on;
    while !done {
        bench.turn.flush();
        bench.turn.effort.renew();
        steps += 1;
        done = cleanup.go_on(&mut bench.turn);
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

/// Goes on with what a call left, in turns; returns how many there were, the call's own included.
fn turns(bench: &mut Bench, cleanup: Option<Box<SessionCleanup>>) -> usize {
    assert!(bench.turn.effort.spent() <= MOST, "{:?}", bench.turn.effort);
    let mut turns = 1;
    let Some(mut cleanup) = cleanup else { return turns };
    loop {
        bench.turn.flush();
        bench.turn.effort.renew();
        turns += 1;
        let done = cleanup.go_on(&mut bench.turn);
        assert!(bench.turn.effort.spent() <= MOST, "{:?}", bench.turn.effort);
        if done {
            return turns;
        }
    }
}

/// The failure: an operator who ends a session with 10,000 filters stops a thread of the services for tens of
/// milliseconds.
#[test]
fn a_session_that_is_discarded_ends_in_steps() {
    const FILTERS: usize = 3_000;
    let mut bench = Bench::new(Limits::default());
    let device = bench.device("d");
    for number in 0..FILTERS {
        bench.subscribe(&device, &format!("{number}/+"));
    }
    bench.turn = Turn::default();
    let cleanup = bench.broker.disconnect("d", 0x98, true, bench.now, &mut bench.turn);
    let turns = turns(&mut bench, Some(cleanup.expect("a session")));
    assert!(turns >= FILTERS * Effort::FILTER as usize / Effort::TURN as usize, "{turns}");
    let gauges = bench.broker.gauges();
    assert_eq!((gauges.subscriptions, gauges.sessions), (0, 0));
    assert!(bench.broker.is_quiet());
}

/// The failure: 10,000 sessions that expire, or wills that are due, in one second are one piece of work.
#[test]
fn sessions_that_are_due_at_once_and_wills_at_a_stop_take_turns() {
    const SESSIONS: usize = 1_000;
    for at_a_stop in [false, true] {
        let mut bench = Bench::new(Limits::default());
        let watcher = bench.device("watcher");
        bench.subscribe(&watcher, "will/+");
        for number in 0..SESSIONS {
            let will = Some(will(&format!("will/{number}"), "gone", 30));
            let connect = Connect { clean: false, expiry: 30, will, ..Connect::default() };
            let device = bench.connect(&format!("d{number}"), connect);
            bench.close(&device);
        }
        bench.turn = Turn::default();
        let left = if at_a_stop {
            bench.broker.shutdown_wills(bench.now, &mut bench.turn)
        } else {
            bench.now = bench.now.plus_secs(30);
            bench.broker.tick(bench.now, &mut bench.turn)
        };
        assert!(left.is_none() || !bench.broker.is_quiet(), "more is to come");
        let turns = turns(&mut bench, left);
        assert!(at_a_stop || turns >= SESSIONS * Effort::FILTER as usize / Effort::TURN as usize, "{turns}");
        assert_eq!(watcher.payloads().len(), SESSIONS);
        assert_eq!(bench.broker.gauges().sessions, if at_a_stop { SESSIONS + 1 } else { 1 });
    }
}

/// The failure: the client of a new session is answered while the old session is still on disk.
#[test]
fn who_starts_clean_is_answered_when_the_old_session_is_gone_from_disk() {
    let disk = disk::Disk::prompt();
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
        quota_holders: Default::default(),
        now: bench.now,
    };
    let make = |core| -> Arc<dyn Session> { Arc::new(TestSession { core, receiver: Receiver::default() }) };
    bench.turn = Turn::default();
    let opened = ready(bench.broker.open(request, make, &mut bench.turn)).unwrap();
    let commit = opened.commit.expect("something is on disk");
    let is_done = || commit.poll(std::task::Waker::noop()).is_some();
    assert!(!is_done() && disk.sessions() == 1);
    drop(opened.cleanup);
    assert!(is_done() && disk.sessions() == 0);
}
