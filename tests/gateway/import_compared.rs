//! Admission and rights under a real Mosquitto and after an import of its files: the same clients under both.
//!
//! The files in `import/` have the traits of those that guides show. The first lines of each say where clients try, and
//! what the import makes of it: the same as Mosquitto, fewer, or nothing that anybody gets in by. More is never right.

use std::{
    fs,
    net::TcpStream,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::Duration,
};

use codec::Packet;
use gateway_core::{Protocol, QoS};

use crate::{
    client::{Client, Got, WAIT, hello, message},
    support::{self, certificates, command, local, logged_port, need, on_path, root, run, until},
};

const FILES: &str = "tests/gateway/import";
/// Fixtures that are tried at the same time.
const AT_ONCE: usize = 3;

/// Address that clients connect to.
#[derive(Clone, Copy, PartialEq)]
enum Door {
    Tcp(u16),
    Tls(u16),
    Unix,
}

/// A client: its name, user and password, and whether it shows a certificate.
type Visitor = (&'static str, Option<(&'static str, &'static str)>, bool);

const VISITORS: [Visitor; 6] = [
    ("nobody", None, false),
    ("anna", Some(("anna", "one")), false),
    ("anna with a wrong password", Some(("anna", "two")), false),
    ("bob", Some(("bob", "b")), false),
    ("a certificate", None, true),
    ("a certificate and a wrong password", Some(("anna", "two")), true),
];

struct Running(Child);

impl Running {
    fn has_ended(&mut self) -> bool {
        self.0.try_wait().expect("ask for the status").is_some()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The broker; none, said loudly, if it is missing and may be.
fn mosquitto() -> Option<PathBuf> {
    // Debian puts it where not everybody's PATH leads.
    let placed = PathBuf::from("/usr/sbin/mosquitto");
    let found = if placed.exists() { placed } else { PathBuf::from("mosquitto") };
    let there = (found.is_absolute() || on_path("mosquitto")) && on_path("mosquitto_pub");
    need("mosquitto or mosquitto_pub", there).then_some(found)
}

fn started(program: &mut Command, dir: &Path, log: &str) -> Running {
    let log = fs::File::create(dir.join(log)).expect("make a log");
    let child = program.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
    Running(child.expect("start a broker"))
}

fn import(dir: &Path, conf: &str) -> Output {
    let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
    command
        .args(["import", conf, "--output", "gateway.toml"])
        .current_dir(dir)
        .output()
        .expect("run the import")
}

/// The gateway with what the import has made; none if it does not start with it.
fn gateway(dir: &Path) -> Option<Running> {
    let config = fs::read_to_string(dir.join("gateway.toml")).expect("read what was made");
    let mut program = command(env!("CARGO_BIN_EXE_mqtt-server"));
    program.args(["--config", "gateway.toml", "--data-dir", "made"]);
    program.args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
    if config.contains("addr = \"127.0.0.1:1883\"") {
        program.args(["--addr", "127.0.0.1:0"]);
    }
    let mut gateway = started(&mut program, dir, "gateway.log");
    let log = || fs::read_to_string(dir.join("gateway.log")).unwrap_or_default();
    let mut ready = false;
    until(|| {
        ready = logged_port(&log(), "http").is_some() && logged_port(&log(), "grpc").is_some();
        ready || gateway.has_ended()
    });
    ready.then_some(gateway)
}

/// An authority, a server's certificate and that of a client with the common name anna.
fn pki(dir: &Path) {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    // A server of the same names first, for the modes of the files.
    certificates(dir);
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.distinguished_name.push(DnType::CommonName, "an authority");
    let ca_key = KeyPair::generate().expect("generate a key");
    let ca_cert = ca.self_signed(&ca_key).expect("sign the authority");
    let issuer = Issuer::new(ca, ca_key);
    for (name, usage) in
        [("localhost", ExtendedKeyUsagePurpose::ServerAuth), ("anna", ExtendedKeyUsagePurpose::ClientAuth)]
    {
        let mut leaf = CertificateParams::new([name.to_owned()]).expect("a name");
        leaf.distinguished_name.push(DnType::CommonName, name);
        leaf.extended_key_usages = vec![usage];
        leaf.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().expect("generate a key");
        let cert = leaf.signed_by(&key, &issuer).expect("sign a certificate");
        let file = if name == "localhost" { "server" } else { name };
        // Written into files that are there, the key keeps its mode.
        fs::write(dir.join(format!("{file}.crt")), cert.pem()).expect("write a certificate");
        fs::write(dir.join(format!("{file}.key")), key.serialize_pem()).expect("write a key");
    }
    fs::write(dir.join("ca.crt"), ca_cert.pem()).expect("write the authority");
}

/// The value of a line `# KEY: VALUE` at the top of a fixture.
fn said<'t>(text: &'t str, key: &str) -> &'t str {
    let begin = format!("# {key}: ");
    text.lines().find_map(|line| line.strip_prefix(&begin)).map(str::trim).unwrap_or_default()
}

fn fixtures(folder: &str) -> Vec<(String, String)> {
    let entries = fs::read_dir(root().join(FILES).join(folder)).expect("list the fixtures");
    let files = entries.map(|entry| entry.expect("a file").path()).filter(|path| path.is_file());
    let mut found: Vec<(String, String)> = files
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, fs::read_to_string(path).expect("read a fixture"))
        })
        .collect();
    found.sort();
    found
}

