//! Logins: the proofs of devices, the answers to refused ones, and the conditions under which a listener opens to other
//! machines.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use bytes::Bytes;
use codec::{Connect, Packet};
use gateway_core::Protocol;

use crate::{
    client::{Client, Got, hello},
    support::{Server, command, need, on_path, until, write_secret},
};

const SECRET: &str = "correct-horse-7";

/// Runs `mqtt-server passwd` with this on standard input.
pub(crate) fn passwd(arguments: &[&str], file: &Path, user: &str, input: &str) -> Output {
    let mut child = command(env!("CARGO_BIN_EXE_mqtt-server"))
        .arg("passwd")
        .args(arguments)
        .arg(file)
        .arg(user)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run mqtt-server passwd");
    let mut stdin = child.stdin.take().expect("a pipe");
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    child.wait_with_output().expect("wait for mqtt-server passwd")
}

pub(crate) fn added(file: &Path, user: &str, password: &str) {
    let output = passwd(&["add"], file, user, &format!("{password}\n"));
    assert!(output.status.success(), "{output:?}");
}

pub(crate) fn login(
    protocol: Protocol,
    client_id: &str,
    user: Option<&str>,
    password: Option<&str>,
) -> Connect {
    Connect {
        username: user.map(str::to_owned),
        password: password.map(|text| Bytes::copy_from_slice(text.as_bytes())),
        ..hello(protocol, client_id)
    }
}

/// Returns the answer to a CONNECT.
pub(crate) fn answer(port: u16, connect: Connect) -> Got {
    let mut client = Client::open(port, connect.protocol);
    client.send(&Packet::Connect(Box::new(connect)));
    client.next()
}

fn config(file: &Path) -> String {
    format!("[auth]\npassword_file = \"{}\"\n", file.display())
}

#[test]
fn passwords_let_in_who_has_one_and_say_to_others_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passwords");
    added(&file, "ann", SECRET);
    let server = Server::start_with(&[], &config(&file));
    let ask = |protocol, user, password| answer(server.ports.tcp, login(protocol, "d1", user, password));
    for (protocol, wrong, nobody) in [(Protocol::V5, 0x86, 0x87), (Protocol::V4, 4, 5), (Protocol::V3, 4, 5)]
    {
        assert_eq!(ask(protocol, Some("ann"), Some(SECRET)), Got::ConnAck(0));
        assert_eq!(ask(protocol, Some("ann"), Some("guess")), Got::ConnAck(wrong));
        assert_eq!(ask(protocol, Some("bob"), Some(SECRET)), Got::ConnAck(wrong));
        assert_eq!(ask(protocol, Some("ann"), None), Got::ConnAck(wrong));
        assert_eq!(ask(protocol, None, None), Got::ConnAck(nobody));
    }
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("mqtt_auth_failures_total{reason=\"credentials\"} 9"), "{page}");
    assert!(page.contains("mqtt_auth_failures_total{reason=\"not_authorized\"} 3"), "{page}");
    let log = server.log();
    assert!(log.contains("bad_user_name_or_password"), "{log}");
    assert!(!log.contains(SECRET) && !log.contains("guess"), "a secret is in the log");
}

#[test]
fn a_changed_password_file_counts_and_a_broken_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passwords");
    added(&file, "ann", SECRET);
    let server = Server::start_with(&[], &config(&file));
    let ask =
        |user, password| answer(server.ports.tcp, login(Protocol::V5, "d1", Some(user), Some(password)));
    let mut stays =
        Client::connect_with(server.ports.tcp, login(Protocol::V5, "s", Some("ann"), Some(SECRET)));
    added(&file, "bob", "b");
    until(|| ask("bob", "b") == Got::ConnAck(0));
    let good = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{good}eve:plain-text\n")).unwrap();
    server.signal("HUP");
    until(|| server.log().contains("line 3: not a hash that is known"));
    assert_eq!(ask("ann", SECRET), Got::ConnAck(0), "the users before are still there");
    assert!(!server.log().contains("plain-text"));
    let output = passwd(&["remove"], &file, "eve", "");
    assert!(output.status.success(), "{output:?}");
    assert!(passwd(&["remove"], &file, "ann", "").status.success());
    until(|| ask("ann", SECRET) == Got::ConnAck(0x86));
    assert_eq!(stays.ping(), [], "who is connected notices nothing");
}

#[test]
fn the_passwd_command_adds_checks_and_removes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passwords");
    added(&file, "ann", SECRET);
    let output = passwd(&["add", "--scram"], &file, "bob", "for scram\n");
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("ann:$argon2id$v=19$m=19456,t=2,p=1$"), "{text}");
    assert!(text.contains("\nbob:SCRAM-SHA-256$4096:"), "{text}");
    for (user, password, code) in
        [("ann", SECRET, 0), ("ann", "x", 1), ("bob", "for scram", 0), ("bob", "x", 1), ("eve", "x", 1)]
    {
        let output = passwd(&["check"], &file, user, password);
        assert_eq!(output.status.code(), Some(code), "{user} {password}: {output:?}");
    }
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(!passwd(&["add"], &file, "a:b", "x").status.success(), "a colon would move the hash");
    assert!(!passwd(&["add"], &file, "ann", "\n").status.success(), "no password");
    assert!(passwd(&["remove"], &file, "ann", "").status.success());
    assert!(!passwd(&["remove"], &file, "ann", "").status.success(), "it is gone");
}

