//! Reports about bridges that cannot work.

use gateway_core::Protocol;

use super::{
    carried,
    scripted::{EndsAfter, ScriptedBroker},
};
use crate::{
    client::Client,
    support::{Server, command, until},
};

/// The bridges as the API shows them.
fn shown(server: &Server) -> String {
    server.http_get("/v1/bridges").expect("an answer")
}

/// The failure: a bridge without `topics` carries nothing.
#[test]
fn a_bridge_without_topics_carries_everything() {
    let broker = ScriptedBroker::of_takers(Protocol::V5);
    let config = format!("[bridges.all.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n", broker.port);
    let server = Server::start_with(&[], &config);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    for topic in ["a", "b/c/d"] {
        device.publish_acked(topic, topic.as_bytes(), false);
    }
    until(|| carried(&server) == 2);
    assert_eq!(broker.taken(), ["a", "b/c/d"]);
}

/// The failure: a bridge whose every connection ends at once counts as up, and tries again without growing pauses.
#[test]
fn a_bridge_whose_connections_do_not_last_is_down() {
    for (direction, ends) in [("in", EndsAfter::Subscribe), ("out", EndsAfter::Connect)] {
        let broker = ScriptedBroker::ending(Protocol::V5, ends);
        let config = format!(
            "[bridges.b]\ndirection = \"{direction}\"\ntopics = [\"x/#\"]\nretry_max = \"1s\"\n\
             [bridges.b.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n",
            broker.port
        );
        let server = Server::start_with(&[], &config);
        until(|| shown(&server).contains("\"BRIDGE_STATE_DOWN\""));
        until(|| broker.connects() > 6);
        let shown = shown(&server);
        assert!(shown.contains("\"BRIDGE_STATE_DOWN\""), "{direction}: {shown}");
        let log = server.log();
        assert!(!log.contains("bridge is up"), "{direction}: {log}");
    }
}

/// The failure: a file that a bridge or the bans need is missing, and `--check` says that all is well.
#[test]
fn check_looks_at_the_files_of_bridges_and_at_bans() {
    for (config, key) in [
        (
            "[bridges.a.webhook]\nurl = \"http://h/\"\nsecret_file = \"nowhere\"\n",
            "bridges.a.webhook.secret_file",
        ),
        (
            "[bridges.a.mqtt]\nurl = \"mqtt://h\"\nusername = \"u\"\npassword_file = \"nowhere\"\n",
            "bridges.a.mqtt.password_file",
        ),
        ("[bans]\nfile = \"nowhere\"\n", "bans.file"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("c.toml"), config).expect("write");
        let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
        let output =
            command.current_dir(dir.path()).args(["--config", "c.toml", "--check", "--non-tls"]).output();
        let output = output.expect("run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{key}: {said}");
        assert!(said.contains(key), "{key}: {said}");
    }
}

/// The failure: an address where no Kafka is shows only that a message has timed out, after half a minute.
#[cfg(feature = "kafka")]
#[test]
fn a_kafka_that_is_not_there_is_told_with_its_reason() {
    // Bound, and not listening: connections are refused.
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = socket.local_addr().expect("an address").port();
    drop(socket);
    for direction in ["out", "in"] {
        let config = format!(
            "[bridges.lake]\ndirection = \"{direction}\"\ntopics = [\"x\"]\nretry_max = \"1s\"\n\
             [bridges.lake.kafka]\nbrokers = [\"127.0.0.1:{port}\"]\n"
        );
        let server = Server::start_with(&[], &config);
        if direction == "out" {
            let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
            device.publish_acked("x", b"1", false);
        }
        until(|| shown(&server).contains("\"BRIDGE_STATE_DOWN\""));
        let shown = shown(&server);
        assert!(shown.contains("\"reason\":\"connect\""), "{direction}: {shown}");
        assert!(shown.contains("Connection refused"), "{direction}: {shown}");
    }
}
