//! Stored commands: which there are, what is written of them, and who is told.
//!
//! What is on disk when:
//!
//! 1. A command is written before its start is answered, and sent only after that.
//! 2. SENT and DELIVERED are written behind the device's back: a crash may forget them, and the command is sent again.
//! 3. Its end is written before anybody is told: before the call that cancels it is answered, before a watch shows it, and before
//!    a device's reply is acknowledged, also one that comes when the end is being written already. Until then it has not ended,
//!    and if it cannot be written it goes on.
//!
//! Invariants: a command ends once (the `ending` of its `CommandEntry` is taken by the first who ends it); nothing scans all
//! commands: those of a device and those that are due are found by index; no commit is ended under the table's lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use broker::{Account, Charge, MemoryKind, ReservedOutcome, Shortage};
use bytes::Bytes;
use gateway_core::{Commit, CommitRefused, Message, QoS, ReceiptState, Timestamp, clock};
use parking_lot::Mutex;
use store::{RecordChange, RecordKind, RecordStore, StoreError};
use thiserror::Error;
use tokio::{
    sync::{Notify, broadcast, oneshot, watch},
    task::AbortHandle,
};

use super::{
    CommandDigest, NoReply, Spec,
    dispatcher::{answer, correlates},
    ending::CommandEnding,
    machine::{AttemptProgress, CommandState, CommandStep, Machine, Times},
    random, random_id,
    record::CommandRecord,
    table::{CommandChanges, CommandEntry, CommandTable, Writing, cost},
    topics::ReplyAddress,
};
use crate::counters::count;

/// Changes that a watcher may be behind; beyond them it gets the state as it is.
const BEHIND: usize = 32;
/// Commands that have ended which one start forgets at most to make room.
const FORGOTTEN: usize = 1_000;
/// Until an end that could not be written is tried again, in milliseconds.
const AGAIN: u64 = 1_000;

/// Bounds of stored commands.
#[derive(Debug, Clone, Copy)]
pub struct CommandRegistryOptions {
    /// Commands that a session may have and not have acknowledged.
    pub max_outstanding: usize,
    /// The same of one device.
    pub max_outstanding_per_device: usize,
    /// Commands that have not ended.
    pub max_active: usize,
    /// The same of one device.
    pub max_active_per_device: usize,
    /// Bytes of all.
    pub max_bytes: usize,
    /// Time for which ended commands are kept.
    pub keep: Duration,
    /// Ended commands that are kept.
    pub max_kept: usize,
}

/// Reason why a command is not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CommandStartError {
    /// There is one of this id with other content.
    #[error("there is a command of this id with other content")]
    Exists,
    /// By this bound of the configuration.
    #[error("there are too many commands")]
    TooMany(&'static str),
    /// No memory.
    #[error("the memory budget is used up")]
    Memory,
    /// The disk does not take it.
    #[error("the store does not take it")]
    Store,
    /// No random numbers.
    #[error("no random numbers")]
    Random,
}

/// Why a command is not cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CancelError {
    /// There is none.
    #[error("there is no command of this id")]
    NotFound,
    /// The command has ended, in this state.
    #[error("the command has ended")]
    Ended(CommandState),
    /// The disk does not take it.
    #[error("the store does not take it")]
    Store,
}

/// Reason why a command does not end now.
enum NotEnded {
    Unknown,
    Ended(CommandState),
    /// Something of it is being written: asked again after that.
    Busy(Arc<Commit>),
}

/// A command that is due to be sent.
pub(super) struct DueCommand {
    pub(super) number: u64,
    pub(super) id: String,
    pub(super) spec: Spec,
    pub(super) correlation: [u8; super::RANDOM],
    pub(super) expire: Timestamp,
}

/// All stored commands.
pub struct CommandRegistry {
    options: CommandRegistryOptions,
    pub(super) table: Mutex<CommandTable>,
    charge: Mutex<Charge>,
    store: Arc<dyn RecordStore>,
    active: AtomicUsize,
    /// Something is to be done.
    pub(super) changed: Notify,
    /// Nothing is followed any more.
    pub(super) ended: watch::Sender<bool>,
}

