//! docs/logs.md, made of the log statements in the code. `MQTT_SERVER_TEST_WRITE=1 cargo test --test repository logs` writes it
//! anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
};

use crate::layers::{gateway_sources, is_tests};
use crate::support::root;

const START: &str = "<!-- made of the code from here on -->\n";

/// One statement: what a line of the log is made of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    target: String,
    message: String,
    level: &'static str,
    fields: BTreeSet<String>,
}

/// The arguments of a macro call whose bracket is just behind `text`'s start, split at the commas of its own level.
fn arguments(text: &str) -> Vec<String> {
    let (mut depth, mut quoted, mut escaped) = (0, false, false);
    let mut all = vec![String::new()];
    let mut before = ' ';
    for c in text.chars() {
        let ends = !quoted && depth == 0 && matches!(c, ')' | ']' | '}');
        if ends {
            break;
        }
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            // A quotation mark as a character is none.
            '"' if quoted || before != '\'' => quoted = !quoted,
            '(' | '[' | '{' if !quoted => depth += 1,
            ')' | ']' | '}' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                all.push(String::new());
                before = c;
                continue;
            }
            _ => {}
        }
        before = c;
        if let Some(last) = all.last_mut() {
            last.push(c);
        }
    }
    all.iter().map(|argument| argument.trim().to_owned()).filter(|argument| !argument.is_empty()).collect()
}

/// A literal over several lines as one.
fn unbroken(literal: &str) -> String {
    let mut text = String::new();
    let mut lines = literal.split("\\\n");
    text.push_str(lines.next().unwrap_or_default());
    lines.for_each(|line| text.push_str(line.trim_start()));
    text
}

/// Fields and message of the arguments; none if the message is no literal.
fn read(arguments: &[String]) -> Option<(BTreeSet<String>, String)> {
    let mut fields = BTreeSet::new();
    for argument in arguments {
        if let Some(literal) = argument.strip_prefix('"') {
            return Some((fields, unbroken(literal.trim_end_matches('"'))));
        }
        let (name, assigned) =
            argument.split_once('=').map_or((argument.as_str(), false), |(name, _)| (name, true));
        let name = name.trim().trim_start_matches(['%', '?']).trim();
        let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
        if assigned || plain {
            fields.insert(name.rsplit('.').next().unwrap_or(name).to_owned());
        }
    }
    None
}

/// Returns the origin of an event, as the log names it: the module.
fn target(path: &str) -> String {
    let (package, inside) = match path.strip_prefix("crates/") {
        Some(rest) => {
            let (name, inside) = rest.split_once("/src/").expect("a source file of a crate");
            let prefix = if matches!(name, "core" | "http") { "gateway_" } else { "" };
            (format!("{prefix}{name}").replace('-', "_"), inside)
        }
        None => ("mqtt_server".to_owned(), path.trim_start_matches("src/")),
    };
    let inside = inside.trim_end_matches(".rs");
    let inside = inside.strip_suffix("mod").map_or(inside, |inside| inside.trim_end_matches('/'));
    let inside = if inside == "lib" { "" } else { inside };
    [package.as_str()]
        .into_iter()
        .chain(inside.split('/').filter(|part| !part.is_empty()))
        .collect::<Vec<_>>()
        .join("::")
}

fn events() -> BTreeSet<Event> {
    let kinds = [
        ("error!(", "ERROR", 0),
        ("error_limited!(", "ERROR", 0),
        ("warn!(", "WARN", 0),
        ("warn_limited!(", "WARN", 0),
        ("info_of_peer!(", "INFO", 2),
    ];
    let mut events = BTreeSet::new();
    for source in gateway_sources().iter().filter(|source| !is_tests(&source.path)) {
        for (name, level, skip) in kinds {
            for (at, _) in source.code.match_indices(name) {
                if source.code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                    continue;
                }
                let arguments = arguments(&source.code[at + name.len()..]);
                let Some((mut fields, message)) = read(arguments.get(skip..).unwrap_or_default()) else {
                    continue;
                };
                if message.is_empty() || message.starts_with('{') || message.contains("$arg") {
                    continue;
                }
                if name.contains("limited") || name.contains("of_peer") {
                    fields.insert("suppressed".to_owned());
                }
                events.insert(Event { target: target(&source.path), message, level, fields });
            }
        }
    }
    events
}

fn tables(events: &BTreeSet<Event>) -> String {
    let mut parts: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
    for event in events {
        parts.entry(event.level).or_default().push(event);
    }
    let mut page = String::new();
    for (level, heading) in [
        ("ERROR", "Errors: something is broken, or was lost"),
        ("WARN", "Warnings: something will break, or is not as it should be"),
        ("INFO", "What clients do wrong, at `info`"),
    ] {
        let _ = writeln!(page, "\n## {heading}\n\n| message | fields | target |\n|---|---|---|");
        for event in parts.get(level).into_iter().flatten() {
            let fields: Vec<_> = event.fields.iter().map(|field| format!("`{field}`")).collect();
            let message = event.message.replace("\\\"", "\"").replace('|', "\\|");
            let _ = writeln!(page, "| {message} | {} | `{}` |", fields.join(" "), event.target);
        }
    }
    page
}

#[test]
fn the_page_of_the_log_is_what_the_code_says() {
    let place = root().join("docs/logs.md");
    let have = fs::read_to_string(&place).expect("read docs/logs.md");
    let (head, then) = have.split_once(START).expect("where the tables begin");
    let events = events();
    assert!(events.len() > 80, "only {} events", events.len());
    let now = tables(&events);
    if std::env::var_os("MQTT_SERVER_TEST_WRITE").is_some() {
        fs::write(&place, format!("{head}{START}{now}")).expect("write docs/logs.md");
        return;
    }
    let differs = now
        .lines()
        .find(|line| !then.contains(line))
        .or_else(|| then.lines().find(|line| !now.contains(line)));
    assert!(
        now == then,
        "docs/logs.md is stale: MQTT_SERVER_TEST_WRITE=1 cargo test --test repository logs; {differs:?}"
    );
    // Messages named by the text above the tables exist.
    for named in
        head.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|line| line.split_once('`'))
    {
        let (message, _) = named;
        assert!(events.iter().any(|event| event.message.contains(message)), "nothing says {message}");
    }
}

#[test]
fn arguments_are_read_as_the_compiler_reads_them() {
    let text = "%peer, client_id = f(a, b), ?info.reason, \"ends, \\\n     now\", x); more()";
    let (fields, message) = read(&arguments(text)).expect("a message");
    assert_eq!(message, "ends, now");
    assert_eq!(fields, ["client_id", "peer", "reason"].map(str::to_owned).into());
    assert_eq!(target("src/gateway/mod.rs"), "mqtt_server::gateway");
    assert_eq!(target("crates/core/src/clock.rs"), "gateway_core::clock");
    assert_eq!(target("crates/http/src/server.rs"), "gateway_http::server");
    assert_eq!(target("crates/device-shadows/src/lib.rs"), "device_shadows");
}
