//! Connections that have not shown credentials: what they hold, how many calls they may make at once, and who gets their places.

use std::net::{Ipv4Addr, SocketAddr};

use broker::MemoryKind;

use super::*;

const CHECK: &str = "/grpc.health.v1.Health/Check";
/// Charges for a connection, and for a call.
const CONNECTION: usize = 16 << 10;
const CALL: usize = 16 << 10;
const END_STREAM: u8 = 1;
const GOAWAY: u8 = 7;

/// A server whose callers need a token, of which there is none.
async fn start_guarded(config: GrpcConfig) -> Running {
    let backends = config::Backends { tokens: Some("/nonexistent/tokens".into()), ..Default::default() };
    start_for(&backends, None, config, None).await
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let [_, len @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&len[..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// The preface, and SETTINGS by which no answer may have a byte.
fn beginning() -> Vec<u8> {
    [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[0, 4, 0, 0, 0, 0])].concat()
}

/// The headers of a call that is not finished, or has one message of no bytes.
fn call(path: &str, stream: u8, is_whole: bool) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let block = [
        vec![0x83, 0x86, 0x04],
        text(path),
        vec![0x01],
        text("localhost"),
        vec![0x0F, 0x10],
        text("application/grpc"),
    ];
    let mut call = frame(1, 4, stream, &block.concat());
    if is_whole {
        call.extend(frame(0, END_STREAM, stream, &[0; 5]));
    }
    call
}

async fn from(host: u8, port: u16, bytes: &[u8]) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::new(Ipv4Addr::new(127, 0, 1, host).into(), 0)).unwrap();
    let mut socket = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
    socket.write_all(bytes).await.unwrap();
    socket
}

/// The next frame: its type, its stream and its payload.
async fn next_frame(socket: &mut TcpStream) -> Option<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    socket.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    socket.read_exact(&mut payload).await.ok()?;
    Some((head[3], head[8], payload))
}

async fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Rules out that answers which a client gives no room for are on no account: 150 connections of 1,000 calls took a GiB.
#[tokio::test]
async fn health_checks_whose_answers_have_no_room_are_on_the_account() {
    let running = start_guarded(GrpcConfig::default()).await;
    let held = || running.account.held(MemoryKind::GrpcUnauthenticated);
    let reserve = running.account.limit() / 128;
    until(|| held() == reserve).await;
    let mut bytes = beginning();
    bytes.extend((0..8).flat_map(|n| call(CHECK, 2 * n + 1, true)));
    let mut sockets = Vec::new();
    for _ in 0..10 {
        sockets.push(from(1, running.port, &bytes).await);
    }
    until(|| held() >= 10 * (CONNECTION + 8 * CALL)).await;
    assert_eq!(running.account.held(MemoryKind::GrpcMessages), 0, "nothing of it is taken from backends");
    drop(sockets);
    until(|| held() == reserve).await;
}

/// Rules out that a client without credentials has the server keep something for 1,000 calls.
#[tokio::test]
async fn a_ninth_call_at_once_without_credentials_is_told_to_be_calmer() {
    let running = start_guarded(GrpcConfig::default()).await;
    for (path, is_whole) in [(CHECK, false), (CHECK, true), ("/gateway.v1.Devices/ListDevices", false)] {
        let mut bytes = beginning();
        bytes.extend((0..9).flat_map(|n| call(path, 2 * n + 1, is_whole)));
        let mut socket = from(1, running.port, &bytes).await;
        let mut last = None;
        while let Some(frame) = next_frame(&mut socket).await {
            last = Some(frame);
        }
        let (kind, _, payload) = last.unwrap();
        assert_eq!((kind, &payload[..8]), (GOAWAY, &[0, 0, 0, 15, 0, 0, 0, 11][..]), "{path} {is_whole}");
    }
    // Eight are no reason.
    let mut bytes = beginning();
    bytes.extend((0..8).flat_map(|n| call(CHECK, 2 * n + 1, false)));
    bytes.extend(frame(6, 0, 0, b"a PING :"));
    let mut socket = from(1, running.port, &bytes).await;
    loop {
        let (kind, _, payload) = next_frame(&mut socket).await.unwrap();
        assert_ne!(kind, GOAWAY);
        if kind == 6 && payload == b"a PING :" {
            break;
        }
    }
}

#[tokio::test]
async fn callers_who_need_no_credentials_may_make_many_calls_at_once() {
    let running = start(None, GrpcConfig::default()).await;
    let channel = connect(running.port).await;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..100 {
        calls.spawn(check(channel.clone(), ""));
    }
    while let Some(answer) = calls.join_next().await {
        assert_eq!(answer.unwrap(), Ok(Answer::Serving));
    }
    assert!(running.account.held(MemoryKind::GrpcMessages) > 0);
}

