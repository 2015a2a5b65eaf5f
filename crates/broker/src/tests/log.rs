//! Messages appended for consumer groups, and acknowledgements that wait for the log.

use std::{sync::atomic::AtomicU64, time::Duration};

use gateway_core::{GroupId, LogRecord, NoRoom, Partition, Timestamp};
use store::{
    BoxFuture, LogFull, LogRead, LogWatcher, Mark, PartitionBounds, PartitionedLog, ReadLimit, StoreError,
    StoreHealth,
};

use super::*;

/// Keeps what is appended; parts end when a test says so.
#[derive(Default)]
struct TestLog {
    records: Mutex<Vec<(Partition, LogRecord)>>,
    parts: Mutex<Vec<Arc<Commit>>>,
    full: AtomicBool,
    asked: AtomicUsize,
    /// Appends that have begun, each of which goes on once this can be locked.
    begun: AtomicUsize,
    hold: Mutex<()>,
    next: AtomicU64,
}

impl TestLog {
    /// Takes what was appended: payload, and the groups.
    fn taken(&self) -> Vec<(String, Vec<u32>)> {
        let records = std::mem::take(&mut *self.records.lock());
        let shown = records.into_iter().map(|(_, record)| {
            let payload = String::from_utf8_lossy(&record.message.payload).into_owned();
            (payload, record.groups.iter().map(|group| group.0).collect())
        });
        shown.collect()
    }

    fn write(&self) {
        for part in std::mem::take(&mut *self.parts.lock()) {
            part.done();
        }
    }
}

impl PartitionedLog for TestLog {
    fn append(
        &self,
        partition: Partition,
        groups: &Arc<[GroupId]>,
        message: &Arc<SharedMessage>,
        commit: Option<Arc<Commit>>,
    ) -> Result<(), LogFull> {
        if self.full.load(SeqCst) {
            return Err(LogFull);
        }
        self.begun.fetch_add(1, SeqCst);
        drop(self.hold.lock());
        assert!(message.receipt.is_none(), "nobody waits for a receipt of what is in the log");
        let offset = self.next.fetch_add(1, SeqCst);
        let record = LogRecord { offset, groups: Arc::clone(groups), message: Arc::clone(message) };
        self.records.lock().push((partition, record));
        self.parts.lock().extend(commit);
        Ok(())
    }
    fn admit(&self, _: &Message<'_>) -> Result<(), NoRoom> {
        self.asked.fetch_add(1, SeqCst);
        if self.full.load(SeqCst) { Err(NoRoom::Full) } else { Ok(()) }
    }
    fn submitted(&self) -> u64 {
        self.next.load(SeqCst)
    }
    fn ended(&self) -> u64 {
        self.next.load(SeqCst)
    }
    fn read(&self, _: Partition, _: u64, _: ReadLimit) -> LogRead {
        unreachable!("the broker never reads")
    }
    fn find(&self, _: Partition, _: Timestamp) -> BoxFuture<'static, Result<u64, StoreError>> {
        unreachable!("the broker never reads")
    }
    fn bounds(&self, _: Partition) -> PartitionBounds {
        PartitionBounds::default()
    }
    fn trim(&self, _: Partition, _: u64) {}
    fn marks(&self, _: GroupId) -> Vec<Mark> {
        Vec::new()
    }
    fn forget(&self, _: GroupId) {}
    fn bytes(&self) -> u64 {
        0
    }
    fn id(&self) -> u64 {
        1
    }
    fn watch(&self, _: Arc<dyn LogWatcher>) {}
    fn health(&self) -> StoreHealth {
        StoreHealth::Sound
    }
}

fn filter(topics: &[&str]) -> GroupFilter {
    GroupFilter {
        topics: topics.iter().map(|&topic| topic.to_owned()).collect(),
        selector: Selector::new(true),
        min_qos: QoS::AtMostOnce,
        events: EventKinds::default(),
    }
}

fn bench(non_broker: bool) -> (Bench, Arc<TestLog>) {
    let log = Arc::new(TestLog::default());
    let bench = Bench::with_log(Limits::default(), non_broker, None, Some(Arc::clone(&log) as _));
    (bench, log)
}

