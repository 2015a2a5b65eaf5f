//! The actions of devices, and the decisions of the rules about them.

use std::{fs, net::Ipv4Addr, sync::Arc};

use codec::Packet;
use gateway_core::{Protocol, QoS};
use rustls::ClientConfig;

use super::{
    lines,
    ways::{Devices, Stream, Way},
};
use crate::{
    client::{Client, Got, decoded, hello, message, will},
    support::{Server, until},
};

const RULES: &str = r##"
[[rules]]
allow = "all"
topics = ["#", "$SYS/#"]
clients = ["watcher", "sender"]

[[rules]]
allow = "publish"
topics = ["up/%c/#"]
max_qos = 1
retain = false
max_bytes = 8

[[rules]]
allow = "publish"
topics = ["any/%c/#"]

[[rules]]
allow = "subscribe"
topics = ["down/%c/#", "open/#", "$SYS/broker/uptime"]

[[rules]]
deny = "subscribe"
topics = ["mixed/secret/#"]

[[rules]]
allow = "subscribe"
topics = ["mixed/#"]
filter = "on-delivery"
"##;

/// Action of the device `d1`.
enum Act {
    /// PUBLISH: topic, QoS, retained, bytes of payload.
    Publish(&'static str, QoS, bool, usize),
    /// SUBSCRIBE: filter, and a topic on which something comes afterwards.
    Subscribe(&'static str, &'static str),
    /// SUBSCRIBE, and a topic on which something is retained.
    Retained(&'static str, &'static str),
    /// CONNECT with a will, and the end of the connection: topic, retained.
    Will(&'static str, bool),
}
use Act::{Publish, Retained, Subscribe, Will};

/// Outcome of an action.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The action has its effect.
    Done,
    /// The code in MQTT 5 and in MQTT 3; at QoS 0 nobody is told. It is counted, and is in the log with this reason.
    Denied(u8, u8, &'static str, &'static str),
    /// The subscription is made, and the message withheld and counted.
    Withheld,
}
use Outcome::{Denied, Done, Withheld};

const REFUSED: &str = "mqtt_messages_refused_total{reason=\"not_authorized\"}";
const FILTERS: &str = "mqtt_subscriptions_denied_total";
const WILLS: &str = "mqtt_wills_denied_total{at=\"connect\"}";
const WITHHELD: &str = "mqtt_deliveries_withheld_total";

const Q0: QoS = QoS::AtMostOnce;
const Q1: QoS = QoS::AtLeastOnce;
const Q2: QoS = QoS::ExactlyOnce;

#[rustfmt::skip]
const DEEDS: &[(Act, Outcome)] = &[
    (Publish("up/d1/t", Q0, false, 8),              Done),
    (Publish("up/d1/t", Q1, false, 8),              Done),
    (Publish("any/d1/t", Q2, false, 8),             Done),
    (Publish("any/d1/t", Q1, true, 99),             Done),
    (Publish("up/d2/t", Q0, false, 8),              Denied(0, 0, REFUSED, "topic")),
    (Publish("up/d2/t", Q1, false, 8),              Denied(0x87, 0, REFUSED, "topic")),
    (Publish("up/d2/t", Q2, false, 8),              Denied(0x87, 0, REFUSED, "topic")),
    (Publish("up/d1/t", Q2, false, 8),              Denied(0x87, 0, REFUSED, "qos")),
    (Publish("up/d1/t", Q1, true, 8),               Denied(0x87, 0, REFUSED, "retain")),
    (Publish("up/d1/t", Q1, false, 9),              Denied(0x87, 0, REFUSED, "bytes")),
    (Publish("$share/g/open/t", Q1, false, 8),      Denied(0x87, 0, REFUSED, "topic")),

    (Subscribe("down/d1/t", "down/d1/t"),           Done),
    (Subscribe("down/d1/#", "down/d1/t"),           Done),
    (Subscribe("open/+", "open/t"),                 Done),
    (Subscribe("$share/g/open/#", "open/t"),        Done),
    (Subscribe("$SYS/broker/uptime", ""),           Done),
    (Subscribe("mixed/#", "mixed/public"),          Done),
    (Subscribe("#", "open/t"),                      Done),
    (Subscribe("#", "down/d2/t"),                   Withheld),
    (Subscribe("down/d2/t", "down/d2/t"),           Denied(0x87, 0x80, FILTERS, "topic")),
    (Subscribe("down/+/t", "down/d1/t"),            Denied(0x87, 0x80, FILTERS, "topic")),
    (Subscribe("$share/g/down/d2/t", "down/d2/t"),  Denied(0x87, 0x80, FILTERS, "topic")),
    (Subscribe("$share/g/mixed/#", "mixed/public"), Denied(0x87, 0x80, FILTERS, "topic")),
    (Subscribe("$SYS/#", ""),                       Denied(0x87, 0x80, FILTERS, "topic")),
    (Subscribe("mixed/#", "mixed/secret/t"),        Withheld),

    (Retained("open/#", "open/t"),                  Done),
    (Retained("mixed/#", "mixed/public"),           Done),
    (Retained("mixed/#", "mixed/secret/t"),         Withheld),

    (Will("any/d1/t", false),                       Done),
    (Will("any/d1/t", true),                        Done),
    (Will("up/d2/t", false),                        Denied(0x87, 5, WILLS, "not_authorized")),
    (Will("up/d1/t", true),                         Denied(0x87, 5, WILLS, "not_authorized")),
];

const PAYLOAD: &[u8] = &[b'p'; 99];

struct Matrix {
    server: Server,
    tls: Arc<ClientConfig>,
    /// Sees everything.
    watcher: Client,
    /// Sends what others are to get.
    sender: Client,
}

#[test]
fn every_deed_is_allowed_or_denied_as_its_row_says() {
    let dir = tempfile::tempdir().expect("make a directory");
    let file = dir.path().join("rules.toml");
    fs::write(&file, RULES).expect("write the rules");
    let server = Server::start_with(&[], &format!("[authorization]\nrules = \"{}\"\n", file.display()));
    let mut watcher = Client::connect(server.ports.tcp, Protocol::V5, "watcher");
    assert_eq!(watcher.subscribe("#"), 0);
    let tls = Devices::new().config(&server.ca(), None);
    let sender = Client::connect(server.ports.tcp, Protocol::V5, "sender");
    let mut matrix = Matrix { server, tls, watcher, sender };
    // The log has five lines in ten seconds about one address.
    let mut host = 0;
    for (act, outcome) in DEEDS {
        for way in Way::ALL {
            host += 1;
            for protocol in [Protocol::V5, Protocol::V4, Protocol::V3] {
                let from = Ipv4Addr::new(127, 0, 2, host);
                matrix.attempt(act, *outcome, way, protocol, from);
            }
        }
    }
    let log = matrix.server.log();
    assert!(!log.contains("pppppppp"), "a payload is in the log");
}

impl Matrix {
    fn attempt(&mut self, act: &Act, outcome: Outcome, way: Way, protocol: Protocol, from: Ipv4Addr) {
        let said = format!("{} over {way:?} in {protocol:?}", act.told());
        let ports = self.server.ports;
        let port = match way {
            Way::Tcp => ports.tcp,
            Way::Ws => ports.ws,
            Way::Tls => ports.tls,
            Way::Wss => ports.wss,
        };
        if let Retained(_, topic) = act {
            self.sender.publish_acked(topic, b"retained", true);
            assert_eq!(self.seen(), [Got::Publish((*topic).to_owned(), b"retained".to_vec())], "{said}");
        }
        let before = self.counters();
        let (stream, own) = way.open(from, port, &self.tls).expect("connect");
        let mut client = Client::on(stream, protocol);
        let mut connect = hello(protocol, "d1");
        if let Will(topic, retain) = act {
            connect.will = Some(codec::ConnectWill { retain: *retain, ..will(topic, b"a will") });
        }
        client.send(&Packet::Connect(Box::new(connect)));
        let code = |five, three| if protocol.is_v5() { five } else { three };
        let denied = match outcome {
            Denied(five, three, ..) => Some(code(five, three)),
            Done | Withheld => None,
        };
        let connack = if matches!(act, Will(..)) { denied.unwrap_or(0) } else { 0 };
        assert_eq!(client.next(), Got::ConnAck(connack), "{said}");
        match *act {
            Publish(topic, qos, retain, bytes) => {
                let payload = &PAYLOAD[..bytes];
                client.send(&message(topic, payload, qos, retain));
                if qos != Q0 {
                    let acknowledged = acknowledged(&mut client, protocol);
                    let wrong = match denied {
                        Some(code) => acknowledged != code,
                        None => acknowledged >= 0x80,
                    };
                    assert!(!wrong, "{acknowledged:#x} for {said}");
                }
                if qos == Q2 && denied.is_none() {
                    let release = codec::Ack { packet_id: 1, code: 0, reason_string: None, user: Vec::new() };
                    client.send(&Packet::PubRel(release));
                    assert_eq!(client.next(), Got::Other(0x70), "{said}");
                }
                client.ping();
                let expected = Got::Publish(topic.to_owned(), payload.to_vec());
                assert_eq!(self.seen(), if denied.is_none() { vec![expected] } else { Vec::new() }, "{said}");
            }
            Subscribe(filter, topic) => {
                assert_eq!(client.subscribe(filter), denied.unwrap_or(0), "{said}");
                if !topic.is_empty() {
                    self.sender.publish_acked(topic, b"news", false);
                    self.seen();
                    let expected = Got::Publish(topic.to_owned(), b"news".to_vec());
                    assert_eq!(
                        client.ping(),
                        if outcome == Done { vec![expected] } else { Vec::new() },
                        "{said}"
                    );
                }
            }
            Retained(filter, topic) => {
                assert_eq!(client.subscribe(filter), 0, "{said}");
                let expected = Got::Publish(topic.to_owned(), b"retained".to_vec());
                assert_eq!(
                    client.ping(),
                    if outcome == Done { vec![expected] } else { Vec::new() },
                    "{said}"
                );
            }
            Will(topic, _) if denied.is_none() => {
                // Without DISCONNECT.
                drop(client);
                let expected = Got::Publish(topic.to_owned(), b"a will".to_vec());
                assert_eq!(self.watcher.next(), expected, "{said}");
            }
            Will(..) => assert_eq!(client.next(), Got::Closed, "{said}"),
        }
        let counter = match outcome {
            Done => "",
            Denied(_, _, counter, _) => counter,
            Withheld => WITHHELD,
        };
        for ((name, before), (_, after)) in before.iter().zip(self.counters()) {
            assert_eq!(after - before, u64::from(*name == counter), "{name} counted for {said}");
        }
        if let Publish(topic, _, true, _) | Retained(_, topic) | Will(topic, true) = act {
            self.sender.publish_acked(topic, b"", true);
            self.seen();
        }
        if let Denied(_, _, _, reason) = outcome {
            let message =
                if matches!(act, Will(..)) { "CONNECT refused" } else { "not allowed by the rules" };
            until(|| !lines(&self.server, message, own).is_empty());
            let line = &lines(&self.server, message, own)[0];
            assert_eq!(line["client_id"], "d1", "{said}: {line}");
            assert!(line.to_string().contains(&format!("\"{reason}\"")), "{said}: {line}");
        }
    }

