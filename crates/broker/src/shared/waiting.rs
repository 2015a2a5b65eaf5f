//! The way of messages through a group's queue: in when no member takes them, out when members have room, and read back from the
//! disk in between.

use std::sync::{Arc, atomic::Ordering};

use gateway_core::{DropReason, Message, Outcome, QoS, QueueEntry, QueueId, QueueOp, Unit};
use store::{Loaded, QueueSummary, StoreError};

use super::{
    DeliveryContext, QueuedMessage, SharedGroup, SharedMember,
    group::{DRAIN_PER_MESSAGE, is_any_online, nudge},
    queue::SharedQueue,
};
use crate::{
    durable::{Durable, Storage},
    memory::{Account, MemoryKind},
};

/// Messages read from a group's queue.
struct GroupPage {
    /// In order.
    messages: Vec<QueuedMessage>,
    /// Start of the next page.
    next: u64,
    /// This was the last page.
    end: bool,
}

impl SharedGroup {
    /// Restores what an earlier process left in the queue `id`.
    pub(crate) fn restore(&self, id: QueueId, summary: Option<&QueueSummary>) {
        self.stored.store(id.0, Ordering::Release);
        if let Some(QueueSummary { first, next, messages, bytes, .. }) = summary {
            self.change(|queue| queue.restore(*first, *next, *messages, *bytes));
        }
    }

    /// Returns whether messages wait for a member that takes them.
    pub(crate) fn has_queued(&self) -> bool {
        self.queued.load(Ordering::Acquire)
    }

    /// Gives at most `limit` messages of the queue to a member that has come online, or as many as it takes. True if
    /// more is at hand for it. Members are nudged when more has been read from disk.
    pub(crate) fn drain_to(&self, slot: u32, limit: usize, context: &mut DeliveryContext<'_>) -> bool {
        if !self.has_queued() {
            return false;
        }
        let members = Arc::clone(&*self.members.read());
        self.drain(&members, Some(slot), limit, context);
        self.is_at_hand()
    }

    /// Ends the group: what still waits is dropped, and counted as such.
    pub(crate) fn close(&self, Storage { account, durable }: Storage<'_>) {
        let (messages, bytes) = self.change(SharedQueue::close);
        account.release(MemoryKind::Queued, bytes);
        DropReason::SessionEnded.count(messages as u64);
        let stored = self.stored_queue();
        if let Some(durable) = durable.filter(|_| stored != QueueId::NONE) {
            durable.forget_group(stored);
        }
    }

    /// Takes what was read of its queue, which is `queue`.
    pub(crate) fn read(
        &self,
        queue: QueueId,
        read: Result<Loaded, StoreError>,
        durable: &Durable,
        account: &Account,
    ) {
        match read {
            Ok(loaded) => self.loaded(self.page(queue, loaded, durable), account),
            Err(error) => {
                gateway_core::warn_limited!(group = self.full_name(), %error, "queue cannot be read, trying again");
                durable.stall_reading(self.id);
            }
        }
    }

    fn page(&self, queue: QueueId, loaded: Loaded, durable: &Durable) -> GroupPage {
        let Loaded { entries, next, end, damaged } = loaded;
        if damaged > 0 {
            tracing::error!(
                group = self.full_name(),
                queue = queue.0,
                damaged,
                "messages of this group are damaged and were skipped"
            );
        }
        let waiting = |message, place| QueuedMessage { message, place };
        let entries = durable.allowed(queue, entries).into_iter();
        let messages = entries.filter_map(|entry| Some(waiting(entry.message?, entry.seq)));
        GroupPage { messages: messages.collect(), next, end }
    }

    /// Takes a page that was read of its queue.
    fn loaded(&self, page: GroupPage, account: &Account) {
        let members = Arc::clone(&*self.members.read());
        if is_any_online(&members) {
            let GroupPage { messages, next, end } = page;
            // The page was read because a member has room, so it is charged even beyond the budget.
            self.change(|queue| account.force(MemoryKind::Queued, queue.loaded(messages, next, end)));
            // The last member may have gone meanwhile.
            self.park(account);
        } else {
            self.load_failed(account);
        }
        // All members, also one that has just come or joined.
        self.nudge();
    }

    /// Its queue could not be read, or nobody wants what was read. Another read may follow.
    pub(crate) fn load_failed(&self, account: &Account) {
        self.change(SharedQueue::load_failed);
        self.park(account);
    }

    /// A member has gone. If no other is connected, drops from memory what is also on disk.
    pub(crate) fn park(&self, account: &Account) {
        let stored = self.stored_queue() != QueueId::NONE;
        if stored && self.has_queued() && !is_any_online(&self.members.read()) {
            account.release(MemoryKind::Queued, self.change(SharedQueue::park));
        }
    }

