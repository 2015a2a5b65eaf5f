//! All groups of the gateway: made, found, changed and ended.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use access::backends::Scope;
use bytes::Bytes;
use gateway_core::{GroupId, PARTITIONS, Partition, Timestamp};
use groups::{Group, GroupIdentity, MemberStatus, Progress, Roster};
use parking_lot::{Mutex, RwLock};
use store::{Epoch, Expect, GroupState, PartitionedLog, StateChange};
use tokio::{sync::oneshot, task::JoinSet};

use super::{
    Definition, GroupError, GroupStart, Info, Joining, LiveMember, Marker, MemberMemory,
    dead_letters::{self, DeadLetters},
    info::info,
    live::{GroupOwner, Live},
    member::HELD,
    records::{
        DEFINITION, KeptDefinition, SettledCounts, definition_change, load_counts, load_members,
        load_progress, put,
    },
    start::{places, token},
    upkeep::GroupUpkeep,
    watching::GroupTable,
};

/// Bounds of all groups.
#[derive(Debug, Clone, Copy)]
pub struct GroupsOptions {
    /// Groups at once.
    pub max_groups: usize,
    /// Dead letters that a group keeps; for one more the oldest goes.
    pub max_dead_letters: usize,
    /// Bytes of these.
    pub max_dead_letter_bytes: usize,
    /// Bytes of the log; beyond them the oldest go, or what matches is refused, as each group says.
    pub max_log_bytes: u64,
    /// Interval at which messages that nobody needs are removed.
    pub upkeep_interval: Duration,
    /// The time.
    pub clock: fn() -> Timestamp,
}

/// All groups of the gateway.
pub struct ConsumerGroups {
    pub(super) log: Arc<dyn PartitionedLog>,
    pub(super) state: Arc<dyn GroupState>,
    pub(super) marker: Arc<dyn Marker>,
    pub(super) options: GroupsOptions,
    pub(super) upkeep: Arc<GroupUpkeep>,
    pub(super) table: Arc<GroupTable>,
    names: RwLock<BTreeMap<String, Arc<Live>>>,
    /// Held by who makes, changes or deletes a group.
    changing: tokio::sync::Mutex<GroupRegistry>,
    /// Tasks of the groups, the upkeep, and calls that are run to their end.
    tasks: Mutex<JoinSet<()>>,
}

/// The records that are no group's: under the number that no group has.
struct GroupRegistry {
    /// Acquired when the first group is made: a start without groups writes nothing, and works on a full disk.
    epoch: Option<Epoch>,
    /// The number of the next group.
    next: u32,
}

const NOBODY: GroupId = GroupId(0);
const NEXT: &[u8] = b"n";

impl ConsumerGroups {
    /// Brings back all groups, and begins to serve them. Before the first message is appended.
    ///
    /// # Errors
    /// [`GroupError::Store`], or [`GroupError::Damaged`].
    pub async fn load(
        log: Arc<dyn PartitionedLog>,
        state: Arc<dyn GroupState>,
        marker: Arc<dyn Marker>,
        options: GroupsOptions,
    ) -> Result<Arc<Self>, GroupError> {
        let table = Arc::new(GroupTable::new(options.max_log_bytes));
        log.watch(Arc::clone(&table) as _);
        let upkeep =
            GroupUpkeep::new(Arc::clone(&log), Arc::clone(&table), options.clock, options.max_log_bytes);
        let next = state.read(NOBODY, Bytes::from_static(NEXT), None, 1).await?;
        let next =
            next.first().and_then(|record| Some(u32::from_le_bytes(record.value.as_ref().try_into().ok()?)));
        let ids = state.groups().await?;
        let highest = ids.iter().map(|id| id.0).max().unwrap_or_default();
        let registry = GroupRegistry { epoch: None, next: next.unwrap_or(1).max(highest.saturating_add(1)) };
        let groups = Arc::new(Self {
            log,
            state,
            marker,
            options,
            upkeep: Arc::new(upkeep),
            table,
            names: RwLock::new(BTreeMap::new()),
            changing: tokio::sync::Mutex::new(registry),
            tasks: Mutex::default(),
        });
        for id in ids.into_iter().filter(|&id| id != NOBODY) {
            groups.restore(id).await?;
        }
        groups.spawn(Arc::clone(&groups.upkeep).run(options.upkeep_interval));
        Ok(groups)
    }

