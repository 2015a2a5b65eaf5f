use std::cell::Cell;

use super::*;
use crate::{DeviceFilter, DeviceInfo};

fn watcher(bench: &mut Bench) -> Device {
    let watcher = bench.device("watcher");
    bench.subscribe(&watcher, "will/#");
    watcher
}

fn connect(expiry: u32, delay: Option<u32>) -> Connect {
    let will = delay.map(|delay| will("will/d", "gone", delay));
    Connect { clean: false, expiry, will, ..Connect::default() }
}

/// [MQTT-3.1.2-8] [MQTT-3.1.3-9] [MQTT-3.1.4-3]
#[test]
fn takeover_publishes_or_cancels_the_old_will() {
    // (delay, old expiry, clean start, published at once)
    let rows = [
        (0, 100, false, true),
        (0, 100, true, true),
        (30, 100, false, false),
        (30, 100, true, true),
        (30, 0, false, true),
        (0, 0, false, true),
    ];
    for (delay, expiry, clean, published) in rows {
        let mut bench = Bench::new(Limits::default());
        let watcher = watcher(&mut bench);
        let old = bench.connect("d", connect(expiry, Some(delay)));
        bench.subscribe(&old, "x");
        let new = bench.connect("d", Connect { clean, expiry: 100, will: None, ..Connect::default() });
        let row = format!("delay {delay} expiry {expiry} clean {clean}");
        assert_eq!(old.closes(), [CloseReason::TakenOver], "{row}");
        assert_eq!(!watcher.payloads().is_empty(), published, "{row}");
        let resumed = !clean && expiry > 0;
        assert_eq!((new.present, old.is_ended()), (resumed, !resumed), "{row}");
        assert_eq!(bench.publish("x", "x", QoS::AtMostOnce).matched, u32::from(resumed), "{row}");
        // The old connection's end no longer changes anything, and its will does not come later.
        bench.broker.closed(
            &old.session,
            old.epoch,
            Closed { publish_will: true, expiry: None, reason: "taken over" },
            bench.now,
            &mut bench.turn,
        );
        assert!(bench.broker.device("d").unwrap().online, "{row}");
        bench.pass(50);
        assert!(watcher.payloads().is_empty(), "{row}");
        assert_eq!((bench.broker.gauges().online, bench.broker.gauges().sessions), (2, 2), "{row}");
    }
}

#[test]
fn the_end_of_a_connection_publishes_the_will_at_its_time() {
    // (publish, delay, expiry, override, seconds until published)
    let rows = [
        (true, 0, 100, None, Some(0)),
        (true, 30, 100, None, Some(30)),
        (true, 100, 30, None, Some(30)),
        (true, 30, 0, None, Some(0)),
        (true, 30, u32::MAX, None, Some(30)),
        (true, 30, 100, Some(10), Some(10)),
        (true, 30, 100, Some(0), Some(0)),
        (false, 0, 100, None, None),
        (false, 30, 100, None, None),
    ];
    for row in rows {
        let (publish_will, delay, expiry, changed, after) = row;
        let mut bench = Bench::new(Limits::default());
        let watcher = watcher(&mut bench);
        let device = bench.connect("d", connect(expiry, Some(delay)));
        bench.close_with(&device, Closed { publish_will, expiry: changed, reason: "test" });
        let mut seen = (!watcher.payloads().is_empty()).then_some(0);
        for second in 1..=200 {
            bench.pass(1);
            if !watcher.payloads().is_empty() {
                assert_eq!(seen, None, "{row:?}: twice");
                seen = Some(second);
            }
        }
        assert_eq!(seen, after, "{row:?}");
        let lives = expiry == u32::MAX;
        assert_eq!(bench.broker.device("d").is_some(), lives, "{row:?}");
        assert_eq!(bench.broker.inner.sessions.timers.len(), 0, "{row:?}");
    }
}

#[test]
fn resuming_within_the_delay_cancels_a_will_and_clean_start_publishes() {
    for clean in [false, true] {
        let mut bench = Bench::new(Limits::default());
        let watcher = watcher(&mut bench);
        let device = bench.connect("d", connect(100, Some(30)));
        bench.close(&device);
        bench.pass(10);
        let again = bench.connect("d", Connect { clean, expiry: 100, will: None, ..Connect::default() });
        assert_eq!(again.present, !clean);
        assert_eq!(watcher.payloads().len(), usize::from(clean));
        bench.pass(100);
        assert!(watcher.payloads().is_empty());
    }
}

