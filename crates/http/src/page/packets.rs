//! The packets of a device as they come and go.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    response::Response,
};
use gateway_api::gateway::v1::{self, PacketDirection, trace_packets_item::Item};
use maud::{Markup, html};
use serde::Deserialize;

use super::{
    layout::{self, bytes, of_day, payload, query},
    live::{self, PULSE},
    state::PageState,
    tail,
    visit::Visitor,
};

/// Bytes of each payload, where payloads are wanted.
const SHOWN: u32 = 256;
/// Most packets of a moment that are shown: more are only counted, since nobody reads so fast.
const MOST: usize = 100;

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct PacketsQuery {
    id: String,
    payloads: String,
}

/// The trace of a device, which begins with its live part.
pub(super) async fn show(visitor: Visitor, Query(wanted): Query<PacketsQuery>) -> Response {
    let PacketsQuery { id, payloads } = &wanted;
    let live = format!("/page/live/packets?{}", query(&[("id", id), ("payloads", payloads)]));
    let why = visitor.why_not("Devices/TracePackets");
    let body = html! {
        p { (tail::device(id)) }
        @if let Some(why) = why {
            p.notice.bad role="alert" { "To see its packets is " (why) "." }
        } @else {
            section data-live=(live) {
                form.line method="get" action="/page/packets" {
                    input type="hidden" name="id" value=(id);
                    label.check { input type="checkbox" name="payloads" value="1" checked[!payloads.is_empty()]; "with payloads" }
                    button type="submit" { "Begin again" }
                }
                p data-status aria-live="polite" { "needs script" }
                p.why {
                    "Seen while this page is open, also over several connections. Each time that it is opened is in the audit log."
                }
                div.wide tabindex="0" role="region" aria-label="Packets, the newest first" {
                    table {
                        thead { tr { th { "Time" } th { "From" } th { "Packet" } th.number { "Size" } th { "Id" } th { "What" } } }
                        tbody #packets {}
                    }
                }
            }
        }
    };
    layout::page(&visitor, "/page/devices", "Packets", body)
}

/// Packets as they come.
pub(super) async fn live(
    State(page_state): State<Arc<PageState>>,
    visitor: Visitor,
    Query(PacketsQuery { id, payloads }): Query<PacketsQuery>,
) -> Response {
    live::stream(&page_state, visitor, |visitor, events| async move {
        let payload_bytes = if payloads.is_empty() { 0 } else { SHOWN };
        let request = v1::TracePacketsRequest { device_id: id, payload_bytes };
        let mut stream = match visitor.api.devices().trace_packets(request).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => return tail::refused(&events, &status).await,
        };
        loop {
            match tokio::time::timeout(PULSE, stream.message()).await {
                Err(_) => events.pulse().await?,
                Ok(Ok(Some(batch))) if batch.items.is_empty() => events.pulse().await?,
                Ok(Ok(Some(batch))) => events.add("packets", &rows(&batch.items)).await?,
                Ok(Ok(None)) => return events.end("the stream is over").await,
                Ok(Err(status)) => return events.end(status.message()).await,
            }
        }
    })
}

/// The rows of a batch, the newest first.
fn rows(items: &[v1::TracePacketsItem]) -> Markup {
    let left_out = items.len().saturating_sub(MOST);
    html! {
        @for item in items.iter().rev().take(MOST) {
            @match &item.item {
                Some(Item::Packet(packet)) => (row(packet)),
                Some(Item::Gap(gap)) => tr { td.warn colspan="6" { (gap.count) " packets are missing here: too many to send" } },
                None => {}
            }
        }
        @if left_out > 0 { tr { td.muted colspan="6" { (left_out) " more in the same moment" } } }
    }
}

fn row(packet: &v1::TracedPacket) -> Markup {
    let kind = packet.r#type().as_str_name().trim_start_matches("PACKET_TYPE_");
    let from = match packet.direction() {
        PacketDirection::ToDevice => "the gateway",
        PacketDirection::FromDevice => "the device",
        PacketDirection::Unspecified => "–",
    };
    html! {
        tr {
            td { (of_day(packet.time.as_ref())) }
            td { (from) }
            td { b { (kind) } }
            td.number { (bytes(packet.size as f64)) }
            td { @if let Some(id) = packet.packet_id { (id) } }
            td { (what(packet)) }
        }
    }
}

fn what(packet: &v1::TracedPacket) -> Markup {
    let unseen = (packet.topic_filter_count as usize).saturating_sub(packet.topic_filters.len());
    html! {
        @if let Some(publish) = &packet.publish {
            @if !publish.topic.is_empty() { (tail::topic(&publish.topic)) " " }
            @if let Some(alias) = publish.topic_alias { "alias " (alias) ", " }
            "QoS " (tail::qos(publish.qos()))
            @if publish.dup { ", again" }
            @if publish.retain { ", retain" }
            ", payload of " (bytes(publish.payload_size as f64)) " "
            @if !publish.payload.is_empty() { span.payload { (payload(&publish.payload)) } }
        }
        @for filter in &packet.topic_filters { code { (filter) } " " }
        @if unseen > 0 { "and " (unseen) " more " }
        @for code in &packet.reason_codes { (format!("{code:#04x}")) " " }
        @if packet.withheld { span.muted { "not all of it is in your scope" } }
        @if packet.malformed { span.bad { "malformed" } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device's topic names are shown as text, whatever they contain.
    #[test]
    fn what_is_in_a_packet_is_never_html() {
        let evil = "<script>alert(1)</script>\"'";
        let publish = v1::TracedPublish {
            topic: evil.to_owned(),
            payload: evil.as_bytes().into(),
            payload_size: evil.len() as u64,
            ..Default::default()
        };
        let packet = v1::TracedPacket {
            r#type: v1::PacketType::Publish.into(),
            topic_filters: vec![evil.to_owned()],
            publish: Some(publish),
            ..Default::default()
        };
        let items = [
            v1::TracePacketsItem { item: Some(Item::Packet(packet)) },
            v1::TracePacketsItem { item: Some(Item::Gap(v1::Gap { count: 3, reason: 1 })) },
        ];
        let shown = rows(&items).into_string();
        assert!(!shown.contains("<script") && shown.matches("&lt;script&gt;").count() == 3, "{shown}");
        assert!(shown.find("3 packets are missing") < shown.find("PUBLISH"), "the newest first");
    }
}
