//! Publishers and subscribers on several shards and transports that stop reading, leave and take each other over at
//! random: what was acknowledged arrives, in order, QoS 2 once, and nothing is left when all is done.
//!
//! `STRESS_SECONDS` makes it longer, `STRESS_SEED` repeats a run; the seed of a failing one is in its output.

mod wire;

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use self::wire::Connection;
use crate::support::{Server, until};
use codec::{Ack, Connect, Packet, Publish};
use gateway_core::{Protocol, QoS};

const PUBLISHERS: usize = 4;
/// The first of them leave and return.
const RESTLESS: usize = 2;
const SUBSCRIBERS: usize = 6;
/// Messages of a publisher that wait for their acknowledgement.
const WINDOW: usize = 30;
/// Caps that are never reached, so that nothing may be dropped; time limits that end no connection.
const CONFIG: &str = "shards = 4\n[limits]\nmailbox_messages = 1000000\nmailbox_bytes = \"256 MiB\"\n\
    offline_messages = 1000000\noffline_bytes = \"256 MiB\"\nmax_inflight = 50\nwrite_timeout = \"10m\"\n";
/// Longer than anything may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A small generator: the same seed, the same choices.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % most
    }
}

fn ack(packet_id: u16) -> Ack {
    Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }
}

/// A client whose session outlives its connections.
struct Client<'a> {
    server: &'a Server,
    id: String,
    protocol: Protocol,
    random: Random,
    connection: Option<Connection>,
    known: bool,
}

impl<'a> Client<'a> {
    fn new(server: &'a Server, id: String, number: usize, seed: u64) -> Self {
        let protocol = if number.is_multiple_of(2) { Protocol::V5 } else { Protocol::V4 };
        let random = Random(seed.wrapping_mul(1000).wrapping_add(number as u64));
        Self { server, id, protocol, random, connection: None, known: false }
    }

    /// Connects anew, before or after the earlier connection is closed.
    fn reconnect(&mut self, take_over: bool) {
        let old = self.connection.take().filter(|_| take_over);
        let session_expiry = self.protocol.is_v5().then_some(600);
        let hello =
            Connect { clean_start: false, session_expiry, ..Connect::new(self.protocol, self.id.as_str()) };
        let transport = self.random.below(4);
        let (connection, present) = Connection::open(self.server, transport, hello).expect("connect");
        assert_eq!(present, self.known, "{}: session present", self.id);
        self.known = true;
        self.connection = Some(connection);
        drop(old);
    }

    fn connection(&mut self) -> &mut Connection {
        if self.connection.is_none() {
            self.reconnect(false);
        }
        self.connection.as_mut().expect("connected")
    }

    /// Sends, or loses the connection.
    fn send(&mut self, packets: &[Packet<'_>]) {
        if let Some(connection) = &mut self.connection
            && connection.send(packets).is_err()
        {
            self.connection = None;
        }
    }
}

/// Sends `count` messages at QoS 1 and 2 in turn, and again what is not acknowledged when its connection ends.
struct Publisher<'a> {
    client: Client<'a>,
    number: usize,
    next: u32,
    /// By packet id, in sending order by sequence: (sequence, released).
    waiting: BTreeMap<u32, (u16, bool)>,
    last_id: u16,
}

