//! Start of the command, or its refusal: the listeners and the text of `--dev`, exit codes, and the names in messages.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, ChildStdout, Command, Output, Stdio},
};

fn command(dir: &Path) -> Command {
    let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// Runs the command to its end with this configuration.
fn run(toml: &str, args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("make a directory");
    fs::write(dir.path().join("test.toml"), toml).expect("write the configuration");
    command(dir.path()).args(["--config", "test.toml"]).args(args).output().expect("run mqtt-server")
}

fn held_port() -> (TcpListener, SocketAddr) {
    let held = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("hold a port");
    let address = held.local_addr().expect("address of a bound listener");
    (held, address)
}

/// A gateway in development mode on free ports; killed on drop.
struct Dev {
    child: Child,
    stdout: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
}

impl Dev {
    /// Starts it; the text is what it says up to the last line of its welcome.
    fn start(toml: &str) -> (Self, String) {
        let dir = tempfile::tempdir().expect("make a directory");
        fs::write(dir.path().join("test.toml"), toml).expect("write the configuration");
        let log = fs::File::create(dir.path().join("log")).expect("create the log");
        let mut child = command(dir.path())
            .args(["--dev", "--config", "test.toml"])
            .args(["--addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("start mqtt-server");
        let stdout = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        let mut dev = Self { child, stdout, dir };
        let mut text = String::new();
        while !text.contains("Ctrl-C") {
            let read = dev.stdout.read_line(&mut text).expect("read its output");
            assert!(read > 0, "it ended:\n{text}{}", dev.log());
        }
        (dev, text)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).expect("read the log")
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Names and addresses of the welcome.
fn addresses(text: &str) -> Vec<(&str, SocketAddr)> {
    let pair = |line: &'_ str| -> Option<(usize, SocketAddr)> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, address] = words[..] else { return None };
        Some((0, address.parse().ok()?))
    };
    text.lines().filter_map(|line| Some((line.split_whitespace().next()?, pair(line)?.1))).collect()
}

#[test]
fn dev_makes_certificates_listens_and_says_what_to_try() {
    // Held by this test or by somebody else: either way the fixed ports of --dev are in use.
    let _held: Vec<_> = [1883, 8083].map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port))).into();
    let (mut dev, text) = Dev::start("");
    let found = addresses(&text);
    let names: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["default", "grpc", "http"], "{text}");
    for (name, address) in &found {
        assert!(TcpStream::connect(address).is_ok(), "{name} on {address}");
    }
    let tls = found[0].1.port();
    for part in [
        format!("mosquitto_sub --cafile certs/ca.crt -h localhost -p {tls} "),
        format!("mosquitto_pub --cafile certs/ca.crt -h localhost -p {tls} "),
        format!("mqtt-server ctl --addr https://localhost:{} latest get", found[1].1.port()),
    ] {
        assert!(text.contains(&part), "{part} in {text}");
    }
    for file in ["ca.crt", "server.crt", "server.key"] {
        assert!(dev.dir.path().join("certs").join(file).exists(), "{file}");
    }
    for name in ["dev-tcp", "dev-ws"] {
        let left_out = |line: &str| line.contains(name) && line.contains("left out");
        assert!(dev.log().lines().any(left_out), "{name}: {}", dev.log());
    }
    let killed = Command::new("kill").arg("-TERM").arg(dev.child.id().to_string()).status();
    assert!(killed.expect("run kill").success());
    assert_eq!(dev.child.wait().expect("wait for its end").code(), Some(0));
}

#[test]
fn dev_adds_no_listener_to_those_that_are_configured() {
    let own = "[[listeners]]\nname = \"own\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\n";
    let (dev, text) = Dev::start(own);
    let names: Vec<&str> = addresses(&text).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["default", "own", "grpc", "http"], "{text}");
    assert!(!dev.log().contains("left out"), "{}", dev.log());
}

const PLAIN: &str = "non_tls = true\ninsecure_grpc = true\ngrpc.tls = false\nhttp.enabled = false\n";

#[test]
fn bad_configuration_exits_2_and_names_key_value_and_fix() {
    for (toml, key, value, fix) in [
        ("limits.max_qos = 7", "limits.max_qos", "7", "use 0, 1 or 2"),
        ("limits.max_qosx = 1", "max_qosx", "", "max_qos"),
        ("addr = \"nowhere\"", "addr", "nowhere", "ip:port"),
        ("shards = \"many\"", "shards", "many", ""),
        ("grpc_addr = \"0.0.0.0:1\"", "grpc_addr", "0.0.0.0:1", "--insecure-grpc"),
        ("cert = \"absent.crt\"", "absent.crt", "absent.crt", "--dev"),
    ] {
        for args in [&[][..], &["--check"]] {
            let plain = if toml.starts_with("limits") || toml.starts_with("shards") { PLAIN } else { "" };
            let output = run(&format!("{plain}{toml}\n"), args);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{toml}: {said}");
            for part in [key, value, fix] {
                assert!(said.contains(part), "{part:?} for {toml}: {said}");
            }
        }
    }
}

