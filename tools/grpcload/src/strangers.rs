//! Clients without credentials that hold what they can: calls, answers, places. Beside them new clients come, and each is to be
//! served soon.

use std::{
    net::{Ipv4Addr, SocketAddr, ToSocketAddrs},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
    time::{Instant, sleep_until, timeout_at},
};
use tonic::{
    codegen::http::uri::PathAndQuery,
    metadata::AsciiMetadataValue,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use crate::{EXIT_CONN, EXIT_LOSS, Failure};

const HEALTH: &str = "/grpc.health.v1.Health/Check";
const DENIED: &str = "/gateway.v1.Devices/ListDevices";
/// Between two new clients, and between the end of an attacker's connection and its next one.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest wait of a new client for its answer.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, ValueEnum)]
enum Attack {
    /// Health checks whose requests are announced with 15 MB; what flow control lets through at first is sent
    HealthBodies,
    /// Health checks whose answers get no room (SETTINGS_INITIAL_WINDOW_SIZE 0)
    WindowZero,
    /// Calls that are denied where tokens are needed, with answers that are not read
    Denied,
    /// One health check on each connection, which then stays
    Places,
    /// Halves of the preface of HTTP/2
    Prefaces,
}

#[derive(Args)]
pub struct Strangers {
    /// The gateway's gRPC address
    #[arg(long, default_value = "127.0.0.1:10000")]
    addr: String,
    /// What they do
    #[arg(long, value_enum)]
    attack: Attack,
    /// Connections; one that ends is opened again
    #[arg(long, default_value_t = 1_000)]
    connections: u32,
    /// Calls at once on each
    #[arg(long, default_value_t = 1_000)]
    calls: u32,
    /// Addresses from which they come, from 127.0.4.1 on
    #[arg(long, default_value_t = 2)]
    sources: u32,
    /// New clients call ListDevices with this token; without it, Health/Check
    #[arg(long)]
    token: Option<String>,
    /// New clients one after another, each on its own connection that stays; none for 0
    #[arg(long, default_value_t = 24)]
    newcomers: u32,
    /// Seconds
    #[arg(long, short, default_value_t = 8.0)]
    duration: f64,
}

#[derive(Default)]
struct Tally {
    opened: AtomicU64,
    ended: AtomicU64,
    calm: AtomicU64,
}

pub async fn run(args: &Strangers) -> Result<i32, Failure> {
    let address = args.addr.trim_start_matches("http://").to_socket_addrs()?.next().ok_or("no address")?;
    let end = Instant::now() + Duration::from_secs_f64(args.duration);
    let tally: &'static Tally = Box::leak(Box::default());
    let opening: &'static [u8] = opening(args.attack, args.calls).leak();
    let reads = !matches!(args.attack, Attack::Denied);
    let mut attackers = JoinSet::new();
    for number in 0..args.connections {
        let source = Ipv4Addr::from_bits(0x7F00_0401 + number % args.sources.max(1));
        attackers.spawn(async move {
            while Instant::now() < end {
                let _ = timeout_at(end, attack(source, address, opening, reads, tally)).await;
                sleep_until((Instant::now() + PAUSE).min(end)).await;
            }
        });
    }
    // Until most of them are there.
    let third = Instant::now() + Duration::from_secs_f64(args.duration / 3.0);
    while Instant::now() < third && tally.opened.load(Relaxed) < u64::from(args.connections) {
        tokio::time::sleep(PAUSE).await;
    }
    let (mut served, mut slowest) = (Vec::new(), Duration::ZERO);
    for _ in 0..args.newcomers {
        let began = Instant::now();
        let answer = tokio::time::timeout(PATIENCE, newcomer(address, args.token.as_deref())).await;
        served.extend(answer.ok().and_then(Result::ok));
        slowest = slowest.max(began.elapsed());
        tokio::time::sleep(PAUSE).await;
    }
    while attackers.join_next().await.is_some() {}
    let report = json!({
        "command": "strangers",
        "opened": tally.opened.load(Relaxed),
        "ended": tally.ended.load(Relaxed),
        "told_to_be_calmer": tally.calm.load(Relaxed),
        "newcomers": args.newcomers,
        "served": served.len(),
        "slowest_ms": slowest.as_secs_f64() * 1e3,
    });
    println!("{report}");
    Ok(match (tally.opened.load(Relaxed), served.len() < args.newcomers as usize) {
        (0, _) => EXIT_CONN,
        (_, true) => EXIT_LOSS,
        (_, false) => 0,
    })
}

/// A new client, with its connection once it was served.
async fn newcomer(address: SocketAddr, token: Option<&str>) -> Result<Channel, Failure> {
    let channel = Endpoint::try_from(format!("http://{address}"))?.connect().await?;
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await?;
    let mut request = tonic::Request::new(());
    if let Some(token) = token {
        let value: AsciiMetadataValue = format!("Bearer {token}").parse()?;
        request.metadata_mut().insert("authorization", value);
    }
    // The fields of the answer are of no interest, and unknown ones are skipped.
    let codec = ProstCodec::<(), ()>::default();
    let path = PathAndQuery::from_static(if token.is_some() { DENIED } else { HEALTH });
    client.unary(request, path, codec).await?;
    Ok(channel)
}

/// One connection until the gateway ends it.
async fn attack(
    source: Ipv4Addr,
    address: SocketAddr,
    opening: &[u8],
    reads: bool,
    tally: &Tally,
) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((source, 0).into())?;
    if !reads {
        socket.set_recv_buffer_size(4096)?;
    }
    let mut socket = socket.connect(address).await?;
    tally.opened.fetch_add(1, Relaxed);
    let held = hold(&mut socket, opening, reads, tally).await;
    tally.ended.fetch_add(1, Relaxed);
    held
}

