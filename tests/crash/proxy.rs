//! A TCP proxy between a gateway and a server of its database, which can be told to fail as a network does. It understands as much of
//! the two protocols as it needs to know the answer to a change.

use std::{
    collections::HashSet,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use parking_lot::{Condvar, Mutex};

/// Treatment of what passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    /// Everything passes.
    Open,
    /// Connections end, and new ones are not made.
    Cut,
    /// Connections stay, and nothing passes. It passes later, as what a network has held back does.
    Silent,
    /// The answer to every third change is swallowed: the change was made, and nobody is told. With PostgreSQL the connection ends then.
    Lossy,
}

/// Protocol of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Postgres,
    /// CQL, without compression.
    Cassandra,
}

/// All ways of one gateway to its database, treated alike.
pub(crate) struct Line {
    state: Arc<LineState>,
    entrances: Vec<SocketAddr>,
}

struct LineState {
    dialect: Dialect,
    passage: Mutex<Passage>,
    changed: Condvar,
    /// Both ends of all connections.
    open: Mutex<Vec<TcpStream>>,
    changes: AtomicU64,
    swallowed: AtomicU64,
    over: AtomicBool,
    /// Prepared statements of Cassandra that change something.
    prepared: Mutex<HashSet<Vec<u8>>>,
}

impl Line {
    /// Listens on `port` of each server's address, in front of that server.
    pub(crate) fn start(dialect: Dialect, ways: &[(SocketAddr, SocketAddr)]) -> Self {
        let state = Arc::new(LineState {
            dialect,
            passage: Mutex::new(Passage::Open),
            changed: Condvar::new(),
            open: Mutex::default(),
            changes: AtomicU64::new(0),
            swallowed: AtomicU64::new(0),
            over: AtomicBool::new(false),
            prepared: Mutex::default(),
        });
        let entrances = ways.iter().map(|(entrance, server)| state.listen(*entrance, *server)).collect();
        Self { state, entrances }
    }

    /// Addresses at which the servers are reached.
    pub(crate) fn entrances(&self) -> &[SocketAddr] {
        &self.entrances
    }

    /// Treats everything so from now on.
    pub(crate) fn set(&self, passage: Passage) {
        *self.state.passage.lock() = passage;
        self.state.changed.notify_all();
        if passage == Passage::Cut {
            self.state.end_all();
        }
    }

    /// Answers that were swallowed so far.
    pub(crate) fn swallowed(&self) -> u64 {
        self.state.swallowed.load(SeqCst)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.state.over.store(true, SeqCst);
        self.set(Passage::Cut);
        for entrance in &self.entrances {
            let _ = TcpStream::connect(entrance);
        }
    }
}

/// A connection through the proxy.
struct Connection {
    line: Arc<LineState>,
    /// Cassandra: streams of requests that prepare a change, and of those whose answer is to be swallowed.
    preparing: Mutex<HashSet<[u8; 2]>>,
    unanswered: Mutex<HashSet<[u8; 2]>>,
    /// PostgreSQL: the next answer is to be swallowed, and the connection with it.
    doomed: AtomicBool,
}

impl LineState {
    fn listen(self: &Arc<Self>, entrance: SocketAddr, server: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind(entrance).expect("bind the proxy");
        let bound = listener.local_addr().expect("an address");
        let state = Arc::clone(self);
        thread::spawn(move || {
            for client in listener.incoming() {
                if state.over.load(SeqCst) {
                    return;
                }
                let Ok(client) = client else { continue };
                // Without a server it ends at once, as it does while cut.
                if *state.passage.lock() != Passage::Cut
                    && let Ok(server) = TcpStream::connect(server)
                {
                    state.join(client, server);
                }
            }
        });
        bound
    }

