//! docs/metrics.md, made of what the crates declare. `MQTT_SERVER_TEST_WRITE=1 cargo test --test repository metrics` writes it
//! anew.

use std::{collections::BTreeSet, fmt::Write, fs};

use gateway_core::metrics::{Family, MetricKind};
use mqtt_server::internals::families;

use crate::support::root;

const HEAD: &str = "\
# Metrics

All that `/metrics` shows, and OTLP export sends. This page is made of the declarations in `counters.rs` of each crate and in
[`figures.rs`](../crates/core/src/metrics/figures.rs), and a test holds it against them. What to look at first is in
[operations](operations/metrics.md#metrics).

No label carries a client id or a topic. Counters begin at 0 with the process and are there from its start, with every value of
their labels; a gauge is there as soon as what it measures is. A unit is part of the name; where there is none, things are counted.
";

/// Headings, and what the names below them begin with; the first that fits.
const PARTS: &[(&str, &[&str])] = &[
    (
        "Connections and logins",
        &[
            "mqtt_connections",
            "mqtt_quic",
            "mqtt_tls",
            "mqtt_auth",
            "mqtt_reauth",
            "mqtt_login",
            "mqtt_ban",
            "mqtt_flapping",
            "mqtt_keep_alive",
            "mqtt_packet_timeouts",
            "mqtt_write_timeouts",
            "mqtt_takeovers",
            "mqtt_protocol_errors",
            "gateway_bans",
            "gateway_certificate",
            "gateway_auth_hook",
            "gateway_hook",
            "gateway_jwks",
            "gateway_remote",
        ],
    ),
    (
        "Messages of devices",
        &[
            "mqtt_messages",
            "mqtt_payload",
            "mqtt_bytes",
            "mqtt_packets",
            "mqtt_queued",
            "mqtt_inflight",
            "mqtt_deliveries",
            "mqtt_non_broker",
            "mqtt_wills",
        ],
    ),
    (
        "Sessions, subscriptions and retained messages",
        &["mqtt_sessions", "mqtt_subscriptions", "mqtt_shared", "mqtt_retained"],
    ),
    (
        "Limits and memory",
        &[
            "mqtt_quota",
            "mqtt_rate",
            "mqtt_sending",
            "mqtt_yields",
            "mqtt_memory",
            "gateway_memory",
            "gateway_tenant",
        ],
    ),
    ("Disk", &["gateway_store"]),
    ("Latest values, history and their database", &["gateway_latest", "gateway_history", "gateway_database"]),
    ("Consumer groups", &["gateway_group", "gateway_log"]),
    ("Bridges", &["gateway_bridge"]),
    ("Commands and device shadows", &["gateway_commands", "gateway_shadow"]),
    (
        "gRPC and HTTP",
        &[
            "gateway_grpc",
            "gateway_http",
            "gateway_page",
            "gateway_backend",
            "gateway_audit",
            "gateway_events",
        ],
    ),
    ("The process", &["process_", "mqtt_server"]),
    ("A cluster and its ledger", &["gateway_cluster", "gateway_ledger"]),
    ("Links between gateways", &["gateway_links", "gateway_relays", "gateway_calls"]),
];

/// A comment as Rust has it, as one line.
fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Label names in a row's labels; no value has an equals sign.
fn labels(family: &Family) -> Vec<&str> {
    let of_rows = family.rows.iter().flat_map(|(labels, _)| labels.split(','));
    let mut names: Vec<&str> =
        of_rows.filter_map(|pair| pair.split_once('=')).map(|(name, _)| name).collect();
    names.extend(family.labels);
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

fn describe(page: &mut String, family: &Family) {
    let kind = family.kind.name();
    let unit = family.unit().map_or_else(String::new, |unit| format!(", in {unit}"));
    let _ = writeln!(page, "\n### `{}`\n\n{}. A {kind}{unit}.", family.name, family.help);
    let about = line(family.about);
    if !about.is_empty() {
        let _ = writeln!(page, "{about}");
    }
    if family.kind == MetricKind::Histogram {
        let _ = writeln!(page, "With `_bucket` by `le`, `_sum` and `_count`.");
    }
    let names = labels(family);
    if family.rows.iter().any(|(_, meaning)| !meaning.is_empty()) {
        let head = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(page, "\n| {head} | |\n|{}", "---|".repeat(names.len() + 1));
        for (labels, meaning) in family.rows {
            let values = labels.split(',').filter_map(|pair| pair.split_once('='));
            let values: Vec<_> = values.map(|(_, value)| format!("`{}`", value.trim_matches('"'))).collect();
            let _ = writeln!(page, "| {} | {} |", values.join(" | "), line(meaning));
        }
        return;
    }
    for name in &names {
        let pairs = family
            .rows
            .iter()
            .flat_map(|(labels, _)| labels.split(','))
            .filter_map(|pair| pair.split_once('='));
        let mut seen = BTreeSet::new();
        let values =
            pairs.filter(|(have, value)| have == name && seen.insert(*value)).map(|(_, value)| value);
        let values: Vec<_> = values.map(|value| format!("`{}`", value.trim_matches('"'))).collect();
        let values = if values.is_empty() { String::new() } else { format!(": {}", values.join(", ")) };
        let _ = writeln!(page, "\nLabel `{name}`{values}");
    }
}

fn page() -> String {
    let mut page = HEAD.to_owned();
    let mut left: Vec<&Family> = families().collect();
    for (heading, begins) in PARTS {
        let (here, others) =
            left.into_iter().partition(|family| begins.iter().any(|begin| family.name.starts_with(begin)));
        let here: Vec<&Family> = here;
        assert!(!here.is_empty(), "nothing below {heading}");
        let _ = writeln!(page, "\n## {heading}");
        for family in here {
            describe(&mut page, family);
        }
        left = others;
    }
    let names: Vec<_> = left.iter().map(|family| family.name).collect();
    assert!(names.is_empty(), "which part of the page is for {names:?}? See PARTS");
    page
}

#[test]
fn the_page_of_metrics_is_what_the_code_declares() {
    let place = root().join("docs/metrics.md");
    let page = page();
    if std::env::var_os("MQTT_SERVER_TEST_WRITE").is_some() {
        fs::write(&place, &page).expect("write docs/metrics.md");
    }
    let have = fs::read_to_string(&place).unwrap_or_default();
    let differs = page.lines().zip(have.lines()).find(|(now, then)| now != then);
    assert!(
        page == have,
        "docs/metrics.md is stale: MQTT_SERVER_TEST_WRITE=1 cargo test --test repository metrics; {differs:?}"
    );
}

#[test]
fn names_follow_the_conventions_and_none_is_declared_twice() {
    let mut known = BTreeSet::new();
    for family in families() {
        let name = family.name;
        assert!(known.insert(name), "{name} twice");
        assert!(["mqtt_", "gateway_", "process_"].iter().any(|begin| name.starts_with(begin)), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
        assert_eq!(family.kind == MetricKind::Counter, name.ends_with("_total"), "{name}");
        assert!(!family.help.ends_with('.') && !family.help.contains('|'), "{name}: {}", family.help);
        let mut rows = BTreeSet::new();
        let kinds: BTreeSet<usize> =
            family.rows.iter().map(|(labels, _)| labels.matches('=').count()).collect();
        assert!(kinds.len() <= 1, "rows of {name} have different labels");
        for (labels, meaning) in family.rows {
            assert!(rows.insert(labels), "{name}{{{labels}}} twice");
            assert!(!meaning.contains('|'), "{name}: {meaning}");
        }
    }
}