#[test]
fn a_session_expires_at_its_time_even_if_no_tick_came() {
    let mut bench = Bench::new(Limits::default());
    let device = bench.connect("d", connect(10, None));
    bench.subscribe(&device, "x");
    bench.close(&device);
    bench.now = bench.now.plus_secs(9);
    let device = bench.connect("d", connect(10, None));
    assert!(device.present);
    bench.close(&device);
    bench.now = bench.now.plus_secs(10);
    let device = bench.connect("d", connect(10, None));
    assert!(!device.present);
    assert_eq!(bench.broker.gauges().subscriptions, 0);
    bench.close(&device);
    bench.pass(10);
    assert!(device.is_ended());
    assert_eq!((bench.broker.gauges().sessions, bench.broker.gauges().online), (0, 0));
}

#[test]
fn a_will_has_its_retain_flag_and_expiry_from_publication() {
    let mut bench = Bench::new(Limits::default());
    let mut message = Message::new("will/d", b"gone", Timestamp(0), Origin::SERVER);
    message.retain = true;
    let will = Will {
        message: Arc::clone(message.share()),
        expiry: Some(60),
        delay: 20,
        charge: None,
        author: None,
    };
    let device =
        bench.connect("d", Connect { clean: false, expiry: 100, will: Some(will), ..Connect::default() });
    bench.close(&device);
    bench.pass(20);
    let retained = ready(bench.broker.retained("will/d", bench.now)).unwrap().unwrap();
    assert_eq!(retained.expires, Some(bench.now.plus_secs(60)));
    assert_eq!(retained.client_id.as_ref().map(ClientId::as_str), Some("d"));
}

#[test]
fn shutdown_publishes_every_will_once() {
    let mut bench = Bench::new(Limits::default());
    let watcher = watcher(&mut bench);
    let online = bench.connect("online", connect(100, Some(50)));
    let offline = bench.connect("offline", connect(100, Some(50)));
    bench.close(&offline);
    bench.broker.shutdown_wills(bench.now, &mut bench.turn);
    assert_eq!(watcher.payloads().len(), 2);
    bench.broker.shutdown_wills(bench.now, &mut bench.turn);
    bench.close(&online);
    bench.pass(200);
    assert!(watcher.payloads().is_empty());
}

#[test]
fn an_administrator_ends_connection_or_session() {
    let mut bench = Bench::new(Limits::default());
    let watcher = watcher(&mut bench);
    let device = bench.connect("d", connect(100, Some(30)));
    bench.subscribe(&device, "x");
    assert!(bench.broker.disconnect("d", 0x98, false, bench.now, &mut bench.turn).is_some());
    assert_eq!(device.closes(), [CloseReason::Administrative(0x98)]);
    assert!(!device.is_ended());
    assert!(bench.broker.disconnect("d", 0x98, true, bench.now, &mut bench.turn).is_some());
    assert!(device.is_ended());
    assert_eq!(watcher.payloads(), ["gone"]);
    assert_eq!(bench.publish("x", "x", QoS::AtMostOnce).matched, 0);
    assert!(matches!(bench.try_subscribe(&device, &request("y")).err(), Some(SubscribeError::NotAuthorized)));
    bench.close(&device);
    assert!(bench.broker.disconnect("d", 0x98, true, bench.now, &mut bench.turn).is_none());
    assert_eq!(bench.broker.gauges().online, 1);
}

#[test]
fn too_many_offline_sessions_end_the_one_nearest_to_expiry() {
    let mut bench = Bench::new(Limits { max_offline_sessions: 2, ..Limits::default() });
    for (id, expiry) in [("a", 50), ("b", 20), ("c", u32::MAX)] {
        let device = bench.connect(id, connect(expiry, None));
        bench.close(&device);
    }
    let page = bench.broker.devices(0, 10, &only(false));
    let ids: Vec<String> = page.devices.iter().map(|(_, device)| device.client_id.to_string()).collect();
    assert_eq!(ids, ["a", "c"]);
}

/// All devices, or those that are online.
const fn only(online_only: bool) -> DeviceFilter<'static> {
    DeviceFilter { online_only, ..DeviceFilter::ALL }
}

/// All pages of `limit` devices, with `between` called after each.
fn pages(bench: &mut Bench, limit: usize, online: bool, mut between: impl FnMut(&mut Bench)) -> Vec<String> {
    let mut ids = Vec::new();
    let mut start = 0;
    loop {
        let page = bench.broker.devices(start, limit, &only(online));
        assert!(page.devices.len() <= limit);
        ids.extend(page.devices.iter().map(|(_, device)| device.client_id.to_string()));
        match page.next {
            Some(next) => start = next,
            None => return ids,
        }
        between(bench);
    }
}

