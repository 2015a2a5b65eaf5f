//! Time at which wills leave their sessions on disk.

use gateway_core::CommitRefused;

use super::{disk::Disk, *};

pub(super) fn bench(disk: &Disk) -> Bench {
    authorized(disk, None)
}

fn authorized(disk: &Disk, authorize_will: Option<Arc<WillAuthorizer>>) -> Bench {
    let broker = Broker::new(BrokerConfig {
        namespace: "devices/{client_id}/#".to_owned(),
        stores: Some(disk.stores()),
        authorize_will,
        ..BrokerConfig::default()
    });
    Bench { broker, turn: Turn::default(), now: Timestamp(1_000_000) }
}

/// A subscriber whose messages are being written until the test ends their parts.
fn watcher(bench: &mut Bench) -> Device {
    let watcher = bench.device("watcher");
    bench.subscribe(&watcher, "will/#");
    *watcher.test.receiver.parts.lock() = Some(Vec::new());
    watcher
}

fn commit(watcher: &Device) {
    let parts = std::mem::take(watcher.test.receiver.parts.lock().as_mut().unwrap());
    for part in parts {
        part.done();
    }
}

fn connect(expiry: u32, clean: bool, payload: &str, delay: u32) -> Connect {
    let mut message = Message::new("will/d", payload.as_bytes(), Timestamp(0), Origin::SERVER);
    message.qos = QoS::AtLeastOnce;
    let will = Will { message: Arc::clone(message.share()), expiry: None, delay, charge: None, author: None };
    Connect { clean, expiry, will: Some(will), ..Connect::default() }
}

/// The answer to a CONNECT: none yet, or whether it is refused.
type ConnectAnswer = Option<Result<(), CommitRefused>>;

fn open(bench: &mut Bench, connect: Connect) -> (Device, Arc<Commit>) {
    let (device, commit) = bench.open("d", connect);
    (device, commit.expect("what the answer confirms goes to disk"))
}

#[test]
fn a_takeover_does_not_lose_the_old_will_in_a_crash() {
    // (old expiry, delay, Clean Start)
    for (delay, clean) in [(0, false), (0, true), (30, true)] {
        let disk = Disk::prompt();
        let mut bench = bench(&disk);
        let watcher = watcher(&mut bench);
        bench.connect("d", connect(100, false, "first", delay));
        let (_second, answer) = open(&mut bench, connect(100, clean, "second", 0));
        let row = format!("delay {delay} clean {clean}");
        assert_eq!(watcher.payloads(), ["first"], "{row}");
        assert_eq!(answer.result(), None, "{row}: answered although a crash would lose the will");
        assert_eq!(disk.wills()[0], "first", "{row}: it left the disk too early");
        commit(&watcher);
        assert_eq!(answer.result(), Some(Ok(())), "{row}");
        assert_eq!(disk.wills(), ["second"], "{row}");
    }
}

#[test]
fn no_will_is_lost_when_its_session_resumes_or_ends_before_the_commit() {
    for clean in [false, true] {
        let disk = Disk::prompt();
        let mut bench = bench(&disk);
        let watcher = watcher(&mut bench);
        let first = bench.connect("d", connect(100, false, "first", 0));
        bench.close(&first);
        assert_eq!(watcher.payloads(), ["first"]);
        let (second, answer) = open(&mut bench, connect(100, clean, "second", 0));
        assert_eq!((answer.result(), &*disk.wills()[0]), (None, "first"), "clean {clean}");
        // Nor is it lost by the end of a connection that was not answered.
        bench.close_with(&second, Closed { publish_will: false, expiry: None, reason: "handshake_ended" });
        assert_eq!(disk.wills()[0], "first", "clean {clean}");
        commit(&watcher);
        assert_eq!(disk.wills(), Vec::<String>::new(), "clean {clean}");
    }
}

#[test]
fn of_two_takeovers_the_first_is_refused_and_no_answered_will_is_lost() {
    let disk = Disk::prompt();
    let mut bench = bench(&disk);
    let watcher = watcher(&mut bench);
    bench.connect("d", connect(100, false, "first", 0));
    let (_second, superseded) = open(&mut bench, connect(100, false, "second", 0));
    let (_third, answer) = open(&mut bench, connect(100, false, "third", 0));
    assert_eq!(superseded.result(), Some(Err(CommitRefused)), "its will is not on disk");
    assert_eq!((answer.result(), &*disk.wills()[0]), (None, "first"));
    commit(&watcher);
    let answer: ConnectAnswer = answer.result();
    assert_eq!((answer, disk.wills()), (Some(Ok(())), vec!["third".to_owned()]));
}

#[test]
fn a_session_that_ends_with_its_will_leaves_the_disk_after_it() {
    for (expiry, changed) in [(100, Some(0)), (10, None)] {
        let disk = Disk::prompt();
        let mut bench = bench(&disk);
        let watcher = watcher(&mut bench);
        let device = bench.connect("d", connect(expiry, false, "gone", 3600));
        bench.close_with(&device, Closed { publish_will: true, expiry: changed, reason: "test" });
        if changed.is_none() {
            bench.pass(10);
        }
        assert_eq!(watcher.payloads(), ["gone"]);
        assert_eq!(disk.wills(), ["gone"], "removed although a crash would lose the will");
        commit(&watcher);
        assert_eq!(disk.sessions(), 1, "only the watcher's");
    }
}

