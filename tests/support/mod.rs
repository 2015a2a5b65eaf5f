//! Starts the real binary for the integration tests: own directory, own certificates, own ports, stopped
//! on drop.
//!
//! Every test of the suite that needs a server starts its own, so tests run in parallel. The server binds port 0 and
//! its log says which port the system chose: no other process can take one in between.
#![allow(unreachable_pub, reason = "shared by several test binaries")]
#![allow(dead_code, reason = "each test binary uses its own part of this module")]
#![allow(clippy::print_stderr, reason = "a failing test shows the server's log")]
#![allow(clippy::disallowed_methods, reason = "waiting for another process needs the real clock")]

pub(crate) mod ports;

use std::{
    ffi::OsStr,
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Time that a server may take from start to `/readyz`, and limit of all other waits; only a failing test waits so
/// long.
const START: Duration = Duration::from_secs(60);
/// Time that a server may take to stop after SIGTERM, and to answer over HTTP.
const STOP: Duration = Duration::from_secs(60);

/// The addresses of one running server.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    pub tls: u16,
    pub tcp: u16,
    pub ws: u16,
    pub wss: u16,
    pub grpc: u16,
    pub http: u16,
}

impl Ports {
    /// From the server's log; none while it does not name all of them.
    fn logged(log: &str) -> Option<Self> {
        let port = |listener| logged_port(log, listener);
        Some(Self {
            tls: port("default")?,
            tcp: port("test-tcp")?,
            ws: port("test-ws")?,
            wss: port("test-wss")?,
            grpc: port("grpc")?,
            http: port("http")?,
        })
    }
}

/// The port of a listener of this name, as the server's log in JSON tells it.
pub fn logged_port(log: &str, listener: &str) -> Option<u16> {
    // A line that is being written may end within the number.
    let (whole, _) = log.rsplit_once('\n')?;
    let named = format!("\"listening\",\"listener\":\"{listener}\",\"address\":\"");
    let (_, address) = whole.lines().find_map(|line| line.split_once(&named))?;
    address.split('"').next()?.parse::<SocketAddr>().ok().map(|address| address.port())
}

/// A running `mqtt-server` in a temporary directory, with TLS, TCP, WS and WSS listeners and gRPC over TLS.
pub struct Server {
    child: Child,
    dir: tempfile::TempDir,
    pub ports: Ports,
}

impl Server {
    /// Starts a server with defaults.
    pub fn start() -> Self {
        Self::start_with(&[], "")
    }

    /// Starts a server with further arguments and further TOML in front of the listeners.
    ///
    /// # Panics
    /// If the server does not become ready; its log is printed first.
    pub fn start_with(args: &[&str], toml: &str) -> Self {
        Self::start_in(tempfile::tempdir().expect("make a directory for the server"), args, toml)
    }

    /// Kills the server without warning (SIGKILL) and starts it anew in the same directory, on new ports.
    ///
    /// # Panics
    /// If the server does not become ready.
    pub fn kill_and_restart(mut self, args: &[&str], toml: &str) -> Self {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.start_anew(args, toml)
    }

    /// Stops the server (SIGTERM) and starts it anew in the same directory, on new ports.
    ///
    /// # Panics
    /// If the server does not end in time with code 0, or does not become ready.
    pub fn stop_and_restart(mut self, args: &[&str], toml: &str) -> Self {
        assert!(self.stop(), "the server did not stop in time with code 0");
        self.start_anew(args, toml)
    }

    /// The process has ended.
    fn start_anew(mut self, args: &[&str], toml: &str) -> Self {
        let other = tempfile::tempdir().expect("make a directory");
        let dir = std::mem::replace(&mut self.dir, other);
        drop(self);
        Self::start_in(dir, args, toml)
    }

    fn start_in(dir: tempfile::TempDir, args: &[&str], toml: &str) -> Self {
        Self::start_in_environment(dir, args, toml, &[])
    }

    /// Starts a server in this directory, with these variables in its environment.
    ///
    /// # Panics
    /// If the server does not become ready.
    pub fn start_in_environment(
        dir: tempfile::TempDir,
        args: &[&str],
        toml: &str,
        environment: &[(&str, PathBuf)],
    ) -> Self {
        let config = dir.path().join("test.toml");
        fs::write(&config, format!("{toml}\n{LISTENERS}")).expect("write the configuration");
        certificates(&dir.path().join("certs"));
        let more = ["--config", "test.toml", "--data-dir", "data"];
        let pair = ["--cert", "certs/server.crt", "--key", "certs/server.key"];
        Self::launch(dir, &[&more[..], &pair, args].concat(), environment, Ports::logged)
    }