    async fn restore(&self, id: GroupId) -> Result<(), GroupError> {
        // Nothing is written here: the disk may be full.
        let seen = self.state.epoch(id).await?;
        let counts = load_counts(&self.state, id).await?;
        let definition = self.state.read(id, Bytes::from_static(DEFINITION), None, 1).await?;
        let Some(definition) = definition.first() else {
            // Its removal, or its making, was cut short.
            if let Err(error) = self.clear(id, seen).await {
                tracing::warn!(group = id.0, %error, "what is left of a group that was deleted stays for now");
            }
            return Ok(());
        };
        let mut kept: KeptDefinition =
            serde_json::from_slice(&definition.value).map_err(|_| GroupError::Damaged)?;
        if kept.born.len() != PARTITIONS || kept.start.len() != PARTITIONS {
            return Err(GroupError::Damaged);
        }
        let mut progress = load_progress(&self.state, id).await?;
        let mut members = load_members(&self.state, id).await?;
        if kept.log != self.log.id() {
            tracing::warn!(group = kept.definition.name, "the log is another one, group begins at its start");
            let starts: Vec<u64> =
                Partition::all().map(|partition| self.log.bounds(partition).start).collect();
            (kept.log, kept.born, kept.start) = (self.log.id(), starts.clone(), starts);
            kept.had_other_filters = false;
            progress.clear();
            members = None;
        }
        let GroupsOptions { max_dead_letters, max_dead_letter_bytes, .. } = self.options;
        let mut letters = DeadLetters::new(max_dead_letters, max_dead_letter_bytes, counts.0.next_letter);
        let mut after = None;
        loop {
            let page = self.state.read(id, Bytes::from_static(&[dead_letters::LETTER]), after, 100).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for record in &page {
                letters
                    .restore(dead_letters::id(&record.key).ok_or(GroupError::Damaged)?, record.value.len());
            }
        }
        let filter = kept.definition.filter.clone();
        let name = kept.definition.name.clone();
        let live = self.serve(id, GroupOwner::later(seen), kept, (progress, members), letters, counts);
        live.with(|inner| inner.has_begun = true);
        self.names.write().insert(name, live);
        self.marker.keep_for(id, &filter);
        Ok(())
    }

    async fn clear(&self, id: GroupId, seen: Epoch) -> Result<(), GroupError> {
        let epoch = self.state.acquire(id, seen).await?;
        Ok(self.state.remove(id, epoch).await?)
    }

    /// Begins to serve a group, which has no name yet.
    fn serve(
        &self,
        id: GroupId,
        owner: GroupOwner,
        kept: KeptDefinition,
        (progress, members): (Vec<(Partition, Progress)>, Option<Roster>),
        letters: DeadLetters,
        counts: (SettledCounts, Option<Expect>),
    ) -> Arc<Live> {
        let life = ahash::RandomState::new().hash_one(id) as u32;
        let identity = GroupIdentity { group: id, life, generation: kept.generation, seed: kept.seed };
        let mut logic = Group::new(identity, kept.definition.config());
        let mut places: Vec<Progress> = kept.start.iter().map(|&start| Progress::at(start)).collect();
        for (partition, progress) in progress {
            places[usize::from(partition.0)] = progress;
        }
        let now = (self.options.clock)();
        for (partition, place) in Partition::all().zip(places) {
            logic.restore(partition, place, now);
            logic.set_end(partition, self.log.bounds(partition).end);
        }
        if let Some(members) = members {
            logic.restore_members(members, now);
        }
        let wants = self.marker.matcher(&kept.definition.filter);
        let engines = (Arc::clone(&self.log), Arc::clone(&self.state), Arc::clone(&self.marker));
        let live = Live::new(id, owner, engines, self.options.clock, kept, wants, logic, letters, counts);
        let live = Arc::new(live);
        self.table.insert(id, Arc::clone(&live));
        self.spawn(Arc::clone(&live).write_all());
        self.spawn(Arc::clone(&live).bury_all());
        self.spawn(Arc::clone(&live).tick_all());
        live
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        // Tasks that have ended meanwhile.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Runs something to its end, although nobody may wait for it any more: cut between two writes it would leave half.
    async fn to_the_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, GroupError>> + Send + 'static,
    ) -> Result<T, GroupError> {
        let (done, answer) = oneshot::channel();
        self.spawn(async move {
            let _ = done.send(work.await);
        });
        answer.await.map_err(|_| GroupError::Gone)?
    }

    /// Makes a group; the same again is fine. Returns it, and a token of where it begins. Cancelled, the group is made all the
    /// same; until that is done the next call waits.
    ///
    /// # Errors
    /// [`GroupError::Exists`], [`GroupError::TooManyGroups`], those of [`GroupStart`], or of the store.
    pub async fn create(
        self: &Arc<Self>,
        definition: Definition,
        start: &GroupStart,
    ) -> Result<(Info, String), GroupError> {
        let (groups, start) = (Arc::clone(self), start.clone());
        self.to_the_end(async move { groups.make(definition, &start).await }).await
    }

