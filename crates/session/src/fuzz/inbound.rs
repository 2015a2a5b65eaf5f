//! Random packets of a client into the inbound half, against a model of what the session must remember: which QoS 2
//! messages it has, which topics aliases stand for, and how far each handshake towards the client has come.

use std::collections::{BTreeMap, BTreeSet};

use codec::{
    Ack, AckKind, AuthPacket, Disconnect, Packet, Publish, PublishFrame, Subscribe, SubscribeFilter,
    Unsubscribe, reason,
};
use gateway_core::{
    Effort, Message, Offer, Origin, Protocol, QoS, QueueId, Timestamp, limits::Limits, units::ByteSize,
};

use super::budgets::Unlimited;
use crate::{
    Effect, Enhanced, Env, Inbound, InboundOwner, Incoming, LinkParams, Outbound, Permits, PublishPermit,
    Violation,
};

/// Interprets `data` as packets of a client, deliveries to it, losses of its connection and time between them. Each packet
/// must have exactly the effect that the model expects; what follows from a violation is a new connection.
///
/// # Panics
/// When the session does something else: a fault of the session.
pub fn fuzz_inbound(data: &[u8]) {
    let [kind, data @ ..] = data else { return };
    let mut world = World::new(*kind);
    for operation in data.chunks_exact(3) {
        world.step(operation[0], operation[1], operation[2]);
    }
    junk(data, world.protocol);
}

/// Any bytes: they end the connection or mean something, and nothing worse.
fn junk(data: &[u8], protocol: Protocol) {
    let mut world = World::new(protocol as u8);
    let mut rest = data;
    let mut incoming = Incoming::default();
    while let Ok(Some(frame)) = codec::frame(rest, 1 << 20) {
        rest = &rest[frame.len..];
        let mut effort = Effort::default();
        let (inbound, mut owner) = world.split();
        let mut permits = FirstLevel { undecided: false };
        if inbound.handle(&frame, &mut incoming, &mut effort, &mut permits, &mut owner).is_err() {
            return;
        }
        assert!(effort.spent() > 0, "a packet for nothing");
    }
}

/// Few identifiers, topics and aliases, so that each is used often.
const IDS: u8 = 5;
const TOPICS: [&str; 7] = ["", "a", "b/c", "$SYS/no", "forbidden/x", "forgotten/x", "too/many/levels/for/us"];
const ALIASES: u16 = 2;
/// Bytes that aliases may have, each with the overhead: not enough for two long topics.
const ALIAS_BYTES: usize = 4 * ALIAS_PLACE + 2 * ALIAS_OVERHEAD + 20;
/// One in the table, which has places for alias 0 to the highest that was set, rounded up to a power of two.
const ALIAS_PLACE: usize = 16;
const ALIAS_OVERHEAD: usize = 64;
const RECEIVE_MAXIMUM: u16 = 3;

/// Stage of a handshake towards the client: the packet that must come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Puback,
    Pubrec,
    Pubcomp,
}

/// Outcome that a packet should have.
#[derive(Debug, PartialEq)]
enum Expected {
    Done,
    Route(String),
    Reply(AckKind, u16, u8),
    Filters(usize),
    Authenticate(bool),
    Pong,
    Disconnect(u8, Option<u32>),
    Violation(u8),
}

/// The connection as the session sees it.
struct Connection<'a> {
    outbound: &'a mut Outbound,
    enhanced: &'a mut Option<Enhanced>,
    limits: &'a Limits,
    now: Timestamp,
}

/// Rights of the client by the first level of a topic.
struct FirstLevel {
    /// True while the client's right to publish is not known.
    undecided: bool,
}

impl Permits for FirstLevel {
    fn may_publish(&mut self, topic: &str, _: &Publish<'_>) -> PublishPermit {
        match topic.split_once('/') {
            _ if self.undecided => PublishPermit::Later,
            Some(("forbidden", _)) => PublishPermit::Closed,
            Some(("forgotten", _)) => PublishPermit::Dropped,
            _ => PublishPermit::Granted,
        }
    }
}

