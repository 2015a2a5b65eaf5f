//! Acknowledged messages, as retained messages and in the queue of a device that is away: cheaper to look at than a world.

use std::collections::{BTreeMap, BTreeSet};

use codec::{Ack, Packet, Publish};
use gateway_core::{Protocol, QoS};

use crate::blocking::{Client, Got, decoded, hello};

/// Messages under way at once.
const WINDOW: u16 = 32;

/// A message, by number and least length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item {
    number: usize,
    bytes: usize,
}

impl Item {
    fn payload(self) -> Vec<u8> {
        let mut payload = self.number.to_string().into_bytes();
        payload.resize(payload.len().max(self.bytes), b'.');
        payload
    }
}

/// See the module. Not to be used by two at once; those that are kept for different times do not meet.
#[derive(Debug)]
pub(super) struct Deposit {
    /// Client id of the device that is away, and first level of all topics.
    name: String,
    /// Seconds for which the device's session, and every message, are kept.
    kept: u32,
    /// Retained messages by topic.
    retained: BTreeMap<String, Item>,
    /// Messages in the queue, in order.
    queued: Vec<Item>,
    count: usize,
}

/// Connects as the device, whose session must be there if it was.
fn owner(port: u16, name: &str, kept: u32, is_new: bool) -> Client {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(kept);
    let mut client = Client::open(port, Protocol::V5);
    client.send(&Packet::Connect(Box::new(connect)));
    let bytes = client.next_bytes().expect("an answer");
    let Packet::ConnAck(ack) = decoded(&bytes, Protocol::V5) else { panic!("no CONNACK: {bytes:02x?}") };
    assert_eq!((ack.code, ack.session_present), (0, !is_new), "the session of a device that is away");
    client
}

/// A publisher with some messages under way.
struct Publisher {
    client: Client,
    /// Seconds for which a message is kept.
    kept: u32,
    sent: u16,
    waiting: u16,
}

impl Publisher {
    fn publish(&mut self, topic: &str, payload: &[u8], retain: bool) {
        self.sent = self.sent % 60_000 + 1;
        self.client.send(&Packet::Publish(Publish {
            dup: false,
            qos: QoS::AtLeastOnce,
            retain,
            topic,
            packet_id: self.sent,
            payload,
            alias: None,
            expiry: Some(self.kept),
            ids: Vec::new(),
            properties: None,
        }));
        self.waiting += 1;
        self.settle(WINDOW);
    }

    fn settle(&mut self, most: u16) {
        while self.waiting > most {
            // 16: nobody has subscribed to it.
            let got = self.client.next();
            assert!(matches!(got, Got::PubAck(0 | 16)), "{got:?}");
            self.waiting -= 1;
        }
    }
}

impl Deposit {
    /// Nothing is in it yet; it is kept for so many seconds.
    pub(super) fn keeping(kept: u32) -> Self {
        Self {
            name: format!("deposit-{kept}"),
            kept,
            retained: BTreeMap::new(),
            queued: Vec::new(),
            count: 0,
        }
    }

    /// Publishes so many retained messages of so many bytes, and every fifth for the device that is away, too.
    pub(super) fn add(&mut self, port: u16, count: usize, bytes: usize) {
        self.add_over(port, count, bytes, usize::MAX);
    }

    /// As [`Self::add`], over and over the same `topics` topics.
    pub(super) fn add_over(&mut self, port: u16, count: usize, bytes: usize, topics: usize) {
        if self.count == 0 {
            let mut owner = owner(port, &self.name, self.kept, true);
            assert_eq!(owner.subscribe_with(&self.queue(), QoS::AtLeastOnce, None), 1);
        }
        let client = Client::connect(port, Protocol::V5, "publisher");
        let mut publisher = Publisher { client, kept: self.kept, sent: 0, waiting: 0 };
        for number in self.count..self.count + count {
            let item = Item { number, bytes };
            let topic = self.topic(number % topics);
            publisher.publish(&topic, &item.payload(), true);
            self.retained.insert(topic, item);
            if number % 5 == 0 && self.queued.len() < 1_000 {
                let item = Item { number, bytes: 20 };
                publisher.publish(&self.queue(), &item.payload(), false);
                self.queued.push(item);
            }
        }
        publisher.settle(0);
        self.count += count;
    }

    /// Bytes that are alive: those of topics and payloads.
    pub(super) fn bytes(&self) -> u64 {
        let retained = self.retained.iter().map(|(topic, item)| topic.len() + item.bytes);
        retained.chain(self.queued.iter().map(|item| item.bytes)).sum::<usize>() as u64
    }

    /// Reads everything of it at a gateway, and takes what is in the queue.
    ///
    /// # Panics
    /// If anything is missing, is more, or is other than it was.
    pub(super) fn is_whole(&mut self, port: u16) {
        if self.count == 0 {
            return;
        }
        let mut reader = Client::connect(port, Protocol::V5, "reader");
        reader.subscribe(&format!("{}/+", self.name));
        let mut found = BTreeSet::new();
        let mut take = |got: Got| {
            let Got::Publish(topic, payload) = got else { panic!("{got:?}") };
            let expected = self.retained.get(&topic).map(|item| item.payload());
            assert!(expected.is_some_and(|expected| expected == payload), "{topic} is other than it was");
            found.insert(topic);
            found.len()
        };
        // More may come than is sent before the answer to one PING.
        while take(reader.next()) < self.retained.len() {}
        for more in reader.ping() {
            take(more);
        }
        assert_eq!(found.len(), self.retained.len(), "there is more than was published");
        let mut owner = owner(port, &self.name, self.kept, false);
        for expected in std::mem::take(&mut self.queued) {
            let bytes = owner.next_bytes().expect("a message of the queue");
            let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
            assert_eq!(publish.payload, expected.payload(), "the queue of a device that is away");
            let (packet_id, code) = (publish.packet_id, 0);
            owner.send(&Packet::PubAck(Ack { packet_id, code, reason_string: None, user: Vec::new() }));
        }
        // The acknowledgements have come by then.
        owner.ping();
    }

    /// Returns whether a retained message is there, by the number of its topic.
    pub(super) fn has(&self, port: u16, number: usize) -> bool {
        let topic = self.topic(number);
        let mut reader = Client::connect(port, Protocol::V5, "reader");
        reader.subscribe(&topic);
        let expected = self.retained.get(&topic).map(|item| item.payload());
        // The message may come after the answer to a PING.
        matches!(reader.next(), Got::Publish(_, payload) if Some(&payload) == expected.as_ref())
    }

    fn topic(&self, number: usize) -> String {
        format!("{}/{number}", self.name)
    }

    fn queue(&self) -> String {
        format!("{}/queued", self.name)
    }
}
