//! Fair admission to a bounded queue that several clients feed.
//!
//! The bound of one feeder moves with the free room (dynamic thresholds): a feeder may hold at most twice as much as is
//! free. One alone therefore takes two thirds of the queue; of `n` that flood it, each takes two parts in `2n + 1`, and one
//! part stays free for those that hold little. QoS 0, which nobody waits for, has three quarters of the queue by the same
//! rule, so that it never takes the last room of QoS 1 and 2.
//!
//! An admission and the charge after it are two steps: threads that come at the same time may exceed a bound by one
//! message each.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use ahash::RandomState;
use parking_lot::Mutex;

use super::{ClientId, Message, OriginKind, QoS, SharedMessage};

/// Times the free room that one feeder may hold.
const TIMES_FREE: usize = 2;

/// Locks over which the feeders are spread, a power of two.
const STRIPES: usize = 16;

/// An emptied table with room for more entries gives it back.
const KEPT_ENTRIES: usize = 1 << 10;

/// Keys the numbers of feeders, so that nobody can choose a client id that shares the number of another.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The number of a party that feeds queues: a device, all backends together, or the gateway itself. Differs from process to
/// process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feeder(u64);

impl Feeder {
    /// The feeder of a message from a party of this kind, in the name of this device if there is one.
    pub fn of(kind: OriginKind, device: Option<&ClientId>) -> Self {
        match device {
            Some(device) => Self(KEY.hash_one(device.as_str())),
            None => Self(kind as u64),
        }
    }
}

impl From<&SharedMessage> for Feeder {
    fn from(message: &SharedMessage) -> Self {
        Self::of(message.kind, message.client_id.as_ref())
    }
}

impl From<&Message<'_>> for Feeder {
    fn from(message: &Message<'_>) -> Self {
        Self::of(message.origin.kind, message.origin.client_id)
    }
}

/// Reason for which a queue does not take a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoRoom {
    /// The queue is full, or its store takes nothing.
    Full,
    /// The queue is short of room, and this feeder holds more of it than its share.
    Share,
    /// The queue is short of room, and QoS 0 goes first.
    QosZero,
}

/// The part of a queue's bound that QoS 0 may use, so that it goes first when room is short.
pub fn part_of_qos_0(limit: usize) -> usize {
    limit - limit / 4
}

/// The bytes that each feeder of one queue holds of its bound.
#[derive(Debug)]
pub struct Shares {
    limit: usize,
    total: AtomicUsize,
    stripes: Box<[Mutex<Held>]>,
}

/// Bytes by feeder.
type Held = HashMap<u64, usize, BuildHasherDefault<NumberHasher>>;

/// Takes the number of a feeder, which is a keyed hash already, as its hash.
#[derive(Debug, Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

