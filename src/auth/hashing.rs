//! Threads that hash passwords. A hash takes long on purpose, so no shard does it. As many are made at once as there are threads
//! for it; a client that comes while too many wait is told that the server is busy.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use access::passwords::Scratch;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::Denied;

/// A hash to be made, with the memory of the thread that makes it.
type HashJob = Box<dyn FnOnce(&mut Scratch) + Send>;

/// The threads; they end when this is dropped.
pub(super) struct Hashing(SyncSender<HashJob>);

impl Hashing {
    /// Starts the threads, with room for `waiting` jobs that wait; without a thread none is done.
    ///
    /// # Errors
    /// The system allows no more threads.
    pub(super) fn start(threads: usize, waiting: usize) -> io::Result<Self> {
        let (jobs, queue) = sync_channel(waiting);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let queue = Arc::clone(&queue);
            std::thread::Builder::new().name("passwords".to_owned()).spawn(move || work(&queue))?;
        }
        Ok(Self(jobs))
    }

    /// Does `job` on one of the threads. Cancel safe: a job that nobody waits for is left out.
    ///
    /// # Errors
    /// [`Denied::Busy`].
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Scratch) -> T + Send + 'static,
    ) -> Result<T, Denied> {
        let (done, result) = oneshot::channel();
        let job = Box::new(move |scratch: &mut Scratch| {
            if !done.is_closed() {
                let _ = done.send(job(scratch));
            }
        });
        self.0.try_send(job).map_err(|_| Denied::Busy)?;
        result.await.map_err(|_| Denied::Unavailable)
    }
}

/// One thread waits for a job, and the others wait for their turn to do so.
fn work(queue: &Mutex<Receiver<HashJob>>) {
    let mut scratch = Scratch::default();
    loop {
        let next = queue.lock().recv();
        let Ok(job) = next else { return };
        // What a peer sent must not take a thread from all others; who waits for this job is told.
        if catch_unwind(AssertUnwindSafe(|| job(&mut scratch))).is_err() {
            scratch = Scratch::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_more_than_may_wait_is_told_and_who_has_left_is_left_out() {
        let hashing = Arc::new(Hashing::start(1, 2).unwrap());
        let (hold, held) = sync_channel::<()>(0);
        let (begun, begins) = oneshot::channel();
        let first = tokio::spawn({
            let hashing = Arc::clone(&hashing);
            async move {
                let job = move |_: &mut Scratch| {
                    let _ = begun.send(());
                    held.recv().is_ok()
                };
                hashing.run(job).await
            }
        });
        begins.await.unwrap();
        let mut left = Box::pin(hashing.run(|_| panic!("nobody waits for it")));
        assert!(futures_poll(left.as_mut()).await.is_none());
        let mut waits = Box::pin(hashing.run(|_| 7));
        assert!(futures_poll(waits.as_mut()).await.is_none());
        assert_eq!(hashing.run(|_| ()).await, Err(Denied::Busy));
        drop(left);
        hold.send(()).unwrap();
        assert_eq!(first.await.unwrap(), Ok(true));
        assert_eq!(waits.await, Ok(7));
    }

    #[tokio::test]
    async fn a_job_that_panics_takes_no_thread_with_it() {
        let hashing = Hashing::start(1, 2).unwrap();
        assert_eq!(hashing.run(|_| panic!("on purpose")).await, Err::<(), _>(Denied::Unavailable));
        assert_eq!(hashing.run(|_| 1).await, Ok(1));
    }

    /// Polls once.
    async fn futures_poll<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        std::future::poll_fn(|cx| {
            std::task::Poll::Ready(match future.as_mut().poll(cx) {
                std::task::Poll::Ready(output) => Some(output),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }
}
