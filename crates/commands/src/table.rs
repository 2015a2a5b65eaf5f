//! The table of stored commands: each is found by its number, its id, its device, and by when it is due.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use ahash::RandomState;
use gateway_core::{Commit, Timestamp};
use tokio::{sync::broadcast, task::AbortHandle};

use super::{CommandRecord, DeviceReply};

/// Bytes counted for a command besides what it holds.
const OVERHEAD: usize = 768;

/// Changes of a command, until it ends.
pub(crate) type CommandChanges = broadcast::Receiver<Arc<CommandRecord>>;

/// Write that a command waits for.
pub(super) enum Writing {
    Nothing,
    /// Its start.
    Start(Arc<Commit>),
    /// Its end: the record that it becomes.
    End(Box<CommandRecord>, Arc<Commit>),
}

pub(super) struct CommandEntry {
    pub(super) record: CommandRecord,
    pub(super) bytes: usize,
    pub(super) writing: Writing,
    /// Time at which the command is looked at next.
    pub(super) due: Option<Timestamp>,
    pub(super) watchers: Option<broadcast::Sender<Arc<CommandRecord>>>,
    /// Follows the attempt that a session has.
    pub(super) follower: Option<AbortHandle>,
}

/// The commands of a device.
#[derive(Default)]
pub(super) struct OfDevice {
    pub(super) all: BTreeSet<u64>,
    pub(super) active: BTreeSet<u64>,
    /// Commands that go out when the device has a connection.
    pub(super) ready: BTreeSet<u64>,
    /// Number of commands that a session has.
    pub(super) out: usize,
    /// Turn of the device among those that wait until fewer commands are out.
    turn: Option<u64>,
}

#[derive(Default)]
pub(super) struct CommandTable {
    pub(super) commands: HashMap<u64, CommandEntry, RandomState>,
    pub(super) ids: HashMap<Box<str>, u64, RandomState>,
    pub(super) devices: HashMap<Arc<str>, OfDevice, RandomState>,
    pub(super) numbers: BTreeSet<u64>,
    /// Commands that have not ended.
    pub(super) active: BTreeSet<u64>,
    /// Times at which active commands are looked at.
    pub(super) due: BTreeSet<(Timestamp, u64)>,
    /// Ended commands, by the times of their ends.
    pub(super) ended: BTreeSet<(Timestamp, u64)>,
    /// Devices to which something may go now.
    pub(super) look: BTreeSet<Arc<str>>,
    /// Devices that wait until fewer are out, by their turns.
    starved: BTreeMap<u64, Arc<str>>,
    last_turn: u64,
    pub(super) out: usize,
    pub(super) last: u64,
}

pub(super) fn cost(record: &CommandRecord) -> usize {
    let reply = record.reply.as_ref().map_or(0, DeviceReply::cost);
    OVERHEAD + record.id.len() + record.spec.cost() + reply
}

impl CommandTable {
    /// Looks at a command at this time, or never.
    pub(super) fn schedule(&mut self, number: u64, at: Option<Timestamp>) {
        let Some(entry) = self.commands.get_mut(&number) else { return };
        if let Some(due) = std::mem::replace(&mut entry.due, at) {
            self.due.remove(&(due, number));
        }
        if let Some(at) = at {
            self.due.insert((at, number));
        }
    }

    pub(super) fn insert(&mut self, number: u64, entry: CommandEntry) {
        let of_device = self.devices.entry(Arc::clone(&entry.record.spec.device)).or_default();
        of_device.all.insert(number);
        if entry.record.machine.state.is_final() {
            self.ended.insert((entry.record.updated, number));
        } else {
            of_device.active.insert(number);
            self.active.insert(number);
        }
        self.numbers.insert(number);
        self.ids.insert(entry.record.id.as_str().into(), number);
        self.commands.insert(number, entry);
        self.last = self.last.max(number);
    }

    /// Forgets a command; its bytes.
    pub(super) fn remove(&mut self, number: u64) -> usize {
        self.schedule(number, None);
        let Some(entry) = self.commands.remove(&number) else { return 0 };
        self.numbers.remove(&number);
        self.active.remove(&number);
        self.ids.remove(entry.record.id.as_str());
        self.ended.remove(&(entry.record.updated, number));
        let device = &entry.record.spec.device;
        if let Some(of_device) = self.devices.get_mut(device) {
            of_device.all.remove(&number);
            of_device.active.remove(&number);
            of_device.ready.remove(&number);
            if of_device.all.is_empty() {
                if let Some(turn) = of_device.turn {
                    self.starved.remove(&turn);
                }
                self.devices.remove(device);
            }
        }
        entry.bytes
    }

    /// The device to look at next. When there is room for one more command, the device that has waited longest goes first; the
    /// one whose command made the room queues up after it.
    pub(super) fn next_device(&mut self, has_room: bool) -> Option<Arc<str>> {
        if has_room && let Some((_, device)) = self.starved.pop_first() {
            if let Some(of_device) = self.devices.get_mut(&device) {
                of_device.turn = None;
            }
            return Some(device);
        }
        self.look.pop_first()
    }

    /// Makes a device wait until fewer commands are out. A device that waits already keeps its turn.
    pub(super) fn starve(&mut self, device: Arc<str>) {
        let Some(of_device) = self.devices.get_mut(&device) else { return };
        if of_device.turn.is_none() {
            self.last_turn += 1;
            of_device.turn = Some(self.last_turn);
            self.starved.insert(self.last_turn, device);
        }
    }

    /// A session has a command no more.
    pub(super) fn came_back(&mut self, device: &Arc<str>) {
        self.out -= 1;
        if let Some(of_device) = self.devices.get_mut(device) {
            of_device.out -= 1;
            if !of_device.ready.is_empty() {
                self.look.insert(Arc::clone(device));
            }
        }
    }
}

impl CommandEntry {
    pub(super) fn new(record: CommandRecord, writing: Writing) -> Self {
        let bytes = cost(&record);
        Self { record, bytes, writing, due: None, watchers: None, follower: None }
    }

    pub(super) fn tell(&self) {
        if let Some(watchers) = &self.watchers {
            // Without a receiver there is nobody to be told.
            let _ = watchers.send(Arc::new(self.record.clone()));
        }
    }
}
