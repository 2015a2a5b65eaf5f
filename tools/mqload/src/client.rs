//! MQTT client connections on one epoll loop: non-blocking sockets, the
//! handshake, acknowledgements in both directions, and batched reads/writes.
//! What to do with messages is up to a [`Handler`].

use crate::clock;
use crate::codec::{self, Connack, Packet, Parsed, Stamp};
use crate::inflight::{Await, Inflight};
use crate::poll::{Poll, WAKE, Waker};
use crate::report::{Latency, tally};
use crate::ws;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, HandshakeKind};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Bytes asked of the kernel in one read.
const READ_CHUNK: usize = 128 * 1024;

/// Settings shared by all connections of a run.
pub struct ClientCfg {
    pub addr: SocketAddr,
    pub v5: bool,
    pub keepalive: u16,
    pub username: Option<String>,
    pub password: Option<String>,
    pub session_expiry: u32,
    pub receive_max: u16,
    pub tls: Option<(Arc<rustls::ClientConfig>, ServerName<'static>)>,
    /// The request that opens a WebSocket; `None`: MQTT straight on TCP or TLS.
    pub ws: Option<Vec<u8>>,
    /// Local addresses to use in turn; empty: the kernel chooses.
    pub sources: Vec<IpAddr>,
    /// TCP congestion control of our side; `None`: the system's.
    pub congestion: Option<String>,
}

/// What one connection is to be.
pub struct Spec {
    pub client_id: String,
    pub clean: bool,
    pub filter: Option<(String, u8)>,
    /// It will not read (`Engine::deafen`): the kernel is to hold little for it.
    pub deaf: bool,
}

/// Receive buffer of a connection that will not read, in bytes.
const DEAF_BUFFER: usize = 4096;

/// One message that arrived.
#[derive(Clone, Copy, Default)]
pub struct Delivery {
    pub stamp: Option<Stamp>,
    pub retain: bool,
}

/// One own message that the broker acknowledged completely.
pub struct Acked {
    /// 0x80 and above (v5): the broker refused it.
    pub reason: u8,
    pub ts: u64,
    pub seq: u64,
    pub now: u64,
}

pub trait Handler {
    fn publish(&mut self, idx: usize, d: &Delivery, now: u64);
    fn acked(&mut self, idx: usize, a: &Acked);
    /// Everything queued on a connection has been written.
    fn writable(&mut self, _idx: usize) {}
    fn up(&mut self, _idx: usize, _session_present: bool, _now: u64) {}
    /// An established connection ended unexpectedly.
    fn dropped(&mut self, _idx: usize) {}
    fn pong(&mut self, _idx: usize, _now: u64) {}
    /// Answer to a further SUBSCRIBE on an established connection.
    fn subacked(&mut self, _idx: usize, _codes: &[u8]) {}
    fn woken(&mut self) {}
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Idle,
    TcpConnect,
    /// WebSocket: the answer to the request is not there yet.
    AwaitUpgrade,
    AwaitConnack,
    AwaitSuback,
    Up,
    /// Connected and subscribed, and reads nothing any more.
    Deaf,
    Closing,
    Closed,
}

type Reason = String;

/// The WebSocket layer of a connection.
#[derive(Default)]
struct Ws {
    frames: ws::Frames,
    /// Answer to the handshake, as far as it has come.
    response: Vec<u8>,
    /// Frames to send as they are: CONNECT after the handshake, pongs.
    out: Vec<u8>,
    /// The frame being written.
    frame: Vec<u8>,
}

pub struct Conn {
    sock: Option<Socket>,
    fd: RawFd,
    tls: Option<Box<ClientConnection>>,
    ws: Option<Box<Ws>>,
    pub state: State,
    v5: bool,
    pub spec: Spec,
    /// Written by us, not yet taken by the kernel (plain connections).
    out: Vec<u8>,
    out_pos: usize,
    /// Beginning of a packet that has not arrived whole.
    partial: Vec<u8>,
    /// Bytes still to come of a large PUBLISH whose stamp is in `pending`.
    skip: usize,
    pending: (Delivery, u8, u16),
    pub inflight: Inflight,
    pub connack: Connack,
    /// QoS 2 packet ids received and not yet released.
    qos2: Option<Box<[u64; 1024]>>,
    opened_at: u64,
    /// System calls that moved data (plain connections).
    pub reads: u64,
    pub writes: u64,
}

fn os_reason(what: &str, e: &io::Error) -> Reason {
    match e.kind() {
        io::ErrorKind::ConnectionReset => format!("{what}: connection reset by broker"),
        io::ErrorKind::ConnectionRefused => format!("{what}: connection refused"),
        io::ErrorKind::BrokenPipe => format!("{what}: closed by broker"),
        _ => format!("{what}: {e}"),
    }
}

/// Sets an integer option of the IP level.
fn ip_option(s: &Socket, name: libc::c_int, value: u32) -> io::Result<()> {
    // SAFETY: a 32-bit option, valid for the call.
    let rc = unsafe {
        libc::setsockopt(
            s.as_raw_fd(),
            libc::IPPROTO_IP,
            name,
            (&raw const value).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// From linux/in.h (6.3 and later); not in the libc crate for every target.
const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
/// Lowest port that our side takes, so as not to sit on the ports of servers
/// where the system's ephemeral range begins low.
pub const LOWEST_PORT: u32 = 30_000;

fn would_block(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// The raw socket as `Read`/`Write`, for rustls and for the hot path.
struct Fd(RawFd);

impl Read for Fd {
    #[inline]
    fn read(&mut self, b: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `b` is writable for its whole length.
        let n = unsafe { libc::recv(self.0, b.as_mut_ptr().cast(), b.len(), 0) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }
}

impl Write for Fd {
    #[inline]
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        // SAFETY: `b` is readable for its whole length.
        let n = unsafe { libc::send(self.0, b.as_ptr().cast(), b.len(), libc::MSG_NOSIGNAL) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    fn write_vectored(&mut self, bufs: &[io::IoSlice<'_>]) -> io::Result<usize> {
        // SAFETY: IoSlice is guaranteed to have the layout of iovec.
        let n = unsafe { libc::writev(self.0, bufs.as_ptr().cast(), bufs.len().min(64) as i32) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Conn {
    fn new(spec: Spec, v5: bool) -> Conn {
        Conn {
            sock: None,
            fd: -1,
            tls: None,
            ws: None,
            state: State::Idle,
            v5,
            spec,
            out: Vec::new(),
            out_pos: 0,
            partial: Vec::new(),
            skip: 0,
            pending: Default::default(),
            inflight: Inflight::default(),
            connack: Connack {
                session_present: false,
                code: 0,
                receive_max: u16::MAX,
                max_qos: 2,
                max_packet: u32::MAX,
                retain_available: true,
            },
            qos2: None,
            opened_at: 0,
            reads: 0,
            writes: 0,
        }
    }

    /// Something that we wrote is still waiting for the kernel to take it.
    #[inline]
    pub fn has_out(&self) -> bool {
        match &self.tls {
            None => self.out_pos < self.out.len(),
            Some(t) => t.wants_write(),
        }
    }

    /// Sends `data`, keeping what the kernel does not take at once.
    #[inline]
    pub fn send(&mut self, data: &[u8]) -> Result<(), Reason> {
        match self.ws.take() {
            None => self.send_raw(data),
            Some(mut ws) => {
                ws.frame.clear();
                ws::binary(&mut ws.frame, data);
                let r = self.send_raw(&ws.frame);
                self.ws = Some(ws);
                r
            }
        }
    }

    /// What the WebSocket layer has to say by itself.
    fn send_ws_out(&mut self) -> Result<(), Reason> {
        match &mut self.ws {
            Some(ws) if !ws.out.is_empty() => {
                let out = std::mem::take(&mut ws.out);
                self.send_raw(&out)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn send_raw(&mut self, data: &[u8]) -> Result<(), Reason> {
        if self.tls.is_some() {
            return self.send_tls(data);
        }
        let mut done = 0;
        if !self.has_out() {
            self.writes += 1;
            match Fd(self.fd).write(data) {
                Ok(n) => done = n,
                Err(e) if would_block(&e) => {}
                Err(e) => return Err(os_reason("write", &e)),
            }
        }
        if done < data.len() {
            self.out.extend_from_slice(&data[done..]);
        }
        Ok(())
    }

    fn send_tls(&mut self, data: &[u8]) -> Result<(), Reason> {
        if let Some(t) = &mut self.tls {
            t.writer().write_all(data).map_err(|e| os_reason("TLS write", &e))?;
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Reason> {
        let mut fd = Fd(self.fd);
        if let Some(t) = &mut self.tls {
            while t.wants_write() {
                self.writes += 1;
                match t.write_tls(&mut fd) {
                    Ok(_) => {}
                    Err(e) if would_block(&e) => break,
                    Err(e) => return Err(os_reason("write", &e)),
                }
            }
            return Ok(());
        }
        while self.out_pos < self.out.len() {
            self.writes += 1;
            match fd.write(&self.out[self.out_pos..]) {
                Ok(n) => self.out_pos += n,
                Err(e) if would_block(&e) => return Ok(()),
                Err(e) => return Err(os_reason("write", &e)),
            }
        }
        self.out_pos = 0;
        self.out.clear();
        Ok(())
    }

    /// QoS 2 packet id seen: true when it was not pending already.
    fn qos2_begin(&mut self, pid: u16) -> bool {
        let map = self.qos2.get_or_insert_with(|| Box::new([0; 1024]));
        let (w, bit) = (pid as usize / 64, 1u64 << (pid % 64));
        let fresh = map[w] & bit == 0;
        map[w] |= bit;
        fresh
    }

    fn qos2_release(&mut self, pid: u16) {
        if let Some(map) = &mut self.qos2 {
            map[pid as usize / 64] &= !(1u64 << (pid % 64));
        }
    }

    /// A PUBLISH is there completely: hand it over and queue its answer.
    #[inline]
    fn deliver<H: Handler>(
        &mut self,
        idx: usize,
        (d, qos, pid): (Delivery, u8, u16),
        now: u64,
        acks: &mut Vec<u8>,
        h: &mut H,
    ) {
        match qos {
            0 => h.publish(idx, &d, now),
            1 => {
                h.publish(idx, &d, now);
                codec::ack(acks, codec::PUBACK, pid);
            }
            _ => {
                if self.qos2_begin(pid) {
                    h.publish(idx, &d, now);
                }
                codec::ack(acks, codec::PUBREC, pid);
            }
        }
    }

    /// Takes what has arrived: `buf` begins with `off` bytes of a former partial
    /// packet, then comes what was read.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    fn arrived<H: Handler>(
        &mut self,
        idx: usize,
        buf: &mut [u8],
        off: usize,
        now: u64,
        acks: &mut Vec<u8>,
        came_up: &mut bool,
        h: &mut H,
    ) -> Result<(), Reason> {
        let Some(ws) = &mut self.ws else {
            return self.feed(idx, buf, now, acks, came_up, h);
        };
        if self.state != State::AwaitUpgrade {
            let n = ws.frames.unwrap(&mut buf[off..], &mut ws.out)?;
            return self.feed(idx, &buf[..off + n], now, acks, came_up, h);
        }
        ws.response.extend_from_slice(&buf[off..]);
        let Some(end) = ws::response(&ws.response)? else { return Ok(()) };
        let mut rest = std::mem::take(&mut ws.response).split_off(end);
        // CONNECT waits in `frame` for this.
        ws.out = std::mem::take(&mut ws.frame);
        self.state = State::AwaitConnack;
        let n = ws.frames.unwrap(&mut rest, &mut ws.out)?;
        self.feed(idx, &rest[..n], now, acks, came_up, h)
    }

    /// Parses `buf` (beginning with any former partial packet); what remains
    /// incomplete is kept for the next time.
    #[inline]
    fn feed<H: Handler>(
        &mut self,
        idx: usize,
        buf: &[u8],
        now: u64,
        acks: &mut Vec<u8>,
        came_up: &mut bool,
        h: &mut H,
    ) -> Result<(), Reason> {
        let mut pos = 0;
        if self.skip > 0 {
            pos = self.skip.min(buf.len());
            self.skip -= pos;
            if self.skip > 0 {
                return Ok(());
            }
            self.deliver(idx, self.pending, now, acks, h);
        }
        while pos < buf.len() {
            let parsed =
                codec::parse(&buf[pos..], self.v5).map_err(|e| format!("protocol error: {}", e.0))?;
            match parsed {
                Parsed::Incomplete => break,
                Parsed::Full { packet: Packet::Publish(p), total } => {
                    if !matches!(self.state, State::Up | State::AwaitSuback) {
                        return Err("protocol error: PUBLISH before CONNACK".into());
                    }
                    pos += total;
                    let d = Delivery { stamp: Stamp::decode(p.payload), retain: p.retain };
                    self.deliver(idx, (d, p.qos, p.pid), now, acks, h);
                }
                Parsed::Full { packet, total } => {
                    pos += total;
                    self.control(idx, packet, now, acks, came_up, h)?;
                }
                Parsed::Partial { publish: p, total } => {
                    let d = Delivery { stamp: Stamp::decode(p.payload), retain: p.retain };
                    self.pending = (d, p.qos, p.pid);
                    self.skip = total - (buf.len() - pos);
                    return Ok(());
                }
            }
        }
        if pos < buf.len() {
            self.partial.extend_from_slice(&buf[pos..]);
        }
        Ok(())
    }

    #[inline]
    fn control<H: Handler>(
        &mut self,
        idx: usize,
        packet: Packet,
        now: u64,
        acks: &mut Vec<u8>,
        came_up: &mut bool,
        h: &mut H,
    ) -> Result<(), Reason> {
        match packet {
            Packet::Ack { kind, pid, reason } => self.acknowledged(idx, kind, pid, reason, now, acks, h),
            Packet::Connack(c) => {
                if self.state != State::AwaitConnack {
                    return Err("protocol error: unexpected CONNACK".into());
                }
                if c.code != 0 {
                    let t = codec::reason_text(self.v5, c.code);
                    return Err(format!("CONNACK refused: 0x{:02x} {t}", c.code));
                }
                self.connack = c;
                if !c.session_present {
                    self.qos2 = None;
                }
                match &self.spec.filter {
                    Some((f, qos)) => {
                        codec::subscribe(acks, self.v5, 1, &[f], *qos);
                        self.state = State::AwaitSuback;
                    }
                    None => self.set_up(came_up),
                }
                Ok(())
            }
            Packet::Suback { codes, .. } => {
                if self.state == State::Up {
                    h.subacked(idx, codes);
                    return Ok(());
                }
                if self.state != State::AwaitSuback {
                    return Err("protocol error: unexpected SUBACK".into());
                }
                let want = self.spec.filter.as_ref().map_or(0, |f| f.1);
                match codes {
                    [q] if *q == want => self.set_up(came_up),
                    [q] if *q < 3 => {
                        return Err(format!("SUBACK granted QoS {q} instead of {want}"));
                    }
                    [q] => return Err(format!("SUBACK refused: 0x{q:02x}")),
                    _ => return Err("protocol error: SUBACK code count".into()),
                }
                Ok(())
            }
            Packet::Pingresp => {
                h.pong(idx, now);
                Ok(())
            }
            Packet::Disconnect { reason } => {
                let t = codec::reason_text(self.v5, reason);
                Err(format!("DISCONNECT from broker: 0x{reason:02x} {t}"))
            }
            Packet::Publish(_) => Ok(()), // handled in feed()
        }
    }

    /// The handshake is through; messages may follow in the same read.
    fn set_up(&mut self, came_up: &mut bool) {
        self.state = State::Up;
        *came_up = true;
    }

    /// PUBACK / PUBREC / PUBCOMP of our messages, PUBREL of theirs.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    fn acknowledged<H: Handler>(
        &mut self,
        idx: usize,
        kind: u8,
        pid: u16,
        reason: u8,
        now: u64,
        acks: &mut Vec<u8>,
        h: &mut H,
    ) -> Result<(), Reason> {
        if kind == codec::PUBREL {
            self.qos2_release(pid);
            codec::ack(acks, codec::PUBCOMP, pid);
            return Ok(());
        }
        let ends = match (kind, self.inflight.waiting(pid)) {
            (codec::PUBACK, Await::Puback) | (codec::PUBCOMP, Await::Pubcomp) => true,
            (codec::PUBREC, Await::Pubrec) if reason >= 0x80 => true,
            (codec::PUBREC, Await::Pubrec) => {
                self.inflight.set(pid, Await::Pubcomp);
                codec::ack(acks, codec::PUBREL, pid);
                false
            }
            // A repeated PUBREC is answered again.
            (codec::PUBREC, Await::Pubcomp) => {
                codec::ack(acks, codec::PUBREL, pid);
                false
            }
            _ => {
                return Err(format!(
                    "protocol error: acknowledgement type {kind} for a packet id not in flight"
                ));
            }
        };
        if ends {
            let (ts, seq) = self.inflight.finish(pid);
            h.acked(idx, &Acked { reason, ts, seq, now });
        }
        Ok(())
    }
}

/// Buffers shared by all connections of an engine.
struct Scratch {
    rbuf: Vec<u8>,
    plain: Vec<u8>,
    acks: Vec<u8>,
    came_up: bool,
}

/// How a batch of connections is opened.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Handshakes under way at once.
    pub inflight: usize,
    /// Connections a second; 0: as fast as possible.
    pub rate: f64,
    /// A handshake longer than this (ns) has failed.
    pub timeout: u64,
}

/// What came of opening a batch of connections.
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

pub struct Engine {
    cfg: Arc<ClientCfg>,
    poll: Poll,
    waker: Option<Arc<Waker>>,
    pub conns: Vec<Conn>,
    s: Scratch,
    /// (due time, connection): all have the same interval, so it is a queue.
    pings: VecDeque<(u64, usize)>,
    batch: ConnectStats,
    source_base: usize,
    closing: usize,
    /// TLS handshakes that resumed a session.
    pub resumed: u64,
    /// Why handshakes failed.
    pub failures: BTreeMap<String, u64>,
    /// Why established connections ended.
    pub drops: BTreeMap<String, u64>,
}

impl Engine {
    pub fn new(cfg: Arc<ClientCfg>, waker: Option<Arc<Waker>>) -> io::Result<Engine> {
        let poll = Poll::new()?;
        if let Some(w) = &waker {
            w.register(&poll)?;
        }
        Ok(Engine {
            cfg,
            poll,
            waker,
            conns: Vec::new(),
            s: Scratch {
                rbuf: vec![0; READ_CHUNK],
                plain: Vec::new(),
                acks: Vec::with_capacity(4096),
                came_up: false,
            },
            pings: VecDeque::new(),
            batch: ConnectStats::new(),
            source_base: 0,
            closing: 0,
            resumed: 0,
            failures: BTreeMap::new(),
            drops: BTreeMap::new(),
        })
    }

    /// Where this engine begins in the list of source addresses.
    pub fn set_source_base(&mut self, n: usize) {
        self.source_base = n;
    }

    pub fn add(&mut self, spec: Spec) -> usize {
        self.conns.push(Conn::new(spec, self.cfg.v5));
        self.conns.len() - 1
    }

    pub fn v5(&self) -> bool {
        self.cfg.v5
    }

    pub fn alive(&self) -> usize {
        self.conns.iter().filter(|c| c.state == State::Up).count()
    }

    fn open(&mut self, idx: usize) -> Result<(), Reason> {
        let cfg = &self.cfg;
        let c = &mut self.conns[idx];
        c.opened_at = clock::now();
        c.state = State::TcpConnect;
        let e = |what: &'static str| move |e: io::Error| os_reason(what, &e);
        let ty = Type::STREAM.nonblocking().cloexec();
        let s = Socket::new(Domain::for_address(cfg.addr), ty, Some(Protocol::TCP)).map_err(e("socket"))?;
        s.set_tcp_nodelay(true).map_err(e("TCP_NODELAY"))?;
        if c.spec.deaf {
            s.set_recv_buffer_size(DEAF_BUFFER).map_err(e("SO_RCVBUF"))?;
        }
        // Older kernels refuse this; then the system's range holds.
        let _ = ip_option(&s, IP_LOCAL_PORT_RANGE, 0xffff_0000 | LOWEST_PORT);
        if let Some(name) = &cfg.congestion {
            s.set_tcp_congestion(name.as_bytes()).map_err(e("TCP_CONGESTION"))?;
        }
        if !cfg.sources.is_empty() {
            let ip = cfg.sources[(self.source_base + idx) % cfg.sources.len()];
            // connect() rather than bind() chooses the port.
            ip_option(&s, libc::IP_BIND_ADDRESS_NO_PORT, 1).map_err(e("IP_BIND_ADDRESS_NO_PORT"))?;
            s.bind(&SockAddr::from(SocketAddr::new(ip, 0))).map_err(e("bind"))?;
        }
        match s.connect(&SockAddr::from(cfg.addr)) {
            Ok(()) => {}
            Err(x) if x.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(x) => return Err(os_reason("connect", &x)),
        }
        c.fd = s.as_raw_fd();
        c.sock = Some(s);
        self.poll.add(c.fd, idx as u64).map_err(e("epoll"))?;
        Ok(())
    }

    /// TCP is there: start TLS if wanted and send CONNECT.
    fn start_mqtt(&mut self, idx: usize) -> Result<(), Reason> {
        let cfg = self.cfg.clone();
        let c = &mut self.conns[idx];
        if let Some(e) = c.sock.as_ref().and_then(|s| s.take_error().ok()).flatten() {
            return Err(os_reason("connect", &e));
        }
        if let Some((tls, name)) = &cfg.tls {
            let mut t = ClientConnection::new(tls.clone(), name.clone()).map_err(|e| format!("TLS: {e}"))?;
            t.set_buffer_limit(None);
            c.tls = Some(Box::new(t));
        }
        let mut b = Vec::with_capacity(128);
        codec::connect(
            &mut b,
            &codec::Connect {
                v5: cfg.v5,
                client_id: &c.spec.client_id,
                clean: c.spec.clean,
                keepalive: cfg.keepalive,
                username: cfg.username.as_deref(),
                password: cfg.password.as_deref(),
                session_expiry: if c.spec.clean { 0 } else { cfg.session_expiry },
                receive_max: cfg.receive_max,
            },
        );
        if let Some(request) = &cfg.ws {
            let mut ws = Box::<Ws>::default();
            ws::binary(&mut ws.frame, &b);
            c.ws = Some(ws);
            c.state = State::AwaitUpgrade;
            return c.send_raw(request);
        }
        c.state = State::AwaitConnack;
        c.send(&b)
    }

    /// Ends a connection and notes why.
    pub fn fail<H: Handler>(&mut self, idx: usize, reason: Reason, h: &mut H) {
        let c = &mut self.conns[idx];
        let was = c.state;
        close(c);
        match was {
            State::Closed | State::Idle | State::Deaf => {}
            State::Closing => self.closing -= 1,
            State::Up => {
                tally(&mut self.drops, &reason);
                h.dropped(idx);
            }
            State::TcpConnect | State::AwaitUpgrade | State::AwaitConnack | State::AwaitSuback => {
                let stage = match was {
                    State::TcpConnect => "TCP",
                    State::AwaitUpgrade => "before the WebSocket",
                    State::AwaitConnack => "before CONNACK",
                    _ => "before SUBACK",
                };
                tally(&mut self.failures, &format!("{stage}: {reason}"));
                self.batch.failed += 1;
            }
        }
    }

    /// Appends to a connection's output; an error ends the connection.
    #[inline]
    pub fn send<H: Handler>(&mut self, idx: usize, data: &[u8], h: &mut H) {
        if let Err(r) = self.conns[idx].send(data) {
            self.fail(idx, r, h);
        }
    }

    /// One epoll round.
    pub fn turn<H: Handler>(&mut self, timeout: Option<u64>, h: &mut H) -> io::Result<()> {
        let n = self.poll.wait(timeout)?;
        for i in 0..n {
            let (token, flags) = self.poll.event(i);
            if token == WAKE {
                if let Some(w) = &self.waker {
                    w.clear();
                }
                h.woken();
                continue;
            }
            let idx = token as usize;
            if let Err(r) = self.ready(idx, flags, h) {
                self.fail(idx, r, h);
            }
        }
        Ok(())
    }

    #[inline]
    fn ready<H: Handler>(&mut self, idx: usize, flags: u32, h: &mut H) -> Result<(), Reason> {
        const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) as u32;
        const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32;
        let c = &mut self.conns[idx];
        if c.fd < 0 {
            return Ok(());
        }
        if flags & OUT != 0 {
            if c.state == State::TcpConnect {
                self.start_mqtt(idx)?;
            } else if c.has_out() {
                c.flush()?;
                if !c.has_out() {
                    h.writable(idx);
                }
            }
        }
        if flags & IN != 0 && self.conns[idx].state != State::TcpConnect {
            let ended = flags & !((libc::EPOLLIN | libc::EPOLLOUT) as u32) != 0;
            self.read(idx, ended, h)?;
        }
        Ok(())
    }

    /// Reads until the kernel has no more (a short read, since the socket is
    /// edge-triggered); with `ended`, until it says end of stream.
    #[inline]
    fn read<H: Handler>(&mut self, idx: usize, ended: bool, h: &mut H) -> Result<(), Reason> {
        loop {
            let c = &mut self.conns[idx];
            let s = &mut self.s;
            // A former partial packet goes before what is read now.
            let off = if c.tls.is_none() { c.partial.len() } else { 0 };
            if s.rbuf.len() < off + READ_CHUNK / 2 {
                s.rbuf.resize(off + READ_CHUNK, 0);
            }
            if off > 0 {
                s.rbuf[..off].copy_from_slice(&c.partial);
            }
            let room = s.rbuf.len() - off;
            let n = match Fd(c.fd).read(&mut s.rbuf[off..]) {
                Ok(0) => return Err("closed by broker".into()),
                Ok(n) => n,
                Err(e) if would_block(&e) => return Ok(()),
                Err(e) => return Err(os_reason("read", &e)),
            };
            if c.state == State::Closing {
                continue;
            }
            c.reads += 1;
            let now = clock::now();
            s.acks.clear();
            let r = if c.tls.is_some() {
                read_tls(c, s, idx, n, now, h)
            } else {
                c.partial.clear();
                c.arrived(idx, &mut s.rbuf[..off + n], off, now, &mut s.acks, &mut s.came_up, h)
            };
            if std::mem::take(&mut s.came_up) {
                self.came_up(idx, now, h);
            }
            r?;
            self.conns[idx].send_ws_out()?;
            if !self.s.acks.is_empty() {
                self.conns[idx].send(&self.s.acks)?;
            }
            if n < room && !ended {
                return Ok(());
            }
        }
    }

    fn came_up<H: Handler>(&mut self, idx: usize, now: u64, h: &mut H) {
        let c = &self.conns[idx];
        self.batch.up += 1;
        self.batch.ended = now;
        self.batch.latency.record(now - c.opened_at);
        let kind = c.tls.as_ref().and_then(|t| t.handshake_kind());
        self.resumed += u64::from(kind == Some(HandshakeKind::Resumed));
        if self.cfg.keepalive > 0 {
            self.pings.push_back((now + self.ping_every(), idx));
        }
        h.up(idx, c.connack.session_present, now);
    }

    fn ping_every(&self) -> u64 {
        self.cfg.keepalive as u64 * clock::SEC * 3 / 4
    }

    /// Sends the PINGREQs that are due; returns when the next one is.
    pub fn keep_alive<H: Handler>(&mut self, now: u64, h: &mut H) -> Option<u64> {
        while let Some(&(due, idx)) = self.pings.front() {
            if due > now {
                return Some(due);
            }
            self.pings.pop_front();
            if self.conns[idx].state == State::Up {
                self.pings.push_back((now + self.ping_every(), idx));
                self.send(idx, &codec::PINGREQ, h);
            }
        }
        None
    }

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

fn close(c: &mut Conn) {
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

/// Decrypts the `n` bytes in `rbuf` and parses what comes out of them.
fn read_tls<H: Handler>(
    c: &mut Conn,
    s: &mut Scratch,
    idx: usize,
    n: usize,
    now: u64,
    h: &mut H,
) -> Result<(), Reason> {
    let Some(mut t) = c.tls.take() else {
        return Ok(());
    };
    if s.plain.is_empty() {
        s.plain = vec![0; READ_CHUNK];
    }
    let mut cipher = &s.rbuf[..n];
    let mut run = || -> Result<(), Reason> {
        while !cipher.is_empty() {
            t.read_tls(&mut cipher).map_err(|e| os_reason("TLS", &e))?;
            let st = t.process_new_packets().map_err(|e| format!("TLS: {e}"))?;
            let mut left = st.plaintext_bytes_to_read();
            while left > 0 {
                let off = c.partial.len();
                if s.plain.len() < off + READ_CHUNK / 2 {
                    s.plain.resize(off + READ_CHUNK, 0);
                }
                s.plain[..off].copy_from_slice(&c.partial);
                c.partial.clear();
                let k = t.reader().read(&mut s.plain[off..]).map_err(|e| os_reason("TLS read", &e))?;
                if k == 0 {
                    break;
                }
                left -= k.min(left);
                c.arrived(idx, &mut s.plain[..off + k], off, now, &mut s.acks, &mut s.came_up, h)?;
            }
        }
        Ok(())
    };
    let r = run();
    c.tls = Some(t);
    r?;
    // Handshake answers, and CONNECT once the handshake is through.
    c.flush()
}
