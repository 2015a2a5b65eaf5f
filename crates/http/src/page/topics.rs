//! Topics: the tree of latest values, retained messages, what comes on a filter now, and one topic with its numbers as a chart.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use axum::{
    extract::{Query, State},
    response::Response,
};
use gateway_api::gateway::v1::{self, subscribe_item::Item};
use maud::{Markup, html};
use prost_types::Timestamp;
use serde::Deserialize;
use tonic::Status;

use super::{
    chart::{ChartLine, chart},
    layout::{self, button, csrf, done, payload, problem, query, time},
    live::{self, BrowserEvents, BrowserGone, PULSE},
    state::PageState,
    tail::{self, topic as link},
    visit::{FormFields, Post, Visitor},
};

/// Latest values of a page, retained messages of a page, and points of a chart.
const VALUES: i32 = 500;
const RETAINED: i32 = 50;
const POINTS: usize = 200;
/// Most bytes of a retained message that are edited.
const EDITED: usize = 32 << 10;

/// Query of the list.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct TopicsQuery {
    filter: String,
    device: String,
    page: String,
    retained: String,
}

impl TopicsQuery {
    fn link(&self, page: &str, retained: &str) -> String {
        let pairs = [
            ("filter", self.filter.as_str()),
            ("device", &self.device),
            ("page", page),
            ("retained", retained),
        ];
        let given: Vec<_> = pairs.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        format!("/page/topics?{}", query(&given))
    }
}

/// The tree, and the retained messages beside it.
pub(super) async fn list(visitor: Visitor, Query(wanted): Query<TopicsQuery>) -> Response {
    let request = v1::ListLatestRequest {
        device_ids: if wanted.device.is_empty() { Vec::new() } else { vec![wanted.device.clone()] },
        topic_filter: wanted.filter.clone(),
        page_size: VALUES,
        page_token: wanted.page.clone(),
    };
    let values = visitor.api.state().list_latest(request).await;
    let request = v1::ListRetainedRequest {
        topic_filter: wanted.filter.clone(),
        page_size: RETAINED,
        page_token: wanted.retained.clone(),
    };
    let retained = visitor.api.state().list_retained(request).await;
    let body = html! {
        section {
            form.line method="get" action="/page/topics" role="search" {
                label { "Topic filter" input type="search" name="filter" value=(wanted.filter) placeholder="#"; }
                label { "Device" input name="device" value=(wanted.device); }
                button type="submit" { "Show" }
            }
            p { a href={ "/page/try?" (query(&[("filter", if wanted.filter.is_empty() { "#" } else { &wanted.filter })])) } { "Follow this filter live" } }
        }
        div.stack.grid {
            section {
                h2 { "Latest values" }
                @match values {
                    Err(status) => (problem(&status)),
                    Ok(values) => {
                        @let values = values.into_inner();
                        @if values.values.is_empty() { p.muted { "None here." } }
                        (TopicTree::of(&values.values).show())
                        @if !values.next_page_token.is_empty() { p { a rel="next" href=(wanted.link(&values.next_page_token, "")) { "Next page" } } }
                    }
                }
            }
            section {
                h2 { "Retained messages" }
                @match retained {
                    Err(status) => (problem(&status)),
                    Ok(retained) => {
                        @let retained = retained.into_inner();
                        @if retained.messages.is_empty() { p.muted { "None here." } }
                        table {
                            @for message in &retained.messages {
                                tr { td { (link(&message.topic)) } td.payload { (payload(&message.payload)) } }
                            }
                        }
                        @if !retained.next_page_token.is_empty() { p { a rel="next" href=(wanted.link("", &retained.next_page_token)) { "Next page" } } }
                    }
                }
                form.line method="get" action="/page/topic" {
                    label { "Topic" input name="name" required; }
                    button type="submit" { "Show or set it" }
                }
            }
        }
    };
    layout::page(&visitor, "/page/topics", "Topics", body)
}

/// Values by the levels of their topics.
#[derive(Default)]
struct TopicTree<'a> {
    values: Vec<&'a v1::LatestValue>,
    below: BTreeMap<&'a str, Self>,
}

impl<'a> TopicTree<'a> {
    /// Levels beyond which a topic is shown in one piece: nobody opens more, and each is nested HTML.
    const DEPTH: usize = 12;

    fn of(values: &'a [v1::LatestValue]) -> Self {
        let mut root = Self::default();
        for value in values {
            let place = value
                .topic
                .splitn(Self::DEPTH, '/')
                .fold(&mut root, |at, level| at.below.entry(level).or_default());
            place.values.push(value);
        }
        root
    }

    fn count(&self) -> usize {
        self.values.len() + self.below.values().map(Self::count).sum::<usize>()
    }

