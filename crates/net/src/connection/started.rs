//! Connections of a shard that have sent the beginning of a packet: the rest must come within a time. Costs a connection
//! nothing that waits for its next packet.

use std::{
    cell::RefCell,
    sync::{Arc, Weak},
};

use ahash::RandomState;
use broker::{CloseReason, Session};
use hashbrown::HashMap;

use crate::{counters::count, wheel};
use device::{Device, PAUSED};

struct Started {
    device: Weak<Device>,
    /// Tick of the shard's clock when it began, or when it last went on by a step.
    since: u32,
    steps: usize,
}

/// A connection: its device and its epoch. An address is not reused while the weak reference is there.
type ConnectionKey = (usize, u32);

thread_local! {
    static STARTED: RefCell<HashMap<ConnectionKey, Started, RandomState>> = RefCell::default();
}

fn key(device: &Arc<Device>, epoch: u32) -> ConnectionKey {
    (Arc::as_ptr(device) as usize, epoch)
}

/// A packet has begun, or has got as far as `steps`; `fresh` if it is not the packet of before.
pub(crate) fn note(device: &Arc<Device>, epoch: u32, steps: usize, fresh: bool) {
    STARTED.with_borrow_mut(|started| {
        let entry = started.entry(key(device, epoch)).or_insert_with(|| Started {
            device: Arc::downgrade(device),
            since: wheel::now(),
            steps,
        });
        if fresh || entry.steps != steps {
            entry.since = wheel::now();
            entry.steps = steps;
        }
    });
}

/// No packet is under way, or the connection has ended.
pub(crate) fn forget(device: &Arc<Device>, epoch: u32) {
    STARTED.with_borrow_mut(|started| {
        started.remove(&key(device, epoch));
        if started.is_empty() && started.capacity() > 1024 {
            *started = HashMap::default();
        }
    });
}

/// Closes connections whose packet has not gone on for `allowed` seconds of reading. Once a second.
pub(crate) fn tick(allowed: u32) {
    let now = wheel::now();
    let mut late = Vec::new();
    STARTED.with_borrow_mut(|started| {
        for ((_, epoch), entry) in started.iter_mut() {
            let Some(device) = entry.device.upgrade() else { continue };
            if device.last_heard(*epoch, now) == Some(PAUSED) {
                // We don't read.
                entry.since = now;
            } else if now.saturating_sub(entry.since) > allowed.saturating_mul(wheel::PER_SECOND) {
                late.push((device, *epoch));
            }
        }
    });
    for (device, epoch) in late {
        count(|c| c.packet_timeouts.add(1));
        forget(&device, epoch);
        device.close(epoch, CloseReason::PacketTimeout);
    }
}