    /// Returns the packets that the watcher got meanwhile.
    fn seen(&mut self) -> Vec<Got> {
        self.watcher.ping()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let page = self.server.http_get("/metrics").expect("read the metrics");
        let of = |name: &'static str| {
            let row = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            let count = row.and_then(|count| count.parse::<f64>().ok());
            (name, count.unwrap_or_else(|| panic!("no counter {name}")) as u64)
        };
        [REFUSED, FILTERS, WILLS, WITHHELD].map(of).to_vec()
    }
}

impl Act {
    fn told(&self) -> String {
        match self {
            Publish(topic, qos, retain, bytes) => format!("PUBLISH {topic} {qos:?} {retain} {bytes}"),
            Subscribe(filter, topic) => format!("SUBSCRIBE {filter} for {topic}"),
            Retained(filter, topic) => format!("SUBSCRIBE {filter} for what is retained at {topic}"),
            Will(topic, retain) => format!("will {topic} {retain}"),
        }
    }
}

/// The code of the PUBACK or PUBREC that comes.
fn acknowledged(client: &mut Client<Stream>, protocol: Protocol) -> u8 {
    let bytes = client.next_bytes().expect("an acknowledgement");
    match decoded(&bytes, protocol) {
        Packet::PubAck(ack) | Packet::PubRec(ack) => ack.code,
        other => panic!("{other:?}"),
    }
}
