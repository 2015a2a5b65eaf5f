//! Lines of libraries: which of them pass, and how many.
//!
//! Libraries write any lines they like, in part at a peer's will. So each that uses `tracing` or `log` has a rule here,
//! which a test holds against `Cargo.lock`, and its lines pass a limit: five of a library and level in ten seconds.
//! Lines below INFO pass only where the operator names the library in `log.level`, and are not limited then.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use config::log_level::CRATES;
use gateway_core::log_limits::BurstLimit;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    subscriber::Interest,
};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    layer::{Context, Filter},
};

use super::audit::AUDIT;

/// A rule: the target with which a library's lines begin, and the level at which they pass unless `log.level` names it.
pub(super) struct LibraryRule {
    /// The crate, or the target that it writes under.
    pub(super) target: &'static str,
    /// Most that passes as long as our own lines do not go below INFO.
    pub(super) usual: LevelFilter,
    /// Most that passes where they do.
    pub(super) verbose: LevelFilter,
}

const fn rule(target: &'static str, usual: LevelFilter, verbose: LevelFilter) -> LibraryRule {
    LibraryRule { target, usual, verbose }
}

/// Rules of all libraries that write lines, by target. OFF is for those whose lines say what ours say better, or what peers make
/// them say: a reset of a stream, an alert, an attempt to connect that failed.
pub(super) const LIBRARIES: &[LibraryRule] = &[
    rule("h2", LevelFilter::OFF, LevelFilter::INFO),
    rule("hyper", LevelFilter::WARN, LevelFilter::INFO),
    rule("hyper_util", LevelFilter::WARN, LevelFilter::INFO),
    rule("iana_time_zone", LevelFilter::WARN, LevelFilter::INFO),
    // Of the C library, by a callback: a line for each failed attempt.
    rule("librdkafka", LevelFilter::OFF, LevelFilter::WARN),
    rule("opentelemetry", LevelFilter::WARN, LevelFilter::INFO),
    rule("quinn", LevelFilter::WARN, LevelFilter::INFO),
    rule("quinn_proto", LevelFilter::OFF, LevelFilter::INFO),
    rule("quinn_udp", LevelFilter::WARN, LevelFilter::INFO),
    rule("rdkafka", LevelFilter::OFF, LevelFilter::WARN),
    rule("rustls", LevelFilter::OFF, LevelFilter::INFO),
    rule("scylla", LevelFilter::OFF, LevelFilter::INFO),
    // At its finest it writes the parameters of statements.
    rule("tokio_postgres", LevelFilter::OFF, LevelFilter::INFO),
    rule("tonic", LevelFilter::WARN, LevelFilter::INFO),
    rule("tower", LevelFilter::WARN, LevelFilter::INFO),
    rule("tracing_opentelemetry", LevelFilter::WARN, LevelFilter::INFO),
    rule("tungstenite", LevelFilter::OFF, LevelFilter::INFO),
];

/// First parts of the targets of our own lines, besides crates. They have limits of their own.
const OURS: &[&str] = &["mqtt_server", AUDIT, super::logs::CLIENT_TRACE];

fn is_ours(target: &str) -> bool {
    OURS.contains(&target) || CRATES.contains(&target)
}

/// The rules for libraries that `targets` does not name, added to it.
pub(super) fn with_libraries(targets: Targets) -> Targets {
    let verbose = targets.default_level().is_some_and(|default| default > LevelFilter::INFO);
    let most = targets.default_level().unwrap_or(LevelFilter::OFF);
    let named: Vec<String> = targets.iter().map(|(target, _)| target.to_owned()).collect();
    let unnamed = LIBRARIES.iter().filter(|rule| !named.iter().any(|name| name == rule.target));
    unnamed.fold(targets, |targets, rule| {
        let level = if verbose { rule.verbose } else { rule.usual };
        targets.with_target(rule.target, level.min(most))
    })
}

/// Lines of libraries within their limits, as one place of the log writes them.
#[derive(Debug)]
pub(super) struct LibraryLimits {
    /// One for each rule, and one for all other libraries.
    places: Vec<[LevelLimit; 3]>,
}

/// Lines of one library and level.
#[derive(Debug, Default)]
struct LevelLimit {
    burst: BurstLimit,
    /// Left out before the line that has just been let pass, until it is written.
    untold: AtomicU64,
}

impl Default for LibraryLimits {
    fn default() -> Self {
        Self { places: (0..=LIBRARIES.len()).map(|_| Default::default()).collect() }
    }
}

impl LibraryLimits {
    /// Tells whether a line may pass.
    fn pass(&self, target: &str, level: Level) -> bool {
        let Some(place) = self.place(target, level) else { return true };
        let Some(suppressed) = place.burst.pass() else { return false };
        place.untold.fetch_add(suppressed, Relaxed);
        true
    }

    /// Returns the number of lines of its kind that were left out before this one, which has passed. To be asked once.
    pub(super) fn take_suppressed(&self, target: &str, level: Level) -> Option<u64> {
        let suppressed = self.place(target, level)?.untold.swap(0, Relaxed);
        (suppressed > 0).then_some(suppressed)
    }

