//! Walls that the manifests in crates/ cannot state, and habits of the source, read from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Dependencies that few folders use: path in the code, folders.
const OWNED: &[(&str, &[&str])] = &[
    ("axum::", &["crates/http"]),
    (
        "tonic::",
        &[
            "crates/api",
            "crates/auth/src/lib.rs",
            "crates/auth/src/remote",
            "crates/grpc/",
            "crates/grpc-homes",
            "crates/grpc-messages",
            "crates/http/src/json",
            "crates/http/src/local.rs",
            "crates/http/src/page",
        ],
    ),
    (
        "prost::",
        &[
            "crates/api",
            "crates/auth/src/remote",
            "crates/ctl",
            "crates/grpc",
            "crates/http/src/json",
            "crates/links",
        ],
    ),
    ("tungstenite::", &["crates/net"]),
    ("quinn::", &["crates/net"]),
    (
        "hyper::",
        &[
            "crates/auth/src/remote",
            "crates/bridges",
            "crates/edge/src/remote",
            "crates/grpc/",
            "crates/grpc-homes",
            "crates/http",
            "crates/links",
        ],
    ),
    ("socket2::", &["crates/net", "src/gateway"]),
    (
        "rustls::",
        &[
            "crates/cassandra",
            "crates/edge/src/tls",
            "crates/grpc/",
            "crates/links",
            "crates/net",
            "crates/postgres",
        ],
    ),
    ("tokio_postgres::", &["crates/postgres"]),
    ("heed::", &["crates/disk"]),
];

/// A longer file says why at its head: `//! Long because …`.
const MAX_LINES: usize = 800;

/// Names of functions are shorter than this, those of tests above all: a report shows them on one line.
const MAX_NAME: usize = 70;

/// All the Rust of the repository.
const ALL: &[&str] =
    &["src", "crates", "clients/rust", "fuzz/fuzz_targets", "tools", "tests", "benches", "examples"];

pub(crate) struct Source {
    /// Path from the root, with forward slashes.
    pub(crate) path: String,
    /// Text without comments and without the test module at the end.
    pub(crate) code: String,
    /// Names of all functions, those of the test module too.
    functions: Vec<String>,
    pub(crate) lines: usize,
    says_why: bool,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn is_tests(path: &str) -> bool {
    path.split('/').any(|part| {
        matches!(part, "tests" | "tests.rs" | "test_util.rs" | "suite" | "suite.rs" | "fuzz.rs")
            || part.ends_with("_tests.rs")
    })
}

fn sources(folders: &[&str]) -> Vec<Source> {
    let mut files = Vec::new();
    for folder in folders {
        let before = files.len();
        collect(&root().join(folder), &mut files);
        assert!(files.len() > before, "no source file in {folder}");
    }
    files
        .into_iter()
        .map(|file| {
            let path = file
                .strip_prefix(root())
                .expect("a file below the root")
                .to_string_lossy()
                .replace('\\', "/");
            let text = fs::read_to_string(&file).expect("read a source file");
            let code = without_tests(&text);
            let lines = code.lines().count();
            let code = code.lines().map(without_comment).collect::<Vec<_>>().join("\n");
            Source {
                path,
                code,
                functions: functions(&text),
                lines,
                says_why: text.contains("//! Long because "),
            }
        })
        .collect()
}

/// All that is compiled into the gateway.
pub(crate) fn gateway_sources() -> Vec<Source> {
    sources(&["src", "crates"])
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("list a directory") {
        let path = entry.expect("read a directory entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
}

/// The text up to `#[cfg(test)] mod … {` in the first column: tests close a file.
fn without_tests(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let end = lines.iter().enumerate().position(|(index, line)| {
        line.starts_with("#[cfg(test)]")
            && lines[index + 1..]
                .iter()
                .find(|next| !next.starts_with("#["))
                .is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'))
    });
    lines[..end.unwrap_or(lines.len())].join("\n")
}

fn without_comment(line: &str) -> &str {
    line.find("//").map_or(line, |at| &line[..at])
}

fn functions(text: &str) -> Vec<String> {
    let code = text.lines().map(without_comment);
    code.filter_map(|line| line.split_once("fn ")).map(|(_, rest)| identifier(rest)).collect()
}

/// The first segments of all `crate::…` paths, groups (`crate::{a, b::c}`) included, and of `super::` paths
/// that climb to the crate's root.
pub(crate) fn names(source: &Source) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in source.code.match_indices("crate::") {
        let own = source.code[..at].chars().next_back();
        if own.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        heads(&source.code[at + "crate::".len()..], &mut found);
    }
    let parts: Vec<&str> = source.path.split('/').skip_while(|part| *part != "src").skip(1).collect();
    let depth = parts.len() - usize::from(parts.last() == Some(&"mod.rs"));
    let climb = "super::".repeat(depth);
    for (at, _) in source.code.match_indices(&climb) {
        if !source.code[..at].ends_with("super::") {
            heads(&source.code[at + climb.len()..], &mut found);
        }
    }
    found
}

pub(crate) fn heads(rest: &str, found: &mut BTreeSet<String>) {
    let Some(group) = rest.strip_prefix('{') else {
        found.insert(identifier(rest));
        return;
    };
    let mut depth = 0;
    let mut start = true;
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => start = true,
            _ if start && depth == 0 && !character.is_whitespace() => {
                found.insert(identifier(&group[at..]));
                start = false;
            }
            _ => {}
        }
    }
}

