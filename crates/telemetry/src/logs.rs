//! The log: its destination, its form, its filter.

use std::{io::IsTerminal, sync::Arc};

use config::{Log, LogFormat, log_level};
use tracing::{Level, Subscriber};
use tracing_subscriber::{
    Layer, Registry,
    filter::{LevelFilter, Targets},
    fmt,
    layer::SubscriberExt,
    util::{SubscriberInitExt, TryInitError},
};

use super::{
    audit::{AUDIT, AuditFile},
    libraries::{LibraryLimits, Passing, with_libraries},
    lines::Lines,
    trace::trace_clients,
};

/// Target of the events of traced clients, which pass at any level.
pub(super) const CLIENT_TRACE: &str = "client_trace";

/// A further layer of the subscriber, such as an exporter.
pub(super) type ExtraLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Starts the log on standard error, and that of the audit in its file if it has one. `extra` gets what the level lets
/// pass.
///
/// # Errors
/// There is a subscriber already.
pub(super) fn init(
    log: &Log,
    audit: Option<Arc<AuditFile>>,
    extra: Option<ExtraLayer>,
) -> Result<(), TryInitError> {
    trace_clients().replace(log.trace_clients.iter().cloned());
    subscriber(log, audit, extra).try_init()
}

/// All layers as one list, each with the filter: an `Option` among them makes the subscriber forget that none of the
/// others wants a span, and then it makes every span that a library has, in spite of the filter.
fn subscriber(
    log: &Log,
    audit: Option<Arc<AuditFile>>,
    extra: Option<ExtraLayer>,
) -> impl Subscriber + Send + Sync {
    let terminal = std::io::stderr().is_terminal();
    let json = match log.format {
        LogFormat::Auto => !terminal,
        LogFormat::Human => false,
        LogFormat::Json => true,
    };
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(terminal && !json);
    let limits = Arc::<LibraryLimits>::default();
    let libraries = Some(Arc::clone(&limits));
    let lines: ExtraLayer = Box::new(lines.event_format(Lines { json, libraries }));
    // Audit lines that have a file of their own are there alone.
    let here = if audit.is_some() { LevelFilter::OFF } else { LevelFilter::INFO };
    let targets = filter(&log.level).with_target(AUDIT, here);
    let audit = audit.map(|file| {
        let layer: ExtraLayer =
            Box::new(fmt::layer().with_writer(file).event_format(Lines { json: true, libraries: None }));
        let targets = Targets::new().with_target(AUDIT, LevelFilter::INFO);
        layer.with_filter(Passing { targets, limits: Arc::default() })
    });
    // Each with limits of its own: one that takes nothing more must not use up what the other may have.
    let extra = extra.map(|layer| (layer, Arc::default()));
    let layers = extra.into_iter().chain([(lines, limits)]);
    let layers =
        layers.map(|(layer, limits)| layer.with_filter(Passing { targets: targets.clone(), limits }));
    tracing_subscriber::registry().with(layers.chain(audit).collect::<Vec<_>>())
}

