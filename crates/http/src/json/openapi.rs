//! Makes `openapi.json` of the routes and the protos. `MQTT_SERVER_TEST_WRITE=1 cargo test --lib openapi` writes it.

use std::{collections::BTreeMap, fs, path::Path};

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor, prost_types};
use serde_json::{Map, Value, json};

use super::{
    OPENAPI,
    encode::JsonForm,
    routes::{BodyContent, ROUTES, Route},
};

/// Returns the comment in front of the item at `path` of a file.
fn comment(file: &prost_types::FileDescriptorProto, path: &[i32]) -> String {
    let locations = file.source_code_info.iter().flat_map(|info| &info.location);
    let mut found = locations.filter(|location| location.path == path);
    let text = found.find_map(|location| location.leading_comments.clone()).unwrap_or_default();
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ").trim().to_owned()
}

/// Schemas of messages, each once.
#[derive(Default)]
struct Schemas(BTreeMap<String, Value>);

impl Schemas {
    /// A reference to the schema of a message.
    fn reference(&mut self, of: &MessageDescriptor) -> Value {
        match of.full_name() {
            "google.protobuf.Timestamp" => return json!({"type": "string", "format": "date-time"}),
            "google.protobuf.Duration" => {
                return json!({"type": "string", "pattern": "^-?[0-9]+(\\.[0-9]+)?s$", "examples": ["1.5s"]});
            }
            "google.protobuf.FieldMask" => {
                return json!({"type": "string", "examples": ["labels,ackTimeout"]});
            }
            _ => {}
        }
        let name = of.name().to_owned();
        if !self.0.contains_key(&name) {
            // First, since messages may be parts of themselves.
            self.0.insert(name.clone(), Value::Null);
            let schema = self.object(of);
            self.0.insert(name.clone(), schema);
        }
        json!({"$ref": format!("#/components/schemas/{name}")})
    }

    fn object(&mut self, of: &MessageDescriptor) -> Value {
        let mut properties = Map::new();
        for field in of.fields() {
            let schema = self.field(&field);
            let name = field.json_name();
            if name == "payload" {
                let text = "The payload, if it is UTF-8; instead of payload.";
                properties.insert("payloadText".to_owned(), json!({"type": "string", "description": text}));
                let text = "The payload, if it is JSON; instead of payload.";
                properties.insert("payloadJson".to_owned(), json!({"description": text}));
            }
            properties.insert(name.to_owned(), schema);
        }
        let text = comment(of.parent_file_descriptor_proto(), of.path());
        json!({"type": "object", "description": text, "properties": properties})
    }

    fn field(&mut self, field: &FieldDescriptor) -> Value {
        let mut schema = match field.kind() {
            Kind::Message(entry) if field.is_map() => {
                let value = self.kind(&entry.map_entry_value_field().kind());
                json!({"type": "object", "additionalProperties": value})
            }
            kind if field.is_list() => json!({"type": "array", "items": self.kind(&kind)}),
            _ if JsonForm::Plain.shows_json_of(field) => json!({"type": ["object", "null"]}),
            kind => self.kind(&kind),
        };
        let file = field.parent_message().parent_file_descriptor_proto().clone();
        let text = comment(&file, field.path());
        if let Some(schema) = schema.as_object_mut().filter(|_| !text.is_empty()) {
            schema.insert("description".to_owned(), text.into());
        }
        schema
    }

    fn kind(&mut self, kind: &Kind) -> Value {
        match kind {
            Kind::Bool => json!({"type": "boolean"}),
            Kind::String => json!({"type": "string"}),
            Kind::Bytes => json!({"type": "string", "contentEncoding": "base64"}),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => json!({"type": "integer", "format": "int32"}),
            Kind::Uint32 | Kind::Fixed32 => {
                json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
            }
            // Text, since a double has 53 bits; a number is read as well.
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                json!({"type": ["string", "integer"], "format": "int64"})
            }
            Kind::Uint64 | Kind::Fixed64 => json!({"type": ["string", "integer"], "format": "uint64"}),
            Kind::Double | Kind::Float => json!({"type": ["number", "string"]}),
            Kind::Enum(of) => {
                let mut names: Vec<Value> = of.values().map(|value| json!(value.name())).collect();
                if of.name() == "Qos" {
                    names.extend([json!(0), json!(1), json!(2)]);
                    return json!({"type": ["string", "integer"], "enum": names});
                }
                json!({"type": "string", "enum": names})
            }
            Kind::Message(of) => self.reference(of),
        }
    }
}

