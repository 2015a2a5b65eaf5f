//! The engine against a real PostgreSQL, which scripts/postgres.sh starts; one in `MQTT_SERVER_TEST_POSTGRES`, as that script prints
//! it, is used by the tests that leave servers alone. Skipped loudly where it cannot be had, or with `none`.

use std::{
    io::Write,
    net::TcpListener,
    path::PathBuf,
    process::{Command, id},
    sync::{
        Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use ledger::{Stream, suite};
use parking_lot::Mutex;
use rustls::{RootCertStore, crypto::aws_lc_rs, pki_types::CertificateDer};
use tokio::time::{Instant, sleep, timeout};

use super::*;

/// Past the test runner, which hides what passing tests print.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// An instance of scripts/postgres.sh.
struct Postgres {
    port: u16,
    is_ours: bool,
}

impl Postgres {
    /// Starts a primary with a synchronous standby, or says that the test is skipped.
    fn start(test: &str) -> Option<Self> {
        if std::env::var("MQTT_SERVER_TEST_POSTGRES").is_ok_and(|value| value == "none") {
            say(&format!("!!! SKIPPED: {test}: MQTT_SERVER_TEST_POSTGRES is none"));
            return None;
        }
        let this = Self { port: two_free_ports(), is_ours: true };
        let started = this.command(&["start", "--standby"]).output().unwrap();
        let said = String::from_utf8_lossy(&started.stderr);
        if started.status.code() == Some(3) {
            say(&format!("!!! SKIPPED: {test}: {said}"));
            return None;
        }
        assert!(started.status.success(), "{said}");
        Some(this)
    }

    /// One that tests use together and leave alone.
    fn shared(test: &str) -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<Postgres>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock();
        if let Some(running) = shared.upgrade() {
            return Some(running);
        }
        let given = std::env::var("MQTT_SERVER_TEST_POSTGRES").ok();
        let given = given.and_then(|hosts| hosts.split(',').next()?.rsplit_once(':')?.1.parse().ok());
        let running = Arc::new(match given {
            Some(port) => Self { port, is_ours: false },
            None => Self::start(test)?,
        });
        *shared = Arc::downgrade(&running);
        Some(running)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/postgres.sh");
        let mut command = Command::new(script);
        command.args(arguments).env("POSTGRES_PORT", self.port.to_string());
        command
    }

    fn script(&self, arguments: &[&str]) -> String {
        let done = self.command(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).trim().to_owned()
    }

    fn sql(&self, statement: &str) -> String {
        self.script(&["sql", "primary", statement])
    }

    /// Settings with a schema of the test's own; the standby is named first.
    fn settings(&self) -> PostgresSettings {
        static SCHEMAS: AtomicUsize = AtomicUsize::new(0);
        PostgresSettings {
            hosts: vec![format!("127.0.0.1:{}", self.port + 1), format!("127.0.0.1:{}", self.port)],
            user: "ledger".into(),
            password: "ledger".into(),
            database: "ledger".into(),
            schema: format!("test_{}_{}", id(), SCHEMAS.fetch_add(1, Relaxed)).into(),
            ..PostgresSettings::default()
        }
    }

    fn impatient(&self) -> PostgresSettings {
        PostgresSettings { answer_limit: Duration::from_millis(1_200), ..self.settings() }
    }

    /// A session of the test's own.
    async fn client(&self) -> tokio_postgres::Client {
        let address = format!("host=127.0.0.1 port={} user=ledger password=ledger dbname=ledger", self.port);
        let (client, connection) = tokio_postgres::connect(&address, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = self.command(&["stop"]).output();
        }
    }
}

fn two_free_ports() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let candidates = std::iter::repeat_with(|| {
        10_000 + ((id() as usize * 20 + NEXT.fetch_add(2, Relaxed)) % 9_000) as u16
    });
    candidates.take(1_000).find(|port| is_free(*port) && is_free(*port + 1)).unwrap()
}

fn owner(home: u16, node: &str, epoch: u64) -> Owner {
    suite::owner(home, node, epoch)
}