    /// Starts a server with the configuration that a directory has, on ports of its own and on loopback only.
    ///
    /// # Panics
    /// If the server does not become ready.
    pub fn start_as_configured(dir: tempfile::TempDir, config: &str) -> Self {
        Self::launch(dir, &["--config", config, "--data-dir", "data"], &[], |log| {
            let port = |listener| logged_port(log, listener);
            let (tls, grpc, http) = (port("default")?, port("grpc")?, port("http")?);
            Some(Ports { tls, tcp: 0, ws: 0, wss: 0, grpc, http })
        })
    }

    fn launch(
        dir: tempfile::TempDir,
        args: &[&str],
        environment: &[(&str, PathBuf)],
        ports: impl Fn(&str) -> Option<Ports>,
    ) -> Self {
        let log = fs::File::create(dir.path().join("server.log")).expect("create the log");
        let child = command(env!("CARGO_BIN_EXE_mqtt-server"))
            .current_dir(dir.path())
            .args(["--addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"])
            .args(args)
            .env("NO_COLOR", "1")
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("clone the log handle"))
            .stderr(log)
            .spawn()
            .expect("start mqtt-server");
        let unknown = Ports { tls: 0, tcp: 0, ws: 0, wss: 0, grpc: 0, http: 0 };
        // Its log is printed when one of these fails.
        let mut server = Self { child, dir, ports: unknown };
        until(|| {
            let status = server.child.try_wait().expect("ask for the server's status");
            assert!(status.is_none(), "mqtt-server ended before it was ready: {status:?}");
            let Some(ports) = ports(&server.log()) else { return false };
            server.ports = ports;
            server.http_get("/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
        });
        server
    }

    /// The port of a listener that the test's own TOML names, with port 0.
    ///
    /// # Panics
    /// If there is no such listener.
    pub fn port(&self, listener: &str) -> u16 {
        logged_port(&self.log(), listener).unwrap_or_else(|| panic!("no listener {listener}"))
    }

    /// The server's working directory; `certs/` is in it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The certificate authority that clients should trust.
    pub fn ca(&self) -> PathBuf {
        self.dir().join("certs").join("ca.crt")
    }

    /// The process id, for signals and memory figures.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything the server has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir().join("server.log")).unwrap_or_default()
    }

    /// One HTTP request to the metrics and health listener; the whole answer, or none.
    pub fn http_get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect_timeout(&local(self.ports.http), STOP).ok()?;
        stream.set_read_timeout(Some(STOP)).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// The sum of a metric over its labels; 0 while it does not exist.
    pub fn metric(&self, name: &str) -> u64 {
        let page = self.http_get("/metrics").expect("read the metrics");
        let rows = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        rows.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
    }

    /// The sum of a metric over its rows with this label, such as `kind="quic"`; 0 while there is none.
    pub fn metric_of(&self, name: &str, label: &str) -> u64 {
        let page = self.http_get("/metrics").expect("read the metrics");
        let rows =
            page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name) && line.contains(label));
        rows.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
    }

    /// Sends a signal, such as `HUP`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status();
        assert!(status.expect("run kill").success());
    }

    /// Asks the server to stop and waits; true when it left with code 0 in time.
    pub fn stop(&mut self) -> bool {
        if self.child.try_wait().ok().flatten().is_none() {
            let _ = Command::new("kill").arg("-TERM").arg(self.pid().to_string()).status();
        }
        self.wait()
    }

    /// Waits for the server's end without asking for it; true when it left with code 0 in time.
    pub fn wait(&mut self) -> bool {
        let deadline = Instant::now() + STOP;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("ask for the server's status") {
                return status.success();
            }
            thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// The environment that scripts get, one variable per address.
    pub fn script_env(&self) -> Vec<(&'static str, String)> {
        vec![
            ("GW_HOST", "localhost".to_owned()),
            ("GW_TCP", self.ports.tcp.to_string()),
            ("GW_TLS", self.ports.tls.to_string()),
            ("GW_WS", self.ports.ws.to_string()),
            ("GW_WSS", self.ports.wss.to_string()),
            ("GW_GRPC", self.ports.grpc.to_string()),
            ("GW_HTTP", self.ports.http.to_string()),
            ("GW_CA", self.ca().display().to_string()),
        ]
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- log of mqtt-server ---\n{}--- end of log ---", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A build of mqtt-server, to be run. No variable of the environment configures it: those of the tests themselves begin as
/// its own do.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MQTT_SERVER_") {
            command.env_remove(name);
        }
    }
    command
}