impl Bench {
    fn keep_for(&self, group: u32, filter: GroupFilter) {
        self.broker.keep_for(GroupId(group), Arc::new(filter));
    }

    fn replace(&self, old: u32, new: u32, filter: GroupFilter) {
        self.broker.replace_group(GroupId(old), GroupId(new), Arc::new(filter));
    }

    /// Publishes as a device; the commit that its acknowledgement waits for.
    fn offer(
        &mut self,
        from: &Device,
        topic: &str,
        payload: &str,
        qos: QoS,
    ) -> (Published, Option<Arc<Commit>>) {
        let client_id = from.session.core().client_id().clone();
        let slot = from.session.core().slot();
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot };
        let mut message = Message::new(topic, payload.as_bytes(), self.now, origin);
        message.qos = qos;
        let published = self.broker.publish(&message, &mut self.turn);
        (published, message.issued().cloned())
    }
}

#[test]
fn a_message_of_several_groups_is_appended_once_for_all_of_them() {
    let (mut bench, log) = bench(false);
    let device = bench.device("d");
    assert_eq!(bench.publish_from(&device, "a/1", "before", false).matched, 0);
    assert_eq!(bench.broker.account().held(MemoryKind::Log), 0);
    bench.keep_for(1, filter(&["a/+", "a/#"]));
    bench.keep_for(2, filter(&["a/#"]));
    bench.keep_for(3, filter(&["#"]));
    bench.keep_for(4, filter(&["b"]));
    let published = bench.publish_from(&device, "a/1", "one", false);
    assert_eq!((published.matched, published.queued), (1, 1));
    bench.publish_from(&device, "a/1/2", "two", false);
    bench.publish_from(&device, "c", "three", false);
    bench.publish_from(&device, "$internal/a", "none", false);
    let sets: Vec<_> = log.records.lock().iter().map(|(_, record)| Arc::clone(&record.groups)).collect();
    assert_eq!(
        log.taken(),
        [("one", vec![1, 2, 3]), ("two", vec![1, 2, 3]), ("three", vec![3])]
            .map(|(payload, groups)| (payload.to_owned(), groups))
    );
    assert!(Arc::ptr_eq(&sets[0], &sets[1]), "a set that repeats is not made again");
    assert!(bench.broker.keep_no_more_for(GroupId(3)) && !bench.broker.keep_no_more_for(GroupId(3)));
    bench.publish_from(&device, "c", "three", false);
    bench.publish_from(&device, "a/1", "four", false);
    assert_eq!(log.taken(), [("four".to_owned(), vec![1, 2])]);
    assert_eq!((bench.broker.gauges().streams, bench.broker.account().held(MemoryKind::Log)), (0, 1 << 20));
    for group in [1, 2, 4] {
        assert!(bench.broker.keep_no_more_for(GroupId(group)));
    }
    assert_eq!(bench.broker.gauges().subscriptions, 0, "no filter is left behind");
    assert_eq!(bench.broker.account().held(MemoryKind::Log), 0);
}

#[test]
fn devices_exclusions_origins_and_qos_are_asked_for_each_group() {
    let (mut bench, log) = bench(false);
    let (one, two) = (bench.device("one"), bench.device("two"));
    let select = |selector, min_qos| GroupFilter { selector, min_qos, ..filter(&["#"]) };
    bench.keep_for(1, select(Selector::new(true).devices(vec!["one".into()], vec![]), QoS::AtMostOnce));
    bench.keep_for(2, select(Selector::new(true).devices(vec![], vec!["t".into()]), QoS::AtMostOnce));
    bench.keep_for(3, select(Selector::new(true).exclude(vec!["two".into()], vec![]), QoS::AtMostOnce));
    bench.keep_for(4, select(Selector::new(true).exclude(vec![], vec!["x/#".into()]), QoS::AtMostOnce));
    bench.keep_for(5, select(Selector::new(false), QoS::AtMostOnce));
    bench.keep_for(6, select(Selector::new(true), QoS::ExactlyOnce));
    let groups_of = |bench: &mut Bench, from: Option<&Device>, topic, qos| {
        match from {
            Some(from) => drop(bench.offer(from, topic, "p", qos)),
            None => drop(bench.publish(topic, "p", qos)),
        }
        log.taken().into_iter().map(|(_, groups)| groups).collect::<Vec<_>>()
    };
    let first = QoS::AtLeastOnce;
    assert_eq!(groups_of(&mut bench, Some(&one), "a", first), [[1, 3, 4, 5]]);
    assert_eq!(groups_of(&mut bench, Some(&two), "a", first), [[2, 4, 5]]);
    assert_eq!(groups_of(&mut bench, Some(&one), "x/y", first), [[1, 3, 5]]);
    assert_eq!(groups_of(&mut bench, None, "a", first), [[5]]);
    assert_eq!(groups_of(&mut bench, Some(&two), "a", QoS::ExactlyOnce), [[2, 4, 5, 6]]);
    bench.broker.keep_no_more_for(GroupId(5));
    assert_eq!(groups_of(&mut bench, None, "a", first), [[0; 0]; 0], "a backend's message, for no group");
}

