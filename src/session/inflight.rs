//! The in-flight window towards a client: packet ids and what they stand for, in sending order.
//!
//! Ids are given in turn, so the window is a ring and an acknowledgement is found by subtraction. An id is
//! never reused while in flight [MQTT-2.2.1-3].

use std::collections::VecDeque;

use super::pending::Delivery;

const IDS: u32 = 65_535;

/// What a packet id in flight waits for.
#[derive(Debug)]
pub(super) enum Stage {
    /// PUBACK or PUBREC; the message may have to be sent again.
    Publish(Delivery),
    /// PUBCOMP; the PUBREL may have to be sent again. Keeps who waits for the end.
    Release(Option<std::sync::Arc<crate::types::Receipt>>),
}

/// One id in flight.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) stage: Stage,
    /// Sent before on an earlier connection: DUP is set on the next sending [MQTT-3.3.1-1].
    pub(super) sent: bool,
}

/// The ring.
#[derive(Debug)]
pub(super) struct Inflight {
    ring: VecDeque<Option<Entry>>,
    /// Id of the ring's first place; 1 to 65,535.
    first: u16,
    live: usize,
    /// First place that must be (re-)sent on this connection.
    resend: usize,
}

impl Default for Inflight {
    fn default() -> Self {
        Self { ring: VecDeque::new(), first: 1, live: 0, resend: 0 }
    }
}

impl Inflight {
    /// Ids in flight.
    pub(super) fn len(&self) -> usize {
        self.live
    }

    /// Whether a new message may be taken up within `window`.
    pub(super) fn has_room(&self, window: usize) -> bool {
        self.live < window && self.ring.len() < IDS as usize
    }

    /// Whether everything of earlier connections has been sent again.
    pub(super) fn is_resent(&self) -> bool {
        self.resend >= self.ring.len()
    }

    /// Takes up a message that is sent now; returns its packet id. The caller has checked `has_room`.
    pub(super) fn push(&mut self, delivery: Delivery) -> u16 {
        let id = self.id_at(self.ring.len());
        self.ring.push_back(Some(Entry { stage: Stage::Publish(delivery), sent: true }));
        self.live += 1;
        self.resend = self.ring.len();
        id
    }

    /// The id that `push` will give.
    pub(super) fn next_id(&self) -> u16 {
        self.id_at(self.ring.len())
    }

    /// The entry of `id`.
    pub(super) fn get_mut(&mut self, id: u16) -> Option<&mut Entry> {
        let place = self.place(id)?;
        self.ring.get_mut(place)?.as_mut()
    }

    /// Ends `id` and returns what it was.
    pub(super) fn remove(&mut self, id: u16) -> Option<Entry> {
        let place = self.place(id)?;
        let entry = self.ring.get_mut(place)?.take()?;
        self.live -= 1;
        while matches!(self.ring.front(), Some(None)) {
            self.ring.pop_front();
            self.first = next(self.first);
            self.resend = self.resend.saturating_sub(1);
        }
        if self.ring.is_empty() && self.ring.capacity() > 64 {
            self.ring = VecDeque::new();
        }
        Some(entry)
    }

    /// A connection ended: everything left must be sent again on the next.
    pub(super) fn rewind(&mut self) {
        self.resend = 0;
    }

    /// The next (id, entry) to send again; the caller then calls [`Self::advance`].
    pub(super) fn next_resend(&mut self) -> Option<(u16, &mut Entry)> {
        while matches!(self.ring.get(self.resend), Some(None)) {
            self.resend += 1;
        }
        let id = self.id_at(self.resend);
        Some((id, self.ring.get_mut(self.resend)?.as_mut()?))
    }

    /// Moves past the entry that `next_resend` gave.
    pub(super) fn advance(&mut self) {
        self.resend += 1;
    }

    /// Empties the ring.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Entry> + '_ {
        self.live = 0;
        self.resend = 0;
        self.ring.drain(..).flatten()
    }

    fn place(&self, id: u16) -> Option<usize> {
        if id == 0 {
            return None;
        }
        let distance = (u32::from(id) + IDS - u32::from(self.first)) % IDS;
        usize::try_from(distance).ok().filter(|place| *place < self.ring.len())
    }

    fn id_at(&self, place: usize) -> u16 {
        let zero_based = (u64::from(self.first) - 1 + place as u64) % u64::from(IDS);
        u16::try_from(zero_based + 1).unwrap_or(1)
    }
}

fn next(id: u16) -> u16 {
    if id == u16::MAX { 1 } else { id + 1 }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        session::pending::Awaited,
        types::{Message, Origin, QoS, Timestamp},
    };

    fn delivery() -> Delivery {
        let message = Arc::clone(Message::new("t", b"p", Timestamp(0), Origin::SERVER).share());
        let awaited = Awaited::No;
        Delivery { message, ids: None, group: 0, qos: QoS::AtLeastOnce, retain: false, awaited }
    }

    #[test]
    fn ids_wrap_without_zero_and_are_not_reused_in_flight() {
        let mut inflight = Inflight::default();
        let kept = inflight.push(delivery());
        let mut last = kept;
        for _ in 0..65_534 {
            let id = inflight.push(delivery());
            assert_ne!(id, 0);
            assert_ne!(id, kept);
            assert!(inflight.remove(id).is_some());
            last = id;
        }
        assert_eq!(last, 65_535);
        assert!(!inflight.has_room(65_535), "the ring is as long as there are ids");
        assert!(inflight.remove(kept).is_some());
        assert_eq!(inflight.push(delivery()), 1);
        assert!(inflight.remove(2).is_none());
        assert!(inflight.remove(0).is_none());
        assert_eq!(inflight.len(), 1);
    }
}
