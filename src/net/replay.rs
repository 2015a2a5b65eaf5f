//! What waits elsewhere for a session and comes as it has room: retained messages, queues of shared groups.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll},
};

use super::{clock, connection::Connection, device::Device, durable::Held, shard::Work};
use crate::{
    broker::{Session, Target},
    types::Durability,
};

/// Retained messages delivered per poll.
const REPLAYS_PER_POLL: usize = 256;

impl Connection {
    /// Whether what waits elsewhere for this session may come; if not, the task is woken when it may.
    fn has_room(device: &Device) -> bool {
        let mut slot = device.lock();
        let room = slot.out.has_room();
        if let Some(link) = &mut slot.link {
            link.notify_room = !room;
        }
        room
    }

    /// Takes more from the queues of shared groups as long as there is room.
    fn drain_groups(&mut self, work: &mut Work) {
        let Some(rare) = self.rare.as_mut().filter(|rare| rare.group_queues) else { return };
        // The second look asks to be woken.
        for _ in 0..2 {
            if !Self::has_room(&self.device) {
                return;
            }
            work.now = clock::now();
            let session = Arc::clone(&self.device) as Arc<dyn Session>;
            rare.group_queues = self.device.shared.broker.online(&session, work.now, &mut work.turn);
            if !rare.group_queues {
                self.rare.take_if(|rare| rare.is_unused());
                return;
            }
        }
    }

    /// Sends no more of the retained messages for this filter.
    pub(super) fn end_replay(&mut self, filter: &str) {
        if let Some(rare) = &mut self.rare {
            rare.replays.retain(|cursor| cursor.filter() != filter);
        }
        self.rare.take_if(|rare| rare.is_unused());
    }

    /// Delivers retained messages of new subscriptions as long as there is room.
    pub(super) fn replay(&mut self, work: &mut Work, cx: &mut Context<'_>) {
        self.drain_groups(work);
        let Some(rare) = &mut self.rare else { return };
        // After the SUBACK, which may wait for the disk.
        if rare.replays.is_empty() || rare.held.iter().any(Held::is_whole) {
            return;
        }
        let now = clock::now();
        work.now = now;
        let device = &self.device;
        let mut budget = REPLAYS_PER_POLL;
        while let Some(cursor) = rare.replays.front_mut() {
            if budget == 0 {
                cx.waker().wake_by_ref();
                break;
            }
            if !Self::has_room(device) {
                break;
            }
            budget -= 1;
            let Poll::Ready(next) = cursor.poll_next(&device.shared.broker, now, cx) else { break };
            match next {
                None => {
                    rare.replays.pop_front();
                }
                Some(None) => {}
                Some(Some(message)) => {
                    let mut message = message.borrow();
                    // Nobody waits for a replay: it was acknowledged when it was published.
                    message.durability = Durability::Interval;
                    // Its time with us counts against its expiry [MQTT-3.3.2-6], not against the age of what waits.
                    message.received = now;
                    let delivered = device.deliver(&message, cursor.options());
                    if delivered.flush {
                        work.turn.dirty.push(Arc::clone(device) as Arc<dyn Target>);
                    }
                }
            }
        }
        if rare.replays.is_empty() {
            rare.replays = VecDeque::new();
            self.rare.take_if(|rare| rare.is_unused());
        }
    }
}