/// The failure: whoever has a password takes over the session of another user, its shadows and its commands.
#[test]
fn a_password_is_good_for_the_client_id_of_its_user_only() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passwords");
    for user in ["boiler", "sensor", "a/+"] {
        added(&file, user, SECRET);
    }
    let toml = format!("{}[auth.password]\nclient_id = \"lab-{{username}}\"\n", config(&file));
    let server = Server::start_with(&[], &toml);
    let connect = |protocol, client_id, user| login(protocol, client_id, Some(user), Some(SECRET));
    let mut boiler = Client::connect_with(server.ports.tcp, connect(Protocol::V5, "lab-boiler", "boiler"));
    for (protocol, code) in [(Protocol::V5, 0x85), (Protocol::V4, 2), (Protocol::V3, 2)] {
        for client_id in ["lab-boiler", "boiler", "lab-sensor1", "lab-{username}", "sensor"] {
            let got = answer(server.ports.tcp, connect(protocol, client_id, "sensor"));
            assert_eq!(got, Got::ConnAck(code), "{protocol:?} {client_id}");
        }
        let guessed = login(protocol, "lab-boiler", Some("sensor"), Some("guess"));
        let wrong = if protocol == Protocol::V5 { 0x86 } else { 4 };
        assert_eq!(
            answer(server.ports.tcp, guessed),
            Got::ConnAck(wrong),
            "only who knows the password is told"
        );
        let own = connect(protocol, "lab-sensor", "sensor");
        assert_eq!(answer(server.ports.tcp, own), Got::ConnAck(0), "{protocol:?}");
        let odd = connect(protocol, "lab-a/+", "a/+");
        assert_eq!(answer(server.ports.tcp, odd), Got::ConnAck(0), "{protocol:?}");
    }
    // An id that the gateway would assign is another one.
    assert_eq!(answer(server.ports.tcp, connect(Protocol::V5, "", "sensor")), Got::ConnAck(0x85));
    assert_eq!(boiler.ping(), [], "its session was not touched");
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("mqtt_auth_failures_total{reason=\"client_id\"} 16"), "{page}");
}

/// Files as `mosquitto_passwd` makes them, and its own client.
#[test]
fn mosquittos_password_files_are_taken_as_they_are() {
    let tools = on_path("mosquitto_passwd") && on_path("mosquitto_pub");
    if !need("mosquitto_passwd and mosquitto_pub", tools) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passwords");
    let made = Command::new("mosquitto_passwd").args(["-c", "-b"]).arg(&file).args(["ann", SECRET]).status();
    assert!(made.expect("run mosquitto_passwd").success());
    assert!(fs::read_to_string(&file).unwrap().starts_with("ann:$7$"));
    let server = Server::start_with(&[], &config(&file));
    let publish = |password: &str| {
        Command::new("mosquitto_pub")
            .args(["-h", "127.0.0.1", "-p", &server.ports.tcp.to_string(), "-t", "t", "-m", "m"])
            .args(["-u", "ann", "-P", password])
            .output()
            .expect("run mosquitto_pub")
    };
    assert!(publish(SECRET).status.success());
    let refused = publish("wrong");
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
}

