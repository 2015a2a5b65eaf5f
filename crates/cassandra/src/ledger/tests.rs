//! The ledger against a real Cassandra, named as in the tests of the crate; and against three nodes of its own, with `--ignored`.

use std::{
    process::{Command, id},
    sync::atomic::{AtomicBool, AtomicUsize},
    time::Instant,
};

use ledger::{RecordHead, cut, encode, suite};
use scylla::statement::Statement;

use super::*;
use crate::tests::{say, secure_tls, setting};

/// Time that a loaded machine may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn keyspace() -> String {
    static TESTS: AtomicUsize = AtomicUsize::new(0);
    format!("ledger_{}_{}", id(), TESTS.fetch_add(1, Ordering::Relaxed))
}

/// Options with a keyspace of the test's own, with one copy, or `None` if there is no database.
fn options(test: &str) -> Option<LedgerOptions> {
    let address = setting(test, "MQTT_SERVER_TEST_CASSANDRA")?;
    Some(LedgerOptions {
        contact_points: address.split(',').map(str::to_owned).collect(),
        keyspace: keyspace(),
        replication: "{'class': 'NetworkTopologyStrategy', 'replication_factor': 1}".to_owned(),
        connect_timeout: PATIENCE,
        request_timeout: PATIENCE,
        ..LedgerOptions::default()
    })
}

fn open(options: &LedgerOptions) -> CassandraLedger {
    CassandraLedger::new(options.clone()).unwrap()
}

async fn cql(ledger: &CassandraLedger, text: &str) {
    let mut statement = Statement::new(text.replace("{}", &ledger.database.options.keyspace));
    statement.set_request_timeout(Some(PATIENCE));
    ledger.database.session().await.unwrap().query_unpaged(statement, ()).await.unwrap();
}

fn segment(number: u8, segment: u32) -> Segment {
    Segment { stream: Stream { home: 0, number }, epoch: 1, number: segment }
}

fn rows(segment: Segment, n: u64) -> Arc<[Row]> {
    let head = RecordHead { stream: segment.stream, epoch: segment.epoch, n, time: 0, predecessor: 0 };
    cut(&encode(&head, &[n as u8; 600]).0, segment, n).unwrap()
}

/// Makes the tables and a first view whose owner is returned.
async fn begin(ledger: &CassandraLedger) -> Owner {
    ledger.create().await.unwrap();
    let owner = suite::owner(0, "a", 1);
    let view = StoredView {
        cluster: 7,
        version: 1,
        document: Bytes::from_static(b"d"),
        owners: vec![owner.clone()],
    };
    assert_eq!(ledger.swap(&view).await.unwrap(), Swapped::Applied);
    owner
}

async fn read(ledger: &CassandraLedger, segment: Segment) -> Vec<Row> {
    let found = ledger.read(segment, (0, 0), 64 << 20).await.unwrap();
    assert!(!found.more);
    found.rows
}

#[tokio::test(flavor = "multi_thread")]
async fn the_suite_passes_on_cassandra() {
    let Some(first) = options("the suite of ledgers on Cassandra") else { return };
    let made = Mutex::new(Vec::new());
    suite::all(async || {
        let options = LedgerOptions { keyspace: keyspace(), ..first.clone() };
        let (one, other) = (open(&options), open(&options));
        one.create().await.unwrap();
        made.lock().push(options);
        (Box::new(one) as Box<dyn Ledger>, Box::new(other) as Box<dyn Ledger>)
    })
    .await;
    for options in made.into_inner() {
        cql(&open(&options), "DROP KEYSPACE {}").await;
    }
}

/// The failure: rows stay, and come back at the next takeover, as they are newer than their removal by the clock of the node that
/// removed them; or a sign of life stays that of the process before.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_clock_is_an_hour_behind_removes_and_beats() {
    let Some(options) = options("clocks") else { return };
    let (ahead, behind) = (open(&options), open(&options));
    let owner = begin(&ahead).await;
    #[expect(clippy::disallowed_methods, reason = "the clocks of databases and drivers are the system's")]
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_micros()).unwrap();
    let hour = 3_600_000_000;
    for (ledger, time) in [(&ahead, now + hour), (&behind, now - hour)] {
        let made = ledger.database.connection().await.unwrap();
        let mut statements = Statements::prepare(&made.session, &options.keyspace).await.unwrap();
        for statement in [&mut statements.insert, &mut statements.delete, &mut statements.beat] {
            statement.set_timestamp(Some(time));
        }
        let (session, coordinators) = (Arc::clone(&made.session), Arc::clone(&made.coordinators));
        *ledger.database.ready.lock() =
            Some(Arc::new(LedgerConnection { session, statements, coordinators }));
    }
    let whole = rows(segment(0, 0), 0);
    ahead.insert(&owner, Arc::clone(&whole)).await.unwrap();
    assert_eq!(read(&behind, segment(0, 0)).await, whole.to_vec());
    behind.delete(segment(0, 0)).await.unwrap();
    assert_eq!(read(&ahead, segment(0, 0)).await, []);
    let beat = |number| Beat { node: "a".into(), incarnation: number, number, about: Bytes::new() };
    for number in 0..3 {
        ahead.beat(&beat(10 + number)).await.unwrap();
    }
    behind.beat(&beat(1)).await.unwrap();
    assert_eq!(ahead.beats().await.unwrap(), [beat(1)]);
    cql(&ahead, "DROP KEYSPACE {}").await;
}

