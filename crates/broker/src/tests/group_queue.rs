//! A shared group's queue on disk: what of it is in memory, in which order it is delivered, and what happens to it when
//! the store fails.

mod random;

use gateway_core::{Commit, CommitRefused, QueueId, QueueOp, Unit, Yielded};
use store::{SessionOp, StateStore as _, StoreHealth};

use super::{disk::Disk, *};
use crate::shared::SharedGroup;

const FILTER: &str = "$share/g/t";

/// A group with persistent members on a disk.
struct Scene {
    bench: Bench,
    disk: Disk,
    members: Vec<Device>,
    /// Number of nudges of each member when the test last asked.
    nudged: Vec<usize>,
    /// Messages and the commits of their acknowledgements.
    published: Vec<(String, QoS, Arc<Commit>)>,
    most_bytes: usize,
}

impl Scene {
    fn new(members: usize) -> Self {
        let disk = Disk::default();
        let mut bench = Bench::with_stores(Limits::default(), false, Some(disk.stores()));
        let members: Vec<Device> = (0..members).map(|number| bench.device(&format!("m{number}"))).collect();
        for member in &members {
            member.use_disk(&disk);
            bench.subscribe(member, FILTER);
        }
        let nudged = vec![0; members.len()];
        Self { bench, disk, members, nudged, published: Vec::new(), most_bytes: 0 }
    }

    /// Publishes as a connection does; QoS 2 in a unit with its packet identifier.
    fn publish(&mut self, qos: QoS) -> Published {
        let payload = self.published.len().to_string();
        let mut message = Message::new("t", payload.as_bytes(), self.bench.now, Origin::BACKEND);
        (message.qos, message.unit) = (qos, qos == QoS::ExactlyOnce);
        let disk = self.disk.clone();
        let unit = message.unit.then(|| Unit::new(&message, &*disk.0));
        let published = self.bench.broker.publish(&message, &mut self.bench.turn);
        if let Some(unit) = unit {
            unit.close(|commit| QueueOp::Receive { queue: QueueId(999), packet_id: 1, commit });
        }
        let commit = message.issued().cloned().unwrap_or_else(Commit::new);
        commit.done();
        self.published.push((payload.clone(), qos, commit));
        self.look();
        published
    }

    fn look(&mut self) {
        self.most_bytes = self.most_bytes.max(self.bench.broker.gauges().queued_bytes);
    }

    fn leave(&mut self, member: usize) {
        self.bench.close(&self.members[member].clone());
    }

    /// A member comes back, with room for this many messages.
    fn come(&mut self, member: usize, room: Option<usize>) {
        self.members[member].set_room(room);
        self.members[member] = self.bench.device(&format!("m{member}"));
        self.members[member].set_told(true);
        self.ask();
    }

    /// Members that were nudged ask, as their connections do, until nothing is left or they are full.
    fn ask(&mut self) {
        for (member, nudged) in self.members.iter().zip(&mut self.nudged) {
            let told = std::mem::replace(nudged, member.nudges()) < member.nudges();
            if !told && !member.is_told() {
                continue;
            }
            let mut before = usize::MAX;
            while member.session.is_online() && before != member.taken() {
                before = member.taken();
                let left = self.bench.broker.online(&member.session, self.bench.now, &mut self.bench.turn);
                member.set_told(left);
            }
        }
        self.look();
    }

    /// Commits, reads and asks until nothing more changes.
    fn settle(&mut self) {
        for _ in 0..200 {
            let busy = self.disk.commit();
            self.ask();
            if !busy && !self.disk.commit() {
                return;
            }
        }
        panic!("it goes on for ever");
    }

    fn group_queue(&self) -> usize {
        self.group().queue_len()
    }

    fn group(&self) -> Arc<SharedGroup> {
        self.bench.broker.inner.index.group_named(FILTER).expect("the group")
    }

    /// Returns the contents of the members' durable queues.
    fn stored(&self) -> Vec<String> {
        let queues = self.members.iter().map(|member| member.session.core().queue());
        queues.flat_map(|queue| self.disk.payloads(queue)).collect()
    }
}