/// The fields of a request that a query may set, down to those of its parts, without what the path or the body has.
fn queried(of: &MessageDescriptor, before: &str, taken: &[&str], found: &mut Vec<(String, FieldDescriptor)>) {
    for field in of.fields() {
        let name = format!("{before}{}", field.json_name());
        if taken.contains(&&*name) || field.is_map() {
            continue;
        }
        match field.kind() {
            Kind::Message(inner) if inner.parent_file().package_name() != "google.protobuf" => {
                if !field.is_list() && before.is_empty() {
                    queried(&inner, &format!("{name}."), taken, found);
                }
            }
            _ => found.push((name, field)),
        }
    }
}

fn shows_payloads(of: &MessageDescriptor, depth: usize) -> bool {
    depth < 6
        && of.fields().any(|field| match field.kind() {
            Kind::Bytes => field.name() == "payload",
            Kind::Message(inner) => shows_payloads(&inner, depth + 1),
            _ => false,
        })
}

fn parameter(place: &str, name: &str, schema: Value, text: &str) -> Value {
    json!({"in": place, "name": name, "schema": schema, "description": text, "required": place == "path"})
}

/// The path without what is axum's.
fn path_of(route: &Route) -> String {
    route.path.replace("{*", "{")
}

fn operation_id(route: &Route) -> String {
    let mut id = format!("{:?}", route.verb).to_ascii_lowercase();
    for part in path_of(route).split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| *part != "v1") {
        let mut letters = part.chars();
        id.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        id.push_str(letters.as_str());
    }
    id
}

