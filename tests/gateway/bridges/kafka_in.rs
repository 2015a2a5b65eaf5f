//! Messages from a real Kafka, which is killed and paused, as is the gateway.

use std::collections::BTreeMap;

use gateway_core::{Protocol, QoS};

use super::{broker::Broker, cluster::Kafka};
use crate::{
    client::{Client, Got, hello},
    support::{Server, until},
};

/// A metric of one bridge; `labels` is what comes behind its name in the row.
fn row(server: &Server, name: &str, labels: &[&str]) -> u64 {
    let page = server.http_get("/metrics").expect("read the metrics");
    let is_it =
        |line: &&str| line.split('{').next() == Some(name) && labels.iter().all(|label| line.contains(label));
    let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
    page.lines().filter(is_it).filter_map(value).sum::<f64>() as u64
}

/// A device whose session waits for it. It acknowledges nothing, and so has fewer messages than may be under way to one.
fn stays(server: &Server, name: &str) -> Client {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(3_600);
    Client::connect_with(server.ports.tcp, connect)
}

/// Reads messages, by topic, until each of `topics` has had all numbers up to `last`.
fn read(client: &mut Client, topics: &[&str], last: usize) -> BTreeMap<String, Vec<usize>> {
    let mut got = BTreeMap::<String, Vec<usize>>::new();
    while !topics.iter().all(|topic| got.get(*topic).is_some_and(|numbers| numbers.contains(&last))) {
        match client.next() {
            Got::Publish(topic, payload) => {
                let number = String::from_utf8(payload).expect("text").parse().expect("a number");
                got.entry(topic).or_default().push(number);
            }
            other => panic!("{other:?} after {got:?}"),
        }
    }
    got
}

/// The failures: a record is lost by the death of either side, comes twice though nothing died, or out of order.
#[test]
fn what_kafka_has_comes_in_also_after_crashes_of_both() {
    let Some(kafka) = Kafka::start() else { return };
    let config = format!(
        "[bridges.lake]\ndirection = \"in\"\ntopics = [\"commands\"]\nretry_max = \"1s\"\n\
         [bridges.lake.kafka]\nbrokers = [\"127.0.0.1:{}\"]\nmqtt_topic = \"to/{{key}}\"\n",
        kafka.port
    );
    let writer = kafka.writer();
    let devices = ["d1", "d2", "d3"];
    let write = |from: usize, to: usize| {
        for number in from..to {
            for device in devices {
                writer.put("commands", Some(device), number.to_string().as_bytes(), &[]);
            }
        }
    };
    // Makes the topic, and is before the bridge begins.
    writer.put("commands", Some("d1"), b"99999", &[]);
    writer.flush();
    let mut server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 1);
    let topics = ["to/d1", "to/d2", "to/d3"];
    let all = |from: usize, to: usize| -> BTreeMap<String, Vec<usize>> {
        topics.iter().map(|topic| ((*topic).to_owned(), (from..to).collect())).collect()
    };
    let subscribed = |server: &Server, name: &str| {
        let mut reader = stays(server, name);
        reader.subscribe_with("to/#", QoS::AtLeastOnce, None);
        reader
    };
    let mut reader = subscribed(&server, "r1");
    write(0, 200);
    assert_eq!(read(&mut reader, &topics, 199), all(0, 200), "once, and in order");
    // A Kafka that stands still and goes on, and a gateway that is stopped and started: nothing comes twice.
    kafka.tell("pause");
    write(200, 300);
    kafka.tell("resume");
    writer.flush();
    assert_eq!(read(&mut reader, &topics, 299), all(200, 300), "once, though it was slow");
    drop(subscribed(&server, "r2"));
    write(300, 400);
    server = server.stop_and_restart(&[], &config);
    write(400, 500);
    let mut reader = stays(&server, "r2");
    assert_eq!(read(&mut reader, &topics, 499), all(300, 500), "once, though the gateway was stopped");
    // Both die.
    drop(subscribed(&server, "r3"));
    write(500, 550);
    server = server.kill_and_restart(&[], &config);
    kafka.tell("kill");
    write(550, 600);
    kafka.tell("start");
    writer.flush();
    let mut reader = stays(&server, "r3");
    for (topic, numbers) in read(&mut reader, &topics, 599) {
        // Repeated messages come behind their first copies.
        let mut first: Vec<usize> = Vec::new();
        for number in numbers {
            if !first.contains(&number) {
                first.push(number);
            }
        }
        // Messages that were carried right before the crash may have come again.
        first.retain(|number| *number >= 500);
        assert_eq!(first, (500..600).collect::<Vec<_>>(), "{topic}");
    }
    until(|| server.metric("gateway_bridge_up") == 1);
    assert_eq!(server.metric("gateway_bridge_refused_total"), 0);
}

