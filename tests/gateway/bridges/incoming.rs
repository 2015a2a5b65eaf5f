//! A real Mosquitto that bridges to the gateway by a `connection` of its own.

use gateway_core::{Protocol, QoS};

use super::broker::Broker;
use crate::{
    client::{Client, Got, decoded},
    support::{Server, until},
};

/// The next message, with its flag RETAIN.
fn message(client: &mut Client) -> (String, Vec<u8>, bool) {
    let bytes = client.next_bytes().expect("a message");
    match decoded(&bytes, Protocol::V5) {
        codec::Packet::Publish(publish) => {
            (publish.topic.to_owned(), publish.payload.to_vec(), publish.retain)
        }
        other => panic!("{other:?}"),
    }
}

/// The topics of the next messages, as many as are expected, without those that only probe.
fn topics(client: &mut Client, count: usize) -> Vec<String> {
    let mut got = Vec::new();
    while got.len() < count {
        match client.next() {
            Got::Publish(topic, _) if topic != "in/probe" => got.push(topic),
            Got::Publish(..) | Got::PubAck(_) => {}
            other => panic!("{other:?} after {got:?}"),
        }
    }
    got
}

const STATE: &str = "$SYS/broker/connection/plant/state";

/// The failures: the gateway refuses the bridge bit, or the notifications; messages come back to where they came from, or without
/// their flag RETAIN; the bridge is shown as connected after its end.
#[test]
fn a_mosquitto_bridges_to_the_gateway_with_its_defaults() {
    for level in ["mqttv31", "mqttv311", "mqttv50"] {
        let server = Server::start();
        let lines = format!(
            "connection up\naddress 127.0.0.1:{}\nbridge_protocol_version {level}\nremote_clientid plant\n\
             notifications true\ntry_private true\nrestart_timeout 1\n\
             topic both/# both 1\ntopic out/# out 1\ntopic in/# in 1\n",
            server.ports.tcp
        );
        let mut watcher = Client::connect(server.ports.tcp, Protocol::V5, "watcher");
        watcher.subscribe("$SYS/broker/connection/+/state");
        let Some(mut broker) = Broker::start_configured(&lines) else { return };
        assert_eq!(message(&mut watcher), (STATE.to_owned(), b"1".to_vec(), false), "{level}");
        let mut here = Client::connect(server.ports.tcp, Protocol::V5, "here");
        here.subscribe(STATE);
        assert_eq!(message(&mut here), (STATE.to_owned(), b"1".to_vec(), true), "{level}");
        let mut there = Client::connect(broker.port, Protocol::V5, "there");
        for client in [&mut here, &mut there] {
            for filter in ["both/#", "out/#", "in/#"] {
                client.subscribe(filter);
            }
        }
        // Until the bridge has subscribed.
        until(|| {
            here.publish("in/probe", b"", QoS::AtMostOnce, false);
            here.ping();
            there.ping().iter().any(|got| matches!(got, Got::Publish(..)))
        });
        there.publish("both/1", b"x", QoS::AtLeastOnce, false);
        there.publish("out/1", b"x", QoS::AtLeastOnce, false);
        assert_eq!(topics(&mut here, 2), ["both/1", "out/1"], "{level}");
        here.publish("both/2", b"x", QoS::AtLeastOnce, true);
        here.publish("in/2", b"x", QoS::AtLeastOnce, false);
        // Had the first come back, it would be before the second.
        assert_eq!(topics(&mut there, 4), ["both/1", "out/1", "both/2", "in/2"], "{level}");
        there.publish("both/3", b"x", QoS::AtLeastOnce, false);
        assert_eq!(topics(&mut here, 3), ["both/2", "in/2", "both/3"], "{level}");
        // RETAIN went with it, and with that one only.
        let mut later = Client::connect(broker.port, Protocol::V5, "later");
        later.subscribe("both/#");
        assert_eq!(message(&mut later), ("both/2".to_owned(), b"x".to_vec(), true), "{level}");
        assert_eq!(later.ping(), [], "{level}");
        broker.kill();
        assert_eq!(message(&mut watcher), (STATE.to_owned(), b"0".to_vec(), false), "{level}: by its will");
        broker.start_again();
        assert_eq!(message(&mut watcher), (STATE.to_owned(), b"1".to_vec(), false), "{level}");
    }
}
