//! Connections to gRPC while others without credentials hold as many as there may be.

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{ListDevicesRequest, devices_client::DevicesClient};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};
use tonic::{Code, service::interceptor::InterceptedService, transport::Channel};

use super::{Bearer, Guarded};
use crate::harness::soon;

/// The head and the first bytes of a call of Health/Check with an empty request.
fn check() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let mut block = vec![0x83, 0x86, 0x04, 28];
    block.extend_from_slice(b"/grpc.health.v1.Health/Check");
    block.extend_from_slice(b"\x01\x09localhost\x0F\x10\x10application/grpc");
    bytes.extend_from_slice(&[0, 0, u8::try_from(block.len()).unwrap(), 1, 4, 0, 0, 0, 1]);
    bytes.extend(block);
    bytes.extend_from_slice(b"\0\0\x05\0\x01\0\0\0\x01\0\0\0\0\0");
    bytes
}

/// A connection from 127.0.0.`host` that has had the answer of a health check.
async fn stranger(host: u8, guarded: &Guarded) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, host], 0).into()).unwrap();
    let mut socket = socket.connect(guarded.setup.gateway.address("grpc").unwrap()).await.unwrap();
    socket.write_all(&check()).await.unwrap();
    let mut head = [0; 9];
    // Up to HEADERS, which only an answer has.
    while head[3] != 1 {
        socket.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        socket.read_exact(&mut payload).await.unwrap();
    }
    socket
}

async fn channel(guarded: &Guarded) -> Channel {
    let address = format!("http://{}", guarded.setup.gateway.address("grpc").unwrap());
    soon("a connection", Channel::from_shared(address).unwrap().connect()).await.unwrap()
}

/// Rules out that two addresses close gRPC to everybody by connections with one health check each.
#[tokio::test(flavor = "multi_thread")]
async fn connections_without_credentials_keep_no_place_from_those_with_a_token() {
    let guarded = Guarded::with(&[("reader", Role::Reader, None, None)], |config| {
        config.grpc.max_connections = 60;
        config.grpc.max_connections_per_address = 30;
        config.grpc.handshake_timeout = "4s".parse().unwrap();
    })
    .await;
    let mut strangers = Vec::new();
    for n in 0..60 {
        strangers.push(soon("a health check", stranger(2 + n % 2, &guarded)).await);
    }
    let mut held = Vec::new();
    for _ in 0..24 {
        let bearer = Bearer(guarded.token("reader").to_owned());
        let mut client = DevicesClient::new(InterceptedService::new(channel(&guarded).await, bearer));
        soon("a call", client.list_devices(ListDevicesRequest::default())).await.unwrap();
        held.push(client);
    }
    // Others come, and take nothing from those who have shown a token.
    for n in 0..60 {
        strangers.push(soon("a health check", stranger(2 + n % 2, &guarded)).await);
    }
    for mut client in held {
        soon("a call", client.list_devices(ListDevicesRequest::default())).await.unwrap();
    }
}

/// Rules out that a backend which begins with many calls at once is taken for somebody without credentials.
#[tokio::test(flavor = "multi_thread")]
async fn many_calls_at_once_with_a_token_are_served_on_a_new_connection() {
    let guarded = Guarded::with(&[("reader", Role::Reader, None, None)], |_| {}).await;
    let bearer = Bearer(guarded.token("reader").to_owned());
    let client = DevicesClient::new(InterceptedService::new(channel(&guarded).await, bearer));
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let mut client = client.clone();
        calls.spawn(async move { client.list_devices(ListDevicesRequest::default()).await.map(drop) });
    }
    while let Some(answer) = soon("an answer", calls.join_next()).await {
        assert!(answer.unwrap().is_ok());
    }
    // One call after another may be denied.
    let mut client = DevicesClient::new(channel(&guarded).await);
    for _ in 0..20 {
        let denied = soon("an answer", client.list_devices(ListDevicesRequest::default())).await;
        assert_eq!(denied.unwrap_err().code(), Code::Unauthenticated);
    }
}
