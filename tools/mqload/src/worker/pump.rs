//! The loop of a load thread: sends what is due, as far as the broker and the sockets let it.

use super::{Load, Meter, Outcome, Topology};
use crate::client::{Engine, State};
use crate::codec::Stamp;
use crate::inflight::Await;
use crate::{clock, codec};
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

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
    /// Returns the time at which message `n` of publisher `global` is to be sent.
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
            // Longest time for which this thread may sleep.
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