/// Starts, or says why not; only looks at the configuration.
fn check(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().expect("make a directory");
    let output = command(env!("CARGO_BIN_EXE_mqtt-server"))
        .current_dir(dir.path())
        .args(["--check", "--non-tls"])
        .args(arguments)
        .envs(environment.iter().copied())
        .output()
        .expect("run mqtt-server");
    format!("{:?} {}", output.status.code(), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_listener_that_others_reach_does_not_open_for_whoever_comes() {
    let refused = check(&["--addr", "0.0.0.0:0"], &[]);
    assert!(refused.starts_with("Some(2)"), "{refused}");
    for way in ["auth.password_file", "tls.require_client_cert", "--allow-anonymous"] {
        assert!(refused.contains(way), "{way} is no way out in {refused}");
    }
    for (arguments, environment) in [
        (&["--addr", "0.0.0.0:0", "--allow-anonymous"][..], &[][..]),
        (&["--addr", "0.0.0.0:0"], &[("MQTT_SERVER_AUTH__ALLOW_ANONYMOUS", "true")]),
        (&["--addr", "127.0.0.1:0"], &[]),
        (&["--addr", "[::1]:0"], &[]),
        (&["--addr", "unix:m.sock"], &[]),
    ] {
        let said = check(arguments, environment);
        assert!(said.starts_with("Some(0)"), "{arguments:?}: {said}");
        assert_eq!(said.matches("devices are anonymous").count(), 1, "{arguments:?}: {said}");
    }
}

/// The failures: everybody on the machine reads the secret that all tokens are signed with, or the hashes of all passwords, and
/// nobody is told.
#[test]
fn a_secret_that_others_can_read_is_refused() {
    let dir = tempfile::tempdir().expect("make a directory");
    let (config, secret, users) =
        (dir.path().join("config.toml"), dir.path().join("secret"), dir.path().join("users"));
    let check_with = |text: &str| {
        fs::write(&config, text).expect("write the configuration");
        check(&["--config", &config.display().to_string()], &[])
    };
    fs::write(&secret, "0123456789abcdef0123456789abcdef").expect("write the secret");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).expect("open it");
    let jwt = format!("[auth.jwt]\nsecret_file = {:?}\n", secret.display().to_string());
    let refused = check_with(&jwt);
    for part in ["Some(2)", "auth.jwt.secret_file", "mode 0644", "chmod 600 "] {
        assert!(refused.contains(part), "{part} is not in {refused}");
    }
    let accepted = check_with(&format!("{jwt}[tls]\nopen_key_files = true\n"));
    assert!(accepted.starts_with("Some(0)") && accepted.contains("auth.jwt.secret_file"), "{accepted}");
    write_secret(&secret, "0123456789abcdef0123456789abcdef");
    assert!(check_with(&jwt).starts_with("Some(0)"));
    added(&users, "ann", SECRET);
    let passwords = format!("[auth]\npassword_file = {:?}\n", users.display().to_string());
    let quiet = check_with(&passwords);
    assert!(quiet.starts_with("Some(0)") && !quiet.contains("auth.password_file"), "{quiet}");
    fs::set_permissions(&users, fs::Permissions::from_mode(0o644)).expect("open it");
    let told = check_with(&passwords);
    assert!(
        told.starts_with("Some(0)") && told.contains("auth.password_file: others than its owner"),
        "{told}"
    );
}

/// The failure: a change turns the link into a file, and those who read what it led to never see the change.
#[test]
fn a_password_file_that_is_a_symbolic_link_stays_one() {
    let dir = tempfile::tempdir().expect("make a directory");
    let (file, link) = (dir.path().join("passwords"), dir.path().join("link"));
    added(&file, "ann", SECRET);
    std::os::unix::fs::symlink("passwords", &link).expect("make a link");
    added(&link, "bob", SECRET);
    assert!(passwd(&["remove"], &link, "ann", "").status.success());
    assert!(fs::symlink_metadata(&link).expect("look at it").is_symlink());
    let text = fs::read_to_string(&file).expect("read the file");
    assert!(text.starts_with("bob:$argon2id$") && !text.contains("ann:"), "{text}");
}

/// A token that is signed with `secret`.
pub(crate) fn token(secret: &[u8], claims: &serde_json::Value) -> String {
    let key = jsonwebtoken::EncodingKey::from_secret(secret);
    jsonwebtoken::encode(&jsonwebtoken::Header::default(), claims, &key).expect("sign a token")
}

/// Seconds since 1970, so many from now.
#[expect(clippy::disallowed_methods, reason = "tokens are dated by the wall clock")]
pub(crate) fn seconds_from_now(seconds: i64) -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    i64::try_from(now.as_secs()).expect("a date") + seconds
}

#[test]
fn tokens_let_in_until_they_expire() {
    let dir = tempfile::tempdir().expect("make a directory");
    let file = dir.path().join("secret");
    let secret = b"0123456789abcdef0123456789abcdef";
    write_secret(&file, secret);
    let toml = format!(
        "[auth.jwt]\nsecret_file = \"{}\"\nleeway = \"0s\"\nclient_id = \"device\"\naudience = [\"gw\"]\n",
        file.display()
    );
    let server = Server::start_with(&[], &toml);
    let claims = |seconds, device: &str, audience: &str| serde_json::json!({"sub": "ann", "exp": seconds_from_now(seconds), "device": device, "aud": audience});
    let ask = |client_id: &str, token: &str| {
        answer(server.ports.tcp, login(Protocol::V5, client_id, Some("any"), Some(token)))
    };
    let good = token(secret, &claims(3600, "d1", "gw"));
    assert_eq!(ask("d1", &good), Got::ConnAck(0));
    assert_eq!(ask("d2", &good), Got::ConnAck(0x85));
    assert_eq!(ask("d1", &token(secret, &claims(3600, "d1", "other"))), Got::ConnAck(0x87));
    assert_eq!(ask("d1", &token(secret, &claims(-60, "d1", "gw"))), Got::ConnAck(0x87));
    let forged = token(b"another secret, which nobody here knows", &claims(3600, "d1", "gw"));
    assert_eq!(ask("d1", &forged), Got::ConnAck(0x86));
    assert_eq!(ask("d1", "no token"), Got::ConnAck(0x86));
    let brief = token(secret, &claims(3, "d3", "gw"));
    let mut ends = Client::connect_with(server.ports.tcp, login(Protocol::V5, "d3", None, Some(&brief)));
    let mut stays = Client::connect_with(server.ports.tcp, login(Protocol::V5, "d1", None, Some(&good)));
    assert_eq!(ends.next(), Got::Disconnect(0x87));
    assert_eq!(stays.ping(), []);
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("reason=\"expired\"} 1"), "{page}");
    assert!(!server.log().contains(&good), "a token is in the log");
}