impl Publisher<'_> {
    fn run(&mut self, until: Instant) -> u32 {
        self.client.reconnect(false);
        let mut deadline = None;
        loop {
            let sending = Instant::now() < until;
            if !sending {
                let deadline = deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
                if self.waiting.is_empty() {
                    return self.next;
                }
                assert!(
                    Instant::now() < *deadline,
                    "publisher {}: never acknowledged: {:?}",
                    self.number,
                    self.waiting
                );
            }
            if self.client.connection.is_none() {
                self.client.reconnect(false);
                self.send_again();
            }
            match self.client.random.below(400) {
                _ if self.number >= RESTLESS => {}
                0 => {
                    self.client.reconnect(true);
                    self.send_again();
                }
                1 => self.client.connection = None,
                _ => {}
            }
            if sending && self.client.random.below(10) == 0 {
                thread::sleep(Duration::from_millis(self.client.random.below(20)));
            }
            for _ in 0..self.client.random.below(10) {
                if sending && self.waiting.len() < WINDOW {
                    self.send_next();
                }
            }
            self.receive();
        }
    }

    fn send_next(&mut self) {
        loop {
            self.last_id = if self.last_id == u16::MAX { 1 } else { self.last_id + 1 };
            if self.waiting.values().all(|(id, _)| *id != self.last_id) {
                break;
            }
        }
        self.waiting.insert(self.next, (self.last_id, false));
        self.send(self.next, false);
        self.next += 1;
    }

    fn send(&mut self, sequence: u32, dup: bool) {
        let (packet_id, released) = self.waiting[&sequence];
        if released {
            return self.client.send(&[Packet::PubRel(ack(packet_id))]);
        }
        let qos = qos_of(sequence);
        let topic = format!("t/{}/{}", self.number, qos as u8);
        let mut payload = sequence.to_be_bytes().to_vec();
        payload.resize(4 + (u64::from(sequence) * 7919 % 2000) as usize, b'x');
        let publish = Publish {
            dup,
            qos,
            retain: false,
            topic: &topic,
            packet_id,
            payload: &payload,
            alias: None,
            expiry: None,
            ids: Vec::new(),
            properties: None,
        };
        self.client.send(&[Packet::Publish(publish)]);
    }

    fn send_again(&mut self) {
        for sequence in self.waiting.keys().copied().collect::<Vec<_>>() {
            self.send(sequence, true);
        }
    }

    fn receive(&mut self) {
        let Some(connection) = &mut self.client.connection else { return };
        let waiting = &mut self.waiting;
        let mut releases = Vec::new();
        let received = connection.receive(|packet| match packet {
            Packet::PubAck(ack) => waiting
                .retain(|sequence, (id, _)| *id != ack.packet_id || qos_of(*sequence) != QoS::AtLeastOnce),
            Packet::PubRec(rec) => {
                for (_, released) in waiting.values_mut().filter(|(id, _)| *id == rec.packet_id) {
                    *released = true;
                }
                releases.push(Packet::PubRel(ack(rec.packet_id)));
            }
            Packet::PubComp(ack) => waiting.retain(|_, (id, released)| *id != ack.packet_id || !*released),
            Packet::Disconnect(_) => {}
            other => panic!("{other:?} for a publisher"),
        });
        match received {
            Ok(_) => self.client.send(&releases),
            Err(_) => self.client.connection = None,
        }
    }
}

fn qos_of(sequence: u32) -> QoS {
    if sequence.is_multiple_of(2) { QoS::AtLeastOnce } else { QoS::ExactlyOnce }
}

struct Subscriber<'a> {
    client: Client<'a>,
    granted: QoS,
    /// Packet ids of QoS 2 that wait for PUBREL.
    received: HashSet<u16>,
    seen: HashSet<(usize, u32)>,
    /// By publisher and QoS: the last sequence seen for the first time.
    last: BTreeMap<(usize, u8), u32>,
}

