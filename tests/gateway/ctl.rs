//! `mqtt-server ctl` as people and scripts see it: what it prints for a real gateway, as a table and as JSON, and how it ends.
//!
//! `ctl/session.txt` has the commands, in their order, with what they print; what varies is masked. After a change that is
//! wanted, `MQTT_SERVER_TEST_BLESS=1` writes it anew.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use rcgen::{CertificateParams, KeyPair};

use crate::{
    client::{Client, hello},
    support::{Server, command, need, on_path, root, run, until},
};

/// `mqtt-server ctl` for a gateway of the tests.
pub(crate) fn ctl(server: &Server, args: &[&str]) -> Command {
    let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
    command
        .arg("ctl")
        .args(args)
        .current_dir(server.dir())
        .env("MQTTCTL_ADDR", format!("https://localhost:{}", server.ports.grpc))
        .env("XDG_CONFIG_HOME", server.dir().join("config"))
        .stdin(Stdio::null());
    command
}

pub(crate) fn said(output: &Output) -> String {
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        text.push_str(&format!("(exit code {})\n", output.status.code().unwrap_or(-1)));
    }
    text
}

/// Times, ports and what the gateway makes up. Columns as wide as these are not compared: gaps are two spaces.
pub(crate) fn masked(text: &str) -> String {
    let mut masked = String::new();
    for line in text.lines() {
        let words =
            line.split_inclusive(|c: char| !c.is_ascii_alphanumeric() && !":.-_=+".contains(c)).map(mask);
        let mut line = words.collect::<String>();
        while line.contains("   ") {
            line = line.replace("   ", "  ");
        }
        masked.push_str(line.trim_end());
        masked.push('\n');
    }
    masked
}

/// A word with the separator that ends it.
fn mask(word: &str) -> String {
    let end = word.find(|c: char| !c.is_ascii_alphanumeric() && !":.-_=+".contains(c)).unwrap_or(word.len());
    let (bare, rest) = word.split_at(end);
    let digits = bare.bytes().filter(u8::is_ascii_digit).count();
    let time = bare.len() >= 20 && bare.starts_with("20") && bare.contains('T') && bare.ends_with('Z');
    let seconds = digits >= 9 && digits == bare.trim_start_matches(':').len();
    // The remainder of the session's one message expiry, 600 s.
    let left = bare
        .trim_start_matches(':')
        .trim_end_matches('s')
        .parse()
        .is_ok_and(|left: u32| (590..=600).contains(&left));
    let port = bare.starts_with("127.0.0.1:") || bare.starts_with("localhost:");
    match () {
        () if time || seconds => format!("<time>{rest}"),
        () if left => format!("<left>{rest}"),
        () if port => format!("<peer>{rest}"),
        () if bare.len() >= 16 && digits > 2 => format!("<opaque>{rest}"),
        () => word.to_owned(),
    }
}

/// A line of the session as the shell would split it: words, and single quotes around some.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('\'').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// The same command, which fails where it does not end.
fn bounded(command: &Command) -> Command {
    let mut bounded = Command::new("timeout");
    bounded.arg("60").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bounded.env(name, value),
            None => bounded.env_remove(name),
        };
    }
    bounded.current_dir(command.get_current_dir().expect("a directory")).stdin(Stdio::null());
    bounded
}

#[test]
fn what_ctl_prints_for_a_real_gateway_is_what_the_session_says() {
    let path = root().join("tests/gateway/ctl/session.txt");
    let golden = fs::read_to_string(&path).expect("read the session");
    let server = Server::start();
    let mut lamp = Client::connect_with(server.ports.tcp, {
        let mut connect = hello(gateway_core::Protocol::V5, "lamp");
        connect.clean_start = false;
        connect.session_expiry = Some(600);
        connect
    });
    lamp.subscribe("lamp/#");
    lamp.publish_acked("sensors/lamp/temperature", b"21.5", true);
    let value = ["latest", "get", "sensors/lamp/temperature"];
    until(|| ctl(&server, &value).output().expect("run ctl").status.success());
    let mut told = String::new();
    for line in golden.lines() {
        let Some(args) = line.strip_prefix("$ ctl ") else {
            if line.starts_with('#') {
                told.push_str(&format!("{line}\n"));
            }
            continue;
        };
        let args = words(args);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = bounded(&ctl(&server, &args)).output().expect("run ctl");
        told.push_str(&format!("{line}\n{}", masked(&said(&output))));
    }
    if std::env::var_os("MQTT_SERVER_TEST_BLESS").is_some() {
        fs::write(&path, &told).expect("write the session");
    }
    let differs = told.lines().zip(golden.lines()).find(|(told, golden)| told != golden);
    assert!(told == golden, "first difference (now, session.txt): {differs:?}\n{told}");
}

