//! Runs attackers: many connections on one thread, each with what it says first and what it goes on saying.

use super::packets::{CONNACK, Counter};
use crate::clock::{self, MS};
use crate::poll::Poll;
use crate::report::tally;
use crate::ws;
use socket2::{Domain, Socket, Type};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Appends the next bytes to send; nothing appended means that there is no more.
pub type Feed = Box<dyn FnMut(&mut Vec<u8>) + Send>;

/// Next step of a connection that has done its part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The connection stays as it is.
    Hold,
    /// The connection goes away for good.
    Close,
    /// The connection is torn off and opened anew.
    Again,
}

/// Listener of the broker to which a client comes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// MQTT over TCP.
    Tcp,
    /// MQTT over WebSocket.
    Ws,
    /// HTTP: what it sends is its own business, and answers are read and not looked at.
    Http,
}

/// Addresses of the listeners.
#[derive(Clone, Copy)]
pub struct Doors {
    pub tcp: SocketAddr,
    pub ws: Option<SocketAddr>,
    pub http: Option<SocketAddr>,
}

impl Doors {
    /// Returns the address of a listener; `None` if the broker has none or it was not named.
    pub fn find(&self, door: Door) -> Option<SocketAddr> {
        match door {
            Door::Tcp => Some(self.tcp),
            Door::Ws => self.ws,
            Door::Http => self.http,
        }
    }
}

/// Condition under which a connection has done its part.
#[derive(Clone, Copy)]
pub enum Done {
    Never,
    /// So many packets of this kind have come.
    Seen(u8, u64),
}

/// One client: what it does from its connection on.
pub struct Client {
    pub door: Door,
    /// Written for every connection anew, first of all.
    pub hello: Feed,
    /// Go on after CONNACK only.
    pub greeted: bool,
    pub feed: Feed,
    /// Read what the broker sends after the CONNACK.
    pub reads: bool,
    /// Most bytes in one write.
    pub piece: usize,
    pub done: Done,
    pub then: Then,
    /// Connect again when the broker closes.
    pub reopens: bool,
    /// A small receive buffer, so that little is held for it elsewhere.
    pub narrow: bool,
}

impl Client {
    /// Says hello and then nothing more.
    pub fn new(hello: impl FnMut(&mut Vec<u8>) + Send + 'static) -> Client {
        Client {
            door: Door::Tcp,
            hello: Box::new(hello),
            greeted: true,
            feed: Box::new(|_| ()),
            reads: true,
            piece: usize::MAX,
            done: Done::Never,
            then: Then::Hold,
            reopens: true,
            narrow: false,
        }
    }

    pub fn feed(mut self, feed: impl FnMut(&mut Vec<u8>) + Send + 'static) -> Client {
        self.feed = Box::new(feed);
        self
    }

    /// Sends `chunk` again and again.
    pub fn repeat(self, chunk: Vec<u8>) -> Client {
        self.feed(move |out| out.extend_from_slice(&chunk))
    }

    /// Sends `bytes` once.
    pub fn once(self, bytes: Vec<u8>) -> Client {
        let mut bytes = Some(bytes);
        self.feed(move |out| out.extend_from_slice(&bytes.take().unwrap_or_default()))
    }

    pub fn done(mut self, kind: u8, count: u64, then: Then) -> Client {
        (self.done, self.then) = (Done::Seen(kind, count), then);
        self
    }

    pub fn deaf(mut self) -> Client {
        (self.reads, self.narrow) = (false, true);
        self
    }

    pub fn eager(mut self) -> Client {
        self.greeted = false;
        self
    }

    pub fn once_only(mut self) -> Client {
        self.reopens = false;
        self
    }
}

struct Conn {
    client: Client,
    socket: Option<Socket>,
    counter: Counter,
    frames: ws::Frames,
    /// The WebSocket handshake has been answered (or there is none).
    upgraded: bool,
    greeted: bool,
    /// Counted among those that wait for their CONNACK.
    opening: bool,
    finished: bool,
    out: Vec<u8>,
    at: usize,
    readable: bool,
    writable: bool,
    queued: bool,
    exhausted: bool,
}

/// Traffic of the attackers, and the ends of their connections.
#[derive(Default)]
pub struct Tally {
    pub opened: u64,
    pub greeted: u64,
    pub bytes: u64,
    pub packets_back: u64,
    pub closed: BTreeMap<String, u64>,
}

pub struct Attack {
    doors: Doors,
    /// The handshake of WebSocket.
    request: Vec<u8>,
    sources: u32,
    poll: Poll,
    conns: Vec<Conn>,
    ready: VecDeque<usize>,
    /// To be opened, not before the time given (ns).
    waiting: VecDeque<(u64, usize)>,
    opening: usize,
    buffer: Vec<u8>,
    pub tally: Tally,
}

/// Connections that may wait for their CONNACK at once, where one is waited for.
const OPENING: usize = 100;
const REOPEN_AFTER: u64 = 100 * MS;
const READS: usize = 8;
const WRITES: usize = 64;

