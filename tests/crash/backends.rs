//! Backends beside the devices of a world: a member of a consumer group, commands, shadows, and messages with idempotency keys. Each
//! notes what it was told; what it was told has to hold at whichever gateway serves later.

mod commands;
mod device;
mod group;
mod shadows;
mod way;

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::Mutex;

use self::{commands::Commands, device::Device, group::Group, shadows::Shadow, way::Way};
use super::{
    clock,
    history::{Event, Msg, Record},
};

/// Nanoseconds in which everything must be settled once all are answered again.
const SETTLE: u64 = 120_000_000_000;
const DEVICES: usize = 2;
const SHADOWS: usize = 3;

/// Facts that the parts share.
#[derive(Default)]
struct Shared {
    /// Nothing new is begun.
    ending: AtomicBool,
    /// Messages with keys are published no more.
    published: AtomicBool,
    /// Nobody goes on.
    stopping: AtomicBool,
    problems: Mutex<Vec<String>>,
}

impl Shared {
    fn is_ending(&self) -> bool {
        self.ending.load(SeqCst)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(SeqCst)
    }

    fn problem(&self, text: String) {
        self.problems.lock().push(text);
    }
}

/// See the module.
pub(crate) struct Backends {
    shared: Arc<Shared>,
    addresses: [SocketAddr; 2],
    devices: Vec<Device>,
    group: JoinHandle<Group>,
    commands: JoinHandle<Commands>,
    shadows: JoinHandle<Vec<Shadow>>,
}

/// Figures, so that an empty run is not taken for a good one.
pub(crate) struct BackendFigures {
    pub(crate) delivered: usize,
    pub(crate) redelivered: usize,
    pub(crate) settled: usize,
    pub(crate) keyed: usize,
    pub(crate) commands: usize,
    pub(crate) replied: usize,
    pub(crate) updates: u64,
}

impl fmt::Display for BackendFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { delivered, redelivered, settled, keyed, commands, replied, updates } = self;
        write!(
            f,
            "group: {delivered} deliveries, {redelivered} of them again, {settled} settled, {keyed} keys; \
             {commands} commands, {replied} replied; {updates} updates of shadows"
        )
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Runs a part in a thread of its own.
fn spawn<T: Send + 'static>(
    run: impl FnOnce(&tokio::runtime::Runtime) -> T + Send + 'static,
) -> JoinHandle<T> {
    thread::spawn(move || run(&runtime()))
}

impl Backends {
    /// Makes the group, and begins. `port` is that of the balancer for devices. Blocks until a gateway serves.
    pub(crate) fn start(addresses: [SocketAddr; 2], port: u16) -> Self {
        let shared = Arc::new(Shared::default());
        runtime().block_on(async { group::create(&mut Way::new(addresses)).await });
        let devices: Vec<Device> = (0..DEVICES).map(|number| Device::start(number, port, &shared)).collect();
        let given = devices.iter().map(Device::given).collect();
        let [a, b, c] = [0; 3].map(|_| Arc::clone(&shared));
        let group = spawn(move |runtime| runtime.block_on(group::run(a, addresses)));
        let commands = spawn(move |runtime| runtime.block_on(commands::run(b, addresses, given)));
        let shadows = spawn(move |runtime| runtime.block_on(shadows::run(c, addresses, SHADOWS)));
        Self { shared, addresses, devices, group, commands, shadows }
    }

    /// Ends them, and returns what was wrong. `history` is that of the devices, which are all answered by now.
    pub(crate) fn finish(self, history: &[Record]) -> (Vec<String>, BackendFigures) {
        let Self { shared, addresses, devices, group, commands, shadows } = self;
        let published = acknowledged(history);
        let runtime = runtime();
        let mut way = runtime.block_on(async { Way::new(addresses) });
        let deadline = clock::now() + SETTLE;
        shared.ending.store(true, SeqCst);
        let mut commands = commands.join().expect("the backend of commands");
        let shadows = shadows.join().expect("the backend of shadows");
        while !shared.published.load(SeqCst) {
            thread::sleep(Duration::from_millis(10));
        }
        // The member goes on until it has everything, and devices until every command has ended.
        let left = runtime.block_on(group::until_settled(&mut way, deadline));
        if left > 0 {
            shared.problem(format!("{left} messages of the group are not settled"));
        }
        runtime.block_on(commands.judge(&mut way, deadline));
        shared.stopping.store(true, SeqCst);
        let group = group.join().expect("the member of the group");
        for shadow in &shadows {
            runtime.block_on(shadow.judge(&mut way, &shared));
        }
        for device in devices {
            device.join();
        }
        group.judge(&published, &shared);
        let figures = BackendFigures {
            delivered: group.delivered,
            redelivered: group.redelivered,
            settled: group.settled.len(),
            keyed: group.keyed_count(),
            commands: commands.started(),
            replied: commands.replied,
            updates: shadows.iter().map(|shadow| shadow.updates).sum(),
        };
        let problems = std::mem::take(&mut *shared.problems.lock());
        (problems, figures)
    }
}

/// Messages that were acknowledged, by their publishers' histories.
fn acknowledged(history: &[Record]) -> Vec<Msg> {
    let mut waiting = std::collections::HashMap::new();
    let mut acknowledged = Vec::new();
    for record in history {
        match &record.event {
            Event::Publish { packet_id, msg } => {
                drop(waiting.insert((record.client, *packet_id), msg.clone()))
            }
            Event::Acked { packet_id } => acknowledged.extend(waiting.remove(&(record.client, *packet_id))),
            _ => {}
        }
    }
    acknowledged
}
