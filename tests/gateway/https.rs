//! TLS on the HTTP listener, as curl sees it.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::json;

use crate::{
    rpcs::add_token,
    support::{certificates, command, logged_port, need, on_path, run, until},
};

const LIMIT: Duration = Duration::from_secs(60);

/// A gateway whose HTTP has TLS, with a token that may do everything.
struct Gateway {
    child: Child,
    dir: tempfile::TempDir,
    token: String,
}

impl Gateway {
    /// None without curl.
    fn start() -> Option<Self> {
        if !need("curl", on_path("curl")) {
            return None;
        }
        let dir = tempfile::tempdir().expect("make a directory");
        certificates(&dir.path().join("certs"));
        certificates(&dir.path().join("web"));
        let token = add_token(&dir.path().join("tokens"), "all", &json!({"role": "admin"}));
        let toml = "cert = \"certs/server.crt\"\nkey = \"certs/server.key\"\n[backends]\ntokens = \"tokens\"\n\
                    [http]\ntls = true\ncert = \"web/server.crt\"\nkey = \"web/server.key\"";
        fs::write(dir.path().join("test.toml"), toml).expect("write the configuration");
        let log = File::create(dir.path().join("log")).expect("create the log");
        let child = command(env!("CARGO_BIN_EXE_mqtt-server"))
            .current_dir(dir.path())
            .args(["--addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"])
            .args(["--config", "test.toml", "--data-dir", "data"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("clone the log handle"))
            .stderr(log)
            .spawn()
            .expect("start mqtt-server");
        let gateway = Self { child, dir, token };
        until(|| gateway.port().is_some());
        Some(gateway)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn port(&self) -> Option<u16> {
        logged_port(&self.log(), "http")
    }

    fn web(&self) -> PathBuf {
        self.dir.path().join("web")
    }

    /// The answer of curl with this authority, with header; none if curl gives up.
    fn curl(&self, ca: &Path, scheme: &str, path: &str, more: &[&str]) -> Option<String> {
        let url = format!("{scheme}://localhost:{}{path}", self.port().expect("a port"));
        let mut curl = Command::new("curl");
        curl.args(["-sS", "-i", "--http1.1", "--max-time", "50", "--resolve"]);
        curl.arg(format!("localhost:{}:127.0.0.1", self.port().expect("a port")));
        let (success, output) = run(curl.arg("--cacert").arg(ca).args(more).arg(url), LIMIT);
        success.then_some(output)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn https_serves_what_http_did_and_its_cookie_is_for_tls_alone() {
    let Some(gateway) = Gateway::start() else { return };
    let ca = gateway.web().join("ca.crt");
    let bearer = format!("authorization: Bearer {}", gateway.token);
    let get = |path: &str| gateway.curl(&ca, "https", path, &["-H", &bearer]).expect("an answer");
    assert!(get("/readyz").starts_with("HTTP/1.1 200"));
    assert!(get("/metrics").contains("mqtt_tls_handshakes_total"));
    assert!(get("/v1/devices").starts_with("HTTP/1.1 200"));
    let posted = ["-H", "sec-fetch-site: same-origin", "--data-urlencode"];
    let field = format!("token={}", gateway.token);
    let login = gateway.curl(&ca, "https", "/page/login", &[&posted[..], &[&field]].concat());
    let login = login.expect("an answer").to_lowercase();
    assert!(login.starts_with("http/1.1 303") && login.contains("; secure"), "{login}");
    // Neither plain HTTP nor another authority's client gets anything.
    assert_eq!(gateway.curl(&ca, "http", "/readyz", &[]), None);
    let other = gateway.dir.path().join("certs/ca.crt");
    assert_eq!(gateway.curl(&other, "https", "/readyz", &[]), None);
    assert_eq!(gateway.curl(&ca, "https", "/readyz", &["--tls-max", "1.1"]), None);
}

#[test]
fn a_renewed_certificate_of_https_is_shown_without_a_restart() {
    let Some(gateway) = Gateway::start() else { return };
    let old = gateway.dir.path().join("old.crt");
    fs::copy(gateway.web().join("ca.crt"), &old).expect("keep the authority");
    assert!(gateway.curl(&old, "https", "/healthz", &[]).is_some());
    // Of another authority, so that curl tells them apart.
    certificates(&gateway.web());
    let new = gateway.web().join("ca.crt");
    let pid = gateway.child.id().to_string();
    assert!(Command::new("kill").args(["-HUP", &pid]).status().expect("run kill").success());
    until(|| gateway.curl(&new, "https", "/healthz", &[]).is_some());
    assert_eq!(gateway.curl(&old, "https", "/healthz", &[]), None);
}
