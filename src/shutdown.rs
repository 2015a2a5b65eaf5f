//! The end of the process: stages that every part can wait for, and the signals that start them. A leaf.

use std::{io, pin::pin, sync::Arc, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use tracing::{error, info, warn};

/// How far the end has come. Only ever grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Serving.
    #[default]
    Running,
    /// Not ready, no new connections; those that are open are being ended.
    Draining,
    /// Connections are gone; what is left flushes and ends now.
    Stopping,
}

/// A cheap-clone handle on the stage of the process.
#[derive(Debug, Clone)]
pub struct Shutdown(Arc<watch::Sender<Stage>>);

impl Shutdown {
    /// Running.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Stage::Running)))
    }

    /// Starts the end: [`Stage::Draining`]. False if it had started.
    pub fn trigger(&self) -> bool {
        self.advance(Stage::Draining)
    }

    /// Goes on to `stage`; false if it was there or beyond.
    pub fn advance(&self, stage: Stage) -> bool {
        self.0.send_if_modified(|current| {
            let further = stage > *current;
            if further {
                *current = stage;
            }
            further
        })
    }

    /// The stage now.
    pub fn stage(&self) -> Stage {
        *self.0.borrow()
    }

    /// Whether the end has started.
    pub fn is_draining(&self) -> bool {
        self.stage() >= Stage::Draining
    }

    /// Waits for the end to start. Cancel safe.
    pub async fn wait(&self) {
        self.reached(Stage::Draining).await;
    }

    /// Waits for `stage` or a later one. Cancel safe.
    pub async fn reached(&self, stage: Stage) {
        // The sender lives in self: the channel cannot close meanwhile.
        let _ = self.0.subscribe().wait_for(|current| *current >= stage).await;
    }

    /// For parts that watch the stage themselves.
    pub fn subscribe(&self) -> watch::Receiver<Stage> {
        self.0.subscribe()
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

/// The signals of the process: SIGTERM and SIGINT end it, SIGHUP reloads.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes the signals over; from here on they no longer kill the process. Needs a Tokio runtime.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Runs until the second request to end, or until the end that the first asked for has taken longer than `limit`; then
    /// calls `exit`, which should end the process at once. The first triggers `shutdown`. `reload` runs on every SIGHUP
    /// and may block.
    pub async fn run(
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
    async fn stages_only_grow_and_wake_those_who_wait() {
        let shutdown = Shutdown::new();
        assert!(!shutdown.is_draining());
        let waiting = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { shutdown.wait().await }
        });
        assert!(shutdown.trigger() && !shutdown.trigger());
        waiting.await.unwrap();
        assert!(shutdown.advance(Stage::Stopping) && !shutdown.advance(Stage::Draining));
        shutdown.reached(Stage::Stopping).await;
        assert_eq!(shutdown.stage(), Stage::Stopping);
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
        assert!(!shutdown.is_draining());
        kill("TERM");
        shutdown.wait().await;
        assert_eq!(exits.load(SeqCst), 0);
        kill("INT");
        task.await.unwrap();
        assert_eq!((reloads.load(SeqCst), exits.load(SeqCst)), (1, 1));
    }
}
