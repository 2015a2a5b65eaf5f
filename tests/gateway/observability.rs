//! A real Prometheus with the configuration, the rules and the queries of the board in deploy/, beside a real gateway.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::client::Client;
use crate::support::{Server, local, ports::free_ports, prometheus, root, until};
use gateway_core::Protocol;
use serde_json::Value;

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The answer of Prometheus to a GET of its API; none while it does not answer.
fn ask(port: u16, path: &str) -> Option<Value> {
    let mut socket = TcpStream::connect(local(port)).ok()?;
    socket.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
}

fn encoded(query: &str) -> String {
    query.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// The file of deploy/ with a scrape every half second, this gateway, and no token.
fn configuration(dir: &Path, gateway: u16) {
    let text = fs::read_to_string(root().join("deploy/prometheus/prometheus.yml")).expect("read the file");
    let mut text = text
        .replace("_interval: 15s", "_interval: 500ms")
        .replace("127.0.0.1:9090", &format!("127.0.0.1:{gateway}"));
    for line in ["    authorization:\n", "      credentials_file: token\n"] {
        assert!(text.contains(line), "{line} in {text}");
        text = text.replace(line, "");
    }
    fs::write(dir.join("prometheus.yml"), text).expect("write");
    fs::copy(root().join("deploy/prometheus/rules.yml"), dir.join("rules.yml")).expect("copy");
}

#[test]
fn a_real_prometheus_evaluates_every_rule_and_panel() {
    let Some(tools) = prometheus() else { return };
    let server = Server::start();
    let dir = tempfile::tempdir().expect("a directory");
    configuration(dir.path(), server.ports.http);
    // Prometheus cannot be asked for the one that it takes.
    let port = free_ports(1);
    let log = fs::File::create(dir.path().join("log")).expect("a log");
    let mut command = Command::new(tools.join("prometheus"));
    command.arg("--config.file=prometheus.yml").arg("--storage.tsdb.path=tsdb");
    command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    command.current_dir(dir.path()).stdout(Stdio::null()).stderr(log);
    let _running = Running(command.spawn().expect("start Prometheus"));
    let told = || fs::read_to_string(dir.path().join("log")).unwrap_or_default();

    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "device");
    assert_eq!(device.subscribe("t/#"), 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let results = |query: &str| -> Option<Vec<Value>> {
        let answer = ask(port, &format!("/api/v1/query?query={}", encoded(query)))?;
        assert_eq!(answer["status"], "success", "{query}: {answer}\n{}", told());
        answer["data"]["result"].as_array().cloned()
    };
    // Rates need two scrapes with something between them.
    until(|| {
        publisher.publish_acked("t/1", b"1", true);
        results("rate(mqtt_messages_received_total{qos=\"1\"}[1m]) > 0").is_some_and(|rows| !rows.is_empty())
    });

    // All rules are evaluated without a fault, and nothing is wrong with this gateway.
    until(|| {
        let Some(answer) = ask(port, "/api/v1/rules") else { return false };
        let groups = answer["data"]["groups"].as_array().cloned().unwrap_or_default();
        let rules: Vec<&Value> =
            groups.iter().flat_map(|group| group["rules"].as_array().expect("rules")).collect();
        for rule in &rules {
            assert_ne!(rule["health"], "err", "{rule}");
        }
        rules.len() > 20 && rules.iter().all(|rule| rule["health"] == "ok")
    });
    assert_eq!(results("ALERTS"), Some(Vec::new()));

    let board = fs::read_to_string(root().join("deploy/grafana/mqtt-server.json")).expect("read the board");
    let board: Value = serde_json::from_str(&board).expect("JSON");
    let panels = board["panels"].as_array().expect("panels").iter();
    let panels = panels.filter(|panel| panel["type"] != "row");
    let mut empty = Vec::new();
    for panel in panels {
        for target in panel["targets"].as_array().expect("queries") {
            let query = target["expr"].as_str().expect("a query");
            let query = query.replace("$instance", ".*").replace("$__rate_interval", "1m");
            let rows = results(&query).expect("an answer");
            // Panels that are empty unless something goes wrong, or unless there are groups or bridges, are empty here.
            let is_of_others = ["gateway_group_", "gateway_bridge_"].iter().any(|name| query.contains(name));
            let may_be_empty = query.ends_with("> 0") || is_of_others;
            if rows.is_empty() && !may_be_empty {
                empty.push(format!("{}: {query}", panel["title"]));
            }
        }
    }
    // Nothing is written to the log of groups, and no batch may have been written yet.
    empty.retain(|query| !query.contains("gateway_log_commit"));
    assert!(empty.is_empty(), "\n{}", empty.join("\n"));
}
