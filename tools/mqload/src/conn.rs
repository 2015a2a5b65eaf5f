//! `mqload conn`: opening and holding many connections.

use crate::EXIT_CONN;
use crate::cli::{BrokerArgs, MeasureArgs};
use crate::client::{Acked, ConnectStats, Delivery, Engine, Handler, Pace, Spec};
use crate::clock;
use crate::cold;
use crate::procstat::{Cpu, Mem, Usage};
use crate::report::{Report, merge_tally, per, round, tally};
use serde_json::json;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    broker: BrokerArgs,
    #[command(flatten)]
    measure: MeasureArgs,
    /// Number of connections
    #[arg(long, short = 'N', default_value_t = 1000)]
    connections: usize,
    /// Connections a second; 0: as fast as --inflight allows
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    rate: f64,
    /// Handshakes under way at once
    #[arg(long, value_name = "N", default_value_t = 100)]
    inflight: usize,
    /// Each connection subscribes to a topic of its own
    #[arg(long)]
    subscribe: bool,
    /// QoS of those subscriptions
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    sub_qos: u8,
    /// Clean sessions, or persistent ones
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    clean: bool,
    /// Seconds to hold the connections
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    hold: f64,
    #[command(flatten)]
    cold: cold::ColdArgs,
    /// Threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// Nothing is published here; only the end of connections matters, and the
/// engine notes that.
struct Idle;

impl Handler for Idle {
    fn publish(&mut self, _: usize, _: &Delivery, _: u64) {}
    fn acked(&mut self, _: usize, _: &Acked) {}
}

struct Run<'a> {
    args: &'a Args,
    prefix: String,
    barrier: Barrier,
    exit: AtomicBool,
    connect: Mutex<ConnectStats>,
}

struct Outcome {
    /// Why the cold subscriptions failed.
    cold: Option<String>,
    failures: BTreeMap<String, u64>,
    drops: BTreeMap<String, u64>,
    resumed: u64,
    alive: usize,
}

/// As many connections as handshakes at once, so that each finds a ticket.
fn fetch_tickets(run: &Run, eng: &mut Engine, pace: &Pace, tid: usize) -> io::Result<()> {
    let first = eng.conns.len();
    for i in 0..pace.inflight {
        let client_id = format!("{}-r{tid}-{i}", run.prefix);
        eng.add(Spec { client_id, clean: true, filter: None, deaf: false });
    }
    let all = first..eng.conns.len();
    eng.establish(all.clone(), pace, &mut Idle)?;
    eng.disconnect(all, true, &mut Idle)?;
    eng.resumed = 0;
    Ok(())
}

fn thread(run: &Run, mut eng: Engine, tid: usize) -> io::Result<Outcome> {
    let a = run.args;
    let n = (a.connections + a.threads - 1 - tid) / a.threads;
    eng.set_source_base(tid * n);
    for i in 0..n {
        let id = i * a.threads + tid;
        eng.add(Spec {
            client_id: format!("{}-c{id}", run.prefix),
            clean: a.clean,
            deaf: false,
            filter: a.subscribe.then(|| (format!("{}/{id}", run.prefix), a.sub_qos)),
        });
    }
    let pace = a.broker.pace(a.inflight.div_ceil(a.threads), a.rate / a.threads as f64);
    let mut h = Idle;
    if a.broker.resume {
        fetch_tickets(run, &mut eng, &pace, tid)?;
    }
    run.barrier.wait();
    run.barrier.wait(); // the controller has taken its sample
    let c = eng.establish(0..n, &pace, &mut h)?;
    run.connect.lock().unwrap().merge(&c);
    run.barrier.wait();
    run.barrier.wait(); // the controller has taken its samples
    let mut cold = None;
    if a.cold.cold > 0 && c.failed == 0 {
        let parts = (0..n).map(|i| cold::part(a.cold.cold, i * a.threads + tid, a.connections)).collect();
        let name = |i| cold::filter(a.cold.cold_kind, &run.prefix, cold::LEVELS, i);
        cold = cold::subscribe(&mut eng, 0, parts, name)?.err();
    }
    run.barrier.wait();
    while !run.exit.load(Relaxed) {
        let now = clock::now();
        let mut wait = 100 * clock::MS;
        if let Some(t) = eng.keep_alive(now, &mut h) {
            wait = wait.min(t.saturating_sub(now));
        }
        eng.turn(Some(wait), &mut h)?;
    }
    let alive = eng.alive();
    let resumed = eng.resumed;
    let drops = std::mem::take(&mut eng.drops);
    eng.disconnect(0..n, true, &mut h)?;
    let failures = std::mem::take(&mut eng.failures);
    if !a.clean && !a.broker.v5 {
        for c in &mut eng.conns {
            c.spec.clean = true;
            c.spec.filter = None;
        }
        eng.establish(0..n, &pace, &mut h)?;
        eng.disconnect(0..n, true, &mut h)?;
    }
    Ok(Outcome { resumed, cold, failures, drops, alive })
}

