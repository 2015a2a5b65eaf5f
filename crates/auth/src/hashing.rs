//! Threads that hash passwords and check signatures. A hash takes long on purpose, so no shard does it. As many are
//! made at once as there are threads for it; the others wait for their turn, by the rank of the client, its network and
//! its address. No more may wait than are done before their clients give up: beyond that, a client of the address that
//! holds most is told that the server is busy.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use access::passwords::Scratch;
use broker::Account;
use edge::door::SourceAddress;
use parking_lot::{Condvar, Mutex};
use tokio::{sync::oneshot, time::Instant};

use super::{
    Denied,
    login_queue::{LoginClient, LoginQueue, LoginTicket},
};
use crate::counters::count;

/// Time that a job is supposed to take before any was done: a hash of argon2id as made here takes about as long.
const FIRST_GUESS: Duration = Duration::from_millis(25);
/// Part of a client's patience that may pass before its job begins, in quarters.
const QUARTERS: u32 = 3;

/// A job, with the memory of the thread that does it; with none it is displaced.
type HashJob = Box<dyn FnOnce(Option<&mut Scratch>) + Send>;

/// The threads; they end when this is dropped.
pub(super) struct Hashing(Arc<HashingShared>);

struct HashingShared {
    bounds: HashBounds,
    queue: Mutex<HashQueue>,
    /// There is a job, or the end.
    ready: Condvar,
}

/// Bounds of the queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct HashBounds {
    /// Threads; without one no job is ever done.
    pub(super) threads: usize,
    /// Jobs that may wait, however fast they are done.
    pub(super) waiting: usize,
    /// After so long a client no longer waits.
    pub(super) patience: Duration,
}

struct HashQueue {
    jobs: LoginQueue<HashJob>,
    /// Time that a job takes, averaged over the last ones.
    mean: Duration,
    is_closed: bool,
}

impl Hashing {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system allows no more threads.
    pub(super) fn start(bounds: HashBounds) -> io::Result<Self> {
        let queue = HashQueue { jobs: LoginQueue::new(), mean: FIRST_GUESS, is_closed: false };
        let this = Self(Arc::new(HashingShared { bounds, queue: Mutex::new(queue), ready: Condvar::new() }));
        for _ in 0..bounds.threads {
            let shared = Arc::clone(&this.0);
            std::thread::Builder::new().name("passwords".to_owned()).spawn(move || work(&shared))?;
        }
        Ok(this)
    }

    /// Names a client by its address and the user name that it claims.
    pub(super) fn login_client(&self, address: Option<SourceAddress>, user: Option<&str>) -> LoginClient {
        self.0.queue.lock().jobs.login_client(address, user)
    }

    /// Remembers what became of a login: it decides whose jobs are done first.
    pub(super) fn told(&self, login_client: LoginClient, good: bool) {
        self.0.queue.lock().jobs.told(login_client, good);
    }

    /// Charges what is remembered of logins to this account from now on; before that nothing is.
    pub(super) fn charge_to(&self, account: &Arc<Account>) {
        self.0.queue.lock().jobs.charge_to(account);
    }

    /// Does `job` on one of the threads when it is its turn. Cancel safe: a job that nobody waits for is taken out at once.
    ///
    /// # Errors
    /// [`Denied::Busy`], if too many wait; [`Denied::Unavailable`], if the job has panicked.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        login_client: LoginClient,
        job: impl FnOnce(&mut Scratch) -> T + Send + 'static,
    ) -> Result<T, Denied> {
        let (done, result) = oneshot::channel();
        let job = Box::new(move |scratch: Option<&mut Scratch>| {
            let _ = done.send(scratch.map(job).ok_or(Denied::Busy));
        });
        let _waits = HashWait { shared: &self.0, ticket: self.0.push(login_client, job) };
        result.await.unwrap_or(Err(Denied::Unavailable))
    }
}

impl Drop for Hashing {
    fn drop(&mut self) {
        self.0.queue.lock().is_closed = true;
        self.0.ready.notify_all();
    }
}

impl HashingShared {
    /// Lets a job wait, and displaces others, or this one, until no more wait than may.
    fn push(&self, login_client: LoginClient, job: HashJob) -> LoginTicket {
        let mut queue = self.queue.lock();
        let most = self.bounds.most(queue.mean);
        let (ticket, displaced) = queue.jobs.push(login_client, job, most);
        drop(queue);
        self.ready.notify_one();
        for job in displaced {
            count(|c| c.checks_displaced.add(1));
            job(None);
        }
        ticket
    }

    fn next(&self) -> Option<HashJob> {
        let mut queue = self.queue.lock();
        loop {
            if queue.is_closed {
                return None;
            }
            if let Some(job) = queue.jobs.pop() {
                return Some(job);
            }
            self.ready.wait(&mut queue);
        }
    }

    fn took(&self, time: Duration) {
        let mean = &mut self.queue.lock().mean;
        *mean = (*mean * 7 + time) / 8;
    }
}

impl HashBounds {
    /// Number of jobs that may wait while each takes `mean`: no more than are done before their clients give up.
    fn most(&self, mean: Duration) -> usize {
        let time = self.patience * QUARTERS / 4;
        let each = mean.as_nanos().max(1);
        let most = (time.as_nanos() / each).saturating_mul(self.threads.max(1) as u128);
        self.waiting.min(usize::try_from(most).unwrap_or(usize::MAX)).max(1)
    }
}

/// A job with a client that waits for the result.
struct HashWait<'a> {
    shared: &'a HashingShared,
    ticket: LoginTicket,
}

impl Drop for HashWait<'_> {
    fn drop(&mut self) {
        let left = self.shared.queue.lock().jobs.remove(self.ticket);
        if left.is_some() {
            count(|c| c.checks_abandoned.add(1));
        }
        // The job holds the peer's credentials.
        drop(left);
    }
}

