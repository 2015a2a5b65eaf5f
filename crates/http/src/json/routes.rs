//! The routes: path, RPC, and the sources of its fields.

use axum::routing::MethodFilter;

use super::{encode::JsonForm, payload::PayloadView};

/// An HTTP method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpMethod {
    Get,
    Post,
    Put,
    Patch,
    Delete,
}

impl HttpMethod {
    pub(super) fn filter(self) -> MethodFilter {
        match self {
            Self::Get => MethodFilter::GET,
            Self::Post => MethodFilter::POST,
            Self::Put => MethodFilter::PUT,
            Self::Patch => MethodFilter::PATCH,
            Self::Delete => MethodFilter::DELETE,
        }
    }
}

/// Content of a request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyContent {
    /// Not read.
    None,
    /// The request message.
    Json,
    /// This field of it, as bytes.
    Payload(&'static str),
}

/// One path with one method.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub(super) verb: HttpMethod,
    /// As axum writes it. Names in it are fields of the request.
    pub(super) path: &'static str,
    /// Service and method of `gateway.v1`; empty where the path says it.
    pub(super) rpc: &'static str,
    pub(super) body: BodyContent,
    /// Names in the path that stand for a field of another name.
    pub(super) fields: &'static [(&'static str, &'static str)],
    /// The field of the answer that is the body; all of it if `None`.
    pub(super) answer: Option<&'static str>,
    /// The field that `Idempotency-Key` sets.
    pub(super) key: Option<&'static str>,
    pub(super) form: JsonForm,
}

impl Route {
    const fn new(verb: HttpMethod, path: &'static str, rpc: &'static str) -> Self {
        Self {
            verb,
            path,
            rpc,
            body: BodyContent::None,
            fields: &[],
            answer: None,
            key: None,
            form: JsonForm::Plain,
        }
    }

    const fn get(path: &'static str, rpc: &'static str) -> Self {
        Self::new(HttpMethod::Get, path, rpc)
    }

    const fn post(path: &'static str, rpc: &'static str) -> Self {
        Self { body: BodyContent::Json, ..Self::new(HttpMethod::Post, path, rpc) }
    }

    const fn put(path: &'static str, rpc: &'static str) -> Self {
        Self { body: BodyContent::Json, ..Self::new(HttpMethod::Put, path, rpc) }
    }

    const fn patch(path: &'static str, rpc: &'static str) -> Self {
        Self { body: BodyContent::Json, ..Self::new(HttpMethod::Patch, path, rpc) }
    }

    const fn delete(path: &'static str, rpc: &'static str) -> Self {
        Self::new(HttpMethod::Delete, path, rpc)
    }

    const fn payload(self, field: &'static str) -> Self {
        Self { body: BodyContent::Payload(field), ..self }
    }

    const fn with(self, fields: &'static [(&'static str, &'static str)]) -> Self {
        Self { fields, ..self }
    }

    const fn answers(self, field: &'static str) -> Self {
        Self { answer: Some(field), ..self }
    }

    const fn key(self, field: &'static str) -> Self {
        Self { key: Some(field), ..self }
    }

    const fn canonical(self) -> Self {
        Self { form: JsonForm::Canonical, ..self }
    }

    /// The field that a name in the path stands for.
    pub(super) fn field_of<'a>(&self, name: &'a str) -> &'a str {
        self.fields.iter().find(|(known, _)| *known == name).map_or(name, |(_, field)| field)
    }

    /// Returns whether the route answers with a stream.
    pub(super) fn is_stream(&self) -> bool {
        self.path.starts_with("/v1/stream/")
    }
}

impl JsonForm {
    /// Returns the form of payloads if the request names none.
    pub(super) fn view(self) -> PayloadView {
        match self {
            Self::Plain => PayloadView::Text,
            Self::Canonical => PayloadView::Base64,
        }
    }
}

const DEVICE: &[(&str, &str)] = &[("deviceId", "deviceIds")];
const GROUP: &[(&str, &str)] = &[("group", "name")];
const SPEC: &[(&str, &str)] = &[("deviceId", "spec.deviceId"), ("name", "spec.name")];

