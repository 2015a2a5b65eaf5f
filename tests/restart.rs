//! Start, end and restart of the real process: what survives, what is told to whom, and exit codes.

#[path = "support/client.rs"]
mod client;
mod support;

use std::{
    fs,
    net::TcpListener,
    process::{Command, Output},
};

use client::{Client, Got, hello, will};
use mqtt_server::{
    grpc::proto::gateway::v1::{GetLatestRequest, state_client::StateClient},
    types::Protocol,
};
use support::{Server, until};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

/// The latest payload of a device's topic as a backend sees it.
async fn latest(server: &Server, device: &str, topic: &str) -> Option<Vec<u8>> {
    let ca = Certificate::from_pem(fs::read(server.ca()).expect("read the authority"));
    let channel = Endpoint::try_from(format!("https://localhost:{}", server.ports.grpc))
        .expect("address of gRPC")
        .tls_config(ClientTlsConfig::new().ca_certificate(ca))
        .expect("TLS of gRPC")
        .connect()
        .await
        .expect("connect to gRPC");
    let request = GetLatestRequest { topic: topic.to_owned(), device_id: Some(device.to_owned()) };
    let response = StateClient::new(channel).get_latest(request).await.ok()?.into_inner();
    response.value.map(|value| value.payload.to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn latest_values_survive_kill_9() {
    let server = Server::start();
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "dev");
    for n in 0..100 {
        device.publish_acked(&format!("t/{n}"), format!("old {n}").as_bytes(), false);
        device.publish_acked(&format!("t/{n}"), format!("value {n}").as_bytes(), false);
    }
    until(|| {
        server.metric("gateway_latest_written_total") >= 100 && server.metric("gateway_latest_pending") == 0
    });
    let server = server.kill_and_restart(&[], "");
    for n in [0, 50, 99] {
        let value = latest(&server, "dev", &format!("t/{n}")).await;
        assert_eq!(value, Some(format!("value {n}").into_bytes()), "t/{n}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_tells_clients_publishes_wills_and_exits_0() {
    let mut server = Server::start();
    let mut connect = hello(Protocol::V5, "dev");
    connect.will = Some(will("status/dev", b"gone"));
    let mut device = Client::connect_with(server.ports.tcp, connect);
    let mut old = Client::connect(server.ports.tcp, Protocol::V4, "old");
    server.signal("TERM");
    assert_eq!(device.next(), Got::Disconnect(0x8B));
    assert_eq!(device.next(), Got::Closed);
    assert_eq!(old.next(), Got::Closed);
    assert!(server.wait(), "exit code 0");
    // The will is a message of the device, and so the latest value that the next start finds.
    let server = server.kill_and_restart(&[], "");
    assert_eq!(latest(&server, "dev", "status/dev").await, Some(b"gone".to_vec()));
}

#[test]
fn sighup_keeps_serving() {
    let server = Server::start();
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "dev");
    server.signal("HUP");
    until(|| server.log().contains("SIGHUP"));
    assert_eq!(device.ping(), []);
    assert_eq!(Client::connect(server.ports.tcp, Protocol::V4, "new").ping(), []);
}

/// Runs the command to its end with this configuration.
fn run(toml: &str, args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("make a directory");
    fs::write(dir.path().join("test.toml"), toml).expect("write the configuration");
    Command::new(env!("CARGO_BIN_EXE_mqtt-server"))
        .current_dir(dir.path())
        .args(["--config", "test.toml"])
        .args(args)
        .output()
        .expect("run mqtt-server")
}

const PLAIN: &str = "non_tls = true\ninsecure_grpc = true\ngrpc.tls = false\nhttp.enabled = false\n";

#[test]
fn bad_configuration_exits_2_and_names_the_key() {
    for (toml, key) in [
        ("limits.max_qos = 7", "limits.max_qos"),
        ("limits.max_qosx = 1", "max_qosx"),
        ("addr = \"nowhere\"", "addr"),
        ("shards = \"many\"", "shards"),
    ] {
        for args in [&[][..], &["--check"]] {
            let plain = if key == "addr" { "" } else { PLAIN };
            let output = run(&format!("{plain}{toml}\n"), args);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{toml}: {said}");
            assert!(said.contains(key), "{toml}: {said}");
        }
    }
}

#[test]
fn check_exits_0_for_a_good_configuration_and_opens_nothing() {
    let held = TcpListener::bind("127.0.0.1:0").expect("hold a port");
    let address = held.local_addr().expect("address of a bound listener");
    let output = run(&format!("{PLAIN}addr = \"{address}\"\n"), &["--check"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("valid"));
}

#[test]
fn occupied_port_exits_1_and_names_it() {
    let held = TcpListener::bind("127.0.0.1:0").expect("hold a port");
    let address = held.local_addr().expect("address of a bound listener");
    for (key, toml) in [
        ("default", format!("{PLAIN}addr = \"{address}\"\n")),
        ("grpc_addr", format!("{PLAIN}addr = \"127.0.0.1:0\"\ngrpc_addr = \"{address}\"\n")),
    ] {
        let output = run(&toml, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(key) && said.contains(&address.to_string()), "{said}");
    }
}
