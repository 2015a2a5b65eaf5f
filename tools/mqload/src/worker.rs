//! One load thread of `pubsub`: its publishers and subscribers on one epoll
//! loop, with the accounts of what was sent and what arrived.

use crate::client::{Acked, Delivery, Engine, Handler, State};
use crate::clock;
use crate::codec::{self, PublishTemplate, Stamp, TOPIC_DIGITS};
use crate::inflight::Await;
use crate::poll::Waker;
use crate::report::Latency;
use crate::sequence::{Arrival, BitSet, Streams};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Topology {
    /// Publisher i to subscriber i, one topic each
    Pair,
    /// All publishers to one topic, all subscribers on it
    Fanout,
    /// A topic for each publisher, a wildcard for each subscriber
    Fanin,
    /// A topic for each publisher, all subscribers in one shared subscription
    Share,
    /// Publishers only
    None,
}

#[derive(Clone, Copy, Debug)]
pub enum Load {
    /// At most `window` messages outstanding for each publisher.
    Closed { window: u64 },
    /// Messages at fixed times, `interval` ns apart, rounded up to `tick`.
    /// `window` still limits what is outstanding (u64::MAX: no limit).
    Open { interval: f64, tick: u64, window: u64 },
}

/// Everything about a run that does not change.
pub struct Plan {
    pub topology: Topology,
    pub publishers: usize,
    pub subscribers: usize,
    pub qos: u8,
    pub sub_qos: u8,
    pub size: usize,
    pub retain: bool,
    pub v5: bool,
    pub load: Load,
    /// Messages for each publisher; `None`: until the end of the window.
    pub count: Option<u64>,
    pub batch_bytes: usize,
    /// Closed loop: a publisher waits until it may send this many.
    pub refill: u64,
    /// Pause (ns) before each round, so that more gathers; 0: none.
    pub gather: u64,
    pub stall: u64,
    pub threads: usize,
    pub prefix: String,
    /// Levels of the topics, 2 or more.
    pub levels: usize,
    /// Topics of each publisher, taken in turn; 1: always the same.
    pub topics: u64,
    /// Further subscribers (beside `subscribers`) that read nothing.
    pub slow: usize,
}

impl Plan {
    /// How many subscribers get each message.
    pub fn copies(&self) -> u64 {
        match self.topology {
            Topology::Pair | Topology::Share => 1,
            Topology::Fanout | Topology::Fanin => self.subscribers as u64,
            Topology::None => 0,
        }
    }

    pub fn topic(&self, publisher: usize) -> String {
        let mut t = match self.topology {
            Topology::Fanout => format!("{}/all", self.prefix),
            _ => format!("{}/{publisher}", self.prefix),
        };
        t.push_str(&self.deeper());
        if self.topics > 1 {
            t.push('/');
            t.push_str(&"0".repeat(TOPIC_DIGITS));
        }
        t
    }

    /// The levels after the second.
    fn deeper(&self) -> String {
        "/l".repeat(self.levels.saturating_sub(2))
    }

    pub fn filter(&self, subscriber: usize) -> String {
        match self.topology {
            Topology::Pair | Topology::None => {
                let any = if self.topics > 1 { "/+" } else { "" };
                format!("{}/{subscriber}{}{any}", self.prefix, self.deeper())
            }
            Topology::Fanout => format!("{}/all{}", self.prefix, self.deeper()),
            Topology::Fanin => format!("{}/#", self.prefix),
            Topology::Share => format!("$share/g/{0}/#", self.prefix),
        }
    }

    /// Whether publishing has to follow what subscribers have received.
    fn credits(&self) -> bool {
        self.topology != Topology::None
            && !matches!(self.load, Load::Open { window, .. } if window == u64::MAX)
    }

    /// QoS 0 without subscribers: only the socket holds a publisher back.
    fn unanswered(&self) -> bool {
        self.topology == Topology::None && self.qos == 0
    }
}

