//! History of the topics that `database.history` names, beside the latest values in the database.

use std::sync::Arc;

use cassandra::{ScyllaHistory, ScyllaLatest};
use config::Config;
use gateway_core::metrics::{Row, figures};
use tracing::info;
use values::{History, HistoryOptions, HistoryRule, LatestOptions};

/// Not yet running; `None` if no topic has a history. `latest` is how latest values go into the same database.
pub(super) fn open(config: &Config, database: &ScyllaLatest, latest: &LatestOptions) -> Option<Arc<History>> {
    let rules = &config.database.history;
    if rules.is_empty() {
        return None;
    }
    info!(rules = rules.len(), "history is kept in the database");
    let rules = rules.iter().map(|rule| HistoryRule { filter: rule.filter.clone(), ttl: rule.ttl.0 });
    let options = HistoryOptions {
        rules: rules.collect(),
        flush_interval: latest.flush_interval,
        max_bytes: config.limits.waiting_history().0,
        version_start: latest.mark.as_ref().map_or(0, |mark| mark.ceiling()),
        version_offset: latest.version_offset,
        write_timeout: latest.write_timeout,
        reads: Arc::clone(&latest.reads),
        // Within the quarter of the deadline that is kept for stores.
        last_flush: config.shutdown.deadline.0 / 5,
        ..HistoryOptions::default()
    };
    Some(History::new(Arc::new(ScyllaHistory::new(database)), options))
}

/// Returns the figures of values that wait for the database.
pub(super) fn figures(history: &History) -> [Row; 3] {
    let now = history.gauges();
    [
        figures::HISTORY_PENDING.is(now.pending as f64),
        figures::HISTORY_PENDING_BYTES.is(now.pending_bytes as f64),
        figures::HISTORY_HEALTHY.is(u8::from(now.healthy).into()),
    ]
}
