//! Slow receivers: devices for which much waits, and streams of backends.

use axum::{extract::Query, response::Response};
use gateway_api::gateway::v1::{self, DeviceRank};
use maud::{Markup, html};
use serde::Deserialize;

use super::{
    devices::table,
    layout::{self, bytes, problem, time},
    visit::Visitor,
};

/// Most devices, and most streams, that are shown.
const SHOWN: i32 = 50;

/// By what slow devices are ranked.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RankQuery {
    by: String,
}

/// The devices of which most waits, and the streams that wait longest.
pub(super) async fn show(visitor: Visitor, Query(ranked): Query<RankQuery>) -> Response {
    let ranks = [
        ("messages", "waiting messages", DeviceRank::PendingMessages),
        ("bytes", "waiting bytes", DeviceRank::PendingBytes),
        ("inflight", "unacknowledged", DeviceRank::Inflight),
        ("dropped", "dropped", DeviceRank::Dropped),
    ];
    let (by, _, rank) = ranks.iter().find(|(by, _, _)| *by == ranked.by).unwrap_or(&ranks[0]);
    let request = v1::ListTopDevicesRequest { rank_by: (*rank).into(), limit: SHOWN, ..Default::default() };
    let found = visitor.api.devices().list_top_devices(request).await;
    let request = v1::ListStreamsRequest { limit: SHOWN, ..Default::default() };
    let open = visitor.api.subscriber().list_streams(request).await;
    let body = html! {
        section {
            form.line method="get" action="/page/slow" {
                label { "Ranked by" select name="by" {
                    @for (value, text, _) in &ranks { option value=(value) selected[value == by] { (text) } }
                } }
                button type="submit" { "Show" }
            }
        }
        section {
            h2 { "Devices of which most waits" }
            @match found {
                Err(status) => (problem(&status)),
                Ok(found) => {
                    @let found = found.into_inner();
                    p.why { "Of " (found.ranked) " devices; those without any are left out." }
                    (table(&found.devices))
                }
            }
        }
        section {
            h2 { "Streams of backends, the slowest first" }
            @match open {
                Err(status) => (problem(&status)),
                Ok(open) => {
                    @let open = open.into_inner();
                    p.why { "Of " (open.ranked) " that are open and yours to see." }
                    (streams(&open.streams))
                }
            }
        }
    };
    layout::page(&visitor, "/page/slow", "Slow consumers", body)
}

fn streams(open: &[v1::OpenStream]) -> Markup {
    html! {
        @if open.is_empty() { p.muted { "No stream is open." } } @else {
            div.wide tabindex="0" role="region" aria-label="Streams" {
                table {
                    thead {
                        tr {
                            th { "Call" } th { "Caller" } th { "Address" } th { "Since" } th { "What" }
                            th.number { "Waiting" } th.number { "For" } th.number { "Sent" } th.number { "Dropped" }
                        }
                    }
                    tbody { @for stream in open { (row(stream)) } }
                }
            }
        }
    }
}

fn row(stream: &v1::OpenStream) -> Markup {
    let method = stream.method.strip_prefix("gateway.v1.").unwrap_or(&stream.method);
    let waiting_seconds = stream.waiting_time.map(|time| time.seconds);
    html! {
        tr {
            td { (method) }
            td { (stream.caller) }
            td { @if stream.peer.is_empty() { "the gateway" } @else { (stream.peer) } }
            td { (time(stream.open_time.as_ref())) }
            td {
                @if stream.group.is_empty() { (stream.topic_filters.join(", ")) } @else { (stream.group) ": " (stream.member_id) }
            }
            td.number { (stream.waiting) @if stream.waiting_bytes > 0 { " (" (bytes(stream.waiting_bytes as f64)) ")" } }
            td.number { @if let Some(seconds) = waiting_seconds { (seconds) " s" } @else { "–" } }
            td.number { (stream.sent) }
            td.number { (stream.dropped) }
        }
    }
}
