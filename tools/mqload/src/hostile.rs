//! Hostile clients, and what becomes of those beside them: latency, gaps, closed connections, new connections, memory.

mod attack;
mod bystander;
mod http;
mod memory;
mod mixes;
mod packets;

use crate::cli::MeasureArgs;
use crate::clock::{self, MS};
use crate::report::Report;
use attack::{Attack, Client, Door, Doors};
use bystander::{Bystanders, Experience};
use clap::Args as ClapArgs;
use mixes::Mix;
use serde_json::json;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{fs, io, thread};

#[derive(ClapArgs)]
pub struct Args {
    /// Host name or address of the broker
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// TCP port of the broker
    #[arg(long, short, default_value_t = 1883)]
    port: u16,
    /// Port of its plain WebSocket listener, for mixes that need it
    #[arg(long)]
    ws_port: Option<u16>,
    /// Port of its HTTP listener, for mixes that need it
    #[arg(long)]
    http_port: Option<u16>,
    /// What attacks; several at once by commas
    #[arg(long, value_enum, value_delimiter = ',', required = true)]
    mix: Vec<Mix>,
    /// Seconds of the attack
    #[arg(long, short, default_value_t = 8.0)]
    duration: f64,
    /// Seconds before it in which the bystanders are alone
    #[arg(long, default_value_t = 2.0)]
    quiet_seconds: f64,
    /// Seconds after it in which late messages are waited for
    #[arg(long, default_value_t = 20.0)]
    patience: f64,
    /// Messages per second of the pair of bystanders, QoS 1
    #[arg(long, default_value_t = 100.0)]
    rate: f64,
    /// Idle clients with a keep alive of 5 s
    #[arg(long, default_value_t = 50)]
    innocents: usize,
    /// Retained topics of the mix scan
    #[arg(long, default_value_t = 300_000)]
    retained: usize,
    /// Subscribers of the mix fanout
    #[arg(long, default_value_t = 15_000)]
    subscribers: usize,
    /// Source addresses of the attackers, from 127.0.1.1 on; 1: none of their own
    #[arg(long, value_name = "N", default_value_t = 100)]
    sources: u32,
    /// User name of the bystanders
    #[arg(long, requires = "password")]
    username: Option<String>,
    /// Their password
    #[arg(long, requires = "username")]
    password: Option<String>,
    /// Seconds that the preparations may take
    #[arg(long, default_value_t = 60.0)]
    prepare_timeout: f64,
    #[command(flatten)]
    measure: MeasureArgs,
}

/// Sizes of the mixes that have one.
pub struct Sizes {
    pub retained: usize,
    pub subscribers: usize,
}

/// Clients of an attack: `prepare` has done its part before `attack` begins.
#[derive(Default)]
pub struct Plan {
    pub prepare: Vec<Client>,
    pub attack: Vec<Client>,
}

impl Plan {
    fn attack(clients: impl IntoIterator<Item = Client>) -> Plan {
        Plan { prepare: Vec::new(), attack: clients.into_iter().collect() }
    }

    fn after(mut self, clients: impl IntoIterator<Item = Client>) -> Plan {
        self.prepare.extend(clients);
        self
    }
}

/// Attackers give way to those who measure; both are on one CPU as a rule.
const ATTACKERS_NICE: libc::c_int = 10;
const TURN: u64 = 5 * MS;

