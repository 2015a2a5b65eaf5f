//! The in-flight window towards a client: what waits for an acknowledgement, in sending order, and the steps of the QoS 1 and
//! 2 handshakes that bring it to its end.
//!
//! Every delivery has a place in its session, counted from 0. The packet identifier is computed from the place, so that
//! it is the same after a restart without being stored, and an acknowledgement is found by subtraction. The window
//! spans fewer places than there are identifiers, so that none is reused while in flight [MQTT-2.2.1-3].

use std::{collections::VecDeque, sync::Arc};

use codec::{AckKind, reason};
use gateway_core::{Commit, QoS, QueueOp, Receipt};

use super::{
    pending::{OnDisk, PendingDelivery},
    receipts::answered,
};
use crate::{Disk, Env, Reply};

const IDS: u64 = 65_535;
/// Number of windows that may lie between the first place in flight and a new one. More than one because places of messages that
/// were dropped or expired unsent stay empty.
const SPAN: usize = 4;
const LEAST_SPAN: usize = 1024;

/// An acknowledgement of a message in flight that is not the next step of its handshake: a protocol error, after which the
/// two sides can no longer agree [MQTT-4.3.2-3] [MQTT-4.3.3-3] [MQTT-4.3.3-5].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WrongStep;

/// Answer that a packet id in flight waits for.
#[derive(Debug)]
pub(super) enum InflightStage {
    /// PUBACK or PUBREC; the message may have to be sent again.
    Publish(PendingDelivery),
    /// PUBCOMP; the PUBREL may have to be sent again.
    Release(Released),
}

/// Remainder of a QoS 2 delivery after PUBREC.
#[derive(Debug)]
pub(super) struct Released {
    /// Reports the end.
    pub(super) receipt: Option<Arc<Receipt>>,
    pub(super) on_disk: OnDisk,
    /// PUBREL may be sent once this is done.
    pub(super) commit: Option<Arc<Commit>>,
}

/// One packet identifier in flight.
#[derive(Debug)]
pub(super) struct Unacked {
    pub(super) stage: InflightStage,
    /// The disk knows that it was sent, if it is on disk.
    pub(super) noted: bool,
}

/// All packet identifiers in flight.
#[derive(Debug, Default)]
pub(super) struct Inflight {
    ring: VecDeque<Option<Unacked>>,
    /// Place of the ring's first entry, or of the next one if the ring is empty.
    first: u64,
    live: usize,
    /// First index that must still be sent again on this connection.
    resend: usize,
    /// PUBLISH packets sent on this connection and not acknowledged.
    open: usize,
    /// Cost of the messages that may have to be sent again.
    bytes: usize,
}

impl Unacked {
    /// Bytes counted against memory caps: after PUBREC the message is gone.
    fn cost(&self) -> usize {
        match &self.stage {
            InflightStage::Publish(delivery) => delivery.message.cost(),
            InflightStage::Release(_) => 0,
        }
    }
}

impl Released {
    /// A PUBREC has come for the delivery in `place`.
    pub(super) fn of(delivery: &PendingDelivery, place: u64, env: &Env<'_>) -> Self {
        let receipt = delivery.receipt().cloned();
        let on_disk = delivery.on_disk.clone();
        let disk = env.disk.filter(|_| !matches!(on_disk, OnDisk::No));
        let commit = disk.map(|Disk { journal, queue }| {
            let commit = Commit::new();
            journal.submit(QueueOp::Release { queue, seq: place, commit: Arc::clone(&commit) });
            commit
        });
        Self { receipt, on_disk, commit }
    }
}

/// Acknowledgements of the client.
impl Inflight {
    /// PUBACK [MQTT-4.3.2-5]. False if the id is not in flight.
    pub(super) fn handle_puback(&mut self, id: u16, code: u8, env: &Env<'_>) -> Result<bool, WrongStep> {
        let is_due = |entry: &Unacked| matches!(&entry.stage, InflightStage::Publish(delivery) if delivery.qos == QoS::AtLeastOnce);
        let Some(removed) = self.remove_if(id, is_due) else { return Ok(false) };
        if let (place, Unacked { stage: InflightStage::Publish(delivery), .. }) = removed? {
            delivery.on_disk.remove(place, env);
            answered(delivery.receipt(), code);
        }
        Ok(true)
    }