impl Attack {
    pub fn new(doors: Doors, sources: u32) -> io::Result<Attack> {
        Ok(Attack {
            doors,
            request: ws::request(&doors.ws.unwrap_or(doors.tcp).to_string(), "/mqtt"),
            sources: sources.max(1),
            poll: Poll::new()?,
            conns: Vec::new(),
            ready: VecDeque::new(),
            waiting: VecDeque::new(),
            opening: 0,
            buffer: vec![0; 256 << 10],
            tally: Tally::default(),
        })
    }

    pub fn add(&mut self, clients: Vec<Client>) {
        for client in clients {
            self.waiting.push_back((0, self.conns.len()));
            self.conns.push(Conn {
                client,
                socket: None,
                counter: Counter::default(),
                frames: ws::Frames::default(),
                upgraded: false,
                greeted: false,
                opening: false,
                finished: false,
                out: Vec::new(),
                at: 0,
                readable: false,
                writable: false,
                queued: false,
                exhausted: false,
            });
        }
    }

    /// Tells whether every connection has done its part.
    pub fn finished(&self) -> bool {
        self.conns.iter().all(|conn| conn.finished)
    }

    /// Ends the connections from number `first` on.
    pub fn drop_from(&mut self, first: usize) {
        self.conns.truncate(first);
        self.ready.retain(|i| *i < first);
        self.waiting.retain(|(_, i)| *i < first);
        self.opening = self.conns.iter().filter(|conn| conn.opening).count();
    }

    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// One round: opens what is due, waits for at most `timeout` ns and lets every ready connection have its turn.
    pub fn turn(&mut self, timeout: u64) -> io::Result<()> {
        self.open_due();
        let wait = if self.ready.is_empty() { timeout } else { 0 };
        for i in 0..self.poll.wait(Some(wait))? {
            let (token, events) = self.poll.event(i);
            let at = token as usize;
            let Some(conn) = self.conns.get_mut(at) else { continue };
            let hung = (libc::EPOLLHUP | libc::EPOLLERR | libc::EPOLLRDHUP) as u32;
            conn.readable |= events & (libc::EPOLLIN as u32 | hung) != 0;
            conn.writable |= events & (libc::EPOLLOUT as u32 | hung) != 0;
            self.enqueue(at);
        }
        for _ in 0..self.ready.len() {
            let Some(at) = self.ready.pop_front() else { break };
            self.conns[at].queued = false;
            match self.serve(at) {
                Ok(true) => self.enqueue(at),
                Ok(false) => {}
                Err(why) => self.lost(at, &why),
            }
        }
        Ok(())
    }

    fn enqueue(&mut self, at: usize) {
        if !std::mem::replace(&mut self.conns[at].queued, true) {
            self.ready.push_back(at);
        }
    }

    fn open_due(&mut self) {
        let now = clock::now();
        for _ in 0..self.waiting.len() {
            let Some(&(when, at)) = self.waiting.front() else { return };
            let waits = self.conns[at].client.greeted;
            if when > now || waits && self.opening >= OPENING {
                return;
            }
            self.waiting.pop_front();
            if let Err(error) = self.open(at) {
                tally(&mut self.tally.closed, &format!("not opened: {error}"));
                self.waiting.push_back((now + REOPEN_AFTER, at));
            }
        }
    }

