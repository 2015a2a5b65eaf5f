//! The server under test as a process that is killed and started again on the same port and data.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::support::{self, local, logged_port, ports::free_ports};

/// Longer than a start may take on a loaded machine.
const START: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Own,
    /// Keeps its sessions in memory and writes them on SIGTERM: what it loses on SIGKILL must be found.
    Mosquitto,
}

/// A server to which clients connect.
pub(crate) trait Server {
    /// The port on which it is reached.
    fn port(&self) -> u16;
    /// See that it runs.
    fn look_after(&mut self);
    /// Returns its log.
    fn log(&self) -> String;
}

impl Server for Broker {
    fn port(&self) -> u16 {
        self.port
    }

    fn look_after(&mut self) {
        Self::look_after(self);
    }

    fn log(&self) -> String {
        Self::log(self)
    }
}

pub(crate) struct Broker {
    kind: MemoryKind,
    dir: tempfile::TempDir,
    pub(crate) port: u16,
    http: u16,
    grpc: u16,
    /// Environment of the process, such as that of the recorder.
    env: Vec<(String, String)>,
    /// Further TOML.
    toml: String,
    child: Option<Child>,
}

fn mosquitto() -> Option<PathBuf> {
    // scripts/test.sh has its folder on PATH; a package installs it where not everybody's PATH leads.
    let folders = std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let others = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    let all = folders.unwrap_or_default().into_iter().chain(others);
    all.map(|folder| folder.join("mosquitto")).find(|path| path.exists())
}

impl Broker {
    /// A broker that is not started, with an empty data directory.
    pub(crate) fn new(kind: MemoryKind) -> Self {
        let port = free_ports(3);
        let (http, grpc) = (port + 1, port + 2);
        let dir = tempfile::tempdir().expect("make a directory for the server");
        fs::create_dir(dir.path().join("data")).expect("make the data directory");
        Self { kind, dir, port, http, grpc, env: Vec::new(), toml: String::new(), child: None }
    }

    pub(crate) fn with(mut self, env: Vec<(String, String)>, toml: &str) -> Self {
        self.env = env;
        self.toml = toml.to_owned();
        self
    }

    pub(crate) fn has_mosquitto() -> bool {
        mosquitto().is_some()
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    /// Returns its gRPC address.
    pub(crate) fn grpc(&self) -> std::net::SocketAddr {
        local(self.grpc)
    }

    /// The port of a listener that the test's TOML names, with port 0.
    pub(crate) fn listener(&self, name: &str) -> u16 {
        logged_port(&self.log(), name).unwrap_or_else(|| panic!("no listener {name}"))
    }

    /// Starts the process and does not wait: clients that come too early are refused and come again.
    pub(crate) fn start(&mut self) {
        assert!(self.child.is_none(), "the server runs already");
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("server.log"))
            .expect("open the log");
        let mut command = match self.kind {
            MemoryKind::Own => self.own(),
            MemoryKind::Mosquitto => self.mosquitto(),
        };
        command
            .current_dir(self.dir.path())
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("clone the log handle"))
            .stderr(log);
        self.child = Some(command.spawn().expect("start the server"));
    }

    fn own(&self) -> Command {
        let toml =
            format!("insecure_grpc = true\n{}\n[grpc]\ntls = false\n[sys]\nenabled = false\n", self.toml);
        fs::write(self.dir.path().join("test.toml"), toml).expect("write the configuration");
        // Another build of the same program, such as a release one, for long runs.
        let program = std::env::var_os("CRASH_BINARY")
            .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_mqtt-server")), PathBuf::from);
        let mut command = support::command(program);
        command.args(["--config", "test.toml", "--non-tls", "--data-dir"]).arg(self.data());
        for (flag, port) in [("--addr", self.port), ("--http-addr", self.http), ("--grpc-addr", self.grpc)] {
            command.arg(flag).arg(local(port).to_string());
        }
        command
    }

    fn mosquitto(&self) -> Command {
        let text = format!(
            "listener {} 127.0.0.1\nallow_anonymous true\npersistence true\npersistence_location {}/\n\
             autosave_interval 3600\nmax_queued_messages 0\nmax_inflight_messages 0\nlog_type error\n{}",
            self.port,
            self.data().display(),
            // Started as root it would give its rights up and then not write where only root may.
            "user root\n"
        );
        fs::write(self.dir.path().join("mosquitto.conf"), text).expect("write the configuration");
        let mut command = Command::new(mosquitto().expect("mosquitto"));
        command.args(["-c", "mosquitto.conf"]);
        command
    }

    /// SIGKILL, now.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// SIGTERM, and waits.
    pub(crate) fn stop(&mut self) {
        self.terminate();
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }

    /// SIGTERM.
    pub(crate) fn terminate(&self) {
        if let Some(child) = &self.child {
            let _ = Command::new("kill").arg("-TERM").arg(child.id().to_string()).status();
        }
    }

    /// Starts it again if it lost its port to another process, which may happen between two starts.
    ///
    /// # Panics
    /// If the broker ended for any other reason.
    pub(crate) fn look_after(&mut self) {
        let Some(status) = self.ended() else { return };
        let log = self.log();
        let last = log.lines().last().unwrap_or_default().to_lowercase();
        assert!(last.contains("in use"), "the server ended by itself: {status}\n{log}");
        self.child = None;
        thread::sleep(Duration::from_millis(100));
        self.start();
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().expect("ask for the server's status")
    }

    /// The status line and body of an HTTP request to the metrics and health listener.
    pub(crate) fn http_get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect_timeout(&local(self.http), Duration::from_secs(2)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Returns its answer about readiness; an empty text if there is none.
    pub(crate) fn readiness(&self) -> String {
        self.http_get("/readyz").unwrap_or_default()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.http_get("/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
    }

    /// Waits until it serves.
    pub(crate) fn ready(&mut self) {
        let deadline = Instant::now() + START;
        while !self.is_ready() {
            self.look_after();
            assert!(Instant::now() < deadline, "not ready after {START:?}\n{}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            println!("--- log of the server ---\n{}--- end of log ---", self.log());
        }
    }
}