    /// PUBREC: PUBREL is to follow, with 0x92 when the id is unknown [MQTT-4.3.3-4]; a failure code ends the delivery. What
    /// is on disk must say so before PUBREL goes.
    pub(super) fn handle_pubrec(
        &mut self,
        id: u16,
        code: u8,
        env: &Env<'_>,
    ) -> Result<Option<Reply>, WrongStep> {
        let mut release = reason::PACKET_IDENTIFIER_NOT_FOUND;
        let mut after = None;
        if let Some((place, entry)) = self.get_mut(id) {
            match &entry.stage {
                InflightStage::Publish(delivery) if delivery.qos == QoS::ExactlyOnce => {
                    if code >= 0x80 {
                        answered(delivery.receipt(), code);
                        delivery.on_disk.remove(place, env);
                        self.remove(id);
                        return Ok(None);
                    }
                    let released = Released::of(delivery, place, env);
                    after = released.commit.clone();
                    self.release(id, released);
                    release = reason::SUCCESS;
                }
                InflightStage::Release(released) => {
                    after = released.commit.clone();
                    release = reason::SUCCESS;
                }
                InflightStage::Publish(_) => return Err(WrongStep),
            }
        }
        let reply = Reply { kind: AckKind::PubRel, packet_id: id, code: release, after };
        Ok((code < 0x80).then_some(reply))
    }

    /// PUBCOMP. False if the id is not in flight.
    pub(super) fn handle_pubcomp(&mut self, id: u16, env: &Env<'_>) -> Result<bool, WrongStep> {
        let is_due = |entry: &Unacked| matches!(entry.stage, InflightStage::Release(_));
        let Some(removed) = self.remove_if(id, is_due) else { return Ok(false) };
        if let (place, Unacked { stage: InflightStage::Release(released), .. }) = removed? {
            released.on_disk.remove(place, env);
            answered(released.receipt.as_ref(), reason::SUCCESS);
        }
        Ok(true)
    }
}

impl Inflight {
    /// Bytes of messages in flight, as memory caps count them.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Of the message of `id` only the PUBREL may have to be sent again.
    pub(super) fn release(&mut self, id: u16, released: Released) {
        if let Some((_, entry)) = self.get_mut(id) {
            let cost = entry.cost();
            // A release on disk implies that the message was sent.
            *entry = Unacked { stage: InflightStage::Release(released), noted: true };
            self.bytes -= cost;
        }
    }

    /// Ids in flight.
    pub(super) fn len(&self) -> usize {
        self.live
    }

    /// The place after the last one.
    pub(super) fn next_place(&self) -> u64 {
        self.first + self.ring.len() as u64
    }

    /// Returns whether a message for `place` may be taken up within `window`.
    pub(super) fn has_room(&self, window: usize, place: u64) -> bool {
        let span = (window * SPAN).clamp(LEAST_SPAN, IDS as usize - 1) as u64;
        self.live < window && (self.ring.is_empty() || place - self.first < span)
    }

    /// Returns whether every packet of earlier connections has been sent again.
    pub(super) fn is_resent(&self) -> bool {
        self.resend >= self.ring.len()
    }

    /// Adds a message that is being sent. The caller has checked `has_room` and `is_resent`.
    pub(super) fn push(&mut self, place: u64, delivery: PendingDelivery) {
        let noted = matches!(&delivery.on_disk, OnDisk::Submitted(entry) if entry.may_be_sent());
        self.put(place, Unacked { stage: InflightStage::Publish(delivery), noted });
        self.resend = self.ring.len();
        self.open += 1;
    }

    /// Adds what may have been in flight before a restart and will be sent again. The caller has checked `fits`.
    pub(super) fn restore(&mut self, place: u64, stage: InflightStage, noted: bool) {
        self.put(place, Unacked { stage, noted });
    }

