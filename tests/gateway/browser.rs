//! The web page in a real Chromium: tests/interop/test_page.py against a gateway with a token of each role, and one that asks
//! nobody. Chromium and its driver are Debian's packages; Selenium talks to them.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use access::backends::{Role, Scope, TokenGrant, Tokens, hash, mint};
use codec::Connect;
use gateway_core::Protocol;

use crate::{
    client::{Client, hello},
    ctl::ctl,
    support::{Server, command, need, on_path, ports::free_ports, python, root, run, skipped, until},
};

const LIMIT: Duration = Duration::from_secs(420);

/// Adds a token to the file, and returns its secret.
pub(crate) fn token(file: &Path, role: Role) -> String {
    let (secret, _) = mint().expect("a token");
    let grant = TokenGrant {
        id: role.as_str().to_owned(),
        role,
        scope: Scope::ALL,
        created: 0,
        expires: None,
        note: String::new(),
        hash: hash(&secret),
    };
    let text = fs::read_to_string(file).unwrap_or_default();
    fs::write(file, Tokens::with(&text, &grant).expect("a file of tokens")).expect("write the tokens");
    secret
}

/// A gateway of a cluster that nobody else is in, and the PostgreSQL with its ledger.
struct Clustered {
    server: Server,
    _ledger: Postgres,
}

/// A PostgreSQL of the test's own.
struct Postgres(u16);

impl Postgres {
    fn run(&self, arguments: &[&str]) -> Output {
        let mut script = Command::new(root().join("scripts/postgres.sh"));
        script.args(arguments).env("POSTGRES_PORT", self.0.to_string()).stdin(Stdio::null());
        script.output().expect("run scripts/postgres.sh")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let _ = self.run(&["stop"]);
    }
}

impl Clustered {
    /// None, and that is said, where there can be no PostgreSQL.
    fn start() -> Option<Self> {
        if std::env::var("MQTT_SERVER_TEST_POSTGRES").is_ok_and(|value| value == "none") {
            skipped("PostgreSQL (MQTT_SERVER_TEST_POSTGRES is none)");
            return None;
        }
        let ledger = Postgres(free_ports(2));
        let started = ledger.run(&["start"]);
        if !need("PostgreSQL", started.status.code() != Some(3)) {
            return None;
        }
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
        let toml = format!(
            "[cluster]\nname = \"page\"\nnode = \"left\"\nledger = \"postgres://ledger@127.0.0.1:{}/ledger\"\n\
             password = \"ledger\"\n",
            ledger.0
        );
        let dir = tempfile::tempdir().expect("make a directory");
        fs::write(dir.path().join("create.toml"), &toml).expect("write the configuration");
        let mut create = command(env!("CARGO_BIN_EXE_mqtt-server"));
        create.args(["cluster", "create", "--config", "create.toml"]).current_dir(dir.path());
        let (success, output) = run(&mut create, Duration::from_secs(60));
        assert!(success, "{output}");
        let server = Server::start_in_environment(dir, &[], &toml, &[]);
        Some(Self { server, _ledger: ledger })
    }

    /// The failures: an operator without a browser, or without a gateway, is not told who serves or how much the ledger has.
    fn is_told(&self) {
        let (success, figures) = run(&mut ctl(&self.server, &["cluster"]), LIMIT);
        let is_row = |line: &str| line.split_whitespace().eq(["gateway", "left", "serves"]);
        assert!(success && figures.lines().any(is_row), "{figures}");
        let mut status = command(env!("CARGO_BIN_EXE_mqtt-server"));
        status.args(["cluster", "status", "--config", "create.toml"]).current_dir(self.server.dir());
        let (success, status) = run(&mut status, LIMIT);
        assert!(success && status.contains("left serves, in epoch 1"), "{status}");
        let files = status.lines().find(|line| line.starts_with("files ")).expect("the store of files");
        assert!(files.contains("segments: 1,"), "{status}");
    }
}

