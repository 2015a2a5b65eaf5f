//! `consume`: one member of a group that acknowledges what it gets.

use std::time::{Duration, Instant};

use clap::Args;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    Common, EXIT_LOSS, Failure, connect, measure,
    proto::{
        Ack, ConsumeRequest, ConsumeResponse, CreateGroupRequest, DeliveryRange, Filter, Flow, Group, Nack,
        Open, consume_item::Item, consume_request::Action, consumer_client::ConsumerClient,
        groups_client::GroupsClient,
    },
    read_for,
    seen::Seen,
};

#[derive(Args)]
pub struct Consume {
    #[command(flatten)]
    common: Common,
    /// The group; made if it is not there
    #[arg(long, default_value = "grpcload")]
    group: String,
    /// Its topic filter, if it is made
    #[arg(long, default_value = "#")]
    filter: String,
    /// Name of the member; without it the gateway gives it one
    #[arg(long, default_value = "")]
    member: String,
    /// Messages that may be unacknowledged
    #[arg(long, default_value_t = 10_000)]
    outstanding: u32,
    /// Read nothing for so many seconds after the warm-up, with the stream open
    #[arg(long, default_value_t = 0.0)]
    stall: f64,
    /// Look at mqload's stamps: latencies after the warm-up, and whether every message of each publisher is settled, in order
    #[arg(long)]
    stamps: bool,
    /// With --stamps: end once nothing has come for so many seconds, and fail if that is not so within the measured ones
    #[arg(long)]
    idle: Option<f64>,
    /// With --stamps: give back whatever this publisher sends, again and again
    #[arg(long)]
    poison: Option<u32>,
    /// Deliveries before a message is given up, if the group is made
    #[arg(long, default_value_t = 0)]
    max_attempts: u32,
}

/// Counts what was acknowledged: a message counts when its answer is there, which is when it is on disk.
pub async fn run(args: &Consume) -> Result<i32, Failure> {
    let channel = connect(&args.common).await?;
    let group = Group {
        name: args.group.clone(),
        filter: Some(Filter { topic_filters: vec![args.filter.clone()], ..Filter::default() }),
        max_attempts: args.max_attempts,
        ..Group::default()
    };
    let request = CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() };
    match GroupsClient::new(channel.clone()).create_group(request).await {
        Ok(_) => {}
        Err(status) if status.code() == tonic::Code::AlreadyExists => {}
        Err(status) => return Err(status.into()),
    }
    let (send, receive) = mpsc::channel(100_000);
    let flow = Flow { max_outstanding_messages: args.outstanding, ..Flow::default() };
    let open = Open {
        group: args.group.clone(),
        member_id: args.member.clone(),
        flow: Some(flow),
        ..Open::default()
    };
    send.try_send(request_of(Action::Open(open)))?;
    let mut client = ConsumerClient::new(channel).max_decoding_message_size(64 << 20);
    let mut stream = client.consume(ReceiverStream::new(receive)).await?.into_inner();
    if args.stamps {
        return seen(args, &mut stream, &send).await;
    }
    let stall = Duration::from_secs_f64(args.stall);
    let mut stall_at =
        (!stall.is_zero()).then(|| Instant::now() + Duration::from_secs_f64(args.common.warmup));
    measure(&args.common, "consume", stream, move |response, count| {
        if stall_at.take_if(|at| *at <= Instant::now()).is_some() {
            // On purpose: nothing of this process reads meanwhile.
            std::thread::sleep(stall);
        }
        count.batches += 1;
        let mut ranges: Vec<DeliveryRange> = Vec::new();
        for item in response.items {
            match item.item {
                Some(Item::Message(message)) => match ranges.last_mut() {
                    Some(range) if range.last + 1 == message.delivery_id => range.last += 1,
                    _ => ranges.push(DeliveryRange { first: message.delivery_id, last: message.delivery_id }),
                },
                Some(Item::AckResults(results)) => {
                    let size = |ranges: &[DeliveryRange]| {
                        ranges.iter().map(|range| range.last - range.first + 1).sum::<u64>()
                    };
                    count.messages += size(&results.ok);
                    count.refused += size(&results.lost);
                }
                Some(Item::Gap(gap)) => count.missing += gap.count,
                Some(Item::Opened(_) | Item::Heartbeat(_) | Item::Revoked(_)) | None => {}
            }
        }
        if !ranges.is_empty() {
            // A stream that has ended shows on the other side.
            let _ = send.try_send(request_of(Action::Ack(Ack { ranges, ..Ack::default() })));
        }
    })
    .await
}

/// Reads as long as there is to be read, looks at every message, and prints what was seen.
async fn seen(
    args: &Consume,
    stream: &mut tonic::Streaming<ConsumeResponse>,
    send: &mpsc::Sender<ConsumeRequest>,
) -> Result<i32, Failure> {
    let mut seen = Seen::default();
    let begun = Instant::now();
    let on = |seen: &mut Seen, response: ConsumeResponse| {
        let (mut ack, mut back) = (Ack::default(), Ack::default());
        for item in response.items {
            match item.item {
                Some(Item::Message(message)) => {
                    let list = if seen.got(&message, args.poison) { &mut back } else { &mut ack };
                    match list.ranges.last_mut() {
                        Some(range) if range.last + 1 == message.delivery_id => range.last += 1,
                        _ => {
                            let (first, last) = (message.delivery_id, message.delivery_id);
                            list.ranges.push(DeliveryRange { first, last });
                        }
                    }
                }
                Some(Item::AckResults(results)) => seen.settled(&results.ok),
                Some(Item::Revoked(revoked)) => seen.revoked(&revoked.void),
                Some(Item::Gap(_) | Item::Opened(_) | Item::Heartbeat(_)) | None => {}
            }
        }
        // A stream that has ended shows on the other side.
        if !ack.ranges.is_empty() {
            let _ = send.try_send(request_of(Action::Ack(ack)));
        }
        if !back.ranges.is_empty() {
            let _ = send.try_send(request_of(Action::Nack(Nack { which: Some(back), ..Nack::default() })));
        }
    };
    read_for(stream, args.common.warmup, &mut |response| on(&mut seen, response)).await?;
    if args.stall > 0.0 {
        // The connection lives, but nobody takes what the stream has.
        tokio::time::sleep(Duration::from_secs_f64(args.stall)).await;
    }
    seen.forget();
    let end = Instant::now() + Duration::from_secs_f64(args.common.duration);
    let mut last = Instant::now();
    let is_idle = |last: Instant| args.idle.is_some_and(|idle| last.elapsed().as_secs_f64() > idle);
    while Instant::now() < end && !is_idle(last) {
        read_for(stream, 0.1, &mut |response| {
            last = Instant::now();
            on(&mut seen, response);
        })
        .await?;
    }
    let code = if args.idle.is_some() && !is_idle(last) { EXIT_LOSS } else { 0 };
    let mut report = seen.report();
    report["command"] = "consume".into();
    report["seconds"] = begun.elapsed().as_secs_f64().into();
    report["exit"] = code.into();
    println!("{report}");
    Ok(code)
}

fn request_of(action: Action) -> ConsumeRequest {
    ConsumeRequest { action: Some(action) }
}
