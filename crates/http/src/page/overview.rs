//! The first page: the state of the gateway, with charts that grow while somebody looks.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use axum::{extract::State, response::Response};
use gateway_api::gateway::v1;
use maud::{Markup, html};
use prost_types::Timestamp;
use tonic::Status;

use super::{
    chart::{ChartLine, chart},
    layout::{self, bytes, problem, time},
    live,
    ring::{STEP, Sample, levels, rates, ratios},
    state::PageState,
    visit::Visitor,
};

/// Figures behind the charts and the tables.
const WANTED: &[&str] = &[
    "mqtt_connections",
    "mqtt_sessions",
    "mqtt_subscriptions",
    "mqtt_messages_",
    "mqtt_payload_bytes_",
    "mqtt_queued_",
    "mqtt_inflight_messages",
    "mqtt_retained_",
    "gateway_memory_",
    "gateway_store_",
    "gateway_log_commit",
    "gateway_latest_",
    "gateway_grpc_streams",
    "gateway_certificate_days_left",
    "gateway_cluster_",
    "gateway_ledger_",
];

struct OverviewData {
    status: v1::GetStatusResponse,
    samples: Vec<Sample>,
}

/// Asks the API, with the visitor's rights, and adds what it says to the samples that all share.
async fn look(page_state: &PageState, visitor: &Visitor) -> Result<OverviewData, Status> {
    let mut operations = visitor.api.operations();
    let status = operations.get_status(v1::GetStatusRequest {}).await?.into_inner();
    let name_prefixes = WANTED.iter().map(|name| (*name).to_owned()).collect();
    let metrics = operations.get_metrics(v1::GetMetricsRequest { name_prefixes }).await?.into_inner();
    let at = metrics.time.map_or(0, |at| at.seconds as u64 * 1_000 + at.nanos as u64 / 1_000_000);
    let samples = page_state.ring.with(Sample::new(at, &metrics.metrics));
    Ok(OverviewData { status, samples })
}

pub(super) async fn show(State(page_state): State<Arc<PageState>>, visitor: Visitor) -> Response {
    let body = match look(&page_state, &visitor).await {
        Ok(seen) => html! {
            div data-live="/page/live/overview" {
                p data-status aria-live="polite" { "as of the moment the page was loaded; live with script" }
                div #overview { (content(&seen)) }
            }
        },
        Err(status) => html! {
            (problem(&status))
            p { "What is about all devices is for callers whose scope does not limit devices. Yours is:" }
            (scope(visitor.caller.scope.as_ref()))
        },
    };
    layout::page(&visitor, "/page/", "Overview", body)
}

fn scope(scope: Option<&v1::Scope>) -> Markup {
    let lists = scope.map(|scope| [("Topics", &scope.topic_filters), ("Devices", &scope.device_patterns)]);
    html! {
        dl {
            @for (name, list) in lists.into_iter().flatten() {
                dt { (name) }
                dd { @if list.is_empty() { "all" } @else { code { (list.join(", ")) } } }
            }
        }
    }
}

/// Looks again and again for as long as the page is open.
pub(super) async fn live(State(page_state): State<Arc<PageState>>, visitor: Visitor) -> Response {
    let own = Arc::clone(&page_state);
    live::stream(&own, visitor, |visitor, events| async move {
        let mut ticks = tokio::time::interval(Duration::from_millis(STEP));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match look(&page_state, &visitor).await {
                Ok(seen) => events.set("overview", &content(&seen)).await?,
                // The rights may be over.
                Err(status) => return events.end(status.message()).await,
            }
        }
    })
}

fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> ChartLine {
    ChartLine { name: name.into(), points }
}

/// A line for each QoS.
fn by_qos(samples: &[Sample], name: &str) -> Vec<ChartLine> {
    let of = |qos: u8| {
        let key = format!("{name}{{qos={qos}}}");
        line(format!("QoS {qos}"), rates(samples, |sample| sample.get(&key)))
    };
    (0..3).map(of).collect()
}

/// A line for each label of `name` whose last value is among the highest.
fn by_label(samples: &[Sample], name: &str, of: impl Fn(&str) -> Vec<(f64, f64)>) -> Vec<ChartLine> {
    let Some(last) = samples.last() else { return Vec::new() };
    let mut labels: Vec<(&str, f64)> = last.by_label(name).filter(|(_, value)| *value > 0.0).collect();
    labels.sort_by(|a, b| b.1.total_cmp(&a.1));
    labels.truncate(6);
    let shown = |label: &str| label.split_once('=').map_or(label, |(_, value)| value).replace('_', " ");
    labels.iter().map(|(label, _)| line(shown(label), of(&format!("{name}{{{label}}}")))).collect()
}

