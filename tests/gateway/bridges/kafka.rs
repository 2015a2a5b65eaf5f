//! Messages to a real Kafka, which is killed and paused.

use std::collections::BTreeMap;

use gateway_core::Protocol;

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
        // What came again is behind what came first.
        let mut first = Vec::new();
        for number in numbers {
            if !first.contains(&number) {
                first.push(number);
            }
        }
        assert_eq!(first, (0..400).collect::<Vec<_>>(), "{device}");
    }
}