/// The new session was written, and the process ended before the will of the old one was.
#[test]
fn a_replaced_sessions_will_is_published_after_a_crash() {
    let disk = Disk::prompt();
    {
        let mut bench = bench(&disk);
        let watcher = watcher(&mut bench);
        bench.connect("d", connect(100, false, "first", 30));
        open(&mut bench, connect(100, true, "second", 30));
        assert_eq!((watcher.payloads(), disk.sessions()), (vec!["first".to_owned()], 3));
    }
    let mut bench = bench(&disk);
    let make = |core| -> Arc<dyn Session> { Arc::new(TestSession { core, receiver: Receiver::default() }) };
    bench.broker.restore(make, false, bench.now).unwrap();
    assert_eq!(bench.broker.gauges().sessions, 3);
    let watcher = bench.device("watcher");
    bench.subscribe(&watcher, "will/#");
    let back = bench.device("d");
    assert!(back.present, "the later session");
    bench.pass(0);
    assert_eq!(watcher.payloads(), ["first"], "the will of the later was cancelled");
    assert_eq!((bench.broker.gauges().sessions, disk.sessions()), (2, 2));
}

/// The failure: the client is back before the first tick and leaves its next will, which overtakes that of the session
/// it had replaced before the crash.
#[test]
fn a_replaced_sessions_will_precedes_the_next_one_after_a_crash() {
    let disk = Disk::prompt();
    {
        let mut bench = bench(&disk);
        let _watcher = watcher(&mut bench);
        bench.connect("d", connect(100, false, "first", 0));
        open(&mut bench, connect(100, true, "second", 0));
    }
    let mut bench = bench(&disk);
    let make = |core| -> Arc<dyn Session> { Arc::new(TestSession { core, receiver: Receiver::default() }) };
    bench.broker.restore(make, false, bench.now).unwrap();
    let watcher = bench.device("watcher");
    bench.subscribe(&watcher, "will/#");
    bench.broker.end_superseded(bench.now, &mut bench.turn);
    assert_eq!(bench.broker.gauges().sessions, 2, "that of the watcher and the later one of the client");
    let third = bench.connect("d", connect(100, true, "third", 0));
    bench.close(&third);
    bench.pass(0);
    assert_eq!(watcher.payloads(), ["first", "second", "third"]);
}

/// The failure: a will is published although its client has lost the right since CONNECT, or by the rights of another
/// connection than the one that left it.
#[test]
fn a_will_is_judged_by_who_left_it_when_it_is_published() {
    let disk = Disk::prompt();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let authorizer = || -> Option<Arc<WillAuthorizer>> {
        let asked = Arc::clone(&asked);
        Some(Arc::new(move |client_id: &ClientId, will: &Will| {
            let author = will.author.as_deref().cloned().unwrap_or_default();
            asked.lock().push(format!("{} {author}", client_id.as_str()));
            author == "good"
        }))
    };
    let with = |payload: &str, author: &str, delay| {
        let mut connect = connect(100, false, payload, delay);
        connect.will.as_mut().unwrap().author = Some(Arc::new(author.to_owned()));
        connect
    };
    let withheld = || counters::totals().wills_withheld;
    let before = withheld();
    {
        let mut bench = authorized(&disk, authorizer());
        let watcher = bench.device("watcher");
        bench.subscribe(&watcher, "will/#");
        bench.connect("d", with("first", "good", 0));
        let second = bench.connect("d", with("second", "bad", 0));
        assert_eq!(watcher.payloads(), ["first"], "by who left it, not by who took over");
        bench.close(&second);
        assert!(watcher.payloads().is_empty() && disk.wills().is_empty(), "forgotten, also on disk");
        bench.connect("d", with("third", "bad", 10));
        bench.connect("e", with("fourth", "good", 10));
    }
    assert!(withheld() > before);
    let mut bench = authorized(&disk, authorizer());
    let make = |core| -> Arc<dyn Session> { Arc::new(TestSession { core, receiver: Receiver::default() }) };
    bench.broker.restore(make, false, bench.now).unwrap();
    let watcher = bench.device("watcher");
    bench.subscribe(&watcher, "will/#");
    bench.pass(20);
    assert_eq!(watcher.payloads(), ["fourth"], "the next process knows who left it");
    let mut asked = asked.lock().clone();
    asked.sort_unstable();
    assert_eq!(asked, ["d bad", "d bad", "d good", "e good"]);
}

#[test]
fn a_shutdown_does_not_overtake_the_will_of_a_connection_that_just_ended() {
    let mut bench = Bench::new(Limits::default());
    let watcher = bench.device("watcher");
    bench.subscribe(&watcher, "$share/g/status");
    let message = Message::new("status", b"gone", bench.now, Origin::BACKEND);
    let will = Some(Will {
        message: Arc::clone(message.share()),
        expiry: None,
        delay: 0,
        charge: None,
        author: None,
    });
    let device = bench.connect("dev", Connect { will, ..Connect::default() });
    bench.close(&watcher);
    let (broker, (tell, told)) = (bench.broker.clone(), std::sync::mpsc::sync_channel(1));
    // Nobody is connected now, and the will is being given to the group.
    watcher.when_asked(move || tell.send((broker.gauges().online, broker.is_quiet())).unwrap());
    bench.close(&device);
    assert_eq!(told.try_recv(), Ok((0, false)));
    assert!(bench.broker.is_quiet());
}