fn operation(route: &Route, method: Option<&MethodDescriptor>, schemas: &mut Schemas) -> Value {
    let mut parameters = Vec::new();
    let names: Vec<&str> = route
        .path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
        .map(|name| name.trim_start_matches('*'))
        .collect();
    let mut taken: Vec<&str> = names.iter().map(|name| route.field_of(name)).collect();
    for name in &names {
        let text = match *name {
            "topic" => "A topic; its slashes stand as they are.",
            "service" => "Such as Devices.",
            "method" => "Such as ListDevices.",
            _ => "",
        };
        parameters.push(parameter("path", name, json!({"type": "string"}), text));
    }
    if let BodyContent::Payload(field) = route.body {
        taken.push(field);
        let text = "base64 if the body is the payload in base64.";
        parameters.push(parameter("query", "encoding", json!({"enum": ["base64"]}), text));
    }
    let output = method.map(MethodDescriptor::output);
    if route.body != BodyContent::Json
        && let Some(method) = method
    {
        let mut fields = Vec::new();
        queried(&method.input(), "", &taken, &mut fields);
        for (name, field) in fields {
            let mut schema = schemas.field(&field);
            let text = schema.as_object_mut().and_then(|schema| schema.remove("description"));
            let text = text.and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default();
            parameters.push(parameter("query", &name, schema, &text));
        }
    }
    if output.as_ref().is_none_or(|output| shows_payloads(output, 0)) {
        let text = "How payloads are shown: base64, text where it is UTF-8, json where it is JSON, or raw, where there is one.";
        let values = json!({"enum": ["base64", "text", "json", "raw"]});
        parameters.push(parameter("query", "payload", values, text));
    }
    let text = "The deadline of the call, such as 5s or 500ms.";
    parameters.push(parameter("query", "timeout", json!({"type": "string"}), text));
    if route.key.is_some() {
        let text = "Of the same request with the same key only the first is carried out.";
        parameters.push(parameter("header", "Idempotency-Key", json!({"type": "string"}), text));
    }
    let answer = if route.is_stream() {
        let text = "The id of the last event that was read.";
        parameters.push(parameter("header", "Last-Event-ID", json!({"type": "string"}), text));
        if let Some(output) = &output {
            schemas.reference(output);
        }
        json!({"text/event-stream": {"schema": {"type": "string"}}})
    } else {
        let whole = output.as_ref();
        let part = whole.zip(route.answer).and_then(|(output, part)| output.get_field_by_name(part));
        let schema = match (part, whole) {
            (Some(part), _) => schemas.kind(&part.kind()),
            (None, Some(output)) => schemas.reference(output),
            (None, None) => json!({"type": "object"}),
        };
        json!({"application/json": {"schema": schema}})
    };
    let mut all = json!({
        "operationId": operation_id(route),
        "tags": [method.map_or("rpc", |method| method.parent_service().name()).to_owned()],
        "summary": method.map_or("Any RPC", |method| method.name()).to_owned(),
        "description": method.map_or_else(
            || "Request and answer as proto3 JSON of the messages of the RPC.".to_owned(),
            |method| comment(method.parent_service().parent_file().file_descriptor_proto(), method.path()),
        ),
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done.", "content": answer},
            "default": {"$ref": "#/components/responses/Problem"},
        },
    });
    let body = match route.body {
        BodyContent::None => None,
        BodyContent::Payload(_) => Some(json!({
            "description": "The payload, as it is. Its Content-Type becomes that of the message.",
            "content": {"*/*": {}},
        })),
        BodyContent::Json => {
            let schema =
                method.map_or_else(|| json!({"type": "object"}), |method| schemas.reference(&method.input()));
            Some(json!({"content": {"application/json": {"schema": schema}}}))
        }
    };
    if let (Some(body), Some(all)) = (body, all.as_object_mut()) {
        all.insert("requestBody".to_owned(), body);
    }
    all
}

fn document() -> Value {
    let pool = gateway_api::json::pool();
    let mut schemas = Schemas::default();
    let mut paths: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
    for route in ROUTES {
        let method = route.rpc.split_once('/').map(|(service, method)| {
            let service = pool.get_service_by_name(&format!("gateway.v1.{service}")).expect(service);
            service.methods().find(|known| known.name() == method).expect(method)
        });
        let operation = operation(route, method.as_ref(), &mut schemas);
        let verb = format!("{:?}", route.verb).to_ascii_lowercase();
        let before = paths.entry(path_of(route)).or_default().insert(verb, operation);
        assert!(before.is_none(), "{} twice", route.path);
    }
    schemas.0.insert(
        "Problem".to_owned(),
        json!({
            "type": "object",
            "description": "Why a request failed (RFC 9457).",
            "required": ["type", "title", "status", "detail", "reason", "code"],
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string", "description": "For people."},
                "reason": {"type": "string", "description": "The stable name that programs may branch on."},
                "code": {"type": "string", "description": "The status of gRPC."},
                "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                "violations": {"type": "array", "items": {
                    "type": "object",
                    "properties": {"field": {"type": "string"}, "description": {"type": "string"}},
                }},
            },
        }),
    );
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "mqtt-server",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The gateway's API for those without gRPC. docs/http.md says how it is used.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas.0,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {"Problem": {
                "description": "The request failed.",
                "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }},
        },
    })
}

#[test]
fn the_openapi_file_is_what_the_routes_and_protos_say() {
    let document = document();
    if std::env::var_os("MQTT_SERVER_TEST_WRITE").is_some() {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/json/openapi.json");
        let text = serde_json::to_string_pretty(&document).unwrap();
        fs::write(place, text + "\n").unwrap();
        return;
    }
    let served: Value = serde_json::from_str(OPENAPI).unwrap();
    let same = served == document;
    assert!(same, "openapi.json is stale: MQTT_SERVER_TEST_WRITE=1 cargo test --lib openapi");
}
