//! The connection task: reads, hands packets on, writes when only it may, and ends.
//!
//! One type, its methods by subject: the files beside this one name [`Connection`] and each other, and nobody else's rules.

pub(super) mod durable;
pub(super) mod ending;
pub(super) mod fault;
pub(super) mod frames;
mod input;
pub(super) mod limiter;
pub(super) mod lingering;
mod output;
pub(super) mod partial;
pub(super) mod reauthentication;
pub(super) mod relaying;
pub(super) mod replay;
pub(super) mod started;
pub(super) mod unfinished;
#[cfg(test)]
mod work_tests;

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use broker::{Charge, CloseReason};
use gateway_core::{Durability, Timestamp, clock};
use session::Inbound;
use tokio::time::Sleep;

use self::{
    durable::{HeldAnswer, PageRead},
    ending::End,
    fault::PacketFault,
    limiter::Limiter,
    partial::Partial,
    reauthentication::Reauthentication,
    replay::Replays,
    unfinished::Unfinished,
};
use super::{
    NetShared,
    layers::layered::Io,
    local::{PacketWork, ShardLocal},
    timers, wheel,
};
use crate::counters::count;
use auth::{ClientRights, Permissions};
use device::{Device, PAUSED};

/// Reads per poll before other tasks get a turn.
const READS_PER_POLL: usize = 4;
/// State that few connections need.
#[derive(Default)]
pub(crate) struct ConnectionExtras {
    pub(crate) replays: Option<Box<Replays>>,
    /// Remainder of a packet that was too much for one poll.
    pub unfinished: Option<Box<Unfinished>>,
    /// End of the connection once everything that was read is handled.
    ending: Option<End>,
    /// The packet for which it ends.
    fault: Option<Box<PacketFault>>,
    /// Queues of shared groups held more than there was room for.
    pub(crate) group_queues: bool,
    /// Answers that wait for the disk.
    pub held: VecDeque<HeldAnswer>,
    /// More of the session's queue, on its way from the disk.
    pub reading: Option<PageRead>,
    /// Charge of the client's topic aliases to the memory account.
    pub aliases: Option<Charge>,
    /// Reauthentication, possible if CONNECT named a method.
    pub(crate) reauthentication: Option<Box<Reauthentication>>,
    /// Fires when the client's credentials expire.
    expiry: Option<Pin<Box<Sleep>>>,
    limiter: Option<Box<Limiter>>,
    pause: Option<Pin<Box<Sleep>>>,
    /// Until when nothing more is sent.
    sending_pause: Option<Pin<Box<Sleep>>>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl ConnectionExtras {
    pub(crate) fn is_unused(&self) -> bool {
        self.replays.is_none()
            && self.unfinished.is_none()
            && self.ending.is_none()
            && self.fault.is_none()
            && self.held.is_empty()
            && self.reading.is_none()
            && !self.group_queues
            && self.aliases.is_none()
            && self.reauthentication.is_none()
            && self.expiry.is_none()
            && self.limiter.is_none()
            && self.pause.is_none()
            && self.sending_pause.is_none()
            && self.stalled.is_none()
    }
}

/// One connection that owns a session.
pub(crate) struct Connection {
    pub(crate) shared: Arc<NetShared>,
    pub device: Arc<Device>,
    pub epoch: u32,
    pub(crate) inbound: Inbound,
    pub(crate) rights: ClientRights,
    /// Promise of the listener's acknowledgements.
    pub durability: Option<Durability>,
    pub io: Io,
    /// A packet that is not complete yet.
    partial: Partial,
    pub rare: Option<Box<ConnectionExtras>>,
    /// There is something to handle before more is read: `partial` may hold complete frames, or a packet is unfinished.
    pub unread: bool,
    /// The peer may not read its answers: look before reading on.
    backlogged: bool,
    /// So many answers wait for the disk that reading pauses.
    choked: bool,
    pub finished: bool,
}

impl Connection {
    #[expect(clippy::too_many_arguments, reason = "one call site, all different types")]
    pub(crate) fn new(
        shared: &Arc<NetShared>,
        device: Arc<Device>,
        epoch: u32,
        io: Io,
        inbound: Inbound,
        permissions: Permissions,
        durability: Option<Durability>,
        early: Vec<u8>,
        limiter: Option<Box<Limiter>>,
    ) -> Self {
        let rare = limiter.map(|limiter| {
            Box::new(ConnectionExtras { limiter: Some(limiter), ..ConnectionExtras::default() })
        });
        Self {
            shared: Arc::clone(shared),
            device,
            epoch,
            inbound,
            rights: permissions.into(),
            durability,
            io,
            partial: Partial::of(early),
            rare,
            unread: true,
            backlogged: false,
            choked: false,
            finished: false,
        }
    }

    pub(crate) fn rare(&mut self) -> &mut ConnectionExtras {
        self.rare.get_or_insert_with(Box::default)
    }

    /// A v5 DISCONNECT with `code`; nothing in v3.
    pub(crate) fn disconnect_bytes(&self, code: u8) -> &'static [u8] {
        if self.inbound.protocol().is_v5() { codec::disconnect(code) } else { &[] }
    }

