//! `mqload pubsub`: publishers and subscribers, throughput and latency.

mod results;
mod thread;

use results::{parameters, results, title};
use thread::thread;

use crate::cli::{BrokerArgs, ConnectArgs, MeasureArgs};
use crate::client::{ClientCfg, ConnectStats, Pace};
use crate::clock;
use crate::codec::{STAMP_LEN, TOPIC_DIGITS};
use crate::cold::{self, Held};
use crate::procstat::{Target, Usage};
use crate::report::{Report, merge_tally, round};
use crate::sequence::BitSet;
use crate::worker::{Load, Outcome, Plan, Shared, Topology};
use crate::{EXIT_CONN, EXIT_LOSS};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    broker: BrokerArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    measure: MeasureArgs,
    /// Who sends to whom
    #[arg(long, short, value_enum, default_value = "pair")]
    topology: Topology,
    /// Number of publishers
    #[arg(long, short = 'P', value_name = "N", default_value_t = 1)]
    publishers: usize,
    /// Number of subscribers [default: fanin 1, none 0, otherwise as many as publishers]
    #[arg(long, short = 'S', value_name = "N")]
    subscribers: Option<usize>,
    /// Further subscribers that read nothing (fanout, fanin): not counted in windows and latencies
    #[arg(long, value_name = "N", default_value_t = 0)]
    slow: usize,
    #[command(flatten)]
    cold: cold::ColdArgs,
    /// Levels of the topics
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=64))]
    topic_levels: u8,
    /// Publish to so many topics in turn, all publishers together (not fanout)
    #[arg(long, value_name = "N", default_value_t = 0)]
    cold_topics: u64,
    /// QoS of publishing
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    qos: u8,
    /// QoS of the subscriptions [default: as --qos]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=2))]
    sub_qos: Option<u8>,
    /// Payload bytes (20 or more)
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// true: clean sessions; false: persistent ones
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    clean: bool,
    /// Publish with the retain flag
    #[arg(long)]
    retain: bool,
    /// Open loop: messages a second, all publishers together
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// Open loop: messages go out in groups, this many microseconds apart; 0: singly
    #[arg(long, value_name = "US", default_value_t = 100)]
    tick_us: u64,
    /// Outstanding messages of a publisher [default: closed loop 100, open loop no limit]
    #[arg(long, short, value_name = "W")]
    window: Option<u64>,
    /// Messages of each publisher (instead of --duration)
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
    /// Measured seconds
    #[arg(long, short, value_name = "S", default_value_t = 10.0)]
    duration: f64,
    /// Seconds of load before measuring [default: 1, with --count 0]
    #[arg(long, value_name = "S")]
    warmup: Option<f64>,
    /// At the end, wait until nothing has arrived for this many seconds
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    drain_timeout: f64,
    /// Closed loop: after this many seconds without progress, messages are given up for lost
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    stall_timeout: f64,
    /// Pause between connecting and the load, seconds
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    settle: f64,
    /// Most bytes in one write
    #[arg(long, value_name = "BYTES", default_value_t = 65536)]
    batch_bytes: usize,
    /// Closed loop: a publisher sends only when it may send this many (larger
    /// writes, less CPU for mqload; at most --window)
    #[arg(long, value_name = "N", default_value_t = 1)]
    refill: u64,
    /// Let arrivals gather for this long before each round (less CPU for
    /// mqload, but it adds to the latencies)
    #[arg(long, value_name = "US", default_value_t = 0)]
    gather_us: u64,
    /// Load threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Out-of-order messages fail the run too (exit 3)
    #[arg(long)]
    strict_order: bool,
}