/// Returns the filter for a level such as `info` or `info,mqtt_server::net=debug`. Libraries that are not named pass by
/// their rules: their debug output would drown ours, and some report every failed attempt, where the gateway reports
/// that a condition has changed.
fn filter(level: &str) -> Targets {
    let targets = log_level::parse(level).unwrap_or_else(|_| Targets::new().with_default(Level::INFO));
    with_libraries(targets).with_target(CLIENT_TRACE, Level::TRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_nobody_wants_are_not_made_at_each_request_to_the_database() {
        // Taken where all are wanted.
        let all = Registry::default();
        let metadata = tracing::subscriber::with_default(all, || {
            let span = |span: tracing::Span| span.metadata().expect("a span that is wanted");
            (span(tracing::trace_span!(target: "scylla", "request")), span(tracing::error_span!("ours")))
        });
        let extra: [Option<ExtraLayer>; 2] = [None, Some(Box::new(fmt::layer()))];
        for extra in extra {
            let subscriber = subscriber(&Log::default(), None, extra);
            assert!(subscriber.register_callsite(metadata.0).is_never());
            assert!(subscriber.register_callsite(metadata.1).is_always());
        }
    }

    /// Lines of the audit log are in its file alone, or pass at any level.
    #[test]
    fn the_audit_log_is_in_its_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let file = AuditFile::open(&path).unwrap();
        let log = Log { level: "error".to_owned(), ..Log::default() };
        tracing::subscriber::with_default(subscriber(&log, Some(Arc::clone(&file)), None), || {
            tracing::info!(target: AUDIT, method = "first", by = tracing::field::Empty, "");
            tracing::error!("not for the audit");
            std::fs::rename(&path, dir.path().join("old")).unwrap();
            tracing::info!(target: AUDIT, method = "second");
            edge::reload::Reload::reload(&*file).unwrap();
            tracing::info!(target: AUDIT, method = "third");
        });
        let old = std::fs::read_to_string(dir.path().join("old")).unwrap();
        let new = std::fs::read_to_string(&path).unwrap();
        assert!(old.contains("\"method\":\"first\"") && old.contains("second"), "{old}");
        assert!(new.contains("third") && new.lines().count() == 1 && old.lines().count() == 2, "{new}");
        // By callsite: `enabled!` also depends on subscribers of tests beside this one.
        let (audit, ours) = tracing::subscriber::with_default(Registry::default(), || {
            let callsite = |span: tracing::Span| span.metadata().expect("a span that is wanted");
            (callsite(tracing::info_span!(target: AUDIT, "line")), callsite(tracing::info_span!("ours")))
        });
        let quiet = subscriber(&log, None, None);
        assert!(quiet.register_callsite(audit).is_always() && quiet.register_callsite(ours).is_never());
    }

    #[test]
    fn traced_clients_and_named_modules_pass_the_filter() {
        let quiet = filter("error");
        assert!(quiet.would_enable(CLIENT_TRACE, &Level::TRACE));
        assert!(!quiet.would_enable("mqtt_server", &Level::WARN));
        let debug = filter("debug,h2=trace");
        assert!(debug.would_enable("net::accept", &Level::DEBUG));
        assert!(!debug.would_enable("rustls", &Level::DEBUG));
        assert!(debug.would_enable("h2", &Level::TRACE));
        let part = filter("info,mqtt_server::net=debug");
        assert!(part.would_enable("net::accept", &Level::DEBUG));
        assert!(!part.would_enable("broker", &Level::DEBUG));
        let driver = "scylla::cluster::worker";
        assert!(!part.would_enable(driver, &Level::ERROR), "one line for each failed attempt");
        assert!(debug.would_enable(driver, &Level::ERROR) && !debug.would_enable(driver, &Level::DEBUG));
        assert!(filter("info,scylla=warn").would_enable(driver, &Level::WARN));
        let usual = filter("info");
        for peers_doing in
            ["h2::proto::streams::recv", "rustls::common_state", "librdkafka", "rdkafka::client"]
        {
            assert!(
                !usual.would_enable(peers_doing, &Level::ERROR),
                "{peers_doing}: a line for each attempt"
            );
        }
        assert!(usual.would_enable("quinn_udp", &Level::WARN) && !usual.would_enable("tonic", &Level::INFO));
        assert!(!quiet.would_enable("tonic", &Level::WARN), "a library is no louder than we are");
    }

    /// The failure: a peer that resets streams, or a system that is away, fills the log by way of a library.
    #[test]
    fn lines_of_libraries_pass_a_limit() {
        let (seen, file) = (tempfile::tempdir().unwrap(), "lines");
        let path = seen.path().join(file);
        let lines = AuditFile::open(&path).unwrap();
        let limits = Arc::<LibraryLimits>::default();
        let layer = fmt::layer()
            .with_writer(lines)
            .event_format(Lines { json: true, libraries: Some(Arc::clone(&limits)) });
        let targets = filter("info,librdkafka=info,h2=trace");
        let passing = Passing { targets, limits };
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(passing));
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..1000 {
                tracing::warn!(target: "h2::proto", "reset");
                tracing::error!(target: "librdkafka", "away");
                tracing::error!(target: "rdkafka::client", "away");
            }
            tracing::info!("ours");
        });
        let text = std::fs::read_to_string(&path).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        assert_eq!(
            (count("h2::proto"), count("\"librdkafka"), count("rdkafka::client")),
            (5, 5, 0),
            "{text}"
        );
        assert_eq!(count("\"ours\""), 1);
    }
}
