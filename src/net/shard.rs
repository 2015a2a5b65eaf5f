//! Shards: one OS thread each with a current-thread runtime, its read buffers and its turn.

use std::{
    cell::RefCell,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::{
    Shared,
    serving::{Seat, Serving},
    wheel,
};
use crate::broker::Turn;

const READ_BUFFER: usize = 64 << 10;
const HANDOVER: usize = 1024;

/// What a thread's connections share within a turn.
pub(super) struct Local {
    /// Bytes as read.
    pub(super) read: Box<[u8]>,
    /// Bytes after TLS and WebSocket.
    pub(super) plain: Vec<u8>,
    /// Answers of the connection being processed.
    pub(super) answers: Vec<u8>,
    /// The turn: flushed when the thread is about to park.
    pub(super) turn: Turn,
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
            })
        });
        work(local)
    })
}

/// Flushes what this thread's turn collected.
pub(super) fn flush_turn() {
    loop {
        let target = LOCAL.with_borrow_mut(|local| local.as_mut().and_then(|local| local.turn.dirty.pop()));
        let Some(target) = target else { return };
        target.flush();
    }
}

/// An accepted socket on its way to its shard.
pub(super) struct Incoming {
    pub(super) stream: std::net::TcpStream,
    pub(super) peer: SocketAddr,
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
