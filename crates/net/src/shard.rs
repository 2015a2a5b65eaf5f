//! Shards: one OS thread each with a current-thread runtime, its read buffers and its turn.

use std::{
    cell::Cell,
    future::Future,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::Context,
    thread::JoinHandle,
    time::Duration,
};

use broker::Turn;
use edge::door::{ConnectionPermit, PendingConnection};
use gateway_core::{Effort, Peer, Timestamp, clock};
use session::trim_buffers;
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{
    accept::{
        listener::ListenerContext,
        serving::{Serving, ShardLoad},
    },
    connection::started,
    timers::{self, TimerRuntime},
    wheel,
};
use crate::NetShared;
#[cfg(feature = "quic")]
use crate::quic::FirstPacket;

const READ_BUFFER: usize = 64 << 10;
const HANDOVER: usize = 1024;
/// Longest turn of a thread that does not park, in milliseconds of a clock read once per poll: half of it on average.
const TURN: u64 = 1;

/// Polls between two looks at the sockets while there is always something to do, Tokio's own number. A connection that has
/// done much and has more to do goes on after such a look (see [`go_on_after_others`]), so that these polls are short ones.
const POLLS_PER_LOOK: u32 = 61;

/// Work that one poll may do and still be run again before the sockets are looked at. A look costs about a hundredth of it.
const MUCH: u64 = Effort::TURN as u64 / 8;

/// Receivers that wait to be written to, at most, when a poll ends: the others of the thread wait for all these writes.
const MOST_DIRTY: usize = 1024;

/// Buffers that a thread's connections share: a connection takes them for the time of one poll.
pub(super) struct ShardLocal {
    /// Bytes as read.
    pub(super) read: Box<[u8]>,
    /// Bytes after TLS and WebSocket.
    pub(super) plain: Vec<u8>,
    pub(super) work: PacketWork,
}

/// Output of handling packets.
#[derive(Default)]
pub(super) struct PacketWork {
    /// Answers of the connection being processed.
    pub(super) answers: Vec<u8>,
    /// The turn: flushed when the thread is about to park, and after [`TURN`].
    pub(super) turn: Turn,
    /// Time at which packets were last handled.
    pub(super) now: Timestamp,
    /// Time at which a poll of this turn first left something to flush.
    began: Option<Timestamp>,
}

thread_local! {
    static LOCAL: Cell<Option<Box<ShardLocal>>> = const { Cell::new(None) };
}

impl ShardLocal {
    /// Takes this thread's. Nobody else on the thread may need it before [`Self::put_back`].
    pub(super) fn take() -> Box<Self> {
        LOCAL.take().unwrap_or_else(|| {
            let read = vec![0; READ_BUFFER].into_boxed_slice();
            Box::new(Self { read, plain: Vec::new(), work: PacketWork::default() })
        })
    }

    pub(super) fn put_back(self: Box<Self>) {
        LOCAL.set(Some(self));
    }
}

impl PacketWork {
    /// Ends a connection's poll: flushes a turn that has lasted [`TURN`]. A thread that always has work never parks,
    /// and its collected output must not wait for that.
    pub(super) fn end_poll(&mut self) {
        if self.turn.dirty.is_empty() {
            return;
        }
        let began = *self.began.get_or_insert(self.now);
        if began.plus_millis(TURN) <= self.now || self.turn.dirty.len() > MOST_DIRTY {
            self.flush();
        }
    }

    /// Makes the task of a connection go on, if it has done much behind the others of its thread.
    pub(super) fn go_on(&self, cx: &mut Context<'_>) {
        if self.turn.effort.spent() < MUCH {
            cx.waker().wake_by_ref();
        } else {
            go_on_after_others(cx);
        }
    }

    /// Flushes the turn.
    pub(super) fn flush(&mut self) {
        self.began = None;
        self.turn.flush();
    }
}

/// Wakes the task of `cx` when the thread has looked at its sockets, behind those that have something to do by then.
pub(super) fn go_on_after_others(cx: &mut Context<'_>) {
    let polled = pin!(tokio::task::yield_now()).poll(cx);
    debug_assert!(polled.is_pending(), "it would not be woken");
}

/// Flushes what this thread's turn collected.
pub(super) fn flush_turn() {
    if let Some(mut local) = LOCAL.take() {
        local.work.flush();
        local.put_back();
    }
}

/// Connection that a listener accepted.
pub(super) enum Arrived {
    /// A socket, of TCP or of the Unix family.
    Stream(std::net::TcpStream),
    #[cfg(feature = "quic")]
    Quic(Box<FirstPacket>),
}