fn view(version: u64, owners: Vec<Owner>) -> StoredView {
    StoredView { cluster: 7, version, document: Bytes::from_static(b"view"), owners }
}

fn segment(home: u16, number: u8) -> Segment {
    Segment { stream: Stream { home, number }, epoch: 1, number: 0 }
}

fn record(segment: Segment, n: u64) -> Arc<[Row]> {
    Arc::new([Row { segment, n, part: 0, parts: 1, data: Bytes::from(vec![n as u8; 600]) }])
}

/// An engine with tables, whose node `a` owns homes 0 to 3.
async fn begun(settings: PostgresSettings) -> Arc<PostgresLedger> {
    let ledger = PostgresLedger::start(settings);
    while let Err(unknown) = ledger.create().await {
        assert!(unknown.to_string().contains("no answer"), "{unknown}");
    }
    let owners = (0..4).map(|home| owner(home, "a", 1)).collect();
    assert_eq!(ledger.swap(&view(1, owners)).await.unwrap(), Swapped::Applied);
    Arc::new(ledger)
}

/// Numbers of the rows of a segment.
async fn numbers(ledger: &PostgresLedger, segment: Segment) -> Vec<u64> {
    let mut all = Vec::new();
    loop {
        let from = all.last().map_or(0, |n| n + 1);
        let Ok(read) = ledger.read(segment, (from, 0), 1 << 20).await else { continue };
        all.extend(read.rows.iter().map(|row| row.n));
        if !read.more {
            return all;
        }
    }
}

