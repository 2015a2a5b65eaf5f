//! Measures appends: `cargo run --release -p postgres --example appends -- HOSTS [SECONDS]`, with the addresses that
//! scripts/postgres.sh prints. Processes of servers in `target/postgres-PORT` on this machine are counted as their cost.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use ledger::{Inserted, Ledger, Owner, Row, Segment, StoredView, Stream, Swapped};
use postgres::{PostgresLedger, PostgresSettings};
use tokio::time::{Instant, interval_at};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let hosts: Vec<String> = arguments.next().unwrap().split(',').map(str::to_owned).collect();
    let seconds = arguments.next().map_or(5, |seconds| seconds.parse().unwrap());
    let settings = PostgresSettings {
        user: "ledger".into(),
        password: "ledger".into(),
        database: "ledger".into(),
        schema: format!("bench_{}", std::process::id()).into(),
        hosts: hosts.clone(),
        ..PostgresSettings::default()
    };
    let ledger = Arc::new(PostgresLedger::start(settings));
    ledger.create().await.unwrap();
    let owner = Owner { home: 0, node: "bench".into(), incarnation: 1, epoch: 1 };
    let view = StoredView { cluster: 1, version: 1, document: Bytes::new(), owners: vec![owner.clone()] };
    assert_eq!(ledger.swap(&view).await.unwrap(), Swapped::Applied);
    for finding in ledger.findings().await.unwrap() {
        println!("finding: {}", finding.text);
    }
    let bench =
        Bench { ledger, owner, hosts, limit: Duration::from_secs(seconds), segment: AtomicU64::new(0) };
    println!("| streams | bytes | appends/s | p50 ms | p99 ms | CPU of PostgreSQL per append ms | cores |");
    println!("|---|---|---|---|---|---|---|");
    let bench = Arc::new(bench);
    bench.run(6, 600, None, Duration::from_secs(1), false).await;
    for streams in [1, 6, 24] {
        for bytes in [600, 2048] {
            bench.run(streams, bytes, None, bench.limit, true).await;
        }
    }
    bench.run(24, 2048, Some(300), bench.limit, true).await;
    bench.segment().await;
}

struct Bench {
    ledger: Arc<PostgresLedger>,
    owner: Owner,
    hosts: Vec<String>,
    limit: Duration,
    segment: AtomicU64,
}

impl Bench {
    /// Appends on so many streams, as fast as they are answered or at a rate of all.
    async fn run(
        self: &Arc<Self>,
        streams: u8,
        bytes: usize,
        rate: Option<u32>,
        limit: Duration,
        shown: bool,
    ) {
        let number = self.segment.fetch_add(1, Relaxed) as u32;
        let (begin, cpu) = (Instant::now(), self.cpu());
        let mut tasks = tokio::task::JoinSet::new();
        for stream in 0..streams {
            let this = Arc::clone(self);
            tasks.spawn(async move {
                // Streams take turns.
                let mut ticks = rate.map(|rate| {
                    let turn = Duration::from_secs(1) / rate;
                    interval_at(begin + turn * u32::from(stream), turn * u32::from(streams))
                });
                let mut times = Vec::new();
                for n in 0.. {
                    if let Some(ticks) = &mut ticks {
                        ticks.tick().await;
                    }
                    if begin.elapsed() > limit {
                        break;
                    }
                    let segment = Segment { stream: Stream { home: 0, number: stream }, epoch: 1, number };
                    let data = Bytes::from(vec![n as u8; bytes]);
                    let rows = Arc::new([Row { segment, n, part: 0, parts: 1, data }]);
                    let sent = Instant::now();
                    assert_eq!(this.ledger.insert(&this.owner, rows).await.unwrap(), Inserted::Owned);
                    times.push(sent.elapsed());
                }
                times
            });
        }
        let mut times: Vec<Duration> = tasks.join_all().await.into_iter().flatten().collect();
        if !shown {
            return;
        }
        let (took, cpu) = (begin.elapsed(), self.cpu() - cpu);
        times.sort_unstable();
        let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1_000.0;
        println!(
            "| {streams}{} | {bytes} | {:.0} | {:.2} | {:.2} | {:.3} | {:.2} |",
            rate.map(|rate| format!(" at {rate}/s")).unwrap_or_default(),
            times.len() as f64 / took.as_secs_f64(),
            at(50),
            at(99),
            cpu.as_secs_f64() * 1_000.0 / times.len() as f64,
            cpu.as_secs_f64() / took.as_secs_f64()
        );
    }

    /// Cost of a segment of 16 MiB for those that share a session with it.
    async fn segment(&self) {
        let segment = Segment { stream: Stream { home: 0, number: 0 }, epoch: 2, number: 0 };
        let data = Bytes::from(vec![7; 4096]);
        for n in 0..256 {
            let rows: Arc<[Row]> =
                (0..16).map(|part| Row { segment, n, part, parts: 16, data: data.clone() }).collect();
            self.ledger.insert(&self.owner, rows).await.unwrap();
        }
        let begin = Instant::now();
        let read = self.ledger.read(segment, (0, 0), 16 << 20).await.unwrap();
        println!("read {} rows of 4 KiB in {:?}", read.rows.len(), begin.elapsed());
        let begin = Instant::now();
        self.ledger.delete(segment).await.unwrap();
        println!("removed them in {:?}", begin.elapsed());
    }

    /// Time of the processors that the servers have used.
    fn cpu(&self) -> Duration {
        let ports = self.hosts.iter().filter_map(|host| host.rsplit_once(':'));
        let folders: Vec<String> = ports.map(|(_, port)| format!("postgres-{port}/")).collect();
        let mut ticks = 0;
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(folder) = fs::read_link(process.path().join("cwd")) else { continue };
            let folder = folder.to_string_lossy().into_owned();
            if !folders.iter().any(|of| folder.contains(of)) {
                continue;
            }
            let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
            let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
            ticks +=
                fields.split(' ').skip(11).take(2).filter_map(|part| part.parse::<u64>().ok()).sum::<u64>();
        }
        Duration::from_millis(ticks * 10)
    }
}