impl Args {
    fn plan(&self) -> Result<Plan, String> {
        let subscribers = match (self.topology, self.subscribers) {
            (Topology::None, None | Some(0)) => 0,
            (Topology::None, Some(_)) => return Err("--topology none has no subscribers".into()),
            (Topology::Fanin, None) => 1,
            (_, None) => self.publishers,
            (_, Some(n)) => n,
        };
        if self.publishers == 0 {
            return Err("--publishers: at least 1".into());
        }
        if subscribers == 0 && self.topology != Topology::None {
            return Err("--subscribers: at least 1 (or --topology none)".into());
        }
        if self.topology == Topology::Pair && subscribers != self.publishers {
            return Err("--topology pair needs as many subscribers as publishers".into());
        }
        if self.size < STAMP_LEN {
            return Err(format!("--size: at least {STAMP_LEN} (time, publisher, number)"));
        }
        if self.size > 268_000_000 {
            return Err("--size: 268000000 at most".into());
        }
        if self.threads == 0 || self.threads > 64 || self.threads > self.publishers.max(subscribers) {
            return Err("--threads: 1 to 64, and not more than clients".into());
        }
        if self.cold.cold > 0 && self.broker.keepalive > 0 {
            return Err("--cold: not with --keepalive, its connections send nothing".into());
        }
        if self.slow > 0 && !matches!(self.topology, Topology::Fanout | Topology::Fanin) {
            return Err("--slow is for --topology fanout and fanin".into());
        }
        let topics = self.cold_topics.div_ceil(self.publishers as u64).max(1);
        if topics > 1 && (self.topology == Topology::Fanout || self.retain) {
            return Err("--cold-topics: not with --topology fanout or --retain".into());
        }
        if topics > 10u64.pow(TOPIC_DIGITS as u32) {
            return Err("--cold-topics: too many".into());
        }
        if self.window == Some(0) {
            return Err("--window: at least 1".into());
        }
        if self.count == Some(0) || (self.count.is_none() && self.duration <= 0.0) {
            return Err("--count or --duration must be positive".into());
        }
        let load = match self.rate {
            Some(r) if r > 0.0 => Load::Open {
                interval: 1e9 / r,
                tick: self.tick_us * 1000,
                window: self.window.unwrap_or(u64::MAX),
            },
            Some(_) => return Err("--rate must be positive".into()),
            None => Load::Closed { window: self.window.unwrap_or(100) },
        };
        Ok(Plan {
            topology: self.topology,
            publishers: self.publishers,
            subscribers,
            qos: self.qos,
            sub_qos: self.sub_qos.unwrap_or(self.qos),
            size: self.size,
            retain: self.retain,
            v5: self.broker.v5,
            load,
            count: self.count,
            batch_bytes: self.batch_bytes.max(1),
            refill: self.refill.max(1),
            gather: self.gather_us * 1000,
            stall: clock::secs(self.stall_timeout.max(0.1)),
            threads: self.threads,
            prefix: self.broker.prefix(),
            levels: self.topic_levels as usize,
            topics,
            slow: self.slow,
        })
    }
}

/// Results that the threads gather while connecting.
struct Gathered {
    connect: Vec<ConnectStats>,
    failures: BTreeMap<String, u64>,
    /// Lowest receive maximum that the broker announced (v5).
    receive_max: u16,
}

struct Run<'a> {
    args: &'a Args,
    plan: &'a Plan,
    sh: &'a Shared,
    cfg: Arc<ClientCfg>,
    pace: Pace,
    /// All threads and the controller.
    barrier: Barrier,
    /// The load threads only.
    among_threads: Barrier,
    gathered: Mutex<Gathered>,
}

/// CPU samples and times of the measured window.
struct Window {
    usage: Usage,
    start: u64,
    end: u64,
    /// The run was cut short because connections were dropped.
    aborted: bool,
    drain_seconds: f64,
}

/// Sums of the threads' progress.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Sums {
    open_pubs: u64,
    sent: u64,
    fresh: u64,
    rejected: u64,
    unacked: u64,
}

impl Sums {
    fn of(sh: &Shared) -> Sums {
        let mut s = Sums { open_pubs: 0, sent: 0, fresh: 0, rejected: 0, unacked: 0 };
        for p in &sh.progress {
            s.open_pubs += p.open_pubs.load(Acquire);
            s.sent += p.sent.load(Relaxed);
            s.fresh += p.fresh.load(Relaxed);
            s.rejected += p.rejected.load(Relaxed);
            s.unacked += p.unacked.load(Relaxed);
        }
        s
    }

    fn complete(&self, copies: u64) -> bool {
        self.open_pubs == 0 && self.unacked == 0 && self.fresh >= (self.sent - self.rejected) * copies
    }
}

