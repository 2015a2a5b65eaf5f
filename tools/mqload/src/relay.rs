//! `mqload relay`: the physical limit. A single-threaded epoll server that
//! answers CONNECT, SUBSCRIBE and PINGREQ, finds the topic of the first
//! PUBLISH of a connection, and from then on forwards that connection's bytes
//! unread to the topic's subscriber: one read, one write. With QoS 1 it also
//! answers each PUBLISH and reads the subscriber's PUBACKs, promising nothing.
//! Good for `pubsub --topology pair` with QoS 0 or 1 only.

use crate::codec::get_varint;
use crate::poll::Poll;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

#[derive(clap::Args)]
pub struct Args {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1:1883")]
    listen: String,
    /// Most bytes in one read
    #[arg(long, value_name = "BYTES", default_value_t = 65536)]
    chunk: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Packets are parsed: handshake, or a subscriber.
    Mqtt,
    /// Bytes go to this connection's slot as they are (`None`: nowhere).
    Raw(Option<usize>),
    /// The same for whole packets of QoS 1, each answered.
    Acked(Option<usize>),
}

impl Mode {
    fn receiver(self) -> Option<usize> {
        match self {
            Mode::Mqtt => None,
            Mode::Raw(to) | Mode::Acked(to) => to,
        }
    }
}

struct Peer {
    sock: TcpStream,
    mode: Mode,
    v5: bool,
    /// Incomplete packet (not Mode::Raw).
    partial: Vec<u8>,
    /// Bytes that the kernel did not take yet.
    out: Vec<u8>,
    /// Publishers that wait for `out` to drain.
    waiting: Vec<usize>,
}

struct Relay {
    poll: Poll,
    peers: Vec<Option<Peer>>,
    /// Topic filter (taken as a plain topic) to subscriber.
    topics: HashMap<Vec<u8>, usize>,
    buf: Vec<u8>,
}

const LISTENER: u64 = u64::MAX - 1;

pub fn run(args: &Args) -> Result<i32, String> {
    let e = |e: io::Error| format!("--listen {}: {e}", args.listen);
    let listener = TcpListener::bind(&args.listen).map_err(e)?;
    listener.set_nonblocking(true).map_err(e)?;
    let poll = Poll::new().map_err(|e| e.to_string())?;
    poll.add_level(listener.as_raw_fd(), LISTENER).map_err(|e| e.to_string())?;
    eprintln!("mqload relay on {}, pid {}", args.listen, std::process::id());
    let mut r = Relay { poll, peers: Vec::new(), topics: HashMap::new(), buf: vec![0; args.chunk.max(1024)] };
    loop {
        let n = r.poll.wait(None).map_err(|e| e.to_string())?;
        for i in 0..n {
            let (token, flags) = r.poll.event(i);
            if token == LISTENER {
                while let Ok((s, _)) = listener.accept() {
                    let _ = r.accept(s);
                }
                continue;
            }
            let slot = token as usize;
            if flags & libc::EPOLLOUT as u32 != 0 {
                r.writable(slot);
            }
            if flags & !(libc::EPOLLOUT as u32) != 0 {
                let only_data = (libc::EPOLLIN | libc::EPOLLOUT) as u32;
                r.readable(slot, flags & !only_data != 0);
            }
        }
    }
}

impl Relay {
    fn accept(&mut self, sock: TcpStream) -> io::Result<()> {
        sock.set_nonblocking(true)?;
        sock.set_nodelay(true)?;
        let slot = match self.peers.iter().position(Option::is_none) {
            Some(i) => i,
            None => {
                self.peers.push(None);
                self.peers.len() - 1
            }
        };
        self.poll.add(sock.as_raw_fd(), slot as u64)?;
        self.peers[slot] = Some(Peer {
            sock,
            mode: Mode::Mqtt,
            v5: false,
            partial: Vec::new(),
            out: Vec::new(),
            waiting: Vec::new(),
        });
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        self.peers[slot] = None;
        self.topics.retain(|_, s| *s != slot);
        for p in self.peers.iter_mut().flatten() {
            p.mode = match p.mode {
                Mode::Raw(Some(to)) if to == slot => Mode::Raw(None),
                Mode::Acked(Some(to)) if to == slot => Mode::Acked(None),
                other => other,
            };
        }
    }

    /// Sends, keeping what is left over; false when the peer is blocked.
    fn send(&mut self, slot: usize, data: &[u8]) -> bool {
        let Some(p) = self.peers[slot].as_mut() else {
            return true;
        };
        let mut done = 0;
        if p.out.is_empty() {
            done = p.sock.write(data).unwrap_or(0);
        }
        p.out.extend_from_slice(&data[done..]);
        p.out.is_empty()
    }

    fn writable(&mut self, slot: usize) {
        let Some(p) = self.peers[slot].as_mut() else {
            return;
        };
        if p.out.is_empty() {
            return;
        }
        let n = p.sock.write(&p.out).unwrap_or(0);
        p.out.drain(..n);
        if p.out.is_empty() {
            for w in std::mem::take(&mut p.waiting) {
                self.readable(w, true);
            }
        }
    }

