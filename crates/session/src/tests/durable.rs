//! A persistent session with its disk, step by step.

use gateway_core::{Journal, JournalPage, Outcome, QueueOp, Receipt, StoredEntry};
use parking_lot::Mutex;

use super::*;

const QUEUE: QueueId = QueueId(3);

#[derive(Default)]
struct Recorder(Mutex<Vec<QueueOp>>);

impl Journal for Recorder {
    fn submit(&self, op: QueueOp) {
        self.0.lock().push(op);
    }
}

struct Bench {
    limits: Limits,
    journal: Recorder,
    budget: TestBudget,
    out: Outbound,
}

impl Bench {
    fn new(limits: Limits) -> Self {
        let budget = TestBudget::new(usize::MAX);
        Self { limits, journal: Recorder::default(), budget, out: Outbound::new() }
    }

    fn with<R>(&mut self, now: u64, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> R {
        let disk = Some(Disk { journal: &self.journal, queue: QUEUE });
        act(&mut self.out, &Env { limits: &self.limits, now: Timestamp(now), budget: &self.budget, disk })
    }

    fn attach(&mut self, now: u64, window: u16) {
        let link = LinkParams { receive_maximum: window, ..link(Protocol::V5) };
        self.with(now, |out, env| out.attach(link, &[], env));
    }

    fn offer(&mut self, now: u64, payload: &[u8], qos: QoS) -> Outcome {
        let mut message = message(payload, qos);
        message.received = Timestamp(now);
        self.with(now, |out, env| out.offer(&message, offer(qos), env))
    }

    fn ops(&mut self) -> Vec<QueueOp> {
        std::mem::take(&mut *self.journal.0.lock())
    }

    fn load(&mut self) -> BacklogLoad {
        self.with(0, |out, env| out.begin_load(env))
    }
}

/// A whole page is read.
fn from(place: u64) -> BacklogLoad {
    BacklogLoad::From(place, JournalPage::BYTES)
}

/// Message in a place as it is read back.
fn stored(place: u64, payload: &[u8]) -> StoredEntry<u32> {
    let message = Arc::clone(message(payload, QoS::AtLeastOnce).share());
    let (qos, retain, sent, group) = (QoS::AtLeastOnce, false, false, 0);
    StoredEntry { seq: place, qos, retain, sent, group, ids: None, message: Some(message) }
}

/// Places of an earlier process whose connection had ended.
fn left(first: u64, next: u64, exact: u64, messages: usize, bytes: u64) -> StoredQueue<'static> {
    StoredQueue { first, next, exact, messages, bytes, ..StoredQueue::default() }
}

fn aging() -> Limits {
    Limits { offline_age: Span(Duration::from_secs(10)), ..Limits::default() }
}

