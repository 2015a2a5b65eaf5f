//! The HTTP API of the real process, by requests as curl sends them.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use gateway_core::Protocol;
use serde_json::{Value, json};

use crate::{
    client::{Client, Got},
    rpcs::add_token,
    support::{Server, local, until},
};

/// Only a failing test takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// An answer.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    fn reason(&self) -> String {
        assert!(self.head.contains("content-type: application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], self.status, "{self:?}");
        problem["reason"].as_str().unwrap_or_default().to_owned()
    }

    fn of(whole: &str) -> Self {
        let (head, body) = whole.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no header: {whole:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Self { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }
}

/// A request with further header lines.
fn request(server: &Server, line: &str, headers: &[&str], body: &str) -> Answer {
    let mut stream = open(server);
    let mut head = format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    for header in headers {
        head.push_str(header);
        head.push_str("\r\n");
    }
    if !body.is_empty() {
        head.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    // One that is refused may be closed before all of its body was taken.
    let _ = stream.write_all(format!("{head}\r\n{body}").as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    Answer::of(&String::from_utf8_lossy(&answer))
}

fn ask(server: &Server, line: &str, body: &str) -> Answer {
    let json = ["content-type: application/json"];
    request(server, line, if body.starts_with('{') { &json } else { &[] }, body)
}

fn open(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(local(server.ports.http)).expect("connect");
    stream.set_read_timeout(Some(LIMIT)).expect("set a timeout");
    stream
}

/// A stream of events that has begun.
struct Events(BufReader<TcpStream>);

impl Events {
    fn open(server: &Server, path: &str, headers: &[&str]) -> Self {
        let mut stream = open(server);
        let mut head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n");
        for header in headers {
            head.push_str(header);
            head.push_str("\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).expect("ask");
        let mut events = Self(BufReader::new(stream));
        let first = events.line();
        assert!(first.starts_with("HTTP/1.1 200"), "{first}");
        while !events.line().is_empty() {}
        while !events.line().starts_with("retry:") {}
        events
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).expect("read a line") > 0, "the stream has ended");
        line.trim_end().to_owned()
    }

    /// Name, id and data of the next event.
    fn next(&mut self) -> (String, String, Value) {
        let (mut name, mut id) = (String::new(), String::new());
        loop {
            let line = self.line();
            match line.split_once(": ") {
                Some(("event", text)) => name = text.to_owned(),
                Some(("id", text)) => id = text.to_owned(),
                Some(("data", text)) => return (name, id, serde_json::from_str(text).expect("JSON")),
                _ => {}
            }
        }
    }
}

#[test]
fn a_body_of_curl_is_a_payload_that_devices_get_and_the_latest_is_read() {
    let server = Server::start();
    let mut screen = Client::connect(server.ports.tcp, Protocol::V5, "screen");
    screen.subscribe("sensors/#");
    // As curl -d sends it.
    let form = ["content-type: application/x-www-form-urlencoded"];
    let answer = request(&server, "POST /v1/topics/sensors/kitchen/temperature", &form, "21.5");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["outcome"], "OUTCOME_SENT");
    assert_eq!(screen.next(), Got::Publish("sensors/kitchen/temperature".to_owned(), b"21.5".to_vec()));

    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "kitchen");
    device.publish_acked("sensors/kitchen/temperature", b"{\"c\":22.0}", false);
    let value = ask(&server, "GET /v1/latest/sensors/kitchen/temperature", "");
    assert_eq!(value.status, 200, "{value:?}");
    assert_eq!(value.json()["payloadText"], "{\"c\":22.0}");
    assert_eq!(value.json()["deviceId"], "kitchen");
    for (view, expected) in [
        ("base64", json!({"payload": "eyJjIjoyMi4wfQ=="})),
        ("text", json!({"payloadText": "{\"c\":22.0}"})),
        ("json", json!({"payloadJson": {"c": 22.0}})),
    ] {
        let path = format!("GET /v1/devices/kitchen/latest/sensors/kitchen/temperature?payload={view}");
        let value = ask(&server, &path, "").json();
        for (name, value_of) in expected.as_object().expect("an object") {
            assert_eq!(&value[name], value_of, "{view}: {value}");
        }
    }
    let raw = ask(&server, "GET /v1/latest/sensors/kitchen/temperature?payload=raw", "");
    assert_eq!((raw.status, &*raw.body), (200, "{\"c\":22.0}"));
    assert!(raw.head.contains("application/octet-stream") && raw.head.contains("nosniff"), "{raw:?}");
    let none = ask(&server, "GET /v1/latest/none", "");
    assert_eq!((none.status, &*none.reason()), (404, "VALUE_NOT_FOUND"));
}

#[test]
fn what_is_wrong_with_a_request_is_told_with_a_status_reason_and_field() {
    let server = Server::start();
    let deep = format!("{{\"topic\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for (line, body, status, reason, field) in [
        ("GET /v1/none", "", 404, "NO_SUCH_PATH", ""),
        ("PUT /v1/devices", "", 405, "METHOD_NOT_ALLOWED", ""),
        ("POST /v1/topics/a/+", "1", 400, "INVALID_FIELD", "topic"),
        ("POST /v1/topics/a?qos=3", "1", 400, "INVALID_FIELD", "qos"),
        ("POST /v1/topics/a?nothing=3", "1", 400, "INVALID_FIELD", "nothing"),
        ("POST /v1/topics/a?encoding=base64", "?", 400, "INVALID_FIELD", "body"),
        ("POST /v1/topics/a?timeout=1y", "1", 400, "INVALID_FIELD", "timeout"),
        ("POST /v1/publish", "{", 400, "INVALID_JSON", "body"),
        ("POST /v1/publish", "{\"topic\":\"a\",\"payload\":\"?\"}", 400, "INVALID_JSON", "payload"),
        ("POST /v1/publish", "{\"topic\":\"a\",\"qos\":3}", 400, "INVALID_JSON", "qos"),
        ("POST /v1/publish", "{\"topic\":\"a\",\"topic\":\"b\"}", 400, "INVALID_JSON", "topic"),
        ("POST /v1/publish", "{\"topic\":\"a\",\"more\":1}", 400, "INVALID_JSON", "more"),
        (
            "POST /v1/publish",
            "{\"topic\":\"a\",\"expirySeconds\":1e300}",
            400,
            "INVALID_JSON",
            "expirySeconds",
        ),
        ("POST /v1/publish/batch", "{\"requests\":[{},{\"qos\":[]}]}", 400, "INVALID_JSON", "requests.1.qos"),
        ("POST /v1/publish", &deep, 400, "INVALID_JSON", "topic"),
        ("GET /v1/devices?pageToken=x", "", 400, "PAGE_TOKEN_INVALID", ""),
        ("GET /v1/devices/nobody", "", 404, "DEVICE_NOT_FOUND", ""),
        ("POST /v1/rpc/Publisher/PublishStream", "{}", 501, "UNIMPLEMENTED", ""),
        ("POST /v1/rpc/Nothing/Publish", "{}", 404, "NO_SUCH_PATH", ""),
        ("POST /v1/rpc/Subscriber/Subscribe", "{}", 404, "NO_SUCH_PATH", ""),
    ] {
        let answer = ask(&server, line, body);
        let case = format!("{line} {}: {answer:?}", &body[..body.len().min(40)]);
        assert_eq!((answer.status, &*answer.reason()), (status, reason), "{case}");
        let violations = answer.json()["violations"].clone();
        assert_eq!(violations[0]["field"].as_str().unwrap_or_default(), field, "{case}");
    }
    let wrong = request(&server, "POST /v1/publish", &["content-type: text/plain"], "{}");
    assert_eq!((wrong.status, &*wrong.reason()), (415, "UNSUPPORTED_MEDIA_TYPE"));
}

#[test]
fn messages_come_as_events_and_who_comes_back_is_told_of_the_gap() {
    let server = Server::start();
    let mut events = Events::open(&server, "/v1/stream/messages?topicFilters=a/%23", &[]);
    let mut device = Client::connect(server.ports.tcp, Protocol::V4, "d");
    device.publish_acked("b/1", b"not this", false);
    device.publish_acked("a/1", b"one\ntwo", false);
    let (name, id, data) = events.next();
    assert_eq!(
        (&*name, data["topic"].as_str(), data["payloadText"].as_str()),
        ("message", Some("a/1"), Some("one\ntwo"))
    );
    assert!(!id.is_empty());
    drop(events);

    // Line breaks between the parts of a device's JSON are no line breaks of the stream.
    let id = format!("last-event-id: {id}");
    let path = "/v1/stream/messages?topicFilters=a/%23&payload=json";
    let mut again = Events::open(&server, path, &[&id]);
    let (name, _, data) = again.next();
    assert_eq!((&*name, &data["resumed"]), ("gap", &json!(false)));
    device.publish_acked("a/2", b"{\n\n\"x\":\r1}", false);
    let (name, _, data) = again.next();
    assert_eq!((&*name, &data["payloadJson"]), ("message", &json!({"x": 1})));
}

#[test]
fn roles_and_scopes_are_those_of_the_api_and_denials_say_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("tokens");
    let reader = add_token(&file, "reader", &json!({"role": "reader"}));
    let publisher = add_token(&file, "publisher", &json!({"role": "publisher", "topics": ["a/#"]}));
    let server = Server::start_with(&[], &format!("[backends]\ntokens = {file:?}"));
    let bearer = |token: &str| format!("authorization: Bearer {token}");
    let (reader, publisher) = (bearer(&reader), bearer(&publisher));
    let wrong = bearer("nobody's");
    for (headers, line, status, reason) in [
        (&[][..], "POST /v1/topics/a/1", 401, "CREDENTIALS_MISSING"),
        (&[], "GET /v1/stream/messages", 401, "CREDENTIALS_MISSING"),
        (&[], "POST /v1/rpc/Security/ListTokens", 401, "CREDENTIALS_MISSING"),
        (&[&*wrong], "GET /v1/devices", 401, "CREDENTIALS_UNKNOWN"),
        (&[&*reader, &*reader], "GET /v1/devices", 401, "CREDENTIALS_UNKNOWN"),
        (&[&*reader], "GET /v1/devices", 200, ""),
        (&[&*reader], "POST /v1/topics/a/1", 403, "ROLE_DENIED"),
        (&[&*reader], "DELETE /v1/devices/d", 403, "ROLE_DENIED"),
        (&[&*publisher], "POST /v1/topics/a/1", 200, ""),
        (&[&*publisher], "POST /v1/topics/b/1", 403, "OUT_OF_SCOPE"),
        (&[], "GET /openapi.json", 200, ""),
        (&[], "GET /metrics", 401, ""),
    ] {
        let answer = request(&server, line, headers, if line.contains("/topics/") { "1" } else { "" });
        assert_eq!(answer.status, status, "{line} {headers:?}: {answer:?}");
        assert_eq!(answer.head.contains("www-authenticate: bearer"), status == 401, "{answer:?}");
        if !reason.is_empty() {
            assert_eq!(answer.reason(), reason, "{line} {headers:?}");
        }
    }
    let log = server.log();
    let is_first = |line: &&str| line.contains("Publisher/Publish") && line.contains("CREDENTIALS_MISSING");
    assert_eq!(log.lines().filter(is_first).count(), 1, "the audit log has it once");
}

/// One client without a token asked now and then for what everybody gets, on as many connections as there are slots.
#[test]
fn only_who_may_call_keeps_a_slot() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("tokens");
    let reader = add_token(&file, "reader", &json!({"role": "reader"}));
    let server = Server::start_with(&[], &format!("[backends]\ntokens = {file:?}"));
    let head = |line: &str, header: &str| {
        let mut stream = open(&server);
        write!(stream, "{line} HTTP/1.1\r\nhost: localhost\r\n{header}\r\n").expect("ask");
        let mut lines = BufReader::new(stream).lines().map(|line| line.expect("a line").to_ascii_lowercase());
        lines.by_ref().take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
    };
    for line in [
        "GET /openapi.json",
        "PATCH /v1/devices",
        "GET /v1/devices",
        "GET /v1/nothing",
        "GET /",
        "GET /page/",
        "GET /page/login",
        "GET /page/assets/style.css",
        "GET /page/live/overview",
    ] {
        let head = head(line, "");
        assert!(head.contains("connection: close"), "{line}: {head}");
    }
    let known = head("GET /v1/devices", &format!("authorization: Bearer {reader}\r\n"));
    assert!(known.starts_with("http/1.1 200") && !known.contains("connection: close"), "{known}");
}

