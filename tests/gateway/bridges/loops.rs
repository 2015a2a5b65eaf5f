//! Messages that could go round between gateways.

use gateway_core::{Protocol, QoS};

use super::{carried, scripted::ScriptedBroker};
use crate::{
    client::{Client, Got},
    support::{Server, ports::free_ports, until},
};

/// A gateway that listens on this port, and brings everything below `loop/` in from the gateway on the other one.
fn facing(own: u16, other: u16) -> String {
    format!(
        "[bridges.other]\ndirection = \"in\"\ntopics = [\"loop/#\"]\nretry_max = \"1s\"\n\
         [bridges.other.mqtt]\nurl = \"mqtt://127.0.0.1:{other}\"\n\
         [[listeners]]\nname = \"facing\"\nkind = \"tcp\"\naddress = \"127.0.0.1:{own}\"\n"
    )
}

/// The failure: a message goes round for ever between two gateways that each bring in from the other.
#[test]
fn two_gateways_that_bring_in_from_each_other_have_each_message_once() {
    let first = free_ports(2);
    let ports = [first, first + 1];
    let servers = [facing(ports[0], ports[1]), facing(ports[1], ports[0])]
        .map(|config| Server::start_with(&[], &config));
    for server in &servers {
        until(|| server.metric("gateway_bridge_up") == 1);
    }
    let mut readers = ports.map(|port| {
        let mut reader = Client::connect(port, Protocol::V5, "reader");
        reader.subscribe_with("loop/#", QoS::AtLeastOnce, None);
        reader
    });
    let mut devices = ports.map(|port| Client::connect(port, Protocol::V5, "device"));
    for round in 0..3 {
        for (at, device) in devices.iter_mut().enumerate() {
            let payload = format!("{round} from {at}").into_bytes();
            device.publish_acked("loop/1", &payload, false);
            for reader in &mut readers {
                assert_eq!(reader.next(), Got::Publish("loop/1".to_owned(), payload.clone()));
            }
        }
    }
    // Each has brought in the other's three, and known its own three when they came back.
    for server in &servers {
        until(|| server.metric("gateway_bridge_looped_total") == 3);
        assert_eq!(carried(server), 3);
    }
    for reader in &mut readers {
        assert_eq!(reader.ping(), [], "nothing came twice");
    }
}

/// The failure: the mark is another one after each start, so that a message of before is not known.
#[test]
fn a_gateway_without_groups_keeps_its_mark() {
    let broker = ScriptedBroker::of_takers(Protocol::V5);
    let config = format!(
        "[store]\nenabled = false\n[latest]\nenabled = false\n[bridges.b]\ndirection = \"in\"\ntopics = [\"x\"]\n\
         [bridges.b.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n",
        broker.port
    );
    let server = Server::start_with(&[], &config);
    until(|| broker.marks().len() == 1);
    let _server = server.stop_and_restart(&[], &config);
    until(|| broker.marks().len() == 2);
    let marks = broker.marks();
    assert!(!marks[0].is_empty());
    assert_eq!(marks[0], marks[1]);
}
