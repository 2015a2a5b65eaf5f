//! One device: what the gateway knows of it, what comes from it, and what can be done about it.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Query, State},
    response::Response,
};
use gateway_api::gateway::v1::{self, ban_target::Target, event::Detail, watch_events_item::Item};
use gateway_core::clock;
use maud::{Markup, html};
use prost_types::Timestamp;
use serde::Deserialize;
use tonic::{Request, Status};

use super::{
    devices::{state, version},
    layout::{self, button, bytes, csrf, done, of_day, payload, problem, query, time},
    live::{self, BrowserEvents, BrowserGone},
    state::PageState,
    tail,
    visit::{FormFields, Post, Visitor},
};

/// Time that a page waits for the device's answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Most of each list.
const SUBSCRIPTIONS: i32 = 100;
const QUEUED: i32 = 20;
const VALUES: i32 = 50;
const COMMANDS: i32 = 10;

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct DeviceQuery {
    id: String,
    /// Page of its subscriptions.
    subscriptions: String,
}

pub(super) async fn show(
    visitor: Visitor,
    Query(DeviceQuery { id, subscriptions }): Query<DeviceQuery>,
) -> Response {
    page(&visitor, &id, &subscriptions, html! {}).await
}

/// Does what the form says, and shows the device as it is then.
pub(super) async fn act(
    Query(DeviceQuery { id, .. }): Query<DeviceQuery>,
    Post { visitor, fields }: Post,
) -> Response {
    let said = match perform(&visitor, &id, &fields).await {
        Ok(text) => done(&text),
        Err(status) => problem(&status),
    };
    page(&visitor, &id, "", said).await
}

async fn perform(visitor: &Visitor, id: &str, fields: &FormFields) -> Result<String, Status> {
    let (api, device_id) = (&visitor.api, id.to_owned());
    match fields.get("do") {
        "disconnect" => {
            let discard_session = fields.ticked("discard");
            let request = v1::DisconnectDeviceRequest { device_id, reason_code: None, discard_session };
            api.devices().disconnect_device(request).await?;
            Ok("The connection was ended.".to_owned())
        }
        "purge" => {
            let purged = api.devices().purge_queue(v1::PurgeQueueRequest { device_id }).await?.into_inner();
            Ok(format!("{} messages were dropped from its queue.", purged.count))
        }
        "delete" => {
            let gone = api.devices().delete_device(v1::DeleteDeviceRequest { device_id }).await?.into_inner();
            let (values, retained) = (gone.latest_values, gone.retained_messages);
            Ok(format!("Deleted, with {values} latest values and {retained} retained messages."))
        }
        "trace" | "untrace" => {
            let enabled = fields.get("do") == "trace";
            api.devices().set_device_trace(v1::SetDeviceTraceRequest { device_id, enabled }).await?;
            let now = if enabled { "now logs" } else { "no longer logs" };
            Ok(format!("The gateway {now} all about this device at trace level."))
        }
        "ban" => {
            let hours: u64 = fields.get("hours").parse().unwrap_or(24);
            let now = clock::to_wall(clock::now()).0 / 1_000;
            let seconds = now.saturating_add(hours.saturating_mul(3_600));
            let expire_time = (hours > 0).then_some(Timestamp { seconds: seconds as i64, nanos: 0 });
            let target = Some(v1::BanTarget { target: Some(Target::ClientId(device_id)) });
            let reason = fields.get("reason").to_owned();
            api.security().add_ban(v1::AddBanRequest { target, reason, expire_time }).await?;
            Ok(if hours > 0 { format!("Banned for {hours} hours.") } else { "Banned for good.".to_owned() })
        }
        "publish" => {
            let message = v1::PublishRequest {
                device_id: Some(device_id),
                topic: fields.get("topic").to_owned(),
                payload: fields.lines("payload").into(),
                qos: tail::qos_of(fields.get("qos")).into(),
                wait: v1::Wait::Acked.into(),
                ..Default::default()
            };
            let mut request = Request::new(message);
            request.set_timeout(ANSWER);
            let answer = api.publisher().publish(request).await?.into_inner();
            Ok(outcome(&answer))
        }
        "command" => {
            let spec = v1::CommandSpec {
                device_id,
                name: fields.get("name").to_owned(),
                payload: fields.lines("payload").into(),
                ..Default::default()
            };
            let mut request = Request::new(v1::SendRequest { spec: Some(spec), wait_for_device: None });
            request.set_timeout(ANSWER);
            let reply = api.commands().send(request).await?.into_inner().reply.unwrap_or_default();
            Ok(format!(
                "The device answered with status {}: {}",
                reply.device_status,
                payload(&reply.payload)
            ))
        }
        _ => Err(Status::invalid_argument("this page has no such button")),
    }
}

