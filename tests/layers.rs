//! The walls between modules, read from the source: which layer may name which, which crates belong to one
//! layer only, and how long a file may be. The rules are those of the code map in src/lib.rs.
#![expect(clippy::print_stderr, reason = "the conformance check explains itself")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Modules that all may use and that use nothing but each other and `types`.
const LEAVES: &[&str] = &["auth", "clock", "config", "door", "telemetry", "shutdown", "tls", "sys"];

/// A layer and the layers it may name, beside itself and the leaves.
const ALLOWED: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("codec", &["types"]),
    ("session", &["codec", "types"]),
    ("store", &["types"]),
    ("broker", &["store", "types"]),
    ("net", &["session", "codec", "broker", "types"]),
    // The types of latest values come from the store traits; a database never does (see OWNED).
    ("grpc", &["broker", "store", "types"]),
];

/// Layers that may not even use the leaves, with the exceptions.
const WITHOUT_LEAVES: &[(&str, &[&str])] = &[("types", &[]), ("codec", &[])];

/// Paths that belong to some layers only; `root` is src/main.rs, src/lib.rs and the wiring beside them.
const OWNED: &[(&str, &[&str])] = &[
    ("tonic::", &["grpc", "root"]),
    ("prost::", &["grpc"]),
    ("heed::", &["store", "sys"]),
    ("scylla::", &["store"]),
    ("tokio::net", &["net", "sys", "root", "telemetry"]),
    ("std::net::Tcp", &["net", "sys", "root", "tls"]),
    ("socket2::", &["net", "sys", "root"]),
    ("tungstenite::", &["net"]),
    // Stores take the configuration of TLS to a database; src/tls makes it.
    ("rustls::", &["net", "tls", "grpc", "store", "root"]),
];

/// Layers that take the time as an argument and know no runtime.
const PURE: &[&str] = &["types", "codec", "session"];
const IMPURE: &[&str] = &["tokio::", "Instant::now", "SystemTime::now", "std::thread::"];

/// Longest file, in lines, without a test module at its end.
const MAX_LINES: usize = 800;