impl Subscriber<'_> {
    fn subscribe(&mut self) {
        let filters = vec![codec::SubscribeFilter {
            filter: "t/#".to_owned(),
            qos: self.granted,
            no_local: false,
            retain_as_published: false,
            retain_handling: 0,
        }];
        let subscribe = codec::Subscribe { packet_id: 1, id: None, user: Vec::new(), filters };
        self.client.connection().send(&[Packet::Subscribe(subscribe)]).expect("subscribe");
        let mut done = false;
        while !done {
            self.client
                .connection()
                .receive(|packet| done |= matches!(packet, Packet::SubAck(_)))
                .expect("SUBACK");
        }
    }

    /// Behaves badly until `calm`, then reads until it has `total` messages of each publisher.
    fn run(&mut self, calm: &AtomicBool, totals: &[AtomicU32]) {
        while !calm.load(SeqCst) {
            match self.client.random.below(100) {
                0..70 => self.receive(),
                70..90 => thread::sleep(Duration::from_millis(self.client.random.below(60))),
                90..95 => self.client.reconnect(true),
                95..98 => {
                    self.client.connection = None;
                    thread::sleep(Duration::from_millis(self.client.random.below(20)));
                    self.client.reconnect(false);
                }
                _ => {
                    let goodbye = codec::Disconnect::default();
                    self.client.send(&[Packet::Disconnect(Box::new(goodbye))]);
                    self.client.connection = None;
                    self.client.reconnect(false);
                }
            }
        }
        let deadline = Instant::now() + PATIENCE;
        while !self.is_complete(totals) {
            if Instant::now() > deadline {
                let Client { id, protocol, .. } = &self.client;
                let (granted, seen) = (self.granted, self.seen.len());
                panic!(
                    "{id} ({protocol:?}, {granted:?}) has {seen} messages, not {:?}",
                    self.missing(totals)
                );
            }
            self.receive();
        }
    }

    fn is_complete(&self, totals: &[AtomicU32]) -> bool {
        let total: usize = totals.iter().map(|total| total.load(SeqCst) as usize).sum();
        self.granted == QoS::AtMostOnce || self.seen.len() == total
    }

    /// The first message (publisher, sequence) that was acknowledged and did not come.
    fn missing(&self, totals: &[AtomicU32]) -> Option<(usize, u32)> {
        let mut all = totals.iter().enumerate().flat_map(|(publisher, total)| {
            (0..total.load(SeqCst)).map(move |sequence| (publisher, sequence))
        });
        all.find(|message| !self.seen.contains(message))
    }

    fn receive(&mut self) {
        let mut answers = Vec::new();
        let Self { client, received, seen, last, .. } = self;
        let id = client.id.clone();
        let result = client.connection().receive(|packet| match packet {
            Packet::Publish(publish) => {
                match publish.qos {
                    QoS::AtMostOnce => {}
                    QoS::AtLeastOnce => answers.push(Packet::PubAck(ack(publish.packet_id))),
                    QoS::ExactlyOnce => {
                        answers.push(Packet::PubRec(ack(publish.packet_id)));
                        if !received.insert(publish.packet_id) {
                            return;
                        }
                    }
                }
                let mut levels =
                    publish.topic.split('/').skip(1).map(|level| level.parse::<usize>().expect("a number"));
                let (publisher, qos) = (levels.next().expect("a publisher"), levels.next().expect("a QoS"));
                let sequence = u32::from_be_bytes(publish.payload[..4].try_into().expect("a sequence"));
                let first = seen.insert((publisher, sequence));
                assert!(
                    first || publish.qos == QoS::AtLeastOnce || qos_of(sequence) == QoS::AtLeastOnce,
                    "{id}: message {sequence} of publisher {publisher} came twice at {:?}",
                    publish.qos
                );
                // One that is lost at QoS 0 may come later, if its publisher sends it again; at QoS 2 a shard may still
                // be routing one while the publisher goes on over another.
                let ordered = publisher >= RESTLESS
                    || publish.qos > QoS::AtMostOnce && qos_of(sequence) == QoS::AtLeastOnce;
                if first
                    && ordered
                    && let Some(before) = last.insert((publisher, qos as u8), sequence)
                {
                    assert!(before < sequence, "{id}: publisher {publisher}, {sequence} after {before}");
                }
            }
            Packet::PubRel(rel) => {
                received.remove(&rel.packet_id);
                answers.push(Packet::PubComp(ack(rel.packet_id)));
            }
            Packet::Disconnect(_) => {}
            other => panic!("{other:?} for a subscriber"),
        });
        match result {
            Ok(_) => client.send(&answers),
            Err(_) => client.connection = None,
        }
    }
}

