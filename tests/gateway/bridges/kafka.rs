//! Messages to a real Kafka, which is killed and paused.

use std::collections::BTreeMap;

use gateway_core::{Protocol, QoS};

use super::{carried, cluster::Kafka, lag};
use crate::{
    client::Client,
    support::{Server, until},
};

/// The failures: a message that was acknowledged to a device is not in Kafka; the messages of a device are in another order;
/// devices wait for a Kafka that is paused or dead.
#[test]
fn kafka_gets_what_devices_were_acknowledged_in_order() {
    let Some(kafka) = Kafka::start() else { return };
    let config = format!(
        "[bridges.lake]\ntopics = [\"d/#\"]\nretry_max = \"1s\"\ndeadline = \"5s\"\n\
         [bridges.lake.kafka]\nbrokers = [\"127.0.0.1:{}\"]\ntopic = \"from-{{1}}\"\n",
        kafka.port
    );
    let mut server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 1);
    let publish = |server: &Server, from: usize, until: usize| {
        for device in ["d1", "d2", "d3"] {
            let mut client = Client::connect(server.ports.tcp, Protocol::V5, device);
            for number in from..until {
                client.publish_acked(&format!("d/{device}"), number.to_string().as_bytes(), false);
            }
        }
    };
    publish(&server, 0, 100);
    until(|| lag(&server) == 0 && carried(&server) == 300);
    let once: Vec<usize> = (0..100).collect();
    let wanted: BTreeMap<_, _> = ["d1", "d2", "d3"].map(|device| (device.to_owned(), once.clone())).into();
    assert_eq!(kafka.values("from-d"), wanted, "once, and in order");
    kafka.tell("pause");
    publish(&server, 100, 200);
    kafka.tell("resume");
    until(|| lag(&server) == 0);
    kafka.tell("kill");
    publish(&server, 200, 300);
    // An acknowledgement goes out before the message is counted.
    until(|| lag(&server) == 300);
    server = server.kill_and_restart(&[], &config);
    publish(&server, 300, 400);
    kafka.tell("start");
    until(|| lag(&server) == 0);
    for (device, numbers) in kafka.values("from-d") {
        // Repeated records come behind their first copies.
        let mut first = Vec::new();
        for number in numbers {
            if !first.contains(&number) {
                first.push(number);
            }
        }
        assert_eq!(first, (0..400).collect::<Vec<_>>(), "{device}");
    }
}

/// The failures: a record that is too large takes those of its request with it; a topic that takes small requests only
/// takes none; records of a device overtake each other while the one at fault is looked for.
#[test]
fn only_a_record_that_kafka_refuses_alone_becomes_a_dead_letter() {
    const MESSAGES: usize = 3_000;
    const TOO_LARGE: usize = 500;
    let Some(kafka) = Kafka::start() else { return };
    kafka.create_topic("small", &[("max.message.bytes", "20000")]);
    kafka.create_topic("compact", &[("cleanup.policy", "compact")]);
    let bridge = |name: &str, key: &str| {
        format!(
            "[bridges.{name}]\ntopics = [\"{name}/#\"]\nretry_max = \"1s\"\n[bridges.{name}.kafka]\n\
             brokers = [\"127.0.0.1:{}\"]\ntopic = \"{name}\"\nkey = \"{key}\"\n",
            kafka.port
        )
    };
    let config = bridge("small", "{client_id}") + &bridge("compact", "{2}");
    let server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 2);
    // Whole batches wait.
    kafka.tell("pause");
    let mut devices =
        ["d1", "d2", "d3"].map(|device| Client::connect(server.ports.tcp, Protocol::V5, device));
    let mut wanted = BTreeMap::<String, Vec<usize>>::new();
    for number in 0..MESSAGES {
        let at = number % 3;
        let is_large = number % TOO_LARGE == TOO_LARGE / 2;
        let payload = if is_large { format!("{number:025000}") } else { format!("{number:0210}") };
        devices[at].publish("small/1", payload.as_bytes(), QoS::AtMostOnce, false);
        if !is_large {
            wanted.entry(format!("d{}", at + 1)).or_default().push(number);
        }
        if number % 500 == 499 {
            assert_eq!(devices.each_mut().map(Client::ping), [const { Vec::new() }; 3]);
        }
    }
    // Lacks the second level, and so the key that this topic wants.
    for number in 0..100 {
        let topic = if number == 50 { "compact" } else { "compact/k" };
        devices[0].publish_acked(topic, number.to_string().as_bytes(), false);
    }
    kafka.tell("resume");
    until(|| server.metric("gateway_bridge_lag_messages") == 0);
    assert_eq!(kafka.values("small"), wanted, "all but those that are too large, once and in order");
    let refused = |reason: &str| {
        server.metric_of("gateway_bridge_refused_total", &format!("direction=\"out\",reason=\"{reason}\""))
    };
    assert_eq!(refused("size"), (MESSAGES / TOO_LARGE) as u64);
    assert_eq!(refused("record"), 1);
    assert_eq!(server.metric("gateway_group_dead_letters"), 1 + (MESSAGES / TOO_LARGE) as u64);
    let numbers = kafka.values("compact").remove("k").expect("records");
    assert_eq!(numbers, (0..100).filter(|&number| number != 50).collect::<Vec<_>>());
}