    fn open(&mut self, at: usize) -> io::Result<()> {
        let address = self.doors.find(self.conns[at].client.door).unwrap_or(self.doors.tcp);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        // Torn off rather than closed: no ports left in TIME_WAIT, and wills are published.
        socket.set_linger(Some(Duration::ZERO))?;
        if self.conns[at].client.narrow {
            socket.set_recv_buffer_size(4096)?;
        }
        if address.ip().is_loopback() && address.is_ipv4() && self.sources > 1 {
            let source = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 0, 1, 1)) + at as u32 % self.sources);
            set_late_port(&socket);
            socket.bind(&SocketAddr::from((source, 0)).into())?;
        }
        match socket.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        self.poll.add(socket.as_raw_fd(), at as u64)?;
        self.tally.opened += 1;
        let conn = &mut self.conns[at];
        conn.socket = Some(socket);
        conn.counter = Counter::default();
        conn.frames = ws::Frames::default();
        conn.upgraded = conn.client.door != Door::Ws;
        conn.greeted = false;
        conn.exhausted = false;
        (conn.readable, conn.writable) = (false, false);
        conn.out.clear();
        conn.at = 0;
        if conn.client.door == Door::Ws {
            conn.out.extend_from_slice(&self.request);
        } else {
            (conn.client.hello)(&mut conn.out);
        }
        conn.opening = conn.client.greeted;
        self.opening += usize::from(conn.opening);
        Ok(())
    }

    /// Reads and writes a bounded while; whether there is more to do at once.
    fn serve(&mut self, at: usize) -> Result<bool, String> {
        let conn = &mut self.conns[at];
        if conn.readable && (conn.client.reads || !conn.greeted) {
            for _ in 0..READS {
                // A little at a time until the CONNACK: what follows it may be meant to stay unread.
                let room = if conn.client.reads { self.buffer.len() } else { 512 };
                let Some(socket) = &mut conn.socket else { return Ok(false) };
                match socket.read(&mut self.buffer[..room]) {
                    Ok(0) => return Err("closed by broker".into()),
                    Ok(n) => conn.take(&mut self.buffer[..n])?,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        conn.readable = false;
                        break;
                    }
                    Err(e) => return Err(super::reason(&e)),
                }
                if !conn.client.reads && conn.greeted {
                    break;
                }
            }
        }
        if conn.opening && conn.greeted {
            conn.opening = false;
            self.opening -= 1;
            self.tally.greeted += 1;
        }
        if let Done::Seen(kind, count) = conn.client.done
            && conn.counter.seen[usize::from(kind)] >= count
            && !conn.finished
        {
            return Ok(self.finish(at));
        }
        let Some(socket) = conn.socket.as_mut() else { return Ok(false) };
        let mut writes = 0;
        while conn.writable && writes < WRITES {
            if conn.at == conn.out.len() {
                conn.out.clear();
                conn.at = 0;
                if !conn.upgraded || conn.client.greeted && !conn.greeted || conn.exhausted {
                    break;
                }
                (conn.client.feed)(&mut conn.out);
                conn.exhausted = conn.out.is_empty();
                if conn.exhausted {
                    break;
                }
            }
            let end = conn.out.len().min(conn.at.saturating_add(conn.client.piece));
            match socket.write(&conn.out[conn.at..end]) {
                Ok(n) => {
                    conn.at += n;
                    self.tally.bytes += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => conn.writable = false,
                Err(e) if e.kind() == io::ErrorKind::NotConnected => conn.writable = false,
                Err(e) => return Err(super::reason(&e)),
            }
            writes += 1;
        }
        let reading = conn.readable && (conn.client.reads || !conn.greeted);
        Ok(reading || writes == WRITES)
    }

    /// The connection has done its part.
    fn finish(&mut self, at: usize) -> bool {
        let conn = &mut self.conns[at];
        match conn.client.then {
            Then::Hold => {
                conn.finished = true;
                return true;
            }
            Then::Close => conn.finished = true,
            Then::Again => self.waiting.push_back((0, at)),
        }
        self.tally.packets_back += conn.counter.seen.iter().sum::<u64>();
        conn.socket = None;
        false
    }

    fn lost(&mut self, at: usize, why: &str) {
        let conn = &mut self.conns[at];
        if std::mem::take(&mut conn.opening) {
            self.opening -= 1;
        }
        let why = match (conn.counter.connack, conn.counter.disconnect) {
            (_, Some(reason)) => format!("DISCONNECT {reason:#04x}"),
            (Some(code), _) if code != 0 => format!("CONNACK {code:#04x}"),
            (None, _) => format!("{why}, before CONNACK"),
            _ => why.to_string(),
        };
        tally(&mut self.tally.closed, &why);
        self.tally.packets_back += conn.counter.seen.iter().sum::<u64>();
        conn.socket = None;
        if conn.client.reopens {
            self.waiting.push_back((clock::now() + REOPEN_AFTER, at));
        } else {
            conn.finished = true;
        }
    }

    /// Adds the connections that are still there to the tally.
    pub fn total(&mut self) -> &Tally {
        for conn in &self.conns {
            if conn.socket.is_some() {
                self.tally.packets_back += conn.counter.seen.iter().sum::<u64>();
            }
        }
        &self.tally
    }
}

impl Conn {
    fn take(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        let mut from = 0;
        if self.client.door == Door::Http {
            return Ok(());
        }
        if !self.upgraded {
            let Some(n) = ws::response(bytes)? else { return Ok(()) };
            from = n;
            self.upgraded = true;
            let mut hello = Vec::new();
            (self.client.hello)(&mut hello);
            ws::binary(&mut self.out, &hello);
            // Writing is tried even if the socket was full: it had room for the request.
            self.writable = true;
        }
        let bytes = &mut bytes[from..];
        if self.client.door == Door::Ws {
            // Pings of the broker stay unanswered.
            let n = self.frames.unwrap(bytes, &mut Vec::new())?;
            self.counter.feed(&bytes[..n]);
        } else {
            self.counter.feed(bytes);
        }
        if !self.greeted && self.counter.seen[usize::from(CONNACK)] > 0 {
            if self.counter.connack != Some(0) {
                return Err("refused".into());
            }
            self.greeted = true;
        }
        Ok(())
    }
}

/// Chooses the port at connect(), so that one port serves several addresses.
fn set_late_port(socket: &Socket) {
    let on: libc::c_int = 1;
    // SAFETY: an int option, valid for the call. Without it the port is chosen at bind, which does as well.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
    }
}