fn content(OverviewData { status, samples }: &OverviewData) -> Markup {
    let Some(now) = samples.last() else { return html! {} };
    let level = |name: &'static str| levels(samples, move |sample| sample.get(name));
    let dropped =
        by_label(samples, "mqtt_messages_dropped_total", |key| rates(samples, |sample| sample.get(key)));
    let memory = by_label(samples, "gateway_memory_bytes", |key| {
        levels(samples, |sample| sample.get(key) / f64::from(1 << 20))
    });
    let millis = |of: &'static str, by: &'static str| {
        ratios(samples, move |sample| sample.get(of) / 1e3, move |sample| sample.get(by))
    };
    let latency = [
        line(
            "commit of the store",
            millis("gateway_store_commit_microseconds_total", "gateway_store_commits_total"),
        ),
        line(
            "commit of the log",
            millis("gateway_log_commit_microseconds_total", "gateway_log_commits_total"),
        ),
        line(
            "write of latest values",
            ratios(
                samples,
                |sample| sample.get("gateway_latest_write_seconds_sum") * 1e3,
                |sample| sample.get("gateway_latest_write_seconds_count"),
            ),
        ),
    ];
    let none = [line("dropped", vec![(-60.0, 0.0), (0.0, 0.0)])];
    html! {
        @if status.problems.is_empty() {
            p.notice.good role="status" { "All is well." }
        } @else {
            div.notice.bad role="alert" { @for problem in &status.problems { div { (problem) } } }
        }
        dl.card {
            dt { "Version" } dd { (status.version) }
            dt { "Started" } dd { (time(status.start_time.as_ref())) " (" (lasts(status.start_time.as_ref(), now.at)) ")" }
            dt { "Sessions" } dd { (now.get("mqtt_sessions")) " (" (now.get("mqtt_connections")) " connected)" }
            dt { "Subscriptions" } dd { (now.get("mqtt_subscriptions")) }
            dt { "Retained" } dd { (now.get("mqtt_retained_messages")) " messages, " (bytes(now.get("mqtt_retained_bytes"))) }
            dt { "Waiting" } dd { (now.get("mqtt_queued_messages")) " messages in memory, " (now.get("gateway_store_queued")) " on disk" }
            dt { "gRPC streams" } dd { (now.get("gateway_grpc_streams")) }
        }
        div.stack.grid {
            section { (chart("Connections", "", &[line("connected", level("mqtt_connections")), line("sessions", level("mqtt_sessions"))])) }
            section { (chart("Messages in", "/s", &by_qos(samples, "mqtt_messages_received_total"))) }
            section { (chart("Messages out", "/s", &by_qos(samples, "mqtt_messages_sent_total"))) }
            section { (chart("Payload bytes in", "B/s", &by_qos(samples, "mqtt_payload_bytes_received_total"))) }
            section { (chart("Payload bytes out", "B/s", &by_qos(samples, "mqtt_payload_bytes_sent_total"))) }
            section { (chart("Dropped, by reason", "/s", if dropped.is_empty() { &none } else { &dropped })) }
            section { (chart("Write latency of the stores", "ms", &latency)) }
            section {
                (chart("Memory account", "MiB", &memory))
                p.why {
                    (bytes(now.by_label("gateway_memory_bytes").map(|(_, value)| value).sum()))
                    " of " (bytes(now.get("gateway_memory_budget_bytes"))) " (limits.memory_budget)"
                }
            }
            section {
                h2 { "Stores" }
                (stores(now))
            }
            @if now.values.contains_key("gateway_cluster_epoch") {
                section {
                    h2 { "Cluster" }
                    (cluster(now))
                }
            }
        }
    }
}

fn stores(now: &Sample) -> Markup {
    let mut rows: Vec<(String, bool)> = now
        .by_label("gateway_store_healthy")
        .map(|(label, value)| (label.trim_start_matches("store=").to_owned(), value > 0.0))
        .collect();
    if now.values.contains_key("gateway_latest_healthy") {
        rows.push(("latest".to_owned(), now.get("gateway_latest_healthy") > 0.0));
    }
    let rows: BTreeSet<_> = rows.into_iter().collect();
    html! {
        @if rows.is_empty() { p.muted { "There is no store: nothing is on disk." } }
        table {
            @for (name, is_sound) in &rows {
                tr {
                    th scope="row" { (name) }
                    td class=(if *is_sound { "good" } else { "bad" }) { @if *is_sound { "takes writes" } @else { "fails" } }
                }
            }
        }
        @if now.get("gateway_store_set_aside") > 0.0 {
            p.bad { (now.get("gateway_store_set_aside")) " damaged files were set aside at the start" }
        }
        @if now.get("gateway_latest_spilled") > 0.0 {
            p.warn { (now.get("gateway_latest_spilled")) " latest values wait for the database" }
        }
    }
}