#[test]
fn an_acknowledgement_waits_for_the_log_and_qos_0_does_not() {
    let (mut bench, log) = bench(false);
    let device = bench.device("d");
    bench.keep_for(1, filter(&["#"]));
    let (_, commit) = bench.offer(&device, "t", "none", QoS::AtMostOnce);
    assert!(commit.is_none());
    let (_, commit) = bench.offer(&device, "t", "waits", QoS::AtLeastOnce);
    let commit = commit.expect("the log has a part");
    commit.done();
    assert_eq!(commit.result(), None);
    log.write();
    assert_eq!(commit.result(), Some(Ok(())));
    assert_eq!(log.taken().len(), 2);
}

/// The unit is closed only when the log has the message: then a duplicate of it is one.
#[test]
fn a_unit_closes_after_the_log_also_with_a_retained_message() {
    let (bench, log) = bench(false);
    bench.keep_for(1, filter(&["#"]));
    let client_id = ClientId::new("d");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
    let mut message = Message::new("t", b"p", bench.now, origin);
    (message.qos, message.unit) = (QoS::ExactlyOnce, true);
    // The retained store has done its part before the log gets one.
    message.plain_part().expect("a part").done();
    let mut turn = Turn::default();
    bench.broker.publish(&message, &mut turn);
    let before = Arc::clone(message.issued().and_then(|unit| unit.before()).expect("the log's part"));
    before.done();
    assert_eq!(before.result(), None);
    log.write();
    assert_eq!(before.result(), Some(Ok(())));
}

#[test]
fn what_the_log_does_not_take_is_refused_before_anybody_has_it() {
    let (mut bench, log) = bench(false);
    let (device, other) = (bench.device("d"), bench.device("other"));
    bench.subscribe(&other, "#");
    bench.keep_for(1, filter(&["kept/#"]));
    log.full.store(true, SeqCst);
    let (published, commit) = bench.offer(&device, "kept/1", "refused", QoS::AtLeastOnce);
    assert_eq!((published.refused, commit.is_none()), (Some(Shortage::Store), true));
    let (published, _) = bench.offer(&device, "elsewhere", "routed", QoS::AtLeastOnce);
    assert_eq!((published.refused, published.sent), (None, 1));
    let (published, _) = bench.offer(&device, "kept/1", "dropped", QoS::AtMostOnce);
    assert_eq!((published.sent, published.dropped), (1, 1));
    assert_eq!(other.payloads(), ["routed", "dropped"]);
    log.full.store(false, SeqCst);
    assert!(log.taken().is_empty());
}

