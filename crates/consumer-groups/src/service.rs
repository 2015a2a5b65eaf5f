//! All groups of the gateway: made, found, changed and ended.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use access::backends::Scope;
use bytes::Bytes;
use gateway_core::{GroupId, PARTITIONS, Partition, Timestamp};
use groups::{Group, GroupIdentity, MemberStatus, Progress, Roster};
use parking_lot::{Mutex, RwLock};
use store::{Expect, PartitionedLog, RecordStore};
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
    state::{Epoch, GroupState, StateChange},
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

/// Records of a group beside its definition; none of a new one.
#[derive(Default)]
pub(super) struct Found {
    progress: Vec<(Partition, Progress)>,
    members: Option<Roster>,
    letters: Option<DeadLetters>,
    counts: (SettledCounts, Option<Expect>),
}

/// All groups of the gateway.
pub struct ConsumerGroups {
    pub(super) log: Arc<dyn PartitionedLog>,
    pub(super) state: GroupState,
    pub(super) marker: Arc<dyn Marker>,
    pub(super) options: GroupsOptions,
    pub(super) upkeep: Arc<GroupUpkeep>,
    pub(super) table: Arc<GroupTable>,
    /// All of a name, the oldest first: the last is the group, those before it are its predecessors.
    names: RwLock<BTreeMap<String, Vec<Arc<Live>>>>,
    /// Held by who makes, changes or deletes a group.
    pub(super) changing: tokio::sync::Mutex<GroupRegistry>,
    /// Tasks of the groups, the upkeep, and calls that are run to their end.
    tasks: Mutex<JoinSet<()>>,
}

