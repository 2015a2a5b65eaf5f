//! `mqload offline`: what a broker keeps for subscribers that are away. With a
//! command in between (kill -9 and restart) it tests durability: every message
//! that the broker acknowledged must arrive.

mod phases;

use crate::cli::{BrokerArgs, ConnectArgs, MeasureArgs};
use crate::client::{Acked, Delivery, Engine, Handler, Spec, State};
use crate::clock;
use crate::codec::{PublishTemplate, STAMP_LEN, Stamp};
use crate::inflight::Await;
use crate::procstat::Target;
use crate::sequence::{Arrival, BitSet, Streams};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    broker: BrokerArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    measure: MeasureArgs,
    /// File with the broker's pid, read anew in each phase (instead of --pid)
    #[arg(long, value_name = "FILE")]
    pid_file: Option<String>,
    /// Number of publishers
    #[arg(long, short = 'P', value_name = "N", default_value_t = 1)]
    publishers: usize,
    /// Number of subscribers; each gets every message, unless --pair
    #[arg(long, short = 'S', value_name = "N", default_value_t = 1)]
    subscribers: usize,
    /// Publisher i to subscriber i only
    #[arg(long)]
    pair: bool,
    /// Messages of each publisher
    #[arg(long, short = 'n', value_name = "N", default_value_t = 1000)]
    count: u64,
    /// QoS of publishing and of the subscriptions
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    qos: u8,
    /// Payload bytes (20 or more)
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// Unacknowledged messages of a publisher
    #[arg(long, short, value_name = "W", default_value_t = 100)]
    window: u32,
    /// Shell command to run between publishing and receiving
    #[arg(long, value_name = "CMD")]
    pause_cmd: Option<String>,
    /// Run --pause-cmd already when this many messages are acknowledged; the
    /// publishers may then lose their connections and stop
    #[arg(long, value_name = "N", requires = "pause_cmd")]
    crash_at: Option<u64>,
    /// Seconds to wait for the broker to accept connections again
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    up_timeout: f64,
    /// End when nothing has arrived (or been acknowledged) for this many seconds
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    drain_timeout: f64,
}

struct Pub {
    template: PublishTemplate,
    sent: u64,
    acked: BitSet,
    alive: bool,
}

/// The books: what was acknowledged, and what arrived where.
struct Books {
    np: usize,
    pair: bool,
    pubs: Vec<Pub>,
    dirty: Vec<usize>,
    acked: u64,
    rejected: u64,
    /// Index: subscriber * publishers + publisher.
    streams: Streams,
    seen: Vec<BitSet>,
    received: u64,
    duplicates: u64,
    out_of_order: u64,
    foreign: u64,
    /// Distinct messages that arrived.
    fresh: u64,
    first_rx: u64,
    last_rx: u64,
    last_progress: u64,
    sessions_present: usize,
}

impl Handler for Books {
    fn publish(&mut self, idx: usize, d: &Delivery, now: u64) {
        let Some(st) = d.stamp.filter(|s| (s.publisher as usize) < self.np && idx >= self.np) else {
            self.foreign += 1;
            return;
        };
        let (sub, publisher) = (idx - self.np, st.publisher as usize);
        if self.pair && sub != publisher {
            self.foreign += 1;
            return;
        }
        if self.received == 0 {
            self.first_rx = now;
        }
        self.received += 1;
        self.last_rx = now;
        self.last_progress = now;
        let stream = sub * self.np + publisher;
        match self.streams.arrived(stream, st.seq) {
            Arrival::Duplicate => {
                self.duplicates += 1;
                return;
            }
            Arrival::Late => self.out_of_order += 1,
            Arrival::InOrder | Arrival::AfterGap => {}
        }
        self.seen[stream].insert(st.seq);
        self.fresh += 1;
    }

    fn acked(&mut self, idx: usize, a: &Acked) {
        self.last_progress = a.now;
        self.dirty.push(idx);
        if a.reason >= 0x80 {
            self.rejected += 1;
        } else {
            self.acked += 1;
            self.pubs[idx].acked.insert(a.seq);
        }
    }

    fn writable(&mut self, idx: usize) {
        if idx < self.np {
            self.dirty.push(idx);
        }
    }