#[test]
fn a_full_group_that_refuses_refuses_only_what_it_wants() {
    let (mut bench, log) = bench(false);
    let device = bench.device("d");
    bench.keep_for(1, filter(&["a"]));
    bench.keep_for(2, filter(&["#"]));
    bench.broker.set_full(GroupId(1), true);
    bench.broker.set_full(GroupId(1), true);
    assert_eq!(bench.offer(&device, "a", "refused", QoS::AtLeastOnce).0.refused, Some(Shortage::Store));
    assert_eq!(bench.offer(&device, "b", "taken", QoS::AtLeastOnce).0.refused, None);
    bench.offer(&device, "a", "for two", QoS::AtMostOnce);
    bench.broker.set_full(GroupId(1), false);
    bench.offer(&device, "a", "for both", QoS::AtLeastOnce);
    bench.broker.set_full(GroupId(1), true);
    // Another in its place has room, and the one that is gone refuses nothing, whatever is said of it.
    bench.replace(1, 3, filter(&["a"]));
    bench.broker.set_full(GroupId(1), true);
    assert_eq!(bench.offer(&device, "a", "for the new", QoS::AtLeastOnce).0.refused, None);
    assert_eq!(
        log.taken(),
        [("taken", vec![2]), ("for two", vec![2]), ("for both", vec![1, 2]), ("for the new", vec![2, 3])]
            .map(|(payload, groups)| (payload.to_owned(), groups))
    );
    bench.broker.set_full(GroupId(3), true);
    bench.broker.keep_no_more_for(GroupId(3));
    assert_eq!(bench.offer(&device, "a", "taken", QoS::AtLeastOnce).0.refused, None);
}

/// Before, a group that drops the oldest refused everybody's messages once the log was far over its bound.
#[test]
fn a_group_that_is_skipped_gets_nothing_and_refuses_nothing() {
    let (mut bench, log) = bench(false);
    let device = bench.device("d");
    bench.keep_for(1, filter(&["#"]));
    bench.keep_for(2, filter(&["b"]));
    bench.broker.set_skipped(GroupId(1), true);
    assert_eq!(bench.offer(&device, "a", "for nobody", QoS::AtLeastOnce).0.refused, None);
    assert_eq!(bench.offer(&device, "b", "for the other", QoS::AtLeastOnce).0.refused, None);
    bench.broker.set_skipped(GroupId(1), false);
    bench.offer(&device, "b", "for both", QoS::AtLeastOnce);
    assert_eq!(
        log.taken(),
        [("for the other", vec![2]), ("for both", vec![1, 2])]
            .map(|(payload, groups)| (payload.to_owned(), groups))
    );
}

#[test]
fn groups_get_what_devices_may_not_and_no_replay() {
    let (mut bench, log) = bench(true);
    let device = bench.device("d");
    bench.keep_for(1, filter(&["devices/#"]));
    bench.publish_from(&device, "devices/d/x", "withheld from devices", false);
    assert_eq!(log.taken().len(), 1);
    let (mut bench, log) = self::bench(false);
    let device = bench.device("d");
    bench.publish_from(&device, "r", "retained", true);
    bench.keep_for(1, filter(&["#"]));
    assert!(bench.subscribe(&device, "r").replay.is_some());
    let will = will("w", "will", 0);
    let leaver = bench.connect("leaver", Connect { will: Some(will), ..Connect::default() });
    let message = Message::new("d", b"direct", bench.now, Origin::BACKEND);
    bench.broker.publish_to_device("d", &message, Offline::Queue, &mut bench.turn);
    bench.replace(1, 2, GroupFilter { selector: Selector::new(false), ..filter(&["#"]) });
    bench.broker.publish_to_device("d", &message, Offline::Queue, &mut bench.turn);
    bench.close(&leaver);
    assert_eq!(
        log.taken(),
        [("will".to_owned(), vec![2])],
        "neither what is retained nor what has an addressee"
    );
}

/// A group that comes in the place of another while somebody publishes by a match made before loses nothing that both filters
/// match.
#[test]
fn a_match_made_before_a_group_was_replaced_finds_its_successor() {
    let (bench, log) = bench(false);
    bench.keep_for(1, filter(&["a/#"]));
    let target = bench.broker.inner.log.clone().expect("a log");
    bench.replace(1, 2, filter(&["a/b"]));
    let offer = Offer {
        qos: QoS::ExactlyOnce,
        retain: false,
        ids: &[1],
        group: 0,
        group_queue: gateway_core::QueueId::NONE,
        queue_offline: true,
    };
    let client_id = ClientId::new("d");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
    for topic in ["a/b", "a/c"] {
        target.deliver(&Message::new(topic, topic.as_bytes(), bench.now, origin), offer);
    }
    assert_eq!(log.taken(), [("a/b".to_owned(), vec![2])]);
}