    /// Goes on until the connection ends; the caller then calls [`Self::finish`].
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        let mut local = ShardLocal::take();
        let polled = self.drive(&mut local, cx);
        local.work.end_poll();
        local.put_back();
        match polled {
            Ok(()) => Poll::Pending,
            Err(end) => Poll::Ready(end),
        }
    }

    /// Does what there is to do; `Ok` when something will wake the task for more. In each round first what was begun, then
    /// what is read. It ends when the account of work is spent: others have their turn, and the task goes on behind them.
    fn drive(&mut self, local: &mut ShardLocal, cx: &mut Context<'_>) -> Result<(), End> {
        local.work.turn.effort.renew();
        self.poll_expiry(cx)?;
        self.poll_link(&mut local.work.turn.effort, cx)?;
        for _ in 0..READS_PER_POLL {
            if local.work.turn.effort.is_spent() {
                break;
            }
            self.poll_load(&mut local.work, cx);
            let choked = self.poll_held(&mut local.work, cx)?;
            self.poll_reauthentication(&mut local.work, cx)?;
            self.poll_replays(&mut local.work, cx);
            if !self.may_read(choked, &mut local.work, cx) {
                return Ok(());
            }
            match self.poll_input(local, cx) {
                Poll::Ready(handled) => handled?,
                Poll::Pending => return Ok(()),
            }
            if matches!(self.io, Io::Layered(_)) {
                // Only we can write the answers.
                self.poll_link(&mut local.work.turn.effort, cx)?;
            }
        }
        if local.work.turn.effort.is_spent() {
            count(|c| c.yields.add(1));
        } else {
            local.work.flush();
        }
        local.work.go_on(cx);
        Ok(())
    }

    /// Ends the connection at this time, if nothing else does before.
    pub(crate) fn expire_at(&mut self, at: Timestamp, now: Timestamp) {
        let left = Duration::from_millis(at.0.saturating_sub(now.0));
        self.rare().expiry = Some(Box::pin(timers::sleep(left)));
    }

    fn poll_expiry(&mut self, cx: &mut Context<'_>) -> Result<(), End> {
        let Some(expiry) = self.rare.as_mut().and_then(|rare| rare.expiry.as_mut()) else { return Ok(()) };
        if expiry.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        count(|c| c.evicted_expired.add(1));
        Err(End::Close(CloseReason::NotAuthorized))
    }

    /// Returns whether more may be read; if not, the task is woken as soon as reading may go on. The client's silence
    /// does not count meanwhile.
    fn may_read(&mut self, choked: bool, work: &mut PacketWork, cx: &mut Context<'_>) -> bool {
        if self.poll_paused(cx) || self.poll_asked(cx) {
            return false;
        }
        if choked {
            self.choked = true;
            self.device.heard(self.epoch, PAUSED);
            return false;
        }
        if std::mem::take(&mut self.choked) {
            self.device.heard(self.epoch, wheel::now());
        }
        if self.backlogged {
            let paused = self.is_backlogged(work);
            self.device.heard(self.epoch, if paused { PAUSED } else { wheel::now() });
            return !paused;
        }
        true
    }

    /// Returns whether reading is paused by the client's rate limit.
    fn poll_paused(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(pause) = self.rare.as_mut().and_then(|rare| rare.pause.as_mut()) else { return false };
        if pause.as_mut().poll(cx).is_pending() {
            return true;
        }
        self.rare().pause = None;
        self.device.heard(self.epoch, wheel::now());
        false
    }

    /// Returns whether reading is paused while the user's service is asked about the client's rights.
    fn poll_asked(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.rights.is_asking() {
            return false;
        }
        let waits = self.rights.poll_service(clock::now(), cx).is_pending();
        self.device.heard(self.epoch, if waits { PAUSED } else { wheel::now() });
        waits
    }

    /// Returns whether sending is paused by a rate; the task is woken when the pause is over.
    pub(crate) fn poll_sending_paused(
        rare: &mut Option<Box<ConnectionExtras>>,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(rare) = rare else { return false };
        let Some(pause) = &mut rare.sending_pause else { return false };
        if pause.as_mut().poll(cx).is_pending() {
            return true;
        }
        rare.sending_pause = None;
        false
    }

    /// These whole packets are sent: what follows them waits if there is a rate and they are more than it allows.
    pub(crate) fn note_sending(rare: &mut Option<Box<ConnectionExtras>>, packets: &[u8]) {
        let Some(rare) = rare else { return };
        let Some(limiter) = rare.limiter.as_mut().filter(|limiter| limiter.room().is_some()) else { return };
        let messages = codec::count_publishes(packets);
        if let Some(pause) = limiter.take_output(messages, packets.len(), clock::now()) {
            count(|c| c.sending_paused.add(1));
            rare.sending_pause = Some(Box::pin(timers::sleep(pause.max(Duration::from_millis(1)))));
        }
    }

    fn pause(&mut self, messages: u32, bytes: usize) {
        let Some(rare) = &mut self.rare else { return };
        let Some(limiter) = &mut rare.limiter else { return };
        if let Some(pause) = limiter.take_input(messages, bytes, clock::now()) {
            count(|c| c.rate_limited.add(1));
            rare.pause = Some(Box::pin(timers::sleep(pause.max(Duration::from_millis(1)))));
            self.device.heard(self.epoch, PAUSED);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.finish(End::Failed);
    }
}
