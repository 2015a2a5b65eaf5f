//! What `/metrics` and OTLP show.

use ::values::LatestCache;
use broker::{Broker, Counted, MemoryKind};
use gateway_core::{
    clock,
    metrics::{MetricRow, figures},
};
use telemetry::{ProcessStats, rows};

use super::{counters, health::StoreWatch};

/// Returns the rows of `/metrics` and OTLP: those of homes, and those of the process.
pub(super) fn with_process(homes: Vec<MetricRow>) -> Vec<MetricRow> {
    rows(counters::rows(), homes, &ProcessStats::read())
}

/// Returns the rows of a home.
pub(super) fn home_rows(broker: &Broker, latest: Option<&LatestCache>, watch: &StoreWatch) -> Vec<MetricRow> {
    let mut rows = broker_rows(broker);
    rows.extend(latest.into_iter().flat_map(latest_rows));
    rows.extend(watch.figures());
    watch.bridges.rows(watch.home.groups(), &mut rows);
    if let Some(latest) = latest {
        rows.extend(latest.write_latency().rows(&figures::LATEST_WRITE));
    }
    rows
}

/// Adds a row of another home to one of the same name and labels. Ages and dates do not add up, nor does health.
pub(super) fn add(to: &mut MetricRow, row: &MetricRow) {
    let ends = |words: &[&str]| words.iter().any(|word| row.name.ends_with(word));
    to.value = match () {
        () if ends(&["_healthy"]) => to.value.min(row.value),
        () if ends(&["_seconds", "_days", "_active", "_epoch", "_nodes"]) && row.suffix.is_empty() => {
            to.value.max(row.value)
        }
        () => to.value + row.value,
    };
}

/// Returns the rows of a broker.
pub(super) fn broker_rows(broker: &Broker) -> Vec<MetricRow> {
    let (now, queues) = (broker.gauges(), broker.queues());
    let account = broker.account();
    let mut all = vec![
        figures::CONNECTIONS.is(now.online as f64),
        figures::SESSIONS.is(now.sessions as f64),
        figures::SUBSCRIPTIONS.is(now.subscriptions as f64),
        figures::SHARED_GROUPS.is(now.shared_groups as f64),
        figures::RETAINED_MESSAGES.is(now.retained as f64),
        figures::RETAINED_BYTES.is(now.retained_bytes as f64),
        figures::QUEUED_BYTES.is(now.queued_bytes as f64),
        figures::QUEUED_MESSAGES.is(queues.pending as f64),
        figures::INFLIGHT_MESSAGES.is(queues.inflight as f64),
        figures::GRPC_STREAMS.is(now.streams as f64),
        figures::MEMORY_BUDGET.is(account.limit() as f64),
    ];
    all.extend(MemoryKind::ALL.map(|kind| figures::MEMORY.of([kind.as_str()], account.held(kind) as f64)));
    if broker.lease().is_set() {
        all.push(figures::LEDGER_ANSWERS.is(broker.lease().waiting() as f64));
    }
    all.extend(broker.tenants().flat_map(|holder| {
        let usage = |what: Counted| {
            figures::TENANT_USAGE.of([holder.name(), what.as_str()], holder.used(what) as f64)
        };
        Counted::ALL.map(usage)
    }));
    all
}

fn latest_rows(latest: &LatestCache) -> [MetricRow; 5] {
    let store = latest.gauges();
    let oldest = latest.oldest_pending(clock::to_wall(clock::now()));
    [
        figures::LATEST_PENDING.is(store.pending_values as f64),
        figures::LATEST_PENDING_BYTES.is(store.pending_bytes as f64),
        figures::LATEST_HEALTHY.is(u8::from(store.healthy).into()),
        figures::LATEST_SPILLED.is(store.spilled as f64),
        figures::LATEST_OLDEST.is(oldest.as_secs_f64()),
    ]
}