impl InboundOwner for Connection<'_> {
    type End = Violation;

    fn limits(&self) -> &Limits {
        self.limits
    }

    fn now(&self) -> Timestamp {
        self.now
    }

    fn enhanced(&mut self) -> Option<&mut Enhanced> {
        self.enhanced.as_mut()
    }

    fn hold_aliases(&mut self, bytes: usize) -> Result<(), Violation> {
        if bytes <= ALIAS_BYTES { Ok(()) } else { Err(Violation(reason::QUOTA_EXCEEDED)) }
    }

    fn outbound<R>(&mut self, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> Result<R, Violation> {
        let env = Env { limits: self.limits, now: self.now, budget: &Unlimited, disk: None };
        Ok(act(self.outbound, &env))
    }
}

/// The side whose turn it is in an authentication.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Turn {
    #[default]
    Ours,
    Theirs,
    Nobodys,
}

#[derive(Default)]
struct Authentication {
    turn: Turn,
    packets: usize,
    minute: Timestamp,
    begun: usize,
}

struct World {
    protocol: Protocol,
    expiry: u32,
    limits: Limits,
    now: Timestamp,
    inbound: Inbound,
    outbound: Outbound,
    enhanced: Option<Enhanced>,
    authentication: Authentication,
    /// QoS 2 messages that the session has and the client has not released.
    received: BTreeSet<u16>,
    aliases: BTreeMap<u16, &'static str>,
    towards: BTreeMap<u16, Phase>,
}

impl World {
    fn new(kind: u8) -> Self {
        let protocol = [Protocol::V3, Protocol::V4, Protocol::V5][usize::from(kind) % 3];
        let expiry = u32::from(kind / 3 % 2) * 60;
        let limits = Limits {
            receive_maximum: RECEIVE_MAXIMUM,
            topic_alias_maximum: ALIASES,
            max_topic_levels: 4,
            max_qos: if kind & 0x40 == 0 { 2 } else { 1 },
            retain_available: kind & 0x80 == 0,
            max_filters_per_packet: 3,
            max_inflight: 8,
            mailbox_messages: 1_000_000,
            mailbox_bytes: ByteSize(usize::MAX),
            ..Limits::default()
        };
        let mut world = Self {
            protocol,
            expiry,
            limits,
            now: Timestamp(1_000),
            inbound: Inbound::new(protocol, expiry),
            outbound: Outbound::new(),
            enhanced: (kind & 0x20 != 0).then(|| Enhanced::connecting("M")),
            authentication: Authentication::default(),
            received: BTreeSet::new(),
            aliases: BTreeMap::new(),
            towards: BTreeMap::new(),
        };
        world.attach();
        world
    }

    fn split(&mut self) -> (&mut Inbound, Connection<'_>) {
        let Self { inbound, outbound, enhanced, limits, now, .. } = self;
        (inbound, Connection { outbound, enhanced, limits, now: *now })
    }

    fn step(&mut self, operation: u8, a: u8, b: u8) {
        match operation % 16 {
            0..=4 => self.publish(a, b),
            5 | 6 => self.release(a),
            7 | 8 => self.deliver(a),
            9..=11 => self.acknowledge(a, b),
            12 => self.filters(a),
            13 if a & 1 != 0 => self.authenticate(a >> 1, b),
            13 => self.expect(&Packet::PingReq, &Expected::Pong),
            14 => self.disconnect(a),
            _ => self.reconnect(),
        }
        self.now.0 += u64::from(a);
    }

    /// Lets the session handle a packet, which must come to what is expected.
    fn expect(&mut self, packet: &Packet<'_>, expected: &Expected) {
        let mut bytes = Vec::new();
        codec::encode(packet, self.protocol, &mut bytes);
        self.expect_bytes(&bytes, expected);
    }

