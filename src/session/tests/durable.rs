//! A persistent session with its disk, step by step.

use std::cell::Cell;

use parking_lot::Mutex;

use super::*;
use crate::types::{Journal, Page, QueueOp, ReadBack};

const QUEUE: QueueId = QueueId(3);

#[derive(Default)]
struct Recorder(Mutex<Vec<QueueOp>>);

impl Journal for Recorder {
    fn submit(&self, op: QueueOp) {
        self.0.lock().push(op);
    }
}

#[derive(Default)]
struct Purse {
    used: Cell<usize>,
    limit: usize,
}

impl Budget for Purse {
    fn charge(&self, bytes: usize) -> bool {
        let fits = self.used.get() + bytes <= self.limit;
        if fits {
            self.force(bytes);
        }
        fits
    }
    fn force(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
    }
    fn release(&self, bytes: usize) {
        self.used.set(self.used.get() - bytes);
    }
}

struct Bench {
    limits: Limits,
    journal: Recorder,
    purse: Purse,
    out: Outbound,
}

impl Bench {
    fn new(limits: Limits) -> Self {
        let purse = Purse { limit: usize::MAX, ..Purse::default() };
        Self { limits, journal: Recorder::default(), purse, out: Outbound::new() }
    }

    fn with<R>(&mut self, now: u64, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> R {
        let disk = Some(Disk { journal: &self.journal, queue: QUEUE });
        act(&mut self.out, &Env { limits: &self.limits, now: Timestamp(now), budget: &self.purse, disk })
    }

    fn attach(&mut self, now: u64, window: u16) {
        let link = LinkParams { receive_maximum: window, ..link(Protocol::V5) };
        self.with(now, |out, env| out.attach(link, &[], env));
    }

    fn offer(&mut self, now: u64, payload: &[u8], qos: QoS) -> Take {
        let mut message = message(payload, qos);
        message.received = Timestamp(now);
        self.with(now, |out, env| out.offer(&message, offer(qos), env))
    }

    fn ops(&mut self) -> Vec<QueueOp> {
        std::mem::take(&mut *self.journal.0.lock())
    }

    fn load(&mut self) -> Load {
        self.with(0, |out, env| out.begin_load(env))
    }
}

/// Message in a place as it is read back.
fn stored(place: u64, payload: &[u8]) -> ReadBack {
    let message = Arc::clone(message(payload, QoS::AtLeastOnce).share());
    let (qos, retain, sent, group) = (QoS::AtLeastOnce, false, false, 0);
    ReadBack { place, qos, retain, sent, group, ids: None, message: Some(message) }
}

fn aging() -> Limits {
    Limits { offline_age: Span(Duration::from_secs(10)), ..Limits::default() }
}

#[test]
fn what_waited_in_memory_when_the_connection_was_lost_does_not_wait_for_ever() {
    let limits = aging();
    let mut outbound = Outbound::new();
    let window = LinkParams { receive_maximum: 1, ..link(Protocol::V5) };
    outbound.attach(window, &[], &env(&limits, 0));
    for payload in [b"a", b"b"] {
        outbound.offer(&message(payload, QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
    }
    outbound.detach(&env(&limits, 5_000));
    outbound.offer(&message(b"c", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 6_000));
    outbound.attach(window, &[], &env(&limits, 15_500));
    assert!(outbound.handle_puback(1, 0, &env(&limits, 15_500)));
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        [
            "publish a id=1 qos=1 dup=true topic=t alias=None expiry=None",
            "publish c id=2 qos=1 dup=false topic=t alias=None expiry=None",
        ],
        "a was in flight, b had waited for longer than ten seconds without a connection"
    );
}

#[test]
fn what_waits_on_disk_ages_also_if_it_came_while_there_was_a_connection() {
    let mut bench = Bench::new(aging());
    bench.attach(0, 1);
    // At once, in memory too, on disk only.
    bench.offer(1_000, b"a", QoS::AtLeastOnce);
    bench.offer(2_000, b"b", QoS::AtLeastOnce);
    bench.offer(3_000, b"c", QoS::ExactlyOnce);
    bench.with(4_000, |out, env| out.detach(env));
    bench.offer(5_000, b"d", QoS::AtLeastOnce);
    let expires = |op: &QueueOp| match op {
        QueueOp::Append(entry) => (entry.sent, entry.expires.map(|at| at.0)),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        bench.ops().iter().map(expires).collect::<Vec<_>>(),
        [(true, None), (false, Some(12_000)), (false, Some(13_000)), (false, Some(15_000))]
    );
    // What was in flight is sent again; the rest may go.
    let kept = [0, 1, 2, 3].map(|place| bench.out.may_have_sent(place, QoS::AtLeastOnce));
    assert_eq!(kept, [true, false, false, false]);
}

#[test]
fn qos_2_that_an_earlier_process_may_have_sent_is_neither_trimmed_nor_swept() {
    let limits =
        || Limits { offline_messages: 10, overflow: OverflowPolicy::DropOldest, ..Limits::default() };
    let trims = |ops: Vec<QueueOp>| -> Vec<u64> {
        let from = |op| if let QueueOp::Trim { from, .. } = op { Some(from) } else { None };
        ops.into_iter().filter_map(from).collect()
    };
    let mut bench = Bench::new(limits());
    bench.out.restore(0, 10, 5, 10, 1_000, &[]);
    assert_eq!(bench.offer(0, b"new", QoS::ExactlyOnce), Take::Queued);
    assert_eq!(trims(bench.ops()), [5]);
    assert!(bench.out.may_have_sent(4, QoS::ExactlyOnce));
    assert!(!bench.out.may_have_sent(4, QoS::AtLeastOnce), "its client loses nothing but the message");
    assert!(!bench.out.may_have_sent(5, QoS::ExactlyOnce));
    let mut bench = Bench::new(limits());
    bench.out.restore(0, 10, 10, 10, 1_000, &[]);
    assert_eq!(bench.offer(0, b"new", QoS::ExactlyOnce), Take::Dropped(DropReason::QueueFull));
    assert!(trims(bench.ops()).is_empty());
}

/// The page may have been read before the trim, and what is sent of it must be on disk.
#[test]
fn what_was_trimmed_while_it_was_being_read_is_not_sent() {
    let limits = Limits { offline_messages: 2, overflow: OverflowPolicy::DropOldest, ..Limits::default() };
    let mut bench = Bench::new(limits);
    bench.out.restore(0, 1, 0, 1, 100, &[]);
    bench.attach(0, 10);
    assert_eq!(bench.load(), Load::From(0));
    for payload in [b"1", b"2"] {
        assert_eq!(bench.offer(0, payload, QoS::AtLeastOnce), Take::Sent);
    }
    assert!(bench.ops().iter().any(|op| matches!(op, QueueOp::Trim { from: 1, .. })));
    let page = Page { entries: vec![stored(0, b"0"), stored(1, b"1"), stored(2, b"2")], next: 3, end: true };
    bench.with(0, |out, env| out.loaded(page, env));
    assert_eq!(packets(&mut bench.out, Protocol::V5).len(), 1, "only what was there before");
    assert_eq!(bench.load(), Load::From(1));
}

#[test]
fn reading_waits_while_the_memory_budget_is_used_up_and_gives_back_what_it_took() {
    let mut bench = Bench::new(Limits::default());
    bench.out.restore(0, 3, 0, 3, 3_000, &[]);
    bench.attach(0, 10);
    bench.purse.limit = 2_999;
    assert_eq!(bench.load(), Load::NoRoom);
    assert_eq!(bench.purse.used.get(), 0);
    bench.purse.limit = 3_000;
    assert_eq!(bench.load(), Load::From(0));
    assert_eq!((bench.load(), bench.purse.used.get()), (Load::Nothing, 3_000));
    // Whatever ends the reading.
    bench.with(0, |out, env| out.load_failed(env));
    assert_eq!((bench.purse.used.get(), bench.load()), (0, Load::From(0)));
    bench.with(0, |out, env| out.detach(env));
    assert_eq!(bench.purse.used.get(), 0);
    bench.attach(0, 10);
    assert_eq!(bench.load(), Load::From(0));
    let page = Page { entries: vec![stored(0, b"a")], next: 1, end: false };
    bench.with(0, |out, env| out.loaded(page, env));
    assert_eq!((bench.purse.used.get(), bench.load()), (0, Load::From(1)), "a is in flight");
    bench.with(0, |out, env| out.end(env));
    assert_eq!(bench.purse.used.get(), 0);
}
