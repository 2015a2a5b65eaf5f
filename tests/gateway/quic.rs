//! MQTT over QUIC: paho-mqtt and bytes by hand over aioquic (tests/interop), against the real binary.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use crate::support::{Server, need, python, root, run, until};

const LIMIT: Duration = Duration::from_secs(300);

const LISTENER: &str = "[[listeners]]\nname = \"quic\"\naddress = \"127.0.0.1:0\"\nkind = \"quic\"";

/// A server that also speaks QUIC, with `toml` before its listeners.
fn server(toml: &str) -> Server {
    Server::start_with(&[], &format!("{toml}\n{LISTENER}"))
}

/// A Python command that knows the server; none if there is no Python with aioquic.
fn script(server: &Server, arguments: &[&str]) -> Option<Command> {
    let python = python();
    if !need("the Python environment .venv", python.is_some()) {
        return None;
    }
    let mut command = Command::new(python.unwrap_or_default());
    command.args(arguments).current_dir(root().join("tests/interop")).envs(server.script_env());
    command.env("GW_QUIC", server.port("quic").to_string()).env("PYTHONDONTWRITEBYTECODE", "1");
    Some(command)
}

fn succeeds(server: &Server, arguments: &[&str]) {
    let Some(mut command) = script(server, arguments) else { return };
    let (success, output) = run(&mut command, LIMIT);
    eprintln!("{output}");
    assert!(success, "{command:?} failed; its output is above");
    let log = server.log();
    let errors: Vec<&str> =
        log.lines().filter(|line| line.contains("ERROR") || line.contains("panicked")).collect();
    assert!(errors.is_empty(), "the server logged errors: {errors:#?}");
}

#[test]
fn paho_over_quic() {
    let mut server = server("");
    succeeds(&server, &["-m", "pytest", "test_transports.py", "-k", "quic"]);
    assert_eq!(server.metric("mqtt_connections"), 0);
    // The memory set aside for connections is given back, once the last of them has been waited for.
    until(|| server.metric_of("gateway_memory_bytes", "kind=\"quic\"") == 0);
    assert!(server.stop(), "the server did not stop cleanly after SIGTERM");
}

#[test]
fn quic_clients_that_keep_to_no_limit_end_only_their_own_connection() {
    let limits = "[limits]\nconnect_timeout = \"5s\"\nwrite_timeout = \"2s\"\nmax_handshakes = 20";
    let server = server(limits);
    succeeds(
        &server,
        &["-m", "pytest", "test_quic.py", "-k", "not half_handshakes and not another_address_if"],
    );
}

#[test]
fn a_quic_client_goes_on_from_another_address_if_that_is_on() {
    let server = server("[quic]\nmigration = true");
    succeeds(&server, &["-m", "pytest", "test_quic.py", "-k", "another_address_if"]);
}

#[test]
fn half_handshakes_over_quic_keep_nobody_out_and_must_retry() {
    let limits = "[limits]\nconnect_timeout = \"30s\"\nmax_handshakes = 20";
    let server = server(limits);
    let Some(mut command) = script(&server, &["-m", "pytest", "test_quic.py", "-k", "half_handshakes"])
    else {
        return;
    };
    let (success, output) = run(command.env("GW_HANDSHAKES", "20"), LIMIT);
    assert!(success, "{output}");
    assert!(server.metric("mqtt_quic_retries_total") > 0, "nobody had to prove its address");
}

#[test]
fn a_session_over_quic_survives_a_kill() {
    let before = server("");
    succeeds(&before, &["-c", "import test_quic; test_quic.session_begins()"]);
    let after = before.kill_and_restart(&[], LISTENER);
    succeeds(&after, &["-c", "import test_quic; test_quic.session_resumes()"]);
}

#[test]
fn a_stop_is_told_to_quic_clients_before_their_connection_ends() {
    let mut server = server("");
    let Some(mut command) = script(&server, &["-c", "import test_quic; test_quic.told_of_the_stop()"]) else {
        return;
    };
    let mut client = command.stdout(Stdio::piped()).spawn().expect("start Python");
    let mut line = String::new();
    let output = client.stdout.take().expect("its output");
    BufReader::new(output).read_line(&mut line).expect("read its output");
    assert_eq!(line, "connected\n");
    assert!(server.stop(), "the server did not stop cleanly after SIGTERM");
    assert!(client.wait().expect("wait for Python").success());
}