async fn hold(socket: &mut TcpStream, opening: &[u8], reads: bool, tally: &Tally) -> std::io::Result<()> {
    let (mut reader, mut writer) = socket.split();
    let write = async {
        let written = writer.write_all(opening).await;
        match written {
            Ok(()) => std::future::pending().await,
            Err(error) => error,
        }
    };
    let read = async {
        if !reads {
            return std::future::pending().await;
        }
        let mut frames = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let len = reader.read(&mut piece).await?;
            if len == 0 {
                return Ok(());
            }
            frames.extend_from_slice(&piece[..len]);
            tally.calm.fetch_add(skip_frames(&mut frames), Relaxed);
        }
    };
    tokio::select! {
        ended = read => ended,
        error = write => Err(error),
    }
}

/// Takes whole frames away, and counts those that are GOAWAY with ENHANCE_YOUR_CALM.
fn skip_frames(frames: &mut Vec<u8>) -> u64 {
    let (mut at, mut calm) = (0, 0);
    while let Some(&[a, b, c, kind, ..]) = frames[at..].first_chunk::<9>() {
        let len = 9 + u32::from_be_bytes([0, a, b, c]) as usize;
        let Some(frame) = frames.get(at..at + len) else { break };
        calm += u64::from(kind == 7 && frame.get(13..17) == Some(&[0, 0, 0, 11]));
        at += len;
    }
    frames.drain(..at);
    calm
}

/// All that a connection sends.
fn opening(attack: Attack, calls: u32) -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    if matches!(attack, Attack::Prefaces) {
        bytes.truncate(12);
        return bytes;
    }
    let settings: &[u8] = if matches!(attack, Attack::WindowZero) { &[0, 4, 0, 0, 0, 0] } else { &[] };
    frame(&mut bytes, 4, 0, 0, settings);
    let calls = if matches!(attack, Attack::Places) { 1 } else { calls };
    for number in 0..calls {
        let stream = 2 * number + 1;
        let path = if matches!(attack, Attack::Denied) { DENIED } else { HEALTH };
        frame(&mut bytes, 1, 4, stream, &block(path));
        match attack {
            Attack::WindowZero | Attack::Places => frame(&mut bytes, 0, 1, stream, &[0; 5]),
            Attack::HealthBodies => frame(&mut bytes, 0, 0, stream, &[0, 0, 0xE4, 0xE1, 0xC0]),
            Attack::Denied | Attack::Prefaces => {}
        }
    }
    if matches!(attack, Attack::HealthBodies) {
        // As much as the first window of the connection lets through, less the heads of the messages.
        let mut room = 65_535_u32.saturating_sub(5 * calls) as usize;
        for number in 0..calls {
            let len = room.min(15_000);
            frame(&mut bytes, 0, 0, 2 * number + 1, &vec![0; len]);
            room -= len;
        }
    }
    bytes
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let [_, len @ ..] = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    bytes.extend_from_slice(&len);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}

/// The headers of a call, as literals that HPACK does not keep.
fn block(path: &str) -> Vec<u8> {
    // POST, http, :path
    let mut block = vec![0x83, 0x86, 0x04];
    text(&mut block, path);
    // :authority
    block.push(0x01);
    text(&mut block, "localhost");
    // content-type
    block.extend_from_slice(&[0x0F, 0x10]);
    text(&mut block, "application/grpc");
    block
}

fn text(block: &mut Vec<u8>, text: &str) {
    block.push(u8::try_from(text.len()).unwrap_or(0));
    block.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_told_apart_however_they_are_cut() {
        let mut bytes = Vec::new();
        frame(&mut bytes, 4, 0, 0, &[0; 6]);
        frame(&mut bytes, 7, 0, 0, &[0, 0, 0, 9, 0, 0, 0, 11, b'x']);
        frame(&mut bytes, 7, 0, 0, &[0, 0, 0, 9, 0, 0, 0, 0]);
        for cut in 0..bytes.len() {
            let mut frames = bytes[..cut].to_vec();
            let mut calm = skip_frames(&mut frames);
            frames.extend_from_slice(&bytes[cut..]);
            calm += skip_frames(&mut frames);
            assert_eq!((calm, frames.len()), (1, 0), "{cut}");
        }
    }

    #[test]
    fn a_half_preface_is_a_half_and_all_else_begins_with_a_whole_one() {
        assert_eq!(opening(Attack::Prefaces, 9), b"PRI * HTTP/2");
        for attack in [Attack::HealthBodies, Attack::WindowZero, Attack::Denied, Attack::Places] {
            assert!(opening(attack, 9).starts_with(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0"));
        }
    }
}