    /// None for lines that have no limit here.
    fn place(&self, target: &str, level: Level) -> Option<&LevelLimit> {
        let library = target.split("::").next().unwrap_or(target);
        if is_ours(library) {
            return None;
        }
        let level = match level {
            Level::ERROR => 0,
            Level::WARN => 1,
            Level::INFO => 2,
            _ => return None,
        };
        let rule = LIBRARIES.iter().position(|rule| rule.target == library);
        self.places.get(rule.unwrap_or(LIBRARIES.len())).map(|levels| &levels[level])
    }
}

/// Filter of events at one place of the log: by level, and within the limits of libraries.
#[derive(Debug, Clone)]
pub(super) struct Passing {
    pub(super) targets: Targets,
    pub(super) limits: std::sync::Arc<LibraryLimits>,
}

impl<S: Subscriber> Filter<S> for Passing {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        Filter::<S>::enabled(&self.targets, metadata, context)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        let interest = Filter::<S>::callsite_enabled(&self.targets, metadata);
        // A limited event must be asked about each time, or the subscriber loses count of the layers that have refused
        // it.
        let is_limited = self.limits.place(metadata.target(), *metadata.level()).is_some();
        if is_limited && interest.is_always() { Interest::sometimes() } else { interest }
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        // An event that comes by the crate `log` has one target, and its own target as a field.
        if metadata.target() != "log" {
            return self.limits.pass(metadata.target(), *metadata.level());
        }
        let mut target = RecordTarget::default();
        event.record(&mut target);
        self.limits.pass(target.0.as_deref().unwrap_or("log"), *metadata.level())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Filter::<S>::max_level_hint(&self.targets)
    }
}

/// The target of an event that came by the crate `log`.
#[derive(Default)]
struct RecordTarget(Option<String>);

impl Visit for RecordTarget {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "log.target" {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    /// Crates that only tests, benches and the build use, and those that lines pass through.
    const SILENT: &[&str] = &[
        "generator",
        "loom",
        "prost-build",
        "rumqttc",
        "tracing",
        "tracing-log",
        "tracing-serde",
        "tracing-subscriber",
    ];

    /// Packages of `Cargo.lock` that use `tracing` or `log`, and whether they are ours.
    fn writers(lock: &str) -> BTreeSet<(String, bool)> {
        let value = |block: &str, key: &str| {
            let line = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            line.map(|value| value.trim_matches('"').to_owned())
        };
        let uses = |block: &str| {
            let names = block.lines().map(|line| line.trim_matches([' ', '"', ',']));
            let mut names = names.filter_map(|line| line.split(' ').next());
            names.any(|name| matches!(name, "tracing" | "tracing-core" | "log"))
        };
        let packages = lock.split("[[package]]").skip(1).filter_map(|block| {
            let name = value(block, "name")?;
            let dependencies = block.split_once("dependencies = [")?.1;
            uses(dependencies).then(|| (name, value(block, "source").is_none()))
        });
        packages.collect()
    }

    /// The failure: a new library writes lines that no rule and no limit knows, as fast as a peer likes.
    #[test]
    fn every_library_that_writes_lines_has_a_rule() {
        let lock =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock")).unwrap();
        let writers = writers(&lock);
        assert!(writers.len() > 15 && writers.contains(&("h2".to_owned(), false)), "{writers:?}");
        for (name, ours) in writers {
            let target = name.replace('-', "_");
            if ours {
                assert!(is_ours(&target), "{name} is missing in OURS");
            } else if !SILENT.contains(&&*name) {
                let known = LIBRARIES.iter().any(|rule| rule.target == target);
                assert!(known, "{name} uses tracing or log: give it a rule in LIBRARIES");
            }
        }
        let sorted = LIBRARIES.windows(2).all(|pair| pair[0].target < pair[1].target);
        assert!(sorted, "in order of their targets");
    }

    #[test]
    fn a_library_has_five_lines_of_a_level_in_ten_seconds() {
        let limits = LibraryLimits::default();
        let passed = |target, level| (0..100).filter(|_| limits.pass(target, level)).count();
        assert_eq!(passed("h2::proto::streams", Level::WARN), 5);
        assert_eq!(passed("h2", Level::WARN), 0, "it is one library");
        assert_eq!((passed("h2", Level::ERROR), passed("tonic::transport", Level::WARN)), (5, 5));
        assert_eq!((passed("a_new_one", Level::ERROR), passed("another", Level::ERROR)), (5, 0));
        for ours in [
            "mqtt_server::gateway",
            "net::accept",
            "disk::open",
            "broker",
            AUDIT,
            super::super::logs::CLIENT_TRACE,
        ] {
            assert_eq!(passed(ours, Level::ERROR), 100, "{ours}");
        }
        assert_eq!(passed("h2", Level::TRACE), 100, "only who is named by the operator has these");
    }
}
