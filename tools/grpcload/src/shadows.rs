//! `shadows`: backends that desire, or devices that report, as fast as each has its answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::TcpStream,
    task::JoinSet,
    time::sleep,
};
use tonic::transport::Channel;

use crate::{
    Common, EXIT_LOSS, Failure, connect,
    procstat::Cpu,
    proto::{UpdateShadowRequest, shadows_client::ShadowsClient},
    seen::quantiles,
    send::{connect_device, packet, read, text},
};

/// Source of the updates.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// Calls of UpdateShadow with `desired`.
    Backends,
    /// PUBLISH of `reported` at QoS 1, from connected devices; answered is acknowledged.
    Devices,
}

#[derive(Args)]
pub struct Shadows {
    #[command(flatten)]
    common: Common,
    /// The gateway's MQTT address, plaintext
    #[arg(long, default_value = "127.0.0.1:1883")]
    mqtt: String,
    /// Who updates
    #[arg(long, value_enum, default_value_t = By::Backends)]
    by: By,
    /// Shadows: each has one update under way
    #[arg(long, default_value_t = 200)]
    shadows: usize,
    /// Keys of each document; an update changes one of them
    #[arg(long, default_value_t = 10)]
    keys: usize,
}

/// Returns the value that the `number`th update of a section sets.
fn section(number: usize, keys: usize) -> String {
    format!("{{\"setting-{}\":{{\"value\":{number},\"unit\":\"percent\"}}}}", number % keys.max(1))
}

async fn backend(
    channel: Channel,
    device: String,
    keys: usize,
    run: &Run,
) -> Result<Vec<(Instant, Duration)>, Failure> {
    let mut client = ShadowsClient::new(channel);
    let mut took = Vec::new();
    for number in 0.. {
        if run.over.load(Relaxed) {
            break;
        }
        let desired = Some(section(number, keys));
        let begun = Instant::now();
        client
            .update_shadow(UpdateShadowRequest {
                device_id: device.clone(),
                desired,
                ..UpdateShadowRequest::default()
            })
            .await?;
        took.push((begun, begun.elapsed()));
    }
    Ok(took)
}

async fn device(
    address: String,
    device: String,
    keys: usize,
    run: &Run,
) -> Result<Vec<(Instant, Duration)>, Failure> {
    let mut stream: BufReader<TcpStream> = connect_device(address, &device).await?;
    let (mut body, mut took) = (Vec::new(), Vec::new());
    let topic = format!("$gateway/devices/{device}/shadow/update");
    for number in 0.. {
        if run.over.load(Relaxed) {
            break;
        }
        let mut publish = Vec::new();
        text(&mut publish, topic.as_bytes());
        publish.extend([0, 1]);
        publish.extend(format!("{{\"state\":{{\"reported\":{}}}}}", section(number, keys)).bytes());
        let begun = Instant::now();
        stream.get_mut().write_all(&packet(0x32, &publish)).await?;
        if read(&mut stream, &mut body).await? != 0x40 {
            return Err("no PUBACK".into());
        }
        took.push((begun, begun.elapsed()));
    }
    Ok(took)
}

struct Run {
    over: AtomicBool,
}

/// Counts the microseconds of each update that begins in the measured window.
pub async fn run(args: &Shadows) -> Result<i32, Failure> {
    let channel = connect(&args.common).await?;
    let run = Arc::new(Run { over: AtomicBool::new(false) });
    let mut updaters = JoinSet::new();
    for number in 0..args.shadows {
        let (run, keys, by) = (Arc::clone(&run), args.keys, args.by);
        let (channel, mqtt, name) = (channel.clone(), args.mqtt.clone(), format!("shadow-{number}"));
        updaters.spawn(async move {
            match by {
                By::Backends => backend(channel, name, keys, &run).await,
                By::Devices => device(mqtt, name, keys, &run).await,
            }
            // Errors of tasks cannot be trait objects that stay where they are.
            .map_err(|error| error.to_string())
        });
    }
    let cpu = || args.common.pid.and_then(Cpu::of);
    sleep(Duration::from_secs_f64(args.common.warmup)).await;
    let (before, began) = (cpu(), Instant::now());
    sleep(Duration::from_secs_f64(args.common.duration)).await;
    let (after, ended) = (cpu(), Instant::now());
    run.over.store(true, Relaxed);
    let mut took = Vec::new();
    while let Some(updater) = updaters.join_next().await {
        let all = updater??;
        let counts = all.into_iter().filter(|(begun, span)| *begun >= began && *begun + *span <= ended);
        for (_, span) in counts {
            took.push(u32::try_from(span.as_micros())?);
        }
    }
    let seconds = (ended - began).as_secs_f64();
    let cost = match (after, before) {
        (Some(after), Some(before)) if !took.is_empty() => {
            json!(after.since(before).as_secs_f64() * 1e6 / took.len() as f64)
        }
        _ => Value::Null,
    };
    let code = if took.is_empty() { EXIT_LOSS } else { 0 };
    let report = json!({
        "command": "shadows",
        "by": if args.by == By::Backends { "backends" } else { "devices" },
        "shadows": args.shadows,
        "keys": args.keys,
        "updates": took.len(),
        "updates_per_sec": took.len() as f64 / seconds,
        "gateway_cpu_us_per_update": cost,
        "update_us": quantiles(&mut took),
        "exit": code,
    });
    println!("{report}");
    Ok(code)
}
