//! Devices that have a session: by the beginning of their id and by what their connection is, page by page.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    response::Response,
};
use gateway_api::gateway::v1::{self, ProtocolVersion};
use maud::{Markup, html};
use serde::Deserialize;

use super::{
    House,
    layout::{self, bytes, problem, query, time},
    tail::device as link,
    visit::Visitor,
};

/// Devices of a page: as many as one reads.
const PAGE: i32 = 50;

/// What to list.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Wanted {
    prefix: String,
    online: String,
    version: String,
    listener: String,
    name: String,
    page: String,
}

impl Wanted {
    fn version(&self) -> ProtocolVersion {
        match self.version.as_str() {
            "3.1" => ProtocolVersion::V31,
            "3.1.1" => ProtocolVersion::V311,
            "5" => ProtocolVersion::V50,
            _ => ProtocolVersion::Unspecified,
        }
    }

    fn request(&self) -> v1::ListDevicesRequest {
        v1::ListDevicesRequest {
            online_only: !self.online.is_empty(),
            page_size: PAGE,
            page_token: self.page.clone(),
            view: v1::DeviceView::Basic.into(),
            device_id_prefix: self.prefix.clone(),
            protocol_version: self.version().into(),
            listener: self.listener.clone(),
            common_name: self.name.clone(),
            ..Default::default()
        }
    }

    fn link(&self, page: &str) -> String {
        let pairs = [
            ("prefix", self.prefix.as_str()),
            ("online", &self.online),
            ("version", &self.version),
            ("listener", &self.listener),
            ("name", &self.name),
            ("page", page),
        ];
        let given: Vec<_> = pairs.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        format!("/page/devices?{}", query(&given))
    }
}

pub(super) async fn list(
    State(_): State<Arc<House>>,
    visitor: Visitor,
    Query(wanted): Query<Wanted>,
) -> Response {
    let found = visitor.api.devices().list_devices(wanted.request()).await;
    let body = html! {
        (filters(&wanted))
        @match found {
            Err(status) => (problem(&status)),
            Ok(found) => {
                @let found = found.into_inner();
                section {
                    (table(&found.devices))
                    p {
                        @if !wanted.page.is_empty() { a href=(wanted.link("")) { "First page" } " " }
                        @if !found.next_page_token.is_empty() { a rel="next" href=(wanted.link(&found.next_page_token)) { "Next page" } }
                    }
                }
            }
        }
    };
    layout::page(&visitor, "/page/devices", "Devices", body)
}

fn filters(wanted: &Wanted) -> Markup {
    let versions = [("", "any"), ("3.1", "3.1"), ("3.1.1", "3.1.1"), ("5", "5.0")];
    html! {
        section {
            form.line method="get" action="/page/devices" role="search" {
                label { "Id begins with" input type="search" name="prefix" value=(wanted.prefix); }
                label { "MQTT" select name="version" {
                    @for (value, text) in versions { option value=(value) selected[wanted.version == value] { (text) } }
                } }
                label { "Listener" input name="listener" value=(wanted.listener) size="12"; }
                label { "Common name" input name="name" value=(wanted.name) size="16"; }
                label.check { input type="checkbox" name="online" value="1" checked[!wanted.online.is_empty()]; "connected only" }
                button type="submit" { "Show" }
            }
        }
    }
}

/// A row for each device.
pub(super) fn table(devices: &[v1::Device]) -> Markup {
    html! {
        @if devices.is_empty() { p.muted { "No device here." } } @else {
            div.wide tabindex="0" role="region" aria-label="Devices" {
                table {
                    thead {
                        tr {
                            th { "Device" } th { "State" } th { "Since" } th { "Address" } th { "Listener" } th { "MQTT" } th { "User" }
                            th.number { "Waiting" } th.number { "Unacknowledged" } th.number { "Dropped" }
                        }
                    }
                    tbody { @for device in devices { (row(device)) } }
                }
            }
        }
    }
}

fn row(device: &v1::Device) -> Markup {
    let connection = device.connection.clone().unwrap_or_default();
    let queue = device.queue.unwrap_or_default();
    let name = connection.username.as_deref().or(connection.common_name.as_deref()).unwrap_or("–");
    html! {
        tr {
            td { (link(&device.device_id)) }
            td { (state(device.online)) }
            td { (time(device.state_time.as_ref())) }
            td { (connection.peer) }
            td { (connection.listener) }
            td { (version(connection.protocol_version())) }
            td { (name) }
            td.number { (queue.pending) @if queue.pending_bytes > 0 { " (" (bytes(queue.pending_bytes as f64)) ")" } }
            td.number { (queue.inflight) }
            td.number { (queue.dropped) }
        }
    }
}

pub(super) fn state(online: bool) -> Markup {
    html! { @if online { span.good { "connected" } } @else { span.muted { "away" } } }
}

pub(super) fn version(version: ProtocolVersion) -> &'static str {
    match version {
        ProtocolVersion::Unspecified => "–",
        ProtocolVersion::V31 => "3.1",
        ProtocolVersion::V311 => "3.1.1",
        ProtocolVersion::V50 => "5.0",
    }
}
