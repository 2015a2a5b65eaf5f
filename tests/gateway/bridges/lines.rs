//! Lines of the log while the other side is away.

use gateway_core::Protocol;

use crate::{
    client::Client,
    support::{Server, until},
};

/// The failure: a Kafka that is away fills the log with lines of its library, one for each attempt to connect.
#[test]
fn a_kafka_that_is_away_causes_lines_of_the_gateway_only() {
    let config = "[bridges.out]\ntopics = [\"d/#\"]\nretry_max = \"1s\"\ndeadline = \"5s\"\n\
                  [bridges.out.kafka]\nbrokers = [\"127.0.0.1:1\"]\ntopic = \"t\"\n";
    let server = Server::start_with(&[], config);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    device.publish_acked("d/1", b"1", false);
    // Our own line tells of it.
    until(|| server.log().contains("bridge is down"));
    let log = server.log();
    let libraries: Vec<&str> = log.lines().filter(|line| line.contains("rdkafka")).collect();
    assert_eq!(libraries, [""; 0]);
}
