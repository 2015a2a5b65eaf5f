//! JSON, paths and queries to messages: proto3 JSON, and the forms that people write besides.
//!
//! The body is read in one pass into the message, each item charged as it is made, so that a small body cannot become a
//! large message. Additions to proto3 JSON: where a field `payload` is bytes, `payloadText` and `payloadJson` may stand
//! instead; a `qos` may be 0, 1 or 2, as MQTT counts, and never the number of the enum; the values of enums may be
//! written short, `durable` for `WAIT_DURABLE`; fields of shadows whose text is JSON may be JSON.

use std::{cell::RefCell, fmt, str::FromStr};

use axum::http::{HeaderMap, header::CONTENT_TYPE};
use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use prost_reflect::{
    DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage as _,
    Value, prost_types,
};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{encode::JsonForm, problem::HttpProblem};
use crate::held::HeldBytes;

/// Bytes that an item of a message is charged with besides its text: a message, or a value in a list.
const ITEM: usize = 256;
/// Deepest a JSON body may be; what is within `payloadJson` does not count, it is not looked into.
const DEEPEST: usize = 16;

/// Both alphabets of base64, with padding or without, as proto3 JSON has it.
const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Bytes of base64 text; `None` if it is none.
pub(super) fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let engine = if text.iter().any(|byte| matches!(byte, b'-' | b'_')) { URL_SAFE } else { STANDARD };
    engine.decode(text).ok()
}

/// A body must be JSON, or not say what it is.
pub(super) fn check_type(headers: &HeaderMap) -> Result<(), HttpProblem> {
    let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let mime = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let is_json = mime.eq_ignore_ascii_case("application/json")
        || mime.get(mime.len().saturating_sub(5)..).is_some_and(|end| end.eq_ignore_ascii_case("+json"));
    if is_json { Ok(()) } else { Err(HttpProblem::unsupported_type()) }
}

/// The message of a JSON body; an empty body is an empty message.
pub(super) fn message(
    of: MessageDescriptor,
    json: &[u8],
    form: JsonForm,
    held: &mut HeldBytes,
) -> Result<DynamicMessage, HttpProblem> {
    let text = std::str::from_utf8(json).map_err(|_| HttpProblem::bad_json("", "is not UTF-8"))?;
    if text.trim_ascii().is_empty() {
        return Ok(DynamicMessage::new(of));
    }
    let state = DecodeContext {
        form,
        held: RefCell::new(held),
        path: RefCell::default(),
        failed: RefCell::default(),
    };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let seed = MessageSeed { state: &state, of };
    let read = seed.deserialize(&mut deserializer).and_then(|message| {
        deserializer.end()?;
        Ok(message)
    });
    read.map_err(|error| {
        let failed = state.failed.take();
        failed.unwrap_or_else(|| HttpProblem::bad_json(&state.path.take().join("."), &error.to_string()))
    })?
    .ok_or_else(|| HttpProblem::bad_json("", "is null, not an object"))
}

/// Sets the field at `path`, names joined by dots, from the text of a path or a query. A list grows by one.
pub(super) fn put(message: &mut DynamicMessage, path: &str, text: &str) -> Result<(), HttpProblem> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let field = field_named(&message.descriptor(), name)
        .filter(|field| !field.is_map())
        .ok_or_else(|| HttpProblem::invalid(name, "is not known here; /openapi.json has what is"))?;
    if let Some(rest) = rest {
        return match message.get_field_mut(&field) {
            Value::Message(inner) => put(inner, rest, text),
            _ => Err(HttpProblem::invalid(path, "has no such part")),
        };
    }
    let value =
        scalar(&field.kind(), &field, text, false).map_err(|problem| HttpProblem::invalid(path, &problem))?;
    match message.get_field_mut(&field) {
        Value::List(list) => list.push(value),
        slot => *slot = value,
    }
    Ok(())
}

/// A field by the name that JSON has for it, or the one of the proto.
fn field_named(of: &MessageDescriptor, name: &str) -> Option<FieldDescriptor> {
    of.get_field_by_json_name(name).or_else(|| of.get_field_by_name(name))
}