/// The failure: a message that was marked for the old group came into the log behind all that was there when the change returned,
/// and nobody looked for it any more.
#[test]
fn what_was_marked_for_a_group_is_submitted_when_it_is_replaced() {
    let (mut bench, log) = bench(false);
    bench.keep_for(1, filter(&["a"]));
    let device = bench.device("d");
    let broker = bench.broker.clone();
    let (changed, early) = (AtomicBool::new(false), AtomicBool::new(false));
    let begins = || {
        while log.begun.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
    };
    let is_held = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let hold = log.hold.lock();
            is_held.wait();
            begins();
            std::thread::sleep(Duration::from_millis(200));
            early.store(changed.load(SeqCst), SeqCst);
            drop(hold);
        });
        is_held.wait();
        scope.spawn(|| {
            begins();
            broker.replace_group(GroupId(1), GroupId(2), Arc::new(filter(&["b"])));
            changed.store(true, SeqCst);
        });
        bench.publish_from(&device, "a", "one", false);
    });
    assert!(!early.load(SeqCst), "it returned before");
    assert_eq!(log.taken(), [("one".to_owned(), vec![1])]);
}

#[test]
fn many_groups_of_one_message_are_each_there_once() {
    let (mut bench, log) = bench(false);
    let device = bench.device("d");
    for group in (1..=40).rev() {
        bench.keep_for(group, filter(&["#", "a/+", "a/b"]));
    }
    bench.publish_from(&device, "a/b", "p", false);
    assert_eq!(log.taken(), [("p".to_owned(), (1..=40).collect::<Vec<_>>())]);
}

#[test]
fn without_groups_the_log_is_asked_nothing() {
    let (mut bench, log) = bench(false);
    let device = bench.device("d");
    bench.publish_from(&device, "t", "p", true);
    assert_eq!(log.asked.load(SeqCst), 0);
}

/// Events are made only while a group wants them, and from the moment that it does.
#[test]
fn groups_get_the_events_that_they_want_of_the_devices_that_they_want() {
    let (mut bench, log) = bench(false);
    let broker = bench.broker.clone();
    let encode = |event: Event| format!("{} {}", event.kind.name(), event.client_id).into_bytes();
    let mut appending = std::pin::pin!(broker.append_events(encode));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut go_on = || assert!(appending.as_mut().poll(&mut context).is_pending());
    go_on();
    bench.device("before");
    let select = |kinds: &[&str], devices: Vec<String>| GroupFilter {
        topics: Vec::new(),
        selector: Selector::new(true).devices(devices, Vec::new()),
        events: kinds.iter().fold(EventKinds::default(), |kinds, name| kinds.with(name)),
        ..filter(&[])
    };
    let one = select(&["connected", "disconnected"], vec!["one".into()]);
    bench.keep_for(1, one);
    bench.keep_for(2, select(&["disconnected", "nothing"], vec![]));
    let (first, second) = (bench.device("one"), bench.device("two"));
    bench.close(&first);
    bench.close(&second);
    go_on();
    let records = log.records.lock().clone();
    assert!(records.iter().all(|(_, record)| is_event(record)));
    assert_eq!(records[0].0, Partition::of(Some("one"), ""), "with the device's messages");
    let again = select(&["connected"], vec!["one".into()]);
    assert!(again.matches(&records[0].1.message.borrow()) && !again.matches(&records[1].1.message.borrow()));
    assert_eq!(
        log.taken(),
        [("connected one", vec![1]), ("disconnected one", vec![1, 2]), ("disconnected two", vec![2])]
            .map(|(payload, groups)| (payload.to_owned(), groups))
    );
    for group in [1, 2] {
        bench.broker.keep_no_more_for(GroupId(group));
    }
    bench.device("one");
    go_on();
    assert_eq!(bench.broker.inner.events.receiver_count(), 0, "nobody listens any more");
    bench.keep_for(1, select(&["connected"], vec![]));
    bench.device("three");
    go_on();
    assert_eq!(log.taken(), [("connected three".to_owned(), vec![1])]);
}
