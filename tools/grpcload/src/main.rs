//! grpcload: how fast the gateway's gRPC streams are, and what they cost the
//! gateway. Prints one JSON object; what it is for is in the README.

mod consume;
mod fetch;
mod hold;
mod library;
mod member;
mod procstat;
mod seen;
mod send;
mod shadows;
mod stored;
mod strangers;
mod streams;

use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Channel;

use crate::procstat::Cpu;
use crate::proto::{
    PublishBatchRequest, PublishRequest, PublishStreamOptions, PublishStreamRequest, Qos, ResultDetail,
    SubscribeRequest, publish_result, publisher_client::PublisherClient, subscribe_item::Item,
    subscriber_client::SubscriberClient,
};

/// The generated clients.
mod proto {
    #![allow(clippy::all)]
    tonic::include_proto!("gateway.v1");
}

type Failure = Box<dyn std::error::Error>;

const EXIT_ARGS: i32 = 2;
/// Messages refused, or nothing measured.
const EXIT_LOSS: i32 = 3;
const EXIT_CONN: i32 = 4;

/// Measures the gateway's gRPC streams.
///
/// Exit status: 0 good; 2 bad arguments; 3 publishes refused or nothing received; 4 no connection or a broken stream.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Read one Subscribe stream; something else must publish, such as mqload
    Subscribe(Subscribe),
    /// Publish through one PublishStream
    Publish(Publish),
    /// Publish by PublishBatch, calls one after another on several connections
    Batch(Batch),
    /// Consume as a member of a group and acknowledge; something else must publish, such as mqload
    Consume(consume::Consume),
    /// Fetch as a member of a group without a stream, and acknowledge; messages must be waiting
    Fetch(fetch::Fetch),
    /// Write down what a member of a group gets, for scripts/groups/world.py
    Member(member::Member),
    /// Do the same through the client library
    Library(member::Member),
    /// Send commands to a fleet of devices that answer them
    Send(send::Send),
    /// Start stored commands, and list them
    Stored(stored::Stored),
    /// Update shadows, as backends or as devices
    Shadows(shadows::Shadows),
    /// Send most of many large messages and wait
    Hold(hold::Hold),
    /// Open many streams that ask for much, and read none of them
    Streams(streams::Streams),
    /// Attack without credentials, and see whether new clients are served beside that
    Strangers(strangers::Strangers),
}

#[derive(Args)]
struct Common {
    /// The gateway's gRPC address
    #[arg(long, default_value = "http://127.0.0.1:10000")]
    addr: String,
    /// Process of the gateway, to measure its CPU
    #[arg(long)]
    pid: Option<i32>,
    /// Measured seconds
    #[arg(long, short, default_value_t = 10.0)]
    duration: f64,
    /// Seconds before that which are not measured
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
}

#[derive(Args)]
struct Subscribe {
    #[command(flatten)]
    common: Common,
    /// Topic filter
    #[arg(long, default_value = "#")]
    filter: String,
    /// How long a message may wait for others, ms; without it the gateway decides
    #[arg(long)]
    linger_ms: Option<u32>,
}

#[derive(Args)]
struct Publish {
    #[command(flatten)]
    common: Common,
    /// Publish to this device instead of the topic's subscribers
    #[arg(long)]
    device: Option<String>,
    #[arg(long, default_value = "grpcload/topic")]
    topic: String,
    /// Payload bytes
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Messages in one frame of the stream
    #[arg(long, default_value_t = 100)]
    batch: usize,
    /// Frames sent and not yet answered
    #[arg(long, default_value_t = 20)]
    frames: usize,
    /// Ask for the result of every message, not only of failures
    #[arg(long)]
    all_results: bool,
}

#[derive(Args)]
struct Batch {
    #[command(flatten)]
    common: Common,
    /// Messages in one call
    #[arg(long, default_value_t = 10_000)]
    batch: usize,
    /// Calls under way at once, each on a connection of its own
    #[arg(long, default_value_t = 4)]
    calls: usize,
    /// Beginning of the topics, of which each message has its own
    #[arg(long, default_value = "grpcload/batch")]
    topic: String,
}

