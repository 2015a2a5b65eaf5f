//! The end of the process, which every part can wait for, and the signals that start it. A leaf.

use std::{io, pin::pin, sync::Arc, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use tracing::{error, info, warn};

/// Signal that the process is to end: a cheap-clone handle. Once it is set, it stays so.
#[derive(Debug, Clone)]
pub(crate) struct Shutdown(Arc<watch::Sender<bool>>);

impl Shutdown {
    /// Serving.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Starts the end. False if it had started.
    pub(crate) fn trigger(&self) -> bool {
        !self.0.send_replace(true)
    }

    /// Waits for the end to start. Cancel safe.
    pub(crate) async fn wait(&self) {
        // The sender lives in self: the channel cannot close meanwhile.
        let _ = self.0.subscribe().wait_for(|ending| *ending).await;
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

/// The signals of the process: SIGTERM and SIGINT end it, SIGHUP reloads.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes the signals over; from here on they no longer kill the process. Needs a Tokio runtime.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub(crate) fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Runs until the second request to end, or until the end that the first asked for has taken longer than `limit`; then
    /// calls `exit`, which should end the process at once. The first triggers `shutdown`. `reload` runs on every SIGHUP
    /// and may block.
    pub(crate) async fn run(
        mut self,
        shutdown: Shutdown,
        reload: impl Fn() + Send + Sync + 'static,
        limit: Duration,
        exit: impl FnOnce(),
    ) {
        let reload = Arc::new(reload);
        let mut too_late = pin!(async {
            shutdown.wait().await;
            tokio::time::sleep(limit).await;
        });
        loop {
            let name = tokio::select! {
                () = &mut too_late => {
                    error!(?limit, "the end takes longer than its deadline, ending at once");
                    exit();
                    return;
                }
                _ = self.terminate.recv() => "SIGTERM",
                _ = self.interrupt.recv() => "SIGINT",
                _ = self.hangup.recv() => {
                    info!(signal = "SIGHUP", "reloading");
                    let reload = Arc::clone(&reload);
                    if tokio::task::spawn_blocking(move || reload()).await.is_err() {
                        warn!("reload panicked");
                    }
                    continue;
                }
            };
            if shutdown.trigger() {
                info!(signal = name, "shutting down, a second signal ends at once");
            } else {
                warn!(signal = name, "ending at once");
                exit();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        process::Command,
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
    };

    use super::*;

    #[tokio::test]
    async fn the_end_starts_once_and_wakes_those_who_wait() {
        let shutdown = Shutdown::new();
        let waiting = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { shutdown.wait().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert!(shutdown.trigger() && !shutdown.trigger());
        waiting.await.unwrap();
        shutdown.wait().await;
    }

    async fn until(condition: impl Fn() -> bool) {
        let wait = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap();
    }

    // One test for all signals: they go to the whole process.
    #[tokio::test]
    async fn signals_reload_then_drain_then_exit() {
        let kill = |name: &str| {
            let pid = std::process::id().to_string();
            assert!(
                Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap().success()
            );
        };
        let (reloads, exits) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let shutdown = Shutdown::new();
        let task = tokio::spawn({
            let (reloads, exits) = (Arc::clone(&reloads), Arc::clone(&exits));
            let reload = move || {
                reloads.fetch_add(1, SeqCst);
            };
            let exit = move || {
                exits.fetch_add(1, SeqCst);
            };
            Signals::install().unwrap().run(shutdown.clone(), reload, Duration::from_secs(3_600), exit)
        });
        kill("HUP");
        until(|| reloads.load(SeqCst) == 1).await;
        assert!(!*shutdown.0.borrow(), "a reload is no end");
        kill("TERM");
        shutdown.wait().await;
        assert_eq!(exits.load(SeqCst), 0);
        kill("INT");
        task.await.unwrap();
        assert_eq!((reloads.load(SeqCst), exits.load(SeqCst)), (1, 1));
    }
}
