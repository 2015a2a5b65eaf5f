//! Calls that wait for a device's answer, or for the device itself: the part of the gateway to which the topics of commands
//! belong.
//!
//! A message that a device publishes there is a reply to a command that went to the device and has none yet, or it is worth
//! nothing: it is acknowledged, dropped and counted. Invariants: a command has one reply at most; a call that has ended
//! leaves nothing behind but its place in a list of a fixed length, by which a late reply is told from an unknown one.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use ahash::RandomState;
use broker::{Account, Broker, Charge, MemoryKind, Reserved, ReservedOutcome, Shortage, Turn};
use bytes::Bytes;
use gateway_core::{ClientId, Message, Properties};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::{
    CommandRegistry, CommandsOptions, DeviceReply, NoReply, RANDOM, STATUS, SendReply, Spec,
    topics::{ReplyAddress, number},
};
use crate::counters::count;

/// Commands that have ended and are still known by their id.
const REMEMBERED: usize = 16_384;
/// Bytes counted for a command that waits, besides what it holds.
const OVERHEAD: usize = 512;

/// Takes the replies of devices.
pub struct ReplyDispatcher {
    pub(super) options: CommandsOptions,
    /// Stored commands, from when they were read.
    pub(super) registry: OnceLock<Arc<CommandRegistry>>,
    calls: Mutex<Calls>,
    /// Calls that wait until a device has a connection, by device.
    waiting: Mutex<HashMap<Arc<str>, DeviceWaiters, RandomState>>,
    /// Number of waiting calls.
    waiters: AtomicUsize,
}

#[derive(Default)]
struct Calls {
    open: HashMap<Box<str>, OpenCommand, RandomState>,
    per_device: HashMap<Arc<str>, usize, RandomState>,
    ended: RecentlyEnded,
}

/// Number of calls that wait for one device, and the signal that wakes them.
type DeviceWaiters = (usize, Arc<Notify>);

/// A command that waits for its reply.
struct OpenCommand {
    device: Arc<str>,
    correlation: [u8; RANDOM],
    /// None once it has its reply.
    caller: Option<oneshot::Sender<SendReply>>,
}

/// Recent ends of commands, by a hash of device and id: true if there was a reply.
#[derive(Default)]
struct RecentlyEnded {
    known: HashMap<u64, bool, RandomState>,
    order: VecDeque<u64>,
    hasher: RandomState,
}

impl RecentlyEnded {
    fn note(&mut self, device: &str, id: &str, replied: bool) {
        let key = self.hasher.hash_one((device, id));
        if self.known.insert(key, replied).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// Returns whether the command had a reply; `None` if the command is not known.
    fn had_reply(&self, device: &str, id: &str) -> Option<bool> {
        self.known.get(&self.hasher.hash_one((device, id))).copied()
    }
}

/// A command that is waited for; dropped, it is no more.
pub(super) struct PendingReply {
    dispatcher: Arc<ReplyDispatcher>,
    pub(super) id: String,
    pub(super) correlation: [u8; RANDOM],
    pub(super) reply: oneshot::Receiver<SendReply>,
    _charge: Charge,
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        let mut calls = self.dispatcher.calls.lock();
        let Some(open) = calls.open.remove(&*self.id) else { return };
        calls.ended.note(&open.device, &self.id, open.caller.is_none());
        if let Some(count) = calls.per_device.get_mut(&open.device) {
            *count -= 1;
            if *count == 0 {
                calls.per_device.remove(&open.device);
            }
        }
    }
}

/// Somebody who waits for a device to have a connection.
pub(super) struct ConnectionWaiter<'a> {
    dispatcher: &'a ReplyDispatcher,
    device: Arc<str>,
    pub(super) connected: Arc<Notify>,
}

impl Drop for ConnectionWaiter<'_> {
    fn drop(&mut self) {
        let mut waiting = self.dispatcher.waiting.lock();
        if let Some((count, _)) = waiting.get_mut(&self.device) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.device);
            }
        }
        self.dispatcher.waiters.fetch_sub(1, SeqCst);
    }
}

/// Returns the status that a device reports: from the level of its topic, else from its user property.
fn status(address: &ReplyAddress<'_>, properties: Option<&Properties>) -> u32 {
    let said = || {
        let user = &properties?.user;
        number(&user.iter().find(|(name, _)| name == STATUS)?.1)
    };
    address.status.or_else(said).unwrap_or_default()
}

