//! Packets as those see them who trace a client. All of it is for clients that are traced; others do not come here.

use codec::{Frame, Packet};
use gateway_core::{Protocol, clock};
use telemetry::{ClientTrace, PacketWatch, TracedPacket, TracedPublish, trace_clients};

/// Most bytes of a topic or a filter.
const NAME: usize = 1 << 10;
/// Most filters, and most reason codes.
const LISTED: usize = 16;

/// Shows a packet to all who watch.
pub fn show(trace: &ClientTrace, frame: &Frame<'_>, protocol: Protocol, is_from_client: bool) {
    if trace.watches.is_empty() {
        return;
    }
    let packet = codec::decode(frame, protocol).ok();
    for watch in &trace.watches {
        let mut shown = packet.as_ref().map_or_else(
            || TracedPacket { is_malformed: true, ..TracedPacket::default() },
            |packet| told(packet, watch),
        );
        shown.at = clock::to_wall(clock::now());
        shown.is_from_client = is_from_client;
        shown.kind = frame.first >> 4;
        shown.size = frame.len;
        watch.push(shown);
    }
}

/// Shows what goes to a device, whole packets. The rest of one that has begun before is left out.
#[inline]
pub fn written(client_id: &str, bytes: &[u8], protocol: Protocol) {
    if trace_clients().any() {
        sent(client_id, bytes, protocol);
    }
}

/// Shows what one gets who may not connect.
#[inline]
pub fn refused(client_id: &str, bytes: &[u8], protocol: Protocol) {
    if trace_clients().any() {
        sent(client_id, bytes, protocol);
    }
}

#[cold]
fn sent(client_id: &str, bytes: &[u8], protocol: Protocol) {
    let Some(trace) = trace_clients().of(client_id) else { return };
    let mut rest = bytes;
    while let Ok(Some(frame)) = codec::frame(rest, codec::MAX_FRAME_LEN) {
        show(&trace, &frame, protocol, false);
        rest = &rest[frame.len..];
    }
}

/// Shows a CONNECT to those who watch this client, before it is known whether the sender is that client.
pub fn connect(client_id: &str, size: usize) {
    let Some(trace) = trace_clients().of(client_id) else { return };
    for watch in &trace.watches {
        watch.push(TracedPacket {
            at: clock::to_wall(clock::now()),
            is_from_client: true,
            kind: 1,
            size,
            ..TracedPacket::default()
        });
    }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(NAME)].to_owned()
}

/// Returns the details of a packet that are shown besides its type and size.
fn told(packet: &Packet<'_>, watch: &PacketWatch) -> TracedPacket {
    let plain = TracedPacket::default();
    let listed = |codes: &[u8]| codes.iter().take(LISTED).copied().collect();
    match packet {
        Packet::Publish(publish) => TracedPacket {
            packet_id: Some(publish.packet_id).filter(|id| *id != 0),
            publish: Some(TracedPublish {
                topic: cut(publish.topic),
                alias: publish.alias,
                qos: publish.qos,
                dup: publish.dup,
                retain: publish.retain,
                payload_size: publish.payload.len(),
                payload: publish.payload[..publish.payload.len().min(watch.payload_bytes)].to_vec(),
            }),
            ..plain
        },
        Packet::PubAck(ack) | Packet::PubRec(ack) | Packet::PubRel(ack) | Packet::PubComp(ack) => {
            TracedPacket { packet_id: Some(ack.packet_id), reason_codes: vec![ack.code], ..plain }
        }
        Packet::Subscribe(subscribe) => TracedPacket {
            packet_id: Some(subscribe.packet_id),
            filter_count: subscribe.filters.len(),
            filters: subscribe.filters.iter().take(LISTED).map(|filter| cut(&filter.filter)).collect(),
            ..plain
        },
        Packet::Unsubscribe(unsubscribe) => TracedPacket {
            packet_id: Some(unsubscribe.packet_id),
            filter_count: unsubscribe.filters.len(),
            filters: unsubscribe.filters.iter().take(LISTED).map(|filter| cut(filter)).collect(),
            ..plain
        },
        Packet::SubAck(ack) | Packet::UnsubAck(ack) => {
            TracedPacket { packet_id: Some(ack.packet_id), reason_codes: listed(&ack.codes), ..plain }
        }
        Packet::ConnAck(connack) => TracedPacket { reason_codes: vec![connack.code], ..plain },
        Packet::Disconnect(disconnect) => TracedPacket { reason_codes: vec![disconnect.code], ..plain },
        Packet::Auth(auth) => TracedPacket { reason_codes: vec![auth.code], ..plain },
        Packet::Connect(_) | Packet::PingReq | Packet::PingResp => plain,
    }
}
