//! The store of latest values, a database that `db_addr` names or else the data directory; and history of the topics that
//! `database.history` names, in the same database.

use std::{sync::Arc, time::Duration};

use ::values::{History, HistoryOptions, HistoryRule, LatestCache, LatestOptions};
use cassandra::{ScyllaHistory, ScyllaLatest, ScyllaOptions, ScyllaShadows, ScyllaTtlRule};
use config::Config;
use disk::{EmbeddedLatest, EmbeddedOptions, LatestLedger};
use edge::tls;
use gateway_core::metrics::{MetricRow, figures};
use store::{DataDir, SpillStore, VersionMark, server_id, version_offset};
use tracing::info;

use super::{StartError, home::HomeLedger};

/// A database that has nothing to write is asked for a sign of life this often.
const PROBE: Duration = Duration::from_secs(2);

/// Latest values and history, not yet running.
#[derive(Default)]
pub(super) struct OpenedValues {
    pub(super) latest: Option<Arc<LatestCache>>,
    /// History of the topics that have one.
    pub(super) history: Option<Arc<History>>,
    /// Shadows in the same database.
    pub(super) shadows: Option<Arc<ScyllaShadows>>,
    /// Latest values in the data directory.
    pub(super) on_disk: Option<Arc<EmbeddedLatest>>,
}

/// Opens what is in the data directory; a database is connected to later, by the first write or read.
pub(super) fn open(
    config: &Config,
    directory: &Arc<DataDir>,
    ledger: Option<&HomeLedger>,
) -> Result<OpenedValues, StartError> {
    let ledger = ledger.filter(|_| config.latest_in_ledger());
    let options = LatestOptions {
        flush_interval: config.latest.flush_interval.0,
        max_bytes: config.latest.max_bytes.0,
        max_memory: config.limits.waiting_values().0,
        topics_per_device: config.latest.topics_per_device,
        excluded: config.latest.excluded.clone(),
        mark: Some(Arc::new(VersionMark::open(directory)?)),
        ..LatestOptions::default()
    };
    match config.contact_points() {
        none if none.is_empty() => {
            let ledger = ledger.map(|ledger| LatestLedger {
                shipping: Arc::clone(&ledger.latest),
                interval: config.latest.ledger_interval.0,
                bytes: config.latest.ledger_bytes.0,
            });
            let store = embedded(config, directory, ledger)?;
            let latest = Some(LatestCache::new(Arc::clone(&store) as _, options));
            Ok(OpenedValues { latest, on_disk: Some(store), ..OpenedValues::default() })
        }
        contact_points => open_database(config, directory, contact_points, options),
    }
}

fn embedded(
    config: &Config,
    directory: &Arc<DataDir>,
    ledger: Option<LatestLedger>,
) -> Result<Arc<EmbeddedLatest>, StartError> {
    let topics_per_device = config.latest.topics_per_device;
    let options = EmbeddedOptions { topics_per_device, ledger, ..EmbeddedOptions::default() };
    Ok(Arc::new(EmbeddedLatest::open(directory, &options)?))
}

fn open_database(
    config: &Config,
    directory: &Arc<DataDir>,
    contact_points: Vec<String>,
    options: LatestOptions,
) -> Result<OpenedValues, StartError> {
    let database = &config.database;
    let server_id = match database.server_id.as_str() {
        "" => server_id(directory)?,
        id => id.to_owned(),
    };
    info!(nodes = contact_points.join(","), server_id, "latest values are kept in the database");
    let options = LatestOptions {
        version_offset: version_offset(&server_id),
        // A batch is many requests.
        write_timeout: options.write_timeout.max(database.request_timeout.0 * 6),
        // Half of the time that the shutdown keeps for latest values; the other half is for the spill.
        last_write: config.shutdown.deadline.0 / 8,
        probe: Some(PROBE),
        spill_running: database.spill_running,
        memory_reads: database.memory_reads,
        ..options
    };
    let spill = if database.spill { Some(embedded(config, directory, None)?) } else { None };
    let on_disk = spill.clone();
    let spill = spill.map(|spill| spill as Arc<dyn SpillStore>);
    let store = ScyllaLatest::new(database_options(config, contact_points, server_id)?)?;
    let history = open_history(config, &store, &options);
    let shadows = Some(Arc::new(ScyllaShadows::new(&store)));
    Ok(OpenedValues {
        latest: Some(LatestCache::with_spill(Arc::new(store), spill, options)),
        history,
        shadows,
        on_disk,
    })
}

fn database_options(
    config: &Config,
    contact_points: Vec<String>,
    server_id: String,
) -> Result<ScyllaOptions, StartError> {
    let database = &config.database;
    let tls = tls::client_config(&database.tls, config.tls.open_key_files)
        .map_err(|error| StartError::Tls { name: "database".to_owned(), error })?;
    let delay = database.speculative_delay.0;
    let ttl = database.ttl.iter();
    Ok(ScyllaOptions {
        contact_points,
        datacenter: database.datacenter.clone(),
        username: database.username.clone(),
        password: config.database_password()?.expose().to_owned(),
        tls: tls.map(Arc::new),
        keyspace: database.keyspace.clone(),
        replication: database.replication.to_cql(),
        migrate: database.migrate,
        write_consistency: database.write_consistency,
        read_consistency: database.read_consistency,
        connect_timeout: database.connect_timeout.0,
        request_timeout: database.request_timeout.0,
        speculative_delay: (!delay.is_zero() && database.speculative_attempts > 0).then_some(delay),
        speculative_attempts: database.speculative_attempts,
        compression: database.compression,
        concurrency: database.concurrency,
        topics_per_device: config.latest.topics_per_device,
        ttl: ttl.map(|rule| ScyllaTtlRule { filter: rule.filter.clone(), ttl: rule.ttl.0 }).collect(),
        server_id,
    })
}

/// Not yet running; `None` if no topic has a history. `latest` is how latest values go into the same database.
fn open_history(config: &Config, database: &ScyllaLatest, latest: &LatestOptions) -> Option<Arc<History>> {
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
pub(super) fn history_figures(history: &History) -> [MetricRow; 3] {
    let now = history.gauges();
    [
        figures::HISTORY_PENDING.is(now.pending as f64),
        figures::HISTORY_PENDING_BYTES.is(now.pending_bytes as f64),
        figures::HISTORY_HEALTHY.is(u8::from(now.healthy).into()),
    ]
}
