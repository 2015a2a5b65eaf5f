//! MQTT client connections on one epoll loop: non-blocking sockets, the
//! handshake, acknowledgements in both directions, and batched reads/writes.
//! What to do with messages is up to a [`Handler`].

mod engine;
mod handler;
mod socket;

pub use engine::{ConnectStats, Engine, Pace};
pub use handler::{Acked, Delivery, Handler};
pub use socket::LOWEST_PORT;
use socket::{Fd, os_reason, would_block};

use crate::codec::{self, Connack, Packet, Parsed, Stamp};
use crate::inflight::{Await, Inflight};
use crate::ws;
use rustls::ClientConnection;
use rustls::pki_types::ServerName;
use socket2::Socket;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
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

/// Parameters of one connection.
pub struct Spec {
    pub client_id: String,
    pub clean: bool,
    pub filter: Option<(String, u8)>,
    /// True if the connection will not read (`Engine::deafen`): the kernel is to hold little for it.
    pub deaf: bool,
}

/// Receive buffer of a connection that will not read, in bytes.
const DEAF_BUFFER: usize = 4096;

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

    /// Sends the frames that the WebSocket layer adds by itself.
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