    fn expect_bytes(&mut self, bytes: &[u8], expected: &Expected) {
        let frame = codec::frame(bytes, usize::MAX).expect("a frame of ours").expect("a whole one");
        let mut incoming = Incoming::default();
        let mut effort = Effort::default();
        let limits = self.limits.clone();
        let (inbound, mut owner) = self.split();
        // Every PUBLISH comes twice to where it is allowed, as it does when somebody has to be asked first.
        let mut permits = FirstLevel { undecided: true };
        let mut handled = inbound.handle(&frame, &mut incoming, &mut effort, &mut permits, &mut owner);
        if matches!(handled, Ok(Effect::Later)) {
            permits.undecided = false;
            handled = inbound.handle(&frame, &mut incoming, &mut effort, &mut permits, &mut owner);
        }
        let effect = match handled {
            Err(Violation(code)) => Expected::Violation(code),
            Ok(Effect::Done) => Expected::Done,
            Ok(Effect::Later) => unreachable!("it is known"),
            Ok(Effect::Publish) => Expected::Route(incoming.topic().to_owned()),
            Ok(Effect::Reply(reply)) => {
                assert!(reply.after.is_none(), "without a disk nothing waits for it");
                Expected::Reply(reply.kind, reply.packet_id, reply.code)
            }
            Ok(Effect::Subscribe(mut filters)) => {
                let mut count = 0;
                while let Some(filter) = filters.next_filter() {
                    assert!(filter.qos as u8 <= limits.max_qos, "more is granted than there is");
                    filters.answer(filter.qos as u8);
                    count += 1;
                }
                assert!(filters.is_done());
                assert_eq!(filters.into_answer().codes.len(), count);
                Expected::Filters(count)
            }
            Ok(Effect::Unsubscribe(mut filters)) => {
                Expected::Filters(std::iter::from_fn(|| filters.next_filter()).count())
            }
            Ok(Effect::Authenticate(presented)) => Expected::Authenticate(presented.begins),
            Ok(Effect::Pong) => Expected::Pong,
            Ok(Effect::Disconnect { code, expiry }) => Expected::Disconnect(code, expiry),
        };
        assert_eq!(&effect, expected, "{:?} in {bytes:x?}", self.protocol);
        if matches!(effect, Expected::Violation(_) | Expected::Disconnect(..)) {
            self.reconnect();
        }
    }

    fn publish(&mut self, a: u8, b: u8) {
        let qos = QoS::from_bits(a % 3).unwrap_or_default();
        let packet_id = if qos == QoS::AtMostOnce { 0 } else { u16::from(a / 3 % IDS) + 1 };
        let alias = (self.protocol.is_v5() && b & 0x10 != 0).then(|| u16::from(b >> 5) % (ALIASES + 2));
        let alias = alias.filter(|alias| *alias > 0);
        let mut topic = TOPICS[usize::from(b % 8) % TOPICS.len()];
        if topic.is_empty() && alias.is_none() {
            topic = TOPICS[1];
        }
        let publish = Publish {
            dup: false,
            qos,
            retain: a & 0x80 != 0,
            topic,
            packet_id,
            payload: &[],
            alias,
            expiry: None,
            ids: Vec::new(),
            properties: None,
        };
        let mut bytes = Vec::new();
        PublishFrame::of(&publish, self.protocol).encode(&mut bytes);
        let expected = self.expect_publish(&publish);
        self.expect_bytes(&bytes, &expected);
        if let Expected::Route(_) = expected {
            self.conclude(qos, packet_id, b & 0x08 != 0);
        }
    }

