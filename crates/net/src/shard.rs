//! Shards: one OS thread each, with a current-thread runtime.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use gateway_core::clock;
use session::trim_buffers;
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{
    accept::{
        listener::IncomingSocket,
        serving::{Serving, ShardLoad},
    },
    connection::started,
    local::{flush_turn, trim_turn},
    timers::{self, TimerRuntime},
    wheel,
};
use crate::NetShared;

const HANDOVER: usize = 1024;

/// Polls between two looks at the sockets while there is always something to do, Tokio's own number. A connection that has
/// done much and has more to do goes on after such a look (see [`super::local`]), so that these polls are short ones.
const POLLS_PER_LOOK: u32 = 61;

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

/// Time at which a shard last did its work of every second, in milliseconds of [`Timestamp`](gateway_core::Timestamp).
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
                    trim_turn();
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
