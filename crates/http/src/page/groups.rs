//! Consumer groups: the progress of each, its readers, and the messages given up.

use std::time::Duration;

use axum::{extract::Query, response::Response};
use gateway_api::gateway::v1::{self, dead_letter::Content, position::At};
use gateway_core::clock;
use maud::{Markup, html};
use prost_types::{FieldMask, Timestamp};
use serde::Deserialize;
use tonic::Status;

use super::{
    layout::{self, button, bytes, csrf, done, payload, problem, query, time},
    tail,
    visit::{FormFields, Post, Visitor},
};

const PAGE: i32 = 100;
const LETTERS: i32 = 50;

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct GroupsQuery {
    page: String,
}

/// All groups.
pub(super) async fn list(visitor: Visitor, Query(GroupsQuery { page }): Query<GroupsQuery>) -> Response {
    let request = v1::ListGroupsRequest { page_size: PAGE, page_token: page };
    let body = match visitor.api.groups().list_groups(request).await {
        Err(status) => problem(&status),
        Ok(found) => {
            let found = found.into_inner();
            html! {
                section {
                    @if found.groups.is_empty() { p.muted { "There is no group." } } @else {
                        div.wide tabindex="0" role="region" aria-label="Groups" {
                            table {
                                thead {
                                    tr {
                                        th { "Group" } th.number { "Behind" } th.number { "Bytes" } th { "Oldest" } th.number { "Unacknowledged" }
                                        th.number { "Members" } th.number { "Dead letters" } th.number { "Lost" }
                                    }
                                }
                                tbody { @for group in &found.groups { (row(group)) } }
                            }
                        }
                    }
                    @if !found.next_page_token.is_empty() {
                        p { a rel="next" href={ "/page/groups?" (query(&[("page", &found.next_page_token)])) } { "Next page" } }
                    }
                }
            }
        }
    };
    layout::page(&visitor, "/page/groups", "Consumer groups", body)
}