/// Clock ticks that the process has used.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("read the process's times");
    let rest = stat.rsplit(") ").next().expect("fields behind the name");
    rest.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum()
}

#[test]
fn what_was_acknowledged_arrives_in_order_and_nothing_is_left_behind() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("STRESS_SECONDS").unwrap_or(4);
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
    let seed = number("STRESS_SEED").unwrap_or(clock.as_millis() as u64);
    println!("STRESS_SEED={seed}");
    let mut server = Server::start_with(&[], CONFIG);
    let pid = server.pid();
    let calm = AtomicBool::new(false);
    let totals: Arc<[AtomicU32]> = (0..PUBLISHERS).map(|_| AtomicU32::new(0)).collect();
    {
        let (server, calm, totals) = (&server, &calm, &totals);
        let end = &Instant::now();
        thread::scope(|scope| {
            let mut subscribers = Vec::new();
            for number in 0..SUBSCRIBERS {
                let granted = [QoS::ExactlyOnce, QoS::AtLeastOnce, QoS::AtMostOnce][number / 2];
                let client = Client::new(server, format!("sub-{number}"), number, seed);
                let mut subscriber = Subscriber {
                    client,
                    granted,
                    received: HashSet::new(),
                    seen: HashSet::new(),
                    last: BTreeMap::new(),
                };
                subscriber.subscribe();
                subscribers.push(scope.spawn(move || {
                    subscriber.run(calm, totals);
                    subscriber
                }));
            }
            let publishing: Vec<_> = (0..PUBLISHERS)
                .map(|number| {
                    let client = Client::new(server, format!("pub-{number}"), 100 + number, seed);
                    let mut publisher =
                        Publisher { client, number, next: 0, waiting: BTreeMap::new(), last_id: 0 };
                    scope.spawn(move || {
                        let sent = publisher.run(*end + Duration::from_secs(seconds));
                        totals[number].store(sent, SeqCst);
                    })
                })
                .collect();
            let published: Vec<_> = publishing.into_iter().map(|thread| thread.join().is_ok()).collect();
            calm.store(true, SeqCst);
            assert!(published.iter().all(|ok| *ok), "a publisher failed");
            let mut subscribers: Vec<_> =
                subscribers.into_iter().map(|thread| thread.join().expect("a subscriber")).collect();
            println!("{} messages", totals.iter().map(|total| total.load(SeqCst)).sum::<u32>());
            // All is delivered; now the rest of the QoS 2 handshakes, and then nothing may be left or go on.
            let deadline = Instant::now() + PATIENCE;
            loop {
                subscribers.iter_mut().for_each(Subscriber::receive);
                let left = ["mqtt_queued_bytes", "mqtt_queued_messages", "mqtt_inflight_messages"]
                    .map(|name| (name, server.metric(name)));
                if left.iter().all(|(_, left)| *left == 0) {
                    break;
                }
                assert!(Instant::now() < deadline, "left behind: {left:?}");
            }
            // The publishers are gone.
            until(|| server.metric("mqtt_connections") == SUBSCRIBERS as u64);
            until(|| {
                let before = ticks(pid);
                thread::sleep(Duration::from_secs(1));
                ticks(pid) - before <= 5
            });
            let page = server.http_get("/metrics").expect("read the metrics");
            for reason in ["queue_full", "memory", "expired", "too_large"] {
                let row = format!("mqtt_messages_dropped_total{{reason=\"{reason}\"}} 0");
                assert!(page.contains(&row), "messages were dropped: {reason}");
            }
        });
    }
    until(|| server.metric("mqtt_connections") == 0);
    assert!(server.stop(), "the server did not stop:\n{}", server.log());
    assert!(!server.log().contains("panicked"), "{}", server.log());
}
