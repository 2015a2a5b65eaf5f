//! The client libraries of clients/, in their own languages, against the real binary.
//!
//! Each starts a gateway by clients/testing/world.py, which needs the Python environment. A missing tool fails its test, unless
//! MQTT_SERVER_TEST_SKIP_MISSING=1.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use gateway_core::Protocol;

use crate::{
    client::Client,
    rpcs::reasons,
    support::{Server, need, on_path, python, root, run, skipped, until},
};

const LIMIT: Duration = Duration::from_secs(420);
const SERVER: &str = env!("CARGO_BIN_EXE_mqtt-server");

/// Runs what tests a library, in its folder.
fn passes(command: &mut Command, folder: &str) {
    command.current_dir(root().join("clients").join(folder)).env("GATEWAY", SERVER);
    let (success, output) = run(command, LIMIT);
    eprintln!("{output}");
    assert!(success, "{command:?} failed; its output is above");
}

/// The Python of the test environment, when it has what the Python library needs.
fn python_with_packages() -> Option<PathBuf> {
    let path = python()?;
    let complete = Command::new(&path)
        .args(["-c", "import mypy_protobuf, google.rpc, hatchling, mypy"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    complete.then_some(path)
}

fn pytest(file: &str) {
    let python = python_with_packages();
    if !need("the Python environment .venv", python.is_some()) {
        return;
    }
    let mut command = Command::new(python.unwrap_or_default());
    command.args(["-m", "pytest", file]).env("PYTHONDONTWRITEBYTECODE", "1");
    passes(&mut command, "python");
}

#[test]
fn python_client_consumes_over_kills_and_drains() {
    pytest("tests/test_consume.py");
}

#[test]
fn python_client_makes_calls_and_types_errors() {
    pytest("tests/test_calls.py");
}

#[test]
fn python_client_examples_run_as_they_stand() {
    pytest("tests/test_examples.py");
}

#[test]
fn python_client_package_is_whole_and_typed() {
    pytest("tests/test_package.py");
}

/// Go is not among what the tests need: where it is missing, or its modules cannot be fetched, these check nothing.
fn go_with_modules() -> bool {
    if !on_path("go") {
        skipped("Go");
        return false;
    }
    let mut command = Command::new("go");
    let (fetched, output) =
        run(command.args(["mod", "download"]).current_dir(root().join("clients/go")), LIMIT);
    if !fetched {
        eprintln!("{output}");
        skipped("the Go module proxy, which has grpc-go");
    }
    fetched
}

#[test]
fn go_client_keeps_its_promises_and_its_examples_run() {
    if go_with_modules() && need("python3", on_path("python3")) {
        passes(Command::new("go").args(["vet", "./..."]), "go");
        // Its cache does not know that the gateway has changed.
        passes(Command::new("go").args(["test", "-count=1", "."]), "go");
    }
}

/// Checks that the generated code in the repository for Go is up to date with the protos.
#[test]
fn go_client_generated_code_is_not_stale() {
    let protoc = need("the Python environment .venv", python().is_some());
    if !protoc || !go_with_modules() {
        return;
    }
    let fresh = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("go-client");
    let _ = fs::remove_dir_all(&fresh);
    fs::create_dir_all(&fresh).expect("make a folder");
    let (made, output) =
        run(Command::new("bash").arg(root().join("clients/go/generate.sh")).arg(&fresh), LIMIT);
    assert!(made, "{output}");
    for package in ["gatewayv1", "hooksv1"] {
        let mut command = Command::new("diff");
        command.arg("-r").arg(root().join("clients/go").join(package)).arg(fresh.join(package));
        let (same, output) = run(&mut command, LIMIT);
        assert!(same, "clients/go/{package} is stale, run clients/go/generate.sh\n{output}");
    }
}

#[test]
fn typescript_client_keeps_its_promises_and_its_examples_run() {
    let installed = root().join("clients/typescript/node_modules/typescript").is_dir();
    let tools = need("npm", on_path("npm")) && need("clients/typescript/node_modules", installed);
    if tools && need("python3", on_path("python3")) {
        passes(Command::new("npm").args(["test", "--silent"]), "typescript");
    }
}

/// The example is built with the others: `cargo build --examples`.
#[test]
fn rust_client_example_runs_as_it_stands_and_drains() {
    let example = Path::new(SERVER).with_file_name("examples").join("readings");
    assert!(example.exists(), "the examples are not built: run scripts/test.sh, or cargo build --examples");
    let server = Server::start();
    let said = server.dir().join("said");
    let file = fs::File::create(&said).expect("make a file");
    // In the directory of the gateway, as it says: it finds certs/ca.crt there.
    let mut program = Command::new(&example)
        .current_dir(server.dir())
        .env("GATEWAY_ADDRESS", format!("https://localhost:{}", server.ports.grpc))
        .stdout(file.try_clone().expect("clone the file"))
        .stderr(file)
        .spawn()
        .expect("start the example");
    let said = || fs::read_to_string(&said).expect("read what it said");
    let mut kitchen = Client::connect(server.ports.tcp, Protocol::V5, "kitchen");
    until(|| {
        assert!(program.try_wait().expect("its status").is_none(), "it has ended: {}", said());
        said().contains("consuming")
    });
    for number in 0..20 {
        kitchen.publish_acked("sensors/kitchen/temperature", format!("{number}.5").as_bytes(), false);
    }
    until(|| said().matches("\nkitchen sensors/kitchen/temperature ").count() == 20);
    // Its own messages came back to the program, too.
    until(|| said().contains("\n sensors/attic/humidity 40\n"));
    let ended = Command::new("kill").args(["-INT", &program.id().to_string()]).status().expect("run kill");
    assert!(ended.success() && program.wait().expect("its end").success(), "{}", said());
    assert!(said().ends_with("\n21 acknowledged, 0 given back\n"), "{}", said());
}

/// Packs a library as it would be published, installs it into an environment that has nothing of this checkout, and runs an
/// example there: clients/testing/published.sh.
fn published(language: &str, tools: &[&str]) {
    for tool in tools {
        if *tool == "go" && !go_with_modules() || !need(tool, on_path(tool)) {
            return;
        }
    }
    let python = python_with_packages();
    if !need("the Python environment .venv", python.is_some())
        || !need("mosquitto_sub", on_path("mosquitto_sub"))
    {
        return;
    }
    let server = Server::start();
    // Somebody acknowledges what the examples publish. There is no lamp, whom some of them ask: they say so, and go on.
    let port = server.ports.tcp.to_string();
    let mut reader = Command::new("mosquitto_sub")
        .args(["-h", "127.0.0.1", "-p", &port, "-i", "reader", "-q", "1", "-t", "lamp/switch"])
        .stdout(Stdio::null())
        .spawn()
        .expect("start mosquitto_sub");
    until(|| server.metric("mqtt_subscriptions") == 1);
    let (success, output) = run(
        Command::new(root().join("clients/testing/published.sh"))
            .arg(language)
            .arg(server.dir().join("published"))
            .env("PYTHON", python.unwrap_or_default())
            .env("GATEWAY_ADDRESS", format!("localhost:{}", server.ports.grpc))
            .env("GATEWAY_CA", server.ca())
            .current_dir(root()),
        LIMIT,
    );
    let _ = reader.kill();
    let _ = reader.wait();
    eprintln!("{output}");
    assert!(success, "its output is above");
    assert!(output.contains("ACKED"), "the example, from what was installed: {output}");
}

#[test]
fn python_client_works_where_only_its_wheel_is_installed() {
    published("python", &[]);
}

#[test]
fn typescript_client_works_where_only_its_package_is_installed() {
    let installed = root().join("clients/typescript/node_modules/typescript").is_dir();
    if need("clients/typescript/node_modules", installed) {
        published("typescript", &["npm"]);
    }
}

/// With the path that `rename.sh` gives it, from a module's zip: what `go get` would have.
#[test]
fn go_client_works_where_only_its_module_is_downloaded() {
    published("go", &["go"]);
}

/// The two crates as cargo packs them: the protos are in one, and the other needs nothing of this workspace.
#[test]
fn rust_client_compiles_where_only_its_crates_are_unpacked() {
    let dir = tempfile::tempdir().expect("make a directory");
    let mut command = Command::new(root().join("clients/testing/published.sh"));
    command.arg("rust").arg(dir.path().join("published")).current_dir(root());
    // The needs of the client are checked, the first time.
    let (success, output) = run(&mut command, LIMIT * 4);
    assert!(success, "{output}");
}

/// A reason that a library does not know is told as unknown.
#[test]
fn each_client_library_knows_every_reason() {
    let files = [
        "python/src/mqtt_gateway/errors.py",
        "go/errors.go",
        "typescript/src/errors.ts",
        "rust/src/error.rs",
    ];
    for file in files {
        let path = root().join("clients").join(file);
        let text = fs::read_to_string(&path).expect("read the library's errors");
        for reason in reasons() {
            assert!(text.contains(&format!("\"{reason}\"")), "{file} does not know {reason}");
        }
    }
}