    fn expect_publish(&mut self, publish: &Publish<'static>) -> Expected {
        let &Publish { qos, packet_id, .. } = publish;
        if qos as u8 > self.limits.max_qos {
            return Expected::Violation(reason::QOS_NOT_SUPPORTED);
        }
        if publish.retain && !self.limits.retain_available {
            return Expected::Violation(reason::RETAIN_NOT_SUPPORTED);
        }
        let mut topic = publish.topic;
        if let Some(alias) = publish.alias {
            if alias > ALIASES {
                return Expected::Violation(reason::TOPIC_ALIAS_INVALID);
            }
            match self.aliases.get(&alias) {
                None if topic.is_empty() => return Expected::Violation(reason::PROTOCOL_ERROR),
                Some(known) if topic.is_empty() => topic = known,
                _ => drop(self.aliases.insert(alias, topic)),
            }
            let topics: usize = self.aliases.values().map(|topic| topic.len() + ALIAS_OVERHEAD).sum();
            let places = self
                .aliases
                .last_key_value()
                .map_or(0, |(highest, _)| (usize::from(*highest) + 1).next_power_of_two());
            if topics + places * ALIAS_PLACE > ALIAS_BYTES {
                return Expected::Violation(reason::QUOTA_EXCEEDED);
            }
        }
        if topic.starts_with("$SYS/") || topic.split('/').count() > self.limits.max_topic_levels {
            return self.expect_refusal(qos, packet_id, reason::TOPIC_NAME_INVALID);
        }
        if topic.starts_with("forbidden/") || topic.starts_with("forgotten/") {
            let kind = if qos == QoS::ExactlyOnce { AckKind::PubRec } else { AckKind::PubAck };
            if qos == QoS::ExactlyOnce && self.received.contains(&packet_id) {
                return Expected::Reply(kind, packet_id, reason::SUCCESS);
            }
            return match (self.protocol, qos) {
                (Protocol::V5, QoS::AtLeastOnce | QoS::ExactlyOnce) => {
                    Expected::Reply(kind, packet_id, reason::NOT_AUTHORIZED)
                }
                _ if topic.starts_with("forbidden/") => Expected::Violation(reason::NOT_AUTHORIZED),
                (_, QoS::AtMostOnce) => Expected::Done,
                _ => Expected::Reply(kind, packet_id, reason::SUCCESS),
            };
        }
        if qos == QoS::ExactlyOnce {
            if self.received.contains(&packet_id) {
                return Expected::Reply(AckKind::PubRec, packet_id, reason::SUCCESS);
            }
            if self.received.len() >= usize::from(RECEIVE_MAXIMUM) {
                return Expected::Violation(reason::RECEIVE_MAXIMUM_EXCEEDED);
            }
            self.received.insert(packet_id);
        }
        Expected::Route(topic.to_owned())
    }

    fn expect_refusal(&self, qos: QoS, packet_id: u16, code: u8) -> Expected {
        let kind = if qos == QoS::ExactlyOnce { AckKind::PubRec } else { AckKind::PubAck };
        match (self.protocol, qos) {
            (Protocol::V5, QoS::AtLeastOnce | QoS::ExactlyOnce) => Expected::Reply(kind, packet_id, code),
            (Protocol::V3, QoS::AtMostOnce) => Expected::Done,
            (Protocol::V3, _) => Expected::Reply(kind, packet_id, reason::SUCCESS),
            _ => Expected::Violation(code),
        }
    }

    /// Acts as a broker on a routed message: takes it, or refuses it as a whole.
    fn conclude(&mut self, qos: QoS, packet_id: u16, refuse: bool) {
        if !refuse {
            let reply = self.inbound.routed(qos, packet_id, u32::from(packet_id) % 2, None);
            assert_eq!(reply.is_some(), qos != QoS::AtMostOnce);
            return;
        }
        if qos == QoS::ExactlyOnce {
            self.outbound.abort_received(packet_id);
            self.received.remove(&packet_id);
        }
        let reply = self.inbound.refused(qos, packet_id, reason::QUOTA_EXCEEDED);
        if reply.is_err() {
            self.reconnect();
        }
    }

