//! Innocent clients: a pair that exchanges messages, idle ones, and one that connects again and again.

use crate::clock::{self, MS, SEC};
use crate::codec::{self, Packet, Parsed, PublishTemplate, Stamp};
use crate::poll::Poll;
use crate::report::{Latency, tally};
use socket2::{Domain, Socket, Type};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Keep alive of all of them, seconds.
const KEEP_ALIVE: u16 = 5;
const PING_EVERY: u64 = 3 * SEC;
const PROBE_EVERY: u64 = 100 * MS;
/// After so long a connection that is being made is given up.
const PROBE_PATIENCE: u64 = 10 * SEC;
const SETUP_PATIENCE: Duration = Duration::from_secs(60);

/// Experience of the bystanders.
pub struct Experience {
    /// Greatest time between two messages, ns: before the attack and from its begin on.
    pub gap_before: u64,
    pub gap: u64,
    pub before: Latency,
    pub latency: Latency,
    /// Sent during the attack, and of those not delivered when patience ended.
    pub sent: u64,
    pub undelivered: u64,
    /// PUBACKs that refuse.
    pub refused: u64,
    pub closed: BTreeMap<String, u64>,
    pub innocents_closed: u64,
    pub pair_closed: u64,
    pub connects: Latency,
    pub connects_failed: u64,
}

struct Peer {
    socket: Option<TcpStream>,
    input: Vec<u8>,
    out: Vec<u8>,
    next_ping: u64,
}

const PUBLISHER: usize = 0;
const SUBSCRIBER: usize = 1;
const PROBE: u64 = 1 << 32;

pub struct Bystanders {
    address: SocketAddr,
    poll: Poll,
    peers: Vec<Peer>,
    template: PublishTemplate,
    prefix: String,
    /// User name and password of all of them.
    login: Option<(String, String)>,
    /// The connection being made, since when, and whether its CONNECT is out.
    probe: Option<(Socket, u64, bool)>,
    probes: u64,
}

impl Bystanders {
    /// Connects them all, one after another.
    pub fn connect(
        address: SocketAddr,
        prefix: &str,
        innocents: usize,
        login: Option<(String, String)>,
    ) -> Result<Bystanders, String> {
        let topic = format!("{prefix}/bystander");
        let mut this = Bystanders {
            address,
            poll: Poll::new().map_err(|e| e.to_string())?,
            peers: Vec::new(),
            template: PublishTemplate::new(&topic, 1, false, true, 256),
            prefix: prefix.to_string(),
            login,
            probe: None,
            probes: 0,
        };
        for i in 0..innocents + 2 {
            let mut hello = this.hello(&format!("{prefix}-i{i}"));
            if i == SUBSCRIBER {
                codec::subscribe(&mut hello, true, 1, &[&topic], 1);
            }
            let mut socket =
                TcpStream::connect_timeout(&address, SETUP_PATIENCE).map_err(|e| e.to_string())?;
            let set_up = || -> io::Result<()> {
                socket.set_nodelay(true)?;
                socket.set_read_timeout(Some(SETUP_PATIENCE))?;
                (&socket).write_all(&hello)
            };
            set_up().map_err(|e| e.to_string())?;
            let wanted = if i == SUBSCRIBER { 2 } else { 1 };
            let (mut input, mut answers) = (Vec::new(), 0);
            while answers < wanted {
                let mut piece = [0; 4096];
                match socket.read(&mut piece) {
                    Ok(0) => return Err("a bystander was refused".into()),
                    Ok(n) => input.extend_from_slice(&piece[..n]),
                    Err(e) => return Err(format!("a bystander got no answer: {e}")),
                }
                answers += packets(&mut input, &mut |_| ())?;
            }
            socket.set_nonblocking(true).map_err(|e| e.to_string())?;
            this.poll.add(socket.as_raw_fd(), i as u64).map_err(|e| e.to_string())?;
            let next_ping = clock::now() + PING_EVERY * (i as u64 + 1) / (innocents as u64 + 2);
            this.peers.push(Peer { socket: Some(socket), input: Vec::new(), out: Vec::new(), next_ping });
        }
        Ok(this)
    }

