//! Messages as they are published: rows of a table that a live part adds.

use gateway_api::gateway::v1::{self, subscribe_item::Item};
use maud::{Markup, html};
use prost_types::Duration;
use tonic::{Status, Streaming};

use super::{
    layout::{of_day, payload, query},
    live::{BrowserEvents, BrowserGone, PULSE},
};

/// Most messages of a batch that are shown: more are only counted, since nobody reads so fast.
const SHOWN: usize = 50;
/// Bytes that the gateway keeps for a browser that reads slowly; the oldest messages go first.
const BUFFER: u32 = 64 << 10;

/// Returns the request for the stream: batches a few times a second.
pub(super) fn request(topic_filters: Vec<String>, device_ids: Vec<String>) -> v1::SubscribeRequest {
    v1::SubscribeRequest {
        topic_filters,
        device_ids,
        slow_policy: v1::SlowPolicy::DropOldest.into(),
        buffer_bytes: BUFFER,
        linger: Some(Duration { seconds: 0, nanos: 250_000_000 }),
        ..Default::default()
    }
}

/// The head of the table.
pub(super) fn table(id: &str) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label="Messages, the newest first" {
            table {
                thead { tr { th { "Time" } th { "Topic" } th { "From" } th { "QoS" } th { "Payload" } } }
                tbody #(id) {}
            }
        }
    }
}

/// Adds what comes to the element `id`, until the stream ends.
pub(super) async fn follow(
    mut stream: Streaming<v1::SubscribeResponse>,
    id: &str,
    events: &BrowserEvents,
) -> Result<(), BrowserGone> {
    loop {
        match tokio::time::timeout(PULSE, stream.message()).await {
            Err(_) => events.pulse().await?,
            Ok(Ok(Some(batch))) => events.add(id, &rows(&batch.items)).await?,
            Ok(Ok(None)) => return events.end("the stream is over").await,
            Ok(Err(status)) => return events.end(status.message()).await,
        }
    }
}

/// Ends with the API's status.
pub(super) async fn refused(events: &BrowserEvents, status: &Status) -> Result<(), BrowserGone> {
    events.end(status.message()).await
}

/// The rows of a batch, the newest first.
pub(super) fn rows(items: &[v1::SubscribeItem]) -> Markup {
    let left_out = items.len().saturating_sub(SHOWN);
    html! {
        @for item in items.iter().rev().take(SHOWN) {
            @match &item.item {
                Some(Item::Message(message)) => (row(message)),
                Some(Item::Gap(gap)) => tr { td.warn colspan="5" { (gap.count) " messages are missing here: too many to send" } },
                _ => {}
            }
        }
        @if left_out > 0 { tr { td.muted colspan="5" { (left_out) " more in the same moment" } } }
    }
}

fn row(message: &v1::ReceivedMessage) -> Markup {
    let from = match message.origin() {
        v1::Origin::Backend => "a backend",
        v1::Origin::Server => "the gateway",
        _ => "",
    };
    html! {
        tr {
            td { (of_day(message.receive_time.as_ref())) }
            td { (topic(&message.topic)) }
            td { @if message.device_id.is_empty() { (from) } @else { (device(&message.device_id)) } }
            td { (qos(message.qos())) @if message.retain { ", retain" } }
            td.payload { (payload(&message.payload)) }
        }
    }
}

/// A link to the page of a topic.
pub(super) fn topic(name: &str) -> Markup {
    html! { a href={ "/page/topic?" (query(&[("name", name)])) } { (name) } }
}

/// A link to the page of a device.
pub(super) fn device(id: &str) -> Markup {
    html! { a href={ "/page/device?" (query(&[("id", id)])) } { (id) } }
}

pub(super) fn qos(qos: v1::Qos) -> &'static str {
    match qos {
        v1::Qos::Unspecified => "–",
        v1::Qos::AtMostOnce => "0",
        v1::Qos::AtLeastOnce => "1",
        v1::Qos::ExactlyOnce => "2",
    }
}

/// The QoS that a form names.
pub(super) fn qos_of(text: &str) -> v1::Qos {
    match text {
        "0" => v1::Qos::AtMostOnce,
        "2" => v1::Qos::ExactlyOnce,
        _ => v1::Qos::AtLeastOnce,
    }
}
