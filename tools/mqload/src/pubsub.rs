//! `mqload pubsub`: publishers and subscribers, throughput and latency.

use crate::cli::{BrokerArgs, ConnectArgs, MeasureArgs};
use crate::client::{ClientCfg, ConnectStats, Engine, Pace, Spec, State};
use crate::clock;
use crate::codec::{self, STAMP_LEN, TOPIC_DIGITS};
use crate::cold::{self, Held};
use crate::procstat::{Target, Usage};
use crate::report::{Report, merge_tally, per, round, tally};
use crate::sequence::BitSet;
use crate::worker::{Load, Meter, Outcome, Plan, Shared, Topology, Worker};
use crate::{EXIT_CONN, EXIT_LOSS};
use serde_json::Value;
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

/// What the threads gather while connecting.
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

/// Body of a load thread; an error here is one of epoll itself.
fn thread(run: &Run, tid: usize) -> std::io::Result<(Outcome, BTreeMap<String, u64>)> {
    let plan = run.plan;
    let mut eng = Engine::new(run.cfg.clone(), Some(run.sh.wakers[tid].clone()))?;
    let m = Meter::new(plan, run.sh, tid);
    let (np, ns) = (m.local_pubs(), m.local_subs());
    eng.set_source_base(tid * (np + ns));
    for i in 0..np {
        let id = i * plan.threads + tid;
        let client_id = format!("{}-p{id}", plan.prefix);
        eng.add(Spec { client_id, clean: run.args.clean, filter: None, deaf: false });
    }
    for j in 0..ns {
        let id = j * plan.threads + tid;
        eng.add(Spec {
            client_id: format!("{}-s{id}", plan.prefix),
            clean: run.args.clean,
            filter: Some((plan.filter(id), plan.sub_qos)),
            deaf: false,
        });
    }
    for id in (tid..plan.slow).step_by(plan.threads) {
        eng.add(Spec {
            client_id: format!("{}-d{id}", plan.prefix),
            clean: run.args.clean,
            filter: Some((plan.filter(id), plan.sub_qos)),
            deaf: true,
        });
    }
    let (readers, all) = (np + ns, eng.conns.len());
    let mut w = Worker::new(eng, m);
    // All subscriptions are there before the first publisher connects.
    for range in [np..all, 0..np] {
        let c = w.eng.establish(range, &run.pace, &mut w.m)?;
        w.eng.deafen(readers..all)?;
        run.gathered.lock().unwrap().connect.push(c);
        run.barrier.wait();
    }
    merge_tally(&mut run.gathered.lock().unwrap().failures, &w.eng.failures);
    run.gathered.lock().unwrap().limits(&w.eng, np, plan);
    run.barrier.wait(); // the controller looks at the result
    run.barrier.wait(); // and has set the times, or exit
    if !run.sh.exit.load(Relaxed) {
        w.load()?;
    }
    let drops = std::mem::take(&mut w.eng.drops);
    clean_up(&mut w, run, tid)?;
    Ok((w.finish(), drops))
}

/// Leaves nothing behind on the broker: retained messages, sessions.
fn clean_up(w: &mut Worker, run: &Run, tid: usize) -> std::io::Result<()> {
    let plan = run.plan;
    let (np, all) = (w.m.local_pubs(), w.eng.conns.len());
    // Subscribers first, so that they do not see what follows.
    w.eng.disconnect(np..all, true, &mut w.m)?;
    run.among_threads.wait();
    for i in 0..np {
        if plan.retain && w.eng.conns[i].state == State::Up {
            let mut b = Vec::new();
            codec::clear_retained(&mut b, plan.v5, &plan.topic(i * plan.threads + tid));
            w.eng.send(i, &b, &mut w.m);
        }
    }
    w.eng.disconnect(0..np, true, &mut w.m)?;
    if !run.args.clean && !plan.v5 {
        // 3.1.1: only a clean connection ends a persistent session.
        for c in &mut w.eng.conns {
            c.spec.clean = true;
            c.spec.filter = None;
        }
        w.eng.establish(0..all, &run.pace, &mut w.m)?;
        w.eng.disconnect(0..all, true, &mut w.m)?;
    }
    Ok(())
}