/// Returns the fate of a message, in words.
pub(super) fn outcome(answer: &v1::PublishResponse) -> String {
    let what = match answer.outcome() {
        v1::Outcome::Sent => "sent",
        v1::Outcome::Acked => "acknowledged",
        v1::Outcome::Queued => "queued, since every receiver is away",
        v1::Outcome::NoMatch => "received by nobody: no subscription matches",
        v1::Outcome::Dropped => "dropped",
        v1::Outcome::Rejected => "refused by a receiver",
        v1::Outcome::Scheduled => "scheduled",
        v1::Outcome::Unspecified => "taken",
    };
    format!(
        "The message was {what} ({} matched, {} sent, {} queued, {} dropped).",
        answer.matched, answer.sent, answer.queued, answer.dropped
    )
}

async fn page(visitor: &Visitor, id: &str, subscribed: &str, said: Markup) -> Response {
    // Its subscriptions are asked for by themselves, page by page.
    let request = v1::GetDeviceRequest { device_id: id.to_owned(), view: v1::DeviceView::Basic.into() };
    let device = visitor.api.devices().get_device(request).await;
    let body = html! {
        (said)
        @match &device {
            Ok(device) => {
                @let device = device.get_ref().device.clone().unwrap_or_default();
                (session(&device, subscriptions(visitor, &device, subscribed).await))
            }
            Err(status) => (problem(status)),
        }
        section data-live={ "/page/live/device?" (query(&[("id", id)])) } {
            h2 { "Live" }
            p data-status aria-live="polite" { "needs script" }
            div.grid {
                div { h2 { "What it sends" } (tail::table("messages")) }
                div {
                    h2 { "What happens to it" }
                    div.wide tabindex="0" role="region" aria-label="Events, the newest first" {
                        table { thead { tr { th { "Time" } th { "Event" } } } tbody #events {} }
                    }
                }
            }
        }
        (actions(visitor, id))
        (waiting(visitor, id).await)
        (values(visitor, id).await)
        (commands(visitor, id).await)
    };
    layout::page(visitor, "/page/devices", id, body)
}

fn session(device: &v1::Device, subscriptions: Markup) -> Markup {
    let connection = device.connection.clone().unwrap_or_default();
    let queue = device.queue.unwrap_or_default();
    let expiry = match device.session_expiry_seconds {
        u32::MAX => "never".to_owned(),
        0 => "with its connection".to_owned(),
        seconds => format!("{seconds} s after its connection"),
    };
    html! {
        div.stack.grid {
            section {
                h2 { "Session" }
                dl {
                    dt { "State" } dd { (state(device.online)) " since " (time(device.state_time.as_ref())) }
                    dt { "Ends" } dd { (expiry) }
                    dt { "Address" } dd { (connection.peer) }
                    dt { "Listener" } dd { (connection.listener) }
                    dt { "MQTT" } dd { (version(connection.protocol_version())) ", keep alive " (connection.keep_alive_seconds) " s" }
                    dt { "User name" } dd { (connection.username.as_deref().unwrap_or("–")) }
                    dt { "Common name" } dd { (connection.common_name.as_deref().unwrap_or("–")) }
                }
            }
            section {
                h2 { "Counters" }
                dl {
                    dt { "Waiting" } dd { (queue.pending) " messages, " (bytes(queue.pending_bytes as f64)) }
                    dt { "Unacknowledged" } dd { (queue.inflight) }
                    dt { "Dropped" } dd { (queue.dropped) " since the session began" }
                    dt { "Subscriptions" } dd { (device.subscription_count) }
                }
            }
            section {
                h2 { "Subscriptions" }
                (subscriptions)
            }
        }
    }
}

/// A page of what it has subscribed to.
async fn subscriptions(visitor: &Visitor, device: &v1::Device, page: &str) -> Markup {
    let request = v1::ListSubscriptionsRequest {
        device_id: device.device_id.clone(),
        page_size: SUBSCRIPTIONS,
        page_token: page.to_owned(),
    };
    let found = match visitor.api.devices().list_subscriptions(request).await {
        Ok(found) => found.into_inner(),
        Err(status) => return problem(&status),
    };
    let shown = found.subscriptions.len();
    let link = |pairs: &[(&str, &str)]| {
        format!("/page/device?{}", query(&[&[("id", device.device_id.as_str())], pairs].concat()))
    };
    html! {
        @if shown == 0 { p.muted { "None that are in your scope." } } @else {
            table {
                thead { tr { th { "Filter" } th { "QoS" } } }
                tbody {
                    @for subscription in &found.subscriptions {
                        tr {
                            td { code { (subscription.topic_filter) } @if subscription.restricted { " " span.warn { "restricted by the rules" } } }
                            td { (tail::qos(subscription.qos())) }
                        }
                    }
                }
            }
        }
        @if !page.is_empty() || !found.next_page_token.is_empty() {
            p {
                @if page.is_empty() { "The first " (shown) } @else { (shown) } " of " (device.subscription_count) ". "
                @if !page.is_empty() { a href=(link(&[])) { "First page" } " " }
                @if !found.next_page_token.is_empty() {
                    a rel="next" href=(link(&[("subscriptions", &found.next_page_token)])) { "Next page" }
                }
            }
        }
    }
}

fn actions(visitor: &Visitor, id: &str) -> Markup {
    let to = format!("/page/device?{}", query(&[("id", id)]));
    let form = |content: Markup| html! { form.line method="post" action=(to) { (csrf(visitor)) (content) } };
    html! {
        div.stack.grid {
            section {
                h2 { "Publish to it" }
                (form(html! {
                    label { "Topic" input name="topic" required; }
                    label { "QoS" select name="qos" { option { "1" } option { "0" } option { "2" } } }
                    label { "Payload" textarea name="payload" {} }
                    (button(visitor, "Publisher/Publish", "", ("do", "publish"), "Publish"))
                }))
            }
            section {
                h2 { "Send a command" }
                (form(html! {
                    label { "Name" input name="name" required; }
                    label { "Payload" textarea name="payload" {} }
                    (button(visitor, "Commands/Send", "", ("do", "command"), "Send and wait"))
                }))
            }
            section {
                h2 { "Connection and session" }
                (form(html! {
                    label.check { input type="checkbox" name="discard" value="1"; "end its session too" }
                    (button(visitor, "Devices/DisconnectDevice", "danger", ("do", "disconnect"), "Disconnect"))
                }))
                @if visitor.may("Devices/TracePackets") {
                    p { a href={ "/page/packets?" (query(&[("id", id)])) } { "See its packets" } }
                }
                (form(html! {
                    (button(visitor, "Devices/SetDeviceTrace", "quiet", ("do", "trace"), "Trace in the log"))
                    (button(visitor, "Devices/SetDeviceTrace", "quiet", ("do", "untrace"), "Stop tracing"))
                }))
                details {
                    summary { "Empty its queue, ban it, or delete it" }
                    (form(button(visitor, "Devices/PurgeQueue", "danger", ("do", "purge"), "Empty its queue")))
                    (form(html! {
                        label { "Reason" input name="reason" maxlength="200"; }
                        label { "Hours, 0 is for good" input type="number" name="hours" min="0" max="100000" value="24"; }
                        (button(visitor, "Security/AddBan", "danger", ("do", "ban"), "Ban"))
                    }))
                    (form(button(visitor, "Devices/DeleteDevice", "danger", ("do", "delete"), "Delete it with all its values")))
                }
            }
        }
    }
}

async fn waiting(visitor: &Visitor, id: &str) -> Markup {
    let request = v1::ListQueueRequest {
        device_id: id.to_owned(),
        page_size: QUEUED,
        payload_bytes: 256,
        ..Default::default()
    };
    let queue = visitor.api.devices().list_queue(request).await;
    html! {
        @if let Ok(queue) = queue {
            @let messages = queue.into_inner().messages;
            @if !messages.is_empty() {
                section {
                    h2 { "Queue, its first " (messages.len()) }
                    div.wide tabindex="0" role="region" aria-label="Queue" {
                        table {
                            thead { tr { th { "Topic" } th { "QoS" } th { "State" } th { "Payload" } } }
                            tbody {
                                @for message in &messages {
                                    tr {
                                        td { (tail::topic(&message.topic)) }
                                        td { (tail::qos(message.qos())) }
                                        td { (format!("{:?}", message.state()).to_lowercase()) }
                                        td.payload { (payload(&message.payload)) }
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

async fn values(visitor: &Visitor, id: &str) -> Markup {
    let request =
        v1::ListLatestRequest { device_ids: vec![id.to_owned()], page_size: VALUES, ..Default::default() };
    let found = visitor.api.state().list_latest(request).await;
    html! {
        section {
            h2 { "Latest values" }
            @match found {
                Err(status) => (problem(&status)),
                Ok(found) => {
                    @let v1::ListLatestResponse { values, next_page_token } = found.into_inner();
                    @if !next_page_token.is_empty() {
                        p { "The first " (values.len()) ". " a href={ "/page/topics?" (query(&[("device", id)])) } { "All of them" } }
                    }
                    @if values.is_empty() { p.muted { "None." } } @else {
                        div.wide tabindex="0" role="region" aria-label="Latest values" {
                            table {
                                thead { tr { th { "Topic" } th { "Received" } th { "Value" } } }
                                tbody {
                                    @for value in &values {
                                        tr {
                                            td { (tail::topic(&value.topic)) }
                                            td { (time(value.receive_time.as_ref())) }
                                            td.payload { (payload(&value.payload)) }
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
}

async fn commands(visitor: &Visitor, id: &str) -> Markup {
    let request =
        v1::ListCommandsRequest { device_id: id.to_owned(), page_size: COMMANDS, ..Default::default() };
    let found = visitor.api.commands().list_commands(request).await;
    html! {
        @if let Ok(found) = found {
            @let commands = found.into_inner().commands;
            @if !commands.is_empty() {
                section {
                    h2 { "Commands" }
                    table {
                        thead { tr { th { "Made" } th { "Name" } th { "State" } th { "Answer" } } }
                        tbody {
                            @for command in &commands {
                                tr {
                                    td { (time(command.create_time.as_ref())) }
                                    td { (command.spec.as_ref().map_or("", |spec| spec.name.as_str())) }
                                    td { (format!("{:?}", command.state()).to_lowercase()) }
                                    td.payload { @if let Some(reply) = &command.reply { (payload(&reply.payload)) } }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Streams the device's messages, and its events.
pub(super) async fn live(
    State(page_state): State<Arc<PageState>>,
    visitor: Visitor,
    Query(DeviceQuery { id, .. }): Query<DeviceQuery>,
) -> Response {
    live::stream(&page_state, visitor, |visitor, events| async move {
        let mut subscriber = visitor.api.subscriber();
        let messages = match subscriber.subscribe(tail::request(Vec::new(), vec![id.clone()])).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => return tail::refused(&events, &status).await,
        };
        tokio::try_join!(tail::follow(messages, "messages", &events), happenings(&visitor, id, &events))
            .map(|_| ())
    })
}

async fn happenings(visitor: &Visitor, id: String, events: &BrowserEvents) -> Result<(), BrowserGone> {
    let request = v1::WatchEventsRequest { device_ids: vec![id], ..Default::default() };
    let mut stream = match visitor.api.events().watch_events(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => return tail::refused(events, &status).await,
    };
    while let Ok(Some(batch)) = stream.message().await {
        let happened = batch.items.iter().rev().filter_map(|item| match &item.item {
            Some(Item::Event(event)) => Some(event),
            _ => None,
        });
        let rows = html! {
            @for event in happened { tr { td { (of_day(event.time.as_ref())) } td { (words(event.detail.as_ref())) } } }
        };
        if !rows.0.is_empty() {
            events.add("events", &rows).await?;
        }
    }
    Ok(())
}

/// Returns the event in words.
fn words(detail: Option<&Detail>) -> String {
    match detail {
        Some(Detail::Connected(connected)) => {
            let peer = connected.connection.as_ref().map_or("", |connection| connection.peer.as_str());
            let resumed = if connected.session_present { ", session resumed" } else { "" };
            format!("connected from {peer}{resumed}")
        }
        Some(Detail::Disconnected(ended)) => format!("disconnected: {}", ended.reason.replace('_', " ")),
        Some(Detail::TakenOver(_)) => "taken over by another connection".to_owned(),
        Some(Detail::Subscribed(subscription)) => format!("subscribed to {}", subscription.topic_filter),
        Some(Detail::Unsubscribed(gone)) => format!("unsubscribed from {}", gone.topic_filter),
        Some(Detail::SessionEnded(ended)) => format!("session ended: {}", ended.reason.replace('_', " ")),
        Some(Detail::Dropped(dropped)) => {
            let reason = dropped.reason().as_str_name().trim_start_matches("DROP_REASON_").to_lowercase();
            format!("{} messages dropped: {}", dropped.count, reason.replace('_', " "))
        }
        Some(Detail::AuthFailed(_)) => "authentication failed".to_owned(),
        None => String::new(),
    }
}
