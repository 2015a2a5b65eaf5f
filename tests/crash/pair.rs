//! Two gateways of a cluster with a ledger in a database, behind a balancer: the machine of the one that serves may die.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    balancer::{Balancer, Gateway, http_get},
    broker::Server,
    engine::Engine,
    proxy::Line,
    support::{self, local, ports::free_ports},
};

/// Longer than a takeover may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    name: &'static str,
    port: u16,
    http: u16,
    grpc: u16,
    links: u16,
    child: Option<Child>,
    /// Its way to the database.
    line: Line,
    /// Value of `cluster.ledger`.
    ledger: String,
    /// Environment of its process.
    env: Vec<(String, String)>,
}

/// See the module.
pub(crate) struct Pair {
    dir: tempfile::TempDir,
    nodes: [Node; 2],
    balancer: Balancer,
    cluster: String,
    password: &'static str,
    /// The section `[latest]` of both.
    latest: &'static str,
    /// Further sections of the configuration.
    toml: &'static str,
    /// One that stands by takes devices and calls, too.
    has_links: bool,
    /// Longer than anything may take.
    pub(crate) patience: Duration,
}

impl Pair {
    /// Makes the cluster, and starts no gateway. They keep no latest values.
    pub(crate) fn new(engine: &Engine) -> Self {
        Self::make(engine, "enabled = false", "")
    }

    /// The same with this section `[latest]`.
    pub(crate) fn with_latest(engine: &Engine, latest: &'static str) -> Self {
        Self::make(engine, latest, "")
    }

    /// As [`Self::new`], with further sections in the configuration of both.
    pub(crate) fn with_sections(engine: &Engine, toml: &'static str) -> Self {
        Self::make(engine, "enabled = false", toml)
    }

    fn make(engine: &Engine, latest: &'static str, toml: &'static str) -> Self {
        let ports = [free_ports(4), free_ports(4)];
        // Another than those before it, in the same database.
        let cluster = format!("crash_{}", ports[0]);
        let nodes = [("a", ports[0]), ("b", ports[1])].map(|(name, port)| {
            let line = engine.line();
            let ledger = engine.ledger(&line, &cluster);
            let (http, grpc, links) = (port + 1, port + 2, port + 3);
            Node { name, port, http, grpc, links, child: None, line, ledger, env: Vec::new() }
        });
        let balancer = Balancer::start([0, 1].map(|number: usize| {
            let node: &Node = &nodes[number];
            Gateway { mqtt: node.port, http: node.http }
        }));
        let dir = tempfile::tempdir().expect("make a directory for the gateways");
        let password = if engine.is_postgres() { "ledger" } else { "" };
        let (has_links, patience) = (false, PATIENCE);
        let pair = Self { dir, nodes, balancer, cluster, password, latest, toml, has_links, patience };
        let made = pair.tool(&["create"]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        pair
    }

    /// Has links between both from their next start on, so that either takes devices and calls.
    pub(crate) fn link(&mut self) {
        support::gateway_certificates(self.dir.path(), &["a", "b"]);
        self.has_links = true;
    }

    /// Runs `mqtt-server cluster` with the configuration of the first gateway.
    pub(crate) fn tool(&self, arguments: &[&str]) -> Output {
        let (command, rest) = arguments.split_first().expect("a command");
        support::command(program())
            .args(["cluster", command, "--config"])
            .arg(self.write_config(&self.nodes[0]))
            .args(rest)
            .current_dir(self.dir.path())
            .output()
            .expect("run mqtt-server cluster")
    }

    /// Directory of a gateway's data.
    pub(crate) fn data(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("data-{}", self.nodes[number].name))
    }

    /// A gateway's way to the database.
    pub(crate) fn line(&self, number: usize) -> &Line {
        &self.nodes[number].line
    }

    /// Sets the environment of a gateway, from its next start on.
    pub(crate) fn set_env(&mut self, number: usize, env: Vec<(String, String)>) {
        self.nodes[number].env = env;
    }

    /// The port for devices of one gateway, past the balancer.
    pub(crate) fn port_of(&self, number: usize) -> u16 {
        self.nodes[number].port
    }

    /// The port for devices of whichever serves.
    pub(crate) fn balancer(&self) -> u16 {
        self.balancer.port()
    }

