//! QoS 2 messages that a client of a persistent session publishes: routed exactly once, whatever the disk, the network
//! and the process do.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use gateway_core::{
    Commit, Journal, Message, Origin, Protocol, QoS, QueueEntry, QueueId, QueueOp, Timestamp, limits::Limits,
};

use super::disk::Disk;
use crate::{Env, LinkParams, Outbound, Qos2Begin, StoredQueue, fuzz::Unlimited};

/// The publisher's queue and that of a persistent session that gets all it publishes.
const PUBLISHER: QueueId = QueueId(1);
const SUBSCRIBER: QueueId = QueueId(2);
/// Few, so that each is used often.
const IDS: u16 = 4;

#[test]
fn no_crash_routes_an_acknowledged_qos_2_message_twice_or_never() {
    for data in super::inputs(2_000, 300) {
        let mut world = World::default();
        for operation in data.chunks_exact(2) {
            world.step(operation[0], usize::from(operation[1]));
        }
        world.finish();
    }
}

/// A packet of the client that is not answered.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Publish(u32),
    Release,
}

/// Answer of the connection, sent in order and once the message is safe.
enum ModelAnswer {
    PubRec(u16, Option<Arc<Commit>>),
    PubComp(u16, Option<Arc<Commit>>),
}

#[derive(Default)]
struct World {
    outbound: Outbound,
    disk: Disk,
    limits: Limits,
    online: bool,
    /// The client: what is open by identifier, and the packets it is still to send again on this connection.
    open: BTreeMap<u16, Step>,
    unsent: VecDeque<u16>,
    answers: VecDeque<ModelAnswer>,
    next: u32,
    /// Messages that were refused, to be published as new ones.
    refused: Vec<u32>,
    acknowledged: Vec<u32>,
    places: u64,
}

impl World {
    fn with<R>(&mut self, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> R {
        let env = Env {
            limits: &self.limits,
            now: Timestamp(0),
            budget: &Unlimited,
            disk: Some(crate::Disk { journal: &self.disk, queue: PUBLISHER }),
        };
        act(&mut self.outbound, &env)
    }

    fn step(&mut self, operation: u8, argument: usize) {
        match operation % 16 {
            0..=3 => self.publish(argument),
            4..=6 => self.send(),
            7 | 8 => self.answer(argument % 3 + 1),
            9 => self.lose(),
            10 | 11 => self.connect(),
            12 => self.disk.commit(argument % 4 + 1, false),
            13 => self.disk.commit_all(),
            14 if argument < 64 => self.disk.commit(argument % 8 + 1, true),
            15 if argument < 64 => self.crash(),
            _ => {}
        }
    }

    /// The client begins with a message, a refused one first.
    fn publish(&mut self, argument: usize) {
        let id = (argument as u16 % IDS) + 1;
        if !self.online || self.open.contains_key(&id) {
            return;
        }
        let number = self.refused.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next
        });
        self.open.insert(id, Step::Publish(number));
        self.unsent.push_back(id);
    }

    /// The next packet of the client arrives.
    fn send(&mut self) {
        if !self.online {
            return;
        }
        let Some(id) = self.unsent.pop_front() else { return };
        match self.open[&id] {
            Step::Publish(number) => match self.outbound.begin_received(id, 8) {
                Qos2Begin::New => self.route(id, number),
                Qos2Begin::Duplicate(commit) => self.answers.push_back(ModelAnswer::PubRec(id, commit)),
                Qos2Begin::Exceeded => panic!("the client has {IDS} identifiers"),
            },
            Step::Release => {
                let reply = self.with(|outbound, env| outbound.handle_pubrel(id, env));
                self.answers.push_back(ModelAnswer::PubComp(id, reply.after));
            }
        }
    }

    fn route(&mut self, id: u16, number: u32) {
        let payload = number.to_be_bytes();
        let mut message = Message::new("t", &payload, Timestamp(0), Origin::BACKEND);
        (message.qos, message.unit) = (QoS::ExactlyOnce, true);
        let commit = Arc::clone(message.commit().expect("its acknowledgement promises that it is kept"));
        let shared = Arc::clone(message.share());
        let part = Some(Arc::clone(&commit));
        let entry = QueueEntry::new(SUBSCRIBER, self.places, shared, QoS::ExactlyOnce, part);
        self.places += 1;
        self.disk.submit(QueueOp::Append(Arc::new(entry)));
        commit.add();
        let receive = QueueOp::Receive { queue: PUBLISHER, packet_id: id, commit: Arc::clone(&commit) };
        self.disk.submit(receive);
        assert!(self.outbound.keep_received(id, Arc::clone(&commit)));
        commit.done();
        self.answers.push_back(ModelAnswer::PubRec(id, Some(commit)));
    }

    /// The client gets answers that are safe.
    fn answer(&mut self, most: usize) {
        for _ in 0..most {
            let Some(front) = self.answers.front() else { return };
            let (ModelAnswer::PubRec(_, commit) | ModelAnswer::PubComp(_, commit)) = front;
            let result = commit.as_ref().map_or(Some(Ok(())), |commit| commit.result());
            let Some(result) = result else { return };
            match self.answers.pop_front() {
                Some(ModelAnswer::PubRec(id, _)) => {
                    let Some(Step::Publish(number)) = self.open.get(&id).copied() else {
                        panic!("PUBREC of {id} that the client does not wait for");
                    };
                    if result.is_err() {
                        self.outbound.abort_received(id);
                        self.open.remove(&id);
                        self.refused.push(number);
                        continue;
                    }
                    self.acknowledged.push(number);
                    self.open.insert(id, Step::Release);
                    self.unsent.push_back(id);
                }
                Some(ModelAnswer::PubComp(id, _)) => {
                    assert!(self.open.remove(&id) == Some(Step::Release));
                }
                None => return,
            }
        }
    }

    fn lose(&mut self) {
        if self.online {
            self.with(|outbound, env| outbound.detach(env));
            self.disconnected();
        }
    }

    fn disconnected(&mut self) {
        self.online = false;
        self.answers.clear();
        self.unsent.clear();
    }

    /// The client sends everything again that was not answered [MQTT-4.4.0-1].
    fn connect(&mut self) {
        if self.online {
            return;
        }
        let link = LinkParams {
            protocol: Protocol::V5,
            receive_maximum: 8,
            maximum_packet_size: u32::MAX,
            topic_alias_maximum: 0,
        };
        self.with(|outbound, env| outbound.attach(link, &[], env));
        self.online = true;
        self.unsent.extend(self.open.keys());
    }

    fn crash(&mut self) {
        self.disk.crash();
        self.outbound = Outbound::new();
        self.disconnected();
        let (left, received) = self.disk.summary(PUBLISHER);
        self.outbound.restore(&StoredQueue { received: &received, ..left });
        self.places = self.disk.summary(SUBSCRIBER).0.next;
    }

    fn finish(mut self) {
        while !self.open.is_empty() {
            self.connect();
            self.disk.commit_all();
            self.send();
            self.answer(1);
        }
        self.disk.commit_all();
        let mut routed: Vec<_> = self.disk.contents(|state| {
            assert!(state.received.is_empty(), "for ever on disk: {:?}", state.received);
            let payloads = state.entries.values().flat_map(|(entry, _)| &entry.message);
            payloads.map(|message| message.payload.to_vec()).collect()
        });
        let mut expected: Vec<_> =
            self.acknowledged.iter().map(|number| number.to_be_bytes().to_vec()).collect();
        routed.sort_unstable();
        expected.sort_unstable();
        assert_eq!(routed, expected);
    }
}