    fn release(&mut self, a: u8) {
        let packet_id = u16::from(a % IDS) + 1;
        let known = self.received.remove(&packet_id);
        let code = if known { reason::SUCCESS } else { reason::PACKET_IDENTIFIER_NOT_FOUND };
        let answer = Expected::Reply(AckKind::PubComp, packet_id, code);
        self.expect(&Packet::PubRel(ack(packet_id, 0)), &answer);
    }

    fn deliver(&mut self, a: u8) {
        let mut message = Message::new("to/it", &[], self.now, Origin::BACKEND);
        message.qos = QoS::from_bits(a % 3).unwrap_or_default();
        let offer = Offer {
            qos: message.qos,
            retain: false,
            ids: &[],
            group: 0,
            group_queue: QueueId::NONE,
            queue_offline: true,
        };
        let env = Env { limits: &self.limits, now: self.now, budget: &Unlimited, disk: None };
        let _ = self.outbound.offer(&message, offer, &env);
        self.expect_sent();
    }

    /// Any acknowledgement of any identifier, whether it is its turn or not.
    fn acknowledge(&mut self, a: u8, b: u8) {
        let packet_id = u16::from(b % 12) + 1;
        let failed = self.protocol.is_v5() && a & 0x80 != 0;
        let code = if failed { reason::QUOTA_EXCEEDED } else { reason::SUCCESS };
        let phase = self.towards.get(&packet_id).copied();
        let wrong = Expected::Violation(reason::PROTOCOL_ERROR);
        match a % 3 {
            0 => {
                let expected = match phase {
                    Some(Phase::Puback) | None => Expected::Done,
                    _ => wrong,
                };
                if phase == Some(Phase::Puback) {
                    self.towards.remove(&packet_id);
                }
                self.puback(packet_id, code, &expected);
                self.expect_sent();
            }
            1 => {
                if phase == Some(Phase::Puback) {
                    return self.expect(&Packet::PubRec(ack(packet_id, code)), &wrong);
                }
                let release = |code| Expected::Reply(AckKind::PubRel, packet_id, code);
                let answer = match phase {
                    _ if failed => Expected::Done,
                    None => release(reason::PACKET_IDENTIFIER_NOT_FOUND),
                    Some(_) => release(reason::SUCCESS),
                };
                if phase == Some(Phase::Pubrec) {
                    self.towards.remove(&packet_id);
                    if !failed {
                        self.towards.insert(packet_id, Phase::Pubcomp);
                    }
                }
                self.expect(&Packet::PubRec(ack(packet_id, code)), &answer);
                self.expect_sent();
            }
            _ => {
                let expected = match phase {
                    Some(Phase::Pubcomp) | None => Expected::Done,
                    _ => wrong,
                };
                if phase == Some(Phase::Pubcomp) {
                    self.towards.remove(&packet_id);
                }
                self.expect(&Packet::PubComp(ack(packet_id, 0)), &expected);
                self.expect_sent();
            }
        }
    }

    /// By the short way where the packet is plain, which must come to the same.
    fn puback(&mut self, packet_id: u16, code: u8, expected: &Expected) {
        let mut bytes = Vec::new();
        codec::encode(&Packet::PubAck(ack(packet_id, code)), self.protocol, &mut bytes);
        if codec::plain_pubacks(&bytes).next().is_none() || packet_id.is_multiple_of(2) {
            return self.expect_bytes(&bytes, expected);
        }
        let mut effort = Effort::default();
        let (inbound, mut owner) = self.split();
        let handled = inbound.handle_plain_pubacks(&bytes, &mut effort, &mut owner);
        let expected =
            if *expected == Expected::Done { Ok(1) } else { Err(Violation(reason::PROTOCOL_ERROR)) };
        assert_eq!(handled, expected);
        if expected.is_err() {
            self.reconnect();
        }
    }