    fn up(&mut self, idx: usize, session_present: bool, _: u64) {
        if idx >= self.np && session_present {
            self.sessions_present += 1;
        }
    }

    fn dropped(&mut self, idx: usize) {
        if idx < self.np {
            self.pubs[idx].alive = false;
        }
    }
}

struct Test<'a> {
    args: &'a Args,
    eng: Engine,
    b: Books,
    addr: SocketAddr,
    /// Result and seconds of --pause-cmd.
    pause: Option<(Option<i32>, f64)>,
}

impl Test<'_> {
    fn pub_range(&self) -> Range<usize> {
        0..self.b.np
    }

    fn sub_range(&self) -> Range<usize> {
        self.b.np..self.eng.conns.len()
    }

    fn target(&self) -> Target {
        let mut t = Target { pids: self.args.measure.pid.clone(), tree: self.args.measure.pid_tree };
        if let Some(f) = &self.args.pid_file {
            let pid = std::fs::read_to_string(f).unwrap_or_default();
            t.pids = pid.trim().parse().into_iter().collect();
        }
        t
    }

    /// Connects a group; says how many did not come up.
    fn connect(&mut self, range: Range<usize>) -> std::io::Result<usize> {
        let pace = self.args.broker.pace(self.args.connect.connect_inflight, self.args.connect.connect_rate);
        Ok(self.eng.establish(range, &pace, &mut self.b)?.failed)
    }

    fn send(&mut self, i: usize, wbuf: &mut Vec<u8>, filler: &[u8]) {
        let (p, c) = (&mut self.b.pubs[i], &mut self.eng.conns[i]);
        if c.state != State::Up || c.has_out() {
            return;
        }
        let limit = self.args.window.min(c.connack.receive_max as u32);
        let n = (c.inflight.room(limit as u64) as u64).min(self.args.count - p.sent);
        let n = n.min((65_536 / p.template.wire_len()).max(1) as u64);
        if n == 0 {
            return;
        }
        wbuf.clear();
        let ts = clock::now();
        let wait = if self.args.qos == 1 { Await::Puback } else { Await::Pubrec };
        for seq in p.sent..p.sent + n {
            let pid = c.inflight.start(ts, seq, wait);
            let stamp = Stamp { ts, publisher: i as u32, seq };
            p.template.write(wbuf, pid, &stamp, filler);
        }
        p.sent += n;
        if n > 0 && p.sent < self.args.count {
            self.b.dirty.push(i);
        }
        self.eng.send(i, wbuf, &mut self.b);
    }

    /// Publishes everything and waits for the acknowledgements.
    fn publish(&mut self) -> std::io::Result<()> {
        let filler = vec![b'm'; self.args.size];
        let mut wbuf = Vec::new();
        self.b.dirty = self.pub_range().collect();
        self.b.last_progress = clock::now();
        loop {
            for i in std::mem::take(&mut self.b.dirty) {
                self.send(i, &mut wbuf, &filler);
            }
            let open = (0..self.b.np).any(|i| {
                self.b.pubs[i].alive
                    && (self.b.pubs[i].sent < self.args.count || self.eng.conns[i].inflight.live() > 0)
            });
            let idle = clock::now().saturating_sub(self.b.last_progress);
            if !open || idle > clock::secs(self.args.drain_timeout) {
                return Ok(());
            }
            let wait = if self.b.dirty.is_empty() { 100 * clock::MS } else { 0 };
            self.eng.turn(Some(wait), &mut self.b)?;
            if self.pause.is_none() && self.args.crash_at.is_some_and(|n| self.b.acked >= n) {
                self.run_pause_cmd();
                self.b.last_progress = clock::now();
            }
        }
    }

    fn run_pause_cmd(&mut self) {
        let Some(cmd) = &self.args.pause_cmd else {
            return;
        };
        let t = clock::now();
        let code = std::process::Command::new("sh")
            .args(["-c", cmd])
            .stdout(std::process::Stdio::null())
            .status()
            .ok()
            .and_then(|s| s.code());
        self.pause = Some((code, (clock::now() - t) as f64 / 1e9));
    }

    fn wait_until_up(&self) -> bool {
        let end = clock::now() + clock::secs(self.args.up_timeout);
        while clock::now() < end {
            if TcpStream::connect_timeout(&self.addr, Duration::from_secs(1)).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// Messages that a subscriber must get: (acknowledged, of these missing,
    /// arrived without having been acknowledged), over all subscribers.
    fn balance(&self) -> (u64, u64, u64) {
        let (mut due, mut missing, mut extra) = (0, 0, 0);
        for s in 0..self.args.subscribers {
            for (p, publisher) in self.b.pubs.iter().enumerate() {
                if self.b.pair && p != s {
                    continue;
                }
                let seen = &self.b.seen[s * self.b.np + p];
                due += publisher.acked.len();
                for n in 0..publisher.sent {
                    match (publisher.acked.contains(n), seen.contains(n)) {
                        (true, false) => missing += 1,
                        (false, true) => extra += 1,
                        _ => {}
                    }
                }
            }
        }
        (due, missing, extra)
    }

    /// Receives until everything acknowledged is there, or nothing comes.
    fn receive(&mut self) -> std::io::Result<()> {
        let copies = if self.b.pair { 1 } else { self.args.subscribers as u64 };
        let due: u64 = self.b.pubs.iter().map(|p| p.acked.len()).sum::<u64>() * copies;
        self.b.last_progress = clock::now();
        loop {
            // Messages that were not acknowledged may arrive too: with all
            // there by number, look whether they are the right ones.
            let done = self.b.fresh >= due && self.balance().1 == 0;
            let idle = clock::now().saturating_sub(self.b.last_progress);
            if done || idle > clock::secs(self.args.drain_timeout) || self.eng.alive() == 0 {
                break;
            }
            self.eng.turn(Some(50 * clock::MS), &mut self.b)?;
        }
        // Time for surplus messages to show.
        let end = clock::now() + 300 * clock::MS;
        while clock::now() < end {
            self.eng.turn(Some(50 * clock::MS), &mut self.b)?;
        }
        Ok(())
    }
}

pub fn run(args: &Args, nofile: u64) -> Result<i32, String> {
    if args.publishers == 0 || args.subscribers == 0 || args.count == 0 || args.window == 0 {
        return Err("--publishers, --subscribers, --count and --window: at least 1".into());
    }
    if args.pair && args.publishers != args.subscribers {
        return Err("--pair needs as many subscribers as publishers".into());
    }
    if args.size < STAMP_LEN || args.size > 268_000_000 {
        return Err(format!("--size: {STAMP_LEN} to 268000000"));
    }
    let (np, ns) = (args.publishers, args.subscribers);
    let cfg = args.broker.client_cfg(np + ns, nofile)?;
    if args.pid_file.is_none() {
        args.measure.target()?;
    }
    let prefix = args.broker.prefix();
    let addr = cfg.addr;
    let mut eng = Engine::new(cfg, None).map_err(|e| e.to_string())?;
    for i in 0..np {
        eng.add(Spec { client_id: format!("{prefix}-p{i}"), clean: true, filter: None, deaf: false });
    }
    for j in 0..ns {
        let filter = if args.pair { format!("{prefix}/{j}") } else { format!("{prefix}/#") };
        eng.add(Spec {
            client_id: format!("{prefix}-s{j}"),
            clean: false,
            filter: Some((filter, args.qos)),
            deaf: false,
        });
    }
    let pubs = (0..np)
        .map(|i| Pub {
            template: PublishTemplate::new(
                &format!("{prefix}/{i}"),
                args.qos,
                false,
                args.broker.v5,
                args.size,
            ),
            sent: 0,
            acked: BitSet::default(),
            alive: true,
        })
        .collect();
    let t = Test {
        args,
        eng,
        b: Books {
            np,
            pair: args.pair,
            pubs,
            dirty: Vec::new(),
            acked: 0,
            rejected: 0,
            streams: Streams::new(np * ns),
            seen: vec![BitSet::default(); np * ns],
            received: 0,
            duplicates: 0,
            out_of_order: 0,
            foreign: 0,
            fresh: 0,
            first_rx: 0,
            last_rx: 0,
            last_progress: 0,
            sessions_present: 0,
        },
        addr,
        pause: None,
    };
    phases::test(t).map_err(|e| e.to_string())
}
