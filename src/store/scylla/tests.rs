//! The store against a real Cassandra, started by scripts/cassandra.sh; skipped loudly where that cannot be.

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, id},
    time::Duration,
};

use super::{super::suite, *};

/// Ends the Cassandra that it started, unless one was there.
struct Cassandra {
    address: String,
    stop: bool,
}

/// Past the test runner, which hides what passing tests print.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", line.trim_end());
}

fn script(argument: &str) -> Option<String> {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scripts/cassandra.sh");
    let output = Command::new(script).arg(argument).output().ok()?;
    if !output.status.success() {
        say(&String::from_utf8_lossy(&output.stderr));
        return None;
    }
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Cassandra {
    fn start() -> Option<Self> {
        let stop = script("status").is_none();
        let address = script("start");
        if address.is_none() {
            say("!!! SKIPPED: latest values in Cassandra, 1 test: scripts/cassandra.sh could not start one");
        }
        Some(Self { address: address?, stop })
    }

    fn options(&self) -> ScyllaOptions {
        ScyllaOptions {
            contact_points: vec![self.address.clone()],
            keyspace: format!("test_{}", id()),
            connect_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(60),
            topics_per_device: 60,
            ..ScyllaOptions::default()
        }
    }
}

impl Drop for Cassandra {
    fn drop(&mut self) {
        if self.stop {
            script("stop");
        }
    }
}

/// One test, as Cassandra is slow to start.
#[tokio::test(flavor = "multi_thread")]
async fn the_suite_passes_on_cassandra_and_the_schema_is_kept_or_refused() {
    let Some(cassandra) = Cassandra::start() else { return };
    let options = cassandra.options();
    let keyspace = options.keyspace.clone();

    let unprepared = ScyllaLatest::new(ScyllaOptions { migrate: false, ..options.clone() }).unwrap();
    assert!(unprepared.get("t", Some("d")).await.is_err(), "tables that nobody made");
    let store = ScyllaLatest::new(options.clone()).unwrap();
    suite::run(&store, 60, false).await;

    // Another process on the same tables sees what is there and keeps to the bound.
    let again = ScyllaLatest::new(ScyllaOptions { migrate: false, ..options.clone() }).unwrap();
    let more = [suite::value("bound", "b/more", 950)];
    again.upsert(Arc::new(more)).await.unwrap();
    assert_eq!(again.get("b/more", Some("bound")).await.unwrap(), None);
    assert_eq!(again.get("t/order", Some("order")).await.unwrap().unwrap().version, 11);

    let session = &store.connection().await.unwrap().session;
    let newer = format!("INSERT INTO {keyspace}.migrations (name, number) VALUES ('latest', 1000)");
    session.query_unpaged(newer, ()).await.unwrap();
    let refused = ScyllaLatest::new(options).unwrap().get("t", Some("d")).await;
    assert!(matches!(refused, Err(StoreError::Format(_))), "{refused:?}");
    session.query_unpaged(format!("DROP KEYSPACE {keyspace}"), ()).await.unwrap();
}

#[tokio::test]
async fn a_database_that_is_away_is_an_error_and_not_the_end() {
    // Nobody listens on the discard port of loopback.
    let options =
        ScyllaOptions { contact_points: vec!["127.0.0.1:9".to_owned()], ..ScyllaOptions::default() };
    let store = ScyllaLatest::new(options).unwrap();
    for _ in 0..2 {
        let written = store.upsert(Arc::new([suite::value("d", "t", 1)])).await;
        assert!(matches!(written, Err(StoreError::Unavailable(_))), "{written:?}");
    }
}

#[test]
fn a_keyspace_that_is_not_a_name_never_reaches_a_statement() {
    for keyspace in ["", "1a", "a-b", "a.b", "a; DROP KEYSPACE b", "A"] {
        let options = ScyllaOptions { keyspace: keyspace.to_owned(), ..ScyllaOptions::default() };
        assert!(ScyllaLatest::new(options).is_err(), "{keyspace}");
    }
}

#[test]
fn a_batch_holds_one_device_and_few_bytes() {
    let mut values: Vec<_> =
        (0..100).map(|n| suite::value(&format!("d{}", n % 3), &format!("t/{n}"), 1)).collect();
    values[50].payload = vec![0; 2 * BATCH_BYTES].into();
    let all: Vec<usize> = (0..values.len()).collect();
    let groups = row::by_device(&values, &all, BATCH_BYTES);
    let mut seen: Vec<usize> = groups.iter().flatten().copied().collect();
    seen.sort_unstable();
    assert_eq!(seen, all);
    for group in groups {
        assert!(group.iter().all(|n| values[*n].device == values[group[0]].device));
        let bytes: usize = group.iter().map(|n| row::size(&values[*n])).sum();
        assert!(bytes < BATCH_BYTES || group == [50], "{group:?} of {bytes} bytes");
    }
}
