//! Shards: one OS thread each with a current-thread runtime, its read buffers and its turn.

use std::{
    cell::RefCell,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::{
    Shared, clock,
    serving::{Seat, Serving},
    wheel,
};
use crate::{broker::Turn, types::Peer};

const READ_BUFFER: usize = 64 << 10;
const HANDOVER: usize = 1024;
/// Longest turn of a thread that does not park.
const TURN: Duration = Duration::from_micros(500);

/// What a thread's connections share within a turn.
pub(super) struct Local {
    /// Bytes as read.
    pub(super) read: Box<[u8]>,
    /// Bytes after TLS and WebSocket.
    pub(super) plain: Vec<u8>,
    /// Answers of the connection being processed.
    pub(super) answers: Vec<u8>,
    /// The turn: flushed when the thread is about to park, and after [`TURN`].
    pub(super) turn: Turn,
    /// When a poll of this turn first left something to flush.
    began: Option<Instant>,
}

thread_local! {
    static LOCAL: RefCell<Option<Box<Local>>> = const { RefCell::new(None) };
}

/// Runs `work` with this thread's buffers. Must not nest.
pub(super) fn with_local<R>(work: impl FnOnce(&mut Local) -> R) -> R {
    LOCAL.with_borrow_mut(|local| {
        let local = local.get_or_insert_with(|| {
            Box::new(Local {
                read: vec![0; READ_BUFFER].into_boxed_slice(),
                plain: Vec::new(),
                answers: Vec::new(),
                turn: Turn::default(),
                began: None,
            })
        });
        work(local)
    })
}

/// Ends a connection's poll: flushes a turn that has lasted [`TURN`]. A thread that always has something to do
/// never parks, and what it collected must not wait for that.
pub(super) fn end_poll() {
    let due = LOCAL.with_borrow_mut(|local| {
        let Some(local) = local else { return false };
        if local.turn.dirty.is_empty() {
            return false;
        }
        let now = clock::instant();
        now.duration_since(*local.began.get_or_insert(now)) >= TURN
    });
    if due {
        flush_turn();
    }
}

/// Flushes what this thread's turn collected.
pub(super) fn flush_turn() {
    LOCAL.with_borrow_mut(|local| {
        if let Some(local) = local {
            local.began = None;
        }
    });
    loop {
        let target = LOCAL.with_borrow_mut(|local| local.as_mut().and_then(|local| local.turn.dirty.pop()));
        let Some(target) = target else { return };
        target.flush();
    }
}

/// An accepted socket on its way to its shard.
pub(super) struct Incoming {
    pub(super) stream: std::net::TcpStream,
    pub(super) peer: Peer,
    pub(super) seat: Seat,
    pub(super) permit: OwnedSemaphorePermit,
}

/// Where to send sockets, and how many the shard has.
#[derive(Clone)]
pub struct ShardHandle {
    sender: mpsc::Sender<Incoming>,
    pub(super) connections: Arc<AtomicUsize>,
}

impl ShardHandle {
    /// Connections of this shard now.
    pub(super) fn load(&self) -> usize {
        self.connections.load(Relaxed)
    }

    pub(super) async fn send(&self, incoming: Incoming) {
        // An error means that the shard has ended: the socket is closed by dropping it.
        let _ = self.sender.send(incoming).await;
    }
}

/// Starts `count` shard threads. They end when every handle is dropped and their connections have ended, or
/// when the process does.
pub fn start_shards(
    count: usize,
    shared: &Arc<Shared>,
) -> io::Result<(Vec<ShardHandle>, Vec<JoinHandle<()>>)> {
    let mut handles = Vec::with_capacity(count);
    let mut threads = Vec::with_capacity(count);
    for index in 0..count {
        let (sender, receiver) = mpsc::channel(HANDOVER);
        let connections = Arc::new(AtomicUsize::new(0));
        handles.push(ShardHandle { sender, connections: Arc::clone(&connections) });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().on_thread_park(flush_turn).build()?;
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new()
            .name(format!("shard-{index}"))
            .spawn(move || runtime.block_on(run(receiver, shared, connections)))?;
        threads.push(thread);
    }
    Ok((handles, threads))
}

async fn run(mut receiver: mpsc::Receiver<Incoming>, shared: Arc<Shared>, connections: Arc<AtomicUsize>) {
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    // Returning drops the runtime and with it every connection: not before they have ended by themselves.
    let mut open = true;
    while open || connections.load(Relaxed) > 0 {
        tokio::select! {
            incoming = receiver.recv(), if open => match incoming {
                Some(incoming) => {
                    tokio::spawn(Serving::new(incoming, &shared));
                }
                None => open = false,
            },
            _ = second.tick() => wheel::tick(),
        }
    }
}
