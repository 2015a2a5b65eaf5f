//! Random operations on the outbound half against a model client, in virtual time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use codec::Packet;
use gateway_core::{
    Message, Offer, Origin, Outcome, Protocol, QoS, QueueId, Timestamp, limits::Limits, units::ByteSize,
};

use super::{append_reply, budgets::TestBudget};
use crate::{Env, LinkParams, Outbound, Qos2Begin};

/// Interprets `data` as operations (deliver, read, acknowledge, lose the connection, come back, let time
/// pass) and checks after them: QoS 1 at least once and QoS 2 exactly once for everything taken, in order,
/// no packet id reused in flight, the receive maximum respected, the memory budget given back.
pub fn fuzz_session(data: &[u8]) {
    let mut world = World::new();
    let mut bytes = data.iter().copied();
    while let Some(operation) = bytes.next() {
        world.step(operation, bytes.next().unwrap_or(0));
    }
    world.finish();
}

struct World {
    outbound: Outbound,
    limits: Limits,
    budget: TestBudget,
    now: Timestamp,
    protocol: Protocol,
    /// Numbers taken by the session at QoS 1 and 2.
    taken: BTreeMap<u32, QoS>,
    next: u32,
    /// The client: numbers received (and how often), ids of QoS 2 between PUBLISH and PUBREL.
    received: BTreeMap<u32, u32>,
    order: [Vec<u32>; 3],
    awaiting_release: BTreeSet<u16>,
    unacknowledged: BTreeSet<u16>,
    answers: VecDeque<(u8, u16)>,
    inbound: BTreeSet<u16>,
}

impl World {
    fn new() -> Self {
        let limits = Limits {
            max_inflight: 8,
            offline_messages: 1_000_000,
            mailbox_messages: 1_000_000,
            offline_bytes: ByteSize(usize::MAX),
            mailbox_bytes: ByteSize(usize::MAX),
            ..Limits::default()
        };
        Self {
            outbound: Outbound::new(),
            limits,
            budget: TestBudget::new(usize::MAX),
            now: Timestamp(1_000),
            protocol: Protocol::V4,
            taken: BTreeMap::new(),
            next: 0,
            received: BTreeMap::new(),
            order: Default::default(),
            awaiting_release: BTreeSet::new(),
            unacknowledged: BTreeSet::new(),
            answers: VecDeque::new(),
            inbound: BTreeSet::new(),
        }
    }

    fn step(&mut self, operation: u8, argument: u8) {
        match operation % 10 {
            0..=3 => self.deliver(argument),
            4 | 5 => self.read(usize::MAX),
            6 => self.answer(usize::from(argument)),
            7 => self.lose(usize::from(argument)),
            8 => self.connect(argument),
            _ => self.inbound_qos2(argument),
        }
        self.now.0 += u64::from(argument);
    }

    fn deliver(&mut self, argument: u8) {
        let qos = QoS::from_bits(argument % 3).unwrap_or_default();
        let payload = self.next.to_be_bytes();
        let topic = ["a", "b/c", "long/topic/name"][usize::from(argument / 3) % 3];
        let mut message = Message::new(topic, &payload, self.now, Origin::BACKEND);
        message.qos = qos;
        let offer =
            Offer { qos, retain: false, ids: &[], group: 0, group_queue: QueueId::NONE, queue_offline: true };
        let env = Env { limits: &self.limits, now: self.now, budget: &self.budget, disk: None };
        let take = self.outbound.offer(&message, offer, &env);
        if qos != QoS::AtMostOnce {
            assert!(matches!(take, Outcome::Sent | Outcome::Queued), "nothing limits this queue");
            self.taken.insert(self.next, qos);
        }
        self.next += 1;
    }

    fn read(&mut self, frames: usize) {
        let bytes = self.outbound.take_out();
        self.outbound.note_written(bytes.len());
        let mut rest = &bytes[..];
        let mut left = frames;
        while left > 0
            && let Ok(Some(frame)) = codec::frame(rest, usize::MAX)
        {
            rest = &rest[frame.len..];
            left -= 1;
            match codec::decode(&frame, self.protocol).expect("what we encode can be decoded") {
                Packet::Publish(publish) => self.receive(&publish),
                Packet::PubRel(ack) => {
                    self.awaiting_release.remove(&ack.packet_id);
                    self.answers.push_back((7, ack.packet_id));
                }
                // Its identifier was free with PUBREL, and may be in use again.
                Packet::PubComp(_) => {}
                other => panic!("unexpected {other:?}"),
            }
        }
        let env = Env { limits: &self.limits, now: self.now, budget: &self.budget, disk: None };
        self.outbound.pump(&env);
    }

