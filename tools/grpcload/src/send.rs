//! `send`: a fleet of devices that answer commands, and callers of Commands.Send at a steady rate.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use clap::Args;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::mpsc,
    time::MissedTickBehavior,
};

use crate::{
    Common, EXIT_LOSS, Failure, connect,
    proto::{CommandSpec, SendRequest, commands_client::CommandsClient},
    seen::quantiles,
};

#[derive(Args)]
pub struct Send {
    #[command(flatten)]
    common: Common,
    /// The gateway's MQTT address, plaintext
    #[arg(long, default_value = "127.0.0.1:1883")]
    mqtt: String,
    /// Devices that answer
    #[arg(long, default_value_t = 1_000)]
    devices: usize,
    /// Calls a second, over all devices in turn
    #[arg(long, default_value_t = 5_000)]
    rate: u32,
    /// Payload bytes of commands and answers
    #[arg(long, default_value_t = 64)]
    size: usize,
}

/// A text or payload with its length.
pub fn text(into: &mut Vec<u8>, text: &[u8]) {
    into.extend(u16::try_from(text.len()).unwrap_or(u16::MAX).to_be_bytes());
    into.extend(text);
}

/// A packet of MQTT 3.1.1.
pub fn packet(first: u8, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![first];
    let mut left = body.len();
    loop {
        let low = (left % 128) as u8;
        left /= 128;
        packet.push(if left > 0 { low | 128 } else { low });
        if left == 0 {
            break;
        }
    }
    packet.extend(body);
    packet
}

/// The next packet.
pub async fn read(stream: &mut BufReader<TcpStream>, body: &mut Vec<u8>) -> Result<u8, Failure> {
    let first = stream.read_u8().await?;
    let (mut length, mut shift) = (0, 0);
    loop {
        let byte = stream.read_u8().await?;
        length |= usize::from(byte & 127) << shift;
        shift += 7;
        if byte & 128 == 0 {
            break;
        }
    }
    body.resize(length, 0);
    stream.read_exact(body).await?;
    Ok(first)
}

/// A device with a connection of MQTT 3.1.1.
pub async fn connect_device(address: String, name: &str) -> Result<BufReader<TcpStream>, Failure> {
    let mut stream = BufReader::new(TcpStream::connect(address).await?);
    stream.get_ref().set_nodelay(true)?;
    let mut hello = Vec::new();
    text(&mut hello, b"MQTT");
    hello.extend([4, 2, 0, 0]);
    text(&mut hello, name.as_bytes());
    stream.get_mut().write_all(&packet(0x10, &hello)).await?;
    let mut body = Vec::new();
    if read(&mut stream, &mut body).await? != 0x20 || body != [0, 0] {
        return Err("no CONNACK".into());
    }
    Ok(stream)
}

/// A device that acknowledges each command and answers it at QoS 1.
async fn device(
    address: String,
    name: String,
    answer: Vec<u8>,
    ready: mpsc::Sender<()>,
) -> Result<(), Failure> {
    let mut stream = connect_device(address, &name).await?;
    let mut body = Vec::new();
    drop(ready);
    loop {
        if read(&mut stream, &mut body).await? & 0xF0 != 0x30 {
            continue;
        }
        let length = usize::from(u16::from_be_bytes([body[0], body[1]]));
        let topic = std::str::from_utf8(&body[2..2 + length])?;
        let (command, _) = topic.rsplit_once('/').ok_or("a topic without levels")?;
        let mut said = packet(0x40, &body[2 + length..4 + length]);
        let mut reply = Vec::new();
        text(&mut reply, format!("{command}/reply/200").as_bytes());
        reply.extend([0, 1]);
        reply.extend(&answer);
        said.extend(packet(0x32, &reply));
        stream.get_mut().write_all(&said).await?;
    }
}

/// Counts the microseconds from when each call was to begin until its answer.
pub async fn run(args: &Send) -> Result<i32, Failure> {
    let channel = connect(&args.common).await?;
    let (ready, mut all_ready) = mpsc::channel(1);
    for number in 0..args.devices {
        let connected =
            device(args.mqtt.clone(), format!("send-{number}"), vec![b'a'; args.size], ready.clone());
        tokio::spawn(async move {
            if let Err(error) = connected.await {
                eprintln!("grpcload: device {number}: {error}");
            }
        });
        if number % 50 == 49 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    drop(ready);
    // Ends when all devices have dropped theirs.
    let _ = all_ready.recv().await;
    let failed = Arc::new(AtomicU64::new(0));
    let (sender, mut answered) = mpsc::unbounded_channel();
    let (begin, total) =
        (Duration::from_secs_f64(args.common.warmup), args.common.warmup + args.common.duration);
    let calls = (f64::from(args.rate) * total) as u64;
    let began = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut issued = 0_u64;
    let payload = Bytes::from(vec![b'c'; args.size]);
    while issued < calls {
        ticks.tick().await;
        let due = (began.elapsed().as_secs_f64() * f64::from(args.rate)) as u64;
        while issued < due.min(calls) {
            let wanted = Duration::from_secs_f64(issued as f64 / f64::from(args.rate));
            let spec = CommandSpec {
                device_id: format!("send-{}", issued % args.devices as u64),
                name: "do".to_owned(),
                payload: payload.clone(),
                ..CommandSpec::default()
            };
            let mut client = CommandsClient::new(channel.clone());
            let (sender, failed) = (sender.clone(), Arc::clone(&failed));
            tokio::spawn(async move {
                match client.send(SendRequest { spec: Some(spec), wait_for_device: None }).await {
                    Ok(_) => drop(sender.send((wanted, began.elapsed().saturating_sub(wanted)))),
                    Err(status) => {
                        if failed.fetch_add(1, Relaxed) == 0 {
                            eprintln!("grpcload: {status}");
                        }
                    }
                }
            });
            issued += 1;
        }
    }
    drop(sender);
    let mut took = Vec::new();
    while let Some((wanted, span)) = answered.recv().await {
        if wanted >= begin {
            took.push(u32::try_from(span.as_micros())?);
        }
    }
    let failed = failed.load(Relaxed);
    let code = if took.is_empty() || failed > 0 { EXIT_LOSS } else { 0 };
    let report = json!({
        "command": "send",
        "devices": args.devices,
        "rate": args.rate,
        "answered": took.len(),
        "failed": failed,
        "answered_per_sec": took.len() as f64 / args.common.duration,
        "send_us": quantiles(&mut took),
        "exit": code,
    });
    println!("{report}");
    Ok(code)
}