#[test]
fn pages_of_other_origins_are_refused_unless_they_are_named() {
    let server = Server::start_with(&[], "[http]\ncors_origins = [\"https://app.example\"]");
    for (header, status) in [
        ("origin: https://evil.example", 403),
        ("origin: null", 403),
        ("origin: http://localhost:3000", 403),
        ("origin: https://app.example.evil", 403),
        ("sec-fetch-site: cross-site", 403),
        ("sec-fetch-site: same-origin", 200),
        ("origin: http://localhost", 200),
        ("origin: https://app.example", 200),
    ] {
        let answer = request(&server, "POST /v1/topics/a", &[header, "content-type: text/plain"], "1");
        assert_eq!(answer.status, status, "{header}: {answer:?}");
        let told = answer.head.contains("access-control-allow-origin: https://app.example\r\n");
        assert_eq!(told, header.ends_with("https://app.example"), "{header}: {answer:?}");
        if status == 403 {
            assert_eq!(answer.reason(), "CROSS_ORIGIN");
        }
    }
    let asks = ["access-control-request-method: PATCH", "origin: https://app.example"];
    let answer = request(&server, "OPTIONS /v1/devices/d/shadow", &asks, "");
    assert_eq!(answer.status, 204, "{answer:?}");
    assert!(
        answer.head.contains("access-control-allow-methods: get, post, put, patch, delete"),
        "{answer:?}"
    );
    let answer =
        request(&server, "OPTIONS /v1/devices/d/shadow", &[asks[0], "origin: https://evil.example"], "");
    assert!(answer.status == 403 && !answer.head.contains("access-control-allow"), "{answer:?}");
    assert!(server.metric("gateway_http_cross_origin_refused_total") >= 6);
}

