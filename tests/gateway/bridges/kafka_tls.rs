//! A Kafka that speaks TLS and wants a certificate and a password.

use gateway_core::Protocol;

use super::{cluster::Kafka, papers};
use crate::{
    client::{Client, Got},
    support::{Server, until, write_secret},
};

/// The failures: a bridge does not speak TLS or show its certificate and password, or it never reads a file again that
/// was put right.
#[test]
fn kafka_by_tls_is_reached_as_soon_as_the_password_is_right() {
    for mechanism in ["SCRAM-SHA-512", "PLAIN"] {
        let folder = tempfile::tempdir().expect("make a directory");
        let at = |name: &str| folder.path().join(name).display().to_string();
        papers::write(folder.path());
        write_secret(at("password").as_ref(), "wrong\n");
        let Some(kafka) = Kafka::start_with(Some(folder.path().to_owned())) else { return };
        let writer = kafka.writer();
        writer.put("in", Some("1"), b"before", &[]);
        writer.flush();
        let secure = format!(
            "brokers = [\"127.0.0.1:{}\"]\ntls = true\nca = \"{}\"\ncert = \"{}\"\ncert_key = \"{}\"\n\
             username = \"bridge\"\npassword_file = \"{}\"\nmechanism = \"{mechanism}\"\n",
            kafka.port + 2,
            at("ca.pem"),
            at("client.crt"),
            at("client.key"),
            at("password")
        );
        let common = "retry_max = \"1s\"\ndeadline = \"5s\"\n";
        let config = format!(
            "[bridges.out]\ntopics = [\"out/#\"]\n{common}[bridges.out.kafka]\ntopic = \"out\"\n{secure}\
             [bridges.in]\ndirection = \"in\"\ntopics = [\"in\"]\n{common}\
             [bridges.in.kafka]\nmqtt_topic = \"in/{{key}}\"\n{secure}"
        );
        let server = Server::start_with(&[], &config);
        until(|| server.metric("gateway_bridge_failures_total") > 2);
        assert_eq!(server.metric("gateway_bridge_up"), 0, "{mechanism}: with the wrong password");
        for direction in ["out", "in"] {
            let label = format!("direction=\"{direction}\",reason=\"denied\"");
            until(|| server.metric_of("gateway_bridge_failures_total", &label) > 0);
        }
        write_secret(at("password").as_ref(), "secret\n");
        until(|| server.metric("gateway_bridge_up") == 2);
        let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
        device.subscribe("in/#");
        writer.put("in", Some("1"), b"7", &[]);
        writer.flush();
        assert_eq!(device.next(), Got::Publish("in/1".to_owned(), b"7".to_vec()));
        device.publish_acked("out/1", b"8", false);
        until(|| server.metric("gateway_bridge_messages_total") == 2);
        // On a busy machine a read may time out before the first record.
        until(|| kafka.values("out") == [("d1".to_owned(), vec![8])].into());
    }
}

/// The failure: a certificate that does not verify shows only that nobody answers.
#[test]
fn a_kafka_of_another_ca_is_told_with_its_reason() {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    papers::write(folder.path());
    papers::write(other.path());
    write_secret(&folder.path().join("password"), "secret\n");
    let Some(kafka) = Kafka::start_with(Some(folder.path().to_owned())) else { return };
    let at = |name: &str| folder.path().join(name).display().to_string();
    let config = format!(
        "[bridges.lake]\ntopics = [\"x\"]\nretry_max = \"1s\"\n[bridges.lake.kafka]\n\
         brokers = [\"127.0.0.1:{}\"]\ntls = true\nca = \"{}\"\ncert = \"{}\"\ncert_key = \"{}\"\n\
         username = \"bridge\"\npassword_file = \"{}\"\n",
        kafka.port + 2,
        other.path().join("ca.pem").display(),
        at("client.crt"),
        at("client.key"),
        at("password")
    );
    let server = Server::start_with(&[], &config);
    let shown = || server.http_get("/v1/bridges").expect("an answer");
    until(|| shown().contains("\"BRIDGE_STATE_DOWN\""));
    assert!(shown().contains("certificate verify failed"), "{}", shown());
}