/// Progress of one thread, for the controller.
#[derive(Default)]
pub struct Progress {
    pub sent: AtomicU64,
    pub fresh: AtomicU64,
    pub rejected: AtomicU64,
    pub unacked: AtomicU64,
    pub open_pubs: AtomicU64,
    pub last_event: AtomicU64,
}

/// What the threads share.
pub struct Shared {
    /// Times, set before the load begins. `win_end` is `u64::MAX` with --count.
    pub start: AtomicU64,
    pub win_start: AtomicU64,
    pub win_end: AtomicU64,
    /// Stop publishing (a connection was dropped).
    pub abort: AtomicBool,
    pub exit: AtomicBool,
    /// `received[thread * publishers + publisher]`: messages of a publisher
    /// that all subscribers of the thread have (share: that any of them has).
    received: Vec<AtomicU64>,
    pub progress: Vec<Progress>,
    pub wakers: Vec<Arc<Waker>>,
}

impl Shared {
    pub fn new(plan: &Plan) -> io::Result<Shared> {
        let n = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        Ok(Shared {
            start: AtomicU64::new(0),
            win_start: AtomicU64::new(0),
            win_end: AtomicU64::new(u64::MAX),
            abort: AtomicBool::new(false),
            exit: AtomicBool::new(false),
            received: n(plan.threads * plan.publishers),
            progress: (0..plan.threads).map(|_| Progress::default()).collect(),
            wakers: (0..plan.threads).map(|_| Waker::new().map(Arc::new)).collect::<io::Result<_>>()?,
        })
    }
}

struct Pub {
    /// Number among all publishers.
    global: usize,
    template: PublishTemplate,
    sent: u64,
    acked: u64,
    /// Open loop: how many are scheduled up to now.
    due: u64,
    /// Closed loop: messages given up for lost, so that the window moves on.
    written_off: u64,
    /// For the stall check: progress seen last, and when it changed.
    mark: (u64, u64),
    dirty: bool,
    finished: bool,
    /// A PINGRESP is awaited, as the answer to all messages.
    pong_due: bool,
}

/// Lowest `next` over this thread's subscribers, for one publisher.
struct Lowest {
    value: u64,
    having: usize,
}

/// What a thread hands back at the end.
pub struct Outcome {
    pub latency: Latency,
    pub ack_latency: Latency,
    /// fanout: when the last subscriber of this thread had a message.
    pub last_delivery: Latency,
    pub send_lag: Latency,
    pub sent: u64,
    pub scheduled: u64,
    pub acked: u64,
    pub rejected: u64,
    pub unacked: u64,
    pub sent_window: u64,
    pub received: u64,
    pub received_window: u64,
    pub duplicates: u64,
    pub out_of_order: u64,
    pub foreign: u64,
    pub misrouted: u64,
    pub retain_flagged: u64,
    pub written_off: u64,
    pub dropped_pubs: u64,
    pub dropped_subs: u64,
    /// Write calls of publishers and read calls of subscribers.
    pub pub_writes: u64,
    pub sub_reads: u64,
    /// share: numbers seen, for each publisher.
    pub seen: Vec<BitSet>,
}

/// The accounts, and the [`Handler`] of the connections.
pub struct Meter<'a> {
    plan: &'a Plan,
    sh: &'a Shared,
    tid: usize,
    /// Connections 0..np are publishers, np.. are subscribers.
    np: usize,
    ns: usize,
    pubs: Vec<Pub>,
    dirty: Vec<u32>,
    remote_dirty: u64,
    streams: Streams,
    lowest: Vec<Lowest>,
    credits: bool,
    start: u64,
    win_start: u64,
    win_end: u64,
    unacked: u64,
    open_pubs: u64,
    last_event: u64,
    stopped: bool,
    wake_all: bool,
    o: Outcome,
}