/// Tries the fixtures, some at a time, and gathers what is wrong.
fn each(fixtures: &[(String, String)], wrong: impl Fn(&str, &str) -> Vec<String> + Sync) {
    let mut found = Vec::new();
    let wrong = &wrong;
    for some in fixtures.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let runs: Vec<_> =
                some.iter().map(|(name, text)| scope.spawn(move || wrong(name, text))).collect();
            for ((name, _), run) in some.iter().zip(runs) {
                let problems = run.join().unwrap_or_else(|_| vec!["a panic".to_owned()]);
                found.extend(problems.into_iter().map(|problem| format!("{name}: {problem}")));
            }
        });
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// Makes a directory with the files that a fixture needs beside its configuration.
fn furnished() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path();
    let password = |name: &str| {
        let text = fs::read_to_string(root().join(FILES).join("passwords").join(name));
        text.expect("read a fixture of passwords")
    };
    let plain = password("plain.passwd");
    let anna: String =
        plain.lines().filter(|line| line.starts_with("anna:")).map(|line| format!("{line}\n")).collect();
    let bob = plain.lines().find(|line| line.starts_with("bob:")).expect("bob");
    fs::write(path.join("passwd"), &anna).expect("write the users");
    fs::write(path.join("mixed"), format!("{anna}{bob}\n{bob}\nold:$6$c2FsdA==$aGFzaA==\nnobody\n"))
        .expect("write the users");
    fs::write(path.join("acl"), "user anna\ntopic readwrite home/#\n").expect("write the rules");
    fs::write(path.join("psk"), "device:0123456789abcdef\n").expect("write the keys");
    for folder in ["conf.d", "data", "certs"] {
        fs::create_dir(path.join(folder)).expect("make a folder");
    }
    pki(&path.join("certs"));
    dir
}

/// `in`, `in, denied` or `out`.
fn visit(dir: &Path, door: Door, (_, user, certificate): Visitor) -> &'static str {
    let mut client = Command::new("mosquitto_pub");
    client.args(["-V", "5", "-q", "1", "-i", "dev-1", "-t", "home/x", "-m", "x"]).current_dir(dir);
    match door {
        Door::Unix => client.args(["--unix", "m.sock"]),
        Door::Tcp(port) => client.args(["-h", "127.0.0.1", "-p", &port.to_string()]),
        Door::Tls(port) => {
            client.args(["-h", "localhost", "--cafile", "certs/ca.crt", "-p", &port.to_string()])
        }
    };
    if let Some((user, password)) = user {
        client.args(["-u", user, "-P", password]);
    }
    if certificate {
        client.args(["--cert", "certs/anna.crt", "--key", "certs/anna.key"]);
    }
    match run(&mut client, Duration::from_secs(60)) {
        (false, _) => "out",
        (true, told) if told.contains("Not authorized") => "in, denied",
        (true, _) => "in",
    }
}

fn visits(dir: &Path, doors: &[Door]) -> Vec<(String, &'static str)> {
    let all = doors.iter().enumerate().flat_map(|(number, door)| {
        let visitors = VISITORS
            .into_iter()
            .filter(move |(_, _, certificate)| !certificate || matches!(door, Door::Tls(_)));
        visitors.map(move |visitor| (number, *door, visitor))
    });
    all.map(|(number, door, visitor)| {
        (format!("{} at door {}", visitor.0, number + 1), visit(dir, door, visitor))
    })
    .collect()
}

/// Returns the faults of our decisions beside theirs, each a list of clients and decisions.
fn beside(becomes: &str, ours: &[(String, &'static str)], theirs: &[(String, &'static str)]) -> Vec<String> {
    let less = |ours: &str, theirs: &str| {
        ours == theirs || ours == "out" || ours == "no" || (ours == "in, denied" && theirs == "in")
    };
    let mut wrong = Vec::new();
    for ((who, ours), (_, theirs)) in ours.iter().zip(theirs) {
        let right = match becomes {
            "same" => ours == theirs,
            "fewer" => less(ours, theirs),
            "closed" => *ours == "out",
            other => panic!("'{other}' is nothing that an import becomes"),
        };
        if !right {
            wrong.push(format!("{who}: {ours}, with Mosquitto {theirs}"));
        }
    }
    if becomes == "fewer" && ours == theirs {
        wrong.push("the same as with Mosquitto, and not fewer".to_owned());
    }
    wrong
}

