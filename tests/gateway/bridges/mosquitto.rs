//! Messages to a Mosquitto.

use std::collections::BTreeMap;

use gateway_core::{Protocol, QoS};

use super::{broker::Broker, carried, lag, papers};
use crate::{
    client::{Client, Got},
    support::{Server, until},
};

fn config(broker: &Broker, more: &str) -> String {
    format!(
        "[bridges.plant]\ntopics = [\"d/#\"]\nretry_max = \"1s\"\n\
         [bridges.plant.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\nremote_prefix = \"site/\"\n{more}\n",
        broker.port
    )
}

/// The next `count` messages.
fn receive(client: &mut Client, count: usize) -> Vec<(String, Vec<u8>)> {
    let mut messages = Vec::new();
    while messages.len() < count {
        match client.next() {
            Got::Publish(topic, payload) => messages.push((topic, payload)),
            other => panic!("{other:?} after {} of {count} messages", messages.len()),
        }
    }
    messages
}

fn text(number: usize) -> Vec<u8> {
    number.to_string().into_bytes()
}

/// The failure: messages are lost, come twice although nothing went wrong, or in another order than the device sent them.
#[test]
fn a_broker_gets_each_message_of_a_device_once_and_in_order() {
    for level in ["5", "3.1.1"] {
        let Some(broker) = Broker::start() else { return };
        let mut far = Client::connect(broker.port, Protocol::V5, "far");
        far.subscribe("site/#");
        let server = Server::start_with(&[], &config(&broker, &format!("level = \"{level}\"")));
        let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
        for number in 0..300 {
            device.publish_acked("d/1", &text(number), false);
        }
        device.publish_acked("other", b"not for the bridge", false);
        let got = receive(&mut far, 300);
        let wanted: Vec<_> = (0..300).map(|number| ("site/d/1".to_owned(), text(number))).collect();
        assert_eq!(got, wanted);
        until(|| carried(&server) == 300 && lag(&server) == 0);
        assert_eq!(far.ping(), [], "nothing came twice");
        assert_eq!(server.metric("gateway_bridge_up"), 1);
    }
}

/// The failure: devices wait for a broker that is killed or stands still, or what they were told is safe never arrives there.
#[test]
fn a_broker_that_is_killed_or_slow_costs_devices_nothing() {
    let Some(mut broker) = Broker::start() else { return };
    let config = config(&broker, "");
    let mut server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 1);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    broker.signal("STOP");
    for number in 0..100 {
        device.publish_acked(&format!("d/{number}"), b"slow", true);
    }
    assert_eq!(carried(&server), 0);
    broker.signal("CONT");
    until(|| carried(&server) == 100 && lag(&server) == 0);
    broker.kill();
    for number in 0..100 {
        device.publish_acked(&format!("d/{number}"), b"away", true);
    }
    until(|| server.metric("gateway_bridge_up") == 0);
    until(|| lag(&server) == 100);
    let ready = server.http_get("/readyz").expect("an answer");
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    // And the gateway dies, too.
    server = server.kill_and_restart(&[], &config);
    until(|| lag(&server) == 100);
    broker.start_again();
    until(|| lag(&server) == 0);
    let mut far = Client::connect(broker.port, Protocol::V5, "far");
    far.subscribe("site/#");
    let got: BTreeMap<_, _> = receive(&mut far, 100).into_iter().collect();
    let wanted: BTreeMap<_, _> =
        (0..100).map(|number| (format!("site/d/{number}"), b"away".to_vec())).collect();
    assert_eq!(got, wanted);
}

/// The failure: a bridge does not show its certificate to a broker that asks for one, or takes a broker of another CA.
#[test]
fn a_broker_by_tls_gets_messages_from_those_with_a_certificate_alone() {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    papers::write(folder.path());
    papers::write(other.path());
    let Some(broker) = Broker::start_with(Some(folder.path())) else { return };
    let bridge = |name: &str, direction: &str, ca: &std::path::Path, certificate: bool| {
        let at = |name: &str| folder.path().join(name).display().to_string();
        let mut text = format!(
            "[bridges.{name}]\ndirection = \"{direction}\"\ntopics = [\"{direction}/#\"]\nretry_max = \"1s\"\n\
             [bridges.{name}.mqtt]\nurl = \"mqtts://127.0.0.1:{}\"\nca = \"{}\"\n",
            broker.tls_port,
            ca.join("ca.pem").display()
        );
        if certificate {
            text += &format!("cert = \"{}\"\nkey = \"{}\"\n", at("client.crt"), at("client.key"));
        }
        text
    };
    let config = bridge("right", "out", folder.path(), true)
        + &bridge("back", "in", folder.path(), true)
        + &bridge("bare", "out", folder.path(), false)
        + &bridge("strange", "out", other.path(), true);
    let server = Server::start_with(&[], &config);
    let mut far = Client::connect(broker.port, Protocol::V5, "far");
    far.subscribe("out/#");
    until(|| server.metric("gateway_bridge_up") == 2);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    device.publish_acked("out/1", b"there", false);
    assert_eq!(receive(&mut far, 1), [("out/1".to_owned(), b"there".to_vec())]);
    device.subscribe("in/#");
    far.publish("in/1", b"and back", QoS::AtMostOnce, false);
    assert_eq!(receive(&mut device, 1), [("in/1".to_owned(), b"and back".to_vec())]);
    until(|| server.metric("gateway_bridge_failures_total") > 6);
    assert_eq!(far.ping(), [], "those without the right papers have sent nothing");
    let page = server.http_get("/metrics").expect("read the metrics");
    for name in ["bare", "strange"] {
        let row = format!("gateway_bridge_up{{bridge=\"{name}\",kind=\"mqtt\",direction=\"out\"}} 0");
        assert!(page.contains(&row), "{page}");
    }
}

/// The failure: two bridges that face each other send a message round for ever.
#[test]
fn a_message_that_was_here_before_does_not_go_out_again() {
    let Some(broker) = Broker::start() else { return };
    let mut far = Client::connect(broker.port, Protocol::V5, "far");
    far.subscribe("site/#");
    let server = Server::start_with(&[], &config(&broker, "").replace("remote_prefix", "# remote_prefix"));
    until(|| server.metric("gateway_bridge_up") == 1);
    // As a bridge of the other broker would bring it back: with all that the message has.
    let mut back = Client::connect(broker.port, Protocol::V5, "back");
    back.subscribe("d/#");
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    device.publish("d/1", b"once", QoS::AtLeastOnce, false);
    let bytes = back.next_bytes().expect("the message");
    let mut here = Client::connect(server.ports.tcp, Protocol::V5, "bridge-of-theirs");
    let codec::Packet::Publish(publish) = crate::client::decoded(&bytes, Protocol::V5) else {
        panic!("no message")
    };
    here.send(&codec::Packet::Publish(codec::Publish { ids: Vec::new(), ..publish }));
    until(|| server.metric("gateway_bridge_looped_total") == 1);
    assert_eq!(back.ping(), []);
}
