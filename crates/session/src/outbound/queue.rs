//! The messages of a session as a whole, in flight or waiting: counted, listed, purged, given to others, and given back when
//! memory is short.

use std::sync::Arc;

use gateway_core::{
    DropReason, QoS, QueueOp, SharedMessage, Tail, Timestamp, Yielded, limits::OverflowPolicy,
};

use super::{Outbound, inflight::InflightStage, receipts::dropped};
use crate::Env;

impl Outbound {
    /// (in flight, waiting, bytes waiting, dropped).
    pub fn sizes(&self) -> (usize, usize, usize, u64) {
        self.rare.as_ref().map_or((0, 0, 0, 0), |rare| {
            let tail = rare.backlog.as_ref().map(|backlog| &backlog.tail);
            let (on_disk, bytes) = tail.map_or((0, 0), |tail| (tail.messages(), tail.bytes()));
            let bytes = rare.pending.bytes() + usize::try_from(bytes).unwrap_or(usize::MAX);
            (rare.inflight.len(), rare.pending.len() + on_disk, bytes, rare.dropped)
        })
    }

    /// Returns messages in memory for the client, those in flight first, from the index `from` on and at most `most`:
    /// each with its QoS and whether it is in flight. Also returns the first place of the messages on disk, if there
    /// are more.
    #[expect(clippy::type_complexity, reason = "one caller, which names the parts")]
    pub fn queued(&self, from: usize, most: usize) -> (Vec<(Arc<SharedMessage>, QoS, bool)>, Option<u64>) {
        let Some(rare) = &self.rare else { return (Vec::new(), None) };
        let inflight = rare.inflight.messages().map(|delivery| (delivery, true));
        let sent: Vec<_> = inflight.skip(from).take(most).collect();
        let first = from.saturating_sub(rare.inflight.messages().count());
        let waiting = rare.pending.skip(first).map(|delivery| (delivery, false));
        let listed = sent.into_iter().chain(waiting).take(most);
        let listed = listed.map(|(delivery, sent)| (Arc::clone(&delivery.message), delivery.qos, sent));
        let tail = rare.backlog.as_ref().map(|backlog| &backlog.tail).filter(|tail| !tail.is_empty());
        (listed.collect(), tail.map(Tail::from))
    }

    /// Messages dropped since the session began.
    pub fn dropped(&self) -> u64 {
        self.rare.as_ref().map_or(0, |rare| rare.dropped)
    }

    /// Notes that `messages` QoS 0 messages were lost with the connection.
    pub fn note_lost(&mut self, messages: u64) {
        if messages > 0 {
            DropReason::ConnectionLost.count(messages);
            self.rare().dropped += messages;
        }
    }

    /// Returns whether the last offer was dropped because the queue is full and the policy is to end the connection;
    /// the next call returns false.
    pub fn take_overflow(&mut self) -> bool {
        self.rare.as_mut().is_some_and(|rare| std::mem::take(&mut rare.overflowed))
    }

    /// Tells whoever waits for a message that is in memory and has expired, before the window has room again and it is dropped.
    /// Returns how many deliveries were looked at: each once in its life.
    pub fn tell_expired(&mut self, now: Timestamp) -> usize {
        let Some(rare) = self.rare.as_mut() else { return 0 };
        rare.pending.tell_expired(now, |delivery| dropped(delivery.receipt(), DropReason::Expired))
    }

    /// Drops all that waits for the client, in memory and on disk, and tells whoever waits for it. What is in flight stays, as
    /// the client may have it, and so does what a shared group has queued here, which other members may get. Returns about how
    /// many messages that were.
    pub fn purge(&mut self, env: &Env<'_>) -> usize {
        let Some(rare) = self.rare.as_mut() else { return 0 };
        let gone = rare.pending.extract(|delivery| delivery.group == 0);
        let mut messages = gone.len();
        for delivery in gone {
            env.budget.release(delivery.message.cost());
            dropped(delivery.receipt(), DropReason::Purged);
            delivery.on_disk.remove(delivery.place, env);
        }
        if let Some((disk, backlog)) = env.disk.zip(rare.backlog.as_mut())
            && !backlog.tail.is_empty()
        {
            let (from, on_disk) = backlog.purge(env.budget);
            disk.journal.submit(QueueOp::Trim { queue: disk.queue, from, count: usize::MAX });
            messages += on_disk;
        }
        rare.dropped += messages as u64;
        DropReason::Purged.count(messages as u64);
        self.settle(env.budget);
        messages
    }

