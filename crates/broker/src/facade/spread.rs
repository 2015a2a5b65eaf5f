//! A message with very many receivers is delivered in parts, so that it does not block its thread: a [`Spread`] keeps the match
//! as it was at the beginning, and its progress.

use std::sync::Arc;

use gateway_core::{Commit, Durability, Message, SharedMessage, Unit};

use super::Broker;
use crate::{
    Published, Turn,
    routing::{MatchList, SpreadProgress},
};

/// Result of [`Broker::publish_some`].
pub enum Routing {
    /// Every receiver has it.
    Done(Published),
    /// Some receivers do not have it yet.
    More(Box<Spread>),
}

/// A message that some of its receivers do not have yet. They get it in any case: when this is dropped, the rest is
/// served at once.
pub struct Spread {
    broker: Broker,
    list: Arc<MatchList>,
    progress: SpreadProgress,
    message: Arc<SharedMessage>,
    durability: Durability,
    unit: bool,
    commit: Option<Arc<Commit>>,
    done: bool,
}

impl Spread {
    /// The rest of a message that has come this far in the list.
    pub(super) fn new(
        broker: &Broker,
        list: Arc<MatchList>,
        progress: SpreadProgress,
        message: &Message<'_>,
    ) -> Self {
        // Later receivers may need one, and from now on duplicates of the message wait for it.
        let commit = message.commit().cloned();
        Self {
            broker: broker.clone(),
            list,
            progress,
            message: Arc::clone(message.share()),
            durability: message.durability,
            unit: message.unit,
            commit,
            done: false,
        }
    }

    /// Delivers the message to more receivers; returns the result once all have it.
    pub fn go_on(&mut self, turn: &mut Turn) -> Option<Published> {
        // If a receiver panics, the rest is lost, as it would be in one go.
        self.done = true;
        let mut message = self.message.borrow().with_commit(self.commit.take());
        (message.durability, message.unit) = (self.durability, self.unit);
        let broker = &self.broker;
        let stores = broker.stores().filter(|_| self.unit);
        let unit = stores.map(|stores| Unit::new(&message, &*stores.state));
        let Turn { dirty, effort, .. } = turn;
        broker.inner.deliverer().hand_out_some(&self.list, &message, &mut self.progress, dirty, effort);
        if let Some(unit) = unit {
            unit.keep_open();
        }
        self.commit = message.issued().cloned();
        self.done = self.progress.served >= self.list.len();
        self.done.then(|| broker.conclude(&message, self.progress.published))
    }

    /// Returns the commit that must be on disk before the message is acknowledged, if there is one. The caller ends its holder's
    /// part.
    pub fn commit(&self) -> Option<&Arc<Commit>> {
        self.commit.as_ref()
    }

    /// The same, if it is a unit, with a part for the operation that closes it, which the caller submits.
    pub fn unit(&self) -> Option<Arc<Commit>> {
        self.commit.as_ref().filter(|commit| commit.is_unit()).map(Commit::part)
    }
}

impl Drop for Spread {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut turn = Turn::default();
        while self.go_on(&mut turn).is_none() {
            turn.flush();
            turn.effort.renew();
        }
        turn.flush();
        let Some(commit) = self.commit.take() else { return };
        if let Some(stores) = self.broker.stores().filter(|_| self.unit) {
            let mut message = self.message.borrow().with_commit(Some(Arc::clone(&commit)));
            message.unit = true;
            drop(Unit::new(&message, &*stores.state));
        }
        commit.done();
    }
}