    /// Reads until a short read shows that no more is there (the sockets are
    /// edge-triggered); with `ended`, until the end of the stream.
    fn readable(&mut self, slot: usize, ended: bool) {
        let mut buf = std::mem::take(&mut self.buf);
        while let Some(p) = self.peers[slot].as_mut() {
            // A publisher whose subscriber is blocked is not read.
            if let Some(sub) = p.mode.receiver().and_then(|t| self.peers[t].as_mut())
                && !sub.out.is_empty()
            {
                if !sub.waiting.contains(&slot) {
                    sub.waiting.push(slot);
                }
                break;
            }
            let Some(p) = self.peers[slot].as_mut() else {
                break;
            };
            let n = match p.sock.read(&mut buf) {
                Ok(0) => {
                    self.close(slot);
                    break;
                }
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.close(slot);
                    break;
                }
            };
            match p.mode {
                Mode::Raw(Some(to)) => {
                    self.send(to, &buf[..n]);
                }
                Mode::Raw(None) => {}
                Mode::Acked(to) => {
                    if self.acked(slot, to, &buf[..n]).is_none() {
                        self.close(slot);
                        break;
                    }
                }
                Mode::Mqtt => {
                    p.partial.extend_from_slice(&buf[..n]);
                    if self.packets(slot).is_none() {
                        self.close(slot);
                        break;
                    }
                }
            }
            if n < buf.len() && !ended {
                break;
            }
        }
        self.buf = buf;
    }

    /// Forwards the whole PUBLISH packets of QoS 1 in `data` and what came before, in one write, and answers them, in
    /// another. `None`: end the connection.
    fn acked(&mut self, slot: usize, to: Option<usize>, data: &[u8]) -> Option<()> {
        let kept = std::mem::take(&mut self.peers[slot].as_mut()?.partial);
        let joined = if kept.is_empty() { None } else { Some([&kept, data].concat()) };
        let data = joined.as_deref().unwrap_or(data);
        let mut whole = 0;
        let mut answers = Vec::new();
        while let Some((first, rest)) = data[whole..].split_first() {
            let Some((len, k)) = get_varint(rest).ok()? else {
                break;
            };
            let Some(body) = rest.get(k..k + len) else {
                break;
            };
            if first >> 4 != 3 || qos(*first) != 1 {
                return None; // DISCONNECT, or nothing for a relay
            }
            answers.extend_from_slice(&[0x40, 2]);
            answers.extend_from_slice(body.get(2 + be16(body)?..)?.get(..2)?);
            whole += 1 + k + len;
        }
        if whole > 0 {
            if let Some(to) = to {
                self.send(to, &data[..whole]);
            }
            self.send(slot, &answers);
        }
        self.peers[slot].as_mut()?.partial.extend_from_slice(&data[whole..]);
        Some(())
    }

    /// Answers the packets of a connection that is not raw yet. `None`: end it.
    fn packets(&mut self, slot: usize) -> Option<()> {
        loop {
            let p = self.peers[slot].as_mut()?;
            let (first, rest) = match p.partial.split_first() {
                Some((f, r)) => (*f, r),
                None => return Some(()),
            };
            let Some((len, k)) = get_varint(rest).ok()? else {
                return Some(());
            };
            let body = &p.partial[1 + k..];
            if first >> 4 == 3 {
                // The topic is enough: everything from here on is forwarded.
                let Some(n) = be16(body) else {
                    return Some(());
                };
                let Some(topic) = body.get(2..2 + n) else {
                    return Some(());
                };
                let to = self.topics.get(topic).copied();
                let data = std::mem::take(&mut p.partial);
                if qos(first) > 0 {
                    p.mode = Mode::Acked(to);
                    return self.acked(slot, to, &data);
                }
                p.mode = Mode::Raw(to);
                if let Some(t) = to {
                    self.send(t, &data);
                }
                return Some(());
            }
            if body.len() < len {
                return Some(());
            }
            let body = body[..len].to_vec();
            p.partial.drain(..1 + k + len);
            match first >> 4 {
                1 => {
                    p.v5 = *body.get(6)? == 5;
                    let a: &[u8] = if p.v5 { &[0x20, 3, 0, 0, 0] } else { &[0x20, 2, 0, 0] };
                    self.send(slot, a);
                }
                8 => {
                    let v5 = p.v5;
                    let (pid, mut rest) = body.split_at_checked(2)?;
                    if v5 {
                        let (n, k) = get_varint(rest).ok()??;
                        rest = rest.get(n + k..)?;
                    }
                    let mut codes = Vec::new();
                    while !rest.is_empty() {
                        let n = be16(rest)?;
                        self.topics.insert(rest.get(2..2 + n)?.to_vec(), slot);
                        codes.push((rest.get(2 + n)? & 3).min(1));
                        rest = rest.get(3 + n..)?;
                    }
                    let mut a = vec![0x90, (2 + v5 as usize + codes.len()) as u8];
                    a.extend_from_slice(pid);
                    if v5 {
                        a.push(0);
                    }
                    a.extend_from_slice(&codes);
                    self.send(slot, &a);
                }
                4 => {} // The receiver has it; its publisher was told long ago.
                12 => {
                    self.send(slot, &[0xd0, 0]);
                }
                _ => return None, // DISCONNECT, or nothing for a relay
            }
        }
    }
}

/// QoS of a PUBLISH with this first byte.
fn qos(first: u8) -> u8 {
    (first >> 1) & 3
}

fn be16(b: &[u8]) -> Option<usize> {
    Some(u16::from_be_bytes([*b.first()?, *b.get(1)?]) as usize)
}