#[test]
fn ctl_lists_the_rules_in_force() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let text = "[[rules]]\ndeny = \"subscribe\"\ntopics = [\"a/#\"]\nusers = [\"anna\", \"ops-*\"]\nlisteners = [\"l\"]\n\
                [[rules]]\nallow = \"publish\"\ntopics = [\"b/%c\", \"c\"]\nmax_qos = 1\n";
    fs::write(&file, text).expect("write the rules");
    let server =
        Server::start_with(&[], &format!("[authorization]\nrules = {:?}\n", file.display().to_string()));
    let output = ctl(&server, &["security", "rules"]).output().expect("run ctl");
    assert_eq!(
        masked(&said(&output)),
        "LINE  RULE  TOPICS  FOR  LIMITS\n\
         2  deny subscribe  a/#  users: anna, ops-*; listeners: l  -\n\
         7  allow publish  b/%{c}, c  everybody  QoS 1 at most\n"
    );
    let output = ctl(&server, &["security", "rules", "-o", "json"]).output().expect("run ctl");
    assert!(said(&output).contains("\"topics\":[\"b/%{c}\",\"c\"]"), "{output:?}");
}

/// A table that is printed again and again has the present each time.
#[test]
fn a_watched_list_is_printed_again() {
    let server = Server::start();
    let (mut child, mut out) = stream(&server, &["devices", "list", "--watch=0.1"]);
    let mut line = String::new();
    let mut until_has = |wanted: &str| {
        while !line.contains(wanted) {
            line.clear();
            assert!(out.read_line(&mut line).expect("read") > 0, "it ended before {wanted}");
        }
        line.clear();
    };
    until_has("DEVICE");
    let _lamp = Client::connect(server.ports.tcp, gateway_core::Protocol::V5, "lamp-of-later");
    until_has("lamp-of-later");
    until_has("lamp-of-later");
    child.kill().expect("end ctl");
    child.wait().expect("its end");
}

/// Lines of a child's standard output.
fn stream(server: &Server, args: &[&str]) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child =
        ctl(server, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start ctl");
    let out = BufReader::new(child.stdout.take().expect("its output"));
    (child, out)
}

#[test]
fn ctrl_c_ends_a_stream_without_a_fault() {
    let server = Server::start();
    for verb in [&["sub", "t/#"][..], &["events"], &["latest", "watch", "t/#"], &["top", "--interval", "0.1"]]
    {
        let (mut child, mut out) = stream(&server, verb);
        let mut line = String::new();
        // The stream stands once it shows a message from now on.
        let reader = std::thread::spawn(move || {
            out.read_line(&mut line).expect("read a line");
            (line, out)
        });
        until(|| {
            let mut device = Client::connect(server.ports.tcp, gateway_core::Protocol::V5, "passer-by");
            device.publish_acked("t/x", b"x", false);
            reader.is_finished()
        });
        let (line, _out) = reader.join().expect("the reader");
        assert!(!line.trim().is_empty(), "{verb:?}");
        let killed = Command::new("kill").arg("-INT").arg(child.id().to_string()).status();
        assert!(killed.expect("run kill").success());
        let status = child.wait().expect("wait for ctl");
        let mut error = String::new();
        child.stderr.take().expect("its errors").read_to_string(&mut error).expect("read them");
        assert!(status.success() && error.is_empty(), "{verb:?}: {status:?} {error}");
    }
}

#[test]
fn a_reader_that_leaves_ends_ctl_without_a_fault() {
    let server = Server::start();
    ctl(&server, &["groups", "create", "all", "--filter", "t/#", "--include-backends"])
        .output()
        .expect("make a group");
    for number in 0..20 {
        ctl(&server, &["pub", &format!("t/{number}"), "x", "--retain"]).output().expect("publish");
    }
    for verb in [&["retained", "list"][..], &["security", "--help"], &["consume", "all"], &["sub"]] {
        let (mut child, out) = stream(&server, verb);
        drop(out);
        until(|| {
            if verb == ["sub"] {
                ctl(&server, &["pub", "t/x", "x"]).output().expect("publish");
            }
            child.try_wait().expect("ask for its end").is_some()
        });
        let mut error = String::new();
        child.stderr.take().expect("its errors").read_to_string(&mut error).expect("read them");
        let status = child.wait().expect("its end");
        assert!(status.success() && error.is_empty(), "{verb:?}: {status:?} {error}");
    }
}

