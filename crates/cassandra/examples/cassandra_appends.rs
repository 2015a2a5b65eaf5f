//! Measures appends to a ledger in a real Cassandra: rows inserted at QUORUM, then the shared read of the owners.
//!
//! ```text
//! CASSANDRA_NODES=3 CASSANDRA_JIT=full scripts/cassandra.sh start
//! cargo run --release -p cassandra --example cassandra_appends -- \
//!   NODES STREAMS BYTES SECONDS [APPENDS_PER_SECOND] [PIDS_OF_THE_SERVERS]
//! ```
//!
//! The first runs are for warming up. With 0 appends per second each stream appends as soon as it can. Prints the rate, percentiles
//! of the insert and of the whole append, the longest time in which none was acknowledged, and the CPU time of the servers
//! for each append.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a program for people who measure")]

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use cassandra::ledger::{CassandraLedger, LedgerOptions};
use ledger::{Ledger, Owner, RecordHead, Segment, StoredView, Stream, cut, encode};
use tokio::{
    sync::watch,
    time::{Instant, interval},
};

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).map_or(0, |text| text.parse::<u64>().unwrap());
    let contact_points = arguments[0].split(',').map(str::to_owned).collect();
    let (streams, bytes, seconds, rate) = (number(1), number(2), number(3), number(4));
    let servers: Vec<&str> = arguments.get(5).map_or_else(Vec::new, |list| list.split(',').collect());

    let keyspace = "appends".to_owned();
    let options = LedgerOptions { contact_points, keyspace, ..LedgerOptions::default() };
    let ledger = Arc::new(CassandraLedger::new(options).unwrap());
    ledger.create().await.unwrap();
    let owner = take_over(&*ledger).await;
    let validation = Arc::new(SharedReads::default());
    tokio::spawn(validate(Arc::downgrade(&validation), Arc::clone(&ledger), owner.clone()));
    let end = Instant::now() + Duration::from_secs(seconds);
    let (cpu, began) = (cpu_ms(&servers), Instant::now());
    let mut tasks = Vec::new();
    for stream in 0..streams {
        let (ledger, owner, validation) = (Arc::clone(&ledger), owner.clone(), Arc::clone(&validation));
        let pause = (rate > 0).then(|| Duration::from_secs_f64(streams as f64 / rate as f64));
        tasks.push(tokio::spawn(append_until(end, ledger, owner, validation, stream, bytes, pause)));
    }
    drop(validation);
    let (mut appends, mut unknown) = (Vec::new(), 0);
    for task in tasks {
        let (done, missed) = task.await.unwrap();
        appends.extend(done);
        unknown += missed;
    }
    let (took, cpu) = (began.elapsed(), cpu_ms(&servers) - cpu);
    report(&appends, took, cpu, unknown);
}

/// Makes this process the owner of home 0.
async fn take_over(ledger: &dyn Ledger) -> Owner {
    let found = ledger.view().await.unwrap();
    let version = found.as_ref().map_or(1, |view| view.version + 1);
    let owner = Owner { home: 0, node: "n".into(), incarnation: version, epoch: version };
    let cluster = found.map_or(7, |view| view.cluster);
    let view = StoredView { cluster, version, document: vec![0; 2000].into(), owners: vec![owner.clone()] };
    ledger.swap(&view).await.unwrap();
    owner
}

/// Reads of the owners that appends share: each waits for one that begins after its rows were answered.
#[derive(Default)]
struct SharedReads {
    drawn: watch::Sender<u64>,
    valid: watch::Sender<u64>,
}

impl SharedReads {
    async fn after_this(&self) {
        let mut ticket = 0;
        self.drawn.send_modify(|drawn| {
            *drawn += 1;
            ticket = *drawn;
        });
        self.valid.subscribe().wait_for(|valid| *valid >= ticket).await.unwrap();
    }
}

/// Reads as long as there are appends.
async fn validate(validation: Weak<SharedReads>, ledger: Arc<CassandraLedger>, owner: Owner) {
    let mut drawn = validation.upgrade().unwrap().drawn.subscribe();
    while drawn.changed().await.is_ok() {
        let batch = *drawn.borrow_and_update();
        while ledger.owners().await.map_or(true, |owners| !owners.contains(&owner)) {}
        let Some(validation) = validation.upgrade() else { return };
        validation.valid.send_replace(batch);
    }
}

struct MeasuredAppend {
    acknowledged: Instant,
    insert: Duration,
    whole: Duration,
}

async fn append_until(
    end: Instant,
    ledger: Arc<CassandraLedger>,
    owner: Owner,
    validation: Arc<SharedReads>,
    stream: u64,
    bytes: u64,
    pause: Option<Duration>,
) -> (Vec<MeasuredAppend>, usize) {
    let stream = Stream { home: 0, number: u8::try_from(stream).unwrap() };
    let (mut appends, mut unknown) = (Vec::new(), 0);
    let mut ticks = pause.map(interval);
    let changes: Vec<u8> = (0..bytes).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
    for n in 0.. {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        if Instant::now() > end {
            break;
        }
        let segment =
            Segment { stream, epoch: owner.epoch, number: u32::try_from(n * bytes / (16 << 20)).unwrap() };
        let (epoch, time, predecessor) = (owner.epoch, 0, 0);
        let (record, _) = encode(&RecordHead { stream, epoch, n, time, predecessor }, &changes);
        let rows = cut(&record, segment, n).unwrap();
        let began = Instant::now();
        while ledger.insert(&owner, Arc::clone(&rows)).await.is_err() {
            unknown += 1;
        }
        let insert = began.elapsed();
        validation.after_this().await;
        appends.push(MeasuredAppend { acknowledged: Instant::now(), insert, whole: began.elapsed() });
    }
    (appends, unknown)
}

fn report(appends: &[MeasuredAppend], took: Duration, cpu: f64, unknown: usize) {
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    let percentiles = |which: fn(&MeasuredAppend) -> Duration| {
        let mut times: Vec<_> = appends.iter().map(which).collect();
        times.sort_unstable();
        let at = |part: usize| ms(times[(times.len() - 1) * part / 1000]);
        format!("p50 {:.1} p99 {:.1} max {:.0}", at(500), at(990), at(1000))
    };
    let mut times: Vec<_> = appends.iter().map(|append| append.acknowledged).collect();
    times.sort_unstable();
    let gap = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
    println!(
        "{:.0}/s; append {} ms; insert {} ms; gap {:.0} ms; servers {:.2} cores, {:.2} ms each; {unknown} unknown",
        appends.len() as f64 / took.as_secs_f64(),
        percentiles(|append| append.whole),
        percentiles(|append| append.insert),
        ms(gap),
        cpu / ms(took),
        cpu / appends.len() as f64,
    );
}

/// CPU time that processes have used, in ms.
fn cpu_ms(processes: &[&str]) -> f64 {
    let used = |pid: &&str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let fields = after_name.split_whitespace().skip(11).take(2);
        fields.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() * 10.0
    };
    processes.iter().map(used).sum()
}