    /// Reads what is sent to the client: messages, which are noted, and no acknowledgement, since each must go after those
    /// before it.
    fn expect_sent(&mut self) {
        for packet in self.sent() {
            match packet {
                Sent::Publish(packet_id, phase, _) => {
                    let before = self.towards.insert(packet_id, phase);
                    assert_eq!(before, None, "identifier {packet_id} is used twice");
                }
                Sent::Ack(kind, packet_id) => {
                    panic!("{kind:?} of {packet_id} overtakes the answers that wait")
                }
            }
        }
    }

    /// Takes the packets in the out-buffer, but QoS 0.
    fn sent(&mut self) -> Vec<Sent> {
        let bytes = self.outbound.take_out();
        self.outbound.note_written(0);
        let mut rest = &bytes[..];
        let mut sent = Vec::new();
        while let Some(frame) = codec::frame(rest, usize::MAX).expect("what we encode is framed") {
            rest = &rest[frame.len..];
            match codec::decode(&frame, self.protocol).expect("what we encode can be decoded") {
                Packet::Publish(publish) => {
                    let phase = match publish.qos {
                        QoS::AtMostOnce => continue,
                        QoS::AtLeastOnce => Phase::Puback,
                        QoS::ExactlyOnce => Phase::Pubrec,
                    };
                    sent.push(Sent::Publish(publish.packet_id, phase, publish.dup));
                }
                Packet::PubRel(ack) => sent.push(Sent::Ack(AckKind::PubRel, ack.packet_id)),
                Packet::PubComp(ack) => sent.push(Sent::Ack(AckKind::PubComp, ack.packet_id)),
                other => panic!("unexpected {other:?}"),
            }
        }
        sent
    }

    fn filters(&mut self, a: u8) {
        let count = usize::from(a % 5);
        let id = (self.protocol.is_v5() && a & 0x40 != 0).then_some(7);
        let expected = match count {
            0 => return,
            1..=3 => Expected::Filters(count),
            _ => Expected::Violation(reason::QUOTA_EXCEEDED),
        };
        let name = |n: usize| format!("filter/{n}/+");
        if a & 0x80 == 0 {
            let filters = (0..count).map(|n| SubscribeFilter {
                filter: name(n),
                qos: QoS::ExactlyOnce,
                no_local: false,
                retain_as_published: false,
                retain_handling: 0,
            });
            let subscribe = Subscribe { packet_id: 9, id, user: Vec::new(), filters: filters.collect() };
            self.expect(&Packet::Subscribe(subscribe), &expected);
        } else {
            let filters = (0..count).map(name).collect();
            let unsubscribe = Unsubscribe { packet_id: 9, user: Vec::new(), filters };
            self.expect(&Packet::Unsubscribe(unsubscribe), &expected);
        }
    }