#[test]
fn a_gateway_that_is_not_there_is_one_line_and_exit_code_3() {
    let dir = tempfile::tempdir().expect("make a directory");
    let output = command(env!("CARGO_BIN_EXE_mqtt-server"))
        .args(["ctl", "--addr", "http://127.0.0.1:1", "devices", "list"])
        .env("XDG_CONFIG_HOME", dir.path())
        .output()
        .expect("run ctl");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(error.starts_with("mqtt-server: cannot connect to http://127.0.0.1:1"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn profiles_are_kept_for_the_user_alone_and_used() {
    use std::os::unix::fs::PermissionsExt as _;

    let server = Server::start();
    let run = |args: &[&str]| {
        let output = ctl(&server, args).env_remove("MQTTCTL_ADDR").output().expect("run ctl");
        said(&output)
    };
    let addr = format!("https://localhost:{}", server.ports.grpc);
    assert_eq!(
        run(&["profile", "add", "test", "--addr", &addr, "--ca", "certs/ca.crt", "--token", "secret"]),
        ""
    );
    assert_eq!(run(&["profile", "add", "other", "--addr", "http://localhost:1"]), "");
    let mode = fs::metadata(server.dir().join("config/mqtt-server/ctl.toml"))
        .expect("the file")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(run(&["health"]), "serving\n");
    let list = run(&["profile", "list"]);
    assert!(!list.contains("secret"), "{list}");
    assert!(list.lines().any(|line| line.starts_with('*') && line.contains("test")), "{list}");
    assert_eq!(run(&["profile", "use", "other"]), "");
    assert!(run(&["health"]).contains("(exit code 3)"));
    assert_eq!(run(&["health", "--profile", "test"]), "serving\n");
    assert!(run(&["profile", "use", "none"]).contains("no profile none"));
    assert_eq!(run(&["profile", "remove", "other"]), "");
    assert!(!run(&["profile", "list"]).contains("other"));
    assert!(run(&["profile", "remove", "other"]).contains("no profile other"));
}

/// The failure: a gateway whose certificate is of a public authority is not trusted, or one of somebody else's is.
#[test]
fn without_a_ca_ctl_trusts_what_the_system_trusts_and_no_more() {
    let server = Server::start();
    let elsewhere = tempfile::tempdir().expect("make a directory");
    let health = |variables: &[(&str, &str)]| {
        let mut command = ctl(&server, &["health"]);
        // The other directory has no certs/ca.crt, which would be taken.
        command.current_dir(elsewhere.path()).envs(variables.iter().copied());
        let output = command.output().expect("run ctl");
        (output.status.code(), said(&output))
    };
    let ca = server.ca().display().to_string();
    let trusted = health(&[("SSL_CERT_FILE", &ca)]);
    assert_eq!(trusted, (Some(0), "serving\n".to_owned()));
    let (code, told) = health(&[]);
    assert_eq!(code, Some(3), "{told}");
    assert!(told.contains("certificate") && told.contains("--ca"), "{told}");
}

/// The failure: a gateway that asks for certificates cannot be asked from the command line.
#[test]
fn ctl_shows_its_certificate_by_option_variable_and_profile() {
    let dir = tempfile::tempdir().expect("make a directory");
    let file = |name: &str| dir.path().join(name).display().to_string();
    let key = KeyPair::generate().expect("generate a key");
    let certificate = CertificateParams::new(Vec::new()).expect("names").self_signed(&key).expect("sign");
    fs::write(file("client.crt"), certificate.pem()).expect("write the certificate");
    fs::write(file("client.key"), key.serialize_pem()).expect("write the key");
    let more = format!("[grpc]\nclient_ca = \"{}\"\nrequire_client_cert = true", file("client.crt"));
    let server = Server::start_with(&[], &more);
    let (cert, key) = (file("client.crt"), file("client.key"));
    let ask = |args: &[&str], variables: &[(&str, &str)]| {
        let output = ctl(&server, args).envs(variables.iter().copied()).output().expect("run ctl");
        (output.status.code(), said(&output))
    };
    let serving = (Some(0), "serving\n".to_owned());
    assert_eq!(ask(&["health"], &[]).0, Some(3), "nobody comes in without one");
    assert_eq!(ask(&["health", "--cert", &cert, "--key", &key], &[]), serving);
    assert_eq!(ask(&["health"], &[("MQTTCTL_CERT", &cert), ("MQTTCTL_KEY", &key)]), serving);
    let (code, told) = ask(&["health", "--cert", &cert], &[]);
    assert!(code == Some(2) && told.contains("needs its private key"), "{told}");
    let addr = format!("https://localhost:{}", server.ports.grpc);
    let add =
        ["profile", "add", "it", "--addr", &addr, "--ca", "certs/ca.crt", "--cert", &cert, "--key", &key];
    assert_eq!(ask(&add, &[]).0, Some(0));
    assert_eq!(ask(&["health", "--profile", "it"], &[]), serving);
}

#[test]
fn completion_and_man_pages_come_from_the_same_definition() {
    let dir = tempfile::tempdir().expect("make a directory");
    let ask = |args: &[&str]| {
        let output =
            command(env!("CARGO_BIN_EXE_mqtt-server")).arg("ctl").args(args).output().expect("run ctl");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for shell in ["bash", "zsh", "fish"] {
        let script = ask(&["completion", shell]);
        assert!(script.contains("dead-letters") && script.contains("no-ack"), "{shell}");
    }
    ask(&["man", &dir.path().display().to_string()]);
    let page = fs::read_to_string(dir.path().join("mqtt-server-ctl-pub.1")).expect("a page of a verb");
    assert!(page.contains("fail\\-offline"), "{page}");
    assert!(dir.path().join("mqtt-server.1").exists());
}

/// Words and what a shell makes of them; the second has a hyphen in a word before the last one.
const COMPLETED: [(&str, &str); 2] =
    [("ctl devi", "ctl devices"), ("ctl groups dead-letters requ", "ctl groups dead-letters requeue")];

/// The script for a shell as a file of a directory of its own.
fn completion(shell: &str, file: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("make a directory");
    let output = command(env!("CARGO_BIN_EXE_mqtt-server")).args(["ctl", "completion", shell]).output();
    let output = output.expect("run ctl completion");
    assert!(output.status.success(), "{output:?}");
    fs::write(dir.path().join(file), output.stdout).expect("write the script");
    dir
}

fn completed(shell: &mut Command) -> String {
    let (success, told) = run(shell, Duration::from_secs(60));
    assert!(success, "{told}");
    told
}

/// The failure: the script for bash walked through the words under one name of the program and looked up what fits
/// under another, so that nothing was completed below the first word.
#[test]
fn bash_completes_below_the_first_word() {
    let dir = completion("bash", "mqtt-server.bash");
    // Bash calls the function that the script registers with these variables and arguments.
    let script = r#". ./mqtt-server.bash
        registered=$(complete -p mqtt-server)
        function=${registered#*-F }
        COMP_WORDS=(mqtt-server $1)
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        "${function%% *}" mqtt-server "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    for (words, whole) in COMPLETED {
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", script, "bash", words]).current_dir(dir.path());
        assert_eq!(completed(&mut bash).trim(), whole.rsplit(' ').next().unwrap_or_default(), "{words}");
    }
}

#[test]
fn fish_completes_below_the_first_word() {
    if !need("fish", on_path("fish")) {
        return;
    }
    let dir = completion("fish", "mqtt-server.fish");
    // The script for fish knows words down to the third.
    for (words, last) in [("ctl devi", "devices"), ("ctl groups dead-l", "dead-letters")] {
        let script = format!("source mqtt-server.fish; complete -C 'mqtt-server {words}'");
        let mut fish = Command::new("fish");
        fish.args(["--no-config", "-c", &script]).current_dir(dir.path()).env("HOME", dir.path());
        let told = completed(&mut fish);
        let found: Vec<&str> = told.lines().filter_map(|line| line.split('\t').next()).collect();
        assert_eq!(found, [last], "{words}");
    }
}

#[test]
fn zsh_completes_below_the_first_word() {
    if !need("zsh", on_path("zsh")) {
        return;
    }
    let dir = completion("zsh", "_mqtt-server");
    // The line is completed by a tab at a terminal, and then run.
    let settings = "fpath=($ZDOTDIR $fpath)\nautoload -U compinit && compinit -u -D\nPROMPT='ready:'\n\
        mqtt-server() { print -r -- \"ran:$*:\" }\n";
    fs::write(dir.path().join(".zshrc"), settings).expect("write the settings");
    let script = "zmodload zsh/zpty\nzpty shell zsh -i\nzpty -r -m shell out '*ready:*'\n\
        zpty -w shell \"mqtt-server $1\"$'\\t'\nzpty -r -m shell out '*ran:*:*'\nprint -r -- $out\nzpty -d shell\n";
    for (words, whole) in COMPLETED {
        let mut zsh = Command::new("zsh");
        zsh.args(["-f", "-c", script, "zsh", words]).current_dir(dir.path());
        zsh.env("ZDOTDIR", dir.path()).env("TERM", "dumb");
        let told = completed(&mut zsh);
        assert!(told.contains(&format!("ran:{whole}:")), "{words}: {told}");
    }
}
