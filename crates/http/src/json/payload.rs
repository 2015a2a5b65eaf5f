//! Payloads: the forms in which they are taken and shown.

use axum::{
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS},
    },
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use prost_reflect::{DynamicMessage, Value};
use serde::ser::SerializeMap;
use serde_json::value::RawValue;

use super::{decode, problem::HttpProblem};
use crate::held::{HeldBytes, paced};

/// Content types that the payload of a device may have here: what a browser would run or draw is not among them, since it would
/// be on the gateway's own origin.
const SHOWN: [&str; 6] =
    ["application/json", "application/cbor", "application/x-protobuf", "text/plain", "text/csv", "image/png"];
/// Content type that `curl -d` names for any body.
const FORM: &str = "application/x-www-form-urlencoded";

/// Form in which a payload is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PayloadView {
    /// `payload`, in base64.
    Base64,
    /// `payloadText` if it is UTF-8, else base64.
    Text,
    /// `payloadJson` if it is JSON, else as text.
    Json,
    /// The payload itself is the body.
    Raw,
}

impl PayloadView {
    pub(super) fn parse(text: &str) -> Result<Self, HttpProblem> {
        match text {
            "base64" => Ok(Self::Base64),
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            "raw" => Ok(Self::Raw),
            _ => Err(HttpProblem::invalid("payload", "is none of base64, text, json, raw")),
        }
    }

    /// Writes a payload into the object that it belongs to.
    pub(super) fn put<M: SerializeMap>(self, payload: &[u8], map: &mut M) -> Result<(), M::Error> {
        let text = match self {
            Self::Text | Self::Json => std::str::from_utf8(payload).ok(),
            Self::Base64 | Self::Raw => None,
        };
        let Some(text) = text else { return map.serialize_entry("payload", &STANDARD.encode(payload)) };
        let json = (self == Self::Json).then(|| serde_json::from_str::<&RawValue>(text).ok()).flatten();
        match json {
            Some(json) => map.serialize_entry("payloadJson", json),
            None => map.serialize_entry("payloadText", text),
        }
    }
}

/// Makes a body the payload of a message.
pub(super) fn put(
    message: &mut DynamicMessage,
    path: &str,
    body: Bytes,
    headers: &HeaderMap,
    is_base64: bool,
) -> Result<(), HttpProblem> {
    let body = match is_base64 {
        true => decode::base64(body.trim_ascii())
            .ok_or_else(|| HttpProblem::invalid("body", "is not base64"))?
            .into(),
        false => body,
    };
    let mut target = message;
    let mut names = path.split('.').peekable();
    while let Some(name) = names.next() {
        if names.peek().is_none() {
            if let Some(content_type) = content_type(headers)
                && let Some(Value::Message(properties)) = target.get_field_by_name_mut("properties")
            {
                properties.set_field_by_name("content_type", Value::String(content_type.to_owned()));
            }
            target.set_field_by_name(name, Value::Bytes(body));
            return Ok(());
        }
        match target.get_field_by_name_mut(name) {
            Some(Value::Message(inner)) => target = inner,
            _ => return Err(HttpProblem::internal()),
        }
    }
    Err(HttpProblem::internal())
}

/// The type that the message is to say it has.
fn content_type(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    (!text.is_empty() && !text.to_ascii_lowercase().starts_with(FORM)).then_some(text)
}

/// The one payload of an answer as the body; `None` if it has none or several.
pub(super) fn raw(mut answer: DynamicMessage, held: HeldBytes) -> Option<Response> {
    for name in ["value", "message", "reply"] {
        let Some(Value::Message(mut value)) = answer.take_field_by_name(name) else { continue };
        let Some(Value::Bytes(payload)) =
            value.get_field_by_name("payload").map(std::borrow::Cow::into_owned)
        else {
            continue;
        };
        let said = match value.take_field_by_name("properties") {
            Some(Value::Message(properties)) => properties
                .get_field_by_name("content_type")
                .and_then(|value| value.as_str().map(str::to_owned)),
            _ => None,
        };
        let mime = said.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let is_shown = SHOWN.iter().any(|shown| mime.eq_ignore_ascii_case(shown));
        let content_type = said
            .as_deref()
            .filter(|_| is_shown)
            .and_then(|said| HeaderValue::from_str(said).ok())
            .unwrap_or_else(|| HeaderValue::from_static("application/octet-stream"));
        let headers = [
            (CONTENT_TYPE, content_type),
            (CACHE_CONTROL, HeaderValue::from_static("no-store")),
            (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        ];
        return Some((StatusCode::OK, headers, paced(payload, held)).into_response());
    }
    None
}