/// An accepted socket on its way to its shard.
pub(super) struct IncomingSocket {
    pub(super) stream: Arrived,
    pub(super) peer: Peer,
    pub(super) listener: Arc<ListenerContext>,
    pub(super) permit: ConnectionPermit,
    pub(super) pending: PendingConnection,
}

/// Order to a shard.
enum ShardOrder {
    Serve(IncomingSocket, ShardLoad),
    /// The time of [`wheel::TICK`] has passed: shards have no timers, see [`timers`].
    Tick,
}

/// Handle to a shard: its queue for new sockets, and the number of its connections.
#[derive(Clone)]
pub struct ShardHandle {
    sender: mpsc::Sender<ShardOrder>,
    connections: Arc<AtomicUsize>,
    pulse: Pulse,
}

/// Time at which a shard last did its work of every second, in milliseconds of [`Timestamp`].
#[derive(Clone)]
pub struct Pulse(Arc<AtomicU64>);

impl Pulse {
    fn new() -> Self {
        Self(Arc::new(AtomicU64::new(clock::now().0)))
    }

    /// For how long the shard has not looked; a second is ordinary.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(clock::now().0.saturating_sub(self.0.load(Relaxed)))
    }
}

impl ShardHandle {
    /// Returns the shard's pulse, which shows whether the shard goes on.
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }

    /// Connections of this shard now.
    pub(super) fn load(&self) -> usize {
        self.connections.load(Relaxed)
    }

    pub(super) async fn send(&self, incoming: IncomingSocket) {
        // An error means that the shard has ended: the socket is closed by dropping it.
        let _ = self.sender.send(ShardOrder::Serve(incoming, ShardLoad::on(&self.connections))).await;
    }
}

/// Tells the shards of the time that passes, for keep alive. Runs for ever; without it nobody is found silent.
pub async fn tick_shards(shards: Vec<ShardHandle>) {
    let mut ticks = tokio::time::interval(wheel::TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        for shard in &shards {
            // A full queue: the shard is behind, and will look at the next tick.
            let _ = shard.sender.try_send(ShardOrder::Tick);
        }
    }
}

/// Starts `count` shard threads. They end at [`NetShared::end`], or when every handle is dropped and their connections have
/// ended.
pub fn start_shards(
    count: usize,
    shared: &Arc<NetShared>,
) -> io::Result<(Vec<ShardHandle>, Vec<JoinHandle<()>>)> {
    let mut handles = Vec::with_capacity(count);
    let mut threads = Vec::with_capacity(count);
    let timers = TimerRuntime::start()?;
    for index in 0..count {
        let (sender, receiver) = mpsc::channel(HANDOVER);
        let connections = Arc::new(AtomicUsize::new(0));
        let pulse = Pulse::new();
        handles.push(ShardHandle { sender, connections: Arc::clone(&connections), pulse: pulse.clone() });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .event_interval(POLLS_PER_LOOK)
            .on_thread_park(flush_turn)
            .build()?;
        let (shared, timers) = (Arc::clone(shared), timers.clone());
        let thread = std::thread::Builder::new().name(format!("shard-{index}")).spawn(move || {
            timers.serve_this_thread();
            runtime.block_on(async {
                tokio::select! {
                    () = shared.until_ended() => {}
                    () = run(receiver, Arc::clone(&shared), connections, pulse) => {}
                }
            });
            // Connections that are dropped with their runtime may have timers.
            drop(runtime);
            drop(timers);
        })?;
        threads.push(thread);
    }
    Ok((handles, threads))
}

async fn run(
    mut orders: mpsc::Receiver<ShardOrder>,
    shared: Arc<NetShared>,
    connections: Arc<AtomicUsize>,
    pulse: Pulse,
) {
    let mut ticks: u32 = 0;
    while let Some(order) = orders.recv().await {
        match order {
            ShardOrder::Serve(incoming, load) => {
                tokio::spawn(Serving::new(incoming, load, &shared));
            }
            ShardOrder::Tick => {
                pulse.0.store(clock::now().0, Relaxed);
                wheel::tick();
                ticks = ticks.wrapping_add(1);
                if ticks.is_multiple_of(wheel::PER_SECOND) {
                    started::tick(shared.limits.packet_timeout.secs());
                    trim_buffers();
                }
            }
        }
    }
    // Returning drops the runtime and with it every connection: not before they have ended by themselves.
    while connections.load(Relaxed) > 0 {
        timers::sleep(wheel::TICK).await;
        wheel::tick();
    }
}