#[test]
fn pages_of_devices_show_each_once_and_a_page_may_begin_after_any_device() {
    let mut bench = Bench::new(Limits::default());
    let _stream = bench.broker.attach_stream(Arc::new(TestStream::default()), &["#".to_owned()]);
    for number in [5, 3, 1, 4, 2] {
        let device = bench.device(&format!("d{number}"));
        bench.subscribe(&device, "$share/g/x");
        bench.subscribe(&device, "y/+");
        if number == 1 {
            bench.close(&device);
        }
    }
    for limit in [1, 2, 5, 10] {
        assert_eq!(pages(&mut bench, limit, false, |_| {}), ["d5", "d3", "d1", "d4", "d2"]);
        assert_eq!(pages(&mut bench, limit, true, |_| {}), ["d5", "d3", "d4", "d2"]);
    }
    let page = bench.broker.devices(0, 10, &only(false));
    let rest = bench.broker.devices(page.devices[2].0, 10, &only(false));
    let ids: Vec<_> = rest.devices.iter().map(|(_, device)| device.client_id.as_str()).collect();
    assert_eq!(ids, ["d4", "d2"]);
    assert!(bench.broker.devices(u32::MAX, 10, &only(false)).devices.is_empty());
    let device = bench.broker.device("d1").unwrap();
    assert!(!device.online);
    let expected = [("$share/g/x".to_owned(), QoS::ExactlyOnce), ("y/+".to_owned(), QoS::ExactlyOnce)];
    assert_eq!(device.subscription_count, 2);
    assert_eq!(bench.broker.subscriptions("d1", 10).unwrap(), expected);
    assert_eq!(bench.broker.subscriptions("d1", 1).unwrap().len(), 1);
    assert!(bench.broker.subscriptions("nobody", 1).is_none());
    assert_eq!(bench.broker.online_sessions().len(), 4);
}

#[test]
fn stopping_the_gateway_closes_each_connection_by_its_own_epoch() {
    let mut bench = Bench::new(Limits::default());
    bench.device("once");
    bench.device("twice");
    bench.device("twice");
    let mut online: Vec<_> = bench.broker.online_sessions();
    online.sort_by_key(|(session, _)| session.core().client_id().as_str().to_owned());
    let numbers: Vec<u32> = online.iter().map(|(_, epoch)| *epoch).collect();
    assert_eq!(numbers, [1, 2]);
}

#[test]
fn sessions_that_stay_are_paged_once_while_others_come_and_go() {
    let mut bench = Bench::new(Limits::default());
    for number in 0..300 {
        bench.device(&format!("stays{number}"));
        bench.device(&format!("goes{number}"));
    }
    let mut round = 0;
    let seen = pages(&mut bench, 7, false, |bench| {
        for number in round * 5..round * 5 + 5 {
            bench.broker.disconnect(&format!("goes{number}"), 0x98, true, bench.now, &mut bench.turn);
            bench.device(&format!("new{number}"));
        }
        round += 1;
    });
    let mut stayed: Vec<&String> = seen.iter().filter(|id| id.starts_with("stays")).collect();
    assert_eq!(stayed.len(), 300);
    stayed.sort_unstable();
    stayed.dedup();
    assert_eq!(stayed.len(), 300, "none twice");
}

#[test]
fn a_page_does_not_look_at_every_session() {
    let mut bench = Bench::new(Limits::default());
    for number in 0..20_000 {
        let device = bench.device(&format!("d{number}"));
        bench.close(&device);
    }
    let last = bench.device("online");
    let page = bench.broker.devices(0, 10, &only(true));
    assert!(page.devices.is_empty() && page.next.is_some_and(|next| next < 10_000), "{page:?}");
    assert_eq!(pages(&mut bench, 10, true, |_| {}), ["online"]);
    bench.close(&last);
}

/// The failure: a filter that few pass has one call describe every session.
#[test]
fn a_page_describes_no_more_than_some_devices_whoever_is_wanted() {
    let mut bench = Bench::new(Limits::default());
    for number in 0..5_000 {
        bench.device(&format!("d{number}"));
    }
    let told = Cell::new(0);
    let is_last = |info: &DeviceInfo| {
        told.set(told.get() + 1);
        info.client_id.as_str() == "d4999"
    };
    let mut start = Some(0);
    let mut found = Vec::new();
    while let Some(from) = start {
        let name = |id: &str| id.ends_with('9');
        let page =
            bench.broker.devices(from, 10, &DeviceFilter { info: Some(&is_last), name: &name, ..only(true) });
        found.extend(page.devices.into_iter().map(|(_, info)| info.client_id.to_string()));
        start = page.next;
    }
    assert_eq!((found, told.take()), (vec!["d4999".to_owned()], 500), "only those with such a name");
    let page = bench.broker.devices(0, 10, &DeviceFilter { info: Some(&is_last), ..DeviceFilter::ALL });
    assert!(page.devices.is_empty() && page.next.is_some(), "{page:?}");
    assert_eq!(told.get(), 2_048);
}