struct Source {
    /// Path below src/, with forward slashes.
    path: String,
    layer: String,
    /// Text without comments and without the test module at the end.
    code: String,
    lines: usize,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn is_tests(path: &str) -> bool {
    path.split('/')
        .any(|part| matches!(part, "tests" | "tests.rs" | "suite.rs") || part.ends_with("_tests.rs"))
}

fn sources() -> Vec<Source> {
    let mut files = Vec::new();
    collect(&root().join("src"), &mut files);
    assert!(files.len() > 10, "found only {} source files", files.len());
    files
        .into_iter()
        .map(|file| {
            let relative = file.strip_prefix(root().join("src")).expect("a file below src/");
            let path = relative.to_string_lossy().replace('\\', "/");
            let first = path.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
            let known = ALLOWED.iter().any(|(name, _)| *name == first) || LEAVES.contains(&first.as_str());
            let text = fs::read_to_string(&file).expect("read a source file");
            let code = without_tests(&text);
            let lines = code.lines().count();
            let code = code.lines().map(without_comment).collect::<Vec<_>>().join("\n");
            Source { path, layer: if known { first } else { "root".to_owned() }, code, lines }
        })
        .collect()
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

/// The first segments of all `crate::…` paths, groups (`crate::{a, b::c}`) included, and of `super::` paths
/// that climb to the crate's root.
fn names(source: &Source) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in source.code.match_indices("crate::") {
        let own = source.code[..at].chars().next_back();
        if own.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        heads(&source.code[at + "crate::".len()..], &mut found);
    }
    let parts: Vec<&str> = source.path.split('/').collect();
    let depth = parts.len() - usize::from(parts.last() == Some(&"mod.rs"));
    let climb = "super::".repeat(depth);
    for (at, _) in source.code.match_indices(&climb) {
        if !source.code[..at].ends_with("super::") {
            heads(&source.code[at + climb.len()..], &mut found);
        }
    }
    found
}

fn heads(rest: &str, found: &mut BTreeSet<String>) {
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

fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

#[test]
fn layers_name_only_what_is_below_them() {
    let layers: Vec<&str> = ALLOWED.iter().map(|(name, _)| *name).chain(LEAVES.iter().copied()).collect();
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|source| source.layer != "root" && !is_tests(&source.path)) {
        for name in names(source) {
            let name = name.as_str();
            if name == source.layer || !layers.contains(&name) {
                continue;
            }
            let leaf = LEAVES.contains(&name);
            let allowed = match ALLOWED.iter().find(|(layer, _)| *layer == source.layer) {
                Some((layer, below)) => {
                    let leaves = WITHOUT_LEAVES.iter().find(|(pure, _)| pure == layer);
                    below.contains(&name) || (leaf && leaves.is_none_or(|(_, except)| except.contains(&name)))
                }
                None => leaf || name == "types",
            };
            if !allowed {
                wrong.push(format!("src/{}: {} may not name {name}", source.path, source.layer));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn sockets_tonic_and_databases_stay_in_their_layer() {
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|source| !is_tests(&source.path)) {
        for (path, owners) in OWNED {
            let used = source
                .code
                .match_indices(path)
                .any(|(at, _)| !source.code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            if used && !owners.contains(&source.layer.as_str()) {
                wrong.push(format!("src/{}: {path} belongs to {owners:?}", source.path));
            }
        }
        if PURE.contains(&source.layer.as_str()) {
            for path in IMPURE.iter().filter(|path| source.code.contains(**path)) {
                wrong.push(format!("src/{}: {} knows no {path}", source.path, source.layer));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn files_stay_short_enough_to_read() {
    let long: Vec<String> = sources()
        .iter()
        .filter(|source| source.lines > MAX_LINES)
        .map(|source| format!("src/{}: {} lines, at most {MAX_LINES}", source.path, source.lines))
        .collect();
    assert!(long.is_empty(), "\n{}", long.join("\n"));
}

#[test]
fn files_beside_the_gateways_own_stay_short_enough_to_read() {
    let mut files = Vec::new();
    for directory in ["tools", "tests", "benches", "examples"] {
        let before = files.len();
        collect(&root().join(directory), &mut files);
        assert!(files.len() > before, "no source file in {directory}");
    }
    let lines = |file: &PathBuf| {
        without_tests(&fs::read_to_string(file).expect("read a source file")).lines().count()
    };
    let long: Vec<String> = files
        .iter()
        .filter(|file| lines(file) > MAX_LINES)
        .map(|file| format!("{}: {} lines, at most {MAX_LINES}", file.display(), lines(file)))
        .collect();
    assert!(long.is_empty(), "\n{}", long.join("\n"));
}

#[test]
fn the_wall_test_sees_groups_and_super_paths() {
    let source = Source {
        path: "net/flush.rs".to_owned(),
        layer: "net".to_owned(),
        code: "use crate::{types::{A, b}, broker::C};\nuse super::super::store::D;\ncrate::codec::e();"
            .to_owned(),
        lines: 3,
    };
    let expected = ["types", "broker", "store", "codec"].map(str::to_owned);
    assert_eq!(names(&source), BTreeSet::from(expected));
}

/// 3.1.1: [MQTT-7.0.0-1] asks the rules of a client of a server that connects to other servers. This one does not: a
/// bridge would have to show that it keeps them. The one connection made is to a Unix socket, to see if it is stale.
#[test]
fn the_gateway_opens_no_connection_to_another_server() {
    let allowed = ["net/unix.rs", "telemetry/otel.rs"];
    let opens =
        ["TcpStream::connect", "TcpSocket::", "UnixStream::connect", "ClientConnection::new", "Endpoint::"];
    let found: Vec<String> = sources()
        .iter()
        .filter(|source| !is_tests(&source.path) && !allowed.contains(&source.path.as_str()))
        .flat_map(|source| {
            let used = opens.iter().filter(|open| source.code.contains(**open));
            used.map(|open| format!("src/{}: {open}", source.path)).collect::<Vec<_>>()
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