    /// Returns what a shared group queued here and was not sent yet. It is not reread from disk, even if it stays
    /// there.
    pub fn yield_shared(&mut self, env: &Env<'_>) -> Vec<Yielded> {
        let Some(rare) = &mut self.rare else { return Vec::new() };
        let taken = rare.pending.extract(|delivery| delivery.group != 0);
        let yielded: Vec<_> = taken
            .into_iter()
            .map(|delivery| {
                env.budget.release(delivery.message.cost());
                let place = delivery.place;
                delivery.into_shared(place)
            })
            .collect();
        self.offload(env);
        if let Some(backlog) = self.rare.as_mut().and_then(|rare| rare.backlog.as_mut()) {
            backlog.give(yielded.iter().filter_map(|yielded| yielded.place));
        }
        yielded
    }

    /// The session is over. Returns what a shared group may give to another member: what waits, and QoS 1 in flight,
    /// but never QoS 2 in flight [MQTT-4.8.2-5].
    pub fn end(&mut self, env: &Env<'_>) -> Vec<Yielded> {
        self.detach(&Env { disk: None, ..*env });
        self.ended = true;
        let Some(mut rare) = self.rare.take() else { return Vec::new() };
        let mut shared = Vec::new();
        rare.reservation.settle(0, env.budget);
        if let Some(backlog) = &mut rare.backlog {
            backlog.give_up(env.budget);
        }
        // The caller removes everything on disk at once.
        for (place, entry) in rare.inflight.drain() {
            match entry.stage {
                InflightStage::Publish(delivery)
                    if delivery.group != 0 && delivery.qos == QoS::AtLeastOnce =>
                {
                    shared.push(delivery.into_shared(place));
                }
                InflightStage::Publish(delivery) => {
                    delivery.on_disk.settle();
                    dropped(delivery.receipt(), DropReason::SessionEnded);
                }
                InflightStage::Release(released) => {
                    dropped(released.receipt.as_ref(), DropReason::SessionEnded)
                }
            }
        }
        while let Some(delivery) = rare.pending.pop() {
            env.budget.release(delivery.message.cost());
            if delivery.group != 0 {
                let place = delivery.place;
                shared.push(delivery.into_shared(place));
            } else {
                delivery.on_disk.settle();
                DropReason::SessionEnded.count(1);
                dropped(delivery.receipt(), DropReason::SessionEnded);
            }
        }
        shared
    }

    /// Memory is short. A persistent session drops from memory what is also on disk. Another drops the QoS 0
    /// messages that wait and, if the policy is to drop the oldest, further ones until half of the waiting bytes are gone.
    /// False if that freed nothing.
    pub fn give_back(&mut self, env: &Env<'_>) -> bool {
        let before = self.held();
        self.offload(env);
        if let Some(rare) = self.rare.as_mut().filter(|_| env.disk.is_none()) {
            let most = rare.pending.bytes() / 2;
            let mut gone = rare.pending.extract(|delivery| delivery.qos == QoS::AtMostOnce);
            while rare.pending.bytes() > most && env.limits.overflow == OverflowPolicy::DropOldest {
                gone.extend(rare.pending.pop());
            }
            for delivery in gone {
                env.budget.release(delivery.message.cost());
                rare.note_dropped(DropReason::Memory);
                dropped(delivery.receipt(), DropReason::Memory);
            }
        }
        self.settle(env.budget);
        self.held() < before
    }
}
