//! Two gateways of a cluster with a ledger in PostgreSQL, behind a balancer: the machine of the one that serves may die.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    broker::Server,
    support::{self, local, ports::free_ports},
};

/// Longer than a takeover may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A database of the test's own, which keeps the ledger.
pub(crate) enum Engine {
    /// A primary with a synchronous standby.
    Postgres(u16),
    /// Three nodes.
    Cassandra(u16),
}

impl Engine {
    /// Starts PostgreSQL; nothing where it is switched off or cannot be had, which is said.
    pub(crate) fn postgres() -> Option<Self> {
        if std::env::var("MQTT_SERVER_TEST_POSTGRES").is_ok_and(|value| value == "none") {
            println!("!!! SKIPPED: two gateways on PostgreSQL: MQTT_SERVER_TEST_POSTGRES is none");
            return None;
        }
        Self::Postgres(free_ports(2)).started(&["start", "--standby"])
    }

    /// Starts Cassandra.
    pub(crate) fn cassandra() -> Option<Self> {
        Self::Cassandra(free_ports(2)).started(&["start"])
    }

    fn started(self, arguments: &[&str]) -> Option<Self> {
        let started = self.run(arguments);
        let said = String::from_utf8_lossy(&started.stderr).into_owned();
        if started.status.code() == Some(3) {
            println!("!!! SKIPPED: two gateways on a ledger: {said}");
            return None;
        }
        assert!(started.status.success(), "{said}");
        Some(self)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (script, variable, port) = match self {
            Self::Postgres(port) => ("scripts/postgres.sh", "POSTGRES_PORT", port),
            Self::Cassandra(port) => ("scripts/cassandra.sh", "CASSANDRA_PORT", port),
        };
        let mut command = Command::new(root.join(script));
        command.args(arguments).env(variable, port.to_string()).stdin(Stdio::null());
        if matches!(self, Self::Cassandra(_)) {
            command.env("CASSANDRA_NODES", "3").env("CASSANDRA_YAML", "paxos_variant: v2");
        }
        command.output().expect("run the script of the database")
    }

    fn order(&self, arguments: &[&str]) {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The database, or one of its nodes, stands still.
    pub(crate) fn pause(&self) {
        self.order(if self.is_postgres() { &["pause", "primary"] } else { &["pause", "1"] });
    }

    /// And goes on.
    pub(crate) fn resume(&self) {
        self.order(if self.is_postgres() { &["resume", "primary"] } else { &["resume", "1"] });
    }

    fn is_postgres(&self) -> bool {
        matches!(self, Self::Postgres(_))
    }

    fn ledger(&self, cluster: &str) -> String {
        match self {
            Self::Postgres(port) => {
                format!("postgres://ledger@127.0.0.1:{port},127.0.0.1:{}/ledger", port + 1)
            }
            Self::Cassandra(port) => {
                format!("cassandra://127.0.0.1:{port},127.0.0.2:{port},127.0.0.3:{port}/{cluster}")
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.run(&["stop"]);
    }
}

/// Lets clients through to whichever gateway accepts.
struct Balancer {
    port: u16,
    stop: Arc<AtomicBool>,
}

impl Balancer {
    fn start(to: [u16; 2]) -> Self {
        let listener = TcpListener::bind(local(0)).expect("bind the balancer");
        let port = listener.local_addr().expect("an address").port();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(SeqCst) {
                    return;
                }
                let Ok(client) = client else { continue };
                // A gateway that stands by does not listen for devices.
                let server = to.iter().find_map(|port| TcpStream::connect(local(*port)).ok());
                if let Some(server) = server {
                    join(&client, &server);
                }
            }
        });
        Self { port, stop }
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        let _ = TcpStream::connect(local(self.port));
    }
}

/// Copies both ways until one side ends, and then ends the other.
fn join(client: &TcpStream, server: &TcpStream) {
    for (from, to) in [(client, server), (server, client)] {
        let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
        let _ = (from.set_nodelay(true), to.set_nodelay(true));
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    }
}

struct Node {
    name: &'static str,
    port: u16,
    http: u16,
    grpc: u16,
    child: Option<Child>,
}

/// See the module.
pub(crate) struct Pair {
    dir: tempfile::TempDir,
    nodes: [Node; 2],
    balancer: Balancer,
    cluster: String,
    ledger: String,
    password: &'static str,
    /// The section `[latest]` of both.
    latest: &'static str,
}

impl Pair {
    /// Makes the cluster, and starts no gateway. They keep no latest values.
    pub(crate) fn new(engine: &Engine) -> Self {
        Self::with_latest(engine, "enabled = false")
    }