impl ReplyDispatcher {
    /// Nobody waits yet.
    pub fn new(options: CommandsOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            registry: OnceLock::new(),
            calls: Mutex::default(),
            waiting: Mutex::default(),
            waiters: AtomicUsize::new(0),
        })
    }

    /// Has stored commands, too; before any device can answer them.
    pub(crate) fn set_registry(&self, registry: Arc<CommandRegistry>) {
        let _ = self.registry.set(registry);
    }

    /// Begins to wait for the reply to a command.
    ///
    /// # Errors
    /// Too many wait, or there is no memory.
    pub(super) fn open(
        self: &Arc<Self>,
        spec: &Spec,
        account: &Arc<Account>,
    ) -> Result<PendingReply, NoReply> {
        let (id, correlation) = (super::random_id()?, super::random()?);
        let mut charge = Charge::new(account, MemoryKind::Commands);
        if !charge.set(OVERHEAD + spec.cost()) {
            broker::counters::count(|c| c.memory_commands.add(1));
            return Err(NoReply::Memory);
        }
        let (caller, reply) = oneshot::channel();
        let mut calls = self.calls.lock();
        if calls.open.len() >= self.options.max_outstanding {
            return Err(NoReply::TooMany("commands.max_outstanding"));
        }
        let of_device = calls.per_device.entry(Arc::clone(&spec.device)).or_default();
        if *of_device >= self.options.max_outstanding_per_device {
            return Err(NoReply::TooMany("commands.max_outstanding_per_device"));
        }
        *of_device += 1;
        let open = OpenCommand { device: Arc::clone(&spec.device), correlation, caller: Some(caller) };
        calls.open.insert(id.as_str().into(), open);
        drop(calls);
        Ok(PendingReply { dispatcher: Arc::clone(self), id, correlation, reply, _charge: charge })
    }

    /// Begins to wait for a connection of the device. A caller that looks for one only after this misses none.
    pub(super) fn wait_for(&self, device: &Arc<str>) -> ConnectionWaiter<'_> {
        self.waiters.fetch_add(1, SeqCst);
        let mut waiting = self.waiting.lock();
        let (count, connected) = waiting.entry(Arc::clone(device)).or_default();
        *count += 1;
        ConnectionWaiter { dispatcher: self, device: Arc::clone(device), connected: Arc::clone(connected) }
    }

    /// Gives a reply to the call that waits for it; `None` if none does.
    fn give(
        &self,
        device: &str,
        address: &ReplyAddress<'_>,
        message: &Message<'_>,
        account: &Arc<Account>,
    ) -> Option<ReservedOutcome> {
        let mut calls = self.calls.lock();
        let open = calls.open.get_mut(address.id).filter(|open| &*open.device == device)?;
        if open.caller.is_none() {
            count(|c| c.commands_replies_duplicate.add(1));
            return Some(ReservedOutcome::Taken);
        }
        if !correlates(address, message, &open.correlation) {
            count(|c| c.commands_replies_correlation.add(1));
            return Some(ReservedOutcome::Taken);
        }
        let Some(reply) = reply(address, message, account) else {
            return Some(ReservedOutcome::Refused(Shortage::Memory));
        };
        let caller = open.caller.take()?;
        drop(calls);
        match caller.send(reply) {
            Ok(()) => count(|c| c.commands_replied.add(1)),
            // The call ended at this very moment.
            Err(_) => count(|c| c.commands_replies_late.add(1)),
        }
        Some(ReservedOutcome::Taken)
    }

    /// Counts a reply that nobody waits for.
    fn drop_reply(&self, device: &str, id: &str) {
        let had_reply = self.calls.lock().ended.had_reply(device, id);
        count(|c| match had_reply {
            Some(true) => c.commands_replies_duplicate.add(1),
            Some(false) => c.commands_replies_late.add(1),
            None => c.commands_replies_unknown.add(1),
        });
    }
}

/// Tells whether a reply belongs to this very command. Without a status in its topic the reply must carry the command's
/// correlation data; with one it may carry none, but no others.
pub(super) fn correlates(address: &ReplyAddress<'_>, message: &Message<'_>, correlation: &[u8]) -> bool {
    match message.properties.and_then(|properties| properties.correlation_data.as_deref()) {
        Some(data) => data == correlation,
        None => address.status.is_some(),
    }
}

/// Reads the answer of a device from its message.
pub(super) fn answer(address: &ReplyAddress<'_>, message: &Message<'_>) -> DeviceReply {
    let properties = message.properties.cloned();
    DeviceReply {
        payload: Bytes::copy_from_slice(message.payload),
        status: status(address, properties.as_deref()),
        properties,
        at: message.received,
    }
}

/// The same on the memory account; `None` without memory for it.
fn reply(address: &ReplyAddress<'_>, message: &Message<'_>, account: &Arc<Account>) -> Option<SendReply> {
    let mut charge = Charge::new(account, MemoryKind::Commands);
    let answer = answer(address, message);
    if !charge.set(answer.cost()) {
        broker::counters::count(|c| c.memory_commands.add(1));
        return None;
    }
    Some(SendReply { answer, _charge: charge })
}

impl Reserved for ReplyDispatcher {
    fn prefix(&self) -> &str {
        self.options.topics.prefix()
    }

    fn take(&self, message: &Message<'_>, rest: &str, broker: &Broker, _turn: &mut Turn) -> ReservedOutcome {
        let device = message.origin.client_id.map_or("", ClientId::as_str);
        let Some(address) = self.options.topics.read(rest) else {
            count(|c| c.commands_replies_malformed.add(1));
            return ReservedOutcome::Taken;
        };
        if let Some(taken) = self.give(device, &address, message, broker.account()) {
            return taken;
        }
        if let Some(taken) = self.registry.get().and_then(|registry| registry.take(device, &address, message))
        {
            return taken;
        }
        self.drop_reply(device, address.id);
        ReservedOutcome::Taken
    }

    fn connected(&self, device: &ClientId) {
        if let Some(registry) = self.registry.get() {
            registry.connected(device.as_str());
        }
        if self.waiters.load(SeqCst) == 0 {
            return;
        }
        let connected = self.waiting.lock().get(device.as_str()).map(|(_, connected)| Arc::clone(connected));
        if let Some(connected) = connected {
            connected.notify_waiters();
        }
    }
}
