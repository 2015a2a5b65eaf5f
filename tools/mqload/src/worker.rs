//! One load thread of `pubsub`: its publishers and subscribers on one epoll
//! loop, with the accounts of what was sent and what arrived.

mod plan;
mod pump;

pub use plan::{Load, Plan, Topology};
pub use pump::Worker;

use crate::client::{Acked, Delivery, Handler};
use crate::codec::{PublishTemplate, Stamp};
use crate::poll::Waker;
use crate::report::Latency;
use crate::sequence::{Arrival, BitSet, Streams};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

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

/// State that the threads share.
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

/// Results that a thread hands back at the end.
pub struct Outcome {
    pub latency: Latency,
    pub ack_latency: Latency,
    /// fanout: time until the last subscriber of this thread had a message.
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