/// The failure: nobody knows before the machine is out of memory what a configuration may take.
#[test]
fn a_good_configuration_is_told_with_the_memory_it_can_reach() {
    let output =
        run(&format!("{PLAIN}[limits]\nmemory_budget = \"192 MiB\"\nmax_connections = 2048\n"), &["--check"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&output.stderr));
    for part in ["configuration is valid", "at most 192 MiB (limits.memory_budget)", "up to 10 MiB for 2048"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// Each with the cause and the remedy on one line, which begins with the program's name and not like a line of the log.
#[test]
fn what_keeps_it_from_starting_is_told_on_one_line_with_the_remedy() {
    let dir = tempfile::tempdir().expect("make a directory");
    fs::write(dir.path().join("occupied"), "").expect("write a file");
    let (_held, address) = held_port();
    let held = address.to_string();
    let free = ["--http-addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0"];
    for (code, args, parts) in [
        (2, &["--adr", "x"][..], ["'--adr'", "'--addr'"]),
        (2, &["--addr", "127.0.0.1:70000"], ["no port 70000", "0 to 65535"]),
        (2, &["--non-tls", "--db-addr", "http://db:9042"], ["is a URL", "without http://"]),
        (2, &["--cert", "absent.crt", "--key", "absent.key"], ["absent.crt", "--cert certs/server.crt"]),
        (1, &["--non-tls", "--addr", "127.0.0.1:0", "--data-dir", "occupied"], ["is a file", "--data-dir"]),
        (
            1,
            &["--non-tls", "--addr", "127.0.0.1:0", "--data-dir", "occupied/in"],
            ["is a file", "--data-dir"],
        ),
        (1, &["--non-tls", "--addr", &held], ["addr = ", "choose another address"]),
    ] {
        for form in ["human", "json"] {
            let mut command = command(dir.path());
            let output = command.args(args).args(free).args(["--log-format", form]).output().expect("run it");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
            let last = said.lines().last().unwrap_or_default();
            assert!(last.starts_with("mqtt-server: "), "{args:?}: {said}");
            assert_eq!(said.matches("mqtt-server: ").count(), 1, "{args:?}: {said}");
            assert!(parts.iter().all(|part| last.contains(part)), "{args:?}: {said}");
        }
    }
}

/// The two lines of a first try without certificates, and the one that the certificates of `--dev` are for.
#[test]
fn plaintext_needs_no_certificate_and_dev_makes_the_flags_files() {
    let free = ["--addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"];
    let dir = tempfile::tempdir().expect("make a directory");
    for args in [&["--non-tls"][..], &["--non-tls", "--insecure-grpc"]] {
        let log = dir.path().join("log");
        let file = fs::File::create(&log).expect("create the log");
        let child = command(dir.path())
            .args(args)
            .args(free)
            .args(["--log-format", "json"])
            .stdout(Stdio::null())
            .stderr(file)
            .spawn();
        let mut child = child.expect("start mqtt-server");
        let read = || fs::read_to_string(&log).expect("read the log");
        crate::support::until(|| {
            assert_eq!(child.try_wait().expect("ask for its status"), None, "it ended: {}", read());
            crate::support::logged_port(&read(), "http").is_some()
        });
        let _ = child.kill();
        let _ = child.wait();
        let told =
            read().lines().filter(|line| line.contains("gRPC on") && line.contains("plaintext")).count();
        assert_eq!(told, 1, "{}", read());
    }
    let (dev, _) = Dev::start("");
    let card = ["--cert", "certs/server.crt", "--key", "certs/server.key", "--check"];
    let output = command(dev.dir.path()).args(card).output().expect("run it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn unknown_flag_and_missing_file_exit_2() {
    for args in [&["--no-such-flag"][..], &["--config", "absent.toml"]] {
        let dir = tempfile::tempdir().expect("make a directory");
        let output = command(dir.path()).args(args).output().expect("run mqtt-server");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(args[args.len() - 1]), "{said}");
    }
}

#[test]
fn check_exits_0_for_a_good_configuration_and_opens_nothing() {
    let (_held, address) = held_port();
    let output = run(&format!("{PLAIN}addr = \"{address}\"\n"), &["--check"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("valid"));
}

#[test]
fn occupied_port_exits_1_and_names_key_address_and_fix() {
    let (_held, address) = held_port();
    for (key, toml) in [
        ("addr", format!("{PLAIN}addr = \"{address}\"\n")),
        ("grpc_addr", format!("{PLAIN}addr = \"127.0.0.1:0\"\ngrpc_addr = \"{address}\"\n")),
        (
            "listeners[0].address",
            format!(
                "{PLAIN}addr = \"\"\n[[listeners]]\nname = \"a\"\nkind = \"tcp\"\naddress = \"{address}\"\n"
            ),
        ),
    ] {
        let output = run(&toml, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        for part in [format!("{key} = {address}"), "choose another address".to_owned()] {
            assert!(said.contains(&part), "{part} in {said}");
        }
    }
}

#[test]
fn help_is_grouped_and_version_names_the_commit_of_a_release() {
    let say = |flag| {
        let output = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server")).arg(flag).output();
        String::from_utf8(output.expect("run mqtt-server").stdout).expect("it speaks UTF-8")
    };
    let help = say("--help");
    let groups = ["Devices:", "Backends and operators:", "Storage:", "Running:", "Logs:"];
    let at = groups.map(|group| help.find(group).unwrap_or_else(|| panic!("{group} in {help}")));
    assert!(at.is_sorted(), "{help}");

    let version = say("--version");
    assert!(version.starts_with(concat!("mqtt-server ", env!("CARGO_PKG_VERSION"))), "{version}");
    assert!(version.contains(option_env!("GIT_COMMIT").unwrap_or_default()), "{version}");
}