#[test]
fn a_body_that_is_large_or_does_not_come_is_given_up() {
    let server = Server::start_with(&[], "[http]\nmax_body = 1000\nbody_timeout = \"200ms\"");
    let large = ask(&server, "POST /v1/topics/a", &"x".repeat(1001));
    assert_eq!((large.status, &*large.reason()), (413, "REQUEST_TOO_LARGE"));
    let send = |text: &str| {
        let mut stream = open(&server);
        stream.write_all(text.as_bytes()).expect("send");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        Answer::of(&String::from_utf8_lossy(&answer))
    };
    let head = "POST /v1/topics/a HTTP/1.1\r\nhost: localhost\r\n";
    let chunk = format!("258\r\n{}\r\n", "x".repeat(600));
    let large = send(&format!("{head}transfer-encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n"));
    assert_eq!((large.status, &*large.reason()), (413, "REQUEST_TOO_LARGE"));
    let late = send(&format!("{head}content-length: 100\r\n\r\nabc"));
    assert_eq!((late.status, &*late.reason()), (408, "REQUEST_INCOMPLETE"));
    assert!(late.head.contains("connection: close"), "{late:?}");
    assert_eq!(server.metric("gateway_http_bodies_refused_total"), 3);
    let held = "gateway_memory_bytes{kind=\"http\"} 0";
    until(|| server.http_get("/metrics").is_some_and(|page| page.contains(held)));
    assert_eq!(ask(&server, "POST /v1/topics/a", &"x".repeat(1000)).status, 200);
}