/// The failure: a comment after `require_certificate true`, a capital, a tab or an option that could not be carried
/// over opened the listener to those whom Mosquitto had kept out.
#[test]
fn nobody_gets_in_whom_mosquitto_kept_out() {
    let Some(broker) = mosquitto() else { return };
    let files = fixtures("compared");
    assert!(files.len() >= 20, "only {} configurations", files.len());
    each(&files, |_, template| {
        let dir = furnished();
        let path = dir.path();
        let first = support::ports::free_ports(2);
        let filled =
            |text: &str| text.replace("{a}", &first.to_string()).replace("{b}", &(first + 1).to_string());
        let text = filled(template);
        let doors: Vec<Door> = said(&text, "doors")
            .split(' ')
            .map(|door| match door.split_once('=') {
                Some(("tcp", port)) => Door::Tcp(port.parse().expect("a port")),
                Some(("tls", port)) => Door::Tls(port.parse().expect("a port")),
                _ => Door::Unix,
            })
            .collect();
        // As root it would give up its rights, and could not read the files.
        fs::write(path.join("m.conf"), format!("user root\n{text}")).expect("write the configuration");
        for (name, text) in fixtures("compared/conf.d") {
            fs::write(path.join("conf.d").join(name), filled(&text)).expect("write a configuration");
        }
        let mut mosquitto = started(Command::new(&broker).args(["-c", "m.conf"]), path, "mosquitto.log");
        let open = |door: &Door| match door {
            Door::Tcp(port) | Door::Tls(port) => TcpStream::connect(local(*port)).is_ok(),
            Door::Unix => UnixStream::connect(path.join("m.sock")).is_ok(),
        };
        until(|| mosquitto.has_ended() || doors.iter().all(open));
        let theirs = visits(path, &doors);
        drop(mosquitto);
        let _ = fs::remove_file(path.join("m.sock"));

        let output = import(path, "m.conf");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let made = path.join("gateway.toml").exists();
        if !made {
            return vec![format!("nothing was made: {told}")];
        }
        let gateway = gateway(path);
        let mut wrong = beside(said(&text, "becomes"), &visits(path, &doors), &theirs);
        if gateway.is_none() && theirs.iter().any(|(_, result)| *result != "out") {
            wrong.push("the gateway does not start with what was made".to_owned());
        }
        if said(&text, "becomes") != "same" && (output.status.success() || !told.contains("warning: ")) {
            wrong.push("no warning".to_owned());
        }
        if !wrong.is_empty() {
            wrong.push(told);
        }
        wrong
    });
}

/// The failure: one line of a password file that the gateway does not take kept it from starting, for everybody.
#[test]
fn a_line_that_cannot_be_used_keeps_out_its_user_only() {
    let Some(broker) = mosquitto() else { return };
    let files = fixtures("passwords");
    assert!(files.len() >= 10, "only {} password files", files.len());
    let users = [("anna", "one"), ("bob", "b"), ("old", "two"), ("carol", "secret")];
    each(&files, |_, text| {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path();
        fs::write(path.join("m.conf"), "user root\nlistener 0 m.sock\npassword_file users\n")
            .expect("write the configuration");
        fs::write(path.join("users"), text).expect("write the users");
        let let_in = || {
            let found = users.into_iter().filter(|(user, password)| {
                visit(path, Door::Unix, ("", Some((*user, *password)), false)) != "out"
            });
            found.map(|(user, _)| user).collect::<Vec<_>>()
        };
        let theirs = {
            let _mosquitto = started(Command::new(&broker).args(["-c", "m.conf"]), path, "mosquitto.log");
            until(|| UnixStream::connect(path.join("m.sock")).is_ok());
            let_in()
        };
        let _ = fs::remove_file(path.join("m.sock"));
        let output = import(path, "m.conf");
        let Some(_gateway) = gateway(path) else { return vec!["the gateway does not start".to_owned()] };
        let ours = let_in();
        let mut wrong = Vec::new();
        if ours.join(" ") != said(text, "in") {
            wrong.push(format!("{ours:?} get in: {}", String::from_utf8_lossy(&output.stderr)));
        }
        wrong.extend(
            ours.iter().filter(|user| !theirs.contains(user)).map(|user| format!("{user} was out before")),
        );
        wrong
    });
}

/// Topics that are published to, and read.
const TOPICS: [&str; 16] = [
    "home/x",
    "home/secret/x",
    "lab/x",
    "lab/deep/x",
    "news",
    "public/x",
    "dev/r-anna/x",
    "dev/w-anna/x",
    "u/anna/x",
    "u/bob/x",
    "d-w-anna/x",
    "d-w-anna/secret",
    "100%/x",
    "a b/c",
    "deny",
    "x",
];
/// Topic that everybody may read, after all others.
const LAST: &str = "zz/end";

