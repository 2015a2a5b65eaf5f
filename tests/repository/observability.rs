//! Files of deploy/prometheus and deploy/grafana, held against the metrics that the gateway declares, and checked by
//! promtool. Their evaluation by a real Prometheus with a real gateway is tested in tests/gateway/observability.rs.

use std::{collections::BTreeSet, fs, process::Command, time::Duration};

use crate::support::{need, prometheus, python, root, run};
use gateway_core::metrics::{Family, MetricKind};
use mqtt_server::internals::families;
use serde_json::Value;

use crate::yaml;

/// Labels that Prometheus adds, and that of a histogram's buckets.
const ADDED: [&str; 3] = ["instance", "job", "le"];

/// Label names and, for rows that are always there, values of a family.
fn labels(family: &Family) -> BTreeSet<(String, Option<String>)> {
    let rows = family.rows.iter().flat_map(|(labels, _)| labels.split(','));
    let known = rows
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), Some(value.trim_matches('"').to_owned())));
    known.chain(family.labels.iter().map(|name| ((*name).to_owned(), None))).collect()
}

/// Returns the faults in the names of an expression.
fn faults(expr: &str, recorded: &BTreeSet<String>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut met = BTreeSet::new();
    let mut rest = expr;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphabetic() || c == '_') {
        let from = &rest[at..];
        let end =
            from.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':')).unwrap_or(from.len());
        let (name, after) = from.split_at(end);
        rest = after;
        let ours = ["mqtt_", "gateway_", "process_"].iter().any(|begin| name.starts_with(begin));
        if name.contains(':') && !recorded.contains(name) {
            faults.push(format!("{name} is recorded by no rule"));
        }
        let found = families().find(|family| {
            let part = family.kind == MetricKind::Histogram
                && ["_bucket", "_sum", "_count"]
                    .iter()
                    .any(|part| name.strip_suffix(part) == Some(family.name));
            family.name == name || part
        });
        if ours && found.is_none() {
            faults.push(format!("{name} is no metric of the gateway"));
        }
        let known = found.map(labels).unwrap_or_default();
        met.extend(known.iter().map(|(label, _)| label.clone()));
        let Some((matchers, after)) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) else {
            continue;
        };
        rest = after;
        for matcher in matchers.split(',') {
            let Some((label, value)) = matcher.trim().split_once(['=', '!']) else {
                faults.push(format!("{name}{{{matcher}}} cannot be read"));
                continue;
            };
            let values = value.trim_start_matches(['=', '~', '!']).trim_matches('"');
            let of_label: Vec<_> = known.iter().filter(|(known, _)| known == label).collect();
            if !ADDED.contains(&label) && of_label.is_empty() {
                faults.push(format!("{name} has no label {label}"));
            }
            if of_label.iter().any(|(_, value)| value.is_some()) {
                let missing = values
                    .split('|')
                    .filter(|one| !of_label.iter().any(|(_, value)| value.as_deref() == Some(*one)));
                faults.extend(missing.map(|one| format!("{name} has no {label} {one}")));
            }
        }
    }
    for (_, by) in expr
        .match_indices("by (")
        .map(|(at, _)| expr[at + 4..].split_once(')').unwrap_or_default())
        .map(|(by, _)| ((), by))
    {
        for label in by.split(',').map(str::trim) {
            if !ADDED.contains(&label) && !met.contains(label) {
                faults.push(format!("nothing in {expr} has a label {label}"));
            }
        }
    }
    faults
}

/// The expressions of every rule, with its name, and the names of those that record.
fn rules(file: &Value) -> (Vec<(String, String)>, BTreeSet<String>) {
    let rules = file["groups"].as_array().expect("groups").iter();
    let rules: Vec<&Value> = rules.flat_map(|group| group["rules"].as_array().expect("rules")).collect();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let recorded = rules.iter().filter_map(|rule| text(&rule["record"])).collect();
    let all = rules.iter().map(|rule| {
        let name = text(&rule["alert"]).or_else(|| text(&rule["record"])).expect("a name");
        (name, text(&rule["expr"]).expect("an expression"))
    });
    (all.collect(), recorded)
}

fn collect<'v>(value: &'v Value, key: &str, found: &mut Vec<&'v str>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                if name == key {
                    found.extend(value.as_str());
                }
                collect(value, key, found);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, key, found)),
        _ => {}
    }
}

fn board() -> String {
    fs::read_to_string(root().join("deploy/grafana/mqtt-server.json")).expect("read the board")
}