impl<'a> Meter<'a> {
    pub fn new(plan: &'a Plan, sh: &'a Shared, tid: usize) -> Meter<'a> {
        let mine = |n: usize| (n + plan.threads - 1 - tid) / plan.threads;
        let np = mine(plan.publishers);
        let ns = mine(plan.subscribers);
        let pubs = (0..np)
            .map(|i| {
                let global = i * plan.threads + tid;
                Pub {
                    global,
                    template: PublishTemplate::new(
                        &plan.topic(global),
                        plan.qos,
                        plan.retain,
                        plan.v5,
                        plan.size,
                    ),
                    sent: 0,
                    acked: 0,
                    due: 0,
                    written_off: 0,
                    mark: (0, 0),
                    dirty: false,
                    finished: false,
                    pong_due: false,
                }
            })
            .collect();
        let streams = match plan.topology {
            Topology::Pair | Topology::None => ns,
            _ => plan.publishers * ns,
        };
        let share = plan.topology == Topology::Share;
        Meter {
            plan,
            sh,
            tid,
            np,
            ns,
            pubs,
            dirty: Vec::with_capacity(np),
            remote_dirty: 0,
            streams: Streams::new(streams),
            lowest: (0..plan.publishers).map(|_| Lowest { value: 0, having: ns }).collect(),
            credits: plan.credits(),
            start: 0,
            win_start: u64::MAX,
            win_end: u64::MAX,
            unacked: 0,
            open_pubs: np as u64,
            last_event: 0,
            stopped: false,
            wake_all: false,
            o: Outcome {
                latency: Latency::new(),
                ack_latency: Latency::new(),
                last_delivery: Latency::new(),
                send_lag: Latency::new(),
                sent: 0,
                scheduled: 0,
                acked: 0,
                rejected: 0,
                unacked: 0,
                sent_window: 0,
                received: 0,
                received_window: 0,
                duplicates: 0,
                out_of_order: 0,
                foreign: 0,
                misrouted: 0,
                retain_flagged: 0,
                written_off: 0,
                dropped_pubs: 0,
                dropped_subs: 0,
                pub_writes: 0,
                sub_reads: 0,
                seen: if share { vec![BitSet::default(); plan.publishers] } else { Vec::new() },
            },
        }
    }

    pub fn local_pubs(&self) -> usize {
        self.np
    }

    pub fn local_subs(&self) -> usize {
        self.ns
    }

    #[inline]
    fn mark(&mut self, publisher: usize) {
        let (local, owner) = if self.plan.threads == 1 {
            (publisher, 0)
        } else {
            (publisher / self.plan.threads, publisher % self.plan.threads)
        };
        if owner == self.tid {
            self.mark_local(local);
        } else {
            self.remote_dirty |= 1 << owner;
        }
    }

    #[inline]
    fn mark_local(&mut self, i: usize) {
        let p = &mut self.pubs[i];
        if !p.dirty {
            p.dirty = true;
            self.dirty.push(i as u32);
        }
    }

    /// Messages of a publisher that have reached their subscribers.
    #[inline]
    fn received(&self, publisher: usize) -> u64 {
        let n = self.plan.publishers;
        let at = |t: usize| self.sh.received[t * n + publisher].load(Relaxed);
        match (self.plan.threads, self.plan.topology) {
            (1, _) => at(0),
            (_, Topology::Pair) => at(self.tid),
            (t, Topology::Share) => (0..t).map(at).sum(),
            // Threads without subscribers have nothing to say.
            (t, _) => (0..t.min(self.plan.subscribers)).map(at).min().unwrap_or(0),
        }
    }

    /// Messages of local publisher `i` that no longer count for the window:
    /// acknowledged (QoS 1/2) and received, or given up.
    #[inline]
    fn settled(&self, i: usize) -> u64 {
        let p = &self.pubs[i];
        let base = match (self.plan.qos, self.plan.topology) {
            (0, _) => self.received(p.global),
            (_, Topology::None) => p.acked,
            _ => p.acked.min(self.received(p.global)),
        };
        if self.plan.topology == Topology::Share { base + p.written_off } else { base.max(p.written_off) }
    }

    /// Notes the account of one arrived message; `j`: local subscriber.
    #[inline]
    fn account(&mut self, j: usize, st: &Stamp, now: u64) -> Arrival {
        let publisher = st.publisher as usize;
        match self.plan.topology {
            Topology::Pair | Topology::None => {
                let a = self.streams.arrived(j, st.seq);
                if self.credits && a.fresh() {
                    let n = self.streams.next(j);
                    self.sh.received[self.tid * self.plan.publishers + publisher].store(n, Relaxed);
                    self.mark(publisher);
                }
                a
            }
            Topology::Fanout | Topology::Fanin => {
                let stream = publisher * self.ns + j;
                let before = self.streams.next(stream);
                let a = self.streams.arrived(stream, st.seq);
                let wanted = self.credits || self.plan.topology == Topology::Fanout;
                let last = wanted && self.streams.next(stream) != before && self.advanced(publisher, before);
                if last && st.ts >= self.win_start && st.ts < self.win_end {
                    self.o.last_delivery.record(now.saturating_sub(st.ts));
                }
                a
            }
            Topology::Share => {
                let fresh = self.o.seen[publisher].insert(st.seq);
                let a = self.streams.arrived(publisher * self.ns + j, st.seq);
                if !fresh {
                    return Arrival::Duplicate;
                }
                if self.credits {
                    let c = &self.sh.received[self.tid * self.plan.publishers + publisher];
                    c.store(c.load(Relaxed) + 1, Relaxed);
                    self.mark(publisher);
                }
                a
            }
        }
    }

    /// A subscriber went on from `before`; true when the slowest one has moved,
    /// which is when this message was the last copy of its kind.
    #[inline]
    fn advanced(&mut self, publisher: usize, before: u64) -> bool {
        let low = &mut self.lowest[publisher];
        if before != low.value {
            return false;
        }
        low.having -= 1;
        if low.having > 0 {
            return false;
        }
        let s = publisher * self.ns;
        (low.value, low.having) = self.streams.lowest(s..s + self.ns);
        let value = low.value;
        self.sh.received[self.tid * self.plan.publishers + publisher].store(value, Relaxed);
        self.mark(publisher);
        true
    }

    fn all_dirty(&mut self) {
        for i in 0..self.np {
            self.mark_local(i);
        }
    }

    fn publish_progress(&self) {
        let p = &self.sh.progress[self.tid];
        p.sent.store(self.o.sent, Relaxed);
        p.fresh.store(self.o.received - self.o.duplicates, Relaxed);
        p.rejected.store(self.o.rejected, Relaxed);
        p.unacked.store(self.unacked, Relaxed);
        p.last_event.store(self.last_event, Relaxed);
        p.open_pubs.store(self.open_pubs, Release);
    }
}