/// Asks again until `done`, which fails the test if it takes far too long.
pub fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + START;
    while !done() {
        assert!(Instant::now() < deadline, "still not done after {START:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The loopback address with this port.
pub fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Makes an authority of a cluster and a certificate for each of these gateways, as files of `dir`.
pub fn gateway_certificates(dir: &Path, names: &[&str]) {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
    let write = |name: String, text: String| {
        fs::write(dir.join(&name), text).expect("write a certificate");
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o600)).expect("close it to others");
    };
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().expect("generate the authority's key");
    write("ca.pem".to_owned(), params.self_signed(&key).expect("sign the authority").pem());
    let issuer = Issuer::new(params, key);
    for name in names {
        let key = KeyPair::generate().expect("generate a gateway's key");
        let params = CertificateParams::new([(*name).to_owned()]).expect("name the gateway");
        let cert = params.signed_by(&key, &issuer).expect("sign the gateway's certificate");
        write(format!("{name}.pem"), cert.pem());
        write(format!("{name}.key"), key.serialize_pem());
    }
}

/// Makes an authority and a server certificate for `localhost` as files of `dir`.
pub fn certificates(dir: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    ca.distinguished_name.push(DnType::CommonName, "mqtt-server test CA");
    let ca_key = KeyPair::generate().expect("generate the authority's key");
    let ca_cert = ca.self_signed(&ca_key).expect("sign the authority");
    let issuer = Issuer::new(ca, ca_key);
    let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    let mut leaf = CertificateParams::new(names).expect("name the server");
    leaf.use_authority_key_identifier_extension = true;
    leaf.distinguished_name.push(DnType::CommonName, "localhost");
    let key = KeyPair::generate().expect("generate the server's key");
    let cert = leaf.signed_by(&key, &issuer).expect("sign the server's certificate");
    fs::create_dir_all(dir).expect("make the directory of certificates");
    for (name, text) in
        [("ca.crt", ca_cert.pem()), ("server.crt", cert.pem()), ("server.key", key.serialize_pem())]
    {
        fs::write(dir.join(name), text).expect("write a certificate");
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o600)).expect("close it to others");
    }
}

/// Writes a file with a secret, which nobody else may read.
pub fn write_secret(path: &Path, secret: impl AsRef<[u8]>) {
    fs::write(path, secret).expect("write a secret");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("close it to others");
}

/// Beside the one for TLS, which is the default listener.
const LISTENERS: &str = r#"
[[listeners]]
name = "test-tcp"
kind = "tcp"
address = "127.0.0.1:0"

[[listeners]]
name = "test-ws"
kind = "ws"
address = "127.0.0.1:0"

[[listeners]]
name = "test-wss"
kind = "wss"
address = "127.0.0.1:0"
"#;

/// Returns whether a missing tool skips its tests (loudly) and does not fail them.
fn may_skip() -> bool {
    std::env::var("MQTT_SERVER_TEST_SKIP_MISSING").is_ok_and(|value| value == "1")
}

/// Finds a tool, `None` when it is missing and skipping is allowed.
///
/// # Panics
/// If the tool is missing and skipping is not allowed.
pub fn need(tool: &str, found: bool) -> bool {
    if found {
        return true;
    }
    assert!(
        may_skip(),
        "{tool} is missing: run scripts/test.sh, which installs it, or set \
         MQTT_SERVER_TEST_SKIP_MISSING=1 to skip what needs it"
    );
    skipped(tool);
    false
}

/// Says loudly that a test checks nothing for want of `what`.
pub fn skipped(what: &str) {
    eprintln!("\n!!! SKIPPED: {what} is missing, this test has checked nothing !!!\n");
}

/// The root of the repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder with `prometheus` and `promtool`; none, said loudly, if it is missing and may be.
pub fn prometheus() -> Option<PathBuf> {
    let fetched = root().join("target/tools/prometheus/usr/bin");
    let folders = std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let places = std::iter::once(fetched).chain(folders.unwrap_or_default());
    let found = places
        .into_iter()
        .find(|folder| folder.join("promtool").exists() && folder.join("prometheus").exists());
    need("Prometheus", found.is_some()).then_some(found?)
}

/// The Python of the test environment, when it is complete.
pub fn python() -> Option<PathBuf> {
    let path = root().join(".venv/bin/python");
    let complete = Command::new(&path)
        .args(["-c", "import paho.mqtt.client, grpc, grpc_tools, pytest"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    complete.then_some(path)
}

/// Returns whether a program answers on the path.
pub fn on_path(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a child process to its end under a deadline; its output and whether it succeeded.
pub fn run(command: &mut Command, limit: Duration) -> (bool, String) {
    let output = tempfile::NamedTempFile::new().expect("create a file for the output");
    let handle = output.reopen().expect("open the output file again");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(handle.try_clone().expect("clone the output handle"))
        .stderr(handle)
        .spawn()
        .expect("start the child process");
    let deadline = Instant::now() + limit;
    let success = loop {
        if let Some(status) = child.try_wait().expect("ask for the child's status") {
            break status.success();
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            break false;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let text = String::from_utf8_lossy(&fs::read(output.path()).unwrap_or_default()).into_owned();
    (success, text)
}