    fn receive(&mut self, publish: &codec::Publish<'_>) {
        let number = u32::from_be_bytes(publish.payload.try_into().expect("four bytes"));
        if publish.qos == QoS::AtMostOnce {
            self.order[0].push(number);
            return;
        }
        let fresh = self.unacknowledged.insert(publish.packet_id);
        assert!(fresh || publish.dup, "id {} reused in flight", publish.packet_id);
        let open = self.unacknowledged.union(&self.awaiting_release).count();
        assert!(open <= 8, "receive maximum exceeded: {open}");
        let known = publish.qos == QoS::ExactlyOnce && !self.awaiting_release.insert(publish.packet_id);
        if !known {
            let times = self.received.entry(number).or_default();
            *times += 1;
            if *times == 1 {
                self.order[publish.qos as usize].push(number);
            }
        }
        self.answers.push_back((if publish.qos == QoS::AtLeastOnce { 4 } else { 5 }, publish.packet_id));
    }

    /// Answers one of the open handshakes, not always the oldest.
    fn answer(&mut self, choice: usize) {
        if !self.outbound.is_online() || self.answers.is_empty() {
            return;
        }
        let Some((kind, id)) = self.answers.remove(choice % self.answers.len()) else { return };
        let env = Env { limits: &self.limits, now: self.now, budget: &self.budget, disk: None };
        match kind {
            4 => {
                self.unacknowledged.remove(&id);
                assert!(self.outbound.handle_puback(id, 0, &env).is_ok(), "a client that keeps to the rules");
            }
            5 => {
                self.unacknowledged.remove(&id);
                let reply =
                    self.outbound.handle_pubrec(id, 0, &env).expect("a client that keeps to the rules");
                append_reply(&mut self.outbound, &reply.expect("success is answered"));
            }
            _ => {
                assert!(self.outbound.handle_pubcomp(id, &env).is_ok(), "a client that keeps to the rules");
            }
        }
    }

    fn lose(&mut self, frames: usize) {
        if !self.outbound.is_online() {
            return;
        }
        self.read(frames % 4);
        let env = Env { limits: &self.limits, now: self.now, budget: &self.budget, disk: None };
        self.outbound.detach(&env);
        self.answers.clear();
        self.unacknowledged.clear();
    }

    fn connect(&mut self, argument: u8) {
        if self.outbound.is_online() {
            return;
        }
        self.protocol = if argument & 1 == 0 { Protocol::V4 } else { Protocol::V5 };
        let link = LinkParams {
            protocol: self.protocol,
            receive_maximum: u16::from(argument >> 4) + 1,
            maximum_packet_size: u32::MAX,
            topic_alias_maximum: u16::from(argument & 2),
        };
        let env = Env { limits: &self.limits, now: self.now, budget: &self.budget, disk: None };
        self.outbound.attach(link, &[], &env);
    }

    fn inbound_qos2(&mut self, argument: u8) {
        if !self.outbound.is_online() {
            return;
        }
        let id = u16::from(argument % 16) + 1;
        if argument & 0x40 == 0 {
            let begun = self.outbound.begin_received(id, 8);
            let expected = match (self.inbound.contains(&id), self.inbound.len()) {
                (true, _) => "duplicate",
                (false, 8..) => "exceeded",
                (false, _) => "new",
            };
            let begun = match begun {
                Qos2Begin::New => "new",
                Qos2Begin::Duplicate(_) => "duplicate",
                Qos2Begin::Exceeded => "exceeded",
            };
            assert_eq!(begun, expected);
            if begun == "new" {
                self.inbound.insert(id);
            }
        } else {
            let env = Env { limits: &self.limits, now: self.now, budget: &self.budget, disk: None };
            let reply = self.outbound.handle_pubrel(id, &env);
            append_reply(&mut self.outbound, &reply);
            self.inbound.remove(&id);
        }
    }

    fn finish(mut self) {
        self.lose(0);
        self.connect(0xF0);
        for _ in 0..self.taken.len() * 8 + 16 {
            self.read(usize::MAX);
            self.answer(0);
        }
        let (inflight, pending, ..) = self.outbound.sizes();
        assert_eq!(
            (inflight, pending, self.budget.held.get()),
            (0, 0, 0),
            "everything is delivered in the end"
        );
        for (number, qos) in &self.taken {
            let times = self.received.get(number).copied().unwrap_or(0);
            match qos {
                QoS::ExactlyOnce => assert_eq!(times, 1, "QoS 2 message {number}"),
                _ => assert!(times >= 1, "QoS 1 message {number} lost"),
            }
        }
        for order in &self.order {
            assert!(order.is_sorted(), "order broken: {order:?}");
        }
    }
}