/// Counts over the measured window.
#[derive(Default)]
struct Count {
    messages: u64,
    batches: u64,
    missing: u64,
    refused: u64,
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.map_err(Failure::from).and_then(|runtime| {
        runtime.block_on(async {
            match Cli::parse().command {
                Command::Subscribe(args) => subscribe(&args).await,
                Command::Publish(args) => publish(&args).await,
                Command::Batch(args) => batch(&args).await,
                Command::Consume(args) => consume::run(&args).await,
                Command::Fetch(args) => fetch::run(&args).await,
                Command::Member(args) => member::run(&args).await,
                Command::Library(args) => library::run(&args).await,
                Command::Send(args) => send::run(&args).await,
                Command::Stored(args) => stored::run(&args).await,
                Command::Shadows(args) => shadows::run(&args).await,
                Command::Hold(args) => hold::run(&args).await,
                Command::Streams(args) => streams::run(&args).await,
                Command::Strangers(args) => strangers::run(&args).await,
            }
        })
    });
    let code = outcome.unwrap_or_else(|error| {
        eprintln!("grpcload: {error}");
        EXIT_CONN
    });
    std::process::exit(code);
}

async fn connect(common: &Common) -> Result<Channel, Failure> {
    if common.pid.is_some_and(|pid| Cpu::of(pid).is_none()) {
        eprintln!("grpcload: --pid: no such process");
        std::process::exit(EXIT_ARGS);
    }
    Ok(Channel::from_shared(common.addr.clone())?.connect().await?)
}

async fn subscribe(args: &Subscribe) -> Result<i32, Failure> {
    let mut client = SubscriberClient::new(connect(&args.common).await?).max_decoding_message_size(64 << 20);
    let request = SubscribeRequest {
        topic_filters: vec![args.filter.clone()],
        linger: args.linger_ms.map(|ms| prost_types::Duration {
            seconds: i64::from(ms / 1_000),
            nanos: (ms % 1_000 * 1_000_000).cast_signed(),
        }),
        ..SubscribeRequest::default()
    };
    let stream = client.subscribe(request).await?.into_inner();
    measure(&args.common, "subscribe", stream, |response, count| {
        count.batches += 1;
        for item in response.items {
            match item.item {
                Some(Item::Message(_)) => count.messages += 1,
                Some(Item::Gap(gap)) => count.missing += gap.count,
                Some(Item::Heartbeat(_)) | None => {}
            }
        }
    })
    .await
}

async fn publish(args: &Publish) -> Result<i32, Failure> {
    let mut client = PublisherClient::new(connect(&args.common).await?).max_decoding_message_size(64 << 20);
    let message = PublishRequest {
        device_id: args.device.clone(),
        topic: args.topic.clone(),
        payload: Bytes::from(vec![b'g'; args.size]),
        qos: Qos::AtMostOnce as i32,
        ..PublishRequest::default()
    };
    let detail = if args.all_results { ResultDetail::All } else { ResultDetail::Failures };
    let first = PublishStreamRequest {
        requests: vec![message; args.batch],
        options: Some(PublishStreamOptions { detail: detail as i32, ..PublishStreamOptions::default() }),
    };
    let frame = PublishStreamRequest { options: None, ..first.clone() };
    // Each answered batch puts the next frame into the stream: what is outstanding stays the same.
    let (send, receive) = mpsc::channel(args.frames.max(1));
    send.try_send(first)?;
    for _ in 1..args.frames {
        send.try_send(frame.clone())?;
    }
    let requests = tokio_stream::wrappers::ReceiverStream::new(receive);
    let answers = client.publish_stream(requests).await?.into_inner();
    let batch = args.batch as u64;
    let mut unanswered = 0;
    measure(&args.common, "publish", answers, move |response, count| {
        count.batches += 1;
        count.messages += u64::from(response.count);
        let failed = |r: &&proto::SequencedResult| {
            matches!(
                r.result.as_ref().and_then(|r| r.result.as_ref()),
                Some(publish_result::Result::Error(_))
            )
        };
        count.refused += response.results.iter().filter(failed).count() as u64;
        unanswered += u64::from(response.count);
        while unanswered >= batch {
            unanswered -= batch;
            // There is room, since a frame was answered; an ended stream shows on the other side.
            let _ = send.try_send(frame.clone());
        }
    })
    .await
}