fn work(shared: &HashingShared) {
    gateway_core::give_way();
    let mut scratch = Scratch::default();
    while let Some(job) = shared.next() {
        let began = Instant::now();
        // A peer's data must not take a thread from all others. The client that waits for this job is told.
        if catch_unwind(AssertUnwindSafe(|| job(Some(&mut scratch)))).is_err() {
            scratch = Scratch::default();
        }
        shared.took(began.elapsed());
        count(|c| c.checks_done.add(1));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::SocketAddr,
        pin::Pin,
        sync::mpsc::{SyncSender, sync_channel},
    };

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn hashing(threads: usize, waiting: usize) -> Arc<Hashing> {
        Arc::new(Hashing::start(HashBounds { threads, waiting, patience: PATIENCE }).unwrap())
    }

    fn login_client(hashing: &Hashing, ip: &str, user: &str) -> LoginClient {
        hashing.login_client(Some(SocketAddr::new(ip.parse().unwrap(), 1).into()), Some(user))
    }

    fn nobody(hashing: &Hashing) -> LoginClient {
        hashing.login_client(None, None)
    }

    /// Keeps the only thread until something is sent.
    async fn hold(hashing: &Arc<Hashing>) -> (SyncSender<()>, tokio::task::JoinHandle<Result<bool, Denied>>) {
        let (hold, held) = sync_channel::<()>(0);
        let (begun, begins) = oneshot::channel();
        let first = tokio::spawn({
            let hashing = Arc::clone(hashing);
            async move {
                let job = move |_: &mut Scratch| {
                    let _ = begun.send(());
                    held.recv().is_ok()
                };
                hashing.run(nobody(&hashing), job).await
            }
        });
        begins.await.unwrap();
        (hold, first)
    }

    #[tokio::test]
    async fn one_more_than_may_wait_is_told_and_who_has_left_is_left_out() {
        let hashing = hashing(1, 2);
        let (hold, first) = hold(&hashing).await;
        let me = nobody(&hashing);
        let mut left = Box::pin(hashing.run(me, |_| panic!("nobody waits for it")));
        assert!(futures_poll(left.as_mut()).await.is_none());
        let mut waits = Box::pin(hashing.run(me, |_| 7));
        assert!(futures_poll(waits.as_mut()).await.is_none());
        assert_eq!(hashing.run(me, |_| ()).await, Err(Denied::Busy));
        drop(left);
        assert_eq!(hashing.0.queue.lock().jobs.len(), 1, "what it would have needed is not kept");
        let mut again = Box::pin(hashing.run(me, |_| 8));
        assert!(futures_poll(again.as_mut()).await.is_none(), "there is room");
        hold.send(()).unwrap();
        assert_eq!(first.await.unwrap(), Ok(true));
        assert_eq!((waits.await, again.await), (Ok(7), Ok(8)));
    }

    #[tokio::test]
    async fn a_job_that_panics_takes_no_thread_with_it() {
        let hashing = hashing(1, 2);
        let me = nobody(&hashing);
        assert_eq!(hashing.run(me, |_| panic!("on purpose")).await, Err::<(), _>(Denied::Unavailable));
        assert_eq!(hashing.run(me, |_| 1).await, Ok(1));
    }

    /// Twenty addresses with many logins each would keep another one waiting for all of theirs.
    #[tokio::test]
    async fn a_login_waits_for_one_of_each_network_not_for_all_before_it() {
        let hashing = hashing(1, 2_000);
        let (hold, first) = hold(&hashing).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let (mut waiting, mut refused) = (Vec::new(), 0);
        let logins = (0..400).map(|n| (format!("192.0.2.{}", n % 20), "guess"));
        for (ip, user) in logins.chain([("198.51.100.1".to_owned(), "right")]) {
            let (login_client, order) = (login_client(&hashing, &ip, user), Arc::clone(&order));
            let mut running = Box::pin(hashing.run(login_client, move |_| order.lock().push(ip)));
            match futures_poll(running.as_mut()).await {
                None => waiting.push(running),
                Some(told) => {
                    assert_eq!(told, Err(Denied::Busy));
                    refused += 1;
                }
            }
        }
        hold.send(()).unwrap();
        assert_eq!(first.await.unwrap(), Ok(true));
        for running in waiting {
            refused += usize::from(running.await == Err(Denied::Busy));
        }
        let order = order.lock();
        let place = order.iter().position(|ip| ip == "198.51.100.1").expect("it was done");
        assert!(place <= 1, "after {place} others");
        // A quarter of ten seconds is left for all else: at 25 ms each, no more than these are done in time.
        assert_eq!((order.len(), refused), (300, 101));
    }

    #[tokio::test]
    async fn no_more_wait_than_are_done_before_their_clients_give_up() {
        let bounds = HashBounds { threads: 2, waiting: 1_000, patience: PATIENCE };
        assert_eq!(bounds.most(Duration::from_millis(20)), 750);
        assert_eq!(bounds.most(Duration::from_micros(100)), 1_000, "no more than is configured");
        assert_eq!(bounds.most(Duration::from_mins(1)), 1);
        let hashing = hashing(1, 1_000);
        for _ in 0..50 {
            hashing.0.took(Duration::from_secs(1));
        }
        let mean = hashing.0.queue.lock().mean;
        assert!(mean > Duration::from_millis(900), "{mean:?}");
    }

    /// Polls once.
    async fn futures_poll<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
        std::future::poll_fn(|cx| {
            std::task::Poll::Ready(match future.as_mut().poll(cx) {
                std::task::Poll::Ready(output) => Some(output),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }
}