    fn end_all(&self) {
        for stream in self.open.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn join(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        let both = || Some((client.try_clone().ok()?, server.try_clone().ok()?));
        let (Some(requests), Some(answers), Some(kept)) = (both(), both(), both()) else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        {
            let mut open = self.open.lock();
            open.retain(|stream| stream.peer_addr().is_ok());
            open.extend([kept.0, kept.1]);
        }
        // The line may have been cut since the connection was accepted.
        if *self.passage.lock() == Passage::Cut {
            self.end_all();
        }
        let connection = Arc::new(Connection {
            line: Arc::clone(self),
            preparing: Mutex::default(),
            unanswered: Mutex::default(),
            doomed: AtomicBool::new(false),
        });
        let other = Arc::clone(&connection);
        thread::spawn(move || {
            let mut reader =
                Requests { connection: other, buffer: Vec::new(), greeted: false, changing: HashSet::new() };
            pump(&reader.connection.line.clone(), requests.0, requests.1, |bytes| {
                reader.take(bytes);
                Some(bytes.to_vec())
            });
        });
        thread::spawn(move || {
            let mut reader = Answers { connection, buffer: Vec::new() };
            pump(&reader.connection.line.clone(), answers.1, answers.0, |bytes| reader.take(bytes));
        });
    }

    /// Waits while nothing passes.
    fn wait(&self) {
        let mut passage = self.passage.lock();
        while *passage == Passage::Silent {
            self.changed.wait(&mut passage);
        }
    }

    /// Counts a change; true if its answer is to be swallowed.
    fn is_swallowed(&self) -> bool {
        *self.passage.lock() == Passage::Lossy && self.changes.fetch_add(1, SeqCst) % 3 == 2
    }
}

/// Moves bytes as `treat` leaves them, until one side ends or `treat` ends it.
fn pump(
    line: &LineState,
    mut from: TcpStream,
    mut to: TcpStream,
    mut treat: impl FnMut(&[u8]) -> Option<Vec<u8>>,
) {
    let mut chunk = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut chunk) {
        line.wait();
        let Some(bytes) = treat(&chunk[..count]) else { break };
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

fn is_change(statement: &[u8]) -> bool {
    let text = String::from_utf8_lossy(statement).to_uppercase();
    ["INSERT INTO", "UPDATE ", "DELETE FROM"].iter().any(|word| text.contains(word))
}

/// Bytes up to the first 0, and those behind it.
fn text(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    (&bytes[..end], bytes.get(end + 1..).unwrap_or_default())
}

fn length(bytes: &[u8]) -> Option<usize> {
    Some(u32::from_be_bytes(bytes.first_chunk().copied()?) as usize)
}

/// Takes the first so many bytes, if all are there.
fn cut(buffer: &mut Vec<u8>, length: usize) -> Option<Vec<u8>> {
    (buffer.len() >= length).then(|| buffer.drain(..length).collect())
}

/// Reads what a gateway sends.
struct Requests {
    connection: Arc<Connection>,
    buffer: Vec<u8>,
    /// PostgreSQL: the first message, which has no type, has gone by.
    greeted: bool,
    /// PostgreSQL: names of prepared statements that change something.
    changing: HashSet<Vec<u8>>,
}

impl Requests {
    fn take(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
        match self.connection.line.dialect {
            Dialect::Postgres => while self.postgres().is_some() {},
            Dialect::Cassandra => while self.cassandra().is_some() {},
        }
    }

    /// A type, and a length that counts itself.
    fn postgres(&mut self) -> Option<()> {
        let head = usize::from(self.greeted);
        let length = length(self.buffer.get(head..)?)?;
        let message = cut(&mut self.buffer, head + length)?;
        if !self.greeted {
            self.greeted = true;
            return Some(());
        }
        let body = &message[5..];
        match message[0] {
            b'P' => {
                let (name, rest) = text(body);
                if is_change(text(rest).0) {
                    self.changing.insert(name.to_vec());
                }
            }
            b'B' if self.changing.contains(text(text(body).1).0) && self.connection.line.is_swallowed() => {
                self.connection.doomed.store(true, SeqCst);
            }
            _ => {}
        }
        Some(())
    }

    /// Version, flags, stream (2), operation, length of the body (4).
    fn cassandra(&mut self) -> Option<()> {
        let length = length(self.buffer.get(5..)?)?;
        let frame = cut(&mut self.buffer, 9 + length)?;
        let (stream, body) = ([frame[2], frame[3]], &frame[9..]);
        match frame[4] {
            // PREPARE
            0x09 if is_change(body) => drop(self.connection.preparing.lock().insert(stream)),
            // EXECUTE
            0x0A => {
                let id = body.get(2..2 + usize::from(u16::from_be_bytes(body.first_chunk().copied()?)))?;
                let is_change = self.connection.line.prepared.lock().contains(id);
                if is_change && self.connection.line.is_swallowed() {
                    self.connection.unanswered.lock().insert(stream);
                }
            }
            _ => {}
        }
        Some(())
    }
}

/// Reads what a server sends.
struct Answers {
    connection: Arc<Connection>,
    buffer: Vec<u8>,
}

impl Answers {
    /// Bytes that pass; `None` if the connection ends instead.
    fn take(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let Connection { line, doomed, .. } = &*self.connection;
        match line.dialect {
            // A server sends nothing of an answer before its statement has ended.
            Dialect::Postgres if doomed.load(SeqCst) => {
                line.swallowed.fetch_add(1, SeqCst);
                None
            }
            Dialect::Postgres => Some(bytes.to_vec()),
            Dialect::Cassandra => {
                self.buffer.extend_from_slice(bytes);
                let mut passed = Vec::new();
                while let Some(frame) = self.frame() {
                    passed.extend(frame);
                }
                Some(passed)
            }
        }
    }

    /// The next whole frame; an empty one for one that is swallowed.
    fn frame(&mut self) -> Option<Vec<u8>> {
        let length = length(self.buffer.get(5..)?)?;
        let frame = cut(&mut self.buffer, 9 + length)?;
        let (stream, body) = ([frame[2], frame[3]], &frame[9..]);
        let Connection { line, preparing, unanswered, .. } = &*self.connection;
        // RESULT of the kind "prepared", with the name that the statement has from now on.
        if preparing.lock().remove(&stream)
            && frame[4] == 0x08
            && let Some([0, 0, 0, 4, high, low]) = body.first_chunk::<6>()
            && let Some(id) = body.get(6..6 + usize::from(u16::from_be_bytes([*high, *low])))
        {
            line.prepared.lock().insert(id.to_vec());
        }
        if unanswered.lock().remove(&stream) {
            line.swallowed.fetch_add(1, SeqCst);
            return Some(Vec::new());
        }
        Some(frame)
    }
}

/// Port `port` of the host 127.0.0.`host`.
pub(crate) fn on_host(host: u8, port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), port))
}