fn row(group: &v1::Group) -> Markup {
    let status = group.status.unwrap_or_default();
    html! {
        tr {
            td { a href={ "/page/group?" (query(&[("name", &group.name)])) } { (group.name) } @if group.paused { " " span.warn { "paused" } } }
            td.number { (status.lag_messages) }
            td.number { (bytes(status.lag_bytes as f64)) }
            td { (time(status.oldest_time.as_ref())) }
            td.number { (status.outstanding) }
            td.number { (status.members) }
            td.number { @if status.dead_letters > 0 { span.warn { (status.dead_letters) } } @else { "0" } }
            td.number { @if status.lost > 0 { span.bad { (status.lost) } } @else { "0" } }
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct GroupQuery {
    name: String,
    page: String,
}

pub(super) async fn show(visitor: Visitor, Query(named): Query<GroupQuery>) -> Response {
    page(&visitor, &named, html! {}).await
}

/// Does what the form says, and shows the group as it is then.
pub(super) async fn act(Query(named): Query<GroupQuery>, Post { visitor, fields }: Post) -> Response {
    let said = match perform(&visitor, &named.name, &fields).await {
        Ok(text) => done(&text),
        Err(status) => problem(&status),
    };
    page(&visitor, &named, said).await
}

async fn perform(visitor: &Visitor, name: &str, fields: &FormFields) -> Result<String, Status> {
    let (mut groups, name) = (visitor.api.groups(), name.to_owned());
    let ids = match fields.get("id") {
        "" => Vec::new(),
        id => vec![id.to_owned()],
    };
    match fields.get("do") {
        "seek" => {
            let at = match fields.get("to") {
                "earliest" => At::Earliest(true),
                "latest" => At::Latest(true),
                "token" => At::Token(fields.get("token").trim().to_owned()),
                _ => At::Time(ago(fields.get("minutes").parse().unwrap_or(60))),
            };
            let to = Some(v1::Position { at: Some(at) });
            let moved = groups.seek_group(v1::SeekGroupRequest { name, to }).await?.into_inner();
            Ok(format!("The group was moved. Where it was, to undo this: {}", moved.previous_token))
        }
        "pause" | "resume" => {
            let paused = fields.get("do") == "pause";
            let group = Some(v1::Group { name, paused, ..Default::default() });
            let update_mask = Some(FieldMask { paths: vec!["paused".to_owned()] });
            groups.update_group(v1::UpdateGroupRequest { group, update_mask }).await?;
            Ok(if paused { "Nothing is delivered now." } else { "Delivery goes on." }.to_owned())
        }
        "requeue" => {
            let put =
                groups.requeue_dead_letters(v1::RequeueDeadLettersRequest { name, ids }).await?.into_inner();
            Ok(format!("{} dead letters were put back.", put.count))
        }
        "purge" => {
            let gone =
                groups.purge_dead_letters(v1::PurgeDeadLettersRequest { name, ids }).await?.into_inner();
            Ok(format!("{} dead letters were deleted.", gone.count))
        }
        _ => Err(Status::invalid_argument("this page has no such button")),
    }
}

fn ago(minutes: u64) -> Timestamp {
    let past = Duration::from_secs(minutes.saturating_mul(60)).as_secs();
    let now = clock::to_wall(clock::now()).0 / 1_000;
    Timestamp { seconds: now.saturating_sub(past) as i64, nanos: 0 }
}

async fn page(visitor: &Visitor, named: &GroupQuery, said: Markup) -> Response {
    let name = named.name.as_str();
    let found = visitor.api.groups().get_group(v1::GetGroupRequest { name: name.to_owned() }).await;
    let group = match found {
        Ok(found) => found.into_inner().group.unwrap_or_default(),
        Err(status) => {
            return layout::page(visitor, "/page/groups", name, html! { (said) (problem(&status)) });
        }
    };
    let status = group.status.unwrap_or_default();
    let filter = group.filter.clone().unwrap_or_default();
    let to = format!("/page/group?{}", query(&[("name", name)]));
    let body = html! {
        (said)
        div.stack.grid {
            section {
                h2 { "How far it is" }
                dl {
                    dt { "Behind" } dd { (status.lag_messages) " messages, " (bytes(status.lag_bytes as f64)) }
                    dt { "Oldest" } dd { (time(status.oldest_time.as_ref())) }
                    dt { "Unacknowledged" } dd { (status.outstanding) }
                    dt { "Dead letters" } dd { (status.dead_letters) }
                    dt { "Lost" } dd { (status.lost) }
                    dt { "Topics" } dd { code { @if filter.topic_filters.is_empty() { "#" } @else { (filter.topic_filters.join(", ")) } } }
                    dt { "Made" } dd { (time(group.create_time.as_ref())) }
                    dt { "Delivery" } dd { @if group.paused { span.warn { "paused" } } @else { "goes on" } }
                }
                form method="post" action=(to) {
                    (csrf(visitor))
                    (button(visitor, "Groups/UpdateGroup", "quiet", ("do", if group.paused { "resume" } else { "pause" }), if group.paused { "Resume" } else { "Pause" }))
                }
            }
            section { h2 { "Members" } (members(visitor, name).await) }
            section {
                h2 { "Move it" }
                p.why { "What is unacknowledged is delivered again from there on, or skipped." }
                form.line method="post" action=(to) {
                    (csrf(visitor))
                    label { "To" select name="to" {
                        option value="time" { "so many minutes ago" } option value="earliest" { "the oldest that is kept" }
                        option value="latest" { "behind all that is there" } option value="token" { "a token" }
                    } }
                    label { "Minutes" input type="number" name="minutes" min="0" value="60"; }
                    label { "Token" input name="token"; }
                    (button(visitor, "Groups/SeekGroup", "danger", ("do", "seek"), "Move"))
                }
            }
        }
        section { h2 { "Dead letters" } (letters(visitor, named, &to).await) }
    };
    layout::page(visitor, "/page/groups", name, body)
}

async fn members(visitor: &Visitor, name: &str) -> Markup {
    let found = visitor.api.groups().list_members(v1::ListMembersRequest { name: name.to_owned() }).await;
    html! {
        @match found {
            Err(status) => (problem(&status)),
            Ok(found) => {
                @let members = found.into_inner().members;
                @if members.is_empty() { p.muted { "Nobody reads it now." } } @else {
                    div.wide tabindex="0" role="region" aria-label="Members" {
                        table {
                            thead { tr { th { "Member" } th { "State" } th.number { "Partitions" } th.number { "Unacknowledged" } } }
                            tbody {
                                @for member in &members {
                                    tr {
                                        td { (member.member_id) }
                                        td { @if member.connected { "connected" } @else { "until " (time(member.lease_time.as_ref())) } }
                                        td.number { (member.partitions) }
                                        td.number { (member.outstanding) }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

async fn letters(visitor: &Visitor, named: &GroupQuery, to: &str) -> Markup {
    let request = v1::ListDeadLettersRequest {
        name: named.name.clone(),
        page_size: LETTERS,
        page_token: named.page.clone(),
    };
    let found = match visitor.api.groups().list_dead_letters(request).await {
        Ok(found) => found.into_inner(),
        Err(status) => return problem(&status),
    };
    let form = |id: &str, content: Markup| {
        html! {
            form.plain method="post" action=(to) { (csrf(visitor)) input type="hidden" name="id" value=(id); (content) }
        }
    };
    let both = |id: &str| {
        html! {
            (form(id, button(visitor, "Groups/RequeueDeadLetters", "quiet", ("do", "requeue"), if id.is_empty() { "Put all back" } else { "Put back" })))
            (form(id, button(visitor, "Groups/PurgeDeadLetters", "danger", ("do", "purge"), if id.is_empty() { "Delete all" } else { "Delete" })))
        }
    };
    html! {
        @if found.dead_letters.is_empty() { p.muted { "None." } } @else {
            (both(""))
            div.wide tabindex="0" role="region" aria-label="Dead letters" {
                table {
                    thead { tr { th { "Given up" } th { "What" } th.number { "Attempts" } th { "Reason" } th { "Do" } } }
                    tbody {
                        @for letter in &found.dead_letters {
                            tr {
                                td { (time(letter.time.as_ref())) }
                                td.payload {
                                    @match &letter.content {
                                        Some(Content::Message(message)) => { (tail::topic(&message.topic)) " " (payload(&message.payload)) }
                                        Some(Content::Event(event)) => { "an event of " (tail::device(&event.device_id)) }
                                        None => {}
                                    }
                                }
                                td.number { (letter.attempts) }
                                td { (letter.reason) }
                                td { (both(&letter.id)) }
                            }
                        }
                    }
                }
            }
            @if !found.next_page_token.is_empty() {
                p { a rel="next" href={ "/page/group?" (query(&[("name", &named.name), ("page", &found.next_page_token)])) } { "Next page" } }
            }
        }
    }
}
