//! A persistent session's outbound half: whatever the disk, the network and the process do, what was acknowledged to
//! its publisher arrives.

mod client;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use codec::Packet;
use gateway_core::{
    Commit, Durability, Journal, Message, Offer, Origin, Outcome, Protocol, QoS, QueueId, QueueOp, Receipt,
    Timestamp, Yielded,
    limits::{Limits, OverflowPolicy},
    units::ByteSize,
};

use store::{StoredSession, suite::state::session};

use super::disk::Disk;
use crate::{
    BacklogLoad, Env, LinkParams, Outbound, Reply, StoredQueue,
    fuzz::{TestBudget, append_reply},
};

const QUEUE: QueueId = QueueId(7);
/// The shared group of some deliveries, on disk and in memory.
const GROUP: u32 = 3;

/// QoS 1 at least once and QoS 2 exactly once for what the publisher was told is safe, in order; no packet identifier
/// used twice while the client holds it, the receive maximum respected, the budget given back, receipts told once, and
/// nothing left on disk.
#[test]
fn no_crash_loses_repeats_or_reorders_what_was_acknowledged() {
    for data in super::inputs(2_000, 400) {
        let mut world = World::new(data[0], data[1]);
        for operation in data[2..].chunks_exact(2) {
            world.step(operation[0], operation[1]);
        }
        world.finish();
    }
}

/// One message, offered once or, after a refusal or a crash, again.
struct Sent {
    qos: QoS,
    expires: Option<Timestamp>,
    durability: Durability,
    large: bool,
    /// Since its last offer: who waits for the disk, and whether the session took it.
    commit: Option<Arc<Commit>>,
    /// The publisher offers it again.
    again: bool,
    /// The publisher was told that it is safe, so it must arrive.
    promised: bool,
    received: u32,
    /// The queue was purged since it was offered last.
    purged: bool,
    /// Several processes had it, so that QoS 0 may come twice.
    crashed: bool,
}

struct World {
    outbound: Outbound,
    disk: Disk,
    limits: Limits,
    budget: TestBudget,
    now: Timestamp,
    protocol: Protocol,
    crashes: bool,
    messages: Vec<Sent>,
    attempts: u32,
    receipts: Vec<Arc<Receipt>>,
    /// A load was begun on this connection and is not answered yet.
    loading: bool,
    /// Number of connections that have ended: the session's record says it in the place of the time.
    connections: u64,
    /// Attempts of QoS 1 that the client has had.
    had: BTreeSet<u32>,
    /// The client: what it holds of QoS 2, by identifier; what is open on this connection; its answers.
    held: BTreeMap<u16, u32>,
    open: BTreeMap<u16, u32>,
    window: usize,
    answers: VecDeque<(u8, u16)>,
    order: [Vec<u32>; 3],
    /// Messages that another member has: index, whether it was promised, and its place here, which is to be removed.
    moved: Vec<(usize, bool, Option<u64>)>,
    /// Places of those that are still on disk here, because the store has refused to move them so far.
    staying: Vec<u64>,
    /// PUBREL packets that wait for the disk.
    steps: VecDeque<Reply>,
    /// PUBREC packets of this connection without their PUBREL, in order.
    unreleased: VecDeque<u16>,
}

impl World {
    fn new(kind: u8, sizes: u8) -> Self {
        let small = kind & 1 != 0;
        let limits = Limits {
            max_inflight: 8,
            offline_messages: if small { 6 } else { 1_000_000 },
            mailbox_messages: if sizes & 1 != 0 { 3 } else { 1_000_000 },
            offline_bytes: ByteSize(usize::MAX),
            mailbox_bytes: ByteSize(usize::MAX),
            offline_qos0: kind & 2 != 0,
            overflow: if kind & 4 != 0 { OverflowPolicy::DropOldest } else { OverflowPolicy::DropNewest },
            ..Limits::default()
        };
        Self {
            outbound: Outbound::new(),
            disk: Disk::default(),
            limits,
            budget: TestBudget::new(usize::MAX),
            now: Timestamp(1_000),
            connections: 0,
            had: BTreeSet::new(),
            protocol: Protocol::V5,
            crashes: kind & 8 != 0,
            messages: Vec::new(),
            attempts: 0,
            receipts: Vec::new(),
            loading: false,
            held: BTreeMap::new(),
            open: BTreeMap::new(),
            window: 0,
            answers: VecDeque::new(),
            order: Default::default(),
            moved: Vec::new(),
            staying: Vec::new(),
            steps: VecDeque::new(),
            unreleased: VecDeque::new(),
        }
    }

