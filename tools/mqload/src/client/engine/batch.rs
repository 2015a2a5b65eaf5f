//! Opening and closing connections in batches.

use super::Engine;
use crate::client::{Conn, Handler, State};
use crate::report::Latency;
use crate::{clock, codec};
use std::io;
use std::ops::Range;

/// Pace at which a batch of connections is opened.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Handshakes under way at once.
    pub inflight: usize,
    /// Connections a second; 0: as fast as possible.
    pub rate: f64,
    /// A handshake longer than this (ns) has failed.
    pub timeout: u64,
}

/// Results of opening a batch of connections.
pub struct ConnectStats {
    pub attempted: usize,
    pub up: usize,
    pub failed: usize,
    /// First attempt and last success, monotonic ns.
    pub started: u64,
    pub ended: u64,
    pub latency: Latency,
}

impl ConnectStats {
    pub fn new() -> ConnectStats {
        ConnectStats { attempted: 0, up: 0, failed: 0, started: u64::MAX, ended: 0, latency: Latency::new() }
    }

    pub fn merge(&mut self, o: &ConnectStats) {
        self.attempted += o.attempted;
        self.up += o.up;
        self.failed += o.failed;
        self.started = self.started.min(o.started);
        self.ended = self.ended.max(o.ended);
        self.latency.merge(&o.latency);
    }

    pub fn seconds(&self) -> f64 {
        self.ended.saturating_sub(self.started) as f64 / 1e9
    }

    pub fn rate(&self) -> f64 {
        if self.up == 0 || self.ended <= self.started {
            return 0.0;
        }
        self.up as f64 / self.seconds()
    }
}

impl Engine {
    /// Opens the connections `range` and waits until each is up or failed.
    pub fn establish<H: Handler>(
        &mut self,
        range: Range<usize>,
        pace: &Pace,
        h: &mut H,
    ) -> io::Result<ConnectStats> {
        self.batch = ConnectStats::new();
        self.batch.attempted = range.len();
        let start = clock::now();
        self.batch.started = start;
        let mut next = range.start;
        let mut last_check = start;
        while self.batch.up + self.batch.failed < range.len() {
            let now = clock::now();
            let mut wait = 100 * clock::MS;
            while next < range.end {
                let begun = next - range.start;
                let under_way = begun - self.batch.up - self.batch.failed;
                if under_way >= pace.inflight {
                    break;
                }
                if pace.rate > 0.0 {
                    let due = start + (begun as f64 / pace.rate * 1e9) as u64;
                    if due > now {
                        wait = wait.min(due - now);
                        break;
                    }
                }
                if let Err(r) = self.open(next) {
                    self.fail(next, r, h);
                }
                next += 1;
            }
            self.turn(Some(wait), h)?;
            self.keep_alive(now, h);
            if now - last_check > 100 * clock::MS {
                last_check = now;
                for i in range.start..next {
                    let c = &self.conns[i];
                    let waiting = matches!(
                        c.state,
                        State::TcpConnect | State::AwaitUpgrade | State::AwaitConnack | State::AwaitSuback
                    );
                    if waiting && now > c.opened_at + pace.timeout {
                        self.fail(i, "no answer within --connect-timeout".into(), h);
                    }
                }
            }
        }
        let mut r = ConnectStats::new();
        std::mem::swap(&mut r, &mut self.batch);
        Ok(r)
    }

    /// The connections `range` stay open but read nothing from now on.
    pub fn deafen(&mut self, range: Range<usize>) -> io::Result<()> {
        for c in self.conns[range].iter_mut().filter(|c| c.state == State::Up) {
            self.poll.remove(c.fd)?;
            c.state = State::Deaf;
        }
        Ok(())
    }

    /// Sends DISCONNECT on the connections `range`, and waits (2 s at most)
    /// until the broker has closed them.
    pub fn disconnect<H: Handler>(
        &mut self,
        range: Range<usize>,
        end_session: bool,
        h: &mut H,
    ) -> io::Result<()> {
        let mut b = Vec::new();
        codec::disconnect(&mut b, self.cfg.v5, end_session);
        for c in &mut self.conns[range.clone()] {
            if c.state != State::Up {
                close(c);
                continue;
            }
            c.state = State::Closing;
            self.closing += 1;
            let mut r = c.send(&b);
            if let Some(t) = &mut c.tls {
                t.send_close_notify();
                r = r.and(c.flush());
            }
            if r.is_err() || c.has_out() {
                self.closing -= 1;
                close(c);
            } else if let Some(s) = &c.sock {
                let _ = s.shutdown(std::net::Shutdown::Write);
            }
        }
        let end = clock::now() + 2 * clock::SEC;
        while self.closing > 0 && clock::now() < end {
            self.turn(Some(20 * clock::MS), h)?;
        }
        for c in &mut self.conns[range] {
            if c.state == State::Closing {
                self.closing -= 1;
            }
            close(c);
        }
        Ok(())
    }
}

pub(super) fn close(c: &mut Conn) {
    c.sock = None;
    c.fd = -1;
    c.tls = None;
    c.ws = None;
    c.state = State::Closed;
    c.out = Vec::new();
    c.out_pos = 0;
    c.partial = Vec::new();
    c.skip = 0;
}