/// A value of text, or of the text of a JSON number or boolean.
fn scalar(kind: &Kind, field: &FieldDescriptor, text: &str, is_number: bool) -> Result<Value, String> {
    fn number<T: FromStr>(text: &str, what: &str) -> Result<T, String> {
        text.parse().map_err(|_| format!("is not {what}"))
    }
    Ok(match kind {
        Kind::Bool => Value::Bool(number(text, "true or false")?),
        Kind::String if is_number => return Err("is not a string".to_owned()),
        Kind::String => Value::String(text.to_owned()),
        Kind::Bytes if is_number => return Err("is not base64 in a string".to_owned()),
        Kind::Bytes => Value::Bytes(base64(text.as_bytes()).ok_or("is not base64")?.into()),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(whole(text, "a whole number of 32 bits")?),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(whole(text, "a whole number from 0 to 4294967295")?),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(whole(text, "a whole number of 64 bits")?),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(whole(text, "a whole number from 0 of 64 bits")?),
        Kind::Double => Value::F64(number(text, "a number")?),
        Kind::Float => Value::F32(number(text, "a number")?),
        Kind::Enum(of) => Value::EnumNumber(enum_number(of, text, is_number)?),
        Kind::Message(of) => Value::Message(well_known(of, field, text)?),
    })
}

/// A whole number, which JSON may write as 1.0 or 1e3.
fn whole<T: FromStr + TryFrom<i128>>(text: &str, what: &str) -> Result<T, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let number = text.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && number.abs() < 9e15);
    number.and_then(|number| T::try_from(number as i128).ok()).ok_or_else(|| format!("is not {what}"))
}

/// The number of a value of an enum that is named, whole or without what all of them begin with.
fn enum_number(of: &EnumDescriptor, text: &str, is_number: bool) -> Result<i32, String> {
    if of.full_name() == "gateway.v1.Qos" {
        match text {
            "0" => return Ok(1),
            "1" => return Ok(2),
            "2" => return Ok(3),
            _ if is_number => return Err("is not 0, 1 or 2".to_owned()),
            _ => {}
        }
    }
    if is_number {
        let number = whole(text, "a value")?;
        return of.get_value(number).map(|_| number).ok_or_else(|| "is not a value".to_owned());
    }
    if let Some(value) = of.get_value_by_name(text) {
        return Ok(value.number());
    }
    let prefix = prefix_of(of);
    let short = text.to_ascii_uppercase().replace('-', "_");
    let found = of.values().find(|value| value.name().strip_prefix(&*prefix) == Some(&*short));
    found.map(|value| value.number()).ok_or_else(|| {
        let names: Vec<String> = of.values().map(|value| short_name(&prefix, value.name())).collect();
        format!("is none of {}", names[1.min(names.len())..].join(", "))
    })
}

/// Returns the prefix of the names of all values, as in `WAIT_`.
fn prefix_of(of: &EnumDescriptor) -> String {
    let zero = of.default_value();
    zero.name().strip_suffix("UNSPECIFIED").unwrap_or_default().to_owned()
}

fn short_name(prefix: &str, name: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_ascii_lowercase()
}

/// Paths of a field mask: more than any message has fields.
const MOST_PATHS: usize = 100;

/// A message that JSON writes as a string.
fn well_known(of: &MessageDescriptor, field: &FieldDescriptor, text: &str) -> Result<DynamicMessage, String> {
    let mut message = DynamicMessage::new(of.clone());
    let (first, second) = match of.full_name() {
        "google.protobuf.Timestamp" => {
            let time = prost_types::Timestamp::from_str(text)
                .map_err(|_| "is not a time such as 2026-01-31T12:00:00Z")?;
            (Value::I64(time.seconds), Value::I32(time.nanos))
        }
        "google.protobuf.Duration" => {
            let time = prost_types::Duration::from_str(text).map_err(|_| "is not a time such as \"1.5s\"")?;
            (Value::I64(time.seconds), Value::I32(time.nanos))
        }
        "google.protobuf.FieldMask" => {
            let paths = text.split(',').filter(|path| !path.is_empty());
            if paths.clone().nth(MOST_PATHS).is_some() {
                return Err(format!("has more than {MOST_PATHS} paths"));
            }
            let paths = paths.map(|path| Value::String(snake(path)));
            message.set_field_by_number(1, Value::List(paths.collect()));
            return Ok(message);
        }
        _ => return Err(format!("is not an object of {}", field.name())),
    };
    message.set_field_by_number(1, first);
    message.set_field_by_number(2, second);
    Ok(message)
}