    /// Messages that were on disk only have expired there.
    pub(crate) fn note_expired(&self, messages: usize, bytes: u64) {
        self.change(|queue| queue.note_gone(messages, bytes));
    }

    /// Puts back a message that no member took.
    pub(crate) fn put_back(&self, waiting: QueuedMessage, account: &Account) {
        let cost = waiting.message.cost();
        let closed = self.change(|queue| {
            if !queue.closed {
                account.force(MemoryKind::Queued, cost);
                queue.put_back(waiting);
            }
            queue.closed
        });
        if closed {
            DropReason::SessionEnded.count(1);
        }
    }

    /// Tells all members that there is something in the queue.
    pub(crate) fn nudge(&self) {
        nudge(&self.members.read().clone());
    }

    /// Returns whether a message can be given away without reading it first.
    pub(super) fn is_at_hand(&self) -> bool {
        self.queue.lock().is_at_hand()
    }

    /// Delivers what waits before `message`. True if `message` must be queued behind older messages that are still on
    /// disk. Sets `online` to false if no member is connected.
    pub(super) fn drain_before(
        &self,
        message: &Message<'_>,
        members: &[SharedMember],
        context: &mut DeliveryContext<'_>,
        online: &mut bool,
    ) -> bool {
        if context.durable.is_none() {
            self.drain(members, None, DRAIN_PER_MESSAGE, context);
            return false;
        }
        *online = is_any_online(members);
        if *online {
            self.drain(members, None, DRAIN_PER_MESSAGE, context);
        }
        // Not if the queue is full: it would drop the message, though a member may have room.
        message.qos.min(granted(members)) > QoS::AtMostOnce
            && self.has_queued()
            && !self.queue.lock().is_full(message.cost(), &self.most)
    }

    /// Adds a message after all others. `online` means that members may soon have room for it.
    pub(super) fn enqueue(
        &self,
        message: &Message<'_>,
        members: &[SharedMember],
        online: bool,
        context: &DeliveryContext<'_>,
    ) -> Outcome {
        let qos = message.qos.min(granted(members));
        if qos == QoS::AtMostOnce {
            DropReason::Offline.count(1);
            return Outcome::Dropped(DropReason::Offline);
        }
        let added = match context.durable {
            Some(durable) => self.enqueue_on_disk(message, qos, online, durable, context.account),
            None => self.enqueue_in_memory(message, context.account),
        };
        match added {
            Ok(()) => Outcome::Queued,
            Err(reason) => {
                reason.count(1);
                Outcome::Dropped(reason)
            }
        }
    }

    fn enqueue_in_memory(&self, message: &Message<'_>, account: &Account) -> Result<(), DropReason> {
        // A publisher that waits does not wait for what is queued.
        let kept = message.share().without_receipt();
        let cost = kept.cost();
        self.change(|queue| {
            self.may_add(queue, cost)?;
            if !account.charge(MemoryKind::Queued, queue.in_memory(), cost) {
                return Err(DropReason::Memory);
            }
            queue.keep(kept);
            Ok(())
        })
    }

    /// No member gets QoS 2 before it is on disk. QoS 1 may stay in memory meanwhile if members are about to take it.
    fn enqueue_on_disk(
        &self,
        message: &Message<'_>,
        qos: QoS,
        online: bool,
        durable: &Durable,
        account: &Account,
    ) -> Result<(), DropReason> {
        let cost = message.cost();
        let keeps = online && message.qos == QoS::AtLeastOnce;
        self.change(|queue| {
            self.may_add(queue, cost)?;
            let place = if keeps
                && queue.may_keep(cost)
                && account.charge(MemoryKind::Queued, queue.in_memory(), cost)
            {
                queue.keep(message.share().without_receipt())
            } else {
                let (place, freed) = queue.leave(cost);
                account.release(MemoryKind::Queued, freed);
                place
            };
            let commit = message.commit().cloned();
            let stored = self.make_stored(durable);
            let mut entry = QueueEntry::new(stored, place, Arc::clone(message.share()), qos, commit);
            entry.expires = self.most.until(message.received, message.expires);
            // Submitted under the lock, so that the store sees entries in the order of their places.
            durable.state().submit(QueueOp::Append(Arc::new(entry)));
            Ok(())
        })
    }

    fn may_add(&self, queue: &SharedQueue, cost: usize) -> Result<(), DropReason> {
        if queue.closed {
            return Err(DropReason::SessionEnded);
        }
        if queue.is_full(cost, &self.most) { Err(DropReason::QueueFull) } else { Ok(()) }
    }

