//! Devices that have a session: by the beginning of their id and by what their connection is, page by page.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    response::Response,
};
use gateway_api::gateway::v1::{self, ProtocolVersion};
use maud::{Markup, html};
use serde::Deserialize;
use tonic::Status;

use super::{
    layout::{self, bytes, problem, query, time},
    state::PageState,
    tail::device as link,
    visit::Visitor,
};

/// Devices of a page: as many as one reads.
const PAGE: usize = 50;
/// Most calls for a page. One looks at 8,192 ids or at the connections of 2,048 devices, so that a page which shows nothing has
/// looked at 500,000 ids.
const CALLS: usize = 64;

/// Query of the list.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct DevicesQuery {
    prefix: String,
    online: String,
    version: String,
    listener: String,
    name: String,
    page: String,
}

impl DevicesQuery {
    fn version(&self) -> ProtocolVersion {
        match self.version.as_str() {
            "3.1" => ProtocolVersion::V31,
            "3.1.1" => ProtocolVersion::V311,
            "5" => ProtocolVersion::V50,
            _ => ProtocolVersion::Unspecified,
        }
    }

    fn request(&self, most: usize, page_token: String) -> v1::ListDevicesRequest {
        v1::ListDevicesRequest {
            online_only: !self.online.is_empty(),
            page_size: i32::try_from(most).unwrap_or(i32::MAX),
            page_token,
            view: v1::DeviceView::Basic.into(),
            device_id_prefix: self.prefix.clone(),
            protocol_version: self.version().into(),
            listener: self.listener.clone(),
            common_name: self.name.clone(),
            ..Default::default()
        }
    }

    /// The device whose id this is in full. It is asked for if the id is all that is asked, and no scope may forbid it.
    async fn exact(&self, visitor: &Visitor) -> Option<v1::Device> {
        let others = [&self.online, &self.version, &self.listener, &self.name];
        let limited = visitor.caller.scope.as_ref().is_some_and(|scope| !scope.device_patterns.is_empty());
        if self.prefix.is_empty() || limited || others.iter().any(|other| !other.is_empty()) {
            return None;
        }
        let request =
            v1::GetDeviceRequest { device_id: self.prefix.clone(), view: v1::DeviceView::Basic.into() };
        visitor.api.devices().get_device(request).await.ok()?.into_inner().device
    }

    /// A page of those that are wanted: first the one whose id was given in full, then others as they are found, until the
    /// page is full, the list has ended, or enough was looked at.
    async fn find(&self, visitor: &Visitor) -> Result<FoundDevices, Status> {
        let exact = self.exact(visitor).await;
        let is_exact = exact.is_some();
        let mut found = FoundDevices { devices: Vec::new(), next: self.page.clone() };
        if self.page.is_empty() {
            found.devices.extend(exact);
        }
        for _ in 0..CALLS {
            let request = self.request(PAGE - found.devices.len(), found.next);
            let part = visitor.api.devices().list_devices(request).await?.into_inner();
            let is_new = |device: &v1::Device| !(is_exact && device.device_id == self.prefix);
            found.devices.extend(part.devices.into_iter().filter(is_new));
            found.next = part.next_page_token;
            if found.next.is_empty() || found.devices.len() >= PAGE {
                break;
            }
            // Others have their turn.
            tokio::task::yield_now().await;
        }
        Ok(found)
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

/// Devices found by a query.
struct FoundDevices {
    devices: Vec<v1::Device>,
    /// Cursor of the next page; empty at the end.
    next: String,
}

pub(super) async fn list(
    State(_): State<Arc<PageState>>,
    visitor: Visitor,
    Query(wanted): Query<DevicesQuery>,
) -> Response {
    let found = wanted.find(&visitor).await;
    let body = html! {
        (filters(&wanted))
        @match found {
            Err(status) => (problem(&status)),
            Ok(found) => {
                section {
                    @if found.devices.is_empty() && !found.next.is_empty() {
                        p.muted { "None among the devices looked at so far; there are more." }
                    } @else {
                        (table(&found.devices))
                    }
                    p {
                        @if !wanted.page.is_empty() { a href=(wanted.link("")) { "First page" } " " }
                        @if !found.next.is_empty() { a rel="next" href=(wanted.link(&found.next)) { "Next page" } }
                    }
                }
            }
        }
    };
    layout::page(&visitor, "/page/devices", "Devices", body)
}

fn filters(wanted: &DevicesQuery) -> Markup {
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
