//! `member`: a member of a group that writes down what it gets, for scripts/groups/world.py; as member.py there.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{BufWriter, Write as _},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

use crate::{
    Failure,
    proto::{
        Ack, ConsumeRequest, Nack, Open, consume_item::Item, consume_request::Action,
        consumed_message::Content, consumer_client::ConsumerClient,
    },
};

#[derive(Args)]
pub struct Member {
    /// The gateway, host and port
    pub address: String,
    pub group: String,
    pub member_id: String,
    /// Where to write
    pub file: String,
}

/// Never ends: streams are opened again until the process is killed.
pub async fn run(args: &Member) -> Result<i32, Failure> {
    let mut out = BufWriter::new(OpenOptions::new().append(true).create(true).open(&args.file)?);
    // A killed process may have left half a line.
    writeln!(out)?;
    loop {
        let ended = consume(args, &mut out).await;
        eprintln!("{ended:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn consume(args: &Member, out: &mut BufWriter<File>) -> Result<(), Failure> {
    let channel = Channel::from_shared(format!("http://{}", args.address))?.connect().await?;
    let (say, said) = mpsc::unbounded_channel();
    let request = |action| ConsumeRequest { action: Some(action) };
    let open = Open { group: args.group.clone(), member_id: args.member_id.clone(), ..Open::default() };
    say.send(request(Action::Open(open)))?;
    let mut client = ConsumerClient::new(channel);
    let mut stream = client.consume(UnboundedReceiverStream::new(said)).await?.into_inner();
    let mut ids = HashMap::new();
    while let Some(response) = stream.message().await? {
        let mut settled = Vec::new();
        for item in response.items {
            match item.item {
                Some(Item::Message(delivery)) => {
                    let Some(Content::Message(message)) = delivery.content else { continue };
                    let payload = String::from_utf8_lossy(&message.payload);
                    writeln!(out, "D {} {} {} {payload} .", now(), delivery.message_id, delivery.attempt)?;
                    // One in a hundred is given back, one in a thousand left until its deadline.
                    let chance = delivery.delivery_id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                    match chance % 1_000 {
                        0..10 => {
                            let which = Ack { delivery_ids: vec![delivery.delivery_id], ..Ack::default() };
                            let nack = Nack { which: Some(which), ..Nack::default() };
                            say.send(request(Action::Nack(nack)))?;
                        }
                        10 => {}
                        _ => settled.push(delivery.delivery_id),
                    }
                    ids.insert(delivery.delivery_id, delivery.message_id);
                }
                Some(Item::AckResults(results)) => {
                    let now = now();
                    for id in results.ok.iter().flat_map(|range| range.first..=range.last) {
                        if let Some(message) = ids.remove(&id) {
                            writeln!(out, "A {now} {message} .")?;
                        }
                    }
                }
                _ => {}
            }
        }
        out.flush()?;
        if !settled.is_empty() {
            say.send(request(Action::Ack(Ack { delivery_ids: settled, ..Ack::default() })))?;
        }
    }
    Ok(())
}

/// Nanoseconds since 1970.
pub fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos())
}
