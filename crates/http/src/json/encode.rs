//! Messages to JSON: proto3 JSON, or the same made plain.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, ReflectMessage as _, Value, prost_types};
use serde::ser::{Error as _, Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;

use super::{payload::PayloadView, problem::HttpProblem};

/// Size of a decoded message with its JSON, at most, as a multiple of the message's bytes, for its charge.
pub(super) const TIMES: usize = 6;

/// Resemblance to proto3 JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonForm {
    /// For people: what is 0, false or empty is there as well, payloads are text, and the documents of shadows JSON.
    Plain,
    /// As every library for protobuf reads and writes it.
    Canonical,
}

impl JsonForm {
    /// Returns whether the text of `field` is JSON, and shown and read as such.
    pub(super) fn shows_json_of(self, field: &FieldDescriptor) -> bool {
        self == Self::Plain
            && matches!(
                field.parent_message().full_name(),
                "gateway.v1.Shadow" | "gateway.v1.UpdateShadowRequest"
            )
            && matches!(field.name(), "desired" | "reported" | "delta" | "metadata")
    }
}

/// `message`, or only its field `part`, as JSON.
pub(super) fn to_vec(
    message: &DynamicMessage,
    part: Option<&str>,
    form: JsonForm,
    view: PayloadView,
) -> Result<Vec<u8>, HttpProblem> {
    let part = part.and_then(|part| message.get_field_by_name(part));
    let shown = part.as_ref().and_then(|part| part.as_message()).unwrap_or(message);
    serde_json::to_vec(&ShownMessage { message: shown, form, view }).map_err(|_| HttpProblem::internal())
}

/// A message as it is shown.
#[derive(Clone, Copy)]
pub(super) struct ShownMessage<'a> {
    pub(super) message: &'a DynamicMessage,
    pub(super) form: JsonForm,
    pub(super) view: PayloadView,
}

impl Serialize for ShownMessage<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { message, form, view } = *self;
        let of = message.descriptor();
        if of.parent_file().package_name() == "google.protobuf" {
            return well_known(message, serializer);
        }
        let mut map = serializer.serialize_map(None)?;
        for field in of.fields() {
            let is_there = message.has_field(&field);
            // A field with presence is left out only if it is absent.
            let stands = form == JsonForm::Plain && !field.supports_presence();
            if !is_there && !stands {
                continue;
            }
            let value = message.get_field(&field);
            if !is_there && matches!(field.kind(), Kind::Enum(_)) && !field.is_list() {
                continue;
            }
            if let (Value::Bytes(bytes), "payload") = (&*value, field.name()) {
                view.put(bytes, &mut map)?;
                continue;
            }
            if form.shows_json_of(&field) {
                let text = value.as_str().unwrap_or_default();
                if !text.is_empty() {
                    let raw: &RawValue = serde_json::from_str(text).map_err(S::Error::custom)?;
                    map.serialize_entry(field.json_name(), raw)?;
                }
                continue;
            }
            map.serialize_entry(
                field.json_name(),
                &EncodeItem { value: &value, kind: field.kind(), form, view },
            )?;
        }
        map.end()
    }
}

struct EncodeItem<'a> {
    value: &'a Value,
    kind: Kind,
    form: JsonForm,
    view: PayloadView,
}

impl Serialize for EncodeItem<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { form, view, .. } = *self;
        match self.value {
            Value::Bool(value) => serializer.serialize_bool(*value),
            Value::I32(value) => serializer.serialize_i32(*value),
            Value::U32(value) => serializer.serialize_u32(*value),
            // A double holds 53 bits, and that is what most readers make of a number.
            Value::I64(value) => serializer.collect_str(value),
            Value::U64(value) => serializer.collect_str(value),
            Value::F32(value) => float(f64::from(*value), serializer),
            Value::F64(value) => float(*value, serializer),
            Value::String(text) => serializer.serialize_str(text),
            Value::Bytes(bytes) => serializer.serialize_str(&STANDARD.encode(bytes)),
            Value::EnumNumber(number) => {
                let named = self.kind.as_enum().and_then(|of| of.get_value(*number));
                match named {
                    Some(value) => serializer.serialize_str(value.name()),
                    None => serializer.serialize_i32(*number),
                }
            }
            Value::Message(message) => ShownMessage { message, form, view }.serialize(serializer),
            Value::List(list) => {
                let kind = &self.kind;
                serializer.collect_seq(list.iter().map(|value| EncodeItem {
                    value,
                    kind: kind.clone(),
                    form,
                    view,
                }))
            }
            Value::Map(entries) => {
                let kind = match &self.kind {
                    Kind::Message(entry) => entry.map_entry_value_field().kind(),
                    other => other.clone(),
                };
                let name = |key: &MapKey| match key {
                    MapKey::String(text) => text.clone(),
                    MapKey::Bool(value) => value.to_string(),
                    MapKey::I32(value) => value.to_string(),
                    MapKey::I64(value) => value.to_string(),
                    MapKey::U32(value) => value.to_string(),
                    MapKey::U64(value) => value.to_string(),
                };
                let mut sorted: Vec<_> = entries.iter().map(|(key, value)| (name(key), value)).collect();
                sorted.sort_by(|one, other| one.0.cmp(&other.0));
                serializer.collect_map(
                    sorted
                        .into_iter()
                        .map(|(key, value)| (key, EncodeItem { value, kind: kind.clone(), form, view })),
                )
            }
        }
    }
}

fn float<S: Serializer>(value: f64, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        _ if value.is_nan() => serializer.serialize_str("NaN"),
        f64::INFINITY => serializer.serialize_str("Infinity"),
        f64::NEG_INFINITY => serializer.serialize_str("-Infinity"),
        _ => serializer.serialize_f64(value),
    }
}

/// Writes a well-known type that JSON writes as a string.
fn well_known<S: Serializer>(message: &DynamicMessage, serializer: S) -> Result<S::Ok, S::Error> {
    let whole = |number| message.get_field_by_number(number);
    let seconds = whole(1).and_then(|value| value.as_i64()).unwrap_or_default();
    let nanos = whole(2).and_then(|value| value.as_i32()).unwrap_or_default();
    match message.descriptor().name() {
        "Timestamp" => serializer.collect_str(&prost_types::Timestamp { seconds, nanos }),
        "Duration" => serializer.collect_str(&prost_types::Duration { seconds, nanos }),
        "FieldMask" => {
            let paths = whole(1);
            let paths = paths.as_ref().and_then(|value| value.as_list()).unwrap_or_default();
            let names: Vec<String> = paths.iter().filter_map(|path| path.as_str()).map(camel).collect();
            serializer.serialize_str(&names.join(","))
        }
        _ => Err(S::Error::custom("a message that JSON has no form for")),
    }
}

fn camel(snake: &str) -> String {
    let mut camel = String::with_capacity(snake.len());
    let mut upper = false;
    for character in snake.chars() {
        match character {
            '_' => upper = true,
            _ if upper => {
                camel.extend(character.to_uppercase());
                upper = false;
            }
            _ => camel.push(character),
        }
    }
    camel
}