/// The failures: a record that makes no message stops those behind it, or is passed over in silence; what went out comes in
/// again; what the gateway refuses is lost.
#[test]
fn records_from_kafka_that_cannot_be_taken_stop_nothing() {
    let Some(kafka) = Kafka::start() else { return };
    let Some(mut broker) = Broker::start() else { return };
    let writer = kafka.writer();
    writer.put("plain", Some("first"), b"made", &[]);
    writer.put("loop", Some("first"), b"made", &[]);
    writer.flush();
    let config = format!(
        "[limits]\nmax_packet_size = \"8 KiB\"\n\
         [bridges.out]\ntopics = [\"loop/#\"]\n[bridges.out.kafka]\nbrokers = [\"127.0.0.1:{0}\"]\ntopic = \"loop\"\n\
         [bridges.lake]\ndirection = \"in\"\ntopics = [\"plain\", \"loop\"]\nretry_max = \"500ms\"\n\
         [bridges.lake.kafka]\nbrokers = [\"127.0.0.1:{0}\"]\nmqtt_topic = \"in/{{key}}\"\n\
         [bridges.far]\ntopics = [\"in/bulk\"]\ninclude_backends = true\nmax_bytes = \"64 KiB\"\nbatch_bytes = \"16 KiB\"\n\
         when_full = \"refuse\"\nretry_max = \"1s\"\n[bridges.far.mqtt]\nurl = \"mqtt://127.0.0.1:{1}\"\n",
        kafka.port, broker.port
    );
    let server = Server::start_with(&[], &config);
    until(|| server.metric("gateway_bridge_up") == 3);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "loops");
    device.subscribe("#");
    Client::connect(server.ports.tcp, Protocol::V5, "sender").publish_acked("loop/1", b"round", false);
    until(|| row(&server, "gateway_bridge_looped_total", &["lake"]) == 1);
    writer.put("plain", None, b"no key", &[]);
    writer.put("plain", Some("a/+/b"), b"no topic", &[]);
    writer.put("plain", Some("long"), &[b'x'; 9_000], &[]);
    writer.put("plain", Some("good"), b"yes", &[("content-type", b"text/plain"), ("no-text", b"\xff")]);
    writer.flush();
    until(|| server.metric("gateway_bridge_refused_total") == 3);
    for reason in ["field", "topic", "size"] {
        let rows = row(&server, "gateway_bridge_refused_total", &["lake", &format!("reason=\"{reason}\"")]);
        assert_eq!(rows, 1, "{reason}");
    }
    until(|| row(&server, "gateway_bridge_messages_total", &["lake"]) == 1);
    let got: Vec<_> = device.ping().into_iter().filter(|got| matches!(got, Got::Publish(..))).collect();
    let good = |topic: &str, payload: &[u8]| Got::Publish(topic.to_owned(), payload.to_vec());
    assert_eq!(got, [good("loop/1", b"round"), good("in/good", b"yes")]);
    drop(device);
    // The gateway refuses what the far broker does not take.
    broker.kill();
    let mut count = 0;
    until(|| {
        for _ in 0..100 {
            writer.put("plain", Some("bulk"), &[b'x'; 1_000], &[]);
            count += 1;
        }
        writer.flush();
        row(&server, "gateway_bridge_failures_total", &["lake", "reason=\"store\""]) > 1
    });
    assert!(row(&server, "gateway_bridge_messages_total", &["lake"]) <= count, "some of them wait");
    broker.start_again();
    until(|| row(&server, "gateway_bridge_messages_total", &["far"]) == count);
    assert_eq!(row(&server, "gateway_bridge_messages_total", &["lake"]), count + 1, "once each");
}
