//! `stored`: starts stored commands, and lists them.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use clap::Args;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::{
    Common, EXIT_LOSS, Failure, connect,
    procstat::Cpu,
    proto::{CommandSpec, ListCommandsRequest, StartCommandRequest, commands_client::CommandsClient},
    seen::quantiles,
};

#[derive(Args)]
pub struct Stored {
    #[command(flatten)]
    common: Common,
    /// Commands to start; 0 lists what is there
    #[arg(long, default_value_t = 100_000)]
    start: usize,
    /// Devices they are for, in turn; none of them connects
    #[arg(long, default_value_t = 10_000)]
    devices: usize,
    /// Payload bytes
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Calls under way at once
    #[arg(long, default_value_t = 200)]
    calls: usize,
    /// When all of them expire, as seconds since 1970
    #[arg(long)]
    expire: Option<i64>,
    /// Commands of a page, when listing
    #[arg(long, default_value_t = 1_000)]
    page: i32,
    /// List those that have not ended only
    #[arg(long)]
    active: bool,
}

/// Counts the microseconds of each start and of each page.
pub async fn run(args: &Stored) -> Result<i32, Failure> {
    let channel = connect(&args.common).await?;
    let cpu = || args.common.pid.and_then(Cpu::of);
    let cost = |before: Option<Cpu>, count: usize| match (cpu(), before) {
        (Some(after), Some(before)) if count > 0 => {
            json!(after.since(before).as_secs_f64() * 1e6 / count as f64)
        }
        _ => Value::Null,
    };
    let (before, began) = (cpu(), Instant::now());
    let payload = Bytes::from(vec![b'c'; args.size]);
    // Names of one run are not those of another.
    let run = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_millis();
    let (mut callers, mut took) = (JoinSet::new(), Vec::new());
    for caller in 0..args.calls.min(args.start) {
        let mut client = CommandsClient::new(channel.clone());
        let (payload, expire) = (payload.clone(), args.expire);
        let (start, devices, calls) = (args.start, args.devices.max(1), args.calls);
        callers.spawn(async move {
            let mut took = Vec::new();
            for number in (caller..start).step_by(calls) {
                let spec = CommandSpec {
                    device_id: format!("stored-{}", number % devices),
                    name: "do".to_owned(),
                    payload: payload.clone(),
                    ..CommandSpec::default()
                };
                let request = StartCommandRequest {
                    command_id: format!("{run}-{number}"),
                    spec: Some(spec),
                    expire_time: expire.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
                    ..StartCommandRequest::default()
                };
                let begun = Instant::now();
                client.start_command(request).await?;
                took.push(begun.elapsed());
            }
            Ok::<_, tonic::Status>(took)
        });
    }
    while let Some(caller) = callers.join_next().await {
        took.extend(caller??);
    }
    let started = took.len();
    let mut starts = micros(&took)?;
    let (start_seconds, start_cpu) = (began.elapsed().as_secs_f64(), cost(before, started));

    let mut client = CommandsClient::new(channel).max_decoding_message_size(64 << 20);
    let (before, began) = (cpu(), Instant::now());
    let mut request = ListCommandsRequest {
        active_only: args.active,
        page_size: args.page,
        ..ListCommandsRequest::default()
    };
    let (mut listed, mut pages) = (0, Vec::new());
    loop {
        let begun = Instant::now();
        let page = client.list_commands(request.clone()).await?.into_inner();
        pages.push(begun.elapsed());
        listed += page.commands.len();
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    let list_seconds = began.elapsed().as_secs_f64();
    let code = if started == args.start { 0 } else { EXIT_LOSS };
    let report = json!({
        "command": "stored",
        "started": started,
        "started_per_sec": started as f64 / start_seconds,
        "start_us": quantiles(&mut starts),
        "gateway_cpu_us_per_start": start_cpu,
        "listed": listed,
        "pages": pages.len(),
        "page_us": quantiles(&mut micros(&pages)?),
        "list_seconds": list_seconds,
        "gateway_cpu_us_per_listed": cost(before, listed),
        "exit": code,
    });
    println!("{report}");
    Ok(code)
}

fn micros(spans: &[Duration]) -> Result<Vec<u32>, Failure> {
    Ok(spans.iter().map(|span| u32::try_from(span.as_micros())).collect::<Result<_, _>>()?)
}
