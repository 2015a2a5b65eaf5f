//! End and restart of the real process: what survives, and what is told to whom.

#[path = "support/client.rs"]
mod client;
mod support;

use std::fs;

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