impl Handler for Meter<'_> {
    #[inline]
    fn publish(&mut self, idx: usize, d: &Delivery, now: u64) {
        if idx < self.np {
            self.o.foreign += 1;
            return;
        }
        let st = match d.stamp {
            // Older stamps are leftovers of another run.
            Some(s) if (s.publisher as usize) < self.plan.publishers && s.ts >= self.start => s,
            _ => {
                self.o.foreign += 1;
                return;
            }
        };
        let j = idx - self.np;
        if self.plan.topology == Topology::Pair && st.publisher as usize != j * self.plan.threads + self.tid {
            self.o.misrouted += 1;
            return;
        }
        self.o.retain_flagged += d.retain as u64;
        self.o.received += 1;
        self.last_event = now;
        if now >= self.win_start && now < self.win_end {
            self.o.received_window += 1;
        }
        match self.account(j, &st, now) {
            Arrival::Duplicate => {
                self.o.duplicates += 1;
                return;
            }
            Arrival::Late => self.o.out_of_order += 1,
            Arrival::InOrder | Arrival::AfterGap => {}
        }
        if st.ts >= self.win_start && st.ts < self.win_end {
            self.o.latency.record(now.saturating_sub(st.ts));
        }
    }

    #[inline]
    fn acked(&mut self, idx: usize, a: &Acked) {
        let p = &mut self.pubs[idx];
        p.acked += 1;
        self.unacked -= 1;
        self.last_event = a.now;
        if a.reason >= 0x80 {
            self.o.rejected += 1;
            if self.plan.topology == Topology::Share {
                p.written_off += 1;
            }
        } else {
            self.o.acked += 1;
            if a.ts >= self.win_start && a.ts < self.win_end {
                self.o.ack_latency.record(a.now.saturating_sub(a.ts));
            }
        }
        self.mark_local(idx);
    }

    fn writable(&mut self, idx: usize) {
        if idx < self.np {
            self.mark_local(idx);
        }
    }

    fn pong(&mut self, idx: usize, now: u64) {
        if idx < self.np && std::mem::take(&mut self.pubs[idx].pong_due) {
            self.unacked -= 1;
            self.last_event = now;
        }
    }

    fn dropped(&mut self, idx: usize) {
        if idx < self.np {
            self.o.dropped_pubs += 1;
            let p = &mut self.pubs[idx];
            if self.plan.qos > 0 {
                let lost = p.sent - p.acked;
                self.unacked -= lost;
                self.o.unacked += lost;
            } else if std::mem::take(&mut p.pong_due) {
                self.unacked -= 1;
                self.o.unacked += 1;
            }
            if !std::mem::replace(&mut p.finished, true) {
                self.open_pubs -= 1;
            }
        } else {
            self.o.dropped_subs += 1;
        }
        // A closed loop cannot go on with a part of its clients gone.
        if matches!(self.plan.load, Load::Closed { .. }) {
            self.sh.abort.store(true, Relaxed);
        }
    }

    fn woken(&mut self) {
        self.wake_all = true;
    }
}