pub fn run(args: &Args) -> Result<i32, String> {
    let target = args.measure.target()?;
    let address = resolve(&args.host, args.port)?;
    let sizes = Sizes { retained: args.retained, subscribers: args.subscribers };
    let mut plan = Plan::default();
    for mix in &args.mix {
        let one = mixes::plan(*mix, &sizes);
        plan.prepare.extend(one.prepare);
        plan.attack.extend(one.attack);
    }
    let port = |port: Option<u16>| port.map(|port| resolve(&args.host, port)).transpose();
    let doors = Doors { tcp: address, ws: port(args.ws_port)?, http: port(args.http_port)? };
    for (door, flag) in [(Door::Ws, "--ws-port"), (Door::Http, "--http-port")] {
        if doors.find(door).is_none() && plan.attack.iter().any(|client| client.door == door) {
            return Err(format!("this mix needs {flag}"));
        }
    }
    let memory = Arc::new(Watch::default());
    let watcher = target.pids.first().map(|pid| memory.follow(*pid));
    let clock = Arc::new(Clock::default());
    let (ready, is_ready) = mpsc::channel();
    let attackers = {
        let (clock, prepare) = (Arc::clone(&clock), clock::secs(args.prepare_timeout));
        let sources = args.sources;
        thread::spawn(move || attackers(plan, doors, sources, prepare, &clock, &ready))
    };
    let prepared = is_ready.recv().map_err(|_| "the attackers' thread ended")?;
    let outcome = prepared.and_then(|()| {
        let prefix = format!("by{:06x}", clock::now() & 0xff_ffff);
        let login = args.username.clone().zip(args.password.clone());
        let bystanders = Bystanders::connect(address, &prefix, args.innocents, login)?;
        let begin = clock::now() + clock::secs(args.quiet_seconds);
        let end = begin + clock::secs(args.duration);
        memory.rest();
        clock.end.store(end, Relaxed);
        clock.begin.store(begin, Relaxed);
        let interval = clock::secs(1.0 / args.rate.max(1.0));
        bystanders
            .run(begin, end, clock::secs(args.patience), interval, &clock.over)
            .map_err(|e| e.to_string())
    });
    clock.over.store(true, Relaxed);
    let tally = attackers.join().map_err(|_| "the attackers' thread panicked")?;
    memory.over.store(true, Relaxed);
    if let Some(watcher) = watcher {
        let _ = watcher.join();
    }
    report(args, &outcome?, &tally?, &memory)
}

fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
    let found = (host, port).to_socket_addrs().map_err(|e| format!("--host {host}: {e}"))?;
    found.into_iter().next().ok_or_else(|| format!("--host {host}: no address"))
}

/// Begin and end of the attack (monotonic ns, 0: not known yet), and whether the bystanders have left.
#[derive(Default)]
struct Clock {
    begin: AtomicU64,
    end: AtomicU64,
    over: AtomicBool,
}

type Ready = mpsc::Sender<Result<(), String>>;

fn attackers(
    plan: Plan,
    doors: Doors,
    sources: u32,
    patience: u64,
    clock: &Clock,
    ready: &Ready,
) -> Result<attack::Tally, String> {
    // SAFETY: plain system calls; with 0 for the process it is this thread alone.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, ATTACKERS_NICE) };
    let outcome = attack(plan, doors, sources, patience, clock, ready);
    if let Err(error) = &outcome {
        let _ = ready.send(Err(error.clone()));
    }
    outcome
}

fn attack(
    plan: Plan,
    doors: Doors,
    sources: u32,
    patience: u64,
    clock: &Clock,
    ready: &Ready,
) -> Result<attack::Tally, String> {
    let said = |e: io::Error| e.to_string();
    let mut engine = Attack::new(doors, sources).map_err(said)?;
    engine.add(plan.prepare);
    let give_up = clock::now() + patience;
    while !engine.finished() {
        engine.turn(TURN).map_err(said)?;
        if clock::now() > give_up {
            return Err(format!("preparations took too long; {:?}", engine.total().closed));
        }
    }
    let _ = ready.send(Ok(()));
    let prepared = engine.len();
    let mut plan = Some(plan.attack);
    let mut attacking = false;
    while !clock.over.load(Relaxed) {
        let (begin, end, now) = (clock.begin.load(Relaxed), clock.end.load(Relaxed), clock::now());
        if begin > 0
            && now >= begin
            && let Some(plan) = plan.take()
        {
            engine.add(plan);
            attacking = true;
        }
        if attacking && now >= end {
            attacking = false;
            engine.total();
            engine.drop_from(prepared);
        }
        engine.turn(TURN).map_err(said)?;
    }
    if attacking {
        engine.total();
    }
    Ok(std::mem::take(&mut engine.tally))
}

/// Text of a connection's end.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset => "reset by broker".into(),
        io::ErrorKind::ConnectionRefused => "connection refused".into(),
        io::ErrorKind::BrokenPipe => "closed by broker".into(),
        _ => error.to_string(),
    }
}