/// All of them. docs/http.md shows them by purpose.
#[rustfmt::skip]
pub(super) const ROUTES: &[Route] = &[
    Route::post("/v1/topics/{*topic}", "Publisher/Publish").payload("payload").key("idempotencyKey"),
    Route::put("/v1/topics/{*topic}", "Publisher/Publish").payload("payload").key("idempotencyKey"),
    Route::post("/v1/devices/{deviceId}/topics/{*topic}", "Publisher/Publish").payload("payload").key("idempotencyKey"),
    Route::post("/v1/publish", "Publisher/Publish").key("idempotencyKey"),
    Route::post("/v1/publish/batch", "Publisher/PublishBatch"),
    Route::get("/v1/scheduled", "Publisher/ListScheduled"),
    Route::delete("/v1/scheduled/{scheduleId}", "Publisher/CancelScheduled"),

    Route::get("/v1/latest", "State/ListLatest"),
    Route::get("/v1/latest/{*topic}", "State/GetLatest").answers("value"),
    Route::get("/v1/devices/{deviceId}/latest", "State/ListLatest").with(DEVICE),
    Route::get("/v1/devices/{deviceId}/latest/{*topic}", "State/GetLatest").answers("value"),
    Route::delete("/v1/devices/{deviceId}/latest/{*topic}", "State/DeleteLatest"),
    Route::get("/v1/devices/{deviceId}/history/{*topic}", "State/ListHistory"),
    Route::get("/v1/retained", "State/ListRetained"),
    Route::get("/v1/retained/{*topic}", "State/GetRetained").answers("message"),
    Route::put("/v1/retained/{*topic}", "State/SetRetained").payload("payload"),
    Route::delete("/v1/retained/{*topic}", "State/DeleteRetained"),

    Route::get("/v1/devices", "Devices/ListDevices"),
    Route::get("/v1/devices/{deviceId}", "Devices/GetDevice").answers("device"),
    Route::delete("/v1/devices/{deviceId}", "Devices/DeleteDevice"),
    Route::get("/v1/devices/{deviceId}/subscriptions", "Devices/ListSubscriptions"),
    Route::get("/v1/devices/{deviceId}/queue", "Devices/ListQueue"),
    Route::delete("/v1/devices/{deviceId}/queue", "Devices/PurgeQueue"),
    Route::post("/v1/devices/{deviceId}/disconnect", "Devices/DisconnectDevice"),

    Route::post("/v1/devices/{deviceId}/commands/{name}", "Commands/Send").payload("spec.payload").with(SPEC).answers("reply"),
    Route::get("/v1/devices/{deviceId}/commands", "Commands/ListCommands"),
    Route::post("/v1/commands", "Commands/StartCommand").key("commandId").answers("command"),
    Route::get("/v1/commands", "Commands/ListCommands"),
    Route::get("/v1/commands/{commandId}", "Commands/GetCommand").answers("command"),
    Route::delete("/v1/commands/{commandId}", "Commands/CancelCommand").answers("command"),

    Route::get("/v1/devices/{deviceId}/shadow", "Shadows/GetShadow").answers("shadow"),
    Route::patch("/v1/devices/{deviceId}/shadow", "Shadows/UpdateShadow").answers("shadow"),
    Route::delete("/v1/devices/{deviceId}/shadow", "Shadows/DeleteShadow"),
    Route::get("/v1/devices/{deviceId}/shadows", "Shadows/ListShadows"),
    Route::get("/v1/devices/{deviceId}/shadows/{name}", "Shadows/GetShadow").answers("shadow"),
    Route::patch("/v1/devices/{deviceId}/shadows/{name}", "Shadows/UpdateShadow").answers("shadow"),
    Route::delete("/v1/devices/{deviceId}/shadows/{name}", "Shadows/DeleteShadow"),

    Route::get("/v1/groups", "Groups/ListGroups"),
    Route::post("/v1/groups", "Groups/CreateGroup").answers("group"),
    Route::get("/v1/groups/{group}", "Groups/GetGroup").with(GROUP).answers("group"),
    Route::delete("/v1/groups/{group}", "Groups/DeleteGroup").with(GROUP),
    Route::post("/v1/groups/{group}/fetch", "Consumer/Fetch"),
    Route::post("/v1/groups/{group}/acknowledge", "Consumer/Acknowledge"),

    Route::get("/v1/bridges", "Operations/ListBridges"),

    Route::get("/v1/stream/messages", "Subscriber/Subscribe"),
    Route::get("/v1/stream/latest", "State/WatchLatest"),
    Route::get("/v1/stream/events", "Events/WatchEvents"),
    Route::get("/v1/stream/shadows", "Shadows/WatchShadow"),
    Route::get("/v1/stream/devices/{deviceId}/packets", "Devices/TracePackets"),
    Route::get("/v1/stream/commands/{commandId}", "Commands/WatchCommand"),

    // Every other RPC, and these as well.
    Route::post("/v1/rpc/{service}/{method}", "").canonical(),
    Route::post("/v1/stream/rpc/{service}/{method}", "").canonical(),
];