/// The records that are no group's: under the number that no group has.
pub(super) struct GroupRegistry {
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
        records: Arc<dyn RecordStore>,
        marker: Arc<dyn Marker>,
        options: GroupsOptions,
    ) -> Result<Arc<Self>, GroupError> {
        let state = GroupState::new(records);
        let table = Arc::new(GroupTable::new(options.max_log_bytes));
        log.watch(Arc::clone(&table) as _);
        let upkeep =
            GroupUpkeep::new(Arc::clone(&log), Arc::clone(&table), options.clock, options.max_log_bytes);
        let next = state.read(NOBODY, Bytes::from_static(NEXT), None, 1).await?;
        let next =
            next.first().and_then(|record| Some(u32::from_le_bytes(record.value.as_ref().try_into().ok()?)));
        let mut ids = state.groups().await?;
        ids.sort_unstable();
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
        // In the order in which they were made.
        for id in ids.into_iter().filter(|&id| id != NOBODY) {
            groups.restore(id).await?;
        }
        for all in groups.names.read().values() {
            let Some((newest, predecessors)) = all.split_last() else { continue };
            newest.with(|inner| groups.marker.keep_for(newest.id, &inner.kept.definition.filter));
            for old in predecessors {
                groups.spawn(Arc::clone(&groups).retire(Arc::clone(old)));
            }
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
        let name = kept.definition.name.clone();
        let found = Found { progress, members, letters: Some(letters), counts };
        let live = self.serve(id, GroupOwner::later(seen), kept, found);
        live.with(|inner| inner.has_begun = true);
        self.add(&name, live);
        Ok(())
    }

    /// Adds a group, of which others of the name are predecessors.
    pub(super) fn add(&self, name: &str, live: Arc<Live>) {
        self.names.write().entry(name.to_owned()).or_default().push(live);
    }

    async fn clear(&self, id: GroupId, seen: Epoch) -> Result<(), GroupError> {
        let epoch = self.state.acquire(id, seen).await?;
        Ok(self.state.remove(id, epoch).await?)
    }

    /// Begins to serve a group, which has no name yet.
    pub(super) fn serve(
        &self,
        id: GroupId,
        owner: GroupOwner,
        kept: KeptDefinition,
        Found { progress, members, letters, counts }: Found,
    ) -> Arc<Live> {
        let GroupsOptions { max_dead_letters, max_dead_letter_bytes, .. } = self.options;
        let letters = letters.unwrap_or_else(|| DeadLetters::new(max_dead_letters, max_dead_letter_bytes, 1));
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
        let engines = (Arc::clone(&self.log), self.state.clone(), Arc::clone(&self.marker));
        let live = Live::new(id, owner, engines, self.options.clock, kept, wants, logic, letters, counts);
        let live = Arc::new(live);
        self.table.insert(id, Arc::clone(&live));
        self.spawn(Arc::clone(&live).write_all());
        self.spawn(Arc::clone(&live).bury_all());
        self.spawn(Arc::clone(&live).tick_all());
        live
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        // Tasks that have ended meanwhile.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Runs something to its end, although nobody may wait for it any more: cut between two writes it would leave half.
    pub(super) async fn to_the_end<T: Send + 'static>(
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
            return if same { Ok((self.get(&definition.name)?, token)) } else { Err(GroupError::Exists) };
        }
        if self.names.read().len() >= self.options.max_groups {
            return Err(GroupError::TooManyGroups);
        }
        let start = places(&*self.log, start).await?;
        let (id, epoch) = self.number(&mut registry).await?;
        let (name, filter) = (definition.name.clone(), definition.filter.clone());
        let kept = self.kept(id, definition, start.clone(), self.ends());
        let live = self.serve(id, GroupOwner::now(epoch), kept, Found::default());
        self.marker.keep_for(id, &filter);
        // Messages that became durable meanwhile without the group's number belong to the group by its filter.
        let ends = self.ends();
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
        self.add(&name, live);
        Ok((self.get(&name)?, token(self.log.id(), &start)))
    }

    /// A number for a new group, and its first epoch.
    pub(super) async fn number(&self, registry: &mut GroupRegistry) -> Result<(GroupId, Epoch), GroupError> {
        let id = GroupId(registry.next);
        let next = Bytes::copy_from_slice(&(id.0 + 1).to_le_bytes());
        let epoch = match registry.epoch {
            Some(epoch) => epoch,
            None => *registry.epoch.insert(self.acquire(NOBODY).await?),
        };
        self.state.write(NOBODY, epoch, vec![put(Bytes::from_static(NEXT), next)]).await?;
        registry.next += 1;
        Ok((id, self.acquire(id).await?))
    }

    /// The record of a new group, for which messages are marked from `born` on.
    pub(super) fn kept(
        &self,
        id: GroupId,
        definition: Definition,
        start: Vec<u64>,
        born: Vec<u64>,
    ) -> KeptDefinition {
        KeptDefinition {
            definition,
            etag: 1,
            created: (self.options.clock)().0,
            generation: 1,
            seed: ahash::RandomState::new().hash_one(id),
            log: self.log.id(),
            start,
            born,
            had_other_filters: false,
        }
    }

    /// The end of each partition.
    pub(super) fn ends(&self) -> Vec<u64> {
        Partition::all().map(|partition| self.log.bounds(partition).end).collect()
    }

    async fn acquire(&self, id: GroupId) -> Result<Epoch, GroupError> {
        let last = self.state.epoch(id).await?;
        Ok(self.state.acquire(id, last).await?)
    }

    /// Changes a group, and its predecessors with it. Its name, its filter and what its messages are in order with do not change.
    /// Cancelled, it is changed all the same.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::EtagMismatch`], or those of the store.
    pub async fn update(&self, definition: Definition, etag: Option<&str>) -> Result<Info, GroupError> {
        let name = definition.name.clone();
        let (live, number) = {
            let _changing = self.changing.lock().await;
            let (live, predecessors) = self.all(&name)?;
            if etag.is_some_and(|etag| live.with(|inner| etag != inner.kept.etag.to_string())) {
                return Err(GroupError::EtagMismatch);
            }
            for old in predecessors {
                old.redefine(definition.clone());
            }
            let number = live.redefine(definition);
            (live, number)
        };
        live.written(number).await?;
        self.get(&name)
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
        let (live, predecessors) = self.all(name)?;
        // In this order: without its successor a predecessor would be the group.
        for live in predecessors.iter().chain([&live]) {
            self.remove(live).await?;
        }
        Ok(())
    }

    /// Ends this one.
    pub(super) async fn remove(&self, live: &Arc<Live>) -> Result<(), GroupError> {
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
        self.forget(live);
        self.log.forget(live.id);
        if let Err(error) = self.clear(live.id, epoch).await {
            tracing::warn!(group = live.id.0, %error, "what is left of a group that was deleted stays for now");
        }
        Ok(())
    }

    fn forget(&self, live: &Arc<Live>) {
        self.marker.keep_no_more_for(live.id);
        self.table.remove(live.id);
        self.names.write().retain(|_, all| {
            all.retain(|other| !Arc::ptr_eq(other, live));
            !all.is_empty()
        });
        live.end();
    }

    /// Ends all groups, and returns when only members that were not dropped still hold the stores. Messages that are
    /// acknowledged and not written come again.
    pub async fn stop(&self) {
        self.upkeep.write_places().await;
        self.give_up().await;
    }

    /// Ends all groups of a home that is another gateway's, and writes nothing.
    pub async fn give_up(&self) {
        for live in self.table.all() {
            live.end();
        }
        // The log knows the table, and the groups in it the log.
        self.table.clear();
        self.names.write().clear();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
    }

    /// The group, and its predecessors in order.
    fn all(&self, name: &str) -> Result<(Arc<Live>, Vec<Arc<Live>>), GroupError> {
        let mut all = self.names.read().get(name).cloned().unwrap_or_default();
        let newest = all.pop().ok_or(GroupError::NotFound)?;
        Ok((newest, all))
    }

    pub(super) fn find(&self, name: &str) -> Result<Arc<Live>, GroupError> {
        self.names.read().get(name).and_then(|all| all.last()).cloned().ok_or(GroupError::NotFound)
    }

    /// The group that gives out messages: the oldest of the name.
    pub(super) fn find_oldest(&self, name: &str) -> Result<Arc<Live>, GroupError> {
        self.names.read().get(name).and_then(|all| all.first()).cloned().ok_or(GroupError::NotFound)
    }

    /// The same for a caller of this scope, who may have all its messages.
    pub(super) fn find_within(&self, name: &str, scope: &Scope) -> Result<Arc<Live>, GroupError> {
        let live = self.find_oldest(name)?;
        if live.with(|inner| inner.is_within(scope)) { Ok(live) } else { Err(GroupError::OutOfScope) }
    }

    /// The group that comes after this one, if this is the oldest of its name and not the only one.
    pub(super) fn next_of(&self, old: &Arc<Live>) -> Option<Arc<Live>> {
        let name = old.with(|inner| inner.kept.definition.name.clone());
        match self.names.read().get(&name)?.as_slice() {
            [first, next, ..] if Arc::ptr_eq(first, old) => Some(Arc::clone(next)),
            _ => None,
        }
    }

    /// One group.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn get(&self, name: &str) -> Result<Info, GroupError> {
        let all = self.names.read().get(name).cloned();
        all.and_then(|all| info(&all)).ok_or(GroupError::NotFound)
    }

    /// Groups in order of name: at most `limit` behind `after`.
    pub fn list(&self, after: Option<&str>, limit: usize) -> Vec<Info> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let page: Vec<Vec<Arc<Live>>> = self
            .names
            .read()
            .range::<str, _>((from, Unbounded))
            .take(limit)
            .map(|(_, all)| all.clone())
            .collect();
        page.iter().filter_map(|all| info(all)).collect()
    }

    /// Moves a group for a caller of this scope. Returns a token of where it was. Cancelled, it is moved or not.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::Draining`], those of [`GroupStart`], or of the store.
    pub async fn seek(&self, name: &str, to: &GroupStart, scope: &Scope) -> Result<String, GroupError> {
        self.find_within(name, scope)?;
        let places = places(&*self.log, to).await?;
        let changing = self.changing.lock().await;
        let live = self.find_within(name, scope)?;
        if self.next_of(&live).is_some() {
            return Err(GroupError::Draining);
        }
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
        LiveMember::join(&self.find_oldest(group)?, joining, false, held)
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
        Ok(self.find_oldest(group)?.with(|inner| inner.logic.members()))
    }
}
