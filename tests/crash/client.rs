//! One MQTT client that never blocks: it keeps its state (a fold over its history) across connections, sends again
//! what was not acknowledged, and knows a QoS 2 message again by its packet identifier.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use codec::{Ack, Connect, ConnectWill, Packet, Publish, Subscribe, SubscribeFilter, Unsubscribe};
use gateway_core::{Protocol, QoS};

use super::{
    clock,
    history::{CONTROL_IDS, Durable, Event, Msg, MsgId, Record, Stage},
    support::local,
};

const MILLI: u64 = 1_000_000;
/// A connection that is not accepted for so long is given up: the server may have died under it.
const CONNACK: u64 = 10_000 * MILLI;

/// Profile of a client.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    pub(crate) name: String,
    pub(crate) protocol: Protocol,
    /// Its session outlives connections.
    pub(crate) persistent: bool,
    /// v5 Receive Maximum.
    pub(crate) window: Option<u16>,
    /// Milliseconds until it answers a message.
    pub(crate) lag: u64,
    pub(crate) filters: Vec<(String, QoS)>,
    /// True if the client throws its session away now and then (v5).
    pub(crate) renews: bool,
    /// Every connection has a will.
    pub(crate) will: Will,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Will {
    No,
    /// Due as soon as the connection ends.
    Prompt,
    /// Due only if the client stays away for longer than any test (v5).
    Delayed,
}

/// Seconds.
const WILL_DELAY: u32 = 3000;

struct Connection {
    stream: TcpStream,
    /// Before CONNACK nothing else is sent.
    open: bool,
    clean: bool,
    since: u64,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Answers and the time to send them, in order.
    answers: VecDeque<(u64, Packet<'static>)>,
    /// SUBSCRIBE and UNSUBSCRIBE under way, by packet identifier.
    asked: Vec<(u16, Vec<String>, bool)>,
    next_control: u16,
}

pub(crate) struct Peer {
    pub(crate) number: usize,
    pub(crate) profile: Profile,
    pub(crate) state: Durable,
    /// True if the client wants a connection.
    pub(crate) online: bool,
    /// CONNECT throws the session away until one is accepted: an attempt alone may have come to nothing.
    pub(crate) renew: bool,
    connection: Option<Connection>,
    /// Connections that a newer one has taken over: nobody reads them, the server ends them.
    forgotten: Vec<TcpStream>,
    retry: u64,
}

fn ack(packet_id: u16) -> Ack {
    Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }
}

fn publish<'a>(msg: &'a Msg, payload: &'a [u8], packet_id: u16, dup: bool) -> Packet<'a> {
    Packet::Publish(Publish {
        dup,
        qos: msg.qos,
        retain: msg.retain,
        topic: &msg.topic,
        packet_id,
        payload,
        alias: None,
        expiry: None,
        ids: Vec::new(),
        properties: None,
    })
}

impl Peer {
    pub(crate) fn new(number: usize, profile: Profile, state: Durable) -> Self {
        let renew = profile.renews && !state.session;
        Self {
            number,
            profile,
            state,
            online: true,
            renew,
            connection: None,
            forgotten: Vec::new(),
            retry: 0,
        }
    }