fn is_well_known(of: &MessageDescriptor) -> bool {
    of.parent_file().package_name() == "google.protobuf"
}

fn snake(camel: &str) -> String {
    let mut snake = String::with_capacity(camel.len() + 4);
    for character in camel.chars() {
        if character.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(character.to_ascii_lowercase());
    }
    snake
}

/// Context of reading a body, the same at every depth.
struct DecodeContext<'h> {
    form: JsonForm,
    held: RefCell<&'h mut HeldBytes>,
    /// Names down to where it is, left as they are by a failure.
    path: RefCell<Vec<String>>,
    failed: RefCell<Option<HttpProblem>>,
}

impl DecodeContext<'_> {
    fn charge<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        self.held.borrow_mut().more(bytes).map_err(|problem| {
            *self.failed.borrow_mut() = Some(problem.into());
            E::custom("no memory")
        })
    }

    fn enter<E: serde::de::Error>(&self, name: &str) -> Result<(), E> {
        let mut path = self.path.borrow_mut();
        path.push(name.to_owned());
        if path.len() > DEEPEST { Err(E::custom("is too deep")) } else { Ok(()) }
    }

    fn leave(&self) {
        self.path.borrow_mut().pop();
    }
}

/// A message, or null.
struct MessageSeed<'s, 'h> {
    state: &'s DecodeContext<'h>,
    of: MessageDescriptor,
}

impl<'de> DeserializeSeed<'de> for MessageSeed<'_, '_> {
    type Value = Option<DynamicMessage>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MessageSeed<'_, '_> {
    type Value = Option<DynamicMessage>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let Self { state, of } = self;
        state.charge(ITEM)?;
        let mut message = DynamicMessage::new(of.clone());
        while let Some(name) = map.next_key::<String>()? {
            state.enter(&name)?;
            let other = name.strip_prefix("payload").filter(|other| matches!(*other, "Text" | "Json"));
            let payload = other.and_then(|other| Some((other, of.get_field_by_name("payload")?)));
            let field = match &payload {
                Some((_, field)) => Some(field.clone()),
                None => field_named(&of, &name),
            };
            let field = field.ok_or_else(|| A::Error::custom("there is no such field"))?;
            let taken = match field.containing_oneof() {
                Some(oneof) => oneof.fields().any(|other| message.has_field(&other)),
                None => message.has_field(&field),
            };
            if taken {
                return Err(A::Error::custom("is given twice, or with another that excludes it"));
            }
            let value = match payload {
                Some((other, _)) => Some(Value::Bytes(payload_of::<A>(&mut map, other)?)),
                None => map.next_value_seed(FieldSeed { state, field: &field })?,
            };
            if let Some(value) = value {
                message.set_field(&field, value);
            }
            state.leave();
        }
        Ok(Some(message))
    }
}

/// A payload that is written as text or as JSON.
fn payload_of<'de, A: MapAccess<'de>>(map: &mut A, other: &str) -> Result<Bytes, A::Error> {
    if other == "Text" {
        return Ok(map.next_value::<String>()?.into());
    }
    let raw: &RawValue = map.next_value()?;
    Ok(Bytes::copy_from_slice(raw.get().as_bytes()))
}

/// The value of a field, or null.
struct FieldSeed<'s, 'h, 'f> {
    state: &'s DecodeContext<'h>,
    field: &'f FieldDescriptor,
}

