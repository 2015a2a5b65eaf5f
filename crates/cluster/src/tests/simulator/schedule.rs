//! One thread, virtual time, and tasks of processes that are killed, paused and resumed between any two polls.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use ledger::{BoxFuture, twin::Chance};
use parking_lot::Mutex;

use crate::Clock;

/// A task's future.
pub(super) type Work = Pin<Box<dyn Future<Output = ()>>>;

/// Time of the world, and what waits for it.
#[derive(Default)]
pub(super) struct Time {
    now: Duration,
    sleepers: BTreeMap<(Duration, u64), Option<Waker>>,
    next: u64,
}

impl Time {
    /// Goes on to the next time for which something waits.
    fn advance(&mut self) -> bool {
        let Some(((at, _), _)) = self.sleepers.iter().find(|(_, waker)| waker.is_some()) else {
            return false;
        };
        self.now = self.now.max(*at);
        for (_, waker) in self.sleepers.range_mut(..=(self.now, u64::MAX)) {
            waker.take().into_iter().for_each(Waker::wake);
        }
        true
    }
}

/// Clock of a process: it has its own zero and goes a little faster or slower than that of others.
pub(super) struct VirtualClock {
    time: Arc<Mutex<Time>>,
    offset: Duration,
    per_mille: u32,
}

impl VirtualClock {
    pub(super) fn new(time: &Arc<Mutex<Time>>, chance: &mut Chance) -> Self {
        let offset = Duration::from_secs(chance.below(10_000) as u64);
        Self { time: Arc::clone(time), offset, per_mille: 970 + chance.below(61) as u32 }
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        self.time.lock().now * self.per_mille / 1_000 + self.offset
    }

    fn wall(&self) -> u64 {
        self.now().as_micros() as u64
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'_, ()> {
        let mut shared = self.time.lock();
        shared.next += 1;
        let key = (shared.now + time * 1_000 / self.per_mille + Duration::from_micros(1), shared.next);
        shared.sleepers.insert(key, None);
        Box::pin(Sleep { time: Arc::clone(&self.time), key })
    }
}

struct Sleep {
    time: Arc<Mutex<Time>>,
    key: (Duration, u64),
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut time = self.time.lock();
        if time.now >= self.key.0 {
            return Poll::Ready(());
        }
        time.sleepers.insert(self.key, Some(context.waker().clone()));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.time.lock().sleepers.remove(&self.key);
    }
}

/// Waits for another poll, at which its process may be dead.
pub(super) async fn pause() {
    let mut is_polled = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut is_polled, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

struct Task {
    process: usize,
    /// The process ends with it.
    is_main: bool,
    work: Work,
    is_woken: Arc<Flag>,
}

/// Begins tasks of one process.
#[derive(Clone)]
pub(super) struct Spawner {
    process: usize,
    new: Rc<RefCell<Vec<Task>>>,
}

impl Spawner {
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + 'static) {
        self.push(Box::pin(work), false);
    }

    fn push(&self, work: Work, is_main: bool) {
        let is_woken = Arc::new(Flag(AtomicBool::new(true)));
        self.new.borrow_mut().push(Task { process: self.process, is_main, work, is_woken });
    }
}

/// All processes.
#[derive(Default)]
pub(super) struct Schedule {
    pub(super) time: Arc<Mutex<Time>>,
    tasks: Vec<Task>,
    new: Rc<RefCell<Vec<Task>>>,
    /// Processes that live, and whether each is paused.
    processes: BTreeMap<usize, bool>,
    next: usize,
}

impl Schedule {
    /// Begins a process; its end is that of the work.
    pub(super) fn begin(&mut self, work: impl FnOnce(Spawner) -> Work) -> usize {
        let process = self.next;
        self.next += 1;
        let spawner = Spawner { process, new: Rc::clone(&self.new) };
        let work = work(spawner.clone());
        spawner.push(work, true);
        self.tasks.append(&mut self.new.borrow_mut());
        self.processes.insert(process, false);
        process
    }

    /// Processes that live.
    pub(super) fn living(&self) -> impl Iterator<Item = usize> + '_ {
        self.processes.keys().copied()
    }

    pub(super) fn kill(&mut self, process: usize) {
        self.processes.remove(&process);
        let (dead, tasks) =
            std::mem::take(&mut self.tasks).into_iter().partition(|task| task.process == process);
        self.tasks = tasks;
        drop::<Vec<Task>>(dead);
    }

    pub(super) fn set_paused(&mut self, process: usize, is_paused: bool) {
        if let Some(paused) = self.processes.get_mut(&process) {
            *paused = is_paused;
        }
    }

    /// Processes that are paused.
    pub(super) fn paused(&self) -> Vec<usize> {
        self.processes.iter().filter(|(_, is_paused)| **is_paused).map(|(process, _)| *process).collect()
    }

    /// Indices of the tasks that can go on.
    pub(super) fn ready(&self) -> Vec<usize> {
        let can = |task: &Task| task.is_woken.0.load(Relaxed) && !self.processes[&task.process];
        (0..self.tasks.len()).filter(|index| can(&self.tasks[*index])).collect()
    }

    pub(super) fn process_of(&self, task: usize) -> usize {
        self.tasks[task].process
    }

    /// Polls one task.
    pub(super) fn poll(&mut self, index: usize) {
        let task = &mut self.tasks[index];
        task.is_woken.0.store(false, Relaxed);
        let waker = Waker::from(Arc::clone(&task.is_woken));
        if task.work.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            let task = self.tasks.remove(index);
            if task.is_main {
                self.kill(task.process);
            }
        }
        self.tasks.append(&mut self.new.borrow_mut());
        self.tasks.retain(|task| self.processes.contains_key(&task.process));
    }

    /// The time, on a clock that goes right.
    pub(super) fn now(&self) -> Duration {
        self.time.lock().now
    }

    /// Lets time go on to what waits for it.
    pub(super) fn advance(&self) -> bool {
        self.time.lock().advance()
    }
}