fn unix_client(path: &Path, id: &str, user: &str) -> Client<UnixStream> {
    let stream = UnixStream::connect(path.join("m.sock")).expect("connect");
    stream.set_read_timeout(Some(WAIT)).expect("set a timeout");
    let mut client = Client::on(stream, Protocol::V5);
    let mut connect = hello(Protocol::V5, &format!("{id}-{user}"));
    if !user.is_empty() {
        let password = users().into_iter().find(|(name, _)| *name == user).map(|(_, password)| password);
        connect.username = Some(user.to_owned());
        connect.password = password.map(|password| password.into());
    }
    client.send(&Packet::Connect(Box::new(connect)));
    assert_eq!(client.next(), Got::ConnAck(0), "{user}");
    client
}

fn users() -> [(&'static str, &'static str); 3] {
    [("anna", "one"), ("bob", "b"), ("admin", "one")]
}

/// Returns the rights of each client: the topics it may publish to, and the messages it gets.
fn rights(path: &Path) -> Vec<(String, &'static str)> {
    let mut found = Vec::new();
    let mut readers: Vec<_> = ["anna", "bob", ""].map(|user| (user, unix_client(path, "r", user))).into();
    for (_, reader) in &mut readers {
        reader.subscribe("#");
    }
    let publish = |client: &mut Client<UnixStream>, topic: &str, payload: &[u8]| {
        client.send(&message(topic, payload, QoS::AtLeastOnce, false));
        matches!(client.next(), Got::PubAck(code) if code < 0x80)
    };
    for user in ["anna", "bob", ""] {
        let mut writer = unix_client(path, "w", user);
        for topic in TOPICS {
            let result = if publish(&mut writer, topic, b"theirs") { "yes" } else { "no" };
            found.push((format!("'{user}' publishes {topic}"), result));
        }
    }
    let mut admin = unix_client(path, "w", "admin");
    for topic in TOPICS {
        publish(&mut admin, topic, b"ours");
    }
    let ends = publish(&mut admin, LAST, b"ours");
    for (user, mut reader) in readers {
        let mut got = Vec::new();
        // Without the last message there is no end to wait for.
        if ends {
            loop {
                match reader.next() {
                    Got::Publish(topic, _) if topic == LAST => break,
                    Got::Publish(topic, payload) if payload == b"ours" => got.push(topic),
                    Got::Publish(..) => {}
                    other => panic!("{other:?} for '{user}'"),
                }
            }
        }
        for topic in TOPICS {
            let result = if got.iter().any(|known| known == topic) { "yes" } else { "no" };
            found.push((format!("'{user}' reads {topic}"), result));
        }
    }
    found
}

/// The failure: a line that denies was left out because of a comment, a capital or a tab, and what it kept shut was open.
#[test]
fn nobody_may_do_what_the_acl_file_kept_from_them() {
    let Some(broker) = mosquitto() else { return };
    let files = fixtures("acls");
    assert!(files.len() >= 10, "only {} ACL files", files.len());
    let plain =
        fs::read_to_string(root().join(FILES).join("passwords/plain.passwd")).expect("read the users");
    let anna = plain.lines().find_map(|line| line.strip_prefix("anna:")).expect("anna");
    each(&files, |_, text| {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path();
        let conf = "user root\nlistener 0 m.sock\nallow_anonymous true\npassword_file users\nacl_file acl\n";
        fs::write(path.join("m.conf"), conf).expect("write the configuration");
        fs::write(path.join("users"), format!("{plain}admin:{anna}\n")).expect("write the users");
        let more = format!(
            "\nuser anna\ntopic read {LAST}\nuser bob\ntopic read {LAST}\nuser admin\ntopic readwrite #\n"
        );
        fs::write(path.join("acl"), format!("topic read {LAST}\n{text}{more}")).expect("write the rules");
        let theirs = {
            let mut mosquitto = started(Command::new(&broker).args(["-c", "m.conf"]), path, "mosquitto.log");
            until(|| mosquitto.has_ended() || UnixStream::connect(path.join("m.sock")).is_ok());
            (!mosquitto.has_ended()).then(|| rights(path))
        };
        let _ = fs::remove_file(path.join("m.sock"));
        let output = import(path, "m.conf");
        let Some(_gateway) = gateway(path) else { return vec!["the gateway does not start".to_owned()] };
        let ours = rights(path);
        // A Mosquitto that does not start lets nobody do anything.
        let theirs = theirs.unwrap_or_else(|| ours.iter().map(|(what, _)| (what.clone(), "no")).collect());
        let mut wrong = beside(said(text, "becomes"), &ours, &theirs);
        if !wrong.is_empty() {
            wrong.push(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        wrong
    });
}