#[test]
fn streams_leave_the_slots_of_calls_pages_and_health_free() {
    let server = Server::start_with(&[], "[http]\nmax_streams = 2");
    let streams: Vec<Events> = (0..2).map(|_| Events::open(&server, "/v1/stream/messages", &[])).collect();
    let refused = ask(&server, "GET /v1/stream/messages", "");
    assert_eq!((refused.status, &*refused.reason()), (503, "TOO_MANY_REQUESTS"));
    for line in ["GET /healthz", "GET /readyz", "GET /metrics", "GET /v1/devices"] {
        assert_eq!(ask(&server, line, "").status, 200, "{line}");
    }
    drop(streams);
    // The gateway sees that they are gone, and lets another in.
    until(|| {
        let mut stream = open(&server);
        stream.write_all(b"GET /v1/stream/messages HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("ask");
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).expect("read a line");
        line.starts_with("HTTP/1.1 200")
    });
}

#[test]
fn switched_off_there_is_no_api_and_metrics_and_health_are_there() {
    let server = Server::start_with(&[], "[http]\napi = false");
    for (line, status) in [
        ("GET /v1/devices", 404),
        ("POST /v1/topics/a", 404),
        ("GET /openapi.json", 404),
        ("GET /metrics", 200),
        ("GET /healthz", 200),
    ] {
        assert_eq!(ask(&server, line, "").status, status, "{line}");
    }
}