/// Open loop: which message of this thread is due next.
struct Schedule {
    interval: f64,
    tick: u64,
    start: u64,
    publishers: u64,
    /// Local publisher and its message number that come next.
    i: usize,
    round: u64,
    /// Everything is scheduled (--count).
    done: bool,
}

impl Schedule {
    /// When message `n` of publisher `global` is to be sent.
    #[inline]
    fn at(&self, global: usize, n: u64) -> u64 {
        let k = n * self.publishers + global as u64;
        let t = (k as f64 * self.interval) as u64;
        self.start + t.div_ceil(self.tick) * self.tick
    }
}

pub struct Worker<'a> {
    pub eng: Engine,
    pub m: Meter<'a>,
    wbuf: Vec<u8>,
    filler: Vec<u8>,
}

impl<'a> Worker<'a> {
    pub fn new(eng: Engine, m: Meter<'a>) -> Worker<'a> {
        let filler = vec![b'm'; m.plan.size];
        Worker { eng, m, wbuf: Vec::new(), filler }
    }

    /// Puts the load on the broker from `start` until the controller says exit.
    pub fn load(&mut self) -> io::Result<()> {
        let m = &mut self.m;
        let plan = m.plan;
        m.start = m.sh.start.load(Relaxed);
        m.win_start = m.sh.win_start.load(Relaxed);
        m.win_end = m.sh.win_end.load(Relaxed);
        let mut sched = match plan.load {
            Load::Open { interval, tick, .. } => Some(Schedule {
                interval,
                tick: tick.max(1),
                start: m.start,
                publishers: plan.publishers as u64,
                i: 0,
                round: 0,
                done: m.np == 0,
            }),
            Load::Closed { .. } => None,
        };
        m.publish_progress();
        let start = m.start;
        while clock::now() < start {
            let left = start.saturating_sub(clock::now());
            self.eng.turn(Some(left), &mut self.m)?;
        }
        self.m.all_dirty();
        let mut next_stall_check = self.m.start + self.m.plan.stall / 4;
        let mut next_ping = None;
        loop {
            let now = clock::now();
            self.pump_dirty(now, sched.as_ref());
            self.wake_others();
            self.m.publish_progress();
            let m = &mut self.m;
            if m.sh.exit.load(Relaxed) {
                break;
            }
            // How long may this thread sleep?
            let mut until = if m.stopped { now + 20 * clock::MS } else { m.win_end.min(next_stall_check) };
            if !m.stopped
                && let Some(s) = &sched
                && !s.done
            {
                until = until.min(s.at(m.pubs[s.i].global, s.round));
            }
            if let Some(t) = next_ping {
                until = until.min(t);
            }
            let timeout = if m.dirty.is_empty() { until.saturating_sub(now) } else { 0 };
            if m.plan.gather > 0 && timeout > m.plan.gather {
                std::thread::sleep(Duration::from_nanos(m.plan.gather));
            }
            self.eng.turn(Some(timeout), &mut self.m)?;

            let now = clock::now();
            next_ping = self.eng.keep_alive(now, &mut self.m);
            let m = &mut self.m;
            if !m.stopped && (now >= m.win_end || m.sh.abort.load(Relaxed)) {
                m.stopped = true;
                m.all_dirty();
            }
            if !m.stopped
                && let Some(s) = &mut sched
            {
                m.schedule(s, now);
            }
            if now >= next_stall_check {
                next_stall_check = now + m.plan.stall / 4;
                m.check_stalls(now);
            }
            if std::mem::take(&mut m.wake_all) {
                m.all_dirty();
            }
        }
        Ok(())
    }

    fn wake_others(&mut self) {
        let bits = std::mem::take(&mut self.m.remote_dirty);
        if bits != 0 {
            for (t, w) in self.m.sh.wakers.iter().enumerate() {
                if bits & (1 << t) != 0 {
                    w.wake();
                }
            }
        }
    }

    fn pump_dirty(&mut self, now: u64, sched: Option<&Schedule>) {
        let mut list = std::mem::take(&mut self.m.dirty);
        for &i in &list {
            self.m.pubs[i as usize].dirty = false;
            self.pump(i as usize, now, sched);
        }
        // `pump` may have marked some again.
        let again = std::mem::take(&mut self.m.dirty);
        list.clear();
        list.extend_from_slice(&again);
        self.m.dirty = list;
    }

    /// Sends what publisher `i` may send now.
    fn pump(&mut self, i: usize, now: u64, sched: Option<&Schedule>) {
        let m = &mut self.m;
        let plan = m.plan;
        if m.pubs[i].finished {
            return;
        }
        let c = &mut self.eng.conns[i];
        if c.state != State::Up || c.has_out() {
            return;
        }
        let settled = if m.credits || plan.qos > 0 { m.settled(i) } else { 0 };
        let p = &mut m.pubs[i];
        let mut may = match plan.load {
            _ if m.stopped => 0,
            Load::Closed { .. } if plan.unanswered() => u64::MAX,
            Load::Open { .. } if plan.unanswered() => p.due - p.sent,
            Load::Closed { window } => (settled + window).saturating_sub(p.sent),
            Load::Open { window, .. } => {
                let room = settled.saturating_add(window).saturating_sub(p.sent);
                (p.due - p.sent).min(room)
            }
        };
        if let Some(n) = plan.count {
            may = may.min(n - p.sent);
        }
        let per_batch = (plan.batch_bytes / p.template.wire_len()).max(1) as u64;
        let receive_max = match plan.qos {
            0 => u64::MAX,
            _ => c.connack.receive_max as u64,
        };
        if let Load::Closed { window } = plan.load {
            // Too few to be worth a write? More room is sure to come: what is
            // outstanding will be settled.
            let left = plan.count.map_or(u64::MAX, |n| n - p.sent);
            let least = plan.refill.min(window).min(receive_max).min(left);
            let room = match plan.qos {
                0 => u64::MAX,
                _ => c.inflight.room(receive_max) as u64,
            };
            if may.min(room) < least && !m.stopped {
                return;
            }
        }
        let mut failed = None;
        for _ in 0..4 {
            let mut k = may.min(per_batch);
            if plan.qos > 0 {
                k = k.min(c.inflight.room(receive_max) as u64);
            }
            if k == 0 {
                break;
            }
            self.wbuf.clear();
            for seq in p.sent..p.sent + k {
                let ts = match sched {
                    Some(s) => s.at(p.global, seq),
                    None => now,
                };
                let pid = match plan.qos {
                    0 => 0,
                    1 => c.inflight.start(ts, seq, Await::Puback),
                    _ => c.inflight.start(ts, seq, Await::Pubrec),
                };
                if sched.is_some() && ts >= m.win_start {
                    m.o.send_lag.record(now.saturating_sub(ts));
                }
                if plan.topics > 1 {
                    p.template.set_topic_number(seq % plan.topics);
                }
                let stamp = Stamp { ts, publisher: p.global as u32, seq };
                p.template.write(&mut self.wbuf, pid, &stamp, &self.filler);
            }
            p.sent += k;
            may -= k;
            m.o.sent += k;
            m.last_event = now;
            if plan.qos > 0 {
                m.unacked += k;
            }
            if now >= m.win_start && now < m.win_end {
                m.o.sent_window += k;
            }
            if let Err(r) = c.send(&self.wbuf) {
                failed = Some(r);
                break;
            }
            if c.has_out() {
                break;
            }
        }
        if let Some(r) = failed {
            self.eng.fail(i, r, &mut self.m);
            return;
        }
        let blocked = c.has_out();
        let all_sent = m.stopped || plan.count == Some(p.sent);
        if all_sent && !blocked {
            p.finished = true;
            m.open_pubs -= 1;
            if plan.unanswered() {
                // The answer shows that the broker has read everything.
                p.pong_due = true;
                m.unacked += 1;
                self.eng.send(i, &codec::PINGREQ, &mut self.m);
            }
            return;
        }
        let room = plan.qos == 0 || c.inflight.room(receive_max) > 0;
        if may > 0 && !blocked && room {
            m.mark_local(i);
        }
    }

    pub fn finish(mut self) -> Outcome {
        let m = &mut self.m;
        let (pubs, subs) = self.eng.conns.split_at(m.np);
        m.o.pub_writes = pubs.iter().map(|c| c.writes).sum();
        m.o.sub_reads = subs.iter().map(|c| c.reads).sum();
        m.o.unacked += m.unacked;
        m.o.scheduled = match m.plan.load {
            Load::Open { .. } => m.pubs.iter().map(|p| p.due).sum(),
            Load::Closed { .. } => m.o.sent,
        };
        self.m.o
    }
}

impl Meter<'_> {
    /// Open loop: marks the messages that are due.
    fn schedule(&mut self, s: &mut Schedule, now: u64) {
        let end = now.min(self.win_end - 1);
        while !s.done && s.at(self.pubs[s.i].global, s.round) <= end {
            self.pubs[s.i].due += 1;
            self.mark_local(s.i);
            s.i += 1;
            if s.i == self.np {
                s.i = 0;
                s.round += 1;
                s.done = self.plan.count == Some(s.round);
            }
        }
    }

    /// A publisher that waits for messages which will never arrive (lost by
    /// the broker) gives them up after a while, so that the run goes on.
    fn check_stalls(&mut self, now: u64) {
        if !self.credits || self.stopped {
            return;
        }
        let (Load::Closed { window } | Load::Open { window, .. }) = self.plan.load;
        for i in 0..self.np {
            let settled = self.settled(i);
            let p = &mut self.pubs[i];
            let progress = settled + p.acked + p.sent;
            if progress != p.mark.0 || p.mark.1 == 0 {
                p.mark = (progress, now);
            } else if p.sent.saturating_sub(settled) > window - self.plan.refill.min(window)
                && now - p.mark.1 >= self.plan.stall
                && (self.plan.qos == 0 || p.acked == p.sent)
            {
                let lost = p.sent - settled;
                self.o.written_off += lost;
                if self.plan.topology == Topology::Share {
                    p.written_off += lost;
                } else {
                    p.written_off = p.sent;
                }
                self.mark_local(i);
            }
        }
    }
}
