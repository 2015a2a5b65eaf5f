//! Timers of connections. A shard's own runtime has none: with a time driver it would look at the clock and the driver's
//! wheel before and after each wait for its sockets, which costs isolated messages 3 to 6 % of their CPU. They run in a
//! small runtime beside the shards, which lives until the last shard has ended.

use std::{
    cell::RefCell,
    future::{Future, poll_fn},
    io,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    time::{Sleep, Timeout},
};

thread_local! {
    /// Runtime of this thread's timers; on a thread that is no shard, the thread's own runtime.
    static TIMERS: RefCell<Option<Handle>> = const { RefCell::new(None) };
}

/// The runtime of the timers. Every shard's thread has a clone; it ends with the last.
#[derive(Clone)]
pub(super) struct TimerRuntime(Arc<Running>);

struct Running {
    handle: Handle,
    runtime: Option<Runtime>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // A start of shards that fails must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl TimerRuntime {
    /// Starts its thread.
    pub(super) fn start() -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("timers").enable_all().build()?;
        Ok(Self(Arc::new(Running { handle: runtime.handle().clone(), runtime: Some(runtime) })))
    }

    /// Makes the timers of the calling thread run here.
    pub(super) fn serve_this_thread(&self) {
        TIMERS.set(Some(self.0.handle.clone()));
    }
}

/// `f` with the runtime of the timers as Tokio's current one.
pub(super) fn within<T>(f: impl FnOnce() -> T) -> T {
    let handle = TIMERS.with_borrow(Clone::clone);
    let _entered = handle.as_ref().map(Handle::enter);
    f()
}

/// As [`tokio::time::sleep`].
pub(super) fn sleep(duration: Duration) -> Sleep {
    within(|| tokio::time::sleep(duration))
}

/// As [`tokio::time::timeout`]; `future` runs in the runtime of the caller.
pub(super) fn timeout<F: Future>(duration: Duration, future: F) -> Timeout<F> {
    within(|| tokio::time::timeout(duration, future))
}

/// Makes and awaits a future that knows nothing of shards: its timers, sockets and tasks are in the runtime of the timers.
pub(super) async fn run_within<F: Future>(make: impl FnOnce() -> F) -> F::Output {
    let mut future = pin!(within(make));
    poll_fn(|cx| within(|| future.as_mut().poll(cx))).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An authenticator may use Tokio as anywhere else; a shard's runtime alone would panic.
    #[test]
    fn a_thread_without_timers_can_wait_and_serve_foreign_futures() {
        let timers = TimerRuntime::start().expect("start");
        let shard = Builder::new_current_thread().enable_io().build().expect("a runtime");
        timers.serve_this_thread();
        shard.block_on(async {
            sleep(Duration::from_millis(1)).await;
            assert!(timeout(Duration::from_millis(1), std::future::pending::<()>()).await.is_err());
            let foreign = run_within(|| async {
                tokio::time::sleep(Duration::from_millis(1)).await;
                tokio::spawn(async { Handle::current().id() }).await
            });
            assert_ne!(foreign.await.expect("the task's runtime"), Handle::current().id());
            let own = timeout(Duration::from_secs(9), async { Handle::current().id() });
            assert_eq!(own.await.expect("in time"), Handle::current().id());
        });
    }
}
