//! `mqtt-server import`: configurations of Mosquitto as ours, and the same clients under both.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use crate::support::{Server, command, need, on_path, root, until};

/// Directory of fixtures: the files to import, and beside each `NAME.conf` its results: `NAME.toml`, `NAME.rules` and,
/// on standard error, `NAME.told`.
const FILES: &str = "tests/gateway/import";

fn copied() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let status = Command::new("cp")
        .arg("-r")
        .arg(format!("{}/.", root().join(FILES).display()))
        .arg(dir.path())
        .status();
    assert!(status.expect("run cp").success());
    dir
}

fn import(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.arg("import").args(arguments).current_dir(dir).output().expect("run mqtt-server import")
}

/// To make the expected files anew: run it in their folder, look at what changes, and keep what is right.
#[test]
fn a_configuration_of_mosquitto_comes_out_as_it_did() {
    let server = Server::start();
    for (name, code) in [("bridge", 0), ("debian", 0), ("home", 0), ("listeners", 1)] {
        let dir = copied();
        let expected =
            |kind: &str| fs::read_to_string(dir.path().join(format!("{name}.{kind}"))).unwrap_or_default();
        let (toml, told, rules) = (expected("toml"), expected("told"), expected("rules"));
        let output = import(dir.path(), &[&format!("{name}.conf"), "--output", "new/made.toml"]);
        assert_eq!(output.status.code(), Some(1), "there is no folder new");
        fs::create_dir(dir.path().join("new")).expect("make a folder");
        let output = import(
            dir.path(),
            &[&format!("{name}.conf"), "--output", "new/made.toml", "--rules", "made.rules"],
        );
        let read = |path: &str| fs::read_to_string(dir.path().join(path)).unwrap_or_default();
        assert_eq!(read("new/made.toml"), toml, "{name}.toml");
        assert_eq!(read("made.rules"), rules, "{name}.rules");
        assert_eq!(String::from_utf8_lossy(&output.stderr), told, "{name}.told");
        assert_eq!(output.status.code(), Some(code), "{name}");
        let secret = fs::metadata(dir.path().join("bridge-centre.password"));
        assert_eq!(secret.is_ok(), name == "bridge", "a file for the password of a bridge");
        assert!(secret.is_ok_and(|file| file.permissions().mode() & 0o77 == 0) || name != "bridge");
        // On standard output the same, and no file is written.
        let output = import(dir.path(), &[&format!("{name}.conf"), "--rules", "other.rules"]);
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            toml.replace("made.rules", "other.rules"),
            "{name}"
        );
        // An existing file is never written over.
        let again = import(dir.path(), &[&format!("{name}.conf"), "--output", "new/made.toml"]);
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        assert_eq!(read("new/made.toml"), toml, "{name}.toml");

        std::os::unix::fs::symlink(server.dir().join("certs"), dir.path().join("certs"))
            .expect("link certificates");
        let mut check = command(env!("CARGO_BIN_EXE_mqtt-server"));
        check.args(["--check", "--config", "new/made.toml"]).current_dir(dir.path());
        let output = check.output().expect("run mqtt-server --check");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The failure: a `rules.toml` that was there stopped the import half way, and the new configuration pointed at that
/// foreign file; the warnings were never shown.
#[test]
fn all_files_are_written_or_none_and_warnings_are_shown() {
    for (conf, arguments, there) in [
        ("home.conf", &["--output", "gateway.toml"][..], "rules.toml"),
        ("home.conf", &["--output", "gateway.toml", "--rules", "./gateway.toml"], ""),
        ("home.conf", &["--output", "gateway.toml", "--rules", "missing/rules.toml"], ""),
        ("bridge.conf", &["--output", "gateway.toml"], "bridge-centre.password"),
        ("bridge.conf", &["--output", "gateway.toml"], "gateway.toml"),
    ] {
        let dir = copied();
        if !there.is_empty() {
            fs::write(dir.path().join(there), "of somebody else").expect("write a file");
        }
        let names = || {
            let entries = fs::read_dir(dir.path()).expect("list the files");
            entries.map(|entry| entry.expect("a file").file_name()).collect::<std::collections::BTreeSet<_>>()
        };
        let before = names();
        let output = import(dir.path(), &[&[conf], arguments].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert_eq!(names(), before, "{arguments:?}: {told}");
        assert!(told.contains("note: ") && told.contains("nothing was written"), "{arguments:?}: {told}");
        if !there.is_empty() {
            let text = fs::read_to_string(dir.path().join(there)).expect("read the file");
            assert!(text == "of somebody else" && told.contains(there), "{told}");
        }
    }
}

const CONF: &str =
    "user root\nlistener 0 mqtt.sock\nallow_anonymous true\npassword_file passwd\nacl_file acl\n";
const ACL: &str = "topic read public/#\ntopic deny public/secret\nuser anna\ntopic readwrite #\ntopic deny home/secret/#\n\
    user sensor\ntopic write home/+/temperature\ntopic read news/#\npattern readwrite devices/%u/#\npattern read to/%c\npattern read public/end\n";
/// Publishes: user, password and topic.
const PUBLISHED: &[(&str, &str, &str)] = &[
    ("sensor", "two", "home/attic/temperature"),
    ("sensor", "two", "home/attic/humidity"),
    ("sensor", "two", "devices/sensor/state"),
    ("sensor", "two", "devices/anna/state"),
    ("sensor", "two", "news/today"),
    ("sensor", "wrong", "home/attic/temperature"),
    ("nobody", "two", "home/attic/temperature"),
    ("", "", "public/hello"),
    ("", "", "home/attic/temperature"),
    ("anna", "one", "home/secret/door"),
    ("anna", "one", "news/tomorrow"),
    ("anna", "one", "public/secret"),
    ("anna", "one", "to/reader-sensor"),
    ("anna", "one", "to/other"),
    ("anna", "one", "public/hello"),
];
/// The last message, which everybody may have: after it each subscriber has what it gets.
const LAST: &str = "public/end";

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn client(program: &str, dir: &Path, user: &str, password: &str) -> Command {
    let mut command = Command::new(program);
    command.args(["--unix", "mqtt.sock", "-V", "311", "-q", "1"]).current_dir(dir);
    if !user.is_empty() {
        command.args(["-u", user, "-P", password]);
    }
    command
}

/// Returns the rights that a broker on `mqtt.sock` gives to clients: a line for each login, and the messages of each
/// subscriber.
fn observed(dir: &Path) -> Vec<String> {
    let readers = [("sensor", "two"), ("anna", "one"), ("", "")].map(|(user, password)| {
        let path = dir.join(format!("got-{user}"));
        let out = fs::File::create(&path).expect("make a file");
        let mut command = client("stdbuf", dir, user, password);
        // The program is an argument of stdbuf, which lets no line wait.
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        command = Command::new("stdbuf");
        command.args(["-oL", "mosquitto_sub"]).args(arguments).current_dir(dir);
        command.args(["-i", &format!("reader-{user}"), "-t", "#", "-F", "%t", "-d"]).stdout(out);
        let child = command.stderr(Stdio::null()).spawn().expect("start mosquitto_sub");
        (user, path, Running(child))
    });
    let read = |path: &PathBuf| fs::read_to_string(path).unwrap_or_default();
    for (_, path, _) in &readers {
        until(|| read(path).contains("Subscribed"));
    }
    let mut found = Vec::new();
    for (user, password, topic) in PUBLISHED.iter().chain([&("anna", "one", LAST)]) {
        let mut publish = client("mosquitto_pub", dir, user, password);
        let output = publish.args(["-t", topic, "-m", "x"]).output().expect("run mosquitto_pub");
        found.push(format!("{user}:{password} may log in: {}", output.status.success()));
    }
    for (user, path, _) in &readers {
        until(|| read(path).contains(&format!("\n{LAST}\n")));
        let text = read(path);
        let topics = text.lines().filter(|line| line.contains('/') && !line.contains(' '));
        found.extend(topics.map(|topic| format!("'{user}' got {topic}")));
    }
    found
}

#[test]
fn clients_may_do_the_same_under_mosquitto_and_after_its_import() {
    // Debian puts the broker where not everybody's PATH leads.
    let placed = Path::new("/usr/sbin/mosquitto");
    let broker = if placed.exists() { placed } else { Path::new("mosquitto") };
    let tools = ["mosquitto_passwd", "mosquitto_pub", "mosquitto_sub", "stdbuf"];
    let there = (placed.exists() || on_path("mosquitto")) && tools.into_iter().all(on_path);
    if !need("mosquitto, its tools or stdbuf", there) {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path();
    fs::write(path.join("mosquitto.conf"), CONF).expect("write the configuration");
    fs::write(path.join("acl"), ACL).expect("write the rules");
    fs::write(path.join("passwd"), "").expect("make the file of passwords");
    for (user, password) in [("anna", "one"), ("sensor", "two")] {
        let mut add = Command::new("mosquitto_passwd");
        let status = add.args(["-b", "passwd", user, password]).current_dir(path).status();
        assert!(status.expect("run mosquitto_passwd").success());
    }
    let mosquitto = Command::new(broker)
        .args(["-c", "mosquitto.conf"])
        .current_dir(path)
        .stderr(Stdio::null())
        .spawn()
        .expect("start mosquitto");
    let mosquitto = Running(mosquitto);
    until(|| path.join("mqtt.sock").exists());
    let theirs = observed(path);
    drop(mosquitto);
    let _ = fs::remove_file(path.join("mqtt.sock"));

    let output = import(path, &["mosquitto.conf", "--output", "gateway.toml"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let log = fs::File::create(path.join("server.log")).expect("make a log");
    let gateway = command(env!("CARGO_BIN_EXE_mqtt-server"))
        .args(["--config", "gateway.toml", "--data-dir", "data"])
        .args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"])
        .current_dir(path)
        .stderr(log)
        .spawn()
        .expect("start mqtt-server");
    let _gateway = Running(gateway);
    until(|| path.join("mqtt.sock").exists());
    let ours = observed(path);
    assert_eq!(ours, theirs, "ours (left) and Mosquitto's (right)");
    assert!(theirs.len() > 25 && theirs.contains(&"'sensor' got to/reader-sensor".to_owned()), "{theirs:?}");
}