pub fn run(args: &Args, nofile: u64) -> Result<i32, String> {
    if args.connections == 0 || args.threads == 0 || args.threads > args.connections {
        return Err("--connections: at least 1, and not fewer than --threads".into());
    }
    let cfg = args.broker.client_cfg(args.connections, nofile)?;
    let target = args.measure.target()?;
    let run = Run {
        args,
        prefix: args.broker.prefix(),
        barrier: Barrier::new(args.threads + 1),
        exit: AtomicBool::new(false),
        connect: Mutex::new(ConnectStats::new()),
    };
    let mut engines = Vec::new();
    for _ in 0..args.threads {
        engines.push(Engine::new(cfg.clone(), None).map_err(|e| e.to_string())?);
    }
    let before = target.mem();
    let mut cpu = [Cpu::default(); 5];
    let mut after = Mem::default();
    let mut held = Mem::default();
    let outcomes: Vec<Outcome> = std::thread::scope(|s| {
        let handles: Vec<_> = engines
            .into_iter()
            .enumerate()
            .map(|(tid, eng)| {
                let run = &run;
                s.spawn(move || {
                    thread(run, eng, tid).unwrap_or_else(|e| {
                        eprintln!("mqload: {e}");
                        std::process::exit(EXIT_CONN);
                    })
                })
            })
            .collect();
        run.barrier.wait();
        cpu[0] = target.cpu();
        run.barrier.wait();
        run.barrier.wait();
        cpu[1] = target.cpu();
        after = target.mem();
        run.barrier.wait();
        run.barrier.wait();
        cpu[4] = target.cpu();
        // The first quarter of the holding time (1 s at most) is not counted
        // as idle: the broker may still be tidying up.
        let settle = (args.hold / 4.0).clamp(0.0, 1.0);
        std::thread::sleep(Duration::from_secs_f64(settle));
        cpu[2] = target.cpu();
        std::thread::sleep(Duration::from_secs_f64((args.hold - settle).max(0.0)));
        cpu[3] = target.cpu();
        held = target.mem();
        run.exit.store(true, Relaxed);
        handles.into_iter().map(|h| h.join().expect("connection thread")).collect()
    });

    let c = run.connect.into_inner().unwrap();
    let mut failures = BTreeMap::new();
    let mut drops = BTreeMap::new();
    let mut alive = 0;
    let mut resumed = 0;
    for o in outcomes {
        merge_tally(&mut failures, &o.failures);
        merge_tally(&mut drops, &o.drops);
        if let Some(why) = o.cold {
            tally(&mut failures, &why);
        }
        alive += o.alive;
        resumed += o.resumed;
    }
    let mut r = Report::new(format!(
        "mqload conn {} connections{}, MQTT {}{}{}",
        args.connections,
        if args.subscribe { ", one subscription each" } else { "" },
        if args.broker.v5 { "5" } else { "3.1.1" },
        args.broker.transport(),
        args.measure.label.as_ref().map_or(String::new(), |l| format!("  [{l}]")),
    ));
    r.set("command", "conn");
    r.set("label", args.measure.label.clone());
    args.broker.report(&mut r);
    r.set("connections", args.connections);
    r.set("rate", args.rate);
    r.set("inflight", args.inflight);
    r.set("subscribe", args.subscribe);
    r.set("sub_qos", args.sub_qos);
    r.set("clean", args.clean);
    r.set("hold_seconds", args.hold);
    r.set("threads", args.threads);
    r.set("source_addresses", cfg.sources.len());
    r.set("established", c.up);
    r.set("failed", c.failed);
    r.set("alive_after_hold", alive);
    r.set("connect_seconds", round(c.seconds(), 4));
    r.set("connect_per_sec", round(c.rate(), 1));
    r.set("connect_latency_us", c.latency.json());
    r.line("connect", format!("{} of {} up in {:.3} s: {:.0}/s", c.up, c.attempted, c.seconds(), c.rate()));
    r.line("latency", c.latency.line());
    if args.broker.tls {
        r.set("tls_resumed", resumed);
        r.line("TLS", format!("{resumed} of {} sessions resumed", c.up));
    }
    r.problems("connect_failures", "CONNECT FAILED", &failures);
    r.problems("dropped_connections", "DROPPED", &drops);

    let up = c.up as u64;
    let opening = Usage::between(&cpu[0], &cpu[1]);
    r.cpu(&opening);
    r.set("loadgen_cpu_us_per_connection", per(opening.own_us, up, 1));
    let idle = Usage::between(&cpu[2], &cpu[3]);
    if opening.broker && idle.broker {
        r.memory(&before, &held);
        r.set("broker_rss_kb_connected", after.rss_kb);
        r.set("broker_pss_kb_connected", after.pss_kb);
        // Negative when the broker gave back memory of earlier work.
        let grown = |a: u64, b: u64| (b as f64 - a as f64) * 1024.0;
        // Cold subscriptions come later and are counted apart.
        let with = if args.cold.cold > 0 { &after } else { &held };
        let rss = per(grown(before.rss_kb, with.rss_kb), up, 0);
        let pss = per(grown(before.pss_kb, with.pss_kb), up, 0);
        r.line("bytes/connection", format!("RSS {rss}, PSS {pss}"));
        r.set("rss_bytes_per_connection", rss);
        r.set("pss_bytes_per_connection", pss);
        let us = per(opening.broker_us, up, 1);
        r.line("cpu us/connection", format!("broker {us}"));
        r.set("broker_cpu_us_per_connection", us);
        r.set("broker_idle_cpu_percent", json!(round(idle.broker_percent(), 3)));
        r.set("idle_other_cpu_percent", round(idle.other_percent(), 1));
        r.line(
            "idle",
            format!(
                "broker {:.3} % CPU with {alive} connections held, over {:.1} s",
                idle.broker_percent(),
                idle.seconds
            ),
        );
    }
    cold::report(&mut r, &args.cold, &after, &held, &Usage::between(&cpu[1], &cpu[4]));
    let code = if !failures.is_empty() || !drops.is_empty() { EXIT_CONN } else { 0 };
    Ok(r.print(code, args.measure.quiet))
}
