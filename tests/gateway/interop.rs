//! Third-party clients against the real binary: paho-mqtt and grpcio (Python), MQTT.js, mosquitto clients.
//!
//! Every test starts its own server and runs one script of tests/interop as a child process. A missing tool
//! fails its test, unless MQTT_SERVER_TEST_SKIP_MISSING=1.

use std::{process::Command, time::Duration};

use crate::support::{Server, need, on_path, python, root, run};

const LIMIT: Duration = Duration::from_secs(420);

/// Runs a script against a fresh server; afterwards the server must be alive, stop cleanly and have logged no
/// error.
fn against_server(mut command: Command) {
    let mut server = Server::start();
    command.current_dir(root().join("tests/interop")).envs(server.script_env());
    let (success, output) = run(&mut command, LIMIT);
    eprintln!("{output}");
    assert!(success, "{command:?} failed; its output is above");
    assert!(server.stop(), "the server did not stop cleanly after SIGTERM");
    let log = server.log();
    let errors: Vec<&str> =
        log.lines().filter(|line| line.contains("ERROR") || line.contains("panicked")).collect();
    assert!(errors.is_empty(), "the server logged errors: {errors:#?}");
}

fn pytest(file: &str, select: &str) {
    let python = python();
    if !need("the Python environment .venv", python.is_some()) {
        return;
    }
    let mut command = Command::new(python.unwrap_or_default());
    command.args(["-m", "pytest", file]).env("PYTHONDONTWRITEBYTECODE", "1");
    if !select.is_empty() {
        command.args(["-k", select]);
    }
    against_server(command);
}

fn mqttjs(transport: &str, version: &str) {
    let installed = root().join("tests/interop/node_modules/mqtt").is_dir();
    if !need("node", on_path("node")) || !need("MQTT.js in tests/interop/node_modules", installed) {
        return;
    }
    let mut command = Command::new("node");
    command.args(["mqttjs.mjs", transport, version]);
    against_server(command);
}

fn mosquitto(scenario: &str) {
    if !need("mosquitto_pub and mosquitto_sub", on_path("mosquitto_pub") && on_path("mosquitto_sub")) {
        return;
    }
    let mut command = Command::new("bash");
    command.args(["mosquitto.sh", scenario]);
    against_server(command);
}

#[test]
fn paho_over_tcp_and_websocket() {
    pytest("test_transports.py", "not tls and not wss and not quic");
}

#[test]
fn paho_over_tls_and_secure_websocket() {
    pytest("test_transports.py", "tls or wss");
}

#[test]
fn httpx_over_http_and_its_openapi_file() {
    pytest("test_http.py", "");
}

#[test]
fn paho_topic_filters() {
    pytest("test_topics.py", "");
}

#[test]
fn paho_retained_messages() {
    pytest("test_retained.py", "");
}

#[test]
fn paho_sessions() {
    pytest("test_sessions.py", "not will");
}

#[test]
fn paho_wills() {
    pytest("test_sessions.py", "will");
}

#[test]
fn paho_features_of_5_0() {
    pytest("test_v5.py", "");
}

#[test]
fn grpcio_as_the_backend() {
    pytest("test_grpc.py", "");
}

#[test]
fn paho_with_a_device_shadow() {
    pytest("test_shadow.py", "");
}

macro_rules! scenarios {
    ($($name:ident => $call:expr;)*) => { $( #[test] fn $name() { $call } )* };
}

scenarios! {
    mqttjs_tcp_v4 => mqttjs("tcp", "4");
    mqttjs_tcp_v5 => mqttjs("tcp", "5");
    mqttjs_tls_v4 => mqttjs("tls", "4");
    mqttjs_tls_v5 => mqttjs("tls", "5");
    mqttjs_ws_v4 => mqttjs("ws", "4");
    mqttjs_ws_v5 => mqttjs("ws", "5");
    mqttjs_wss_v4 => mqttjs("wss", "4");
    mqttjs_wss_v5 => mqttjs("wss", "5");
    mosquitto_roundtrip_v31 => mosquitto("roundtrip_v31");
    mosquitto_roundtrip_v311 => mosquitto("roundtrip_v311");
    mosquitto_roundtrip_v5 => mosquitto("roundtrip_v5");
    mosquitto_retained => mosquitto("retained");
    mosquitto_will => mosquitto("will");
    mosquitto_sys_version => mosquitto("sys");
    mosquitto_shared => mosquitto("shared");
    mosquitto_session => mosquitto("session");
    mosquitto_properties => mosquitto("properties");
    mosquitto_request_response => mosquitto("request_response");
    mosquitto_wrong_ca => mosquitto("wrong_ca");
}