fn sleep_until(t: u64, sh: &Shared) {
    loop {
        let now = clock::now();
        if now >= t || sh.abort.load(Relaxed) {
            return;
        }
        std::thread::sleep(Duration::from_nanos((t - now).min(50 * clock::MS)));
    }
}

/// Times the run: warm-up, window, drain.
fn control(run: &Run, target: &Target) -> Window {
    let (args, sh) = (run.args, run.sh);
    std::thread::sleep(Duration::from_secs_f64(args.settle.max(0.0)));
    let warmup = args.warmup.unwrap_or(if args.count.is_some() { 0.0 } else { 1.0 });
    let start = clock::now() + 20 * clock::MS;
    let win_start = start + clock::secs(warmup);
    let timed_end = match args.count {
        Some(_) => None,
        None => Some(win_start + clock::secs(args.duration)),
    };
    sh.start.store(start, Relaxed);
    sh.win_start.store(win_start, Relaxed);
    sh.win_end.store(timed_end.unwrap_or(u64::MAX), Relaxed);
    run.barrier.wait();

    sleep_until(win_start, sh);
    let a = target.cpu();
    let mut b = None;
    if let Some(t) = timed_end {
        sleep_until(t, sh);
        b = Some(target.cpu());
    }
    let load_end = clock::now();
    // Drain: until all is there, or nothing comes any more. With --count this
    // is the measured window too, so a CPU sample is taken at each standstill.
    let copies = run.plan.copies();
    let mut last = Sums::of(sh);
    let mut since = clock::now();
    let mut standstill = None;
    loop {
        let s = Sums::of(sh);
        let now = clock::now();
        if s != last {
            (last, since) = (s, now);
            standstill = None;
        }
        if s.complete(copies) || now - since > clock::secs(args.drain_timeout) {
            break;
        }
        if b.is_none() && standstill.is_none() && now - since > 20 * clock::MS {
            standstill = Some(target.cpu());
        }
        let ms = if s.open_pubs > 0 && timed_end.is_none() { 5 } else { 1 };
        std::thread::sleep(Duration::from_millis(ms));
    }
    let b = b.or(standstill).unwrap_or_else(|| target.cpu());
    let last_event = sh.progress.iter().map(|p| p.last_event.load(Relaxed)).max().unwrap_or(0);
    let aborted = sh.abort.load(Relaxed);
    let end = match timed_end {
        Some(t) if !aborted => t,
        Some(_) => load_end,
        None => last_event,
    };
    Window {
        usage: Usage::between(&a, &b),
        start: win_start,
        end: end.max(win_start + 1),
        aborted,
        drain_seconds: clock::now().saturating_sub(load_end) as f64 / 1e9,
    }
}

/// Sums of the threads' outcomes.
struct Totals {
    o: Outcome,
    /// share: distinct messages over all threads.
    distinct: Option<u64>,
}

impl Totals {
    fn of(outcomes: Vec<Outcome>) -> Totals {
        let mut it = outcomes.into_iter();
        let mut t = it.next().expect("at least one thread");
        for o in it {
            t.latency.merge(&o.latency);
            t.ack_latency.merge(&o.ack_latency);
            t.last_delivery.merge(&o.last_delivery);
            t.send_lag.merge(&o.send_lag);
            t.sent += o.sent;
            t.scheduled += o.scheduled;
            t.acked += o.acked;
            t.rejected += o.rejected;
            t.unacked += o.unacked;
            t.sent_window += o.sent_window;
            t.received += o.received;
            t.received_window += o.received_window;
            t.duplicates += o.duplicates;
            t.out_of_order += o.out_of_order;
            t.foreign += o.foreign;
            t.misrouted += o.misrouted;
            t.retain_flagged += o.retain_flagged;
            t.written_off += o.written_off;
            t.dropped_pubs += o.dropped_pubs;
            t.dropped_subs += o.dropped_subs;
            t.pub_writes += o.pub_writes;
            t.sub_reads += o.sub_reads;
            for (a, b) in t.seen.iter_mut().zip(&o.seen) {
                a.union(b);
            }
        }
        let distinct = (!t.seen.is_empty()).then(|| t.seen.iter().map(BitSet::len).sum::<u64>());
        if let Some(d) = distinct {
            t.duplicates = t.received - d;
        }
        Totals { o: t, distinct }
    }