    /// Goes on until `end`, then until all messages have come, but no longer than `patience` ns. The attack lasts from
    /// `begin` to `end`; messages go out every `interval` ns.
    pub fn run(
        mut self,
        begin: u64,
        end: u64,
        patience: u64,
        interval: u64,
        over: &AtomicBool,
    ) -> io::Result<Experience> {
        let mut e = Experience {
            gap_before: 0,
            gap: 0,
            before: Latency::new(),
            latency: Latency::new(),
            sent: 0,
            undelivered: 0,
            refused: 0,
            closed: BTreeMap::new(),
            innocents_closed: 0,
            pair_closed: 0,
            connects: Latency::new(),
            connects_failed: 0,
        };
        let start = clock::now();
        let (mut next, mut seq) = (start, 0u64);
        let mut last = start;
        let mut next_probe = begin;
        // Times of messages that are under way, by sequence number.
        let mut arrived: Vec<bool> = Vec::new();
        let mut missing = 0u64;
        loop {
            let now = clock::now();
            let broken = self.peers[..2].iter().any(|p| p.socket.is_none());
            if now >= end && (missing == 0 && self.probe.is_none() || now >= end + patience || broken) {
                break;
            }
            while next <= now && next < end {
                let stamp = Stamp { ts: next, publisher: 0, seq };
                let pid = (seq % 60_000) as u16 + 1;
                let peer = &mut self.peers[PUBLISHER];
                if peer.socket.is_some() {
                    self.template.write(&mut peer.out, pid, &stamp, &[b'b'; 256]);
                    arrived.push(false);
                    missing += 1;
                    seq += 1;
                    e.sent += u64::from(next >= begin);
                }
                next += interval;
            }
            for i in 0..self.peers.len() {
                let peer = &mut self.peers[i];
                if peer.socket.is_some() && peer.next_ping <= now {
                    peer.out.extend_from_slice(&codec::PINGREQ);
                    peer.next_ping = now + PING_EVERY;
                }
                if !peer.out.is_empty()
                    && let Err(error) = peer.flush()
                {
                    self.closed(i, &super::reason(&error), &mut e);
                }
            }
            if self.probe.is_none() && next_probe <= now && now < end {
                self.start_probe();
                next_probe = now + PROBE_EVERY;
            }
            if let Some((_, since, _)) = &self.probe
                && now.saturating_sub(*since) > PROBE_PATIENCE
            {
                e.connects.record(now.saturating_sub(*since));
                e.connects_failed += 1;
                self.probe = None;
            }
            let soonest = self.peers.iter().filter(|p| p.socket.is_some()).map(|p| p.next_ping).min();
            let due = if now < end { next.min(next_probe.max(now + MS)) } else { now + 10 * MS };
            let wait = due.min(soonest.unwrap_or(due)).saturating_sub(now);
            let events = self.poll.wait(Some(wait))?;
            let now = clock::now();
            for k in 0..events {
                let (token, _) = self.poll.event(k);
                if token >= PROBE {
                    self.on_probe(token, now, &mut e);
                    continue;
                }
                let i = token as usize;
                let mut acks = Vec::new();
                let outcome = self.peers[i].read(&mut |packet| match packet {
                    Packet::Publish(p) if i == SUBSCRIBER => {
                        if p.pid > 0 {
                            codec::ack(&mut acks, codec::PUBACK, p.pid);
                        }
                        let Some(stamp) = Stamp::decode(p.payload) else { return };
                        let fresh =
                            arrived.get_mut(stamp.seq as usize).is_some_and(|a| !std::mem::replace(a, true));
                        if !fresh {
                            return;
                        }
                        missing -= 1;
                        let window = if now < begin { &mut e.gap_before } else { &mut e.gap };
                        *window = (*window).max(now - last);
                        last = now;
                        let latency = if stamp.ts < begin { &mut e.before } else { &mut e.latency };
                        latency.record(now.saturating_sub(stamp.ts));
                    }
                    Packet::Ack { reason, .. } if reason >= 0x80 => e.refused += 1,
                    Packet::Disconnect { reason } => {
                        tally(&mut e.closed, &format!("DISCONNECT {reason:#04x}"))
                    }
                    _ => {}
                });
                self.peers[i].out.extend_from_slice(&acks);
                if let Err(error) = outcome {
                    self.closed(i, &super::reason(&error), &mut e);
                }
            }
        }
        over.store(true, Ordering::Relaxed);
        let now = clock::now();
        e.undelivered = missing;
        if missing > 0 {
            e.gap = e.gap.max(now - last);
            for (seq, _) in arrived.iter().enumerate().filter(|(_, arrived)| !**arrived) {
                e.latency.record(now.saturating_sub(start + seq as u64 * interval));
            }
        }
        if let Some((_, since, _)) = self.probe.take() {
            e.connects.record(now.saturating_sub(since));
            e.connects_failed += 1;
        }
        Ok(e)
    }