/// Runs the tests of which the name contains `select`.
fn browse(select: &str) {
    let python = python();
    let installed = python.as_ref().is_some_and(|python| {
        Command::new(python).args(["-c", "import selenium"]).output().is_ok_and(|out| out.status.success())
    });
    if !need("Selenium in the Python environment .venv", installed)
        || !need("chromium and chromedriver", on_path("chromium") && on_path("chromedriver"))
    {
        return;
    }
    let dir = tempfile::tempdir().expect("make a directory");
    let file = dir.path().join("tokens");
    let tokens: serde_json::Map<_, _> =
        Role::ALL.into_iter().map(|role| (role.as_str().to_owned(), token(&file, role).into())).collect();
    let open = Server::start();
    // One bridge that is up, and one that leads to nobody.
    let rules = dir.path().join("rules.toml");
    fs::write(&rules, "[[rules]]\nallow = \"all\"\ntopics = [\"#\", \"$SYS/#\"]\n").expect("write the rules");
    let toml = format!(
        "[backends]\ntokens = {:?}\n\n[authorization]\nrules = {:?}\n\n\
         [bridges.cloud]\ntopics = [\"room/#\"]\n[bridges.cloud.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n\n\
         [bridges.hooks]\ntopics = [\"room/#\"]\n[bridges.hooks.webhook]\nurl = \"http://127.0.0.1:1/\"\n",
        file.display().to_string(),
        rules.display().to_string(),
        open.ports.tcp
    );
    let mut guarded = Server::start_with(&[], &toml);
    let clustered = Clustered::start();
    if let Some(clustered) = &clustered {
        clustered.is_told();
    }
    let cluster_port = clustered.as_ref().map(|clustered| clustered.server.ports.http);
    let mut command = Command::new(python.unwrap_or_default());
    command
        .args(["-m", "pytest", "test_page.py", "-k", select])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(root().join("tests/interop"))
        .envs(guarded.script_env())
        .env("GW_TOKENS", serde_json::Value::Object(tokens).to_string())
        .env("GW_OPEN_TCP", open.ports.tcp.to_string())
        .env("GW_OPEN_HTTP", open.ports.http.to_string())
        .env("GW_CLUSTER_HTTP", cluster_port.unwrap_or_default().to_string());
    let (success, output) = run(&mut command, LIMIT);
    eprintln!("{output}");
    assert!(success, "the tests in the browser failed; their output is above");
    assert!(guarded.stop(), "the server did not stop cleanly after SIGTERM");
    let log = guarded.log();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn the_page_in_a_browser() {
    // One of them alone, by hand: docs/page.md.
    browse(&std::env::var("GW_ONLY").unwrap_or_default());
}

/// More than one call of the API looks at: 8,192 ids, or 2,048 devices.
const OTHERS: usize = 8_500;

/// A session of MQTT 3.1.1 for each name, without a connection.
fn sessions(server: &Server, names: &[String]) {
    thread::scope(|scope| {
        for names in names.chunks(names.len().div_ceil(32)) {
            scope.spawn(move || {
                for name in names {
                    let connect = Connect { clean_start: false, ..hello(Protocol::V4, name) };
                    Client::connect_with(server.ports.tcp, connect);
                }
            });
        }
    });
}

/// The devices of a page, and where its next page is.
fn devices(server: &Server, path: &str) -> (Vec<String>, Option<String>) {
    let page = server.http_get(path).expect("a page");
    let between = |text: &str, end: &str| text.split(end).next().unwrap_or_default().to_owned();
    let rows = page.split("href=\"/page/device?id=").skip(1).map(|row| between(row, "\"")).collect();
    let next = page.split("rel=\"next\" href=\"").nth(1);
    (rows, next.map(|next| between(next, "\"").replace("&amp;", "&")))
}

/// The failure: one call of the API was made for a page, which was empty, and a link to the next, several times in a row, when
/// few of many devices were looked for.
#[test]
fn few_devices_are_found_among_many_on_the_first_page() {
    let server = Server::start();
    sessions(&server, &(0..OTHERS).map(|number| format!("other-{number}")).collect::<Vec<_>>());
    let wanted: Vec<_> = (0..60).map(|number| format!("rare-{number:02}")).collect();
    sessions(&server, &wanted);
    let _five = Client::connect(server.ports.tcp, Protocol::V5, "rare");

    let (first, next) = devices(&server, "/page/devices?prefix=rare");
    assert_eq!(
        (first.len(), first[0].as_str()),
        (50, "rare"),
        "the one of this very name is the first: {first:?}"
    );
    let (second, end) = devices(&server, &next.expect("a next page"));
    assert_eq!(end, None);
    let mut all = [first, second].concat();
    all.sort();
    assert_eq!(all, [&["rare".to_owned()], &wanted[..]].concat(), "each once");

    until(|| server.metric("mqtt_connections") == 1);
    for path in ["/page/devices?version=5", "/page/devices?online=1", "/page/devices?prefix=rare&version=5"] {
        assert_eq!(devices(&server, path), (vec!["rare".to_owned()], None), "{path}");
    }
    assert_eq!(devices(&server, "/page/devices?prefix=none"), (vec![], None));
}
