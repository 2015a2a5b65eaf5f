//! The store against a real Cassandra: its address in `MQTT_SERVER_TEST_CASSANDRA`, as scripts/cassandra.sh prints it.
//! One that checks logins and wants TLS: `MQTT_SERVER_TEST_CASSANDRA_SECURE`, and the file of the certificate to trust
//! in `MQTT_SERVER_TEST_CASSANDRA_CA`. Skipped loudly without, or with `none`.

use std::{
    collections::HashSet,
    io::Write,
    process::id,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use gateway_core::database::Compression;
use parking_lot::Mutex;
use scylla::errors::{DbError, ExecutionError, RequestAttemptError};

use store::{
    HistoryEntry, HistoryQuery, HistoryStore as _, LatestQuery, ShadowPut, ShadowStore,
    suite::{history, latest as suite, shadows},
};

use super::{
    cluster::ClusterSession,
    write::{Plan, WriteKind},
    *,
};

/// Past the test runner, which hides what passing tests print.
pub(super) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

pub(super) fn setting(test: &str, name: &str) -> Option<String> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty() && value != "none");
    if value.is_none() {
        say(&format!("!!! SKIPPED: {test}: {name} names no Cassandra"));
    }
    value
}

/// Options with a keyspace of the test's own, or `None` if there is no database.
fn options(test: &str) -> Option<ScyllaOptions> {
    static TESTS: AtomicUsize = AtomicUsize::new(0);
    let address = setting(test, "MQTT_SERVER_TEST_CASSANDRA")?;
    Some(ScyllaOptions {
        contact_points: address.split(',').map(str::to_owned).collect(),
        keyspace: format!("test_{}_{}", id(), TESTS.fetch_add(1, Ordering::Relaxed)),
        connect_timeout: Duration::from_secs(60),
        request_timeout: Duration::from_secs(60),
        topics_per_device: 60,
        ..ScyllaOptions::default()
    })
}

async fn cql(store: &ScyllaLatest, text: &str) {
    let text = text.replace("{}", &store.cluster.options.keyspace);
    let mut statement = scylla::statement::Statement::new(text);
    statement.set_request_timeout(Some(Duration::from_secs(60)));
    store.cluster.connection().await.unwrap().session.query_unpaged(statement, ()).await.unwrap();
}

async fn put(store: &ScyllaLatest, values: &[LatestValue]) -> Result<(), StoreError> {
    store.upsert(Arc::from(values)).await
}