async fn batch(args: &Batch) -> Result<i32, Failure> {
    let message = |n: usize| PublishRequest {
        topic: format!("{}/{n}", args.topic),
        payload: Bytes::from_static(b"batch"),
        qos: Qos::AtMostOnce as i32,
        ..PublishRequest::default()
    };
    let request = PublishBatchRequest { requests: (0..args.batch).map(message).collect() };
    let (send, receive) = mpsc::channel(args.calls.max(1));
    for _ in 0..args.calls {
        let mut client =
            PublisherClient::new(connect(&args.common).await?).max_decoding_message_size(64 << 20);
        let (send, request) = (send.clone(), request.clone());
        tokio::spawn(async move {
            while send
                .send(client.publish_batch(request.clone()).await.map(tonic::Response::into_inner))
                .await
                .is_ok()
            {}
        });
    }
    let answers = tokio_stream::wrappers::ReceiverStream::new(receive);
    measure(&args.common, "batch", answers, |answer, count| {
        count.batches += 1;
        let failed = |r: &&proto::PublishResult| matches!(r.result, Some(publish_result::Result::Error(_)));
        count.refused += answer.results.iter().filter(failed).count() as u64;
        count.messages += answer.results.len() as u64;
    })
    .await
}

/// Reads `stream` through warm-up and window, counts with `on`, and prints the report.
async fn measure<T>(
    common: &Common,
    name: &str,
    mut stream: impl Stream<Item = Result<T, tonic::Status>> + Unpin,
    mut on: impl FnMut(T, &mut Count),
) -> Result<i32, Failure> {
    let mut warmup = Count::default();
    read_for(&mut stream, common.warmup, &mut |item| on(item, &mut warmup)).await?;
    let cpu = || common.pid.and_then(Cpu::of);
    let (cpu_before, own_before, began) = (cpu(), Cpu::of(own_pid()), Instant::now());
    let mut count = Count::default();
    read_for(&mut stream, common.duration, &mut |item| on(item, &mut count)).await?;
    let seconds = began.elapsed().as_secs_f64();
    let per_message = |after: Option<Cpu>, before: Option<Cpu>| match (after, before) {
        (Some(after), Some(before)) if count.messages > 0 => {
            json!(after.since(before).as_secs_f64() * 1e6 / count.messages as f64)
        }
        _ => Value::Null,
    };
    let code = if count.messages == 0 || count.refused > 0 { EXIT_LOSS } else { 0 };
    let report = json!({
        "command": name,
        "window_seconds": seconds,
        "messages": count.messages,
        "msgs_per_sec": count.messages as f64 / seconds,
        "msgs_per_batch": count.messages as f64 / count.batches.max(1) as f64,
        "missing": count.missing,
        "refused": count.refused + warmup.refused,
        "gateway_cpu_us_per_message": per_message(cpu(), cpu_before),
        "loadgen_cpu_us_per_message": per_message(Cpu::of(own_pid()), own_before),
        "exit": code,
    });
    println!("{report}");
    Ok(code)
}

fn own_pid() -> i32 {
    std::process::id().cast_signed()
}

/// Hands on what arrives for so many seconds; a stream that ends before is an error.
async fn read_for<T>(
    stream: &mut (impl Stream<Item = Result<T, tonic::Status>> + Unpin),
    seconds: f64,
    on: &mut impl FnMut(T),
) -> Result<(), Failure> {
    let end = tokio::time::sleep(Duration::from_secs_f64(seconds));
    tokio::pin!(end);
    loop {
        tokio::select! {
            biased;
            () = &mut end => return Ok(()),
            item = stream.next() => match item {
                Some(item) => on(item?),
                None => return Err("the gateway ended the stream".into()),
            },
        }
    }
}