fn key(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

fn put(number: u64, record: &CommandRecord) -> RecordChange {
    RecordChange::put(RecordKind::Commands, key(number), record.encode())
}

impl CommandRegistry {
    /// Ends the registry of a home that is another gateway's: nothing is followed, and nothing written any more.
    pub fn give_up(&self) {
        self.ended.send_replace(true);
    }

    /// Reads the commands that earlier processes left in `store`, whatever the limits are now. Blocks on the disk.
    pub fn open(
        options: CommandRegistryOptions,
        store: Arc<dyn RecordStore>,
        account: &Arc<Account>,
    ) -> Result<Arc<Self>, StoreError> {
        let mut table = CommandTable::default();
        let mut charge = Charge::new(account, MemoryKind::Commands);
        let mut damaged = Vec::new();
        let mut active = 0;
        store.restore(RecordKind::Commands, &mut |key, value| {
            let number = <[u8; 8]>::try_from(&key[..]).ok().map(u64::from_be_bytes);
            let Some((number, record)) = number.zip(CommandRecord::decode(&value)) else {
                return damaged.push(key);
            };
            let entry = CommandEntry::new(record, Writing::Nothing);
            charge.force(charge.bytes() + entry.bytes);
            let due = (!entry.record.machine.state.is_final()).then_some(Timestamp(0));
            active += usize::from(due.is_some());
            table.insert(number, entry);
            table.schedule(number, due);
        })?;
        if !damaged.is_empty() {
            tracing::error!(commands = damaged.len(), "stored commands that cannot be read are dropped");
            let remove = |key| RecordChange::remove(RecordKind::Commands, key);
            store.submit(damaged.into_iter().map(remove).collect(), None);
        }
        if active > 0 {
            tracing::info!(active, ended = table.ended.len(), "commands restored");
        }
        Ok(Arc::new(Self {
            options,
            table: Mutex::new(table),
            charge: Mutex::new(charge),
            store,
            active: AtomicUsize::new(active),
            changed: Notify::new(),
            ended: watch::Sender::new(false),
        }))
    }

    /// The same with another bound, as a start with it would have.
    #[cfg(test)]
    pub(super) fn with_less(self: Arc<Self>, max_kept: usize, max_bytes: usize) -> Arc<Self> {
        let mut registry = Arc::into_inner(self).expect("nobody else has it");
        registry.options.max_kept = max_kept;
        registry.options.max_bytes = max_bytes;
        Arc::new(registry)
    }

    /// Returns the number of commands that have not ended.
    pub fn active(&self) -> usize {
        self.active.load(SeqCst)
    }

    /// Starts a command, or finds the same one. Answers when it is on disk. A call that is dropped leaves a command that may be
    /// started.
    ///
    /// # Errors
    /// It is not started.
    pub async fn start(
        self: &Arc<Self>,
        id: Option<String>,
        spec: Spec,
        times: Times,
        content: CommandDigest,
    ) -> Result<Arc<CommandRecord>, CommandStartError> {
        let id = match id {
            Some(id) => id,
            None => random_id().map_err(|_: NoReply| CommandStartError::Random)?,
        };
        let correlation = random().map_err(|_| CommandStartError::Random)?;
        let now = clock::now();
        let (number, commit, is_first) = {
            let mut table = self.table.lock();
            if let Some(&number) = table.ids.get(id.as_str()) {
                let entry = &table.commands[&number];
                if entry.record.content != content {
                    return Err(CommandStartError::Exists);
                }
                match &entry.writing {
                    Writing::Start(commit) => (number, Arc::clone(commit), false),
                    _ => return Ok(Arc::new(entry.record.clone())),
                }
            } else {
                let machine = Machine::new(times, spec.qos == QoS::AtMostOnce);
                let record = CommandRecord {
                    id,
                    spec,
                    content,
                    correlation,
                    created: now,
                    updated: now,
                    machine,
                    code: None,
                    reply: None,
                };
                let (number, commit) = self.insert(&mut table, record)?;
                (number, commit, true)
            }
        };
        if is_first {
            count(|c| c.commands_started.add(1));
            let registry = Arc::clone(self);
            commit.then(move |result| registry.started(number, result));
            commit.done();
        }
        commit.wait().await.map_err(|CommitRefused| CommandStartError::Store)?;
        // The callback behind the commit may not have run yet, and the caller must find the command.
        self.started(number, Ok(()));
        let table = self.table.lock();
        let entry = table.commands.get(&number).ok_or(CommandStartError::Store)?;
        Ok(Arc::new(entry.record.clone()))
    }

    fn insert(
        &self,
        table: &mut CommandTable,
        record: CommandRecord,
    ) -> Result<(u64, Arc<Commit>), CommandStartError> {
        let most = &self.options;
        if self.active() >= most.max_active {
            return Err(CommandStartError::TooMany("commands.max_active"));
        }
        let of_device = table.devices.get(&record.spec.device).map_or(0, |device| device.active.len());
        if of_device >= most.max_active_per_device {
            return Err(CommandStartError::TooMany("commands.max_active_per_device"));
        }
        if !self.store.accepts() {
            gateway_core::counters::count(|c| c.refused_store.add(1));
            return Err(CommandStartError::Store);
        }
        let commit = Commit::new();
        let entry = CommandEntry::new(record, Writing::Start(Arc::clone(&commit)));
        {
            let mut charge = self.charge.lock();
            if !self.make_room(table, &mut charge, entry.bytes, most.max_bytes) {
                return Err(CommandStartError::TooMany("commands.max_bytes"));
            }
            let bytes = charge.bytes() + entry.bytes;
            if !charge.set(bytes) {
                broker::counters::count(|c| c.memory_commands.add(1));
                return Err(CommandStartError::Memory);
            }
        }
        let number = table.last + 1;
        self.store.submit(vec![put(number, &entry.record)], Some(commit.part()));
        table.insert(number, entry);
        self.active.fetch_add(1, SeqCst);
        Ok((number, commit))
    }

    /// Makes room for `bytes` more by forgetting commands that have ended; true if all are then at most `most`. After a
    /// start with a lower bound, the excess may be more than one step can forget.
    fn make_room(&self, table: &mut CommandTable, charge: &mut Charge, bytes: usize, most: usize) -> bool {
        let fits = |charge: &Charge| charge.bytes() + bytes <= most;
        for _ in 0..FORGOTTEN {
            let Some(&(_, oldest)) = table.ended.first().filter(|_| !fits(charge)) else { break };
            self.forget(table, charge, oldest);
        }
        fits(charge)
    }

    /// A command has so many bytes now. It has been let in: what is above the bounds is no more than a device may send.
    fn recount(&self, entry: &mut CommandEntry, bytes: usize) {
        let mut charge = self.charge.lock();
        let total = charge.bytes() + bytes - std::mem::replace(&mut entry.bytes, bytes);
        charge.force(total);
    }

    /// Removes a command that has ended, or was never begun.
    fn forget(&self, table: &mut CommandTable, charge: &mut Charge, number: u64) {
        let bytes = table.remove(number);
        let left = charge.bytes().saturating_sub(bytes);
        charge.set(left);
        self.store.submit(vec![RecordChange::remove(RecordKind::Commands, key(number))], None);
    }

    /// The start of a command is on disk, or refused. Told again it does nothing.
    fn started(&self, number: u64, result: Result<(), CommitRefused>) {
        let mut table = self.table.lock();
        let starting = table.commands.get_mut(&number);
        let Some(entry) = starting.filter(|entry| matches!(entry.writing, Writing::Start(_))) else { return };
        match result {
            Ok(()) => {
                entry.writing = Writing::Nothing;
                table.schedule(number, Some(Timestamp(0)));
            }
            Err(CommitRefused) => {
                self.forget(&mut table, &mut self.charge.lock(), number);
                self.active.fetch_sub(1, SeqCst);
            }
        }
        drop(table);
        self.changed.notify_one();
    }

    /// One command.
    pub fn get(&self, id: &str) -> Option<Arc<CommandRecord>> {
        let table = self.table.lock();
        let entry = table.commands.get(table.ids.get(id)?)?;
        (!matches!(entry.writing, Writing::Start(_))).then(|| Arc::new(entry.record.clone()))
    }

    /// The state of a command, and its changes until it ends; no changes if it has.
    pub fn watch(&self, id: &str) -> Option<(Arc<CommandRecord>, Option<CommandChanges>)> {
        let mut table = self.table.lock();
        let number = *table.ids.get(id)?;
        let entry = table.commands.get_mut(&number)?;
        if matches!(entry.writing, Writing::Start(_)) {
            return None;
        }
        let now = Arc::new(entry.record.clone());
        if now.machine.state.is_final() {
            return Some((now, None));
        }
        let watchers = entry.watchers.get_or_insert_with(|| broadcast::Sender::new(BEHIND));
        Some((now, Some(watchers.subscribe())))
    }

    /// Cancels a command; answers when that is on disk. Cancel safe.
    ///
    /// # Errors
    /// It is not cancelled.
    pub async fn cancel(self: &Arc<Self>, id: &str) -> Result<Arc<CommandRecord>, CancelError> {
        let number = *self.table.lock().ids.get(id).ok_or(CancelError::NotFound)?;
        loop {
            let (tell, told) = oneshot::channel();
            let ended = self.end(number, CommandEnding::of(CommandState::Cancelled), move |result| {
                let _ = tell.send(result);
            });
            match ended {
                Ok(()) => {
                    told.await.unwrap_or(Err(CommitRefused)).map_err(|CommitRefused| CancelError::Store)?;
                    return self.get(id).ok_or(CancelError::NotFound);
                }
                Err(NotEnded::Unknown) => return Err(CancelError::NotFound),
                Err(NotEnded::Ended(state)) => return Err(CancelError::Ended(state)),
                Err(NotEnded::Busy(commit)) => {
                    commit.wait().await.map_err(|CommitRefused| CancelError::Store)?;
                    // The callback behind the commit may not have run yet.
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Ends a command: written, then told, then `after`.
    fn end(
        self: &Arc<Self>,
        number: u64,
        ending: CommandEnding,
        after: impl FnOnce(Result<(), CommitRefused>) + Send + 'static,
    ) -> Result<(), NotEnded> {
        let commit = {
            let mut table = self.table.lock();
            let entry = table.commands.get_mut(&number).ok_or(NotEnded::Unknown)?;
            match &entry.writing {
                Writing::Nothing => {}
                Writing::Start(commit) | Writing::End(_, commit) => {
                    return Err(NotEnded::Busy(Arc::clone(commit)));
                }
            }
            if entry.record.machine.state.is_final() {
                return Err(NotEnded::Ended(entry.record.machine.state));
            }
            let ended = ending.apply(&entry.record);
            // Its reply is in memory from now on.
            self.recount(entry, entry.bytes.max(cost(&ended)));
            let commit = Commit::new();
            self.store.submit(vec![put(number, &ended)], Some(commit.part()));
            entry.writing = Writing::End(Box::new(ended), Arc::clone(&commit));
            commit
        };
        let registry = Arc::clone(self);
        commit.then(move |result| {
            registry.settle(number, result);
            after(result);
        });
        commit.done();
        Ok(())
    }

    /// The end of a command is on disk, or refused.
    fn settle(&self, number: u64, result: Result<(), CommitRefused>) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let Some(entry) = table.commands.get_mut(&number) else { return };
        let Writing::End(ended, _) = std::mem::replace(&mut entry.writing, Writing::Nothing) else { return };
        if result.is_err() {
            // The state before is on disk; so it stays in memory.
            self.recount(entry, cost(&entry.record));
            let again = clock::now().plus_millis(AGAIN);
            table.schedule(number, Some(again));
            drop(guard);
            return self.changed.notify_one();
        }
        let was_out = entry.record.machine.is_out();
        let device = Arc::clone(&entry.record.spec.device);
        count(|c| match ended.machine.state {
            CommandState::Replied => c.commands_ended_replied.add(1),
            CommandState::TimedOut => c.commands_ended_timed_out.add(1),
            CommandState::Cancelled => c.commands_ended_cancelled.add(1),
            _ => c.commands_ended_refused.add(1),
        });
        entry.record = *ended;
        self.recount(entry, cost(&entry.record));
        if let Some(follower) = entry.follower.take() {
            follower.abort();
        }
        entry.tell();
        entry.watchers = None;
        let updated = entry.record.updated;
        table.schedule(number, None);
        table.active.remove(&number);
        table.ended.insert((updated, number));
        if was_out {
            table.came_back(&device);
        }
        if let Some(of_device) = table.devices.get_mut(&device) {
            of_device.active.remove(&number);
            of_device.ready.remove(&number);
            if !of_device.ready.is_empty() {
                table.look.insert(device);
            }
        }
        self.active.fetch_sub(1, SeqCst);
        let mut charge = self.charge.lock();
        // One more has ended, so one goes. If the bound is lower than in the process before, [`Self::tick`] removes the surplus.
        if table.ended.len() > self.options.max_kept
            && let Some(&(_, oldest)) = table.ended.first()
        {
            self.forget(table, &mut charge, oldest);
        }
        drop(charge);
        drop(guard);
        self.changed.notify_one();
    }

    /// A device's reply, if it is one to a stored command. Its acknowledgement waits until an end of the command is written,
    /// whoever ends it: if that is refused, so is the reply.
    pub(super) fn take(
        self: &Arc<Self>,
        device: &str,
        address: &ReplyAddress<'_>,
        message: &Message<'_>,
    ) -> Option<ReservedOutcome> {
        loop {
            let (number, ending) = {
                let table = self.table.lock();
                let number = *table.ids.get(address.id)?;
                let entry =
                    table.commands.get(&number).filter(|entry| &*entry.record.spec.device == device)?;
                if matches!(entry.writing, Writing::Start(_)) {
                    return None;
                }
                if entry.record.machine.state.is_final() {
                    count_superfluous(entry.record.machine.state);
                    return Some(ReservedOutcome::Taken);
                }
                if !correlates(address, message, &entry.record.correlation) {
                    count(|c| c.commands_replies_correlation.add(1));
                    return Some(ReservedOutcome::Taken);
                }
                let ending = match &entry.writing {
                    Writing::End(ended, commit) => Some((ended.machine.state, Arc::clone(commit))),
                    _ => None,
                };
                (number, ending)
            };
            if let Some((state, commit)) = ending {
                let part = message.plain_part();
                commit.then(move |result| {
                    if result.is_ok() {
                        count_superfluous(state);
                    }
                    pass(part, result);
                });
                return Some(ReservedOutcome::Taken);
            }
            let reply = answer(address, message);
            if !self.store.accepts() {
                gateway_core::counters::count(|c| c.refused_store.add(1));
                return Some(ReservedOutcome::Refused(Shortage::Store));
            }
            {
                let mut table = self.table.lock();
                let mut charge = self.charge.lock();
                let most = self.options.max_bytes.saturating_mul(2);
                if !self.make_room(&mut table, &mut charge, reply.cost(), most) {
                    broker::counters::count(|c| c.memory_commands.add(1));
                    return Some(ReservedOutcome::Refused(Shortage::Memory));
                }
            }
            let part = message.plain_part();
            let unused = part.clone();
            let ending = CommandEnding { state: CommandState::Replied, code: None, reply: Some(reply) };
            if self.end(number, ending, move |result| pass(part, result)).is_ok() {
                return Some(ReservedOutcome::Taken);
            }
            // Somebody else has begun to end it just now.
            pass(unused, Ok(()));
        }
    }

    /// A device has a connection: what is ready goes out.
    pub(super) fn connected(&self, device: &str) {
        if self.active() == 0 {
            return;
        }
        let mut table = self.table.lock();
        let Some((device, of_device)) = table.devices.get_key_value(device) else { return };
        // Also if none is ready just now: one that found the device without a connection may be on its way back.
        if of_device.active.is_empty() {
            return;
        }
        let device = Arc::clone(device);
        table.look.insert(device);
        drop(table);
        self.changed.notify_one();
    }

    /// Expires commands that are due and finds those that may go out, at most `most`. Returns when to call this again: at once if
    /// there are more.
    pub(super) fn tick(self: &Arc<Self>, now: Timestamp, most: usize) -> Option<Timestamp> {
        let mut over = Vec::new();
        let next = {
            let mut guard = self.table.lock();
            let table = &mut *guard;
            for _ in 0..most {
                let Some(&(_, number)) = table.due.first().filter(|(at, _)| *at <= now) else { break };
                let Some(entry) = table.commands.get_mut(&number) else { break };
                if !matches!(entry.writing, Writing::Nothing) {
                    // Looked at when that is written.
                    table.schedule(number, None);
                    continue;
                }
                match entry.record.machine.step(now) {
                    CommandStep::Expire => {
                        over.push((number, CommandEnding::of(CommandState::TimedOut)));
                        table.schedule(number, None);
                    }
                    CommandStep::Refuse(code) => {
                        over.push((number, CommandEnding::refused(code)));
                        table.schedule(number, None);
                    }
                    CommandStep::Wait(until) => table.schedule(number, Some(until)),
                    CommandStep::Send => {
                        let (device, expire) =
                            (Arc::clone(&entry.record.spec.device), entry.record.machine.times.expire);
                        if let Some(of_device) = table.devices.get_mut(&device) {
                            of_device.ready.insert(number);
                        }
                        table.look.insert(device);
                        table.schedule(number, Some(expire));
                    }
                }
            }
            let mut charge = self.charge.lock();
            let keep = self.options.keep.as_millis() as u64;
            let mut removed = 0;
            let is_over = |table: &CommandTable| table.ended.len() > self.options.max_kept;
            while removed < most
                && let Some(&(ended, number)) = table.ended.first()
                && (ended.plus_millis(keep) <= now || is_over(table))
            {
                self.forget(table, &mut charge, number);
                removed += 1;
            }
            let due = table.due.first().map(|(at, _)| *at);
            let ended = table
                .ended
                .first()
                .map(|(ended, _)| if is_over(table) { now } else { ended.plus_millis(keep) });
            due.into_iter().chain(ended).min()
        };
        for (number, ending) in over {
            let _ = self.end(number, ending, |_| {});
        }
        next
    }

    /// The next device to which something may go, with what that is.
    pub(super) fn next_parcels(&self) -> Option<Vec<DueCommand>> {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let most = &self.options;
        let of_all = most.max_outstanding.saturating_sub(table.out);
        let device = table.next_device(of_all > 0)?;
        let Some(of_device) = table.devices.get(&device) else { return Some(Vec::new()) };
        let room = most.max_outstanding_per_device.saturating_sub(of_device.out).min(of_all);
        let ready = of_device.ready.iter().take(room);
        let parcels = ready.filter_map(|number| {
            let entry = table.commands.get(number)?;
            let CommandRecord { id, spec, correlation, machine, .. } = &entry.record;
            matches!(entry.writing, Writing::Nothing).then(|| DueCommand {
                number: *number,
                id: id.clone(),
                spec: spec.clone(),
                correlation: *correlation,
                expire: machine.times.expire,
            })
        });
        let parcels = parcels.collect();
        if of_all == 0 {
            table.starve(device);
        }
        Some(parcels)
    }

    /// A command is about to be given to a session; the attempt, unless the command ends meanwhile. Before it is given, since the
    /// reply may come at once.
    pub(super) fn begin(&self, number: u64) -> Option<u32> {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let entry = table.commands.get_mut(&number)?;
        if !matches!(entry.writing, Writing::Nothing) || entry.record.machine.state.is_final() {
            return None;
        }
        let attempt = entry.record.machine.sent_out();
        let device = &entry.record.spec.device;
        table.out += 1;
        if let Some(of_device) = table.devices.get_mut(device) {
            of_device.out += 1;
            of_device.ready.remove(&number);
        }
        Some(attempt)
    }

    /// A session has taken it, and somebody follows what becomes of it.
    pub(super) fn taken(&self, number: u64, follower: AbortHandle) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let is_out = table.commands.get_mut(&number).filter(|entry| entry.record.machine.is_out());
        match is_out {
            Some(entry) => entry.follower = Some(follower),
            // The command has come back already, or ended.
            None => follower.abort(),
        }
        self.note(table, number);
    }

    /// No session has taken it: it is as if it had not been tried, and ready as before.
    pub(super) fn take_back(&self, number: u64, attempt: u32) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let Some(entry) = table.commands.get_mut(&number) else { return };
        if !entry.record.machine.take_back(attempt) {
            return;
        }
        let device = Arc::clone(&entry.record.spec.device);
        table.out -= 1;
        if let Some(of_device) = table.devices.get_mut(&device) {
            of_device.out -= 1;
            of_device.ready.insert(number);
        }
    }

    /// A command cannot go now: it is tried again after a while.
    pub(super) fn put_off(&self, number: u64) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let Some(entry) = table.commands.get_mut(&number) else { return };
        entry.record.machine.put_off(clock::now());
        let CommandStep::Wait(at) = entry.record.machine.step(clock::now()) else { return };
        let device = Arc::clone(&entry.record.spec.device);
        if let Some(of_device) = table.devices.get_mut(&device) {
            of_device.ready.remove(&number);
        }
        table.schedule(number, Some(at));
        drop(guard);
        self.changed.notify_one();
    }

    /// The device takes no command of this kind.
    pub(super) fn refuse(self: &Arc<Self>, number: u64, code: u8) {
        let _ = self.end(number, CommandEnding::refused(code), |_| {});
    }

    /// Writes a command's state, which nobody waits for.
    fn note(&self, table: &CommandTable, number: u64) {
        if let Some(entry) = table.commands.get(&number)
            // Its end is written already.
            && !matches!(entry.writing, Writing::End(..))
        {
            self.store.submit(vec![put(number, &entry.record)], None);
        }
    }

    /// An attempt has come so far; true if nothing more is to be told of it.
    pub(super) fn progress(self: &Arc<Self>, number: u64, attempt: u32, receipt: &ReceiptState) -> bool {
        let now = clock::now();
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let Some(entry) = table.commands.get_mut(&number) else { return true };
        let was_out = entry.record.machine.is_out();
        let progress = entry.record.machine.progress(attempt, receipt, now);
        let is_out = entry.record.machine.is_out();
        let device = Arc::clone(&entry.record.spec.device);
        if progress == AttemptProgress::Changed {
            entry.record.updated = now;
            entry.tell();
        }
        let step = entry.record.machine.step(now);
        if was_out && !is_out {
            entry.follower = None;
            table.came_back(&device);
            table.schedule(
                number,
                Some(match step {
                    CommandStep::Wait(at) => at,
                    CommandStep::Send | CommandStep::Expire | CommandStep::Refuse(_) => now,
                }),
            );
        }
        if progress == AttemptProgress::Changed {
            self.note(table, number);
        }
        drop(guard);
        if let AttemptProgress::Refused(code) = progress {
            self.refuse(number, code);
        }
        self.changed.notify_one();
        !is_out
    }
}

/// Ends a part as the commit that it waits for has ended.
fn pass(part: Option<Arc<Commit>>, result: Result<(), CommitRefused>) {
    match (part, result) {
        (Some(part), Ok(())) => part.done(),
        (Some(part), Err(CommitRefused)) => part.refuse(),
        (None, _) => {}
    }
}

/// Counts a reply to a command that has ended so.
fn count_superfluous(state: CommandState) {
    count(|c| match state {
        CommandState::Replied => c.commands_replies_duplicate.add(1),
        _ => c.commands_replies_late.add(1),
    });
}
