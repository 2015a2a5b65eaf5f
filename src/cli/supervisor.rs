//! Notifications to a service manager, in systemd's way: the gateway is ready, reads its files again, ends, and lives.
//! Started by anything else (no `NOTIFY_SOCKET`), the gateway notifies nobody and nothing runs.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::debug;

/// Beats in the time after which the service manager takes the process for dead.
const BEATS: u32 = 3;

/// Tells that every listener accepts, and that all files of the last reload have been read again.
pub(super) fn ready() {
    tell(&[NotifyState::Ready, NotifyState::Status("Listening")]);
}

/// Files are read again; [`ready`] says when that is done.
pub(super) fn reloading() {
    // `Type=notify-reload` takes it only with the time at which it began.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(_) => tell(&[NotifyState::Reloading]),
    }
}

/// The orderly end has begun.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("Ending connections, writing what waits")]);
}

/// Tells that the process lives, as often as the service manager wants to hear it (`WatchdogSec=`), for as long as nothing in
/// it has stood still for that time: `silence` says for how long something has. Never ends.
pub(super) async fn beat(silence: impl Fn() -> Duration) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut beats = tokio::time::interval(limit / BEATS);
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        beats.tick().await;
        if silence() < limit {
            tell(&[NotifyState::Watchdog]);
        }
    }
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        debug!(%error, "the service manager does not hear");
    }
}
