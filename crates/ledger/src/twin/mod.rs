//! A ledger in memory: three replicas, and messages that arrive when a scheduler delivers them.
//!
//! [`Twin::reliable`] answers each call at once. [`Twin::driven`] answers nothing by itself: [`Twin::deliver`] carries out one message
//! under way, drawn by chance from a seed, which may be lost or come again. Messages arrive in any order, so a compare-and-set that
//! was given up applies after a read that did not show it, and an insert of a process that died long ago still arrives. A commit of the
//! view that nobody is told of has reached any of the replicas, or none.
//!
//! As [`Engine::Stored`] each replica stores by itself and a quorum answers, as in Cassandra. As [`Engine::Owned`] it carries out each
//! call in one step against one truth, as PostgreSQL does with a synchronous standby.

mod chance;
mod replicas;

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

pub use chance::Chance;
use replicas::{Replicas, TwinReply};

use super::{
    Beat, BoxFuture, Finding, Inserted, Ledger, Owner, Row, Rows, Segment, StoredView, Swapped, Unknown,
};

/// Kind of engine that a twin plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Its inserts answer [`Inserted::Stored`], and the owners are read afterwards.
    Stored,
    /// Its inserts answer [`Inserted::Owned`] or [`Inserted::Fenced`].
    Owned,
}

/// Faults of a driven twin, each in times of a thousand.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    /// A message is lost.
    pub lost: usize,
    /// A message takes twenty times as long as others.
    pub slow: usize,
    /// A message that stores or removes rows comes again.
    pub repeated: usize,
    /// A call is answered by nothing that tells anything, and is carried out some time.
    pub unknown: usize,
    /// A compare-and-set applies, and its answer is lost before all replicas that it needs have it.
    pub half_committed: usize,
    /// A read writes what one replica lacks to it, as Cassandra does unless a table forbids it.
    pub repairs: bool,
    /// Replicas that have a change of the view before its writer is told, or a serial read ends; 2, but for a test of the protocol:
    /// below that, no other replica gets it, but by a read that repairs.
    pub commits: usize,
}

impl Default for Faults {
    fn default() -> Self {
        Self { lost: 70, slow: 0, repeated: 30, unknown: 50, half_committed: 200, repairs: true, commits: 2 }
    }
}

/// A handle of a ledger in memory; all clones are of one cluster.
#[derive(Clone)]
pub struct Twin {
    world: Arc<Mutex<Replicas>>,
    engine: Engine,
}

impl Twin {
    /// Answers every call at once, without any fault.
    pub fn reliable(engine: Engine) -> Self {
        let faults =
            Faults { lost: 0, slow: 0, repeated: 0, unknown: 0, half_committed: 0, ..Faults::default() };
        Self { world: Arc::new(Mutex::new(Replicas::new(faults, 0, true))), engine }
    }

    /// Carries out nothing until [`Self::deliver`] is called. The same calls in the same order with the same seed end the same way.
    pub fn driven(engine: Engine, seed: u64, faults: Faults) -> Self {
        Self { world: Arc::new(Mutex::new(Replicas::new(faults, seed, false))), engine }
    }

    /// Messages under way.
    pub fn under_way(&self) -> usize {
        self.world.lock().under_way()
    }

    /// Carries out one message, drawn by chance, or loses it. Returns whether there was one.
    pub fn deliver(&self) -> bool {
        self.world.lock().deliver()
    }

    /// Delivers all messages that are under way and all that follow from them, in the order of their sending, without a fault from
    /// now on.
    pub fn calm(&self) {
        self.world.lock().calm();
    }

    /// Loses all messages that are under way.
    pub fn discard(&self) {
        self.world.lock().discard();
    }

    /// Changes or removes (`None`) rows on all replicas: what a broken disk or hand does to a ledger.
    pub fn damage(&self, damage: &mut dyn FnMut(&Row) -> Option<Row>) {
        self.world.lock().damage(damage);
    }

    /// Rows that any replica has, in order of segment, number and part.
    pub fn rows(&self) -> Vec<Row> {
        self.world.lock().rows()
    }

    /// Views from the first to the last.
    pub fn history(&self) -> Vec<StoredView> {
        self.world.lock().history().to_vec()
    }

    /// A row that was written twice with different bytes: no protocol may do so.
    pub fn written_twice(&self) -> Option<String> {
        self.world.lock().written_twice.clone()
    }

    fn call<T: Send + 'static>(
        &self,
        begin: impl FnOnce(&mut Replicas, TwinReply<T>),
    ) -> BoxFuture<'_, Result<T, Unknown>> {
        let (sender, receiver) = oneshot::channel();
        let mut world = self.world.lock();
        let reply = TwinReply::new(sender);
        if world.forgets() {
            reply.forget();
        }
        begin(&mut world, reply);
        world.sent();
        drop(world);
        Box::pin(async move { receiver.await.map_err(|_| Unknown("no answer from the twin".to_owned())) })
    }
}

impl Ledger for Twin {
    fn insert(&self, owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>> {
        match self.engine {
            Engine::Stored => self.call(|world, reply| world.store(&rows, reply)),
            Engine::Owned => self.call(|world, reply| world.store_if_owned(owner.clone(), rows, reply)),
        }
    }

    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        match self.engine {
            Engine::Stored => self.call(Replicas::owners),
            Engine::Owned => self.call(Replicas::true_owners),
        }
    }

    fn read(&self, segment: Segment, from: (u64, u16), bytes: usize) -> BoxFuture<'_, Result<Rows, Unknown>> {
        self.call(|world, reply| world.read(segment, from, bytes, reply))
    }

    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>> {
        self.call(|world, reply| world.delete(segment, reply))
    }

    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>> {
        self.call(Replicas::view)
    }

    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>> {
        self.call(|world, reply| world.swap(new.clone(), reply))
    }

    fn beat(&self, beat: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        self.call(|world, reply| world.beat(beat.clone(), reply))
    }

    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>> {
        self.call(Replicas::beats)
    }

    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>> {
        Box::pin(async { Ok(()) })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// Bytes of a row for reads that are limited by bytes.
fn weight(data: &Bytes) -> usize {
    data.len() + 64
}

#[cfg(test)]
mod tests;