    /// Addresses of both gateways for backends.
    pub(crate) fn grpc(&self) -> [SocketAddr; 2] {
        [local(self.nodes[0].grpc), local(self.nodes[1].grpc)]
    }

    /// Name of the cluster.
    pub(crate) fn cluster(&self) -> &str {
        &self.cluster
    }

    fn write_config(&self, node: &Node) -> PathBuf {
        let path = self.dir.path().join(format!("{}.toml", node.name));
        let Node { name, port, http, grpc, links, ledger, .. } = node;
        let Self { cluster, password, latest, toml, .. } = self;
        let links = match self.has_links {
            true => format!(
                "[cluster.links]\nlisten = \"127.0.0.1:{links}\"\nca = \"ca.pem\"\ncert = \"{name}.pem\"\nkey = \"{name}.key\"\n"
            ),
            false => String::new(),
        };
        let data = self.dir.path().join(format!("data-{name}"));
        let toml = format!(
            "addr = \"127.0.0.1:{port}\"\nhttp_addr = \"127.0.0.1:{http}\"\ngrpc_addr = \"127.0.0.1:{grpc}\"\n\
             non_tls = true\ninsecure_grpc = true\ndata_dir = \"{}\"\n\
             [grpc]\ntls = false\n[sys]\nenabled = false\n[latest]\n{latest}\n\
             [cluster]\nname = \"{cluster}\"\nnode = \"{name}\"\nledger = \"{ledger}\"\npassword = \"{password}\"\n\
             address = \"127.0.0.1:{grpc}\"\n{links}[database]\nreplication = \"3\"\ncompression = \"none\"\n{toml}",
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
            .envs(node.env.iter().map(|(name, value)| (name, value)))
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
            self.forget_disk(number);
        }
    }

    /// Deletes the directory of a gateway that does not run.
    pub(crate) fn forget_disk(&self, number: usize) {
        let _ = fs::remove_dir_all(self.data(number));
    }

    /// Waits until a gateway has ended by itself, and returns how.
    pub(crate) fn exit_of(&mut self, number: usize) -> ExitStatus {
        let mut child = self.nodes[number].child.take().expect("a process");
        let deadline = Instant::now() + self.patience;
        loop {
            if let Some(status) = child.try_wait().expect("ask for the status") {
                return status;
            }
            if Instant::now() > deadline {
                self.nodes[number].child = Some(child);
                panic!("it has not ended after {:?}", self.patience);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Text that a gateway has logged.
    pub(crate) fn log_of(&self, number: usize) -> String {
        fs::read_to_string(self.log_path(&self.nodes[number])).unwrap_or_default()
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
        http_get(self.nodes[number].http, path, Duration::from_secs(1))
    }

    /// A gauge or counter of a gateway, with its labels in `name` if it has any.
    pub(crate) fn metric(&self, number: usize, name: &str) -> Option<f64> {
        let shown = self.answer(number, "/metrics")?;
        let line = shown.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        line.parse().ok()
    }

    /// Returns whether a gateway serves. One that stands by is ready, too, with links, and says what it does.
    pub(crate) fn serves(&self, number: usize) -> bool {
        let is_active = |answer: String| answer.starts_with("HTTP/1.1 200") && !answer.contains("\nstandby:");
        self.answer(number, "/readyz").is_some_and(is_active)
    }

    /// Returns whether a gateway stands by with a warm copy.
    pub(crate) fn is_warm(&self, number: usize) -> bool {
        let answer = self.answer(number, "/readyz?standby=ok");
        answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200") && answer.contains("the copy is warm"))
    }

    /// Waits for a gateway that serves, and returns which.
    pub(crate) fn active(&mut self) -> usize {
        let deadline = Instant::now() + self.patience;
        loop {
            if let Some(active) = (0..2).find(|number| self.serves(*number)) {
                return active;
            }
            self.look_after();
            assert!(Instant::now() < deadline, "nobody serves after {:?}\n{}", self.patience, self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until something is so.
    pub(crate) fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + self.patience;
        while !is_so(self) {
            self.look_after();
            assert!(Instant::now() < deadline, "not after {:?}: {what}\n{}", self.patience, self.log());
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
        self.balancer.port()
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
