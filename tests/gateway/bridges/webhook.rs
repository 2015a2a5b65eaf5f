//! Batches that are posted to a service that tests tell how to behave.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use aws_lc_rs::hmac;
use bytes::Bytes;
use gateway_core::Protocol;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::{net::TcpListener, runtime::Runtime};

use super::{carried, lag};
use crate::{
    client::Client,
    support::{Server, until, write_secret},
};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Mood {
    /// Takes everything but what has `poison` in it.
    #[default]
    Well,
    /// 500.
    Broken,
    /// 429, and an hour to wait.
    Busy,
    /// As well, but 500 for a batch with `poison` in it.
    Crashing,
    /// As well, but each message takes 10 ms.
    Slow,
}

#[derive(Default)]
struct Heard {
    mood: Mutex<Mood>,
    requests: AtomicUsize,
    /// The highest `attempt` of a message.
    attempt: AtomicUsize,
    /// Payloads that were taken, in order.
    taken: Mutex<Vec<String>>,
}

struct Service {
    heard: Arc<Heard>,
    port: u16,
    _runtime: Runtime,
}

const SECRET: &str = "between us";

impl Service {
    fn start() -> Self {
        let runtime = Runtime::new().expect("start a runtime");
        let socket = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("bind");
        let port = socket.local_addr().expect("an address").port();
        let heard = Arc::new(Heard::default());
        let hearing = Arc::clone(&heard);
        runtime.spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let heard = Arc::clone(&hearing);
                let service = service_fn(move |request| take(Arc::clone(&heard), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { heard, port, _runtime: runtime }
    }

    fn feel(&self, mood: Mood) {
        *self.heard.mood.lock() = mood;
    }

    fn taken(&self) -> Vec<String> {
        self.heard.taken.lock().clone()
    }

    /// The bridge to it; the secret is in a file of its own.
    fn config(&self, secret: &std::path::Path) -> String {
        write_secret(secret, format!("{SECRET}\n"));
        format!(
            "[bridges.hook]\ntopics = [\"d/#\"]\nretry_max = \"1s\"\nlinger = \"50ms\"\n\
             [bridges.hook.webhook]\nurl = \"http://127.0.0.1:{}/in\"\nsecret_file = \"{}\"\n",
            self.port,
            secret.display()
        )
    }
}

/// As the guide tells services to check it.
fn is_signed(header: &str, body: &[u8]) -> bool {
    let (time, signature) =
        header.strip_prefix("t=").and_then(|rest| rest.split_once(",v1=")).expect("two parts");
    let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
    let digest = hmac::sign(&key, &[format!("{time}.").as_bytes(), body].concat());
    let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    hex == signature
}

async fn take(heard: Arc<Heard>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let header = request.headers()["gateway-signature"].to_str().expect("text").to_owned();
    let body = request.into_body().collect().await?.to_bytes();
    assert!(is_signed(&header, &body));
    heard.requests.fetch_add(1, Relaxed);
    let answer = |status: u16| Response::builder().status(status);
    let empty = |answer: hyper::http::response::Builder| Ok(answer.body(Full::default()).expect("an answer"));
    match *heard.mood.lock() {
        Mood::Well | Mood::Crashing | Mood::Slow => {}
        Mood::Broken => return empty(answer(500)),
        Mood::Busy => return empty(answer(429).header("retry-after", "3600")),
    }
    let batch: Value = serde_json::from_slice(&body).expect("JSON from the gateway");
    let messages = batch["messages"].as_array().expect("messages");
    let payloads = messages.iter().map(|message| message["payload"].as_str().expect("text").to_owned());
    let payloads: Vec<String> = payloads.collect();
    for message in messages {
        let attempt = message["attempt"].as_u64().expect("a number") as usize;
        heard.attempt.fetch_max(attempt, Relaxed);
    }
    let mood = *heard.mood.lock();
    if mood == Mood::Slow {
        tokio::time::sleep(std::time::Duration::from_millis(10) * messages.len() as u32).await;
    }
    if payloads.iter().any(|payload| payload == "poison") {
        return empty(answer(if mood == Mood::Crashing { 500 } else { 422 }));
    }
    heard.taken.lock().extend(payloads);
    empty(answer(200))
}

/// The failure: one message that the service does not want holds up, or takes with it, those around it.
#[test]
fn a_poisoned_message_becomes_a_dead_letter_and_the_rest_arrives() {
    let (service, dir) = (Service::start(), tempfile::tempdir().expect("a directory"));
    service.feel(Mood::Broken);
    let server = Server::start_with(&[], &service.config(&dir.path().join("secret")));
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    let mut wanted: Vec<String> = (0..50).map(|number| number.to_string()).collect();
    for (number, payload) in wanted.iter().enumerate() {
        device.publish_acked("d/1", payload.as_bytes(), false);
        if number == 20 {
            device.publish_acked("d/1", b"poison", false);
        }
    }
    until(|| server.metric("gateway_bridge_up") == 0 && server.metric("gateway_bridge_failures_total") > 2);
    service.feel(Mood::Well);
    until(|| carried(&server) == 50 && lag(&server) == 0);
    let mut taken = service.taken();
    assert_eq!(taken, wanted, "once, and in order");
    assert_eq!(server.metric("gateway_bridge_refused_total"), 1);
    assert_eq!(server.metric("gateway_group_dead_letters"), 1);
    // The bridge goes on, and the signature is there.
    device.publish_acked("d/1", b"more", false);
    wanted.push("more".to_owned());
    until(|| {
        taken = service.taken();
        taken.len() > 50
    });
    assert_eq!(taken, wanted);
}

/// The failures: a service that fails on one message gets it for ever, with all that is behind it; the message does not
/// say how often it has been tried.
#[test]
fn a_message_that_crashes_the_service_stops_no_others() {
    let (service, dir) = (Service::start(), tempfile::tempdir().expect("a directory"));
    service.feel(Mood::Crashing);
    let config = service.config(&dir.path().join("secret")).replace("\"1s\"", "\"200ms\"");
    let server = Server::start_with(&[], &config);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    let wanted: Vec<String> = (0..50).map(|number| number.to_string()).collect();
    for (number, payload) in wanted.iter().enumerate() {
        if number == 20 {
            device.publish_acked("d/bad", b"poison", false);
        }
        device.publish_acked("d/1", payload.as_bytes(), false);
    }
    until(|| carried(&server) == 50 && lag(&server) == 0);
    assert_eq!(service.taken(), wanted, "once, and in order");
    assert_eq!(server.metric_of("gateway_bridge_refused_total", "reason=\"failed\""), 1);
    assert_eq!(server.metric("gateway_group_dead_letters"), 1);
    let attempt = service.heard.attempt.load(Relaxed);
    assert!(attempt > 5, "the last attempt was number {attempt}");
}

/// The failure: a service that needs longer than the deadline for a batch sees the same batch for ever, and nothing else.
#[test]
fn a_slow_service_gets_batches_that_it_can_handle_in_time() {
    let (service, dir) = (Service::start(), tempfile::tempdir().expect("a directory"));
    service.feel(Mood::Broken);
    let config = service.config(&dir.path().join("secret")).replace("linger", "deadline = \"1s\"\nlinger");
    let server = Server::start_with(&[], &config);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    for number in 0..400 {
        device.publish_acked("d/1", number.to_string().as_bytes(), false);
    }
    service.feel(Mood::Slow);
    until(|| carried(&server) == 400 && lag(&server) == 0);
    assert_eq!(server.metric("gateway_group_dead_letters"), 0);
}

/// The failure: a service that says when it may be asked again is asked all the time.
#[test]
fn a_service_that_asks_for_time_gets_it() {
    let (service, dir) = (Service::start(), tempfile::tempdir().expect("a directory"));
    service.feel(Mood::Busy);
    let config = service.config(&dir.path().join("secret"));
    let mut server = Server::start_with(&[], &config);
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    device.publish_acked("d/1", b"1", false);
    until(|| server.metric("gateway_bridge_failures_total") == 1);
    service.feel(Mood::Well);
    // Ten times the longest pause of its own, as messages that are answered count it.
    for number in 2..500 {
        device.publish_acked("d/1", number.to_string().as_bytes(), false);
    }
    assert_eq!(service.heard.requests.load(Relaxed), 1);
    // A start asks at once.
    server = server.stop_and_restart(&[], &config);
    until(|| carried(&server) == 499);
    assert_eq!(service.taken().len(), 499);
    drop(server);
}

/// A bridge to a broker.
fn mqtt(name: &str, direction: &str, topic: &str, level: &str, more: &str) -> String {
    format!(
        "[bridges.{name}]\ndirection = \"{direction}\"\ntopics = [\"{topic}\"]\n{more}\n\
         [bridges.{name}.mqtt]\nurl = \"mqtt://h\"\nlevel = \"{level}\"\n"
    )
}

/// The failures: a bridge that cannot work is found out when the first message is to go; messages go round, or come twice, since
/// nothing in them tells that they were here.
#[test]
fn a_bridge_that_cannot_work_is_refused_before_any_port_opens() {
    for (config, key) in [
        ("[bridges.a]\n", "bridges.a"),
        ("[bridges.a]\ntopcs = [\"x\"]\n[bridges.a.webhook]\nurl = \"http://h/\"\n", "bridges.a.topcs"),
        ("[bridges.a.webhook]\nurl = 3\n", "bridges.a.webhook.url"),
        ("[bridges.a.webhook]\nurl = \"https://h/\"\n", "bridges.a.webhook.ca"),
        (
            "[bridges.a.webhook]\nurl = \"http://h/\"\nsecret_file = \"nowhere\"\n",
            "bridges.a.webhook.secret_file",
        ),
        ("[bridges.a.mqtt]\nurl = \"mqtt://h\"\npassword_file = \"nowhere\"\nusername = \"u\"\n", {
            "bridges.a.mqtt.password_file"
        }),
        ("[bridges.a.mqtt]\nurl = \"h:1883\"\n", "bridges.a.mqtt.url"),
        ("[bridges.A.mqtt]\nurl = \"mqtt://h\"\n", "bridges"),
        ("[store]\nenabled = false\n[bridges.a.mqtt]\nurl = \"mqtt://h\"\n", "bridges.a"),
        (
            &format!("{}{}", mqtt("a", "in", "x/#", "3.1.1", ""), mqtt("b", "in", "x/+", "5", "")),
            "bridges.a.topics",
        ),
        (
            &format!(
                "{}{}",
                mqtt("a", "out", "x/#", "5", "include_backends = true"),
                mqtt("b", "in", "#", "3.1.1", "")
            ),
            "bridges.a.include_backends",
        ),
        (
            &format!(
                "non_broker = true\n{}{}",
                mqtt("a", "out", "x/#", "3.1.1", ""),
                mqtt("b", "in", "x/1", "3.1.1", "")
            ),
            "bridges.a.mqtt.level",
        ),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("c.toml"), config).expect("write");
        let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
        command.current_dir(dir.path()).args(["--config", "c.toml", "--dev"]);
        command.args(["--addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
        let output = command.output().expect("run");
        let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success(), "{config}");
        assert!(said.contains(&format!("{key} ")) || said.contains(&format!("{key}:")), "{key}: {said}");
        assert!(!said.contains("\"listening\""), "{said}");
    }
}
