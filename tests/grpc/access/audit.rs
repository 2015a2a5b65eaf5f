//! The whole way with the real program: tokens by the command line, the audit log in its file, metrics over HTTP.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::Command,
    time::Duration,
};

use mqtt_server::proto::gateway::v1::{
    self, devices_client::DevicesClient, events_client::EventsClient, state_client::StateClient,
};
use serde_json::Value;
use tokio_stream::StreamExt as _;
use tonic::{
    Code,
    service::interceptor::InterceptedService,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use super::{
    Bearer,
    raw::{bearer, call},
    roles::administrative,
};
use crate::{
    harness::*,
    support::{Server, command, local, run, until},
};

/// Returns the output of `mqtt-server token`.
fn token(server: &Server, args: &[&str]) -> String {
    let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
    let file = server.dir().join("tokens");
    let output = command.arg("token").args(args).arg("--file").arg(file).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A channel to a server that may present a certificate.
pub(crate) async fn channel(server: &Server, identity: Option<Identity>) -> Channel {
    let ca = Certificate::from_pem(fs::read(server.ca()).unwrap());
    let mut tls = ClientTlsConfig::new().ca_certificate(ca).domain_name("localhost");
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    let address = format!("https://{}", local(server.ports.grpc));
    let endpoint = Endpoint::from_shared(address).unwrap().tls_config(tls).unwrap();
    soon("a connection", endpoint.connect()).await.unwrap()
}

/// The page of metrics for a token, or the line with the code.
fn metrics(server: &Server, token: &str) -> Result<String, String> {
    let mut stream = TcpStream::connect(local(server.ports.http)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close";
    write!(stream, "{head}\r\nauthorization: Bearer {token}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    if answer.starts_with("HTTP/1.1 200") {
        return Ok(answer);
    }
    Err(answer.lines().next().unwrap_or_default().to_owned())
}

fn metric(page: &str, row: &str) -> u64 {
    let line = page.lines().find_map(|line| line.strip_prefix(row)).unwrap_or_else(|| panic!("no {row}"));
    line.trim().parse::<f64>().unwrap() as u64
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_denied_or_administered_is_in_the_audit_log_without_secrets() {
    let toml = "backends.tokens = \"tokens\"\nlog.audit = \"audit.log\"\nlog.level = \"debug\"";
    let server = Server::start_with(&[], toml);
    let admin = token(&server, &["create", "--role", "admin", "--note", "the test"]);
    let reader = token(&server, &["create", "--role", "reader", "--topics", "a/#,b", "--devices", "dev-*"]);
    let gauges = token(&server, &["create", "--role", "reader", "--topics", "none", "--expires", "1h"]);
    let list = token(&server, &["list"]);
    assert!(list.contains("the test") && list.contains("a/#,b") && !list.contains(&admin[4..]), "{list}");
    let id_of = |role: &str| {
        let line = list.lines().find(|line| line.contains(role)).unwrap();
        line.split_whitespace().next().unwrap().to_owned()
    };
    let plain = channel(&server, None).await;
    let client = |token: &str| InterceptedService::new(plain.clone(), Bearer(token.to_owned()));
    // The gateway sees the file by itself.
    until(|| metrics(&server, &gauges).is_ok());

    let path = server.dir().join("audit.log");
    // A denial from before the file was read is there, too, and counts.
    let before = lines(&path).len();
    assert!(metrics(&server, &reader).unwrap_err().contains("403"));
    let trace = v1::SetDeviceTraceRequest { device_id: "dev-1".to_owned(), enabled: true };
    let role = DevicesClient::new(client(&reader)).set_device_trace(trace.clone()).await.unwrap_err();
    assert_eq!(refusal(&role).1, "ROLE_DENIED");
    let topic = v1::GetRetainedRequest { topic: "c".to_owned() };
    let scope = StateClient::new(client(&reader)).get_retained(topic).await.unwrap_err();
    assert_eq!(refusal(&scope).1, "OUT_OF_SCOPE");
    DevicesClient::new(client(&admin)).set_device_trace(trace).await.unwrap();
    let gone = v1::DisconnectDeviceRequest { device_id: "gone".to_owned(), ..Default::default() };
    assert_eq!(
        DevicesClient::new(client(&admin)).disconnect_device(gone).await.unwrap_err().code(),
        Code::NotFound
    );
    let all = lines(&path);
    let said: Vec<_> = all[before..]
        .iter()
        .map(|line| {
            let of = |key: &str| line.get(key).and_then(Value::as_str).unwrap_or_default();
            assert_eq!((of("target"), of("peer")), ("audit", "127.0.0.1"));
            (of("role"), of("method").rsplit('/').next().unwrap(), of("object"), of("result"))
        })
        .collect();
    // Of denied lines a few in ten seconds pass.
    let expected = [
        ("reader", "metrics", "", "OUT_OF_SCOPE"),
        ("reader", "SetDeviceTrace", "", "ROLE_DENIED"),
        ("reader", "GetRetained", "c", "OUT_OF_SCOPE"),
        ("admin", "SetDeviceTrace", "dev-1", "Ok"),
        ("admin", "DisconnectDevice", "gone", "NotFound"),
    ];
    assert!(said.iter().all(|line| expected.contains(line)) && said.ends_with(&expected[3..]), "{said:?}");

    // A flood of denied calls neither fills the log nor is forgotten.
    for _ in 0..50 {
        let wrong =
            DevicesClient::new(client("mqs_wrong")).list_devices(v1::ListDevicesRequest::default()).await;
        assert_eq!(wrong.unwrap_err().code(), Code::Unauthenticated);
    }
    let page = metrics(&server, &gauges).unwrap();
    let suppressed = metric(&page, "gateway_audit_suppressed_total");
    let denied: u64 = ["no_credentials", "wrong_credentials", "expired", "role", "scope"]
        .iter()
        .map(|reason| metric(&page, &format!("gateway_backend_denied_total{{reason=\"{reason}\"}}")))
        .sum();
    let written = lines(&path).iter().filter(|line| line["role"] != "admin").count() as u64;
    assert_eq!(written + suppressed, denied);
    assert!(suppressed > 0 && metric(&page, "gateway_backend_denied_total{reason=\"role\"}") == 1);

    // Revoked on the command line: the stream ends by itself.
    let watch = v1::WatchEventsRequest::default();
    let mut events = EventsClient::new(client(&reader)).watch_events(watch).await.unwrap().into_inner();
    soon("its beginning", events.next()).await.unwrap().unwrap();
    token(&server, &["revoke", &id_of("a/#,b")]);
    let end = soon("the stream's end", events.next()).await.unwrap().unwrap_err();
    assert_eq!(refusal(&end).1, "CREDENTIALS_REVOKED");

    // A program that turns logs over moves the file away and sends SIGHUP.
    let old = server.dir().join("audit.log.1");
    fs::rename(&path, &old).unwrap();
    server.signal("HUP");
    until(|| path.exists());
    let trace = v1::SetDeviceTraceRequest { device_id: "dev-2".to_owned(), enabled: true };
    DevicesClient::new(client(&admin)).set_device_trace(trace).await.unwrap();
    until(|| lines(&path).iter().any(|line| line["object"] == "dev-2"));

    for secret in [&admin, &reader, &gauges] {
        for text in [server.log(), fs::read_to_string(&old).unwrap(), fs::read_to_string(&path).unwrap()] {
            assert!(!text.contains(&secret[4..]), "a token in a log");
        }
    }
    assert!(!server.log().contains("\"target\":\"audit\""), "what has a file is there alone");
}

/// Also those that end with an error: that somebody has tried is worth a line.
#[tokio::test(flavor = "multi_thread")]
async fn every_administrative_method_is_in_the_audit_log_and_no_other() {
    let server = Server::start_with(&[], "backends.tokens = \"tokens\"\nlog.audit = \"audit.log\"");
    let admin = token(&server, &["create", "--role", "admin"]);
    until(|| metrics(&server, &admin).is_ok());
    let channel = channel(&server, None).await;
    let path = server.dir().join("audit.log");
    for (method, administers) in administrative() {
        // The first thing that comes, whatever it is.
        let _ = soon(method, call(&channel, method, &[bearer(&admin)])).await;
        let all = lines(&path);
        let mut of_it = all.iter().filter(|line| line["role"] == "admin" && line["method"] == method);
        assert_eq!(of_it.next().is_some(), administers, "{method}: {all:?}");
    }
}

#[test]
fn the_command_line_says_what_is_wrong_with_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    let said = |args: &[&str]| {
        let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
        run(command.arg("token").args(args).arg("--file").arg(&file), Duration::from_secs(60))
    };
    for (args, problem) in [
        (&["create", "--role", "root"][..], "use reader, publisher, consumer, operator or admin"),
        (&["create", "--role", "reader", "--topics", "a/#/b"], "'a/#/b' is not a topic filter"),
        (&["create", "--role", "reader", "--expires", "soon"], "write it like 90d"),
        (&["revoke", "abc"], "no token abc"),
    ] {
        let (success, output) = said(args);
        assert!(!success && output.contains(problem), "{output}");
    }
    assert!(!file.exists());
    fs::write(&file, "mqs_secret\n").unwrap();
    let (success, output) = said(&["list"]);
    assert!(!success && output.contains("line 1") && !output.contains("mqs_secret"), "{output}");
    // Nor does a gateway start with it.
    for check in [&[][..], &["--check"]] {
        let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
        command.args(["--non-tls", "--addr", "127.0.0.1:0", "--data-dir"]).arg(dir.path().join("data"));
        command.env("MQTT_SERVER_BACKENDS__TOKENS", &file).args(check);
        let (success, output) = run(&mut command, Duration::from_secs(60));
        assert!(!success && output.contains("backends.tokens") && output.contains("line 1"), "{output}");
        assert!(!output.contains("mqs_secret"), "{output}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_mqtt-server")).args(["token", "--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("revoke"));
}
