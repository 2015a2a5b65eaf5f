//! `fetch`: one member without a stream, call after call.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use crate::{
    Common, EXIT_LOSS, Failure, connect,
    proto::{AcknowledgeRequest, FetchRequest, consumer_client::ConsumerClient},
    seen::quantiles,
};

#[derive(Args)]
pub struct Fetch {
    #[command(flatten)]
    common: Common,
    /// The group; it must be there, with enough messages that wait
    #[arg(long, default_value = "grpcload")]
    group: String,
    /// Messages of a call; calls that bring fewer are not counted
    #[arg(long, default_value_t = 1_000)]
    messages: u32,
}

/// Counts the microseconds of each Fetch, and of the Acknowledge of all that it brought.
pub async fn run(args: &Fetch) -> Result<i32, Failure> {
    let mut client = ConsumerClient::new(connect(&args.common).await?).max_decoding_message_size(64 << 20);
    let (mut fetches, mut acknowledges, mut fewer) = (Vec::new(), Vec::new(), 0);
    let end = Instant::now() + Duration::from_secs_f64(args.common.warmup + args.common.duration);
    let begin = Instant::now() + Duration::from_secs_f64(args.common.warmup);
    while Instant::now() < end {
        let request = FetchRequest {
            group: args.group.clone(),
            member_id: "grpcload".to_owned(),
            max_messages: args.messages,
            wait: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..FetchRequest::default()
        };
        let begun = Instant::now();
        let fetched = client.fetch(request).await?.into_inner().messages;
        let took = begun.elapsed();
        let counts = begun >= begin && fetched.len() == args.messages as usize;
        if counts {
            fetches.push(u32::try_from(took.as_micros())?);
        } else if begun >= begin {
            fewer += 1;
        }
        let ack_ids: Vec<String> = fetched.into_iter().map(|message| message.ack_id).collect();
        if ack_ids.is_empty() {
            continue;
        }
        let begun = Instant::now();
        client.acknowledge(AcknowledgeRequest { group: args.group.clone(), ack_ids }).await?;
        if counts {
            acknowledges.push(u32::try_from(begun.elapsed().as_micros())?);
        }
    }
    let code = if fetches.is_empty() { EXIT_LOSS } else { 0 };
    let report = json!({
        "command": "fetch",
        "messages": args.messages,
        "fewer": fewer,
        "fetch_us": quantiles(&mut fetches),
        "acknowledge_us": quantiles(&mut acknowledges),
        "exit": code,
    });
    println!("{report}");
    Ok(code)
}