/// The cluster as this gateway sees it, which serves.
fn cluster(now: &Sample) -> Markup {
    let nodes: Vec<(&str, &str)> =
        now.by_label("gateway_cluster_nodes").filter_map(|(labels, _)| node(labels)).collect();
    let this = nodes.iter().find(|(_, part)| *part == "serves").map_or("-", |(name, _)| name);
    let others: Vec<_> = nodes.iter().filter(|(_, part)| *part != "serves").collect();
    let oldest = now.get("gateway_ledger_oldest_append_seconds");
    html! {
        dl {
            dt { "This gateway" } dd { (this) " serves, in epoch " (now.get("gateway_cluster_epoch")) }
            dt { "Others" }
            dd {
                @if others.is_empty() { span.warn { "nobody stands by" } }
                @for (name, part) in &others {
                    div { (name) " " (stands(part)) }
                }
            }
            dt { "On their way" }
            dd class=[(oldest > 3.0).then_some("bad")] {
                (now.get("gateway_ledger_appends")) " records, " (bytes(now.get("gateway_ledger_redo_bytes")))
                " in memory, the oldest for " (format!("{oldest:.1}")) " s; "
                (now.get("gateway_ledger_waiting_answers")) " answers wait"
            }
            dt { "Records" }
            dd {
                (now.get("gateway_ledger_records_total")) ", "
                (bytes(now.get("gateway_ledger_appended_bytes_total"))) "; "
                (now.get("gateway_ledger_repeats_total")) " calls were made again"
            }
        }
        table {
            caption { "In the ledger, about" }
            @for (label, value) in now.by_label("gateway_ledger_bytes") {
                tr {
                    th scope="row" { (label.trim_start_matches("store=")) }
                    td { (bytes(value)) }
                }
            }
        }
    }
}

/// Name and part of a node in labels, which are in the order of their names. A name may have a comma.
fn node(labels: &str) -> Option<(&str, &str)> {
    let (node, part) = labels.rsplit_once(",part=")?;
    Some((node.strip_prefix("node=")?, part))
}

fn stands(part: &str) -> Markup {
    match part {
        "warm" => html! { span.good { "stands by, its copy is warm" } },
        "copying" => html! { span.warn { "stands by, its copy is being made" } },
        _ => html! { span.bad { "gives no sign of life" } },
    }
}

fn lasts(start: Option<&Timestamp>, now: u64) -> String {
    let seconds = start.map_or(0, |start| (now / 1_000).saturating_sub(start.seconds as u64));
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes} min"),
        (0, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(figures: &[(&str, f64)]) -> String {
        let values = figures.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let status = v1::GetStatusResponse::default();
        content(&OverviewData { status, samples: vec![Sample { at: 1, values }] }).into_string()
    }

    /// The failures: a gateway that is alone shows a cluster; one that is dead is shown as standing by; a name is cut at its comma.
    #[test]
    fn the_cluster_is_shown_by_a_gateway_that_serves_one() {
        assert!(!page(&[("gateway_store_queued", 1.0)]).contains("Cluster"));
        let shown = page(&[
            ("gateway_cluster_epoch", 7.0),
            ("gateway_cluster_nodes{node=left,part=serves}", 1.0),
            ("gateway_cluster_nodes{node=right,2,part=warm}", 1.0),
            ("gateway_cluster_nodes{node=third,part=silent}", 1.0),
            ("gateway_ledger_bytes{store=state}", f64::from(3 << 20)),
            ("gateway_ledger_oldest_append_seconds", 4.25),
            ("gateway_ledger_repeats_total", 12.0),
        ]);
        for part in [
            "left serves, in epoch 7",
            "right,2 <span class=\"good\">stands by, its copy is warm",
            "third <span class=\"bad\">gives no sign of life",
            "<dd class=\"bad\">0 records",
            "the oldest for 4.2 s",
            "12 calls were made again",
            "state</th><td>3.0 MiB",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(page(&[("gateway_cluster_epoch", 1.0)]).contains("nobody stands by"));
    }
}
