//! Groups that come in the place of others, since the filter of a group stays: what waits in the old group goes out first, in
//! order, then what the new one selects.
//!
//! Both have the same name, and nobody sees more than one: the newest is the group, and those before it are its predecessors.
//! Nothing is marked for a predecessor any more. Members get what is left in the oldest; once that is nothing, it leaves its
//! dead letters to the next and ends, and so do its members, who come back to the next. A group that has members for the first
//! time thus has no letters but these.
//!
//! The record of the new group is where the change takes place: until it is on disk everything is as before, and from then on
//! a start finds two records of the name and marks nothing for the older. Messages are marked for the new group a moment
//! later. Those in between are the old group's, and the new one passes over them, although it begins before them.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use gateway_core::Partition;
use tracing::{info, warn};

use super::{
    ConsumerGroups, Definition, GroupError, Info, dead_letters,
    live::{GroupInner, GroupOwner, Live},
    records::definition_change,
    service::Found,
};

/// Time between looks at a predecessor.
const LOOK: Duration = Duration::from_millis(50);
/// Dead letters that are moved at a time.
const LETTERS: usize = 100;

impl ConsumerGroups {
    /// Puts a group in the place of the one that has its name, to have another filter, and begins behind all that was appended
    /// for that one. Cancelled, it is done all the same.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], or those of the store: then the old group goes on.
    pub async fn succeed(self: &Arc<Self>, definition: Definition) -> Result<Info, GroupError> {
        let groups = Arc::clone(self);
        self.to_the_end(async move { groups.replace(definition).await }).await
    }

    async fn replace(self: &Arc<Self>, definition: Definition) -> Result<Info, GroupError> {
        let mut registry = self.changing.lock().await;
        let old = self.find(&definition.name)?;
        let (id, epoch) = self.number(&mut registry).await?;
        let ends = self.ends();
        let (name, filter) = (definition.name.clone(), definition.filter.clone());
        let kept = self.kept(id, definition, ends.clone(), ends);
        self.state.write(id, epoch, vec![definition_change(&kept)]).await?;
        let live = self.serve(id, GroupOwner::now(epoch), kept, Found::default());
        live.with(|inner| inner.has_begun = true);
        self.marker.replace(old.id, id, &filter);
        self.add(&name, live);
        info!(
            group = name,
            old = old.id.0,
            new = id.0,
            "group has another filter, what waits goes out first"
        );
        self.spawn(Arc::clone(self).retire(old));
        self.get(&name)
    }

    /// Ends a predecessor once it is the oldest and nothing is left in it.
    pub(super) async fn retire(self: Arc<Self>, old: Arc<Live>) {
        while !old.is_ended() {
            tokio::time::sleep(LOOK).await;
            let Some(next) = self.next_of(&old) else { continue };
            if !old.with(|inner| inner.is_idle() && inner.letters.close()) {
                continue;
            }
            if let Err(error) = self.hand_over(&old, &next).await {
                warn!(group = old.id.0, %error, "group that has a successor cannot be ended, trying again");
            }
            old.with(|inner| inner.letters.reopen());
        }
    }

    /// Ends a predecessor if nothing is left in it. Its letters are closed: nobody puts one back meanwhile.
    async fn hand_over(&self, old: &Arc<Live>, next: &Arc<Live>) -> Result<(), GroupError> {
        // All that was ever marked for it is among this.
        let submitted = self.log.submitted();
        while self.log.ended() < submitted {
            tokio::time::sleep(LOOK).await;
        }
        let ends = self.ends();
        let told = self.table.told();
        let settled = old.with(|inner| {
            inner.pass(told);
            inner.is_settled(&ends).then(|| Live::wait_number(inner))
        });
        let Some(settled) = settled else { return Ok(()) };
        old.written(settled).await?;
        self.move_letters(old, next).await?;
        let _changing = self.changing.lock().await;
        self.remove(old).await
    }

    /// Leaves the letters of a predecessor to the next, under their numbers. Those that the next has are from a try before.
    async fn move_letters(&self, old: &Live, next: &Live) -> Result<(), GroupError> {
        let from = old.with(|inner| inner.letters.next());
        next.with(|inner| {
            let tried = inner.letters.ids().into_iter().filter_map(|id| inner.letters.remove(id));
            let tried: Vec<_> = tried.collect();
            inner.changes.extend(tried);
            inner.letters.go_on_from(from);
            inner.keep();
        });
        let mut after = None;
        loop {
            let page =
                self.state.read(old.id, Bytes::from_static(&[dead_letters::LETTER]), after, LETTERS).await?;
            let number = next.with(|inner| {
                let moved: Vec<_> = page.iter().filter_map(|letter| inner.letters.adopt(letter)).collect();
                inner.changes.extend(moved);
                Live::wait_number(inner)
            });
            next.written(number).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.key.clone());
        }
    }
}

impl GroupInner {
    /// Tells whether nothing waits, as far as is known.
    fn is_idle(&self) -> bool {
        Partition::all().all(|partition| self.logic.is_idle(partition))
    }

    /// Tells whether everything before these places is settled, and nothing is known to be behind.
    fn is_settled(&self, ends: &[u64]) -> bool {
        self.is_idle()
            && Partition::all().zip(ends).all(|(partition, &end)| self.logic.floor(partition) >= end)
    }
}