    /// The same with this section `[latest]`.
    pub(crate) fn with_latest(engine: &Engine, latest: &'static str) -> Self {
        let nodes = ["a", "b"].map(|name| {
            let port = free_ports(3);
            Node { name, port, http: port + 1, grpc: port + 2, child: None }
        });
        let balancer = Balancer::start([nodes[0].port, nodes[1].port]);
        let dir = tempfile::tempdir().expect("make a directory for the gateways");
        // Another than those before it, in the same database.
        let cluster = format!("crash_{}", nodes[0].port);
        let password = if engine.is_postgres() { "ledger" } else { "" };
        let ledger = engine.ledger(&cluster);
        let pair = Self { dir, nodes, balancer, ledger, cluster, password, latest };
        let config = pair.write_config(&pair.nodes[0]);
        let made = support::command(program())
            .args(["cluster", "create", "--config"])
            .arg(config)
            .current_dir(pair.dir.path())
            .output()
            .expect("run cluster create");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        pair
    }

    fn data(&self, node: &Node) -> PathBuf {
        self.dir.path().join(format!("data-{}", node.name))
    }

    fn write_config(&self, node: &Node) -> PathBuf {
        let path = self.dir.path().join(format!("{}.toml", node.name));
        let Node { name, port, http, grpc, .. } = node;
        let Self { cluster, ledger, password, latest, .. } = self;
        let data = self.data(node);
        let toml = format!(
            "addr = \"127.0.0.1:{port}\"\nhttp_addr = \"127.0.0.1:{http}\"\ngrpc_addr = \"127.0.0.1:{grpc}\"\n\
             non_tls = true\ninsecure_grpc = true\ndata_dir = \"{}\"\n\
             [grpc]\ntls = false\n[sys]\nenabled = false\n[latest]\n{latest}\n\
             [cluster]\nname = \"{cluster}\"\nnode = \"{name}\"\nledger = \"{ledger}\"\npassword = \"{password}\"\n\
             address = \"127.0.0.1:{grpc}\"\n[database]\nreplication = \"3\"\n",
            data.display()
        );
        fs::write(&path, toml).expect("write the configuration");
        path
    }

    fn log_path(&self, node: &Node) -> PathBuf {
        self.dir.path().join(format!("{}.log", node.name))
    }

    /// Starts a gateway that does not run.
    pub(crate) fn start(&mut self, number: usize) {
        let node = &self.nodes[number];
        assert!(node.child.is_none(), "{} runs already", node.name);
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_path(node)).expect("a log");
        let child = support::command(program())
            .arg("--config")
            .arg(self.write_config(node))
            .current_dir(self.dir.path())
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("clone the log"))
            .stderr(log)
            .spawn()
            .expect("start a gateway");
        self.nodes[number].child = Some(child);
    }

    /// Kills a gateway; with `disk` its directory goes, too.
    pub(crate) fn kill(&mut self, number: usize, disk: bool) {
        if let Some(mut child) = self.nodes[number].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if disk {
            let _ = fs::remove_dir_all(self.data(&self.nodes[number]));
        }
    }

    /// Sends a gateway a signal.
    pub(crate) fn signal(&self, number: usize, signal: &str) {
        if let Some(child) = &self.nodes[number].child {
            let _ = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status();
        }
    }

    /// SIGTERM, and waits.
    pub(crate) fn stop(&mut self, number: usize) {
        self.signal(number, "TERM");
        if let Some(mut child) = self.nodes[number].child.take() {
            let _ = child.wait();
        }
    }

    /// Answer of a gateway to a GET over HTTP, with its head.
    pub(crate) fn answer(&self, number: usize, path: &str) -> Option<String> {
        let mut stream =
            TcpStream::connect_timeout(&local(self.nodes[number].http), Duration::from_secs(1)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Returns whether a gateway serves.
    pub(crate) fn serves(&self, number: usize) -> bool {
        self.answer(number, "/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
    }

    /// Returns whether a gateway stands by with a warm copy.
    pub(crate) fn is_warm(&self, number: usize) -> bool {
        let answer = self.answer(number, "/readyz?standby=ok");
        answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200") && answer.contains("the copy is warm"))
    }

    /// Waits for a gateway that serves, and returns which.
    pub(crate) fn active(&mut self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(active) = (0..2).find(|number| self.serves(*number)) {
                return active;
            }
            self.look_after();
            assert!(Instant::now() < deadline, "nobody serves after {PATIENCE:?}\n{}", self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until something is so.
    pub(crate) fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            self.look_after();
            assert!(Instant::now() < deadline, "not after {PATIENCE:?}: {what}\n{}", self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn program() -> PathBuf {
    std::env::var_os("CRASH_BINARY")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_mqtt-server")), PathBuf::from)
}

impl Server for Pair {
    fn port(&self) -> u16 {
        self.balancer.port
    }

    fn look_after(&mut self) {
        for node in &mut self.nodes {
            let Some(child) = &mut node.child else { continue };
            let ended = child.try_wait().expect("ask for the status");
            assert!(ended.is_none(), "{} ended by itself: {ended:?}", node.name);
        }
    }

    fn log(&self) -> String {
        let read = |node: &Node| fs::read_to_string(self.log_path(node)).unwrap_or_default();
        self.nodes.iter().map(|node| format!("--- {}\n{}", node.name, read(node))).collect()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("{}", self.log());
        }
        for number in 0..2 {
            self.signal(number, "CONT");
            self.kill(number, false);
        }
    }
}