/// Memory of the broker, looked at all the time (kB).
#[derive(Default)]
struct Watch {
    rest: AtomicU64,
    peak: AtomicU64,
    rest_anonymous: AtomicU64,
    peak_anonymous: AtomicU64,
    last: AtomicU64,
    last_anonymous: AtomicU64,
    over: AtomicBool,
}

impl Watch {
    fn follow(self: &Arc<Self>, pid: i32) -> thread::JoinHandle<()> {
        let this = Arc::clone(self);
        this.look(pid);
        thread::spawn(move || {
            while !this.over.load(Relaxed) {
                this.look(pid);
                thread::sleep(Duration::from_millis(20));
            }
        })
    }

    fn look(&self, pid: i32) {
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/status")) else { return };
        let all = crate::procstat::kb(&text, "VmRSS:");
        let anonymous = crate::procstat::kb(&text, "RssAnon:");
        self.last.store(all, Relaxed);
        self.last_anonymous.store(anonymous, Relaxed);
        self.peak.fetch_max(all, Relaxed);
        self.peak_anonymous.fetch_max(anonymous, Relaxed);
    }

    /// Records the present memory as the memory before the attack.
    fn rest(&self) {
        let (all, anonymous) = (self.last.load(Relaxed), self.last_anonymous.load(Relaxed));
        for (of, value) in [
            (&self.rest, all),
            (&self.peak, all),
            (&self.rest_anonymous, anonymous),
            (&self.peak_anonymous, anonymous),
        ] {
            of.store(value, Relaxed);
        }
    }
}

fn report(args: &Args, e: &Experience, tally: &attack::Tally, memory: &Watch) -> Result<i32, String> {
    let mixes: Vec<String> = args.mix.iter().map(|mix| format!("{mix:?}")).collect();
    let mut r = Report::new(format!("hostile, {}", mixes.join(" + ")));
    let ms = |ns: u64| (ns as f64 / 1e5).round() / 10.0;
    r.set("mix", json!(mixes));
    r.set("duration", args.duration);
    r.set("gap_before_ms", ms(e.gap_before));
    r.set("gap_ms", ms(e.gap));
    r.line("greatest gap", format!("{} ms before, {} ms in the attack", ms(e.gap_before), ms(e.gap)));
    r.set("latency_before_us", e.before.json());
    r.set("latency_us", e.latency.json());
    r.line("latency before", e.before.line());
    r.line("latency", e.latency.line());
    r.set("sent", e.sent);
    r.set("undelivered", e.undelivered);
    r.set("refused", e.refused);
    r.set("pair_closed", e.pair_closed);
    r.set("innocents_closed", e.innocents_closed);
    r.line(
        "bystanders",
        format!(
            "{} undelivered, {} refused, {} of the pair and {} of {} idle ones closed",
            e.undelivered, e.refused, e.pair_closed, e.innocents_closed, args.innocents
        ),
    );
    r.problems("bystanders_lost", "bystander", &e.closed);
    r.set("connect_us", e.connects.json());
    r.set("connects_failed", e.connects_failed);
    r.line("new connections", format!("{}; {} failed", e.connects.line(), e.connects_failed));
    r.set("attack_opened", tally.opened);
    r.set("attack_greeted", tally.greeted);
    r.set("attack_bytes", tally.bytes);
    r.set("attack_packets_back", tally.packets_back);
    r.line(
        "attackers",
        format!(
            "{} connections, {} MB sent, {} packets back",
            tally.opened,
            tally.bytes / 1_000_000,
            tally.packets_back
        ),
    );
    r.problems("attack_closed", "attacker", &tally.closed);
    let mb = |kb: &AtomicU64| (kb.load(Relaxed) as f64 / 102.4).round() / 10.0;
    let figures = [
        ("rss_mib_before", &memory.rest),
        ("rss_mib_peak", &memory.peak),
        ("rss_mib_after", &memory.last),
        ("anonymous_mib_before", &memory.rest_anonymous),
        ("anonymous_mib_peak", &memory.peak_anonymous),
    ];
    for (key, value) in figures {
        r.set(key, mb(value));
    }
    r.line(
        "broker memory",
        format!("RSS {} -> {} (peak {}) MiB", mb(&memory.rest), mb(&memory.last), mb(&memory.peak)),
    );
    Ok(r.print(0, args.measure.quiet))
}