/// Returns the answer of `ask` once the schema is no longer refused. Only a failing test waits the whole minute.
async fn refused_no_longer<T>(ask: impl AsyncFn() -> Result<T, StoreError>) -> T {
    let answer = async {
        loop {
            match ask().await {
                Err(StoreError::Format(_)) => tokio::time::sleep(Duration::from_millis(50)).await,
                answer => return answer.unwrap(),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), answer).await.unwrap()
}

fn with(options: &ScyllaOptions, change: impl FnOnce(&mut ScyllaOptions)) -> ScyllaLatest {
    let mut options = options.clone();
    change(&mut options);
    ScyllaLatest::new(options).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_suite_passes_on_cassandra() {
    let Some(options) = options("the suite on Cassandra") else { return };
    for compression in [Compression::None, Compression::Lz4, Compression::Snappy] {
        let store = with(&options, |o| o.compression = compression);
        suite::run(&store, 60, false).await;
        cql(&store, "DROP KEYSPACE {}").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_is_missing_or_newer_is_refused_and_says_so() {
    let Some(options) = options("schema refused") else { return };
    let unprepared = with(&options, |o| o.migrate = false);
    let missing = unprepared.get("t", Some("d")).await;
    assert!(matches!(&missing, Err(StoreError::Format(e)) if e.contains("allow migrations")), "{missing:?}");
    let store = with(&options, |_| {});
    put(&store, &[suite::value("d", "t", 1)]).await.unwrap();
    // Another process on the same tables sees what is there.
    let again = with(&options, |o| o.migrate = false);
    assert_eq!(again.get("t", Some("d")).await.unwrap(), Some(suite::value("d", "t", 1)));
    // The one that was refused comes to itself.
    let seen = refused_no_longer(async || unprepared.get("t", None).await).await;
    assert_eq!(seen, Some(suite::value("d", "t", 1)));

    cql(&store, "INSERT INTO {}.migrations (name, number) VALUES ('latest', 1000)").await;
    let refused = with(&options, |_| {}).get("t", Some("d")).await;
    assert!(matches!(&refused, Err(StoreError::Format(e)) if e.contains("newer gateway")), "{refused:?}");
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_schema_is_made_again_by_the_next_write_without_loss() {
    let Some(options) = options("schema dropped") else { return };
    let store = with(&options, |_| {});
    let values: Vec<_> = (0..20).map(|n| suite::value("d", &format!("t/{n}"), 5)).collect();
    put(&store, &values).await.unwrap();
    for what in ["TABLE {}.latest_by_topic", "TABLE {}.latest_by_device", "KEYSPACE {}"] {
        cql(&store, &format!("DROP {what}")).await;
        put(&store, &values).await.unwrap();
        for value in &values {
            assert_eq!(store.get(&value.topic, Some("d")).await.unwrap().as_ref(), Some(value), "{what}");
            assert_eq!(store.get(&value.topic, None).await.unwrap().as_ref(), Some(value), "{what}");
        }
    }

    // Under a schema that others manage, writes fail until it is back.
    let managed = with(&options, |o| o.migrate = false);
    put(&managed, &values).await.unwrap();
    cql(&store, "DROP KEYSPACE {}").await;
    let refused = put(&managed, &values).await;
    assert!(matches!(&refused, Err(StoreError::Format(e)) if e.contains("lacks tables")), "{refused:?}");
    put(&store, &values[..1]).await.unwrap();
    refused_no_longer(async || put(&managed, &values).await).await;
    assert_eq!(managed.get("t/7", Some("d")).await.unwrap(), Some(values[7].clone()));
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn values_expire_as_their_topics_rule_says_and_tell_their_gateway() {
    let Some(mut options) = options("time to live") else { return };
    let rule =
        |filter: &str, secs| ScyllaTtlRule { filter: filter.to_owned(), ttl: Duration::from_secs(secs) };
    options.ttl = vec![rule("a/+/keep", 0), rule("a/#", 3600), rule("b", u64::MAX)];
    options.server_id = "one".to_owned();
    let store = with(&options, |_| {});
    put(&store, &[suite::value("d", "warm-up", 1)]).await.unwrap();
    // Nothing past January 2038.
    let mut expected = suite::value("d", "b", 1);
    #[expect(clippy::disallowed_methods, reason = "the database goes by the wall clock")]
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    expected.received = gateway_core::Timestamp(u64::try_from(now.as_millis()).unwrap());
    put(&store, &[expected.clone()]).await.unwrap();
    put(&store, &[suite::value("d", "a/1", 1)]).await.unwrap();
    for (topic, least, most) in [("a/1", 3000, 3600), ("b", 10_000_000, 352_483_647)] {
        for (table, key) in [("latest_by_device", "device = 'd' AND topic"), ("latest_by_topic", "topic")] {
            let text = format!(
                "SELECT TTL(payload), TTL(user_properties), TTL(server) FROM {}.{table} WHERE {key} = '{topic}'",
                options.keyspace
            );
            let session = &store.cluster.connection().await.unwrap().session;
            let rows = session.query_unpaged(text, ()).await.unwrap().into_rows_result().unwrap();
            let (a, b, c) = rows.single_row::<(i32, i32, i32)>().unwrap();
            assert!([a, b, c].iter().all(|ttl| (least..=most).contains(ttl)), "{table} {topic}: {a} {b} {c}");
        }
    }
    put(&store, &[suite::value("d", "a/1/keep", 1)]).await.unwrap();
    let text = format!(
        "SELECT TTL(payload) FROM {}.latest_by_device WHERE device = 'd' AND topic = 'a/1/keep'",
        options.keyspace
    );
    let session = Arc::clone(&store.cluster.connection().await.unwrap().session);
    let rows = session.query_unpaged(text, ()).await.unwrap().into_rows_result().unwrap();
    assert_eq!(rows.single_row::<(Option<i32>,)>().unwrap(), (None,));

    let other = with(&options, |o| o.server_id = "two".to_owned());
    assert_eq!(store.get("b", Some("d")).await.unwrap(), Some(expected.clone()));
    expected.server = Some("one".into());
    assert_eq!(other.get("b", Some("d")).await.unwrap(), Some(expected.clone()));
    assert_eq!(other.get("b", None).await.unwrap(), Some(expected));
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_database_takes_is_dropped_and_the_rest_is_written() {
    let Some(options) = options("values that are never taken") else { return };
    let store = with(&options, |_| {});
    let mut large = suite::value("d", "large", 1);
    large.payload = vec![0; 5 << 20].into();
    let long = "x".repeat(65_536);
    let longest = &long[1..];
    let values = [
        suite::value(&long, "t", 1),
        suite::value("d", &long, 1),
        large,
        suite::value("", "t", 1),
        suite::value("d", longest, 1),
        suite::value(longest, "t", 1),
        suite::value("d", "t/after", 1),
    ];
    put(&store, &values).await.unwrap();
    assert_eq!(store.get("large", Some("d")).await.unwrap(), None);
    for good in &values[4..] {
        assert_eq!(store.get(&good.topic, Some(good.device.as_str())).await.unwrap().as_ref(), Some(good));
    }
    assert_eq!(store.get(&long, Some("d")).await.unwrap(), None);
    let devices = vec![long.clone(), "d".to_owned(), longest.to_owned()];
    let query = LatestQuery { devices, limit: 2, ..LatestQuery::default() };
    assert_eq!(suite::list_all(&store, query).await.len(), 3);
    cql(&store, "DROP KEYSPACE {}").await;
}

/// Answers instead of the database, by number.
struct Answers {
    refused: HashSet<usize>,
    away: HashSet<usize>,
    /// Too slow as often as it says.
    slow: Mutex<usize>,
    written: Mutex<HashSet<usize>>,
    dropped: Mutex<HashSet<usize>>,
}

impl Answers {
    fn new(refused: &[usize], away: &[usize], slow: usize) -> Arc<Self> {
        Arc::new(Self {
            refused: refused.iter().copied().collect(),
            away: away.iter().copied().collect(),
            slow: Mutex::new(slow),
            written: Mutex::default(),
            dropped: Mutex::default(),
        })
    }
}

impl WriteKind for Answers {
    type Table = ();

    async fn put(&self, _: &ClusterSession, (): (), written: &[usize]) -> Result<(), ExecutionError> {
        let answer = |error, text: &str| {
            ExecutionError::LastAttemptError(RequestAttemptError::DbError(error, text.to_owned()))
        };
        let has = |numbers: &HashSet<usize>| written.iter().any(|number| numbers.contains(number));
        if has(&self.refused) {
            return Err(answer(DbError::Invalid, "Value is not to my taste"));
        }
        if has(&self.away) {
            return Err(answer(DbError::ServerError, ""));
        }
        if *self.slow.lock() > 0 {
            *self.slow.lock() -= 1;
            return Err(answer(DbError::Overloaded, ""));
        }
        self.written.lock().extend(written);
        Ok(())
    }

    fn refused(&self, number: usize, _: &str) {
        self.dropped.lock().insert(number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_value_neither_stops_the_others_nor_is_tried_for_ever() {
    let Some(options) = options("refused values") else { return };
    let store = with(&options, |_| {});
    let connection = store.cluster.connection().await.unwrap();
    let run = async |put: &Arc<Answers>| {
        let mut plan = Plan::new(40);
        (0..20).for_each(|n| plan.add((), &[2 * n, 2 * n + 1]));
        write::all(&store.cluster, &connection, Arc::clone(put), plan).await
    };

    let put = Answers::new(&[3, 8, 9], &[], 0);
    run(&put).await.unwrap();
    assert_eq!(*put.dropped.lock(), [3, 8, 9].into());
    assert_eq!(put.written.lock().len(), 37, "those beside them in a batch, too");

    let put = Answers::new(&[3], &[20], 0);
    let partly = run(&put).await;
    assert!(
        matches!(&partly, Err(StoreError::Partly { unwritten, .. }) if *unwritten == [20, 21]),
        "{partly:?}"
    );
    assert_eq!(put.written.lock().len(), 37);

    let all: Vec<usize> = (0..40).collect();
    let nothing = run(&Answers::new(&[], &all, 0)).await;
    assert!(matches!(nothing, Err(StoreError::Unavailable(_))), "{nothing:?}");

    // Too slow for a while: fewer at once, and all is written in the end.
    let put = Answers::new(&[], &[], 3);
    run(&put).await.unwrap();
    assert_eq!(put.written.lock().len(), 40);
    assert!(store.cluster.writes.allowed() < options.concurrency);
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_server_refuses_is_dropped_alone() {
    let Some(options) = options("a key that the server refuses") else { return };
    let store = with(&options, |_| {});
    let values = [suite::value("d", "t", 1), suite::value("d", &"x".repeat(65_536), 1)];
    let connection = store.cluster.connection().await.unwrap();
    let options = Arc::clone(&store.cluster.options);
    let put = Arc::new(latest::LatestBatch { batch: values.clone().into(), options });
    let mut plan = Plan::new(2);
    plan.add(latest::LatestTable::ByDevice, &[0, 1]);
    let dropped = store::counters::totals().latest_dropped_rejected;
    write::all(&store.cluster, &connection, put, plan).await.unwrap();
    assert!(store::counters::totals().latest_dropped_rejected > dropped);
    assert_eq!(store.get("t", Some("d")).await.unwrap().as_ref(), Some(&values[0]));
    cql(&store, "DROP KEYSPACE {}").await;
}

/// The database kept what the other gateway wrote and took what came after without an error: nobody knew that the table
/// showed an old value for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn values_that_lose_against_one_of_the_future_are_counted() {
    let Some(options) = options("a clock that was ahead") else { return };
    let now = gateway_core::clock::to_wall(gateway_core::clock::now()).0 * 1000;
    let ahead = with(&options, |o| o.server_id = "ahead".to_owned());
    let hour = 3_600_000_000;
    put(&ahead, &[suite::value("d", "a", now + hour), suite::value("d", "b", now)]).await.unwrap();

    let store = with(&options, |o| o.server_id = "right".to_owned());
    let older = || store::counters::totals().latest_dropped_clock;
    let before = older();
    put(&store, &[suite::value("d", "a", now + 1), suite::value("d", "b", now + 1)]).await.unwrap();
    assert_eq!(older(), before + 1);
    assert_eq!(store.get("a", Some("d")).await.unwrap().map(|value| value.version), Some(now + hour));
    assert_eq!(store.get("b", Some("d")).await.unwrap().map(|value| value.version), Some(now + 1));
    // Also when it is known by then what the device has; what wins is not counted.
    put(&store, &[suite::value("d", "a", now + 2), suite::value("d", "c", now + 2)]).await.unwrap();
    assert_eq!(older(), before + 2);
    put(&store, &[suite::value("d", "a", now + hour + 1)]).await.unwrap();
    assert_eq!(older(), before + 2);
    cql(&store, "DROP KEYSPACE {}").await;
}

/// Somebody drops the keyspace in the middle of a write.
struct Dropping {
    values: latest::LatestBatch,
    keyspace: String,
    /// Makes the tables again soon after, as another gateway would.
    other: Option<ScyllaLatest>,
    requests: AtomicUsize,
}

impl WriteKind for Dropping {
    type Table = latest::LatestTable;

    async fn put(
        &self,
        connection: &ClusterSession,
        table: latest::LatestTable,
        numbers: &[usize],
    ) -> Result<(), ExecutionError> {
        match self.requests.fetch_add(1, Ordering::Relaxed) {
            // After the row of the device, before that of the topic.
            11 => {
                let drop = format!("DROP KEYSPACE {}", self.keyspace);
                connection.session.query_unpaged(drop, ()).await.unwrap();
            }
            14 => {
                if let Some(other) = &self.other {
                    other.get("t", None).await.unwrap();
                }
            }
            _ => {}
        }
        self.values.put(connection, table, numbers).await
    }

    fn refused(&self, number: usize, error: &str) {
        panic!("{number}: {error}");
    }
}

/// Written before the drop were the rows of devices, after it those of their topics, and nobody wrote the first again:
/// `latest_by_topic` and `latest_by_device` differed for ever, unnoticed.
#[tokio::test(flavor = "multi_thread")]
async fn a_keyspace_dropped_during_a_write_leaves_no_value_in_one_table_only() {
    let Some(options) = options("schema dropped during a write") else { return };
    for another_makes_it_again in [false, true] {
        let store = with(&options, |o| o.concurrency = 1);
        let other = another_makes_it_again.then(|| with(&options, |_| {}));
        let values: Arc<[_]> = (0..20).map(|n| suite::value("d", &format!("t/{n}"), 5)).collect();
        store.upsert(Arc::clone(&values)).await.unwrap();

        let connection = store.cluster.connection().await.unwrap();
        let put = Dropping {
            values: latest::LatestBatch {
                batch: Arc::clone(&values),
                options: Arc::clone(&store.cluster.options),
            },
            keyspace: options.keyspace.clone(),
            other,
            requests: AtomicUsize::new(0),
        };
        let mut plan = Plan::new(40);
        for number in 0..20 {
            plan.add(latest::LatestTable::ByDevice, &[number]);
            plan.add(latest::LatestTable::ByTopic, &[number]);
        }
        write::all(&store.cluster, &connection, Arc::new(put), plan).await.unwrap();
        for value in values.iter() {
            assert_eq!(store.get(&value.topic, Some("d")).await.unwrap().as_ref(), Some(value));
            assert_eq!(store.get(&value.topic, None).await.unwrap().as_ref(), Some(value));
        }
        cql(&store, "DROP KEYSPACE {}").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_failed_does_not_use_up_the_topics_of_a_device() {
    let Some(options) = options("topics after a failed write") else { return };
    let store = with(&options, |o| o.topics_per_device = 2);
    let mut devices = (0..50).map(|n| format!("d{n}"));
    let device = loop {
        let device = devices.next().expect("not every write is done at once");
        put(&store, &[suite::value(&device, "a", 1)]).await.unwrap();
        // Given up when it has begun: it may or may not be written. Now and then it is done already.
        let given_up = tokio::select! {
            biased;
            done = store.upsert(Arc::new([suite::value(&device, "b", 1)])) => done.is_err(),
            () = std::future::ready(()) => true,
        };
        if given_up {
            break device;
        }
    };
    let delete = format!("DELETE FROM {{}}.latest_by_device WHERE device = '{device}' AND topic = 'b'");
    cql(&store, &delete).await;
    put(&store, &[suite::value(&device, "c", 1)]).await.unwrap();
    assert!(store.get("c", Some(&device)).await.unwrap().is_some());
    put(&store, &[suite::value(&device, "e", 1)]).await.unwrap();
    assert_eq!(store.get("e", Some(&device)).await.unwrap(), None);
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_over_its_topics_keeps_no_stale_value_of_a_known_one() {
    let Some(options) = options("topics over the bound") else { return };
    let store = Arc::new(with(&options, |o| o.topics_per_device = 30));
    values::suite::known_topics_stay_current(Arc::clone(&store) as Arc<dyn LatestStore>, 30).await;
    // The bound is lower from now on.
    let lowered = with(&options, |o| o.topics_per_device = 10);
    let values: Vec<_> =
        (0..30).map(|n| suite::value("over", &format!("known/{n}"), 4_000_000_000_000_000)).collect();
    put(&lowered, &values).await.unwrap();
    for value in &values {
        assert_eq!(lowered.get(&value.topic, Some("over")).await.unwrap().as_ref(), Some(value));
    }
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_devices_and_large_values_are_listed_in_order() {
    let Some(options) = options("long lists") else { return };
    let store = with(&options, |_| {});
    let mut values: Vec<_> = (0..60)
        .flat_map(|device| (0..5).map(move |n| suite::value(&format!("d{device:02}"), &format!("t/{n}"), 1)))
        .collect();
    values.extend((0..60).map(|n| {
        let mut value = suite::value("d30", &format!("u/{n:02}"), 1);
        value.payload = vec![7; if n < 30 { 100_000 } else { 10 }].into();
        value
    }));
    values.retain(|value| !(value.device.as_str() == "d30" && value.topic.starts_with("t/")));
    put(&store, &values).await.unwrap();
    values.sort_by(|a, b| (&a.device, &a.topic).cmp(&(&b.device, &b.topic)));
    let devices: Vec<String> = (0..80).map(|device| format!("d{device:02}")).collect();
    for limit in [7, 1000] {
        let query = LatestQuery { devices: devices.clone(), limit, ..LatestQuery::default() };
        assert!(suite::list_all(&store, query).await == values, "limit {limit}");
    }
    cql(&store, "DROP KEYSPACE {}").await;
}

/// TLS to the Cassandra that wants it, or `None` if its certificate is not told.
pub(super) fn secure_tls(test: &str) -> Option<Arc<rustls::ClientConfig>> {
    let ca = setting(test, "MQTT_SERVER_TEST_CASSANDRA_CA")?;
    let mut roots = rustls::RootCertStore::empty();
    let mut pem = std::io::BufReader::new(std::fs::File::open(ca).unwrap());
    for certificate in rustls_pemfile::certs(&mut pem) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Some(Arc::new(tls.with_root_certificates(roots).with_no_client_auth()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_said_and_the_right_one_works_over_tls() {
    let test = "logins and TLS";
    let Some(address) = setting(test, "MQTT_SERVER_TEST_CASSANDRA_SECURE") else { return };
    let Some(tls) = secure_tls(test) else { return };
    let options = ScyllaOptions {
        contact_points: vec![address],
        keyspace: format!("secure_{}", id()),
        username: "cassandra".to_owned(),
        password: "cassandra".to_owned(),
        tls: Some(tls),
        request_timeout: Duration::from_secs(60),
        ..ScyllaOptions::default()
    };
    let store = with(&options, |_| {});
    put(&store, &[suite::value("d", "t", 1)]).await.unwrap();
    assert!(store.get("t", None).await.unwrap().is_some());

    let denied = counters::totals().database_errors_denied;
    let wrong = put(&with(&options, |o| o.password = "wrong".to_owned()), &[suite::value("d", "t", 2)]).await;
    assert!(matches!(&wrong, Err(StoreError::Unavailable(e)) if e.contains("refuses user")), "{wrong:?}");
    let nobody = put(&with(&options, |o| o.username.clear()), &[suite::value("d", "t", 2)]).await;
    assert!(matches!(&nobody, Err(StoreError::Unavailable(e)) if e.contains("wants a user")), "{nobody:?}");
    assert!(counters::totals().database_errors_denied >= denied + 2);
    let plain = put(&with(&options, |o| o.tls = None), &[suite::value("d", "t", 2)]).await;
    assert!(matches!(plain, Err(StoreError::Unavailable(_))), "{plain:?}");
    assert_eq!(store.get("t", None).await.unwrap().map(|value| value.version), Some(1));
    cql(&store, "DROP KEYSPACE {}").await;
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
    let bytes = write::BATCH_BYTES;
    let mut values: Vec<_> =
        (0..100).map(|n| suite::value(&format!("d{}", n % 3), &format!("t/{n}"), 1)).collect();
    values[50].payload = vec![0; 2 * bytes].into();
    let all: Vec<usize> = (0..values.len()).collect();
    let groups = row::by_device(&values, &all, bytes);
    let mut seen: Vec<usize> = groups.iter().flatten().copied().collect();
    seen.sort_unstable();
    assert_eq!(seen, all);
    for group in groups {
        assert!(group.iter().all(|n| values[*n].device == values[group[0]].device));
        let filled: usize = group.iter().map(|n| row::size(&values[*n])).sum();
        assert!(filled < bytes || group == [50], "{group:?} of {filled} bytes");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn history_lives_as_long_as_its_rule_says_and_goes_on_at_another_gateway() {
    let Some(options) = options("history") else { return };
    let store = with(&options, |_| {});
    let history = ScyllaHistory::new(&store);
    history::run(&history).await;

    let values = (0..200).map(|n| suite::value("lives", "t", 1_000_000 + n));
    let entries: Vec<_> = values.map(|value| HistoryEntry { value, ttl: 1_000 }).collect();
    history.append(entries.into()).await.unwrap();
    let query = HistoryQuery {
        device: "lives".to_owned(),
        topic: "t".to_owned(),
        to: gateway_core::Timestamp(10_000_000),
        limit: 150,
        ..HistoryQuery::default()
    };
    let first = history.page(query.clone()).await.unwrap();
    let other = ScyllaHistory::new(&with(&options, |o| o.server_id = "other".to_owned()));
    let second = other.page(HistoryQuery { page_token: first.next, ..query }).await.unwrap();
    assert_eq!((first.values.len(), second.values.len(), &*second.next), (150, 50, ""));
    assert_eq!(second.values[0].version, 1_000_049, "from the newest on, without a hole or a repeat");

    let text = format!("SELECT TTL(payload), WRITETIME(payload), version FROM {}.history", options.keyspace);
    let rows = store.cluster.connection().await.unwrap().session.query_unpaged(text, ()).await.unwrap();
    let rows = rows.into_rows_result().unwrap();
    for row in rows.rows::<(Option<i32>, i64, i64)>().unwrap() {
        let (ttl, written, version) = row.unwrap();
        assert!(ttl.is_some_and(|ttl| ttl > 0 && ttl <= 3_600), "{ttl:?}");
        assert_eq!(written, version);
    }
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn history_that_the_database_refuses_is_dropped_and_fails_nothing_else() {
    let Some(options) = options("history refused") else { return };
    let store = with(&options, |_| {});
    let history = ScyllaHistory::new(&store);
    // No key may be so long.
    let long = "x".repeat(65_000);
    let values = [suite::value("d", "t", 1), suite::value(&long, &long, 2), suite::value("d", "t", 3)];
    let entries: Vec<_> = values.into_iter().map(|value| HistoryEntry { value, ttl: 1_000 }).collect();
    let dropped = store::counters::totals().history_dropped_rejected;
    history.append(entries.into()).await.unwrap();
    assert_eq!(store::counters::totals().history_dropped_rejected, dropped + 1);
    let query = HistoryQuery {
        device: "d".to_owned(),
        topic: "t".to_owned(),
        to: gateway_core::Timestamp(10),
        limit: 10,
        ..HistoryQuery::default()
    };
    assert_eq!(history.page(query).await.unwrap().values.len(), 2);
    cql(&store, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_suite_of_shadows_passes_on_cassandra() {
    let Some(options) = options("the suite of shadows on Cassandra") else { return };
    let latest = with(&options, |_| {});
    let store: Arc<dyn ShadowStore> = Arc::new(ScyllaShadows::new(&latest));
    shadows::run(&store).await;
    cql(&latest, "DROP KEYSPACE {}").await;
}

/// One of two gateways would lose what the other did.
#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_that_change_a_shadow_at_once_lose_no_change() {
    let Some(options) = options("two gateways and a shadow") else { return };
    let (first, second) = (with(&options, |_| {}), with(&options, |_| {}));
    // The keyspace is made by one of them.
    first.get("t", Some("d")).await.unwrap();
    let add = |store: ScyllaShadows| async move {
        let mut conflicts = 0;
        for _ in 0..20 {
            loop {
                let version = store.get("d", "").await.unwrap().map_or(0, |there| there.version);
                match store.put(shadows::record("d", "", version + 1), version).await.unwrap() {
                    ShadowPut::Written => break,
                    ShadowPut::Conflict => conflicts += 1,
                    ShadowPut::Full => panic!("a database has no bound"),
                }
            }
        }
        conflicts
    };
    let both =
        (tokio::spawn(add(ScyllaShadows::new(&first))), tokio::spawn(add(ScyllaShadows::new(&second))));
    let conflicts = both.0.await.unwrap() + both.1.await.unwrap();
    let last = ScyllaShadows::new(&first).get("d", "").await.unwrap().unwrap();
    assert_eq!(last.version, 40, "{conflicts} conflicts");
    cql(&first, "DROP KEYSPACE {}").await;
}