/// Inserts until it is answered.
async fn insert(ledger: &PostgresLedger, owner: &Owner, rows: &Arc<[Row]>) -> Inserted {
    loop {
        if let Ok(inserted) = ledger.insert(owner, Arc::clone(rows)).await {
            return inserted;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn the_suite() {
    let Some(postgres) = Postgres::shared("the_suite") else { return };
    suite::all(async || {
        let settings = postgres.settings();
        let (one, other) = (PostgresLedger::start(settings.clone()), PostgresLedger::start(settings));
        one.create().await.unwrap();
        (Box::new(one) as Box<dyn Ledger>, Box::new(other) as Box<dyn Ledger>)
    })
    .await;
}

#[tokio::test]
async fn without_tables_there_is_no_view() {
    let Some(postgres) = Postgres::shared("without_tables_there_is_no_view") else { return };
    let ledger = PostgresLedger::start(postgres.settings());
    assert_eq!(ledger.view().await.unwrap(), None);
    let unknown = ledger.owners().await.unwrap_err().to_string();
    assert!(unknown.contains("mqtt-server cluster create"), "{unknown}");
}

/// The failure: the statement reads the owner, a takeover comes and reads the rows, and then the statement inserts and acknowledges.
#[tokio::test]
async fn only_a_lock_is_a_fence() {
    let Some(postgres) = Postgres::shared("only_a_lock_is_a_fence") else { return };
    for (lock, rows_read) in [("FOR SHARE", vec![0]), ("", vec![])] {
        let settings = postgres.settings();
        let ledger = begun(settings.clone()).await;
        let client = postgres.client().await;
        // A stall of the server after the snapshot: swap, a lock of an index page, a disk.
        let schema = &settings.schema;
        let stall = format!(
            "CREATE FUNCTION {schema}.stall() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN PERFORM pg_sleep(0.7); RETURN NEW; END $$;
             CREATE TRIGGER stall BEFORE INSERT ON {schema}.ledger FOR EACH ROW EXECUTE FUNCTION {schema}.stall()"
        );
        client.batch_execute(&stall).await.unwrap();
        let text = sql::text(schema, Query::Append).replace("FOR SHARE", lock);
        let params = appends::params_of(&settings.cluster, &owner(0, "a", 1), &record(segment(0, 0), 0));
        let append = async {
            let params: Vec<&(dyn ToSql + Sync)> = params.iter().map(|p| &**p as _).collect();
            client.query_one(&text, &params).await.unwrap().get::<_, Vec<i64>>(0)
        };
        let takeover = async {
            sleep(Duration::from_millis(250)).await;
            let owners = vec![owner(0, "b", 2)];
            assert_eq!(ledger.swap(&view(2, owners)).await.unwrap(), Swapped::Applied);
            numbers(&ledger, segment(0, 0)).await
        };
        let (owned, read) = tokio::join!(append, takeover);
        assert_eq!(owned, [1], "the statement is answered as the owner's");
        assert_eq!(read, rows_read, "what the takeover reads, with lock '{lock}'");
        // An answer is not that of a repeat that began since.
        let (b, rows) = (owner(0, "b", 2), record(segment(0, 0), 2));
        let first = tokio::spawn({
            let (ledger, b, rows) = (Arc::clone(&ledger), b.clone(), Arc::clone(&rows));
            async move { ledger.insert(&b, rows).await.unwrap() }
        });
        sleep(Duration::from_millis(250)).await;
        let mut repeat = ledger.insert(&b, rows);
        assert!(timeout(Duration::from_millis(50), &mut repeat).await.is_err());
        assert_eq!(first.await.unwrap(), Inserted::Owned);
        assert!(timeout(Duration::from_millis(50), &mut repeat).await.is_err());
        assert_eq!(repeat.await.unwrap(), Inserted::Owned);
        // A statement under way goes on without its caller.
        let dropped = ledger.insert(&owner(0, "b", 2), record(segment(0, 0), 1));
        assert!(timeout(Duration::from_millis(300), dropped).await.is_err());
        while numbers(&ledger, segment(0, 0)).await != [0, 1, 2] {
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// The failure: locks that follow each other without a gap keep a takeover out for as long as the former owner is alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_owner_gets_its_turn() {
    let Some(postgres) = Postgres::shared("a_change_of_owner_gets_its_turn") else { return };
    let settings = postgres.settings();
    let former = begun(settings.clone()).await;
    let next = PostgresLedger::start(settings);
    let fenced = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for home in [0, 1] {
        for number in 0..6 {
            let (former, fenced) = (Arc::clone(&former), Arc::clone(&fenced));
            tasks.spawn(async move {
                for n in 0.. {
                    match insert(&former, &owner(home, "a", 1), &record(segment(home, number), n)).await {
                        Inserted::Owned => {}
                        _ => break,
                    }
                }
                fenced.fetch_add(1, Relaxed);
            });
        }
    }
    sleep(Duration::from_millis(300)).await;
    let mut owners: Vec<Owner> = (0..4).map(|home| owner(home, "a", 1)).collect();
    let mut slowest = Duration::ZERO;
    // Homes whose rows nobody locks, then those under load.
    for (version, home) in [3, 2, 1, 0].into_iter().enumerate() {
        owners[home] = owner(home as u16, "b", 2);
        let begin = Instant::now();
        let swapped = next.swap(&view(2 + version as u64, owners.clone())).await.unwrap();
        assert_eq!(swapped, Swapped::Applied);
        slowest = slowest.max(begin.elapsed());
    }
    while tasks.join_next().await.is_some() {}
    assert_eq!(fenced.load(Relaxed), 12);
    assert!(slowest < Duration::from_secs(2), "the slowest took {slowest:?}");
}

/// The failure: what only one of two disks has is acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_answered_without_the_standby() {
    let Some(postgres) = Postgres::start("nothing_is_answered_without_the_standby") else { return };
    let ledger = begun(postgres.impatient()).await;
    assert_eq!(ledger.findings().await.unwrap(), []);
    let a = owner(0, "a", 1);
    let place = segment(0, 0);
    assert_eq!(insert(&ledger, &a, &record(place, 0)).await, Inserted::Owned);
    let beat = Beat { node: "a".into(), incarnation: 1, number: 1, about: Bytes::new() };
    ledger.beat(&beat).await.unwrap();

    postgres.script(&["pause", "standby"]);
    // A wait that somebody else cancels: the row is there and may be lost.
    let cancel = async {
        // Once it waits, which on a loaded machine takes a while.
        loop {
            sleep(Duration::from_millis(20)).await;
            let cancelled = postgres.sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'mqtt-server appends%' AND wait_event = 'SyncRep'");
            if !cancelled.is_empty() {
                break cancelled;
            }
        }
    };
    let (inserted, cancelled) = tokio::join!(ledger.insert(&a, record(place, 1)), cancel);
    assert_eq!(cancelled, "t");
    let unknown = inserted.unwrap_err().to_string();
    assert!(unknown.contains("canceling wait for synchronous replication"), "{unknown}");
    assert_eq!(numbers(&ledger, place).await, [0, 1]);
    // A repeat finds it, and waits.
    let repeat = ledger.insert(&a, record(place, 1)).await;
    assert!(repeat.is_err(), "{repeat:?}");
    // So does everything that is worth a lease or an ownership, also of one who is fenced.
    let fenced = owner(0, "z", 9);
    let others = tokio::join!(
        ledger.owners(),
        async { timeout(Duration::from_secs(2), ledger.beat(&beat)).await.unwrap() },
        ledger.view(),
        ledger.insert(&fenced, record(segment(0, 1), 0))
    );
    let (owners, beat_answer, view, inserted) = &others;
    assert!(owners.is_err() && beat_answer.is_err() && view.is_err() && inserted.is_err(), "{others:?}");
    // Sessions that were given up stay few.
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        let _ = ledger.insert(&a, record(place, 2)).await;
    }
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'mqtt-server appends%'";
    let sessions: u32 = postgres.sql(waiting).parse().unwrap();
    assert!(sessions <= 5, "{sessions} sessions");

    postgres.script(&["resume", "standby"]);
    for n in 1..4 {
        let rows = record(place, n);
        let answered = timeout(Duration::from_secs(10), insert(&ledger, &a, &rows)).await;
        assert_eq!(answered.unwrap(), Inserted::Owned);
    }
    assert_eq!(numbers(&ledger, place).await, [0, 1, 2, 3]);
    drop(ledger);
    findings_are_told(&postgres).await;
}

async fn findings_are_told(postgres: &Postgres) {
    let found = async |settings: PostgresSettings| {
        let ledger = PostgresLedger::start(settings);
        let found = ledger.findings().await.unwrap();
        found.into_iter().map(|finding| (finding.is_fatal, finding.text)).collect::<Vec<_>>()
    };
    let has = |found: &[(bool, String)], is_fatal: bool, text: &str| {
        assert!(
            found.iter().any(|(fatal, told)| *fatal == is_fatal && told.contains(text)),
            "{text}: {found:?}"
        );
    };
    let settings = postgres.settings();
    postgres.sql("CREATE ROLE poor LOGIN PASSWORD 'ledger'");
    let poor = PostgresSettings { user: "poor".into(), ..settings.clone() };
    has(&found(poor.clone()).await, true, "CREATE SCHEMA test_");
    begun(settings.clone()).await;
    has(&found(poor.clone()).await, true, "GRANT USAGE");
    postgres.sql(&format!("GRANT USAGE ON SCHEMA {} TO poor", settings.schema));
    has(&found(poor).await, true, "lacks rights (");
    for setting in ["fsync = off", "full_page_writes = off", "synchronous_standby_names = ''"] {
        postgres.sql(&format!("ALTER SYSTEM SET {setting}"));
    }
    postgres.sql("SELECT pg_reload_conf()");
    sleep(Duration::from_millis(300)).await;
    let told = found(settings.clone()).await;
    has(&told, true, "fsync");
    has(&told, false, "full_page_writes");
    has(&told, false, "no synchronous standby");
    // Other defaults of the role change nothing: sessions have their own.
    for setting in ["synchronous_commit = off", "statement_timeout = 500", "client_min_messages = error"] {
        postgres.sql(&format!("ALTER ROLE ledger SET {setting}"));
    }
    assert_eq!(found(settings.clone()).await, told);
    // A session that others have used is that of a pooler.
    postgres.sql("ALTER ROLE ledger SET mqtt_server.session = 'another'");
    has(&found(settings).await, true, "pooler in transaction mode");
}

/// The failure: a failover loses what was acknowledged, or the former primary is taken for the primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promotion_loses_nothing() {
    let Some(postgres) = Postgres::start("a_promotion_loses_nothing") else { return };
    let ledger = begun(postgres.impatient()).await;
    let acknowledged: Arc<[AtomicUsize; 4]> = Arc::default();
    let mut tasks = tokio::task::JoinSet::new();
    for home in 0..4_u16 {
        let (ledger, acknowledged) = (Arc::clone(&ledger), Arc::clone(&acknowledged));
        tasks.spawn(async move {
            for n in 0.. {
                let inserted = insert(&ledger, &owner(home, "a", 1), &record(segment(home, 0), n)).await;
                assert_eq!(inserted, Inserted::Owned);
                acknowledged[usize::from(home)].store(n as usize + 1, Relaxed);
            }
        });
    }
    sleep(Duration::from_millis(500)).await;
    postgres.script(&["kill", "primary"]);
    let at_kill: Vec<usize> = acknowledged.iter().map(|count| count.load(Relaxed)).collect();
    postgres.script(&["promote"]);
    let goes_on = async {
        while !acknowledged.iter().zip(&at_kill).all(|(now, then)| now.load(Relaxed) > then + 20) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(15), goes_on).await.expect("appends go on with the new primary");
    tasks.shutdown().await;
    for home in 0..4 {
        let found = numbers(&ledger, segment(home, 0)).await;
        let count = acknowledged[usize::from(home)].load(Relaxed);
        assert!(found.len() >= count, "{count} were acknowledged, {} are there", found.len());
        assert!(found.iter().copied().eq(0..found.len() as u64), "without holes");
    }
    // The former primary comes back and the new one falls silent: it is not taken for the primary.
    postgres.script(&["start"]);
    postgres.script(&["pause", "standby"]);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        let n = 1_000_000 + begin.elapsed().as_micros() as u64;
        assert!(ledger.insert(&owner(0, "a", 1), record(segment(0, 2), n)).await.is_err());
        let read = ledger.read(segment(0, 0), (0, 0), 1).await;
        assert!(read.is_err(), "{read:?}");
    }
    postgres.script(&["resume", "standby"]);
    let (a, rows) = (owner(0, "a", 1), record(segment(0, 3), 0));
    let last = timeout(Duration::from_secs(15), insert(&ledger, &a, &rows)).await;
    assert_eq!(last.unwrap(), Inserted::Owned);
}

#[tokio::test]
async fn tls_verifies_the_server() {
    let Some(postgres) = Postgres::shared("tls_verifies_the_server") else { return };
    let file = format!("{}/../../target/postgres-{}/ca.pem", env!("CARGO_MANIFEST_DIR"), postgres.port);
    let pem = std::fs::read(file).unwrap();
    let tls = |pem: &[u8]| {
        let mut roots = RootCertStore::empty();
        let found: Vec<CertificateDer<'_>> =
            rustls_pemfile::certs(&mut &*pem).collect::<Result<_, _>>().unwrap();
        roots.add_parsable_certificates(found);
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        Some(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
    };
    let settings = PostgresSettings { tls: tls(&pem), ..postgres.impatient() };
    begun(settings.clone()).await;
    let stranger = PostgresLedger::start(PostgresSettings { tls: tls(b""), ..settings });
    let unknown = stranger.view().await.unwrap_err().to_string();
    assert!(unknown.contains("certificate"), "{unknown}");
}

#[test]
fn hosts_have_ports() {
    let cases = [
        ("db", ("db", 5432)),
        ("db:1", ("db", 1)),
        ("::1", ("::1", 5432)),
        ("[::1]", ("::1", 5432)),
        ("[::1]:2", ("::1", 2)),
    ];
    for (host, expected) in cases {
        assert_eq!(session::split_port(host), expected);
    }
}