/// Rules out that 15 MB are taken from nobody in particular for the name of a service.
#[tokio::test]
async fn a_health_check_is_refused_by_the_head_of_a_large_request() {
    let running = start_guarded(GrpcConfig::default()).await;
    let channel = connect(running.port).await;
    assert_eq!(check(channel.clone(), &"x".repeat(200)).await, Err(Code::NotFound));
    assert_eq!(check(channel, &"x".repeat(300)).await, Err(Code::ResourceExhausted));
    let mut bytes = call(CHECK, 1, false);
    bytes.extend(frame(0, 0, 1, &[0, 0, 0xE4, 0xE1, 0xC0]));
    let mut socket =
        from(1, running.port, &[&beginning()[..24], &frame(4, 0, 0, &[]), &bytes].concat()).await;
    loop {
        let (kind, stream, _) = next_frame(&mut socket).await.unwrap();
        if (kind, stream) == (1, 1) {
            break;
        }
    }
}

/// Rules out that a health check fails because backends and devices use up the memory.
#[tokio::test]
async fn health_is_told_without_memory_and_other_calls_are_refused() {
    let running = start(None, GrpcConfig::default()).await;
    let channel = connect(running.port).await;
    assert_eq!(check(channel.clone(), "").await, Ok(Answer::Serving));
    running.account.force(MemoryKind::Queued, 64 << 20);
    assert_eq!(check(channel.clone(), "").await, Ok(Answer::Serving));
    assert_eq!(watch(&channel).await.unwrap_err().code(), Code::ResourceExhausted);
    let guarded = start_guarded(GrpcConfig::default()).await;
    guarded.account.force(MemoryKind::Queued, 64 << 20);
    assert_eq!(check(connect(guarded.port).await, "").await, Ok(Answer::Serving));
}

/// Rules out that connections without credentials, with a denied call or a health check each, keep all places for good.
#[tokio::test]
async fn a_call_without_credentials_keeps_no_place_from_others() {
    let config = GrpcConfig { max_connections: 20, handshake_timeout: Duration::from_secs(4), ..few(20, 20) };
    let running = start_guarded(config).await;
    let mut sockets = Vec::new();
    for (n, path) in [CHECK, "/gateway.v1.Devices/ListDevices"].into_iter().cycle().take(20).enumerate() {
        let mut socket = from(u8::try_from(n % 2).unwrap(), running.port, &[]).await;
        let bytes = [&beginning()[..24], &frame(4, 0, 0, &[]), &call(path, 1, true)].concat();
        socket.write_all(&bytes).await.unwrap();
        // Its answer.
        while next_frame(&mut socket).await.unwrap().0 != 1 {}
        sockets.push(socket);
    }
    let mut held = Vec::new();
    for _ in 0..10 {
        let channel = connect(running.port).await;
        assert_eq!(check(channel.clone(), "").await, Ok(Answer::Serving));
        held.push(channel);
    }
    // The oldest of them.
    while next_frame(&mut sockets[0]).await.is_some() {}
}

/// Rules out that halves of prefaces from many addresses leave a new client without a place for its handshake. Nobody's patience
/// ends within the test.
#[tokio::test]
async fn halves_of_prefaces_from_many_addresses_hold_up_no_new_client() {
    let config = GrpcConfig { handshake_timeout: Duration::from_secs(3_600), ..GrpcConfig::default() };
    let running = start(None, config).await;
    let mut halves = Vec::new();
    for host in 0..=200 {
        halves.push(from(host, running.port, b"PRI * HTTP/2.0\r\n").await);
    }
    let answer = async { check(connect(running.port).await, "").await };
    let answer = tokio::time::timeout(Duration::from_secs(60), answer).await;
    assert_eq!(answer, Ok(Ok(Answer::Serving)));
}

/// Rules out that what rustls keeps of a handshake which does not end is on no account.
#[tokio::test]
async fn halves_of_tls_handshakes_are_on_the_account() {
    let (tls, _) = certificate();
    let running = start(Some(Arc::new(ArcSwap::from_pointee(tls))), GrpcConfig::default()).await;
    // Three records of a ClientHello that is said to have 60,000 bytes.
    let mut record = vec![0x16, 3, 1, 0x3E, 0x80, 1, 0, 0xEA, 0x60];
    record.resize(5 + 16_000, 0);
    let mut bytes = record.clone();
    record[5..9].fill(0);
    bytes.extend(record.repeat(2));
    let mut sockets = Vec::new();
    for _ in 0..20 {
        sockets.push(from(1, running.port, &bytes).await);
    }
    let held = || running.account.held(MemoryKind::GrpcUnauthenticated);
    until(|| held() >= 20 * bytes.len()).await;
    drop(sockets);
    until(|| held() == running.account.limit() / 128).await;
}
