//! All connections of a thread on one epoll loop.

mod batch;

use batch::close;
pub use batch::{ConnectStats, Pace};

use super::socket::{Fd, IP_LOCAL_PORT_RANGE, LOWEST_PORT, ip_option, os_reason, would_block};
use super::{ClientCfg, Conn, DEAF_BUFFER, Handler, READ_CHUNK, Reason, Spec, State, Ws};
use crate::poll::{Poll, WAKE, Waker};
use crate::report::tally;
use crate::{clock, codec, ws};
use rustls::{ClientConnection, HandshakeKind};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Buffers shared by all connections of an engine.
struct Scratch {
    rbuf: Vec<u8>,
    plain: Vec<u8>,
    acks: Vec<u8>,
    came_up: bool,
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

    /// Sets the place in the list of source addresses at which this engine begins.
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