#[test]
fn no_rule_or_panel_asks_for_a_metric_that_is_not_there() {
    let board: Value = serde_json::from_str(&board()).expect("the board is JSON");
    let mut queries = Vec::new();
    collect(&board, "expr", &mut queries);
    assert!(queries.len() > 50, "only {} queries", queries.len());
    let none = BTreeSet::new();
    let mut wrong: Vec<String> = queries.iter().flat_map(|query| faults(query, &none)).collect();
    if let Some(file) = yaml("deploy/prometheus/rules.yml") {
        let (rules, recorded) = rules(&file);
        assert!(rules.len() > 20, "only {} rules", rules.len());
        for (name, expr) in rules {
            wrong.extend(faults(&expr, &recorded).into_iter().map(|fault| format!("{name}: {fault}")));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    // The check sees what it is for.
    for bad in [
        "mqtt_connection",
        "rate(mqtt_messages_dropped_total{reason=\"queue\"}[5m])",
        "mqtt_messages_dropped_total{why=\"queue_full\"}",
        "sum by (reason) (mqtt_connections)",
        "instance:nothing:rate5m > 1",
    ] {
        assert_eq!(faults(bad, &none).len(), 1, "{bad}: {:?}", faults(bad, &none));
    }
}

/// Returns the unknown names in a text for people: keys of the configuration, calls of the API, and pages.
fn unknown_names(text: &str) -> Vec<String> {
    let keys = keys();
    let calls = calls();
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_./-".contains(c)));
    let words = words.map(|word| word.trim_matches(['.', '-', '/']));
    let mut unknown = Vec::new();
    for word in words.filter(|word| word.contains(['.', '/'])) {
        let is_page = word.starts_with("docs/");
        if is_page && !root().join(word).exists() {
            unknown.push(format!("{word} is no page"));
        }
        let Some((section, name)) = word.split_once('.').filter(|_| !is_page) else { continue };
        if section.starts_with(|c: char| c.is_ascii_uppercase()) && !calls.contains(word) {
            unknown.push(format!("{word} is no call of the API"));
        }
        // Capitals are a placeholder, and labels are those of the alert.
        let is_key =
            word.chars().all(|c| !c.is_ascii_uppercase()) && !section.is_empty() && section != "labels";
        if is_key && !keys.contains(word) {
            unknown.push(format!("{section}.{name} is no key of the configuration"));
        }
    }
    unknown
}

/// The keys that docs/mqtt-server.toml shows, with their sections.
fn keys() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("docs/mqtt-server.toml")).expect("read the configuration");
    let mut keys = BTreeSet::new();
    let mut section = String::new();
    for line in text.lines() {
        let line = line.trim_start_matches(['#', ' ']);
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            name.0.trim_start_matches('[').clone_into(&mut section);
        } else if let Some((name, _)) = line.split_once(" = ") {
            keys.insert(format!("{section}.{name}"));
        }
    }
    keys
}

/// `Service.Method` of each call in the protos.
fn calls() -> BTreeSet<String> {
    let folder = fs::read_dir(root().join("proto/gateway/v1")).expect("list the protos");
    let mut calls = BTreeSet::new();
    for file in folder {
        let text = fs::read_to_string(file.expect("a file").path()).expect("read a proto");
        let mut service = "";
        for line in text.lines().map(str::trim_start) {
            if let Some(rest) = line.strip_prefix("service ") {
                service = rest.split(' ').next().unwrap_or_default();
            } else if let Some(rest) = line.strip_prefix("rpc ") {
                calls.insert(format!("{service}.{}", rest.split('(').next().unwrap_or_default()));
            }
        }
    }
    calls
}

/// The failure: an alert sent who was woken by it to a limit and a call that did not exist.
#[test]
fn no_alert_or_panel_names_what_is_not_there() {
    let board: Value = serde_json::from_str(&board()).expect("the board is JSON");
    let mut texts = Vec::new();
    collect(&board, "description", &mut texts);
    let rules = yaml("deploy/prometheus/rules.yml");
    if let Some(file) = &rules {
        let before = texts.len();
        ["summary", "description", "runbook"].into_iter().for_each(|key| collect(file, key, &mut texts));
        assert!(texts.len() > before + 40, "only {} texts", texts.len() - before);
    }
    let wrong: Vec<String> = texts
        .iter()
        .flat_map(|text| unknown_names(text).into_iter().map(move |fault| format!("{fault}: {text}")))
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    // The check sees what it is for.
    for bad in [
        "limits.max_queued_messages bounds it.",
        "Consumer.ListPending shows it.",
        "see docs/operations/nothing.md.",
    ] {
        assert_eq!(unknown_names(bad).len(), 1, "{bad}: {:?}", unknown_names(bad));
    }
    let good = "Groups.ListPending, limits.offline_messages, docs/metrics.md. {{ $labels.reason }}";
    assert!(unknown_names(good).is_empty(), "{:?}", unknown_names(good));
}

#[test]
fn the_board_is_what_its_script_makes() {
    let python = python().unwrap_or_else(|| "python3".into());
    let mut command = Command::new(python);
    command.arg("deploy/grafana/board.py").current_dir(root());
    let (success, made) = run(&mut command, Duration::from_secs(60));
    assert!(success, "{made}");
    assert!(
        made.trim() == board().trim(),
        "stale: python3 deploy/grafana/board.py > deploy/grafana/mqtt-server.json"
    );
}

#[test]
fn promtool_takes_the_rules_and_every_alert_has_a_case() {
    let Some(tools) = prometheus() else { return };
    if !need("the Python environment .venv", python().is_some()) {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    // The configuration names a token; the checks want it to be there.
    for file in ["prometheus.yml", "rules.yml", "rules.test.yml"] {
        fs::copy(root().join("deploy/prometheus").join(file), dir.path().join(file)).expect("copy");
    }
    fs::write(dir.path().join("token"), "mqs_x").expect("write a token");
    for arguments in [["check", "config", "prometheus.yml"], ["test", "rules", "rules.test.yml"]] {
        let mut command = Command::new(tools.join("promtool"));
        command.args(arguments).current_dir(dir.path());
        let (success, output) = run(&mut command, Duration::from_secs(120));
        assert!(success, "{arguments:?}: {output}");
    }
    let Some(file) = yaml("deploy/prometheus/rules.yml") else { return };
    let cases = fs::read_to_string(dir.path().join("rules.test.yml")).expect("read the cases");
    let page = fs::read_to_string(root().join("docs/observability.md")).expect("read the page");
    let (rules, recorded) = rules(&file);
    for (name, _) in rules.iter().filter(|(name, _)| !recorded.contains(name)) {
        assert!(page.contains(&format!("`{name}`")), "the page has no {name}");
        assert!(cases.contains(&format!("alertname=\"{name}\"")), "no case raises {name}");
    }
}
