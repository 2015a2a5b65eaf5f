//! `consume`: one member of a group that acknowledges what it gets.

use std::time::{Duration, Instant};

use clap::Args;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    Common, Failure, connect, measure,
    proto::{
        Ack, ConsumeRequest, CreateGroupRequest, DeliveryRange, Filter, Flow, Group, Open,
        consume_item::Item, consume_request::Action, consumer_client::ConsumerClient,
        groups_client::GroupsClient,
    },
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
}

/// Counts what was acknowledged: a message counts when its answer is there, which is when it is on disk.
pub async fn run(args: &Consume) -> Result<i32, Failure> {
    let channel = connect(&args.common).await?;
    let group = Group {
        name: args.group.clone(),
        filter: Some(Filter { topic_filters: vec![args.filter.clone()], ..Filter::default() }),
        ..Group::default()
    };
    let request = CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() };
    match GroupsClient::new(channel.clone()).create_group(request).await {
        Ok(_) => {}
        Err(status) if status.code() == tonic::Code::AlreadyExists => {}
        Err(status) => return Err(status.into()),
    }
    let (send, receive) = mpsc::channel(1_000);
    let flow = Flow { max_outstanding_messages: args.outstanding, ..Flow::default() };
    let open = Open {
        group: args.group.clone(),
        member_id: args.member.clone(),
        flow: Some(flow),
        ..Open::default()
    };
    send.try_send(request_of(Action::Open(open)))?;
    let mut client = ConsumerClient::new(channel).max_decoding_message_size(64 << 20);
    let stream = client.consume(ReceiverStream::new(receive)).await?.into_inner();
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

fn request_of(action: Action) -> ConsumeRequest {
    ConsumeRequest { action: Some(action) }
}