impl Shares {
    /// Shares of an empty queue that takes `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let stripes = (0..STRIPES).map(|_| Mutex::default()).collect();
        Self { limit, total: AtomicUsize::new(0), stripes }
    }

    /// Bytes that all feeders hold.
    pub fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    /// Bytes that one feeder holds.
    pub fn held(&self, feeder: Feeder) -> usize {
        self.stripe(feeder).lock().get(&feeder.0).copied().unwrap_or(0)
    }

    /// Tells whether the queue takes `bytes` more at this QoS. `feeder` is asked only while the queue is short of room.
    ///
    /// # Errors
    /// The reason why not.
    pub fn admit(&self, qos: QoS, bytes: usize, feeder: impl FnOnce() -> Feeder) -> Result<(), NoRoom> {
        self.admit_beside(0, qos, bytes, feeder)
    }

    /// As [`Self::admit`], where `others` bytes are in the queue that are nobody's here.
    ///
    /// # Errors
    /// The reason why not.
    pub fn admit_beside(
        &self,
        others: usize,
        qos: QoS,
        bytes: usize,
        feeder: impl FnOnce() -> Feeder,
    ) -> Result<(), NoRoom> {
        let total = self.total() + others;
        let limit = if qos == QoS::AtMostOnce { part_of_qos_0(self.limit) } else { self.limit };
        if total > limit {
            return Err(if total > self.limit { NoRoom::Full } else { NoRoom::QosZero });
        }
        // Nobody holds more than there is.
        let may_hold = TIMES_FREE * (limit - total);
        if total <= may_hold || self.held(feeder()) + bytes <= may_hold {
            return Ok(());
        }
        Err(NoRoom::Share)
    }

    /// As [`Self::admit`], for a message.
    ///
    /// # Errors
    /// The reason why not.
    pub fn admit_message(&self, message: &Message<'_>) -> Result<(), NoRoom> {
        self.admit(message.qos, message.cost(), || Feeder::from(message))
    }

    /// Notes that the feeder holds so many bytes more.
    pub fn take(&self, feeder: Feeder, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.total.fetch_add(bytes, Relaxed);
        *self.stripe(feeder).lock().entry(feeder.0).or_default() += bytes;
    }

    /// Notes that the feeder gives so many bytes back.
    pub fn give_back(&self, feeder: Feeder, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.total.fetch_sub(bytes, Relaxed);
        let mut held = self.stripe(feeder).lock();
        let Some(own) = held.get_mut(&feeder.0) else {
            debug_assert!(false, "a feeder gives back what it never took");
            return;
        };
        *own = own.saturating_sub(bytes);
        if *own == 0 {
            held.remove(&feeder.0);
            if held.is_empty() && held.capacity() > KEPT_ENTRIES {
                *held = Held::default();
            }
        }
    }

    /// Forgets all that is held.
    pub fn clear(&self) {
        self.total.store(0, Relaxed);
        for held in &self.stripes {
            let mut held = held.lock();
            match held.capacity() > KEPT_ENTRIES {
                true => *held = Held::default(),
                false => held.clear(),
            }
        }
    }

    fn stripe(&self, feeder: Feeder) -> &Mutex<Held> {
        // The low bits choose the place within a table.
        &self.stripes[(feeder.0 >> 32) as usize % STRIPES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 1_000_000;

    fn device(name: &str) -> Feeder {
        Feeder::of(OriginKind::Device, Some(&ClientId::new(name)))
    }

    /// Lets the feeder take messages of `bytes` until it is refused; how many it took.
    fn flood(shares: &Shares, feeder: Feeder, qos: QoS, bytes: usize) -> usize {
        let mut taken = 0;
        while shares.admit(qos, bytes, || feeder).is_ok() {
            shares.take(feeder, bytes);
            taken += 1;
        }
        taken
    }

    #[test]
    fn qos_0_floods_leave_room_for_every_other_qos_1() {
        let shares = Shares::new(LIMIT);
        for flooder in ["a", "b", "c", "d"] {
            flood(&shares, device(flooder), QoS::AtMostOnce, 1_000);
        }
        assert!(shares.total() <= LIMIT / 4 * 3, "{}", shares.total());
        assert!(flood(&shares, device("bystander"), QoS::AtMostOnce, 1_000) >= 5);
        assert!(flood(&shares, device("bystander"), QoS::AtLeastOnce, 1_000) >= 100);
    }

    #[test]
    fn one_feeder_leaves_a_third_free() {
        let shares = Shares::new(LIMIT);
        flood(&shares, device("a"), QoS::AtLeastOnce, 1_000);
        assert!(shares.held(device("a")) <= LIMIT / 3 * 2 + 1_000);
        assert_eq!(shares.admit(QoS::AtLeastOnce, 1_000, || device("a")), Err(NoRoom::Share));
        assert_eq!(shares.admit(QoS::AtLeastOnce, 1_000, || device("b")), Ok(()));
    }

    #[test]
    fn among_a_hundred_feeders_each_newcomer_finds_a_place() {
        let shares = Shares::new(LIMIT);
        // In turns, as many connections feed a queue.
        let feeders: Vec<Feeder> = (0..100).map(|number| device(&number.to_string())).collect();
        for _ in 0..LIMIT / 100 {
            for feeder in &feeders {
                if shares.admit(QoS::ExactlyOnce, 100, || *feeder).is_ok() {
                    shares.take(*feeder, 100);
                }
            }
        }
        assert!(shares.total() <= LIMIT);
        assert_eq!(shares.admit(QoS::AtLeastOnce, 1_000, || device("new")), Ok(()));
    }

    #[test]
    fn what_is_given_back_is_free_and_forgotten() {
        let shares = Shares::new(LIMIT);
        for number in 0..10_000 {
            shares.take(device(&number.to_string()), 10);
        }
        assert_eq!(shares.total(), 100_000);
        for number in 0..10_000 {
            shares.give_back(device(&number.to_string()), 10);
        }
        assert_eq!(shares.total(), 0);
        assert!(shares.stripes.iter().all(|held| held.lock().capacity() <= KEPT_ENTRIES));
    }

    #[test]
    fn a_queue_that_is_full_takes_nothing_of_anybody() {
        let shares = Shares::new(LIMIT);
        shares.take(device("a"), LIMIT + 1);
        assert_eq!(shares.admit(QoS::AtLeastOnce, 1, || device("b")), Err(NoRoom::Full));
        assert_eq!(shares.admit(QoS::AtMostOnce, 1, || device("b")), Err(NoRoom::Full));
        shares.give_back(device("a"), LIMIT / 5);
        assert_eq!(shares.admit(QoS::AtMostOnce, 1, || device("b")), Err(NoRoom::QosZero));
        assert_eq!(shares.admit(QoS::AtLeastOnce, 1, || device("b")), Ok(()));
    }
}