pub(crate) fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

#[test]
fn sockets_tonic_and_databases_stay_in_their_folders() {
    let mut wrong = Vec::new();
    for source in gateway_sources().iter().filter(|source| !is_tests(&source.path)) {
        for (path, owners) in OWNED {
            let used = source
                .code
                .match_indices(path)
                .any(|(at, _)| !source.code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            if used && !owners.iter().any(|owner| source.path.starts_with(owner)) {
                wrong.push(format!("{}: {path} belongs to {owners:?}", source.path));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The failure: a counter below the crate that counts, whose change builds all between them again; or one that stays 0.
#[test]
fn a_crate_declares_what_it_counts() {
    let sources = gateway_sources();
    let name = |source: &Source| source.path.split('/').nth(1).unwrap_or_default().to_owned();
    let mut counted = BTreeMap::<String, BTreeSet<String>>::new();
    for source in sources.iter().filter(|source| !is_tests(&source.path)) {
        for (at, _) in source.code.match_indices("c.") {
            counted.entry(identifier(&source.code[at + 2..])).or_default().insert(name(source));
        }
    }
    let mut families = 0;
    let mut wrong = Vec::new();
    for source in sources.iter().filter(|source| source.path.ends_with("src/counters.rs")) {
        for family in source.code.split("\n    \"").skip(1) {
            families += 1;
            let rows = family.lines().skip(1).map(str::trim).take_while(|line| *line != "}").map(identifier);
            let rows: Vec<String> = rows.filter(|row| !row.is_empty()).collect();
            wrong.extend(
                rows.iter()
                    .filter(|row| !counted.contains_key(*row))
                    .map(|row| format!("nobody counts {row}")),
            );
            let by: BTreeSet<String> =
                rows.iter().filter_map(|row| counted.get(row)).flatten().cloned().collect();
            if by.len() < 2 && !by.contains(&name(source)) {
                wrong.push(format!("{}: {} is counted by {by:?}", source.path, identifier(family)));
            }
        }
    }
    assert!(families > 100, "only {families} families were found");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_long_file_says_why() {
    let long: Vec<String> = sources(ALL)
        .iter()
        .filter(|source| source.lines > MAX_LINES && !source.says_why)
        .map(|source| format!("{}: {} lines, more than {MAX_LINES}", source.path, source.lines))
        .collect();
    assert!(long.is_empty(), "\n{}", long.join("\n"));
}

/// The failure: a test named with a whole sentence, which reports cut off and nobody can type.
#[test]
fn names_of_tests_are_short() {
    let all = sources(ALL);
    assert!(
        all.iter().any(|source| source.functions.iter().any(|name| name == "names_of_tests_are_short")),
        "not even its own name was found"
    );
    let long: Vec<String> = all
        .iter()
        .flat_map(|source| source.functions.iter().map(move |name| (&source.path, name)))
        .filter(|(_, name)| name.len() >= MAX_NAME)
        .map(|(path, name)| format!("{path}: {name} has {} characters, {MAX_NAME} or more", name.len()))
        .collect();
    assert!(long.is_empty(), "\n{}", long.join("\n"));
}

#[test]
fn names_see_groups_and_super_paths() {
    let source = Source {
        path: "src/net/flush.rs".to_owned(),
        code: "use crate::{auth::{A, b}, tls::C};\nuse super::super::door::D;\ncrate::grpc::e();".to_owned(),
        functions: Vec::new(),
        lines: 3,
        says_why: false,
    };
    let expected = ["auth", "tls", "door", "grpc"].map(str::to_owned);
    assert_eq!(names(&source), BTreeSet::from(expected));
}

/// 3.1.1: [MQTT-7.0.0-1] asks the rules of a client of a server that connects to other servers. A bridge does, over one
/// kind of connection; all others are to a Unix socket, to see if it is stale, and to services that speak no MQTT.
#[test]
fn connections_to_others_are_opened_in_few_places() {
    let allowed = [
        "crates/bridges/src/mqtt/link.rs",
        "crates/edge/src/remote.rs",
        "crates/links/src/link.rs",
        "crates/auth/src/remote/provider.rs",
        "crates/net/src/accept/unix.rs",
        // The queue of waiting calls has that name in quinn, too.
        "crates/net/src/quic/mod.rs",
        "crates/telemetry/src/otel.rs",
    ];
    let opens =
        ["TcpStream::connect", "TcpSocket::", "UnixStream::connect", "ClientConnection::new", "Endpoint::"];
    let found: Vec<String> = gateway_sources()
        .iter()
        .filter(|source| !is_tests(&source.path) && !allowed.contains(&source.path.as_str()))
        .flat_map(|source| {
            let used = opens.iter().filter(|open| source.code.contains(**open));
            used.map(|open| format!("{}: {open}", source.path)).collect::<Vec<_>>()
        })
        .collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// docs/conformance.md lists every statement, every one that binds a server names a test, and every test it names
/// exists and is run.
#[test]
fn conformance_table_is_whole() {
    let venv = root().join(".venv/bin/python");
    let python = if venv.exists() { venv } else { PathBuf::from("python3") };
    let output = Command::new(python)
        .args(["scripts/conformance.py", "--strict"])
        .current_dir(root())
        .output()
        .expect("run scripts/conformance.py with Python 3");
    eprintln!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