    /// AUTH of the client, or what the connection says to the last one.
    fn authenticate(&mut self, a: u8, b: u8) {
        let Some(enhanced) = self.enhanced.as_mut().filter(|_| self.protocol.is_v5()) else {
            if self.protocol.is_v5() {
                let auth = AuthPacket { code: 0x19, method: Some("M".to_owned()), ..AuthPacket::default() };
                self.expect(&Packet::Auth(Box::new(auth)), &Expected::Violation(reason::PROTOCOL_ERROR));
            }
            return;
        };
        let model = &mut self.authentication;
        if a & 1 != 0 && model.turn == Turn::Ours {
            if b & 1 != 0 {
                enhanced.ask(Default::default());
                model.turn = Turn::Theirs;
            } else {
                enhanced.conclude(None);
                model.turn = Turn::Nobodys;
            }
            assert_eq!(enhanced.is_under_way(), model.turn == Turn::Theirs);
            return;
        }
        let code = [0x18, 0x19, 0x18, 0x19, 0x00][usize::from(b >> 1) % 5];
        let method = if b & 0x80 == 0 { "M" } else { "N" };
        let expected = match (method, code, model.turn) {
            ("M", 0x18, Turn::Theirs) => Expected::Authenticate(false),
            ("M", 0x19, Turn::Nobodys) => Expected::Authenticate(true),
            _ => Expected::Violation(reason::PROTOCOL_ERROR),
        };
        let expected = match expected {
            Expected::Authenticate(true) => {
                if model.begun == 0 || self.now.0 >= model.minute.0 + 60_000 {
                    (model.minute, model.begun) = (self.now, 0);
                }
                model.begun += 1;
                model.packets = 1;
                if model.begun > 10 { Expected::Violation(reason::QUOTA_EXCEEDED) } else { expected }
            }
            Expected::Authenticate(false) => {
                model.packets += 1;
                if model.packets > 8 { Expected::Violation(reason::QUOTA_EXCEEDED) } else { expected }
            }
            expected => expected,
        };
        model.turn = Turn::Ours;
        let auth = AuthPacket { code, method: Some(method.to_owned()), ..AuthPacket::default() };
        self.expect(&Packet::Auth(Box::new(auth)), &expected);
    }

    fn disconnect(&mut self, a: u8) {
        let session_expiry = (self.protocol.is_v5() && a & 1 != 0).then_some(u32::from(a >> 1));
        let expected = match session_expiry {
            Some(1..) if self.expiry == 0 => Expected::Violation(reason::PROTOCOL_ERROR),
            expiry => Expected::Disconnect(0, expiry),
        };
        self.expect(
            &Packet::Disconnect(Box::new(Disconnect { session_expiry, ..Disconnect::default() })),
            &expected,
        );
    }

    /// The connection is gone, and the client comes back: aliases are forgotten, QoS 2 identifiers are not, and what was in
    /// flight comes again.
    fn reconnect(&mut self) {
        let env = Env { limits: &self.limits, now: self.now, budget: &Unlimited, disk: None };
        self.outbound.detach(&env);
        self.inbound = Inbound::new(self.protocol, self.expiry);
        self.enhanced = self.enhanced.is_some().then(|| Enhanced::connecting("M"));
        self.authentication = Authentication::default();
        self.aliases.clear();
        self.attach();
        let known = std::mem::take(&mut self.towards);
        for packet in self.sent() {
            let (packet_id, phase) = match packet {
                Sent::Publish(packet_id, phase, dup) => {
                    assert_eq!(dup, known.contains_key(&packet_id), "DUP of {packet_id}");
                    (packet_id, phase)
                }
                Sent::Ack(kind, packet_id) => {
                    assert_eq!(kind, AckKind::PubRel);
                    (packet_id, Phase::Pubcomp)
                }
            };
            assert_eq!(self.towards.insert(packet_id, phase), None, "identifier {packet_id} is used twice");
        }
        for (packet_id, phase) in known {
            assert_eq!(self.towards.get(&packet_id), Some(&phase), "in flight, and it did not come again");
        }
    }

    fn attach(&mut self) {
        let link = LinkParams {
            protocol: self.protocol,
            receive_maximum: u16::MAX,
            maximum_packet_size: u32::MAX,
            topic_alias_maximum: 0,
        };
        let env = Env { limits: &self.limits, now: self.now, budget: &Unlimited, disk: None };
        self.outbound.attach(link, &[], &env);
    }
}

/// A packet for the client.
enum Sent {
    Publish(u16, Phase, bool),
    Ack(AckKind, u16),
}

fn ack(packet_id: u16, code: u8) -> Ack {
    Ack { packet_id, code, reason_string: None, user: Vec::new() }
}

#[test]
fn every_packet_has_the_effect_that_the_model_expects() {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    for _ in 0..4_000 {
        let mut data = Vec::new();
        for _ in 0..301 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            data.push((state >> 32) as u8);
        }
        fuzz_inbound(&data);
    }
}