    fn fresh(&self) -> u64 {
        self.distinct.unwrap_or(self.o.received - self.o.duplicates)
    }
}

pub fn run(args: &Args, nofile: u64) -> Result<i32, String> {
    let plan = args.plan()?;
    let clients = plan.publishers + plan.subscribers + plan.slow;
    let cfg = args.broker.client_cfg(clients + args.cold.connections(), nofile)?;
    let target = args.measure.target()?;
    let sh = Shared::new(&plan).map_err(|e| e.to_string())?;
    let threads = plan.threads;
    let run = Run {
        args,
        plan: &plan,
        sh: &sh,
        cfg,
        pace: args.broker.pace(
            args.connect.connect_inflight.div_ceil(threads),
            args.connect.connect_rate / threads as f64,
        ),
        barrier: Barrier::new(threads + 1),
        among_threads: Barrier::new(threads),
        gathered: Mutex::new(Gathered {
            connect: Vec::new(),
            failures: BTreeMap::new(),
            receive_max: u16::MAX,
        }),
    };
    let mut r = Report::new(title(args, &plan));
    parameters(&mut r, args, &plan);
    let cold = match cold_subscriptions(&run, &target, &mut r) {
        Ok(cold) => cold,
        Err(why) => {
            r.problems("connect_failures", "CONNECT FAILED", &BTreeMap::from([(why, 1)]));
            return Ok(r.print(EXIT_CONN, args.measure.quiet));
        }
    };
    let before = target.mem();

    let (window, after, outcomes) = std::thread::scope(|s| {
        let handles: Vec<_> = (0..threads)
            .map(|tid| {
                let run = &run;
                s.spawn(move || {
                    thread(run, tid).unwrap_or_else(|e| {
                        eprintln!("mqload: {e}");
                        std::process::exit(EXIT_CONN);
                    })
                })
            })
            .collect();
        for _ in 0..3 {
            run.barrier.wait();
        }
        let failed = !run.gathered.lock().unwrap().failures.is_empty();
        let window = if failed {
            sh.exit.store(true, Relaxed);
            run.barrier.wait();
            None
        } else {
            Some(control(&run, &target))
        };
        let after = target.mem();
        sh.exit.store(true, Relaxed);
        sh.wakers.iter().for_each(|w| w.wake());
        let outcomes: Vec<_> = handles.into_iter().map(|h| h.join().expect("load thread")).collect();
        (window, after, outcomes)
    });

    cold.end();
    let g = run.gathered.into_inner().unwrap();
    let c = g.connect();
    r.set("connections", c.up);
    r.set("connect_per_sec", round(c.rate(), 1));
    r.set("connect_latency_us", c.latency.json());
    r.line("connect", format!("{} of {} up, {:.0}/s, {}", c.up, c.attempted, c.rate(), c.latency.line()));
    if plan.v5 {
        r.set("broker_receive_max", g.receive_max);
    }
    let mut drops = BTreeMap::new();
    let mut all = Vec::new();
    for (o, d) in outcomes {
        merge_tally(&mut drops, &d);
        all.push(o);
    }
    r.problems("connect_failures", "CONNECT FAILED", &g.failures);
    r.problems("dropped_connections", "DROPPED", &drops);
    let Some(w) = window else {
        return Ok(r.print(EXIT_CONN, args.measure.quiet));
    };
    let t = Totals::of(all);
    let ok = results(&mut r, args, &plan, &t, &w);
    if !target.is_empty() {
        r.memory(&before, &after);
    }
    let code = if !drops.is_empty() {
        EXIT_CONN
    } else if !ok {
        EXIT_LOSS
    } else {
        0
    };
    Ok(r.print(code, args.measure.quiet))
}

/// Puts the cold subscriptions in place, and reports what they cost.
fn cold_subscriptions(run: &Run, target: &Target, r: &mut Report) -> Result<Held, String> {
    let cold = &run.args.cold;
    let mut held = Held::connect(cold, run.cfg.clone(), &run.pace, &run.plan.prefix)?;
    let (cpu, mem) = (target.cpu(), target.mem());
    held.subscribe(cold, &run.plan.prefix, run.plan.levels)?;
    cold::report(r, cold, &mem, &target.mem(), &Usage::between(&cpu, &target.cpu()));
    Ok(held)
}
