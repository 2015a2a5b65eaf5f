//! Streams that ask for much and are not read: what does the gateway hold for them?

use std::{
    net::{SocketAddr, ToSocketAddrs},
    time::Duration,
};

use bytes::Bytes;
use clap::{Args, ValueEnum};
use prost::Message;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use crate::{
    EXIT_CONN, Failure,
    proto::{SubscribeRequest, WatchShadowRequest},
};

/// Kind of each stream.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// WatchShadow of `--names` devices
    Shadows,
    /// Subscribe with `--names` topic filters
    Filters,
    /// Subscribe to everything; something else must publish, such as mqload
    Messages,
}

#[derive(Args)]
pub struct Streams {
    /// The gateway's gRPC address
    #[arg(long, default_value = "127.0.0.1:10000")]
    addr: String,
    /// What each stream is
    #[arg(long, value_enum, default_value = "shadows")]
    kind: Kind,
    /// Connections
    #[arg(long, default_value_t = 10)]
    connections: usize,
    /// Streams on each
    #[arg(long, default_value_t = 500)]
    streams: usize,
    /// Devices or filters of each stream
    #[arg(long, default_value_t = 1_000)]
    names: usize,
    /// Show this token
    #[arg(long)]
    token: Option<String>,
    /// Seconds until everything is given up
    #[arg(long, short, default_value_t = 8.0)]
    duration: f64,
}

/// Outcomes of the streams.
#[derive(Default)]
struct Count {
    connections: usize,
    open: usize,
    refused: usize,
}

pub async fn run(args: &Streams) -> Result<i32, Failure> {
    let address = args.addr.trim_start_matches("http://").to_socket_addrs()?.next().ok_or("no address")?;
    let end = Instant::now() + Duration::from_secs_f64(args.duration);
    let (path, message) = request(args);
    let mut body = vec![0];
    body.extend_from_slice(&u32::try_from(message.len())?.to_be_bytes());
    body.extend_from_slice(&message);
    let body = Bytes::from(body);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..args.connections {
        let (body, token, streams) = (body.clone(), args.token.clone(), args.streams);
        tasks.spawn(async move { connection(address, path, body, token, streams, end).await });
    }
    let mut all = Count::default();
    while let Some(one) = tasks.join_next().await {
        let one = one?;
        all.connections += one.connections;
        all.open += one.open;
        all.refused += one.refused;
    }
    let report = json!({
        "command": "streams",
        "connections": all.connections,
        "open": all.open,
        "refused": all.refused,
    });
    println!("{report}");
    Ok(if all.connections == 0 { EXIT_CONN } else { 0 })
}

/// Path and request of a stream.
fn request(args: &Streams) -> (&'static str, Vec<u8>) {
    let names = || (0..args.names).map(|n| format!("attack/{n}/{}", "n".repeat(32)));
    match args.kind {
        Kind::Shadows => {
            let device_ids = names().map(|name| name.replace('/', "-")).collect();
            let request = WatchShadowRequest { device_ids, changes_only: true, ..Default::default() };
            ("/gateway.v1.Shadows/WatchShadow", request.encode_to_vec())
        }
        Kind::Filters => {
            let request = SubscribeRequest { topic_filters: names().collect(), ..Default::default() };
            ("/gateway.v1.Subscriber/Subscribe", request.encode_to_vec())
        }
        Kind::Messages => ("/gateway.v1.Subscriber/Subscribe", SubscribeRequest::default().encode_to_vec()),
    }
}

/// Opens streams one after another, and then reads nothing of them.
async fn connection(
    address: SocketAddr,
    path: &'static str,
    body: Bytes,
    token: Option<String>,
    streams: usize,
    end: Instant,
) -> Count {
    let mut count = Count::default();
    let Ok(socket) = tokio::net::TcpStream::connect(address).await else { return count };
    let Ok((client, connection)) = h2::client::handshake(socket).await else { return count };
    count.connections = 1;
    let driver = tokio::spawn(connection);
    let mut open = Vec::new();
    for _ in 0..streams {
        let opened = timeout_at(end, stream(&client, address, path, &body, token.as_deref())).await;
        match opened {
            Ok(Some(answer)) if !answer.headers().contains_key("grpc-status") => open.push(answer),
            Ok(Some(_)) => count.refused += 1,
            Ok(None) | Err(_) => break,
        }
    }
    count.open = open.len();
    tokio::time::sleep_until(end).await;
    driver.abort();
    count
}

/// One stream, once the gateway has answered; `None` if the connection is over.
async fn stream(
    client: &h2::client::SendRequest<Bytes>,
    address: SocketAddr,
    path: &str,
    body: &Bytes,
    token: Option<&str>,
) -> Option<http::Response<h2::RecvStream>> {
    let mut client = client.clone().ready().await.ok()?;
    let mut request = http::Request::post(format!("http://{address}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let (answer, mut sending) = client.send_request(request.body(()).ok()?, false).ok()?;
    sending.send_data(body.clone(), true).ok()?;
    answer.await.ok()
}
