//! `mqtt-server rules`, and what `--check` says about a rules file.

use std::{fs, path::Path, process::Output};

use crate::support::command;

const RULES: &str = r#"
[groups]
operators = { users = ["ops-*"] }

[[rules]]
deny = "all"
topics = ["lab/secret"]

[[rules]]
allow = "publish"
users = ["sensor-*"]
topics = ["lab/%u/#"]
max_qos = 1
retain = false
max_bytes = "1 KiB"

[[rules]]
allow = "subscribe"
groups = ["operators"]
topics = ["lab/+"]

[[rules]]
allow = "all"
listeners = ["plant"]
claims = { site = ["north"] }
common_names = ["gate"]
topics = ["site/#"]
"#;

fn rules(arguments: &[&str], file: &Path) -> Output {
    let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.arg("rules").args(arguments);
    if matches!(arguments, ["check" | "import"]) {
        command.arg(file);
    }
    command.output().expect("run mqtt-server rules")
}

fn told(output: &Output) -> (Option<i32>, String) {
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    (output.status.code(), text)
}

#[test]
fn a_decision_is_explained_rule_by_rule_with_an_exit_code() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    fs::write(&file, RULES).expect("write the rules");
    let path = file.to_str().expect("a path in UTF-8");
    let test = |arguments: &[&str]| {
        told(&rules(&[&["test", "--rules", path, "--client", "c1"], arguments].concat(), &file))
    };
    let (code, text) = test(&["--user", "sensor-1", "publish", "lab/sensor-1/t"]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(
        text,
        "line 6: deny all for everybody on lab/secret: no filter of it matches the topic\n\
         line 10: allow publish on lab/%{u}/#: matches, and decides\n\
         allowed by line 10\n"
    );
    let sensor = &["--user", "sensor-1"][..];
    let plant =
        &["--listener", "plant", "--cn", "gate", "--claim", "site=south", "--claim", "site=north"][..];
    for (who, action, wanted, why) in [
        (sensor, &["publish", "lab/sensor-2/t"][..], 1, "denied: no rule names it"),
        (sensor, &["publish", "lab/secret"], 1, "denied by line 6"),
        (sensor, &["--qos", "2", "publish", "lab/sensor-1/t"], 1, "allows QoS 1 at most, and decides"),
        (sensor, &["--retain", "publish", "lab/sensor-1/t"], 1, "allows no retained message"),
        (sensor, &["--size", "2 KiB", "publish", "lab/sensor-1/t"], 1, "allows 1024 bytes at most"),
        (sensor, &["subscribe", "lab/x"], 1, "another party, by 'groups'"),
        (&["--user", "ops-1"], &["subscribe", "lab/x"], 0, "allowed by line 18"),
        (&["--group", "operators"], &["subscribe", "lab/x"], 0, "allowed by line 18"),
        (&["--group", "operators"], &["subscribe", "lab/+"], 1, "denied: 'lab/secret' is denied by line 6"),
        (plant, &["subscribe", "$share/g/site/#"], 0, "allowed: every topic of the filter is"),
        (&["--cn", "gate"], &["publish", "site/x"], 1, "another party, by 'listeners'"),
        (&["--user", "sensor-/"], &["publish", "lab/a/t"], 1, "%{u} has '+', '#' or '/' in it"),
        (sensor, &["connect"], 0, "allowed: no rule has 'connect'"),
        (sensor, &["publish", "lab/+"], 2, "'lab/+':"),
    ] {
        let (code, text) = test(&[who, action].concat());
        assert_eq!(code, Some(wanted), "{who:?} {action:?}: {text}");
        assert!(text.contains(why), "{who:?} {action:?}: {text}");
    }
}

#[test]
fn a_broken_file_has_exit_code_2_and_tells_the_line_everywhere() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let config = dir.path().join("config.toml");
    let text = format!("non_tls = true\n[authorization]\nrules = {:?}\n", file.display().to_string());
    fs::write(&config, text).expect("write the configuration");
    let path = config.to_str().expect("a path in UTF-8");
    let test = || told(&rules(&["test", "--config", path, "--client", "c", "publish", "a"], &file));
    let start = || {
        let mut command = command(env!("CARGO_BIN_EXE_mqtt-server"));
        told(&command.args(["--check", "--config", path]).output().expect("run mqtt-server"))
    };
    fs::write(&file, "[[rules]]\nallow = \"all\"\ntopics = [\"a\"]\n").expect("write the rules");
    assert_eq!(told(&rules(&["check"], &file)), (Some(0), format!("{}: 1 rules\n", file.display())));
    assert_eq!((test().0, start().0), (Some(0), Some(0)), "{:?}", start());
    fs::write(&file, "[[rules]]\nallow = \"all\"\ntopics = [\"a/#/b\"]\n").expect("write the rules");
    for (code, text) in [told(&rules(&["check"], &file)), test(), start()] {
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("line 3: 'a/#/b'"), "{text}");
    }
    fs::write(&config, "non_tls = true\n").expect("write the configuration");
    let (code, text) = test();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("names no rules"), "{text}");
}

#[test]
fn what_cannot_be_imported_is_a_comment_a_warning_and_an_exit_code() {
    let dir = tempfile::tempdir().expect("a directory");
    let (acl, file) = (dir.path().join("acl"), dir.path().join("rules.toml"));
    fs::write(&acl, "topic read news/#\nuser anna\ntopic deny a/#/b\ntopic write lab/x\n").expect("write");
    let output = rules(&["import"], &acl);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let (made, warned) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    for said in [&made, &warned] {
        assert!(said.contains("eft out, line 3: ") && said.contains("topic deny a/#/b"), "{said}");
    }
    fs::write(&file, &output.stdout).expect("write the rules");
    assert_eq!(told(&rules(&["check"], &file)).0, Some(0), "{made}");
    let path = file.to_str().expect("a path in UTF-8");
    let decided = |action: &str, topic: &str, code: i32| {
        let asked = ["test", "--rules", path, "--client", "c", "--user", "anna", action, topic];
        assert_eq!(told(&rules(&asked, &file)).0, Some(code), "{action} {topic}");
    };
    // A topic that the file denied would be allowed by other lines.
    decided("publish", "lab/x", 1);
    fs::write(&acl, "topic read news/#\nuser anna\ntopic read a/#/b\ntopic write lab/x\n").expect("write");
    let output = rules(&["import"], &acl);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    fs::write(&file, &output.stdout).expect("write the rules");
    for (action, topic, code) in
        [("publish", "lab/x", 0), ("subscribe", "lab/x", 1), ("publish", "news/x", 1)]
    {
        decided(action, topic, code);
    }
    fs::write(&acl, "topic read news/#\n").expect("write");
    assert_eq!(rules(&["import"], &acl).status.code(), Some(0));
}