    fn show(&self) -> Markup {
        html! {
            ul.tree {
                @for (level, below) in &self.below {
                    li {
                        @for value in &below.values {
                            div {
                                a href={ "/page/topic?" (query(&[("name", &value.topic)])) } { @if level.is_empty() { "(empty level)" } @else { (level) } }
                                ": " span.payload { (payload(&value.payload)) } " "
                                span.why { (tail::device(&value.device_id)) ", " (time(value.receive_time.as_ref())) }
                            }
                        }
                        @if !below.below.is_empty() {
                            details open[self.below.len() == 1] {
                                summary { (level) "/ " span.why { (below.count() - below.values.len()) } }
                                (below.show())
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Query of one topic.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct TopicQuery {
    name: String,
    /// The member of JSON payloads that is drawn.
    field: String,
}

pub(super) async fn show(visitor: Visitor, Query(named): Query<TopicQuery>) -> Response {
    page(&visitor, &named, html! {}).await
}

/// Sets or deletes what is retained.
pub(super) async fn act(Query(named): Query<TopicQuery>, Post { visitor, fields }: Post) -> Response {
    let said = match perform(&visitor, &named.name, &fields).await {
        Ok(text) => done(text),
        Err(status) => problem(&status),
    };
    page(&visitor, &named, said).await
}

async fn perform(visitor: &Visitor, name: &str, fields: &FormFields) -> Result<&'static str, Status> {
    let (mut state, topic) = (visitor.api.state(), name.to_owned());
    match fields.get("do") {
        "retain" => {
            let (payload, qos) = (fields.lines("payload").into(), tail::qos_of(fields.get("qos")).into());
            if fields.ticked("send") {
                let message = v1::PublishRequest { topic, payload, qos, retain: true, ..Default::default() };
                visitor.api.publisher().publish(message).await?;
                return Ok("The message was sent to its subscribers, and is retained.");
            }
            state.set_retained(v1::SetRetainedRequest { topic, payload, qos, ..Default::default() }).await?;
            Ok("The message is retained; nobody was sent it.")
        }
        "clear" => {
            state.delete_retained(v1::DeleteRetainedRequest { topic, ..Default::default() }).await?;
            Ok("The retained message was deleted.")
        }
        _ => Err(Status::invalid_argument("this page has no such button")),
    }
}

async fn page(visitor: &Visitor, named: &TopicQuery, said: Markup) -> Response {
    let name = named.name.as_str();
    let latest = visitor
        .api
        .state()
        .get_latest(v1::GetLatestRequest { topic: name.to_owned(), device_id: None })
        .await;
    let latest = latest.map(|found| found.into_inner().value);
    let retained = visitor.api.state().get_retained(v1::GetRetainedRequest { topic: name.to_owned() }).await;
    let retained = retained.map(|found| found.into_inner().message);
    let past = match &latest {
        Ok(Some(value)) => history(visitor, &value.device_id, named).await,
        _ => None,
    };
    let to = format!("/page/topic?{}", query(&[("name", name)]));
    let kept = retained.as_ref().ok().and_then(Option::as_ref);
    // A payload that is not text, or too long for a form, is replaced and not edited: it would come back as another
    // one.
    let text = kept.map(|kept| std::str::from_utf8(&kept.payload).ok().filter(|text| text.len() <= EDITED));
    let editable = text.flatten().unwrap_or_default();
    let body = html! {
        (said)
        div.stack.grid {
            section {
                h2 { "Latest value" }
                @match &latest {
                    Ok(Some(value)) => {
                        p.payload { (payload(&value.payload)) }
                        p.why { "from " (tail::device(&value.device_id)) ", " (time(value.receive_time.as_ref())) ", QoS " (tail::qos(value.qos())) }
                    }
                    Ok(None) => p.muted { "None." },
                    Err(status) => p.muted { (status.message()) },
                }
            }
            section {
                h2 { "Retained message" }
                @match &retained {
                    Ok(Some(message)) => {
                        p.payload { (payload(&message.payload)) }
                        p.why {
                            @if !message.device_id.is_empty() { "from " (tail::device(&message.device_id)) ", " }
                            (time(message.receive_time.as_ref())) ", QoS " (tail::qos(message.qos()))
                        }
                    }
                    Ok(None) => p.muted { "None." },
                    Err(status) => p.muted { (status.message()) },
                }
                details open[kept.is_some()] {
                    summary { "Edit" }
                    form method="post" action=(to) {
                        (csrf(visitor))
                        @if text == Some(None) { p.why { "It is not text, or too long to be edited: what you write takes its place." } }
                        // A line break at the beginning is the markup's, not the text's.
                        label { "Payload" textarea name="payload" { "\n" (editable) } }
                        label { "QoS" select name="qos" { option { "1" } option { "0" } option { "2" } } }
                        label.check { input type="checkbox" name="send" value="1"; "send it to subscribers, too" }
                        (button(visitor, "State/SetRetained", "", ("do", "retain"), "Retain"))
                    }
                    form method="post" action=(to) {
                        (csrf(visitor))
                        (button(visitor, "State/DeleteRetained", "danger", ("do", "clear"), "Delete it"))
                    }
                }
            }
        }
        @if let Some(past) = &past { section { (past) } }
        section data-live={ "/page/live/topic?" (query(&[("name", name), ("field", &named.field)])) } {
            h2 { "Live" }
            p data-status aria-live="polite" { "needs script" }
            form.line method="get" action="/page/topic" {
                input type="hidden" name="name" value=(name);
                label { "Draw this member of JSON payloads" input name="field" value=(named.field); }
                button.quiet type="submit" { "Draw" }
            }
            div #chart {}
            (tail::table("messages"))
        }
    };
    layout::page(visitor, "/page/topics", name, body)
}

/// The number in a payload: the whole of it, the member of this name, or the first number among the members.
fn number(payload: &[u8], field: &str) -> Option<f64> {
    let text = std::str::from_utf8(payload).ok()?.trim();
    if text.len() > 64 << 10 {
        return None;
    }
    if field.is_empty()
        && let Ok(number) = text.parse::<f64>()
    {
        return number.is_finite().then_some(number);
    }
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    match field {
        "" => value.as_object()?.values().find_map(serde_json::Value::as_f64),
        field => field.split('.').try_fold(&value, |at, name| at.get(name))?.as_f64(),
    }
}

fn millis(at: Option<&Timestamp>) -> f64 {
    at.map_or(0.0, |at| at.seconds as f64 * 1e3 + f64::from(at.nanos) / 1e6)
}

/// Points of time in milliseconds, as a chart that ends with the last.
fn drawn(title: &str, points: &VecDeque<(f64, f64)>) -> Markup {
    let last = points.back().map_or(0.0, |(at, _)| *at);
    let points = points.iter().map(|(at, value)| ((at - last) / 1e3, *value)).collect();
    chart(title, "", &[ChartLine { name: "value".to_owned(), points }])
}

/// The numbers that the topic has had, where they are kept.
async fn history(visitor: &Visitor, device: &str, named: &TopicQuery) -> Option<Markup> {
    let request = v1::ListHistoryRequest {
        device_id: device.to_owned(),
        topic: named.name.clone(),
        page_size: POINTS as i32,
        ..Default::default()
    };
    let found = visitor.api.state().list_history(request).await.ok()?.into_inner();
    let points = found.values.iter().rev();
    let points = points.filter_map(|value| {
        Some((millis(value.receive_time.as_ref()), number(&value.payload, &named.field)?))
    });
    let points: VecDeque<_> = points.collect();
    (points.len() > 1).then(|| drawn(&format!("The last {} values of {device}", points.len()), &points))
}

/// Streams the messages of the topic, and their numbers as a chart.
pub(super) async fn live(
    State(page_state): State<Arc<PageState>>,
    visitor: Visitor,
    Query(named): Query<TopicQuery>,
) -> Response {
    live::stream(&page_state, visitor, |visitor, events| async move {
        let request = tail::request(vec![named.name.clone()], Vec::new());
        match visitor.api.subscriber().subscribe(request).await {
            Ok(stream) => numbers(stream.into_inner(), &named.field, &events).await,
            Err(status) => tail::refused(&events, &status).await,
        }
    })
}

async fn numbers(
    mut stream: tonic::Streaming<v1::SubscribeResponse>,
    field: &str,
    events: &BrowserEvents,
) -> Result<(), BrowserGone> {
    let mut points = VecDeque::new();
    loop {
        let batch = match tokio::time::timeout(PULSE, stream.message()).await {
            Err(_) => {
                events.pulse().await?;
                continue;
            }
            Ok(Ok(Some(batch))) => batch,
            Ok(Ok(None)) => return events.end("the stream is over").await,
            Ok(Err(status)) => return events.end(status.message()).await,
        };
        events.add("messages", &tail::rows(&batch.items)).await?;
        let before = points.len();
        // Of a flood the last points are enough.
        let latest = batch.items.iter().rev().take(POINTS).rev();
        for message in latest.filter_map(|item| match &item.item {
            Some(Item::Message(message)) => Some(message),
            _ => None,
        }) {
            if let Some(value) = number(&message.payload, field) {
                if points.len() >= POINTS {
                    points.pop_front();
                }
                points.push_back((millis(message.receive_time.as_ref()), value));
            }
        }
        if points.len() > 1 && (points.len() != before || before == POINTS) {
            events.set("chart", &drawn("What has come", &points)).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_where_it_is() {
        assert_eq!(number(b" 21.5\n", ""), Some(21.5));
        assert_eq!(number(br#"{"unit":"C","t":3}"#, ""), Some(3.0));
        assert_eq!(number(br#"{"a":{"b":7}}"#, "a.b"), Some(7.0));
        for (payload, field) in
            [(&b"on"[..], ""), (b"NaN", ""), (b"1", "a"), (&[0xff], ""), (br#"{"a":"1"}"#, "a")]
        {
            assert_eq!(number(payload, field), None, "{payload:?}");
        }
    }

    #[test]
    fn a_topic_of_thousands_of_levels_is_not_nested_so_deep() {
        let value = |topic: String| v1::LatestValue { topic, ..Default::default() };
        let values = [value("a/b".to_owned()), value("a".to_owned()), value("x/".repeat(5_000))];
        let tree = TopicTree::of(&values);
        assert_eq!(tree.count(), 3);
        assert!(tree.show().0.matches("<details").count() <= TopicTree::DEPTH + 1);
    }
}