#[test]
fn events_tell_the_life_of_a_session() {
    let mut bench = Bench::new(Limits::default());
    let mut events = bench.broker.events();
    let device = bench.connect("d", connect(0, None));
    bench.subscribe(&device, "x");
    bench.unsubscribe(&device, "x");
    let device = bench.connect("d", connect(0, None));
    bench.close(&device);
    let mut kinds = Vec::new();
    while let Ok(event) = events.try_recv() {
        let text = format!("{:?}", event.kind);
        kinds.push(text.split([' ', '{']).next().unwrap_or_default().to_owned());
    }
    let expected =
        "Connected Subscribed Unsubscribed TakenOver SessionEnded Connected Disconnected SessionEnded";
    assert_eq!(kinds.join(" "), expected);
}

#[test]
fn two_threads_that_open_one_client_id_leave_one_owner() {
    let bench = Bench::new(Limits::default());
    let broker = &bench.broker;
    for round in 0..200 {
        let id = format!("d{}", round % 3);
        let opened = std::thread::scope(|scope| {
            let open = || {
                let request = OpenRequest {
                    client_id: ClientId::new(&id),
                    clean_start: round % 2 == 0,
                    expiry: 60,
                    will: None,
                    info: info(),
                    quota_holders: Default::default(),
                    now: Timestamp(5),
                };
                let make = |core| -> Arc<dyn Session> {
                    Arc::new(TestSession { core, receiver: Receiver::default() })
                };
                ready(broker.open(request, make, &mut Turn::default())).unwrap()
            };
            let threads = [scope.spawn(open), scope.spawn(open)];
            threads.map(|thread| thread.join().unwrap())
        });
        let owner = broker.session(&id).unwrap();
        let owning = (owner.core().slot(), owner.core().state.lock().epoch);
        let (owners, losers): (Vec<_>, Vec<_>) =
            opened.into_iter().partition(|opened| (opened.session.core().slot(), opened.epoch) == owning);
        assert_eq!((owners.len(), losers.len()), (1, 1));
        for OpenedSession { session, epoch, .. } in losers {
            let loser = session.into_any().downcast::<TestSession>().unwrap();
            assert!(loser.receiver.closes.lock().iter().any(|(closed, _)| *closed == epoch));
        }
    }
    let gauges = broker.gauges();
    assert_eq!((gauges.online, gauges.sessions, gauges.online_peak), (3, 3, 3));
}

/// 3.1.1: [MQTT-4.1.0-2], 5.0: [MQTT-4.1.0-1]: no session ends while connected, and 3.1.1: [MQTT-3.1.2-12]: one
/// without a will publishes none.
#[test]
fn a_connected_session_outlives_its_expiry_and_ends_without_a_will() {
    let mut bench = Bench::new(Limits::default());
    let watch = bench.device("watch");
    bench.subscribe(&watch, "#");
    let device = bench.connect("a", Connect { expiry: 10, ..Connect::default() });
    bench.subscribe(&device, "t");
    bench.pass(100);
    assert!(!device.is_ended());
    bench.publish("t", "x", QoS::AtLeastOnce);
    assert_eq!((device.payloads(), watch.payloads()), (vec!["x".to_owned()], vec!["x".to_owned()]));
    bench.close(&device);
    bench.pass(100);
    assert!(device.is_ended());
    assert!(watch.payloads().is_empty());
}

/// Otherwise each refused CONNECT would leave behind a session's removal that waits for the disk.
#[test]
fn while_the_disk_is_full_only_stored_sessions_may_be_persistent() {
    let disk = disk::Disk::prompt();
    let mut bench = wills::bench(&disk);
    bench.device("stored");
    bench.connect("clean", Connect::default());
    disk.fault(|faults| faults.full = true);
    assert_eq!(["stored", "clean", "new"].map(|id| bench.broker.can_keep(id)), [true, false, false]);
    disk.fault(|faults| faults.full = false);
    assert!(bench.broker.can_keep("new"));
}
