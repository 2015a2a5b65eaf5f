//! The end of the parts: each has until the deadline, one after the other in the order in which they need each other.

use std::{future::Future, pin::Pin};

use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// Parts that are to end, in order.
#[derive(Default)]
pub(super) struct Endings(Vec<Ending>);

struct Ending {
    rest: Rest,
    late: Box<dyn FnOnce() + Send>,
}

/// Rest of the work of a part.
enum Rest {
    /// Tasks that end by themselves once they are told to.
    Tasks(JoinSet<()>),
    /// Work that begins when its turn has come.
    Work(Pin<Box<dyn Future<Output = ()> + Send>>),
}

impl Endings {
    /// Waits for `tasks`, which end by themselves once they are told to. At the deadline they are aborted, and `late` says what
    /// that means.
    pub(super) fn wait_for(&mut self, tasks: JoinSet<()>, late: impl FnOnce() + Send + 'static) {
        self.0.push(Ending { rest: Rest::Tasks(tasks), late: Box::new(late) });
    }

    /// The same for one task.
    pub(super) fn run(
        &mut self,
        task: impl Future<Output = ()> + Send + 'static,
        late: impl FnOnce() + Send + 'static,
    ) {
        let mut tasks = JoinSet::new();
        tasks.spawn(task);
        self.wait_for(tasks, late);
    }

    /// Does `work` when its turn has come. At the deadline it is dropped, and `late` says what that means.
    pub(super) fn then(
        &mut self,
        work: impl Future<Output = ()> + Send + 'static,
        late: impl FnOnce() + Send + 'static,
    ) {
        self.0.push(Ending { rest: Rest::Work(Box::pin(work)), late: Box::new(late) });
    }

    /// Ends all. Nothing of them runs on afterwards.
    pub(super) async fn end(self, deadline: Instant) {
        for Ending { rest, late } in self.0 {
            let is_late = match rest {
                Rest::Tasks(mut tasks) => {
                    let ended = timeout_at(deadline, async { while tasks.join_next().await.is_some() {} });
                    let is_late = ended.await.is_err();
                    tasks.shutdown().await;
                    is_late
                }
                Rest::Work(work) => timeout_at(deadline, work).await.is_err(),
            };
            if is_late {
                late();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use parking_lot::Mutex;

    use super::*;

    /// The failures: a part that does not end keeps the others from their end, or runs on after all have ended.
    #[tokio::test(start_paused = true)]
    async fn parts_end_in_order_and_a_late_one_is_left() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let tell = |word: &'static str| {
            let told = Arc::clone(&told);
            move || told.lock().push(word)
        };
        let mut endings = Endings::default();
        endings.run(std::future::ready(()), tell("never late"));
        let (sender, mut held) = tokio::sync::oneshot::channel::<()>();
        let stuck = async move {
            let _held = sender;
            std::future::pending::<()>().await;
        };
        endings.run(stuck, tell("late"));
        let work = tell("work");
        endings.then(async move { work() }, tell("no time was left"));
        let begin = Instant::now();
        endings.end(begin + Duration::from_secs(5)).await;
        assert_eq!(begin.elapsed(), Duration::from_secs(5));
        assert!(
            held.try_recv().is_err_and(|error| error == tokio::sync::oneshot::error::TryRecvError::Closed)
        );
        // At the deadline what takes no time is still done.
        assert_eq!(*told.lock(), ["late", "work"]);
    }
}
