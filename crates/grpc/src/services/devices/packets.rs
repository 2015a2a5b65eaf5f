//! The packets of a device as they come and go, for finding out what is wrong with it.

use std::{convert::Infallible, sync::Arc};

use access::backends::TokenGrant;
use gateway_core::parse_shared;
use telemetry::{PacketWatch, TracedPacket, WATCH_BYTES};

use crate::{
    context::Context,
    proto::gateway::v1::{self, trace_packets_item::Item},
    server::access::Call,
    stream::{ResponseQueue, ResponseSender, StreamEnd, responses},
};
use grpc_messages::{answers, status::Error};

/// Most bytes of a payload that are shown.
const MOST_SHOWN: u32 = 4 << 10;
/// Most packets in a response.
const BATCH: usize = 128;

/// The stream of a trace.
pub(crate) type Packets = ResponseQueue;

/// Begins a trace, which ends with its stream. The device's id has been checked.
pub(super) fn trace(
    context: &Context,
    call: &Arc<Call>,
    request: v1::TracePacketsRequest,
) -> Result<Packets, Error> {
    if request.payload_bytes > MOST_SHOWN {
        return Err(Error::invalid("payload_bytes", format!("is more than {MOST_SHOWN}")));
    }
    let mut slot = context.streams.open(call)?;
    // Room for the packets that wait in the watch, and for as many again that were taken from it.
    slot.select(2 * WATCH_BYTES)?;
    let traces = context.hooks.traces;
    let watching = traces.watch(&request.device_id, request.payload_bytes as usize);
    let watching = watching.ok_or(Error::TooManyTraces)?;
    let grant = Arc::clone(&call.caller().grant);
    let mut shutdown = context.shutdown.clone();
    let (sender, queue) = responses(slot);
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = follow(&sender, watching.watch(), &grant) => ended,
            _ = shutdown.wait_for(|stop| *stop) => Err(StreamEnd::Error(Error::ShuttingDown)),
            () = sender.closed() => return,
        };
        let Err(end) = ended;
        sender.end(end).await;
    });
    Ok(queue)
}

/// Sends what is traced, until it cannot be sent.
async fn follow(
    sender: &ResponseSender,
    watch: &PacketWatch,
    grant: &TokenGrant,
) -> Result<Infallible, StreamEnd> {
    // The first says only that from now on nothing is left out.
    send(sender, Vec::new(), 0).await?;
    loop {
        let (packets, missed) = watch.next().await;
        let mut items = Vec::new();
        for packet in packets {
            items.push(item(Item::Packet(shown(packet, grant))));
            if items.len() >= BATCH {
                send(sender, std::mem::take(&mut items), BATCH).await?;
            }
        }
        let shown = items.len();
        if missed > 0 {
            sender.slot().lost(missed);
            let reason = v1::GapReason::BufferFull.into();
            items.push(item(Item::Gap(v1::Gap { count: missed, reason })));
        }
        if !items.is_empty() {
            send(sender, items, shown).await?;
        }
    }
}

async fn send(
    sender: &ResponseSender,
    items: Vec<v1::TracePacketsItem>,
    packets: usize,
) -> Result<(), StreamEnd> {
    sender.send(v1::TracePacketsResponse { items }, packets as u64).await
}

fn item(item: Item) -> v1::TracePacketsItem {
    v1::TracePacketsItem { item: Some(item) }
}

/// A packet as its caller may see it: topics out of its scope are withheld, with what is in their messages.
fn shown(packet: TracedPacket, grant: &TokenGrant) -> v1::TracedPacket {
    let scope = &grant.scope;
    let meets = |filter: &String| {
        let plain = parse_shared(filter).ok().flatten().map_or(filter.as_str(), |(_, filter)| filter);
        scope.meets(plain)
    };
    let named = packet.filters.len();
    let topic_filters: Vec<String> = packet.filters.into_iter().filter(meets).collect();
    let mut withheld = topic_filters.len() < named;
    let publish = packet.publish.map(|publish| {
        // The topic of an alias is not known here.
        let is_visible =
            if publish.topic.is_empty() { scope.topics().is_none() } else { scope.has_topic(&publish.topic) };
        withheld |= !is_visible;
        let mut shown = v1::TracedPublish {
            topic: String::new(),
            topic_alias: publish.alias.map(u32::from),
            qos: answers::qos_to_proto(publish.qos),
            dup: publish.dup,
            retain: publish.retain,
            payload_size: publish.payload_size as u64,
            payload: Default::default(),
        };
        if is_visible {
            shown.topic = publish.topic;
            shown.payload = publish.payload.into();
        }
        shown
    });
    v1::TracedPacket {
        time: Some(answers::time(packet.at)),
        direction: if packet.is_from_client {
            v1::PacketDirection::FromDevice
        } else {
            v1::PacketDirection::ToDevice
        }
        .into(),
        r#type: i32::from(packet.kind),
        size: packet.size as u64,
        packet_id: packet.packet_id.map(u32::from),
        reason_codes: packet.reason_codes.into_iter().map(u32::from).collect(),
        topic_filters,
        topic_filter_count: packet.filter_count as u32,
        publish,
        withheld,
        malformed: packet.is_malformed,
    }
}

#[cfg(test)]
mod tests {
    use access::backends::Scope;
    use gateway_core::{QoS, Timestamp};

    use super::*;
    use telemetry::TracedPublish;

    fn publish(topic: &str) -> TracedPacket {
        TracedPacket {
            at: Timestamp(1),
            kind: 3,
            publish: Some(TracedPublish {
                topic: topic.to_owned(),
                alias: Some(1),
                qos: QoS::AtLeastOnce,
                dup: false,
                retain: true,
                payload_size: 6,
                payload: b"secret".to_vec(),
            }),
            ..TracedPacket::default()
        }
    }

    /// The failure: a caller that may not read a topic reads it in the trace of a device that publishes there.
    #[test]
    fn a_topic_out_of_scope_is_withheld_with_its_payload() {
        let mut grant = TokenGrant::clone(&Call::unlimited().caller().grant);
        assert_eq!(shown(publish(""), &grant).publish.unwrap().payload, "secret");
        grant.scope = Scope::new(Some(vec!["own/#".to_owned()]), None).unwrap();
        let own = shown(publish("own/x"), &grant);
        assert!(!own.withheld && own.publish.unwrap().topic == "own/x");
        for other in ["other/x", ""] {
            let withheld = shown(publish(other), &grant);
            assert!(withheld.withheld);
            let publish = withheld.publish.unwrap();
            assert!(publish.topic.is_empty() && publish.payload.is_empty() && publish.payload_size == 6);
        }
        let filters = ["own/+", "$share/g/own/#", "other/#", "$share/g/other"].map(str::to_owned).to_vec();
        let subscribe = TracedPacket { kind: 8, filter_count: 4, filters, ..TracedPacket::default() };
        let subscribe = shown(subscribe, &grant);
        assert_eq!(subscribe.topic_filters, ["own/+", "$share/g/own/#"]);
        assert!(subscribe.withheld && subscribe.topic_filter_count == 4);
    }
}
