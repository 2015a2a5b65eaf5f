//! Calls that send most of a large message and then nothing more: what does the gateway hold for them?

use std::{net::ToSocketAddrs, time::Duration};

use bytes::Bytes;
use clap::Args;
use serde_json::json;

use crate::{EXIT_CONN, Failure};

#[derive(Args)]
pub struct Hold {
    /// The gateway's gRPC address
    #[arg(long, default_value = "127.0.0.1:10000")]
    addr: String,
    /// Connections
    #[arg(long, default_value_t = 10)]
    connections: usize,
    /// Calls at once on each
    #[arg(long, default_value_t = 50)]
    calls: usize,
    /// Bytes that each message is said to have; one byte less is sent
    #[arg(long, default_value_t = 4_000_000)]
    size: usize,
    /// Seconds until everything is given up
    #[arg(long, short, default_value_t = 8.0)]
    duration: f64,
}

/// Outcomes of the calls.
#[derive(Default)]
struct Count {
    connections: usize,
    calls: usize,
    bytes: u64,
    refused: usize,
}

pub async fn run(args: &Hold) -> Result<i32, Failure> {
    let address = args.addr.trim_start_matches("http://").to_socket_addrs()?.next().ok_or("no address")?;
    let duration = Duration::from_secs_f64(args.duration);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..args.connections {
        let (calls, size) = (args.calls, args.size);
        tasks.spawn(async move { connection(address, calls, size, duration).await });
    }
    let mut all = Count::default();
    while let Some(one) = tasks.join_next().await {
        let one = one?;
        all.connections += one.connections;
        all.calls += one.calls;
        all.bytes += one.bytes;
        all.refused += one.refused;
    }
    let report = json!({
        "command": "hold",
        "connections": all.connections,
        "calls": all.calls,
        "bytes_taken": all.bytes,
        "refused": all.refused,
    });
    println!("{report}");
    Ok(if all.connections == 0 { EXIT_CONN } else { 0 })
}

async fn connection(address: std::net::SocketAddr, calls: usize, size: usize, duration: Duration) -> Count {
    let mut count = Count::default();
    let end = tokio::time::Instant::now() + duration;
    let Ok(socket) = tokio::net::TcpStream::connect(address).await else { return count };
    let Ok((client, connection)) =
        h2::client::Builder::new().max_send_buffer_size(1 << 20).handshake::<_, Bytes>(socket).await
    else {
        return count;
    };
    count.connections = 1;
    let driver = tokio::spawn(connection);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..calls {
        let Ok(mut client) = client.clone().ready().await else { break };
        let request = http::Request::post(format!("http://{address}/gateway.v1.Publisher/PublishBatch"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(());
        let Ok(request) = request else { break };
        let Ok((answer, stream)) = client.send_request(request, false) else { break };
        tasks.spawn(async move {
            let mut taken = 0;
            let refused = tokio::select! {
                _ = answer => true,
                () = send(stream, size, &mut taken) => false,
                () = tokio::time::sleep_until(end) => false,
            };
            (taken, refused)
        });
    }
    while let Some(Ok((taken, refused))) = tasks.join_next().await {
        count.calls += 1;
        count.bytes += taken;
        count.refused += usize::from(refused);
    }
    driver.abort();
    count
}

/// The header of a gRPC message of `size` bytes and all but the last of them, as the flow control lets them; then
/// waits for ever.
async fn send(mut stream: h2::SendStream<Bytes>, size: usize, taken: &mut u64) {
    let mut header = vec![0];
    header.extend_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
    let _ = stream.send_data(Bytes::from(header), false);
    let zeros = Bytes::from(vec![0; 64 << 10]);
    let mut left = size - 1;
    while left > 0 {
        stream.reserve_capacity(left.min(zeros.len()));
        let Some(Ok(room)) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await else { break };
        let n = room.min(left).min(zeros.len());
        if n == 0 {
            continue;
        }
        if stream.send_data(zeros.slice(..n), false).is_err() {
            break;
        }
        left -= n;
        *taken += n as u64;
    }
    std::future::pending::<()>().await;
}