    fn closed(&mut self, i: usize, why: &str, e: &mut Experience) {
        if self.peers[i].socket.take().is_none() {
            return;
        }
        tally(&mut e.closed, why);
        if i < 2 {
            e.pair_closed += 1;
        } else {
            e.innocents_closed += 1;
        }
    }

    fn hello(&self, id: &str) -> Vec<u8> {
        let mut out = Vec::new();
        let (username, password) = match &self.login {
            Some((username, password)) => (Some(username.as_str()), Some(password.as_str())),
            None => (None, None),
        };
        let hello = codec::Connect {
            v5: true,
            client_id: id,
            clean: true,
            keepalive: KEEP_ALIVE,
            username,
            password,
            ..Default::default()
        };
        codec::connect(&mut out, &hello);
        out
    }

    fn start_probe(&mut self) {
        let open = || -> io::Result<Socket> {
            let socket = Socket::new(Domain::for_address(self.address), Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            socket.set_tcp_nodelay(true)?;
            match socket.connect(&self.address.into()) {
                Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
                _ => Ok(socket),
            }
        };
        let Ok(socket) = open() else { return };
        self.probes += 1;
        if self.poll.add(socket.as_raw_fd(), PROBE + self.probes).is_ok() {
            self.probe = Some((socket, clock::now(), false));
        }
    }

    fn on_probe(&mut self, token: u64, now: u64, e: &mut Experience) {
        let hello = self.hello(&format!("{}-p{}", self.prefix, self.probes));
        let Some((socket, since, said)) = &mut self.probe else { return };
        if token != PROBE + self.probes {
            return;
        }
        let mut answer = [0; 64];
        match socket.read(&mut answer) {
            Ok(n) if n >= 4 => {
                e.connects.record(now.saturating_sub(*since));
                if answer[3] != 0 {
                    tally(&mut e.closed, &format!("a new client: CONNACK {:#04x}", answer[3]));
                    e.connects_failed += 1;
                }
                self.probe = None;
            }
            Ok(_) => {
                e.connects.record(now.saturating_sub(*since));
                e.connects_failed += 1;
                tally(&mut e.closed, "a new client: closed");
                self.probe = None;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // Connected just now: there is room for a CONNECT.
                if !*said {
                    *said = socket.write(&hello).is_ok();
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
            Err(error) => {
                e.connects.record(now.saturating_sub(*since));
                e.connects_failed += 1;
                tally(&mut e.closed, &format!("a new client: {}", super::reason(&error)));
                self.probe = None;
            }
        }
    }
}

impl Peer {
    fn flush(&mut self) -> io::Result<()> {
        let Some(socket) = &mut self.socket else { return Ok(()) };
        match socket.write(&self.out) {
            Ok(n) => {
                self.out.drain(..n);
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn read(&mut self, on: &mut dyn FnMut(Packet<'_>)) -> io::Result<()> {
        let Some(socket) = &mut self.socket else { return Ok(()) };
        let mut piece = [0; 64 << 10];
        loop {
            match socket.read(&mut piece) {
                Ok(0) => return Err(io::ErrorKind::ConnectionReset.into()),
                Ok(n) => self.input.extend_from_slice(&piece[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        packets(&mut self.input, on).map(|_| ()).map_err(io::Error::other)
    }
}

/// Takes the whole packets from the beginning of `input`; gives their number.
fn packets(input: &mut Vec<u8>, on: &mut dyn FnMut(Packet<'_>)) -> Result<usize, String> {
    let (mut at, mut count) = (0, 0);
    while let Parsed::Full { packet, total } =
        codec::parse(&input[at..], true).map_err(|e| e.0.to_string())?
    {
        on(packet);
        at += total;
        count += 1;
    }
    input.drain(..at);
    Ok(count)
}
