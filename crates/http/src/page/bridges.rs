//! Bridges to other systems: whether each is up, what waits for it, and what has failed.

use std::collections::HashMap;

use axum::response::Response;
use gateway_api::gateway::v1::{self, BridgeDirection, BridgeState};
use maud::{Markup, html};
use prost_types::FieldMask;
use tonic::Status;

use super::{
    layout::{self, button, bytes, csrf, done, problem, query, time},
    visit::{FormFields, Post, Visitor},
};

pub(super) async fn show(visitor: Visitor) -> Response {
    page(&visitor, html! {}).await
}

/// Does what the form says, and shows the bridges as they are then.
pub(super) async fn act(Post { visitor, fields }: Post) -> Response {
    let said = match perform(&visitor, &fields).await {
        Ok(text) => done(&text),
        Err(status) => problem(&status),
    };
    page(&visitor, said).await
}

/// Pauses a bridge out by its group, or lets it go on.
async fn perform(visitor: &Visitor, fields: &FormFields) -> Result<String, Status> {
    let paused = match fields.get("do") {
        "pause" => true,
        "resume" => false,
        _ => return Err(Status::invalid_argument("this page has no such button")),
    };
    let bridge = fields.get("bridge").to_owned();
    let bridges =
        visitor.api.operations().list_bridges(v1::ListBridgesRequest {}).await?.into_inner().bridges;
    let found = bridges.into_iter().find(|found| found.name == bridge && !found.group.is_empty());
    let name = found.ok_or_else(|| Status::not_found("there is no such bridge out"))?.group;
    let group = Some(v1::Group { name, paused, ..Default::default() });
    let update_mask = Some(FieldMask { paths: vec!["paused".to_owned()] });
    visitor.api.groups().update_group(v1::UpdateGroupRequest { group, update_mask }).await?;
    Ok(if paused {
        format!("{bridge} is paused: what comes for it waits.")
    } else {
        format!("{bridge} goes on.")
    })
}

async fn page(visitor: &Visitor, said: Markup) -> Response {
    let found = visitor.api.operations().list_bridges(v1::ListBridgesRequest {}).await;
    let body = html! {
        (said)
        @match found {
            Err(status) => (problem(&status)),
            Ok(found) => {
                @let bridges = found.into_inner().bridges;
                @if bridges.is_empty() {
                    section {
                        p.muted { "There is no bridge: the configuration has no table " code { "[bridges.NAME]" } "." }
                    }
                }
                @for bridge in &bridges { (card(visitor, bridge)) }
            }
        }
    };
    layout::page(visitor, "/page/bridges", "Bridges", body)
}

fn card(visitor: &Visitor, bridge: &v1::Bridge) -> Markup {
    let is_out = bridge.direction() == BridgeDirection::Out;
    html! {
        section aria-labelledby={ "bridge-" (bridge.name) } {
            h2 id={ "bridge-" (bridge.name) } { (bridge.name) }
            div.grid {
                dl {
                    dt { "Other side" } dd { (bridge.kind) @if is_out { ", out" } @else { ", in" } }
                    dt { "State" } dd {
                        (state(bridge.state()))
                        @if bridge.paused { ", " span.warn { "paused" } }
                    }
                    @if bridge.failures_in_row > 0 {
                        dt { "Breaker" } dd {
                            (bridge.failures_in_row) " failures in a row"
                            @if bridge.retry_time.is_some() { ", tried again at " (time(bridge.retry_time.as_ref())) }
                        }
                    } @else {
                        dt { "Breaker" } dd { "closed: nothing has failed since the last success" }
                    }
                    dt { "Last failure" } dd {
                        @match &bridge.last_failure {
                            None => "none",
                            Some(last) => { (time(last.time.as_ref())) ", " (last.reason) ": " span.payload { (last.detail) } }
                        }
                    }
                    dt { "Failures" } dd { (failures(bridge)) }
                }
                dl {
                    dt { @if is_out { "Sent" } @else { "Received" } }
                    dd { (bridge.messages) " messages, " (bytes(bridge.bytes as f64)) }
                    dt { "Under way" } dd { (bridge.in_flight) " messages" }
                    @if is_out {
                        dt { "Waits on disk" } dd {
                            (bridge.lag_messages) " messages, " (bytes(bridge.lag_bytes as f64)) " of "
                            (bytes(bridge.max_lag_bytes as f64))
                        }
                        dt { "Lost" } dd { @if bridge.lost > 0 { span.bad { (bridge.lost) } } @else { "0" } }
                        dt { "Dead letters" } dd { @if bridge.dead_letters > 0 { span.warn { (bridge.dead_letters) } } @else { "0" } }
                    }
                    dt { "Left out" } dd {
                        (bridge.refused) " refused" (refusals(bridge)) ", " (bridge.expired) " expired, " (bridge.looped) " seen before"
                    }
                    @if let Some(last) = &bridge.last_refusal {
                        dt { "Refused last" } dd {
                            (time(last.time.as_ref())) ", " (last.reason) ": " span.payload { (last.topic) }
                            ", " span.payload { (last.detail) }
                        }
                    }
                    @if !bridge.group.is_empty() {
                        dt { "Group" } dd {
                            a href={ "/page/group?" (query(&[("name", &bridge.group)])) } { (bridge.group) }
                        }
                    }
                }
            }
            @if !bridge.group.is_empty() {
                form method="post" action="/page/bridges" {
                    (csrf(visitor))
                    input type="hidden" name="bridge" value=(bridge.name);
                    (button(
                        visitor,
                        "Groups/UpdateGroup",
                        "quiet",
                        ("do", if bridge.paused { "resume" } else { "pause" }),
                        if bridge.paused { "Resume" } else { "Pause" },
                    ))
                }
            }
        }
    }
}

fn state(state: BridgeState) -> Markup {
    match state {
        BridgeState::Up => html! { span.good { "up" } },
        BridgeState::Down => html! { span.bad { "down" } },
        BridgeState::Starting => html! { span.muted { "not reached yet" } },
        BridgeState::Unspecified => html! { "–" },
    }
}

/// Returns the number of failures, by reason.
fn failures(bridge: &v1::Bridge) -> String {
    let words = counts(&bridge.failures);
    if words.is_empty() { "none since the start".to_owned() } else { words }
}

/// Counts of refused messages by reason, in brackets.
fn refusals(bridge: &v1::Bridge) -> String {
    let words = counts(&bridge.refusals);
    if words.is_empty() { words } else { format!(" ({words})") }
}

fn counts(by_reason: &HashMap<String, u64>) -> String {
    let mut by_reason: Vec<_> = by_reason.iter().collect();
    by_reason.sort_unstable();
    let words: Vec<String> = by_reason.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    words.join(", ")
}