#[test]
fn what_waits_in_memory_when_the_connection_is_lost_expires() {
    let limits = aging();
    let mut outbound = Outbound::new();
    let window = LinkParams { receive_maximum: 1, ..link(Protocol::V5) };
    outbound.attach(window, &[], &env(&limits, 0));
    for payload in [b"a", b"b"] {
        outbound.offer(&message(payload, QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
    }
    outbound.detach(&env(&limits, 5_000));
    let mut later = message(b"c", QoS::AtLeastOnce);
    later.received = Timestamp(6_000);
    outbound.offer(&later, offer(QoS::AtLeastOnce), &env(&limits, 6_000));
    outbound.attach(window, &[], &env(&limits, 15_500));
    assert_eq!(outbound.handle_puback(1, 0, &env(&limits, 15_500)), Ok(true));
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
        QueueOp::Append(entry) => (entry.may_be_sent(), entry.expires.map(|at| at.0)),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        bench.ops().iter().map(expires).collect::<Vec<_>>(),
        [(true, None), (false, Some(12_000)), (false, Some(13_000)), (false, Some(15_000))]
    );
    // The message that was in flight is sent again; the rest may go.
    let kept = [0, 1, 2, 3].map(|place| bench.out.may_have_sent(place, QoS::AtLeastOnce));
    assert_eq!(kept, [true, false, false, false]);
}

#[test]
fn qos_2_possibly_sent_before_a_restart_is_neither_trimmed_nor_swept() {
    let limits =
        || Limits { offline_messages: 10, overflow: OverflowPolicy::DropOldest, ..Limits::default() };
    let trims = |ops: Vec<QueueOp>| -> Vec<u64> {
        let from = |op| if let QueueOp::Trim { from, .. } = op { Some(from) } else { None };
        ops.into_iter().filter_map(from).collect()
    };
    let mut bench = Bench::new(limits());
    bench.out.restore(&left(0, 10, 5, 10, 1_000));
    assert_eq!(bench.offer(0, b"new", QoS::ExactlyOnce), Outcome::Queued);
    assert_eq!(trims(bench.ops()), [5]);
    assert!(bench.out.may_have_sent(4, QoS::ExactlyOnce));
    assert!(!bench.out.may_have_sent(4, QoS::AtLeastOnce), "its client loses nothing but the message");
    assert!(!bench.out.may_have_sent(5, QoS::ExactlyOnce));
    let mut bench = Bench::new(limits());
    bench.out.restore(&left(0, 10, 10, 10, 1_000));
    assert_eq!(bench.offer(0, b"new", QoS::ExactlyOnce), Outcome::Dropped(DropReason::QueueFull));
    assert!(trims(bench.ops()).is_empty());
}

/// The page may have been read before the trim, but what is sent of it must still be on disk.
#[test]
fn what_was_trimmed_while_it_was_being_read_is_not_sent() {
    let limits = Limits { offline_messages: 2, overflow: OverflowPolicy::DropOldest, ..Limits::default() };
    let mut bench = Bench::new(limits);
    bench.out.restore(&left(0, 1, 0, 1, 100));
    bench.attach(0, 10);
    assert_eq!(bench.load(), from(0));
    for payload in [b"1", b"2"] {
        assert_eq!(bench.offer(0, payload, QoS::AtLeastOnce), Outcome::Sent);
    }
    assert!(bench.ops().iter().any(|op| matches!(op, QueueOp::Trim { from: 1, .. })));
    let page =
        JournalPage { entries: vec![stored(0, b"0"), stored(1, b"1"), stored(2, b"2")], next: 3, end: true };
    bench.with(0, |out, env| out.loaded(page, env));
    assert_eq!(packets(&mut bench.out, Protocol::V5).len(), 1, "only what was there before");
    assert_eq!(bench.load(), from(1));
}

#[test]
fn reading_gives_back_what_it_took_of_the_budget_however_it_ends() {
    let mut bench = Bench::new(Limits::default());
    bench.out.restore(&left(0, 3, 0, 3, 3_000));
    bench.attach(0, 10);
    bench.budget.limit.set(3_000);
    assert_eq!(bench.load(), from(0));
    assert_eq!((bench.load(), bench.budget.held.get()), (BacklogLoad::Nothing, 3_000));
    bench.with(0, |out, env| out.load_failed(env));
    assert_eq!((bench.budget.held.get(), bench.load()), (0, from(0)));
    bench.with(0, |out, env| out.detach(env));
    assert_eq!(bench.budget.held.get(), 0);
    bench.attach(0, 10);
    assert_eq!(bench.load(), from(0));
    let page = JournalPage { entries: vec![stored(0, b"a")], next: 1, end: false };
    bench.with(0, |out, env| out.loaded(page, env));
    assert_eq!((bench.budget.held.get(), bench.load()), (0, from(1)), "a is in flight");
    bench.with(0, |out, env| out.end(env));
    assert_eq!(bench.budget.held.get(), 0);
}

/// The failure: a device that returns while memory is short gets nothing, as a whole page does not fit.
#[test]
fn pages_shrink_to_one_message_while_memory_is_short_and_then_wait() {
    let mut bench = Bench::new(Limits::default());
    bench.out.restore(&left(0, 1000, 0, 1000, 10 << 20));
    bench.attach(0, 10);
    for (room, bytes) in
        [(1 << 20, JournalPage::BYTES), (100 << 10, 32 << 10), (10 << 10, 4 << 10), (0, 4 << 10)]
    {
        bench.budget.limit.set(room);
        assert_eq!(bench.load(), BacklogLoad::From(0, bytes), "{room} bytes left");
        bench.with(0, |out, env| out.load_failed(env));
    }
    bench.budget.limit.set(0);
    assert_eq!(bench.load(), BacklogLoad::From(0, 4 << 10));
    let page = JournalPage { entries: vec![stored(0, &[b'a'; 20 << 10])], next: 1, end: false };
    bench.with(0, |out, env| out.loaded(page, env));
    assert!(bench.budget.held.get() > 20 << 10, "in flight it counts until it is acknowledged");
    assert_eq!(bench.load(), BacklogLoad::NoRoom, "who holds something waits");
    assert_eq!(bench.with(0, |out, env| out.handle_puback(1, 0, env)), Ok(true));
    assert_eq!((bench.budget.held.get(), bench.load()), (0, BacklogLoad::From(1, 4 << 10)));
}

/// The failure: messages of a session on disk are dropped because memory is short.
#[test]
fn a_durable_session_that_may_hold_no_more_gets_its_messages_from_disk() {
    let mut bench = Bench::new(Limits::default());
    bench.attach(0, 1000);
    bench.budget.limit.set(64 << 10);
    for _ in 0..10 {
        assert_eq!(bench.offer(0, &[b'x'; 10_000], QoS::AtLeastOnce), Outcome::Sent);
    }
    assert!((32 << 10..=64 << 10).contains(&bench.budget.held.get()), "{}", bench.budget.held.get());
    assert_eq!(bench.out.dropped(), 0);
    let (inflight, waiting, ..) = bench.out.sizes();
    assert!(inflight < 10 && inflight + waiting == 10, "{inflight} in flight, {waiting} wait");
    bench.with(0, |out, env| out.detach(env));
    bench.with(0, |out, env| out.end(env));
    assert_eq!(bench.budget.held.get(), 0);
}

/// [MQTT-3.3.1-1] [MQTT-4.3.2-2] [MQTT-4.3.3-2]: what an earlier process sent has DUP and its packet identifier; what
/// only waited there does not. If that is unknown, it counts as sent.
#[test]
fn dup_is_set_for_what_an_earlier_process_sent_and_for_nothing_else() {
    for (begun, dups) in [(0, [true, false, false]), (6, [true, true, false])] {
        let mut bench = Bench::new(Limits::default());
        let entries = [(4, true), (5, false), (6, false)];
        let entries = entries.map(|(place, sent)| StoredEntry { sent, ..stored(place, b"m") }).into();
        bench.out.restore(&StoredQueue { begun, ..left(4, 7, 0, 3, 300) });
        bench.attach(0, 10);
        assert_eq!(bench.load(), from(4));
        bench.with(0, |out, env| out.loaded(JournalPage { entries, next: 7, end: true }, env));
        let expected = [5, 6, 7]
            .into_iter()
            .zip(dups)
            .map(|(id, dup)| format!("publish m id={id} qos=1 dup={dup} topic=t alias=None expiry=None"));
        assert_eq!(packets(&mut bench.out, Protocol::V5), expected.collect::<Vec<_>>());
    }
}

/// [MQTT-3.3.1-1]: the next process cannot ask this one.
#[test]
fn the_end_of_a_connection_leaves_on_disk_what_was_sent() {
    let noted = |bench: &mut Bench| {
        bench.with(0, |out, env| out.note_sent(env));
        bench.ops().iter().find_map(|op| match op {
            QueueOp::NoteSent { queue: QUEUE, below } => Some(*below),
            _ => None,
        })
    };
    let mut bench = Bench::new(Limits::default());
    bench.attach(0, 2);
    for payload in [b"0", b"1", b"2"] {
        bench.offer(0, payload, QoS::AtLeastOnce);
    }
    bench.with(0, |out, env| out.detach(env));
    assert_eq!(noted(&mut bench), None, "0 and 1 were written as sent, 2 only waits");
    bench.attach(0, 3);
    assert_eq!(bench.load(), from(2));
    let page = JournalPage { entries: vec![stored(2, b"2")], next: 3, end: true };
    bench.with(0, |out, env| out.loaded(page, env));
    assert_eq!(packets(&mut bench.out, Protocol::V5).len(), 3);
    bench.with(0, |out, env| out.detach(env));
    assert_eq!(noted(&mut bench), Some(3), "2 was written as waiting");
    assert_eq!(noted(&mut bench), None, "once");

    // A crash left doubt about places that were not read since.
    let mut bench = Bench::new(Limits::default());
    bench.out.restore(&StoredQueue { begun: 2, ..left(0, 3, 0, 3, 300) });
    assert_eq!(noted(&mut bench), Some(2));
    assert_eq!(noted(&mut bench), None);
}

/// (dropped, the last reason).
fn told(receipt: &Receipt) -> (u32, Option<DropReason>) {
    let state = receipt.state();
    (state.dropped, state.reason)
}

impl Bench {
    fn offer_awaited(&mut self, now: u64, expires: Option<u64>, receipt: &Arc<Receipt>) {
        let mut message = message(b"p", QoS::ExactlyOnce);
        (message.received, message.expires) = (Timestamp(now), expires.map(Timestamp));
        message.receipt = Some(receipt);
        assert_eq!(
            self.with(now, |out, env| out.offer(&message, offer(QoS::ExactlyOnce), env)),
            Outcome::Sent
        );
    }
}

#[test]
fn a_publisher_is_told_at_once_when_a_full_queue_drops_its_message() {
    let mut bench =
        Bench::new(Limits { offline_messages: 4, overflow: OverflowPolicy::DropOldest, ..Limits::default() });
    bench.attach(0, 1);
    let receipts: Vec<Arc<Receipt>> = (0..100).map(|_| Arc::default()).collect();
    for receipt in &receipts {
        bench.offer_awaited(0, None, receipt);
    }
    bench.ops();
    for receipt in &receipts[..96] {
        assert_eq!(told(receipt), (1, Some(DropReason::QueueFull)));
        assert_eq!(Arc::strong_count(receipt), 1, "nothing is kept for it");
    }
    for receipt in &receipts[96..] {
        assert_eq!(told(receipt), (0, None));
    }
}

#[test]
fn whoever_waits_for_what_expires_on_disk_is_told_and_so_is_nobody_else() {
    let mut bench = Bench::new(Limits::default());
    bench.attach(0, 1);
    let receipts: [Arc<Receipt>; 3] = Default::default();
    for (receipt, expires) in receipts.iter().zip([Some(5_000), None, Some(1_000)]) {
        bench.offer_awaited(0, expires, receipt);
    }
    bench.out.note_expired(1, 1, Timestamp(2_000));
    assert_eq!(receipts.each_ref().map(|receipt| told(receipt).0), [0, 0, 1]);
    assert_eq!(told(&receipts[2]).1, Some(DropReason::Expired));
}

#[test]
fn gaps_on_disk_do_not_let_waiting_publishers_pile_up() {
    let mut bench = Bench::new(Limits { offline_messages: 4, ..Limits::default() });
    bench.attach(0, 1);
    let receipt = Arc::<Receipt>::default();
    for _ in 0..10_000 {
        bench.offer_awaited(0, None, &receipt);
        // Some message, it is unknown which.
        bench.out.note_expired(1, 1, Timestamp(1));
        bench.ops();
    }
    assert!(Arc::strong_count(&receipt) < 1_100, "{} wait", Arc::strong_count(&receipt));
    assert_eq!(told(&receipt).0 as usize + Arc::strong_count(&receipt), 10_001, "each is told or waits");
}