    async fn make(&self, definition: Definition, start: &GroupStart) -> Result<(Info, String), GroupError> {
        let mut registry = self.changing.lock().await;
        if let Ok(live) = self.find(&definition.name) {
            let (same, places) =
                live.with(|inner| (inner.kept.definition == definition, inner.kept.start.clone()));
            let token = token(self.log.id(), &places);
            return if same { Ok((info(&live), token)) } else { Err(GroupError::Exists) };
        }
        if self.names.read().len() >= self.options.max_groups {
            return Err(GroupError::TooManyGroups);
        }
        let start = places(&*self.log, start).await?;
        let id = GroupId(registry.next);
        let next = Bytes::copy_from_slice(&(id.0 + 1).to_le_bytes());
        let epoch = match registry.epoch {
            Some(epoch) => epoch,
            None => *registry.epoch.insert(self.acquire(NOBODY).await?),
        };
        self.state.write(NOBODY, epoch, vec![put(Bytes::from_static(NEXT), next)]).await?;
        registry.next += 1;
        let epoch = self.acquire(id).await?;
        let ends: Vec<u64> = Partition::all().map(|partition| self.log.bounds(partition).end).collect();
        let (name, filter) = (definition.name.clone(), definition.filter.clone());
        let kept = KeptDefinition {
            definition,
            etag: 1,
            created: (self.options.clock)().0,
            generation: 1,
            seed: ahash::RandomState::new().hash_one(id),
            log: self.log.id(),
            start: start.clone(),
            born: ends,
            had_other_filters: false,
        };
        let letters = DeadLetters::new(self.options.max_dead_letters, self.options.max_dead_letter_bytes, 1);
        let owner = GroupOwner::now(epoch);
        let live = self.serve(id, owner, kept, (Vec::new(), None), letters, (SettledCounts::default(), None));
        self.marker.keep_for(id, &filter);
        // Messages that became durable meanwhile without the group's number belong to the group by its filter.
        let ends: Vec<u64> = Partition::all().map(|partition| self.log.bounds(partition).end).collect();
        let changes = live.with(|inner| {
            for (partition, &end) in Partition::all().zip(&ends) {
                inner.logic.set_end(partition, end);
            }
            inner.kept.born = ends;
            inner.has_begun = true;
            vec![definition_change(&inner.kept), inner.counts_change()]
        });
        if let Err(error) = self.state.write(id, epoch, changes).await {
            self.forget(&live);
            return Err(error.into());
        }
        // A group that can be found is on disk.
        self.names.write().insert(name, Arc::clone(&live));
        Ok((info(&live), token(self.log.id(), &start)))
    }

    async fn acquire(&self, id: GroupId) -> Result<Epoch, GroupError> {
        let last = self.state.epoch(id).await?;
        Ok(self.state.acquire(id, last).await?)
    }

    /// Changes a group. Its name, its filter and what its messages are in order with do not change. Cancelled, it is changed all the same.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::EtagMismatch`], or those of the store.
    pub async fn update(&self, definition: Definition, etag: Option<&str>) -> Result<Info, GroupError> {
        let (live, number) = {
            let _changing = self.changing.lock().await;
            let live = self.find(&definition.name)?;
            let definition = live.with(|inner| {
                if etag.is_some_and(|etag| etag != inner.kept.etag.to_string()) {
                    return Err(GroupError::EtagMismatch);
                }
                let Definition { filter, order, .. } = inner.kept.definition.clone();
                Ok(Definition { filter, order, ..definition })
            });
            let number = live.redefine(definition?);
            (live, number)
        };
        live.written(number).await?;
        Ok(info(&live))
    }

    /// Ends a group, and frees what the log has for it. Cancelled, it is ended all the same.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], or those of the store: then the group is still there.
    pub async fn delete(self: &Arc<Self>, name: &str) -> Result<(), GroupError> {
        let (groups, name) = (Arc::clone(self), name.to_owned());
        self.to_the_end(async move { groups.end(&name).await }).await
    }