impl Gathered {
    fn connect(&self) -> ConnectStats {
        let mut all = ConnectStats::new();
        self.connect.iter().for_each(|c| all.merge(c));
        all
    }

    /// Notes where CONNACK (v5) forbids what the run needs.
    fn limits(&mut self, eng: &Engine, np: usize, plan: &Plan) {
        for c in eng.conns[..np].iter().filter(|c| c.state == State::Up) {
            let k = &c.connack;
            self.receive_max = self.receive_max.min(k.receive_max);
            if k.max_qos < plan.qos {
                tally(&mut self.failures, "CONNACK: maximum QoS below --qos");
            } else if (k.max_packet as usize) < plan.size + plan.topic(0).len() + 16 {
                tally(&mut self.failures, "CONNACK: maximum packet size below --size");
            } else if plan.retain && !k.retain_available {
                tally(&mut self.failures, "CONNACK: retain not available");
            }
        }
    }
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

fn title(args: &Args, plan: &Plan) -> String {
    let load = match plan.load {
        Load::Closed { window } => format!("closed loop, window {window}"),
        Load::Open { interval, .. } => format!("open loop, {:.0} msg/s", 1e9 / interval),
    };
    format!(
        "mqload pubsub {:?} {}->{}, QoS {}/{}, {} B, {}, MQTT {}{}{}",
        plan.topology,
        plan.publishers,
        plan.subscribers,
        plan.qos,
        plan.sub_qos,
        plan.size,
        load,
        if plan.v5 { "5" } else { "3.1.1" },
        args.broker.transport(),
        args.measure.label.as_ref().map_or(String::new(), |l| format!("  [{l}]")),
    )
}

fn parameters(r: &mut Report, args: &Args, plan: &Plan) {
    r.set("command", "pubsub");
    r.set("label", args.measure.label.clone());
    args.broker.report(r);
    r.set("topology", format!("{:?}", plan.topology).to_lowercase());
    r.set("publishers", plan.publishers);
    r.set("subscribers", plan.subscribers);
    r.set("slow", plan.slow);
    r.set("topic_levels", plan.levels);
    r.set("cold_topics", args.cold_topics);
    r.set("qos", plan.qos);
    r.set("sub_qos", plan.sub_qos);
    r.set("size", plan.size);
    r.set("clean", args.clean);
    r.set("retain", plan.retain);
    let (window, rate, tick) = match plan.load {
        Load::Closed { window } => (Some(window), None, None),
        Load::Open { window, .. } => ((window != u64::MAX).then_some(window), args.rate, Some(args.tick_us)),
    };
    r.set("mode", if rate.is_some() { "open" } else { "closed" });
    r.set("window", window);
    r.set("rate", rate);
    r.set("tick_us", tick);
    r.set("count", plan.count);
    r.set("batch_bytes", plan.batch_bytes);
    r.set("refill", plan.refill);
    r.set("gather_us", args.gather_us);
    r.set("threads", plan.threads);
}

/// Fills in what was measured; false when messages were lost or duplicated
/// beyond what the QoS permits.
fn results(r: &mut Report, args: &Args, plan: &Plan, t: &Totals, w: &Window) -> bool {
    let o = &t.o;
    let seconds = (w.end - w.start) as f64 / 1e9;
    let expected = (o.sent - o.rejected) * plan.copies();
    let lost = expected.saturating_sub(t.fresh());
    let per_sec = |n: u64| round(n as f64 / seconds, 1);
    let (inn, out) = (o.sent_window, o.received_window);

    r.set("aborted", w.aborted);
    r.set("window_seconds", round(seconds, 4));
    r.set("drain_seconds", round(w.drain_seconds, 3));
    r.set("published", o.sent);
    r.set("published_in_window", inn);
    r.set("acked", o.acked);
    r.set("unacked", o.unacked);
    r.set("rejected", o.rejected);
    r.set("delivered", t.fresh());
    r.set("delivered_in_window", out);
    r.set("expected", expected);
    r.set("lost", lost);
    r.set("duplicated", o.duplicates);
    r.set("out_of_order", o.out_of_order);
    r.set("misrouted", o.misrouted);
    r.set("foreign", o.foreign);
    r.set("retain_flagged", o.retain_flagged);
    r.set("written_off", o.written_off);
    r.set("dropped_publishers", o.dropped_pubs);
    r.set("dropped_subscribers", o.dropped_subs);
    r.set("msgs_per_sec_in", per_sec(inn));
    r.set("msgs_per_sec_out", per_sec(out));
    r.set("msgs_per_sec_total", per_sec(inn + out));
    r.set("latency_us", o.latency.json());
    r.set("msgs_per_write", per(o.sent as f64, o.pub_writes, 2));
    r.set("msgs_per_read", per(o.received as f64, o.sub_reads, 2));
    r.line(
        "rate",
        format!(
            "in {:.0}/s   out {:.0}/s   total {:.0}/s   over {seconds:.2} s",
            per_sec(inn),
            per_sec(out),
            per_sec(inn + out)
        ),
    );
    r.line(
        "messages",
        format!(
            "published {}  expected {expected}  delivered {}  lost {lost}  duplicated {}  out of order {}",
            o.sent,
            t.fresh(),
            o.duplicates,
            o.out_of_order
        ),
    );
    if plan.copies() > 0 {
        r.line("latency", o.latency.line());
    }
    if plan.topology == Topology::Fanout && plan.threads == 1 {
        r.set("last_delivery_us", o.last_delivery.json());
        r.line("last delivery", o.last_delivery.line());
    }
    if plan.qos > 0 {
        r.set("ack_latency_us", o.ack_latency.json());
        r.line("ack latency", o.ack_latency.line());
    }
    if let Load::Open { .. } = plan.load {
        let behind = o.scheduled - o.sent;
        r.set("scheduled", o.scheduled);
        r.set("behind_schedule", behind);
        r.set("send_lag_us", o.send_lag.json());
        r.line("send lag", o.send_lag.line());
        if behind > 0 {
            r.line("BEHIND", format!("{behind} scheduled messages were never sent"));
        }
    }
    for (n, what) in [
        (o.misrouted, "MISROUTED"),
        (o.foreign, "FOREIGN"),
        (o.unacked, "UNACKED"),
        (o.rejected, "REJECTED"),
        (o.written_off, "written off"),
    ] {
        if n > 0 {
            r.line(what, n.to_string());
        }
    }
    r.line(
        "batching",
        format!(
            "{} messages per publisher write, {} per subscriber read",
            per(o.sent as f64, o.pub_writes, 1),
            per(o.received as f64, o.sub_reads, 1)
        ),
    );
    let u = &w.usage;
    let broker = u.broker;
    r.cpu(u);
    let or_null = |v: Value| if broker { v } else { Value::Null };
    r.set("broker_cpu_us_per_published", or_null(per(u.broker_us, inn, 3)));
    r.set("broker_cpu_us_per_delivered", or_null(per(u.broker_us, out, 3)));
    r.set("broker_cpu_us_per_message", or_null(per(u.broker_us, inn + out, 3)));
    r.set("loadgen_cpu_us_per_message", per(u.own_us, inn + out, 3));
    let us = |v: Value| v.as_f64().map_or("-".into(), |x| format!("{x:.3}"));
    let mut text = format!("mqload {} per message", us(per(u.own_us, inn + out, 3)));
    if broker {
        text = format!(
            "broker {} per published, {} per delivered, {} per message in or out; {text}",
            us(per(u.broker_us, inn, 3)),
            us(per(u.broker_us, out, 3)),
            us(per(u.broker_us, inn + out, 3)),
        );
    }
    r.line("cpu us", text);

    let qos = plan.qos.min(plan.sub_qos);
    let mut ok = o.misrouted == 0 && o.rejected == 0;
    ok &= qos == 0 || lost == 0;
    ok &= qos == 1 || o.duplicates == 0;
    ok &= plan.qos == 0 || o.unacked == 0;
    ok &= !args.strict_order || o.out_of_order == 0;
    ok
}