    /// Delivers queued messages in order, to the member of `slot` or to any, until one is refused. Starts reading more
    /// from disk.
    pub(super) fn drain(
        &self,
        members: &[SharedMember],
        slot: Option<u32>,
        limit: usize,
        context: &mut DeliveryContext<'_>,
    ) {
        let only = slot.and_then(|slot| members.iter().find(|member| member.slot == slot));
        if let Some(durable) = context.durable.filter(|durable| durable.is_stalled()) {
            // The store would refuse to move them.
            return durable.stall(self.id);
        }
        for _ in 0..limit {
            let Some(waiting) = self.pop(context) else { return };
            let QueuedMessage { message, place } = &waiting;
            let until = self.most.until(message.received, message.expires);
            if until.is_some_and(|at| at <= context.now) {
                DropReason::Expired.count(1);
                self.remove(*place, context);
                continue;
            }
            let mut queued = DeliveryContext { dirty: &mut *context.dirty, ..*context };
            let mut borrowed = message.borrow_at(context.now);
            // From this queue to the member's in one step. Otherwise a crash or a refusal could leave it in neither, or
            // QoS 2 in both.
            borrowed.unit = queued.durable.is_some();
            let unit = queued.durable.map(|durable| Unit::new(&borrowed, durable.state()));
            let outcome = match (slot, only) {
                (Some(_), None) => None,
                (Some(_), Some(member)) => match self.hand(member, &borrowed, false, &mut queued) {
                    // Another may have it: it must not block what this one may have.
                    Outcome::Dropped(DropReason::NotAuthorized) => {
                        self.offer(&borrowed, members, &mut queued)
                    }
                    outcome => Some(outcome),
                },
                (None, _) => self.offer(&borrowed, members, &mut queued),
            };
            match outcome {
                // No retry helps a message that is too large: it must not block the others.
                Some(
                    Outcome::Sent
                    | Outcome::Queued
                    | Outcome::Ignored
                    | Outcome::Dropped(DropReason::TooLarge | DropReason::Expired | DropReason::NotAuthorized),
                ) => {
                    if outcome == Some(Outcome::Dropped(DropReason::NotAuthorized)) {
                        DropReason::NotAuthorized.count(1);
                    }
                    let queue = self.stored_queue();
                    let remove = |unit| QueueOp::Remove { queue, seq: *place, unit: Some(unit) };
                    if !unit.is_some_and(|unit| unit.close(remove)) {
                        self.remove(*place, context);
                    }
                    let commit = borrowed.issued().cloned();
                    drop(borrowed);
                    if let (Some(durable), Some(commit)) = (context.durable, commit) {
                        let id = self.id;
                        let QueuedMessage { message, place } = waiting;
                        durable.watch(&commit, move |answers| answers.take_refused(id, message, place));
                    }
                }
                None | Some(Outcome::Dropped(_)) => {
                    drop(unit);
                    drop(borrowed);
                    self.put_back(waiting, context.account);
                    // Members that were full ask again when they have room.
                    if outcome == Some(Outcome::Dropped(DropReason::QueueFull)) && slot.is_none() {
                        nudge(members);
                    }
                    return;
                }
            }
        }
    }

    /// Removes the message of `place` from the queue on disk.
    fn remove(&self, place: u64, context: &DeliveryContext<'_>) {
        let queue = self.stored_queue();
        if let Some(durable) = context.durable.filter(|_| queue != QueueId::NONE) {
            durable.state().submit(QueueOp::Remove { queue, seq: place, unit: None });
        }
    }

    fn pop(&self, context: &DeliveryContext<'_>) -> Option<QueuedMessage> {
        let (waiting, load) = self.change(|queue| {
            let waiting = queue.pop();
            (waiting, context.durable.zip(queue.begin_load()))
        });
        if let Some(waiting) = &waiting {
            context.account.release(MemoryKind::Queued, waiting.message.cost());
        }
        if let Some((durable, from)) = load {
            durable.read_group(self.id, self.stored_queue(), from);
        }
        waiting
    }

    fn change<T>(&self, change: impl FnOnce(&mut SharedQueue) -> T) -> T {
        let mut queue = self.queue.lock();
        let result = change(&mut queue);
        self.queued.store(!queue.is_empty(), Ordering::Release);
        result
    }
}

/// The highest QoS that a member may get.
fn granted(members: &[SharedMember]) -> QoS {
    members.iter().map(|member| member.options.qos()).max().unwrap_or_default()
}
