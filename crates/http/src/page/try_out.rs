//! To try out what the gateway does: publish a message, and follow a filter.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Query, State},
    response::Response,
};
use gateway_api::gateway::v1;
use maud::{Markup, html};
use serde::Deserialize;
use tonic::{Request, Status};

use super::{
    device::outcome,
    layout::{self, button, csrf, done, problem, query},
    live,
    state::PageState,
    tail,
    visit::{FormFields, Post, Visitor},
};

/// Time that a publish waits for its receivers.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Followed {
    filter: String,
}

pub(super) async fn show(visitor: Visitor, Query(followed): Query<Followed>) -> Response {
    page(&visitor, &followed.filter, None, html! {})
}

/// Publishes what the form has.
pub(super) async fn act(Query(followed): Query<Followed>, Post { visitor, fields }: Post) -> Response {
    let said = match publish(&visitor, &fields).await {
        Ok(text) => done(&text),
        Err(status) => problem(&status),
    };
    page(&visitor, &followed.filter, Some(&fields), said)
}

async fn publish(visitor: &Visitor, fields: &FormFields) -> Result<String, Status> {
    let wait = match fields.get("wait") {
        "durable" => v1::Wait::Durable,
        "acked" => v1::Wait::Acked,
        _ => v1::Wait::Accepted,
    };
    let message = v1::PublishRequest {
        topic: fields.get("topic").to_owned(),
        payload: fields.lines("payload").into(),
        qos: tail::qos_of(fields.get("qos")).into(),
        retain: fields.ticked("retain"),
        wait: wait.into(),
        ..Default::default()
    };
    let mut request = Request::new(message);
    request.set_timeout(ANSWER);
    Ok(outcome(&visitor.api.publisher().publish(request).await?.into_inner()))
}

fn page(visitor: &Visitor, filter: &str, fields: Option<&FormFields>, said: Markup) -> Response {
    let kept = |name: &str| fields.map_or("", |fields| fields.get(name));
    let chosen = |name: &str, value: &str| kept(name) == value;
    let filter = if filter.is_empty() { "#" } else { filter };
    let to = format!("/page/try?{}", query(&[("filter", filter)]));
    let body = html! {
        (said)
        div.stack.grid {
            section {
                h2 { "Publish" }
                form method="post" action=(to) {
                    (csrf(visitor))
                    label { "Topic" input name="topic" required value=(kept("topic")); }
                    label { "Payload" textarea name="payload" { (kept("payload")) } }
                    div.line {
                        label { "QoS" select name="qos" {
                            @for qos in ["1", "0", "2"] { option selected[chosen("qos", qos)] { (qos) } }
                        } }
                        label { "Wait until it is" select name="wait" {
                            @for (value, text) in [("accepted", "routed"), ("durable", "on disk"), ("acked", "acknowledged")] {
                                option value=(value) selected[chosen("wait", value)] { (text) }
                            }
                        } }
                        label.check { input type="checkbox" name="retain" value="1" checked[!kept("retain").is_empty()]; "retain" }
                    }
                    (button(visitor, "Publisher/Publish", "", ("do", "publish"), "Publish"))
                }
            }
            section data-live={ "/page/live/filter?" (query(&[("filter", filter)])) } {
                h2 { "Follow a filter" }
                form.line method="get" action="/page/try" {
                    label { "Topic filter" input type="search" name="filter" value=(filter); }
                    button type="submit" { "Follow" }
                }
                p data-status aria-live="polite" { "needs script" }
                (tail::table("messages"))
            }
        }
    };
    layout::page(visitor, "/page/try", "Try it out", body)
}

/// Streams the messages published to a filter.
pub(super) async fn live(
    State(page_state): State<Arc<PageState>>,
    visitor: Visitor,
    Query(Followed { filter }): Query<Followed>,
) -> Response {
    live::stream(&page_state, visitor, |visitor, events| async move {
        match visitor.api.subscriber().subscribe(tail::request(vec![filter], Vec::new())).await {
            Ok(stream) => tail::follow(stream.into_inner(), "messages", &events).await,
            Err(status) => tail::refused(&events, &status).await,
        }
    })
}