    /// Has a session now, and may publish and subscribe.
    pub(crate) fn is_open(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.open)
    }

    /// Everything it wanted to subscribe to is confirmed.
    pub(crate) fn is_subscribed(&self) -> bool {
        self.profile.filters.iter().all(|(filter, _)| self.state.subscribed.contains(filter))
    }

    /// Connects a second time while the first connection is still there.
    pub(crate) fn take_over(&mut self, port: u16, history: &mut Vec<Record>) {
        if self.is_open()
            && let Some(old) = self.connection.take()
        {
            self.forgotten.push(old.stream);
            self.forgotten.drain(..self.forgotten.len().saturating_sub(4));
            self.connect(port, history);
        }
    }

    /// Ends the connection, with DISCONNECT or without.
    pub(crate) fn leave(&mut self, politely: bool, history: &mut Vec<Record>) {
        if let Some(mut connection) = self.connection.take()
            && politely
            && connection.open
        {
            self.note(Event::Disconnect, history);
            let packet = Packet::Disconnect(Box::default());
            codec::encode(&packet, self.profile.protocol, &mut connection.output);
            let _ = connection.flush();
        }
    }

    /// Sends a new message; false when it may not now.
    pub(crate) fn publish(&mut self, topic: &str, qos: QoS, retain: bool, history: &mut Vec<Record>) -> bool {
        if !self.is_open() {
            return false;
        }
        let id = MsgId { publisher: self.number, seq: self.state.next_seq };
        let msg = Msg { id, topic: topic.to_owned(), qos, retain };
        let packet_id = self.state.free_packet_id();
        self.note(Event::Publish { packet_id, msg: msg.clone() }, history);
        let payload = msg.payload();
        self.send(&publish(&msg, &payload, packet_id, false));
        true
    }

    pub(crate) fn subscribe(&mut self, history: &mut Vec<Record>) {
        let wanted: Vec<(String, QoS)> = self
            .profile
            .filters
            .iter()
            .filter(|(filter, _)| !self.state.subscribed.contains(filter))
            .cloned()
            .collect();
        if wanted.is_empty() || !self.is_open() {
            return;
        }
        for (filter, qos) in &wanted {
            self.note(Event::Subscribe { filter: filter.clone(), qos: *qos }, history);
        }
        let packet_id = self.control(wanted.iter().map(|(filter, _)| filter.clone()).collect(), true);
        let filters = wanted
            .into_iter()
            .map(|(filter, qos)| SubscribeFilter {
                filter,
                qos,
                no_local: false,
                retain_as_published: false,
                retain_handling: 0,
            })
            .collect();
        self.send(&Packet::Subscribe(Subscribe { packet_id, id: None, user: Vec::new(), filters }));
    }

    pub(crate) fn unsubscribe(&mut self, filter: &str, history: &mut Vec<Record>) {
        if !self.is_open() || !self.state.subscribed.contains(filter) {
            return;
        }
        self.note(Event::Unsubscribe { filter: filter.to_owned() }, history);
        let packet_id = self.control(vec![filter.to_owned()], false);
        let filters = vec![filter.to_owned()];
        self.send(&Packet::Unsubscribe(Unsubscribe { packet_id, user: Vec::new(), filters }));
    }

    /// SUBSCRIBE and UNSUBSCRIBE are all answered.
    pub(crate) fn is_settled(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| connection.asked.is_empty())
    }

    /// One turn: connect if due, read, answer, write. True if anything happened.
    pub(crate) fn step(&mut self, port: u16, history: &mut Vec<Record>) -> bool {
        let now = clock::now();
        if self.connection.is_none() {
            if !self.online || now < self.retry {
                return false;
            }
            self.connect(port, history);
            return true;
        }
        let mut alive = true;
        let mut busy = false;
        if let Some(connection) = &mut self.connection {
            alive = connection.read(&mut busy);
            alive &= connection.open || now < connection.since + CONNACK;
        }
        while let Some(frame) = self.connection.as_mut().and_then(Connection::next_frame) {
            self.handle(&frame, history);
        }
        if let Some(connection) = &mut self.connection {
            while connection.answers.front().is_some_and(|(due, _)| *due <= clock::now()) {
                let Some((_, packet)) = connection.answers.pop_front() else { break };
                codec::encode(&packet, self.profile.protocol, &mut connection.output);
            }
            alive &= connection.flush();
        }
        if !alive {
            self.connection = None;
            self.retry = clock::now() + 5 * MILLI;
        }
        busy
    }

    fn connect(&mut self, port: u16, history: &mut Vec<Record>) {
        self.connection = None;
        self.retry = clock::now() + 20 * MILLI;
        let Ok(stream) = TcpStream::connect_timeout(&local(port), Duration::from_secs(2)) else { return };
        stream.set_nodelay(true).expect("set TCP_NODELAY");
        stream.set_nonblocking(true).expect("set non-blocking");
        let v5 = self.profile.protocol.is_v5();
        let mut connect = Connect::new(self.profile.protocol, self.profile.name.clone());
        connect.clean_start = !self.profile.persistent || self.renew;
        connect.session_expiry = (v5 && self.profile.persistent).then_some(3600);
        connect.receive_maximum = self.profile.window.filter(|_| v5);
        let clean = connect.clean_start;
        connect.will = self.make_will(history);
        self.note(Event::Connect { clean }, history);
        self.connection = Some(Connection {
            stream,
            open: false,
            clean,
            since: clock::now(),
            input: Vec::new(),
            output: Vec::new(),
            answers: VecDeque::new(),
            asked: Vec::new(),
            next_control: CONTROL_IDS,
        });
        self.send(&Packet::Connect(Box::new(connect)));
    }

    fn make_will(&mut self, history: &mut Vec<Record>) -> Option<ConnectWill> {
        let delayed = self.profile.will == Will::Delayed;
        if self.profile.will == Will::No {
            return None;
        }
        let id = MsgId { publisher: self.number, seq: self.state.next_seq };
        let qos = if id.seq.is_multiple_of(2) { QoS::AtLeastOnce } else { QoS::ExactlyOnce };
        let msg = Msg { id, topic: format!("w/{}/{}", self.number, qos as u8), qos, retain: false };
        let (topic, payload) = (msg.topic.clone(), msg.payload());
        self.note(Event::Will { msg, delayed }, history);
        Some(ConnectWill {
            topic,
            payload: payload.into(),
            qos,
            retain: false,
            delay: if delayed { WILL_DELAY } else { 0 },
            expiry: None,
            properties: None,
        })
    }

    fn handle(&mut self, frame: &[u8], history: &mut Vec<Record>) {
        let protocol = self.profile.protocol;
        let whole = codec::frame(frame, usize::MAX).ok().flatten();
        let Some(packet) = whole.as_ref().and_then(|whole| codec::decode(whole, protocol).ok()) else {
            self.note(Event::Nonsense { what: format!("{frame:02x?}") }, history);
            return;
        };
        let Some(connection) = &mut self.connection else { return };
        match packet {
            Packet::ConnAck(answer) if !connection.open && answer.code == 0 => {
                connection.open = true;
                self.renew = false;
                let (clean, present) = (connection.clean, answer.session_present);
                let persistent = self.profile.persistent;
                self.note(Event::Connected { clean, present, persistent }, history);
                self.forgotten.clear();
                self.resume();
                self.subscribe(history);
            }
            // Not ready yet, or going down.
            Packet::ConnAck(_) => self.leave(false, history),
            Packet::Publish(publish) => self.arrived(&publish, history),
            Packet::PubAck(answer) if answer.code < 0x80 => {
                self.note(Event::Acked { packet_id: answer.packet_id }, history);
            }
            Packet::PubRec(answer) if answer.code < 0x80 => {
                let packet_id = answer.packet_id;
                self.note(Event::Acked { packet_id }, history);
                self.send(&Packet::PubRel(ack(packet_id)));
            }
            Packet::PubAck(answer) | Packet::PubRec(answer) => {
                self.note(Event::Refused { packet_id: answer.packet_id, code: answer.code }, history);
            }
            Packet::PubRel(answer) => {
                let packet_id = answer.packet_id;
                self.note(Event::Released { packet_id }, history);
                self.answer(Packet::PubComp(ack(packet_id)));
            }
            Packet::PubComp(answer) => {
                self.note(Event::Completed { packet_id: answer.packet_id }, history);
            }
            Packet::SubAck(answer) => self.confirmed(answer.packet_id, &answer.codes, history),
            Packet::UnsubAck(answer) => self.confirmed(answer.packet_id, &[], history),
            Packet::Disconnect(_) => self.leave(false, history),
            other => self.note(Event::Nonsense { what: format!("{other:?}") }, history),
        }
    }

    fn arrived(&mut self, publish: &Publish<'_>, history: &mut Vec<Record>) {
        let packet_id = publish.packet_id;
        let exact = publish.qos == QoS::ExactlyOnce;
        let parsed = Msg::parse(publish.payload);
        let event = Event::Received {
            packet_id,
            qos: publish.qos,
            retain: publish.retain,
            topic: publish.topic.to_owned(),
            id: parsed.filter(|(_, topic)| *topic == publish.topic).map(|(id, _)| id),
            fresh: !exact || !self.state.received.contains_key(&packet_id),
        };
        self.note(event, history);
        match publish.qos {
            QoS::AtMostOnce => {}
            QoS::AtLeastOnce => self.answer(Packet::PubAck(ack(packet_id))),
            QoS::ExactlyOnce => self.answer(Packet::PubRec(ack(packet_id))),
        }
    }

    fn confirmed(&mut self, packet_id: u16, codes: &[u8], history: &mut Vec<Record>) {
        let Some(connection) = &mut self.connection else { return };
        let Some(at) = connection.asked.iter().position(|(id, _, _)| *id == packet_id) else {
            self.note(Event::Nonsense { what: format!("answer to no request {packet_id}") }, history);
            return;
        };
        let (_, filters, subscribe) = connection.asked.remove(at);
        for (index, filter) in filters.into_iter().enumerate() {
            if !subscribe {
                self.note(Event::Unsubscribed { filter }, history);
            } else if codes.get(index).is_some_and(|code| *code < 0x80) {
                self.note(Event::Subscribed { filter }, history);
            }
        }
    }

    /// Sends what was not acknowledged, in the order of its first sending [MQTT-4.4.0-1].
    fn resume(&mut self) {
        for out in self.state.inflight.clone() {
            match out.stage {
                Stage::Published => {
                    let payload = out.msg.payload();
                    self.send(&publish(&out.msg, &payload, out.packet_id, true));
                }
                Stage::Released => self.send(&Packet::PubRel(ack(out.packet_id))),
            }
        }
    }

    fn control(&mut self, filters: Vec<String>, subscribe: bool) -> u16 {
        let Some(connection) = &mut self.connection else { return CONTROL_IDS };
        let id = connection.next_control;
        connection.next_control = if id == u16::MAX { CONTROL_IDS } else { id + 1 };
        connection.asked.push((id, filters, subscribe));
        id
    }

    fn answer(&mut self, packet: Packet<'static>) {
        let due = clock::now() + self.profile.lag * MILLI;
        if let Some(connection) = &mut self.connection {
            connection.answers.push_back((due, packet));
        }
    }

    fn send(&mut self, packet: &Packet<'_>) {
        if let Some(connection) = &mut self.connection {
            codec::encode(packet, self.profile.protocol, &mut connection.output);
        }
    }

    fn note(&mut self, event: Event, history: &mut Vec<Record>) {
        self.state.apply(&event);
        history.push(Record { at: clock::now(), client: self.number, event });
    }
}

impl Connection {
    /// Takes what is there; false at the end of the connection.
    fn read(&mut self, busy: &mut bool) -> bool {
        let mut chunk = [0; 16_384];
        for _ in 0..16 {
            match self.stream.read(&mut chunk) {
                Ok(0) => return false,
                Ok(n) => {
                    *busy = true;
                    self.input.extend_from_slice(&chunk[..n]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    fn next_frame(&mut self) -> Option<Vec<u8>> {
        let len = codec::frame_len(&self.input).expect("a frame from the server")?;
        (self.input.len() >= len).then(|| self.input.drain(..len).collect())
    }

    /// Writes what the socket takes; false when it is dead.
    fn flush(&mut self) -> bool {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(n) => {
                    self.output.drain(..n);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}