    async fn end(&self, name: &str) -> Result<(), GroupError> {
        let _changing = self.changing.lock().await;
        let live = self.find(name)?;
        // A definition that is written later would bring the group back.
        let number = live.with(|inner| Live::wait_number(inner));
        live.written(number).await?;
        let epoch = live.own().await?;
        // Without this record it is no group any more: the rest may be removed in steps, and at the next start.
        let definition =
            StateChange { key: Bytes::from_static(DEFINITION), value: None, expect: Expect::Any };
        if let Err(error) = self.state.write(live.id, epoch, vec![definition]).await {
            // The write may have failed or not: a group that is still served must be there after a restart.
            live.with(|inner| inner.keep());
            return Err(error.into());
        }
        self.forget(&live);
        self.log.forget(live.id);
        if let Err(error) = self.clear(live.id, epoch).await {
            tracing::warn!(group = live.id.0, %error, "what is left of a group that was deleted stays for now");
        }
        Ok(())
    }

    fn forget(&self, live: &Arc<Live>) {
        self.marker.keep_no_more_for(live.id);
        self.table.remove(live.id);
        self.names.write().retain(|_, other| !Arc::ptr_eq(other, live));
        live.end();
    }

    /// Ends all groups, and returns when only members that were not dropped still hold the stores. Messages that are
    /// acknowledged and not written come again.
    pub async fn stop(&self) {
        self.upkeep.write_places().await;
        for live in self.table.all() {
            live.end();
        }
        // The log knows the table, and the groups in it the log.
        self.table.clear();
        self.names.write().clear();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
    }

    pub(super) fn find(&self, name: &str) -> Result<Arc<Live>, GroupError> {
        self.names.read().get(name).cloned().ok_or(GroupError::NotFound)
    }

    /// A group whose messages a caller of this scope may have.
    pub(super) fn find_within(&self, name: &str, scope: &Scope) -> Result<Arc<Live>, GroupError> {
        let live = self.find(name)?;
        if live.with(|inner| inner.is_within(scope)) { Ok(live) } else { Err(GroupError::OutOfScope) }
    }

    /// One group.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn get(&self, name: &str) -> Result<Info, GroupError> {
        let live = self.find(name)?;
        Ok(info(&live))
    }

    /// Groups in order of name: at most `limit` behind `after`.
    pub fn list(&self, after: Option<&str>, limit: usize) -> Vec<Info> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let page: Vec<Arc<Live>> = self
            .names
            .read()
            .range::<str, _>((from, Unbounded))
            .take(limit)
            .map(|(_, live)| Arc::clone(live))
            .collect();
        page.iter().map(|live| info(live)).collect()
    }

    /// Moves a group for a caller of this scope. Returns a token of where it was. Cancelled, it is moved or not.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], those of [`GroupStart`], or of the store.
    pub async fn seek(&self, name: &str, to: &GroupStart, scope: &Scope) -> Result<String, GroupError> {
        self.find_within(name, scope)?;
        let places = places(&*self.log, to).await?;
        let changing = self.changing.lock().await;
        let live = self.find_within(name, scope)?;
        let marks = self.log.marks(live.id);
        let least = places.iter().copied().min().unwrap_or_default();
        let mark = marks.iter().rfind(|mark| mark.offset <= least).or_else(|| marks.first());
        let (messages, bytes) = mark.map_or((0, 0), |mark| (mark.messages, mark.bytes));
        let (before, number) = live.with(|inner| {
            let before: Vec<u64> = Partition::all().map(|partition| inner.logic.floor(partition)).collect();
            inner.logic.seek(|partition| places[usize::from(partition.0)]);
            inner.kept.generation = inner.logic.identity().generation;
            let totals = inner.logic.totals();
            let since = totals.settled + totals.given_up + totals.lost;
            inner.base = messages.saturating_sub(since);
            inner.base_bytes = bytes.saturating_sub(totals.settled_bytes);
            inner.keep();
            (before, Live::wait_number(inner))
        });
        drop(changing);
        live.written(number).await?;
        Ok(token(self.log.id(), &before))
    }

    /// A member with a stream. Dropped, its stream has ended.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::TooManyMembers`], [`GroupError::Memory`].
    pub fn open(&self, group: &str, joining: Joining<'_>) -> Result<LiveMember, GroupError> {
        let held = MemberMemory::take(&self.marker, HELD)?;
        LiveMember::join(&self.find(group)?, joining, false, held)
    }

    /// Sets memory aside for a consumer in this process that keeps what it was delivered.
    ///
    /// # Errors
    /// [`GroupError::Memory`].
    pub fn set_aside(&self, bytes: usize) -> Result<MemberMemory, GroupError> {
        MemberMemory::take(&self.marker, bytes)
    }

    /// The number of the log, which is drawn when it is made and kept.
    pub fn log_id(&self) -> u64 {
        self.log.id()
    }

    /// All members of a group.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn members(&self, group: &str) -> Result<Vec<MemberStatus>, GroupError> {
        Ok(self.find(group)?.with(|inner| inner.logic.members()))
    }
}
