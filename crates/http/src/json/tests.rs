//! Messages to JSON and back, by any message that the protos allow, and by any text.

use std::sync::Arc;

use broker::{Account, MemoryKind};
use gateway_api::json::pool;
use proptest::prelude::*;
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value};

use super::{
    decode,
    encode::{self, JsonForm},
    payload::PayloadView,
    problem::HttpProblem,
    routes::ROUTES,
};
use crate::held::HeldBytes;

fn read(of: &MessageDescriptor, json: &[u8], form: JsonForm) -> Result<DynamicMessage, HttpProblem> {
    let account = Arc::new(Account::new(1 << 30));
    let read = decode::message(of.clone(), json, form, &mut HeldBytes::new(&account));
    assert_eq!(account.held(MemoryKind::Http), 0, "all is given back");
    read
}

/// Small numbers after a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn text(&mut self) -> String {
        let letters = ['a', '/', '"', '\\', '\n', 'ä', '\u{1f600}', '0', ' ', '\u{7f}'];
        (0..self.roll(6)).map(|_| letters[self.roll(10) as usize]).collect()
    }

    fn message(&mut self, of: &MessageDescriptor, depth: u32) -> DynamicMessage {
        let mut message = DynamicMessage::new(of.clone());
        match of.full_name() {
            "google.protobuf.Timestamp" => {
                message.set_field_by_number(1, Value::I64(self.roll(1 << 31) as i64));
                message.set_field_by_number(2, Value::I32(self.roll(1_000_000_000) as i32));
                return message;
            }
            "google.protobuf.Duration" => {
                message.set_field_by_number(1, Value::I64(self.roll(1 << 20) as i64));
                message.set_field_by_number(2, Value::I32(self.roll(1_000_000_000) as i32));
                return message;
            }
            "google.protobuf.FieldMask" => {
                let paths = ["ack_timeout", "labels"].map(|path| Value::String(path.to_owned()));
                message.set_field_by_number(1, Value::List(paths.into()));
                return message;
            }
            _ => {}
        }
        for field in of.fields() {
            let other = field.containing_oneof();
            let taken = other.is_some_and(|oneof| oneof.fields().any(|field| message.has_field(&field)));
            if taken || self.roll(2) == 0 {
                continue;
            }
            let value = self.field(&field, depth);
            // An empty value that looks like an absent one is left out.
            let value =
                value.filter(|value| field.supports_presence() || !value.is_default_for_field(&field));
            if let Some(value) = value {
                message.set_field(&field, value);
            }
        }
        message
    }

    fn field(&mut self, field: &FieldDescriptor, depth: u32) -> Option<Value> {
        let kind = field.kind();
        if field.is_map() {
            let of = kind.as_message()?.map_entry_value_field().kind();
            let entries = (0..self.roll(3))
                .map(|key| Some((MapKey::String(key.to_string()), self.one(&of, depth)?)))
                .collect::<Option<_>>();
            return entries.map(Value::Map);
        }
        if field.is_list() {
            return (0..self.roll(3)).map(|_| self.one(&kind, depth)).collect::<Option<_>>().map(Value::List);
        }
        self.one(&kind, depth)
    }

    fn one(&mut self, kind: &Kind, depth: u32) -> Option<Value> {
        let wide = self.roll(1 << 31) << 33 | self.roll(1 << 31);
        Some(match kind {
            Kind::Bool => Value::Bool(self.roll(2) == 1),
            Kind::Int32 => Value::I32(wide as i32),
            Kind::Uint32 => Value::U32(wide as u32),
            Kind::Int64 => Value::I64(wide as i64),
            Kind::Uint64 => Value::U64(wide),
            Kind::Double => Value::F64([0.1, -0.5, 1e300, f64::INFINITY, 5.0][self.roll(5) as usize]),
            Kind::Float => Value::F32(0.5),
            Kind::String => Value::String(self.text()),
            Kind::Bytes => {
                Value::Bytes((0..self.roll(5)).map(|_| self.roll(256) as u8).collect::<Vec<_>>().into())
            }
            Kind::Enum(of) => {
                let at = self.roll(of.values().len() as u64) as usize;
                Value::EnumNumber(of.values().nth(at)?.number())
            }
            Kind::Message(of) if depth < 4 => Value::Message(self.message(of, depth + 1)),
            _ => return None,
        })
    }
}

/// Checks that the JSON of each message of the API has all of the message, in both forms.
fn comes_back_from_its_json(seed: u64) -> Result<(), TestCaseError> {
    let mut dice = Dice(seed);
    for of in pool().all_messages().filter(|of| of.package_name() == "gateway.v1" && !of.is_map_entry()) {
        let message = dice.message(&of, 0);
        let json = encode::to_vec(&message, None, JsonForm::Canonical, PayloadView::Base64).unwrap();
        let back = read(&of, &json, JsonForm::Canonical);
        let shown = String::from_utf8_lossy(&json).into_owned();
        prop_assert_eq!(back.as_ref().ok(), Some(&message), "{}: {}: {:?}", of.name(), shown, back);
        // In the plain form, empty values are there too; a text that is shown as JSON may be none.
        if !matches!(of.name(), "Shadow" | "UpdateShadowRequest")
            && let Ok(json) = encode::to_vec(&message, None, JsonForm::Plain, PayloadView::Text)
            && !shown.contains("desired")
            && !shown.contains("reported")
            && !shown.contains("delta")
            && !shown.contains("metadata")
        {
            let again = read(&of, &json, JsonForm::Plain).unwrap();
            let json = encode::to_vec(&again, None, JsonForm::Canonical, PayloadView::Base64).unwrap();
            prop_assert_eq!(String::from_utf8_lossy(&json).into_owned(), shown, "{}", of.name());
        }
    }
    Ok(())
}