impl<'de> DeserializeSeed<'de> for FieldSeed<'_, '_, '_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let Self { state, field } = self;
        if field.is_map() {
            return deserializer.deserialize_any(EntriesVisitor { state, field });
        }
        if field.is_list() {
            return deserializer.deserialize_any(ItemsVisitor { state, field });
        }
        one(state, field, &field.kind(), deserializer)
    }
}

/// A single value of a field, of a list, or of a map.
fn one<'de, D: Deserializer<'de>>(
    state: &DecodeContext<'_>,
    field: &FieldDescriptor,
    kind: &Kind,
    deserializer: D,
) -> Result<Option<Value>, D::Error> {
    match kind {
        Kind::Message(of) if !is_well_known(of) => {
            let message = MessageSeed { state, of: of.clone() }.deserialize(deserializer)?;
            Ok(message.map(Value::Message))
        }
        _ => {
            let raw = <&RawValue as serde::Deserialize<'de>>::deserialize(deserializer)?.get();
            value(state.form, field, kind, raw).map_err(D::Error::custom)
        }
    }
}

/// A value that is no object of ours, of the text that JSON has for it.
fn value(form: JsonForm, field: &FieldDescriptor, kind: &Kind, raw: &str) -> Result<Option<Value>, String> {
    if form.shows_json_of(field) && !raw.starts_with('"') {
        return Ok(Some(Value::String(raw.to_owned())));
    }
    match raw.as_bytes().first() {
        Some(b'n') => Ok(None),
        Some(b'"') => {
            let text: String = serde_json::from_str(raw).map_err(|_| "is not a string".to_owned())?;
            if *kind == Kind::Bool {
                return Err("is not true or false".to_owned());
            }
            scalar(kind, field, &text, false).map(Some)
        }
        Some(b'{' | b'[') => Err("is not a single value".to_owned()),
        Some(b't' | b'f') if *kind != Kind::Bool => Err("is not to be true or false".to_owned()),
        _ if matches!(kind, Kind::Message(_)) => Err("is not a string".to_owned()),
        _ => scalar(kind, field, raw, true).map(Some),
    }
}

/// A value of a list, or of a map.
struct DecodeItem<'s, 'h, 'f>(&'s DecodeContext<'h>, &'f FieldDescriptor, &'f Kind);

impl<'de> DeserializeSeed<'de> for DecodeItem<'_, '_, '_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        one(self.0, self.1, self.2, deserializer)
    }
}

struct ItemsVisitor<'s, 'h, 'f> {
    state: &'s DecodeContext<'h>,
    field: &'f FieldDescriptor,
}

impl<'de> Visitor<'de> for ItemsVisitor<'_, '_, '_> {
    type Value = Option<Value>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let Self { state, field } = self;
        let kind = field.kind();
        let mut list = Vec::new();
        loop {
            state.enter(&list.len().to_string())?;
            let Some(item) = items.next_element_seed(DecodeItem(state, field, &kind))? else { break };
            state.charge(ITEM)?;
            list.push(item.ok_or_else(|| A::Error::custom("is null"))?);
            state.leave();
        }
        state.leave();
        Ok(Some(Value::List(list)))
    }
}

struct EntriesVisitor<'s, 'h, 'f> {
    state: &'s DecodeContext<'h>,
    field: &'f FieldDescriptor,
}

impl<'de> Visitor<'de> for EntriesVisitor<'_, '_, '_> {
    type Value = Option<Value>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let Self { state, field } = self;
        let Kind::Message(entry) = field.kind() else { return Err(A::Error::custom("is no map")) };
        if entry.map_entry_key_field().kind() != Kind::String {
            return Err(A::Error::custom("needs gRPC"));
        }
        let field = entry.map_entry_value_field();
        let kind = field.kind();
        let mut entries = std::collections::HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            state.enter(&name)?;
            state.charge(ITEM)?;
            let value = map.next_value_seed(DecodeItem(state, &field, &kind))?;
            let value = value.ok_or_else(|| A::Error::custom("is null"))?;
            if entries.insert(MapKey::String(name), value).is_some() {
                return Err(A::Error::custom("is given twice"));
            }
            state.leave();
        }
        Ok(Some(Value::Map(entries)))
    }
}
