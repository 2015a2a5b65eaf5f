//! Messages from a Mosquitto.

use gateway_core::{Protocol, QoS};

use super::{broker::Broker, carried};
use crate::{
    client::{Client, Got},
    support::{Server, until},
};

fn config(broker: &Broker, level: &str) -> String {
    format!(
        "[bridges.cloud]\ndirection = \"in\"\ntopics = [\"site/#\"]\nretry_max = \"1s\"\n\
         [bridges.cloud.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\nremote_prefix = \"site/\"\nlocal_prefix = \"from/\"\n\
         level = \"{level}\"\n",
        broker.port
    )
}

/// The failure: what is published at the other broker is lost while the gateway is dead, or acknowledged before it is
/// on its disk.
#[test]
fn what_a_broker_has_comes_in_also_after_a_crash() {
    for level in ["5", "3.1.1"] {
        let Some(broker) = Broker::start() else { return };
        let config = config(&broker, level);
        let mut server = Server::start_with(&[], &config);
        until(|| server.metric("gateway_bridge_up") == 1);
        let mut connect = crate::client::hello(Protocol::V5, "reader");
        connect.clean_start = false;
        connect.session_expiry = Some(3_600);
        let mut reader = Client::connect_with(server.ports.tcp, connect.clone());
        reader.subscribe_with("from/#", QoS::AtLeastOnce, None);
        let mut far = Client::connect(broker.port, Protocol::V5, "far");
        far.publish_acked("site/1", b"alive", false);
        assert_eq!(reader.next(), Got::Publish("from/1".to_owned(), b"alive".to_vec()));
        until(|| carried(&server) == 1);
        drop(reader);
        // Messages that the gateway has acknowledged there are on its disk here, and the others wait there.
        for number in 0..50 {
            far.publish_acked(&format!("site/{number}"), b"before", false);
        }
        server = {
            let dead = server;
            let mut far = Client::connect(broker.port, Protocol::V5, "far-2");
            let server = dead.kill_and_restart(&[], &config);
            for number in 0..50 {
                far.publish_acked(&format!("site/{number}"), b"after", false);
            }
            server
        };
        let mut reader = Client::connect_with(server.ports.tcp, connect);
        let mut missing: std::collections::BTreeSet<(String, Vec<u8>)> = (0..50)
            .flat_map(|number| ["before", "after"].map(|text| (format!("from/{number}"), text.into())))
            .collect();
        while !missing.is_empty() {
            match reader.next() {
                Got::Publish(topic, payload) => {
                    missing.remove(&(topic, payload));
                }
                other => panic!("{other:?} with {} missing", missing.len()),
            }
        }
    }
}

/// The failure: a bridge out and a bridge in to the same broker send a message round.
#[test]
fn what_went_out_does_not_come_in_again() {
    let Some(broker) = Broker::start() else { return };
    let config = format!(
        "[bridges.out]\ntopics = [\"a/#\"]\n[bridges.out.mqtt]\nurl = \"mqtt://127.0.0.1:{0}\"\n\
         [bridges.in]\ndirection = \"in\"\ntopics = [\"a/#\"]\n[bridges.in.mqtt]\nurl = \"mqtt://127.0.0.1:{0}\"\n",
        broker.port
    );
    let server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 2);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    device.subscribe("a/#");
    device.send(&crate::client::message("a/1", b"once", QoS::AtLeastOnce, false));
    until(|| server.metric("gateway_bridge_looped_total") == 1);
    assert_eq!(carried(&server), 1, "the one that went out");
    let got = device.ping();
    let copies = got.iter().filter(|got| matches!(got, Got::Publish(..))).count();
    assert_eq!(copies, 1, "{got:?}");
}

/// The failure: a session at the other broker still has the subscriptions of an earlier configuration, and what they
/// match comes in.
#[test]
fn what_the_configuration_names_no_more_does_not_come_in() {
    let Some(broker) = Broker::start() else { return };
    let config = config(&broker, "5");
    let server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 1);
    let narrower = config.replace("site/#", "site/a/#");
    let server = server.kill_and_restart(&[], &narrower);
    until(|| server.metric("gateway_bridge_up") == 1);
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    reader.subscribe("from/#");
    let mut far = Client::connect(broker.port, Protocol::V5, "far");
    far.publish_acked("site/b", b"no more", false);
    far.publish_acked("site/a/1", b"still", false);
    assert_eq!(reader.next(), Got::Publish("from/a/1".to_owned(), b"still".to_vec()));
    assert_eq!(server.metric_of("gateway_bridge_refused_total", "reason=\"topic\""), 1);
}