    /// One more than the last place that was sent without the disk knowing; the caller tells it.
    pub(super) fn note_sent(&mut self) -> Option<u64> {
        let first = self.first;
        let mut last = None;
        for (index, entry) in self.ring.iter_mut().enumerate() {
            if let Some(entry) = entry.as_mut().filter(|entry| !entry.noted) {
                entry.noted = true;
                if let InflightStage::Publish(PendingDelivery { on_disk: OnDisk::Submitted(entry), .. }) =
                    &entry.stage
                {
                    entry.note_sent();
                }
                last = Some(first + index as u64 + 1);
            }
        }
        last
    }

    /// Returns whether `place` comes after all others and its identifier is not in flight.
    pub(super) fn fits(&self, place: u64) -> bool {
        self.ring.is_empty() || (place >= self.next_place() && place - self.first < IDS - 1)
    }

    /// At most how many places are still to be sent again.
    pub(super) fn unsent(&self) -> usize {
        self.ring.len().saturating_sub(self.resend)
    }

    fn put(&mut self, place: u64, entry: Unacked) {
        if self.ring.is_empty() {
            self.first = place;
            self.resend = 0;
        }
        while self.next_place() < place {
            self.ring.push_back(None);
        }
        self.bytes += entry.cost();
        self.ring.push_back(Some(entry));
        self.live += 1;
    }

    /// The entry of `id`, with its place.
    pub(super) fn get_mut(&mut self, id: u16) -> Option<(u64, &mut Unacked)> {
        let index = self.index(id)?;
        Some((self.first + index as u64, self.ring.get_mut(index)?.as_mut()?))
    }

    /// Ends `id` and returns what it was, with its place.
    pub(super) fn remove(&mut self, id: u16) -> Option<(u64, Unacked)> {
        self.remove_if(id, |_| true)?.ok()
    }

    /// As [`Self::remove`], if it is as `expected`; `Err` if it is not, and stays.
    #[inline]
    pub(super) fn remove_if(
        &mut self,
        id: u16,
        expected: impl FnOnce(&Unacked) -> bool,
    ) -> Option<Result<(u64, Unacked), WrongStep>> {
        let index = self.index(id)?;
        let place = self.first + index as u64;
        let entry = self.ring.get_mut(index)?;
        if !expected(entry.as_ref()?) {
            return Some(Err(WrongStep));
        }
        let entry = entry.take()?;
        self.bytes -= entry.cost();
        self.live -= 1;
        if index < self.resend {
            // A release whose PUBLISH went out on another connection is not counted in `open`.
            self.open = self.open.saturating_sub(1);
        }
        while matches!(self.ring.front(), Some(None)) {
            self.ring.pop_front();
            self.first += 1;
            self.resend = self.resend.saturating_sub(1);
        }
        if self.ring.is_empty() && self.ring.capacity() > 64 {
            self.ring = VecDeque::new();
        }
        Some(Ok((place, entry)))
    }

    /// A connection ended: everything left must be sent again on the next.
    pub(super) fn rewind(&mut self) {
        self.resend = 0;
        self.open = 0;
    }

    /// The next (id, place, entry) to send again within `window`; the caller then calls [`Self::advance`].
    pub(super) fn next_resend(&mut self, window: usize) -> Option<(u16, u64, &mut Unacked)> {
        while matches!(self.ring.get(self.resend), Some(None)) {
            self.resend += 1;
        }
        let place = self.first + self.resend as u64;
        let entry = self.ring.get_mut(self.resend)?.as_mut()?;
        // The client's Receive Maximum counts PUBLISH packets [MQTT-3.3.4-9].
        if matches!(entry.stage, InflightStage::Publish(_)) && self.open >= window {
            return None;
        }
        Some((id(place), place, entry))
    }

    /// Moves past the entry that `next_resend` returned. It counts as open until it ends, whatever its stage.
    pub(super) fn advance(&mut self) {
        self.resend += 1;
        self.open += 1;
    }

    /// Messages in flight, with their places.
    pub(super) fn publishes(&mut self) -> impl Iterator<Item = (u64, &mut PendingDelivery)> {
        let first = self.first;
        self.ring.iter_mut().enumerate().filter_map(move |(index, entry)| match &mut entry.as_mut()?.stage {
            InflightStage::Publish(delivery) => Some((first + index as u64, delivery)),
            InflightStage::Release(_) => None,
        })
    }