/// The failure: rows go or stay by a database's rule for equal timestamps, as a removal has that of the rows, or an earlier one.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_has_a_later_timestamp_than_every_row() {
    let Some(options) = options("timestamps of removals") else { return };
    let ledger = open(&options);
    let owner = begin(&ledger).await;
    ledger.insert(&owner, rows(segment(0, 0), 0)).await.unwrap();
    ledger.delete(segment(0, 0)).await.unwrap();
    // The cluster of `begin`, and the timestamp behind that of rows.
    let columns = "cluster, home, stream, epoch, segment, n, part, parts, data";
    let values = "00000000-0000-0000-0000-000000000007, 0, 0, 1, 0, 1, 0, 1, 0x00";
    cql(&ledger, &format!("INSERT INTO {{}}.ledger ({columns}) VALUES ({values}) USING TIMESTAMP 2")).await;
    assert_eq!(read(&ledger, segment(0, 0)).await, []);
    cql(&ledger, &format!("INSERT INTO {{}}.ledger ({columns}) VALUES ({values}) USING TIMESTAMP 3")).await;
    assert_eq!(read(&ledger, segment(0, 0)).await.len(), 1, "the row is of that segment");
    cql(&ledger, "DROP KEYSPACE {}").await;
}

/// The failure: a repeat that was under way while its segment was removed brings a part of it back.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_after_a_delete_stays_removed() {
    let Some(options) = options("a repeat after a delete") else { return };
    let ledger = open(&options);
    let owner = begin(&ledger).await;
    let (first, second) = (rows(segment(0, 0), 0), rows(segment(0, 0), 1));
    ledger.insert(&owner, Arc::clone(&first)).await.unwrap();
    ledger.delete(segment(0, 0)).await.unwrap();
    for late in [first, second] {
        assert_eq!(ledger.insert(&owner, late).await.unwrap(), Inserted::Stored);
    }
    assert_eq!(read(&ledger, segment(0, 0)).await, []);
    let next = rows(segment(0, 1), 2);
    ledger.insert(&owner, Arc::clone(&next)).await.unwrap();
    assert_eq!(read(&ledger, segment(0, 1)).await, next.to_vec());
    cql(&ledger, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_was_not_created_says_so_and_is_found_once_it_is() {
    let Some(options) = options("a cluster not created") else { return };
    let (early, creator) = (open(&options), open(&options));
    assert_eq!(early.view().await.unwrap(), None);
    let refused = early.insert(&suite::owner(0, "a", 1), rows(segment(0, 0), 0)).await.unwrap_err();
    assert!(refused.0.contains("run `mqtt-server cluster create`"), "{refused}");
    let findings = early.findings().await.unwrap();
    assert!(matches!(&*findings, [Finding { is_fatal: true, text }] if text.contains("cluster create")));
    creator.create().await.unwrap();
    assert_eq!(early.view().await.unwrap(), None);
    let refused = early.insert(&suite::owner(0, "a", 1), rows(segment(0, 0), 0)).await.unwrap_err();
    assert!(refused.0.contains("was not created"), "{refused}");
    let owner = begin(&creator).await;
    early.insert(&owner, rows(segment(0, 0), 0)).await.unwrap();
    assert_eq!(early.owners().await.unwrap(), [owner]);
    cql(&creator, "DROP KEYSPACE {}").await;
}

/// The failure: a gateway that outlives its cluster writes its rows between those of the one that was made after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_does_not_write_into_a_cluster_that_was_made_anew() {
    let Some(options) = options("a cluster made anew") else { return };
    let (old, new) = (open(&options), open(&options));
    let owner = begin(&old).await;
    old.insert(&owner, rows(segment(0, 0), 0)).await.unwrap();
    cql(&new, "DROP KEYSPACE {}").await;
    new.create().await.unwrap();
    let next = vec![suite::owner(0, "b", 1)];
    let view = StoredView { cluster: 8, version: 1, document: Bytes::new(), owners: next.clone() };
    assert_eq!(new.swap(&view).await.unwrap(), Swapped::Applied);
    // Its statements are of tables that are gone: it is told nothing, and comes to itself.
    let stored = async {
        while old.insert(&owner, rows(segment(0, 0), 0)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, stored).await.unwrap();
    assert_eq!(old.owners().await.unwrap(), next);
    assert_eq!(read(&new, segment(0, 0)).await, []);
    let late = StoredView { version: 2, cluster: 7, ..view };
    assert_eq!(old.swap(&late).await.unwrap(), Swapped::Conflict);
    cql(&new, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_one_node_is_a_test_and_three_copies_on_it_are_refused() {
    let Some(options) = options("findings") else { return };
    let ledger = open(&options);
    ledger.create().await.unwrap();
    let findings = ledger.findings().await.unwrap();
    let has = |is_fatal, word: &str| {
        findings.iter().any(|finding| finding.is_fatal == is_fatal && finding.text.contains(word))
    };
    assert!(!has(true, "") && has(false, "THIS IS A TEST"), "{findings:#?}");
    assert!(has(false, "commitlog_sync is periodic"), "{findings:#?}");
    assert!(has(false, "paxos_variant is v1"), "{findings:#?}");
    cql(&ledger, "ALTER TABLE {}.ledger WITH gc_grace_seconds = 60 AND default_time_to_live = 60").await;
    cql(
        &ledger,
        "ALTER KEYSPACE {} WITH replication = {'class': 'NetworkTopologyStrategy', 'datacenter1': 3}",
    )
    .await;
    let findings = ledger.findings().await.unwrap();
    let has = |is_fatal, word: &str| {
        findings.iter().any(|finding| finding.is_fatal == is_fatal && finding.text.contains(word))
    };
    assert!(has(true, "add nodes") && has(true, "default_time_to_live"), "{findings:#?}");
    assert!(has(false, "gc_grace_seconds"), "{findings:#?}");
    cql(&ledger, "DROP KEYSPACE {}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_that_the_user_lacks_are_named_and_the_named_ones_are_enough() {
    let test = "rights on the ledger";
    let Some(address) = setting(test, "MQTT_SERVER_TEST_CASSANDRA_SECURE") else { return };
    let Some(tls) = secure_tls(test) else { return };
    let admin = LedgerOptions {
        contact_points: vec![address],
        username: "cassandra".to_owned(),
        password: "cassandra".to_owned(),
        tls: Some(tls),
        keyspace: keyspace(),
        replication: "{'class': 'NetworkTopologyStrategy', 'replication_factor': 1}".to_owned(),
        connect_timeout: PATIENCE,
        request_timeout: PATIENCE,
        ..LedgerOptions::default()
    };
    let user = format!("gateway_{}", id());
    let root = open(&admin);
    let owner = begin(&root).await;
    cql(&root, &format!("CREATE ROLE {user} WITH PASSWORD = 'p' AND LOGIN = true")).await;
    let gateway = open(&LedgerOptions { username: user.clone(), password: "p".to_owned(), ..admin.clone() });
    let findings = gateway.findings().await.unwrap();
    let granted = findings.iter().filter(|finding| finding.is_fatal).map(|finding| &*finding.text);
    let granted: Vec<_> = granted.collect();
    assert!(matches!(&*granted, [text] if text.contains("GRANT MODIFY ON KEYSPACE")), "{findings:#?}");
    let refused = gateway.insert(&owner, rows(segment(0, 0), 0)).await.unwrap_err();
    assert!(refused.0.contains("MODIFY") || refused.0.contains("SELECT"), "{refused}");
    for right in ["SELECT ON KEYSPACE {}", "MODIFY ON KEYSPACE {}", "SELECT ON system_views.settings"] {
        cql(&root, &format!("GRANT {right} TO {user}")).await;
    }
    let usable = async {
        loop {
            // Nodes remember rights for two seconds.
            let findings = gateway.findings().await.unwrap();
            let is_done = |finding: &Finding| !finding.is_fatal && !finding.text.contains("GRANT");
            if findings.iter().all(is_done) && findings.iter().any(|f| f.text.contains("paxos_variant")) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(PATIENCE, usable).await.unwrap();
    gateway.insert(&owner, rows(segment(0, 0), 0)).await.unwrap();
    assert_eq!(gateway.owners().await.unwrap(), [owner]);
    cql(&root, "DROP KEYSPACE {}").await;
    cql(&root, &format!("DROP ROLE {user}")).await;
}

/// Three nodes, started and stopped by the project's script.
struct ThreeNodes {
    port: String,
}

impl ThreeNodes {
    fn start() -> Option<(Self, Vec<String>)> {
        let port = std::env::var("CASSANDRA_PORT").unwrap_or_else(|_| "9342".to_owned());
        let three = Self { port };
        let addresses = three.script("start")?;
        Some((three, addresses.trim().split(',').map(str::to_owned).collect()))
    }

    /// Output of the script, or `None` if there can be no Cassandra here.
    fn script(&self, what: &str) -> Option<String> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/cassandra.sh");
        let mut command = Command::new(path);
        command.args(what.split(' ')).env("CASSANDRA_NODES", "3").env("CASSANDRA_PORT", &self.port);
        let output = command.output().unwrap();
        match output.status.code() {
            Some(0) => Some(String::from_utf8(output.stdout).unwrap()),
            Some(3) => None,
            _ => panic!("{what}: {}", String::from_utf8_lossy(&output.stderr)),
        }
    }
}

impl Drop for ThreeNodes {
    fn drop(&mut self) {
        self.script("stop");
    }
}

/// The failure: an append that was acknowledged is missing after a node was silent or lost, or appends stop for longer than one is
/// needed to notice it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "three nodes of Cassandra: run it with --ignored"]
async fn nothing_acknowledged_is_missing_whichever_node_is_silent_or_lost() {
    let Some((three, contact_points)) = ThreeNodes::start() else { return };
    let ledger =
        Arc::new(open(&LedgerOptions { contact_points, keyspace: keyspace(), ..LedgerOptions::default() }));
    let owner = begin(&ledger).await;
    let (is_over, last) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let streams: Vec<_> = (0..6)
        .map(|number| {
            tokio::spawn(append(
                Arc::clone(&ledger),
                owner.clone(),
                number,
                Arc::clone(&is_over),
                Arc::clone(&last),
            ))
        })
        .collect();
    let wait = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
    wait(20).await;
    let coordinators = Arc::clone(&ledger.database.connection().await.unwrap().coordinators);
    for node in 1..=3 {
        // Longest time without an append from now on.
        last.lock().clear();
        three.script(&format!("pause {node}"));
        wait(5).await;
        // On a machine with much to do another may have been too slow.
        assert!(coordinators.silent() >= 1, "the silent node is asked last");
        three.script(&format!("resume {node}"));
        wait(5).await;
        let gap = longest_gap(&last.lock());
        say(&format!("node {node} is silent: {gap:?} without an append"));
        assert!(gap < Duration::from_secs(1), "{gap:?} without an append while node {node} is silent");
        let all_answer = async {
            while coordinators.silent() > 0 {
                wait(1).await;
            }
        };
        tokio::time::timeout(PATIENCE, all_answer).await.expect("a node that answers is asked again");
        last.lock().clear();
        three.script(&format!("kill {node}"));
        wait(5).await;
        let gap = longest_gap(&last.lock());
        say(&format!("node {node} is killed: {gap:?} without an append"));
        assert!(gap < Duration::from_secs(1), "{gap:?} without an append while node {node} is lost");
        three.script(&format!("start {node}"));
        wait(20).await;
    }
    is_over.store(true, Ordering::Relaxed);
    let reader = open(&LedgerOptions {
        contact_points: vec![format!("127.0.0.2:{}", three.port)],
        keyspace: ledger.database.options.keyspace.clone(),
        ..LedgerOptions::default()
    });
    for (number, appended) in streams.into_iter().enumerate() {
        let acknowledged = appended.await.unwrap();
        let mut next = 0;
        for number_of_segment in 0..=acknowledged / RECORDS {
            let segment = segment(u8::try_from(number).unwrap(), u32::try_from(number_of_segment).unwrap());
            for row in read(&reader, segment).await {
                assert_eq!(row, rows(segment, next)[0]);
                next += 1;
            }
        }
        say(&format!("stream {number}: {acknowledged} acknowledged, {next} there"));
        assert!(next >= acknowledged, "{acknowledged} were acknowledged and {next} are there");
    }
    cql(&ledger, "DROP KEYSPACE {}").await;
}

/// Records of a segment in the test with three nodes.
const RECORDS: u64 = 1_000;

/// Appends until it is over; returns the number of records that were acknowledged.
async fn append(
    ledger: Arc<CassandraLedger>,
    owner: Owner,
    number: u8,
    is_over: Arc<AtomicBool>,
    appended: Arc<Mutex<Vec<Instant>>>,
) -> u64 {
    let mut n = 0;
    while !is_over.load(Ordering::Relaxed) {
        let rows = rows(segment(number, u32::try_from(n / RECORDS).unwrap()), n);
        while ledger.insert(&owner, Arc::clone(&rows)).await.is_err() {}
        while ledger.owners().await.map_or(true, |owners| owners != [owner.clone()]) {}
        #[expect(clippy::disallowed_methods, reason = "gaps are measured")]
        appended.lock().push(Instant::now());
        n += 1;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    n
}

fn longest_gap(times: &[Instant]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(Duration::MAX)
}