    fn with<R>(&mut self, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> R {
        let env = Env {
            limits: &self.limits,
            now: self.now,
            budget: &self.budget,
            disk: Some(crate::Disk { journal: &self.disk, queue: QUEUE }),
        };
        act(&mut self.outbound, &env)
    }

    fn step(&mut self, operation: u8, argument: u8) {
        let some = usize::from(argument);
        match operation % 32 {
            0..=7 => self.publish(argument),
            8..=10 => self.read(usize::MAX),
            11..=13 => self.answer(some),
            14 | 15 => self.lose(some % 4),
            16..=18 => self.connect(argument),
            19 | 20 => self.disk.commit(some % 8 + 1, false),
            21 | 22 => self.disk.commit_all(),
            23..=25 => self.loaded(some % 8 + 1),
            26 => self.expire(),
            27 => self.retry(),
            28 if argument < 64 => self.fail(some % 8 + 1),
            28 => self.move_staying(),
            29 if argument < 64 && self.crashes => self.crash(),
            30 if argument < 32 => self.fail_load(),
            30 if argument >= 224 => self.purge(),
            // The budget is used up for a while, by others.
            31 => self.budget.limit.set(if argument < 64 { 0 } else { usize::MAX }),
            _ => {
                self.outbound.tell_expired(self.now);
            }
        }
        self.load();
        self.go_on();
        self.now.0 += u64::from(argument & 7);
        for receipt in &self.receipts {
            let state = receipt.state();
            assert!(state.acked + state.rejected + state.dropped <= 1, "told twice: {state:?}");
        }
    }

    fn publish(&mut self, argument: u8) {
        let qos = QoS::from_bits(argument % 3).unwrap_or_default();
        let expires = match argument >> 5 {
            0 | 1 => Some(self.now.0 + 40),
            2 => Some(self.now.0 + 1_000_000),
            _ => None,
        };
        let durability = match argument / 3 % 8 {
            0 => Durability::Interval,
            1 => Durability::None,
            _ => Durability::Always,
        };
        let message = Sent {
            qos,
            expires: expires.map(Timestamp),
            durability,
            large: argument.is_multiple_of(11),
            commit: None,
            again: false,
            promised: false,
            received: 0,
            purged: false,
            crashed: false,
        };
        self.messages.push(message);
        self.offer(self.messages.len() - 1, argument);
    }

    fn offer(&mut self, number: usize, argument: u8) {
        let Sent { qos, expires, durability, large, .. } = self.messages[number];
        let mut payload = (number as u32).to_be_bytes().to_vec();
        payload.extend(self.attempts.to_be_bytes());
        payload.resize(if large { 25_000 } else { 8 }, 0);
        self.attempts += 1;
        let receipt = Arc::new(Receipt::default());
        let mut message = Message::new("a/b", &payload, self.now, Origin::BACKEND);
        (message.qos, message.expires, message.durability) = (qos, expires, durability);
        if argument & 1 != 0 {
            message.receipt = Some(&receipt);
        }
        let group = if argument.is_multiple_of(7) { GROUP } else { 0 };
        let offer = Offer {
            qos,
            retain: false,
            ids: &[],
            group,
            group_queue: QueueId(group.into()),
            queue_offline: group == 0,
        };
        let take = self.with(|outbound, env| outbound.offer(&message, offer, env));
        if take == Outcome::Sent && message.receipt.is_some() {
            self.receipts.push(Arc::clone(&receipt));
        }
        let commit = message.issued().cloned();
        if let Some(commit) = &commit {
            commit.done();
        }
        let taken = matches!(take, Outcome::Sent | Outcome::Queued);
        let sent = &mut self.messages[number];
        sent.again = false;
        sent.purged = false;
        sent.promised = taken && qos > QoS::AtMostOnce && commit.is_none();
        sent.commit = commit.filter(|_| taken);
    }

    /// Notes what the publisher has been told.
    fn go_on(&mut self) {
        for sent in &mut self.messages {
            match sent.commit.as_ref().and_then(|commit| commit.result()) {
                Some(Ok(())) => (sent.promised, sent.commit) = (true, None),
                Some(Err(_)) => (sent.again, sent.commit) = (true, None),
                None => {}
            }
        }
        while self.outbound.is_online()
            && let Some(reply) = self.steps.front()
            && reply.after.as_ref().is_none_or(|commit| commit.result().is_some())
        {
            append_reply(&mut self.outbound, reply);
            self.steps.pop_front();
        }
        for message in self.disk.take_trimmed() {
            self.messages[number(&message.payload)].promised = false;
        }
    }

    /// Purges the queue: waiting messages need no longer arrive; all else holds as before.
    fn purge(&mut self) {
        self.with(|outbound, env| outbound.purge(env));
        self.messages.iter_mut().for_each(|sent| sent.purged = true);
    }

    fn retry(&mut self) {
        for number in 0..self.messages.len() {
            if self.messages[number].again {
                self.offer(number, 2);
            }
        }
    }

    fn lose(&mut self, frames: usize) {
        if !self.outbound.is_online() {
            return;
        }
        self.read(frames);
        self.with(|outbound, env| outbound.detach(env));
        let yielded = self.with(|outbound, env| outbound.yield_shared(env));
        self.yielded(yielded);
        self.with(|outbound, env| outbound.note_sent(env));
        self.connections += 1;
        let since = Some(Timestamp(self.connections));
        self.disk.put_session(StoredSession { since, ..session(QUEUE, "subscriber") });
        self.disconnected();
    }

    fn disconnected(&mut self) {
        self.disk.cancel_load();
        self.loading = false;
        self.answers.clear();
        self.open.clear();
        self.steps.clear();
        self.unreleased.clear();
    }

    /// Another member has them, once that is committed.
    fn yielded(&mut self, yielded: Vec<Yielded>) {
        for Yielded { message, place, .. } in yielded {
            let number = number(&message.payload);
            let sent = &mut self.messages[number];
            assert!(sent.qos != QoS::ExactlyOnce || sent.received == 0, "QoS 2 that the client has");
            if let Some(receipt) = &message.receipt {
                receipt.update(|state| state.dropped += 1);
            }
            self.moved.push((number, sent.promised, place));
            sent.promised = false;
            sent.received += 1;
            self.staying.extend(place);
        }
        if !self.messages.len().is_multiple_of(3) {
            self.move_staying();
        }
    }

    /// Moves them off the disk here.
    fn move_staying(&mut self) {
        for seq in self.staying.drain(..) {
            self.disk.submit(QueueOp::Remove { queue: QUEUE, seq, unit: None });
        }
    }

    fn connect(&mut self, argument: u8) {
        if self.outbound.is_online() || self.outbound.unsafe_releases().iter().any(|t| t.result().is_none()) {
            return;
        }
        self.protocol = if argument & 1 == 0 { Protocol::V4 } else { Protocol::V5 };
        let link = LinkParams {
            protocol: self.protocol,
            receive_maximum: u16::from(argument >> 4) + 1,
            maximum_packet_size: u32::MAX,
            topic_alias_maximum: u16::from(argument & 2),
        };
        self.window = usize::from(link.receive_maximum);
        self.disk.put_session(session(QUEUE, "subscriber"));
        self.with(|outbound, env| outbound.attach(link, &[], env));
    }

    fn load(&mut self) {
        if !self.loading
            && let BacklogLoad::From(from, _) = self.with(|outbound, env| outbound.begin_load(env))
        {
            self.disk.load(QUEUE, from);
            self.loading = true;
        }
    }

    fn loaded(&mut self, most: usize) {
        if let Some(page) = self.disk.read(QUEUE, most, self.now) {
            self.loading = false;
            self.with(|outbound, env| outbound.loaded(page, env));
        }
    }

    fn fail_load(&mut self) {
        if std::mem::take(&mut self.loading) {
            self.disk.cancel_load();
            self.with(|outbound, env| outbound.load_failed(env));
        }
    }

    fn expire(&mut self) {
        let keeps = |_, place, qos| self.outbound.may_have_sent(place, qos);
        for (_, messages, bytes) in self.disk.expire(self.now, keeps) {
            self.outbound.note_expired(messages, bytes, self.now);
        }
    }

    /// The disk is full for a moment: what promised nothing is lost.
    fn fail(&mut self, operations: usize) {
        self.disk.commit(operations, true);
        self.break_weak_promises();
    }

    fn break_weak_promises(&mut self) {
        for sent in &mut self.messages {
            sent.promised &= sent.durability == Durability::Always;
        }
    }

    fn crash(&mut self) {
        self.go_on();
        let was_online = self.outbound.is_online();
        self.disk.crash();
        self.outbound = Outbound::new();
        self.budget = TestBudget::new(usize::MAX);
        self.receipts.clear();
        self.staying.clear();
        self.disconnected();
        for (number, promised, place) in self.moved.drain(..) {
            if place
                .is_some_and(|place| self.disk.contents(|disk| disk.entries.contains_key(&(QUEUE, place))))
            {
                self.messages[number].promised = promised;
                self.messages[number].received -= 1;
            }
        }
        let (mut left, received) = self.disk.summary(QUEUE);
        // As the start does: if a record says that there is no connection, the entries say what was sent. The record of a connection
        // that goes on with a session may be late.
        let recorded = self.disk.contents(|disk| disk.sessions.get(&QUEUE)?.since);
        if !was_online && recorded == Some(Timestamp(self.connections)) {
            left.begun = 0;
        }
        self.outbound.restore(&StoredQueue { received: &received, ..left });
        self.break_weak_promises();
        for sent in &mut self.messages {
            sent.crashed = true;
            // Not acknowledged, so it is offered again.
            sent.again |= sent.commit.take().is_some();
        }
        self.retry();
    }

    fn finish(mut self) {
        self.budget.limit.set(usize::MAX);
        self.lose(0);
        self.move_staying();
        self.disk.commit_all();
        self.go_on();
        self.retry();
        self.disk.commit_all();
        self.connect(0xF0);
        let mut idle = 0;
        while idle < 3 {
            let before = (self.order.clone(), self.outbound.sizes());
            for _ in 0..20 {
                self.disk.commit_all();
                self.go_on();
                self.load();
                self.disk.commit_all();
                self.loaded(100);
                self.read(usize::MAX);
                self.answer(0);
            }
            let quiet = before == (self.order.clone(), self.outbound.sizes())
                && self.answers.is_empty()
                && self.disk.is_idle();
            idle = if quiet { idle + 1 } else { 0 };
        }
        let (inflight, pending, bytes, _) = self.outbound.sizes();
        assert_eq!((inflight, pending, bytes), (0, 0, 0), "everything is delivered in the end");
        assert_eq!(self.budget.held.get(), 0, "budget not given back");
        let left: Vec<u64> =
            self.disk.contents(|disk| disk.entries.keys().map(|(_, place)| *place).collect());
        assert!(left.is_empty(), "left on disk: {left:?}");
        assert!(self.held.is_empty(), "the client waits for PUBREL of {:?}", self.held);
        for (number, sent) in self.messages.iter().enumerate() {
            let over = sent.expires.is_some_and(|at| at <= self.now);
            assert!(
                sent.received > 0 || !sent.promised || sent.purged || over,
                "message {number} lost: {:?}",
                sent.qos
            );
        }
        for order in &self.order {
            assert!(order.is_sorted(), "order broken: {order:?}");
        }
        for receipt in &self.receipts {
            let state = receipt.state();
            assert_eq!(state.acked + state.rejected + state.dropped, 1, "not told: {state:?}");
        }
        let distinct: BTreeSet<_> = self.order.iter().flatten().collect();
        assert_eq!(distinct.len(), self.order.iter().map(Vec::len).sum::<usize>());
    }
}

fn number(payload: &[u8]) -> usize {
    u32::from_be_bytes(payload[..4].try_into().expect("four bytes")) as usize
}