fn numbers(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

#[test]
fn a_long_queue_is_not_in_memory_and_comes_back_in_order() {
    let mut scene = Scene::new(1);
    scene.leave(0);
    for number in 0..3000 {
        let qos = if number % 3 == 0 { QoS::ExactlyOnce } else { QoS::AtLeastOnce };
        assert_eq!(scene.publish(qos).queued, 1);
    }
    scene.settle();
    assert_eq!((scene.most_bytes, scene.disk.loads()), (0, 0), "nobody wants it");
    assert_eq!(scene.group_queue(), 3000);
    scene.come(0, None);
    scene.settle();
    assert_eq!(scene.members[0].payloads(), numbers(0..3000));
    assert_eq!(scene.stored(), numbers(0..3000));
    assert!(scene.most_bytes < 1000 * 200, "{} bytes for a window", scene.most_bytes);
    assert_eq!((scene.group_queue(), scene.bench.broker.gauges().queued_bytes), (0, 0));
}

#[test]
fn a_group_that_has_caught_up_is_served_without_reading() {
    let mut scene = Scene::new(1);
    scene.leave(0);
    for _ in 0..600 {
        scene.publish(QoS::AtLeastOnce);
    }
    scene.come(0, None);
    // New messages keep coming while the old ones are read.
    for _ in 0..20 {
        scene.publish(QoS::AtLeastOnce);
        scene.disk.commit();
        scene.publish(QoS::AtLeastOnce);
        scene.ask();
    }
    let loads = scene.disk.loads();
    for _ in 0..20 {
        scene.publish(QoS::AtLeastOnce);
    }
    assert_eq!(scene.members[0].payloads(), numbers(0..660));
    assert_eq!(scene.disk.loads(), loads, "it had caught up");
    scene.settle();
    assert_eq!(scene.group_queue(), 0);
}

#[test]
fn qos_2_is_in_no_members_hands_before_it_is_on_disk() {
    let mut scene = Scene::new(1);
    // Full: the message waits in the group's queue.
    scene.members[0].set_room(Some(0));
    scene.publish(QoS::ExactlyOnce);
    scene.members[0].set_room(None);
    scene.publish(QoS::AtLeastOnce);
    assert!(scene.members[0].payloads().is_empty());
    scene.disk.set_failing(true);
    scene.settle();
    scene.disk.set_failing(false);
    scene.bench.pass(1);
    scene.settle();
    assert_eq!(scene.published[0].2.result(), Some(Err(CommitRefused)));
    assert!(!scene.stored().contains(&"0".to_owned()), "it was refused");
}

#[test]
fn what_the_store_refused_to_move_is_offered_again() {
    for qos in [QoS::AtLeastOnce, QoS::ExactlyOnce] {
        let mut scene = Scene::new(1);
        scene.leave(0);
        for _ in 0..3 {
            scene.publish(qos);
        }
        scene.settle();
        scene.come(0, None);
        scene.disk.commit();
        scene.ask();
        // The messages are being moved to the member.
        assert_eq!(scene.members[0].payloads(), numbers(0..3));
        scene.disk.set_failing(true);
        scene.settle();
        assert_eq!(scene.disk.payloads(scene.group().stored_queue()), numbers(0..3));
        scene.bench.pass(1);
        scene.settle();
        assert_eq!(scene.members[0].payloads(), numbers(0..0), "while it fails nothing is tried");
        scene.disk.set_failing(false);
        scene.bench.pass(1);
        scene.settle();
        assert_eq!(scene.members[0].payloads(), numbers(0..3));
        assert_eq!(scene.stored(), numbers(0..3), "QoS 2 is read from there");
        assert_eq!(scene.group_queue(), 0);
        assert_eq!(scene.bench.broker.gauges().queued_bytes, 0);
    }
}

#[test]
fn what_a_member_gives_back_is_not_lost_if_the_store_refuses_it() {
    let mut scene = Scene::new(2);
    scene.publish(QoS::AtLeastOnce);
    scene.settle();
    let group = scene.group().id();
    let message = |payload: &str, qos| {
        let mut message = Message::new("t", payload.as_bytes(), Timestamp(0), Origin::BACKEND);
        message.qos = qos;
        Arc::clone(message.share())
    };
    let from = scene.members[0].session.core().queue();
    let give_back = |scene: &mut Scene, payload, qos, place| {
        let yielded = Yielded { group, message: message(payload, qos), place };
        let bench = &mut scene.bench;
        bench.broker.inner.redelivery(bench.now).redeliver(vec![yielded], from, &mut bench.turn.dirty);
    };
    scene.disk.set_failing(true);
    give_back(&mut scene, "no place", QoS::AtLeastOnce, None);
    give_back(&mut scene, "once more", QoS::AtLeastOnce, Some(7));
    give_back(&mut scene, "exactly once", QoS::ExactlyOnce, Some(8));
    scene.settle();
    assert!(scene.bench.broker.gauges().queued_bytes > 0);
    scene.disk.set_failing(false);
    scene.bench.pass(1);
    scene.settle();
    let mut stored = scene.stored();
    stored.sort();
    // The session continues, but does not reread what it gave away.
    assert_eq!(stored, ["0", "exactly once", "no place", "once more"]);
    // Nor does one that is over.
    scene.disk.set_failing(true);
    give_back(&mut scene, "of the gone", QoS::ExactlyOnce, Some(9));
    scene.bench.broker.disconnect("m0", 0, true, scene.bench.now, &mut scene.bench.turn);
    scene.settle_failing();
    scene.disk.set_failing(false);
    scene.bench.pass(1);
    scene.settle();
    assert!(scene.stored().contains(&"of the gone".to_owned()));
    assert_eq!(scene.bench.broker.gauges().queued_bytes, 0);
}

/// The failure: it found the queue empty just before the message came, and nobody tells it.
#[test]
fn a_member_that_joins_while_a_message_is_queued_gets_it_at_once() {
    let mut scene = Scene::new(2);
    let joining = scene.members[1].clone();
    scene.bench.unsubscribe(&joining, FILTER);
    scene.leave(0);
    let (broker, session, now) = (scene.bench.broker.clone(), Arc::clone(&joining.session), scene.bench.now);
    scene.members[0].when_asked(move || {
        let subscribed = broker.subscribe(&session, &request(FILTER), now).unwrap();
        assert!(!subscribed.group_queue, "it finds nothing");
    });
    scene.publish(QoS::AtLeastOnce);
    scene.settle();
    assert_eq!(joining.payloads(), numbers(0..1));
}

/// The failure: it could not begin a read because one was under way for a member that has gone, and nobody tells it
/// when that is given up.
#[test]
fn a_member_that_joins_while_a_page_is_given_up_is_told_to_ask_again() {
    let mut scene = Scene::new(2);
    let joining = scene.members[1].clone();
    scene.bench.unsubscribe(&joining, FILTER);
    scene.leave(0);
    scene.publish(QoS::AtLeastOnce);
    scene.settle();
    scene.come(0, None);
    scene.leave(0);
    let (broker, session, now) = (scene.bench.broker.clone(), Arc::clone(&joining.session), scene.bench.now);
    scene.members[0].when_asked(move || {
        broker.subscribe(&session, &request(FILTER), now).unwrap();
        let left = broker.online(&session, now, &mut Turn::default());
        assert!(!left, "it waits for what is being read");
    });
    scene.settle();
    assert_eq!(joining.payloads(), numbers(0..1));
}

/// The failure: a start removes queues without an owner, and the first messages of a group were acknowledged when its
/// queue was on disk but its name was not.
#[test]
fn a_groups_queue_has_its_name_before_a_member_has_subscribed() {
    let (disk, diary) = (Disk::prompt(), Arc::new(Mutex::new(Vec::new())));
    let written = Arc::clone(&diary);
    disk.watch_sessions(move |op| {
        written.lock().push(match op {
            SessionOp::Put(..) => "session",
            SessionOp::Subscribe(..) => "subscription",
            SessionOp::Group(..) => "group",
            _ => "other",
        });
    });
    let mut bench = Bench::with_stores(Limits::default(), false, Some(disk.stores()));
    for (name, expected) in
        [("a", vec!["session", "group", "subscription"]), ("b", vec!["session", "subscription"])]
    {
        let member = bench.device(name);
        let commit = Commit::new();
        let request = SubscribeRequest { commit: Some(&commit), ..request(FILTER) };
        bench.try_subscribe(&member, &request).unwrap();
        assert_eq!(std::mem::take(&mut *diary.lock()), expected);
    }
}

/// The failure: nobody ever removes it from the list of groups, nor from disk before a restart.
#[test]
fn a_group_that_ends_while_it_delivers_gets_no_durable_queue() {
    let mut scene = Scene::new(1);
    let group = scene.group();
    let (broker, session, now) =
        (scene.bench.broker.clone(), Arc::clone(&scene.members[0].session), scene.bench.now);
    scene.members[0].when_asked(move || assert!(broker.unsubscribe(&session, FILTER, now, None)));
    scene.publish(QoS::AtLeastOnce);
    assert_eq!(scene.members[0].payloads(), numbers(0..1));
    assert_eq!(group.stored_queue(), QueueId::NONE);
}

impl Scene {
    /// Commits and asks a few times, although commits may fail.
    fn settle_failing(&mut self) {
        for _ in 0..3 {
            self.disk.commit();
            self.ask();
        }
    }
}

#[test]
fn a_window_that_nobody_takes_from_leaves_memory_and_comes_once() {
    let mut scene = Scene::new(2);
    scene.leave(0);
    scene.leave(1);
    for _ in 0..1000 {
        scene.publish(QoS::ExactlyOnce);
    }
    scene.come(0, Some(10));
    scene.settle();
    assert!(scene.bench.broker.gauges().queued_bytes > 0, "a page was read");
    scene.leave(0);
    scene.settle();
    // One message was offered and not taken: others of that time might still be put back, so it stays.
    assert!(scene.bench.broker.gauges().queued_bytes <= 2 * 200);
    scene.come(1, None);
    scene.settle();
    assert_eq!(scene.members[0].payloads(), numbers(0..10));
    assert_eq!(scene.members[1].payloads(), numbers(10..1000));
    // A page that comes when everybody has left is not kept.
    scene.leave(1);
    for _ in 0..10 {
        scene.publish(QoS::AtLeastOnce);
    }
    scene.settle();
    scene.come(1, None);
    scene.leave(1);
    scene.settle();
    assert_eq!(scene.bench.broker.gauges().queued_bytes, 0);
    scene.come(0, None);
    scene.settle();
    assert_eq!(scene.members[0].payloads(), numbers(1000..1010));
}

#[test]
fn a_queue_that_cannot_be_read_is_tried_again_with_the_next_tick() {
    let mut scene = Scene::new(1);
    scene.leave(0);
    scene.publish(QoS::AtLeastOnce);
    scene.settle();
    scene.disk.set_unreadable(true);
    scene.come(0, None);
    scene.settle();
    let loads = scene.disk.loads();
    scene.publish(QoS::AtLeastOnce);
    scene.settle();
    assert_eq!(scene.disk.loads(), loads, "not with every message");
    scene.disk.set_unreadable(false);
    scene.bench.pass(1);
    scene.settle();
    assert_eq!(scene.members[0].payloads(), numbers(0..2));
}

#[test]
fn what_expires_on_disk_makes_room_in_the_queue() {
    let disk = Disk::default();
    let limits = Limits { group_queue_messages: 2, ..Limits::default() };
    let mut bench = Bench::with_stores(limits, false, Some(disk.stores()));
    let member = bench.device("m");
    member.use_disk(&disk);
    bench.subscribe(&member, FILTER);
    bench.close(&member);
    for queued in [1, 1, 0] {
        assert_eq!(bench.publish("t", "x", QoS::AtLeastOnce).queued, queued);
    }
    disk.commit();
    let queue = bench.broker.inner.index.group_named(FILTER).expect("the group").stored_queue();
    let cost = disk.expire_first(queue);
    bench.broker.queue_expiry().expired(queue, 1, cost);
    for queued in [1, 0] {
        assert_eq!(bench.publish("t", "y", QoS::AtLeastOnce).queued, queued);
    }
    disk.commit();
    assert_eq!(disk.payloads(queue), ["x", "y"]);
}

#[test]
fn in_non_broker_mode_what_devices_sent_before_is_not_read_back() {
    let disk = Disk::default();
    let mut bench = Bench::with_stores(Limits::default(), true, Some(disk.stores()));
    let filter = "$share/g/devices/m/#";
    let mut member = bench.device("m");
    member.use_disk(&disk);
    bench.subscribe(&member, filter);
    bench.close(&member);
    bench.publish("devices/m/a", "allowed", QoS::AtLeastOnce);
    disk.commit();
    // As broker mode had left it.
    let group = bench.broker.inner.index.group_named(filter).expect("the group");
    let client_id = ClientId::new("other");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
    let mut message = Message::new("devices/m/a", b"blocked", bench.now, origin);
    message.qos = QoS::AtLeastOnce;
    disk.append(group.stored_queue(), 1, &message, QoS::AtLeastOnce);
    disk.commit();
    let summary = QueueSummary { next: 2, messages: 2, ..QueueSummary::default() };
    group.restore(group.stored_queue(), Some(&summary));
    member = bench.device("m");
    disk.commit();
    bench.broker.online(&member.session, bench.now, &mut bench.turn);
    assert_eq!(member.payloads(), ["allowed"]);
    disk.commit();
    assert!(disk.payloads(group.stored_queue()).is_empty());
    assert_eq!(group.queue_len(), 0);
}
