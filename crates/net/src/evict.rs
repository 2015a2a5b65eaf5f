//! Ends connections that may no longer be.

use std::sync::Arc;

use arc_swap::ArcSwap;
use broker::{CloseReason, Session};
use gateway_core::{info_of_peer, log_limits::LineKind};

use super::NetShared;
use crate::counters::count;
use auth::{Connected, ConnectionCheck};

/// Checks that decide whether a connection may stay. Without any, a CONNECT pays one atomic load.
#[derive(Default)]
pub(super) struct ConnectionChecks(ArcSwap<Vec<Arc<dyn ConnectionCheck>>>);

impl ConnectionChecks {
    fn verdict(&self, connected: &Connected<'_>) -> Option<CloseReason> {
        self.0.load().iter().find_map(|connection_check| connection_check.verdict(connected))
    }
}

impl NetShared {
    /// Has `connection_check` asked about every connection that opens from now on. Open connections are asked about by
    /// [`Self::evict`].
    pub fn add_connection_check(&self, connection_check: Arc<dyn ConnectionCheck>) {
        self.connection_checks.0.rcu(|connection_checks| {
            [connection_checks.as_slice(), &[Arc::clone(&connection_check)]].concat()
        });
    }

    /// Ends each connection that a check does not let stay; returns their number. To be called when a check has changed
    /// its mind. Cancel safe: then some may be left.
    pub async fn evict(&self) -> usize {
        self.evict_if(|connected| self.connection_checks.verdict(connected)).await
    }

    /// Ends each connection for which `verdict` has a reason, and which was open when this was called; returns their
    /// number. Goes in steps, off the shards. Cancel safe: then some may be left.
    pub(crate) async fn evict_if(
        &self,
        verdict: impl Fn(&Connected<'_>) -> Option<CloseReason> + Send,
    ) -> usize {
        let (mut evicted, mut next) = (0, Some(1));
        while let Some(from) = next {
            next = self.broker.online_step(from, |session, epoch| {
                evicted += usize::from(evict_one(&*session, epoch, &verdict));
            });
            tokio::task::yield_now().await;
        }
        evicted
    }

    /// Has the judges asked about a connection that has just been opened, and closes it if it may not stay: what they
    /// changed since it was let in did not reach it.
    pub(super) fn check_connection(&self, session: &dyn Session, epoch: u32) {
        if !self.connection_checks.0.load().is_empty() {
            evict_one(session, epoch, |connected| self.connection_checks.verdict(connected));
        }
    }
}

fn evict_one(
    session: &dyn Session,
    epoch: u32,
    verdict: impl Fn(&Connected<'_>) -> Option<CloseReason>,
) -> bool {
    let core = session.core();
    // None once the session is another's, whose own connection is asked about when it opens.
    let Some(info) = core.connection(epoch) else { return false };
    let client_id = core.client_id();
    let Some(reason) = verdict(&Connected { client_id: client_id.as_str(), info: &info }) else {
        return false;
    };
    // Another walk has asked before.
    if !session.close(epoch, reason) {
        return false;
    }
    count(|c| match reason {
        CloseReason::NotAuthorized => c.evicted_not_authorized.add(1),
        CloseReason::Banned => c.evicted_banned.add(1),
        _ => c.evicted_other.add(1),
    });
    let (peer, listener) = (info.peer, info.listener.as_str());
    info_of_peer!(
        LineKind::Evicted, peer.ip(), %peer, %client_id, listener, ?reason,
        "connection ended, it may no longer be"
    );
    true
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;
    use crate::test_util::shared;
    use config::Limits;
    use device::test_util::open_as;

    /// Bans who is called so, once it is in force.
    struct Ban {
        name: &'static str,
        in_force: AtomicBool,
    }

    impl ConnectionCheck for Ban {
        fn verdict(&self, connected: &Connected<'_>) -> Option<CloseReason> {
            let banned = self.in_force.load(Relaxed) && connected.client_id == self.name;
            banned.then_some(CloseReason::Banned)
        }
    }

    #[tokio::test]
    async fn a_judge_ends_those_it_names_of_many_and_nobody_else() {
        let shared = shared(Limits::default());
        let devices: Vec<_> = (0..600).map(|n| open_as(&shared.devices, &format!("c{n}"), true)).collect();
        let connection_check = Arc::new(Ban { name: "c515", in_force: AtomicBool::new(false) });
        shared.add_connection_check(Arc::clone(&connection_check) as _);
        assert_eq!(shared.evict().await, 0);
        connection_check.in_force.store(true, Relaxed);
        assert_eq!(shared.evict().await, 1);
        assert_eq!(shared.evict().await, 0, "it was asked to close before, and is not counted again");
        for (device, epoch) in &devices {
            let asked = device.asked_to_close(*epoch);
            let expected = (device.core().client_id().as_str() == "c515").then_some(CloseReason::Banned);
            assert_eq!(asked, expected, "{}", device.core().client_id());
        }
    }

    /// The failure: a device that was let in just before the change, and is opened just after the walk, stays.
    #[tokio::test]
    async fn a_connection_that_opens_after_the_walk_is_judged_by_itself() {
        let shared = shared(Limits::default());
        let connection_check = Arc::new(Ban { name: "late", in_force: AtomicBool::new(true) });
        shared.add_connection_check(connection_check as _);
        assert_eq!(shared.evict().await, 0);
        let (device, epoch) = open_as(&shared.devices, "late", true);
        shared.check_connection(&*device, epoch);
        assert_eq!(device.asked_to_close(epoch), Some(CloseReason::Banned));
    }
}