    /// Messages that were sent, or are to be sent again, in order.
    pub(super) fn messages(&self) -> impl Iterator<Item = &PendingDelivery> {
        self.ring.iter().flatten().filter_map(|entry| match &entry.stage {
            InflightStage::Publish(delivery) => Some(delivery),
            InflightStage::Release(_) => None,
        })
    }

    /// Commits of PUBREL packets that may not be sent yet.
    pub(super) fn unsafe_releases(&self) -> impl Iterator<Item = &Arc<Commit>> {
        self.ring.iter().flatten().filter_map(|entry| match &entry.stage {
            InflightStage::Release(released) => {
                released.commit.as_ref().filter(|commit| commit.result().is_none())
            }
            InflightStage::Publish(_) => None,
        })
    }

    /// Empties the ring.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (u64, Unacked)> + '_ {
        let first = self.first;
        self.first = self.next_place();
        self.live = 0;
        self.resend = 0;
        self.open = 0;
        self.bytes = 0;
        let places = self.ring.drain(..).enumerate();
        places.filter_map(move |(index, entry)| Some((first + index as u64, entry?)))
    }

    fn index(&self, id: u16) -> Option<usize> {
        let distance = (u64::from(id).checked_sub(1)? + IDS - self.first % IDS) % IDS;
        usize::try_from(distance).ok().filter(|index| *index < self.ring.len())
    }
}

/// The packet identifier of a place: 1 to 65,535 in turn.
pub(super) fn id(place: u64) -> u16 {
    u16::try_from(place % IDS + 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use gateway_core::{Message, Origin, Timestamp};

    use super::*;
    use crate::outbound::pending::Awaited;

    fn delivery() -> PendingDelivery {
        let message = Arc::clone(Message::new("t", b"p", Timestamp(0), Origin::SERVER).share());
        PendingDelivery {
            message,
            ids: None,
            place: 0,
            group: 0,
            qos: QoS::AtLeastOnce,
            retain: false,
            awaited: Awaited::No,
            until: None,
            on_disk: OnDisk::No,
        }
    }

    #[test]
    fn ids_wrap_without_zero_and_are_not_reused_in_flight() {
        let mut inflight = Inflight::default();
        for place in 0..70_000 {
            inflight.push(place, delivery());
            let expected = u16::try_from(place % 65_535 + 1).expect("fits");
            assert_eq!(inflight.remove(expected).expect("in flight").0, place);
        }
        inflight.push(70_000, delivery());
        assert!(!inflight.has_room(65_535, 70_000 + 65_534), "its id would be in flight twice");
        assert!(inflight.has_room(65_535, 70_000 + 65_533));
        assert!(inflight.remove(0).is_none());
        assert!(inflight.remove(id(70_001)).is_none());
        assert_eq!(inflight.len(), 1);
    }

    #[test]
    fn a_gap_of_dropped_messages_does_not_shift_ids() {
        let mut inflight = Inflight::default();
        inflight.push(5, delivery());
        inflight.push(9, delivery());
        assert!(inflight.remove(id(7)).is_none());
        assert_eq!(inflight.remove(10).expect("in flight").0, 9);
        assert_eq!(inflight.remove(6).expect("in flight").0, 5);
        assert_eq!(inflight.next_place(), 10, "places go on");
    }

    #[test]
    fn what_was_in_flight_before_a_restart_is_sent_again_within_the_window() {
        let mut inflight = Inflight::default();
        for place in 0..3 {
            inflight.restore(place, InflightStage::Publish(delivery()), true);
        }
        for expected in [1, 2] {
            let (id, ..) = inflight.next_resend(2).expect("room");
            assert_eq!(id, expected);
            inflight.advance();
        }
        assert!(inflight.next_resend(2).is_none(), "the client takes two at once");
        inflight.remove(1);
        assert_eq!(inflight.next_resend(2).expect("room").0, 3);
    }
}