/// Messages whose JSON did not come back, found by the property below.
#[test]
fn the_messages_of_seed_0_come_back_from_their_json() {
    comes_back_from_its_json(0).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_message_comes_back_from_its_json(seed: u64) {
        comes_back_from_its_json(seed)?;
    }

    /// JSON that is cut short or changed at one place is read or refused, and never more.
    #[test]
    fn no_text_makes_the_reader_panic(seed: u64, cut: u16, byte: u8) {
        let mut dice = Dice(seed);
        let of = pool().get_message_by_name("gateway.v1.PublishBatchRequest").unwrap();
        let message = dice.message(&of, 0);
        let mut json = encode::to_vec(&message, None, JsonForm::Canonical, PayloadView::Base64).unwrap();
        let at = usize::from(cut) % json.len();
        let _ = read(&of, &json[..at], JsonForm::Plain);
        json[at] = byte;
        let _ = read(&of, &json, JsonForm::Plain);
    }
}

#[test]
fn what_people_write_besides_proto3_json_is_read() {
    let of = pool().get_message_by_name("gateway.v1.PublishRequest").unwrap();
    let canonical = br#"{"topic":"a","payload":"MQ==","qos":"QOS_AT_LEAST_ONCE","wait":"WAIT_DURABLE"}"#;
    let expected = read(&of, canonical, JsonForm::Plain).unwrap();
    for json in [
        r#"{"topic":"a","payloadText":"1","qos":1,"wait":"durable"}"#,
        r#"{"topic":"a","payloadJson":1,"qos":"1","wait":"DURABLE"}"#,
        r#"{"topic":"a","payload":"MQ","qos":"at_least_once","wait":"WAIT_DURABLE","retain":null}"#,
        r#"{"topic":"a","payload":"MQ==","qos":"at-least-once","wait":2,"properties":null}"#,
    ] {
        let read = read(&of, json.as_bytes(), JsonForm::Plain);
        assert!(read.as_ref() == Ok(&expected), "{json}");
    }
    let exact =
        read(&of, br#"{"topic":"a","payloadJson":{"n": 12345678901234567890.10}}"#, JsonForm::Plain).unwrap();
    let payload = exact.get_field_by_name("payload").unwrap().into_owned();
    assert_eq!(payload, Value::Bytes((&br#"{"n": 12345678901234567890.10}"#[..]).into()));
}

#[test]
fn a_small_body_is_not_a_large_message() {
    let of = pool().get_message_by_name("gateway.v1.PublishBatchRequest").unwrap();
    let json = format!("{{\"requests\":[{}{{}}]}}", "{},".repeat(100_000));
    let account = Arc::new(Account::new(8 << 20));
    let read = decode::message(of, json.as_bytes(), JsonForm::Plain, &mut HeldBytes::new(&account));
    assert_eq!(read.unwrap_err().reason(), "MEMORY_BUDGET");
    assert_eq!(account.held(MemoryKind::Http), 0);
}

#[test]
fn each_route_names_a_method_and_fields_of_its_request() {
    let pool = pool();
    for route in ROUTES.iter().filter(|route| !route.rpc.is_empty()) {
        let (service, method) = route.rpc.split_once('/').unwrap();
        let service = pool.get_service_by_name(&format!("gateway.v1.{service}")).expect(route.rpc);
        let method = service.methods().find(|known| known.name() == method).expect(route.rpc);
        assert_eq!(method.is_server_streaming(), route.is_stream(), "{}", route.path);
        let names = route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        for name in names.map(|name| route.field_of(name.trim_start_matches('*'))).chain(route.key) {
            decode::put(&mut DynamicMessage::new(method.input()), name, "x").expect(route.path);
        }
        if let Some(part) = route.answer {
            assert!(method.output().get_field_by_name(part).is_some(), "{}: {part}", route.path);
        }
    }
}

/// The failure: a body makes dozens of times its size of memory, on nobody's account.
#[test]
fn a_field_mask_of_very_many_paths_is_refused() {
    let of = pool().get_message_by_name("gateway.v1.UpdateGroupRequest").unwrap();
    let body = |paths: usize| format!("{{\"updateMask\":\"{}\"}}", vec!["a"; paths].join(",")).into_bytes();
    assert!(read(&of, &body(100), JsonForm::Canonical).is_ok());
    assert!(read(&of, &body(101), JsonForm::Canonical).is_err());
}
