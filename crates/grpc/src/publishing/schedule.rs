//! Messages with a `deliver_at`: on disk before the answer, published when their time has come.
//!
//! Their time is a point of the clock that never jumps ([`clock`]): a caller's wall time is converted once, when the call
//! arrives. The state after a crash:
//!
//! 1. Before the record is on disk nobody was told anything, and it may be there or not. With an `idempotency_key` the key's
//!    record is in the same transaction, so that the same key finds the message or schedules it.
//! 2. A message is published, is safe where it went, and only then leaves the disk. A crash in between publishes it again.
//! 3. A message that was due while the gateway was away is published at the start, late.
//!
//! In a cluster of several homes one of them keeps a message for a topic, and every home publishes it, under a key of its own: one that
//! has it already does not publish it again when another is tried again.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use broker::{Account, Broker, MemoryKind, Turn};
use bytes::Bytes;
use gateway_core::{Commit, QoS, Timestamp, clock};
use parking_lot::Mutex;
use prost::Message as _;
use store::{RecordChange, RecordKind, RecordStore, StoreError};
use tokio::sync::{Notify, watch};
use tonic::Code;

use super::{
    routed::Routed,
    routing::{pause, route},
};
use crate::counters::count;
use crate::proto::gateway::v1;
use grpc_messages::{
    convert::{self, Publication},
    status::Error,
    wait::Wait,
};

/// The farthest time, from now.
const FARTHEST: Duration = Duration::from_hours(30 * 24);
/// Bytes counted for a message besides what it holds.
const OVERHEAD: usize = 512;
/// Messages published between two looks at the disk.
const STEP: usize = 256;
/// Delay in milliseconds after which a message is tried again that the gateway could not take.
const AGAIN: u64 = 1_000;
/// Delay in milliseconds from which on a message counts as late.
const LATE: u64 = 5_000;
/// Longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Longest wait for the homes of a cluster, which holds up all that is due.
const SPREAD: Duration = Duration::from_secs(5);

/// Publishes messages at every home of a cluster, each once under its key, and tells what became of them, in their order.
pub type TopicSpread = Arc<dyn Fn(Vec<v1::PublishRequest>) -> TopicsSpread + Send + Sync>;

/// Result of a [`TopicSpread`]; shorter than the list of messages if nothing is known of the rest.
pub(crate) type TopicsSpread = Pin<Box<dyn Future<Output = Vec<Result<(), v1::ItemError>>> + Send>>;

/// Limits of the schedule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScheduleOptions {
    pub most: usize,
    pub bytes: usize,
}

/// Due time of a message, and its number.
pub(crate) type DuePlace = (Timestamp, u64);

/// All messages that wait for their time.
pub(crate) struct Schedule {
    table: Mutex<ScheduleTable>,
    store: Option<Arc<dyn RecordStore>>,
    options: ScheduleOptions,
    account: Arc<Account>,
    /// For messages to topics; `None` publishes them here.
    spread: Option<TopicSpread>,
    changed: Notify,
}

#[derive(Default)]
struct ScheduleTable {
    due: BTreeMap<DuePlace, ScheduledPublish>,
    /// Due time of each message.
    ids: HashMap<u64, Timestamp, ahash::RandomState>,
    /// Charged.
    bytes: usize,
    last: u64,
}

/// One message.
#[derive(Clone)]
pub(crate) struct ScheduledPublish {
    pub(crate) publication: Arc<Publication>,
    /// Time for which the message is scheduled; its next try may be later.
    pub(crate) at: Timestamp,
    pub(crate) created: Timestamp,
    bytes: usize,
    /// True if the message is on disk.
    stored: bool,
}

impl Schedule {
    /// Reads the messages that earlier processes left in `store`, whatever the limits are now. Blocks on the disk.
    pub(crate) fn open(
        options: ScheduleOptions,
        store: Option<Arc<dyn RecordStore>>,
        broker: &Broker,
        spread: Option<TopicSpread>,
    ) -> Result<Arc<Self>, StoreError> {
        let account = Arc::clone(broker.account());
        let (table, changed) = (Mutex::default(), Notify::new());
        let schedule = Self { table, store, options, account, spread, changed };
        let Some(store) = &schedule.store else { return Ok(Arc::new(schedule)) };
        let (now, mut late, mut damaged) = (clock::now(), 0, Vec::new());
        let mut table = schedule.table.lock();
        store.restore(
            RecordKind::Scheduled,
            &mut |key, value| match (number(&key), decode(&value, broker)) {
                (Some(id), Some(entry)) => {
                    late += usize::from(entry.at <= now);
                    schedule.account.force(MemoryKind::Publisher, entry.bytes);
                    table.insert(id, entry);
                }
                _ => damaged.push(key),
            },
        )?;
        if !table.due.is_empty() {
            tracing::info!(messages = table.due.len(), late, "scheduled messages restored, late ones go now");
        }
        if !damaged.is_empty() {
            // The limits may have become smaller, too.
            tracing::warn!(
                messages = damaged.len(),
                "scheduled messages that cannot be published are dropped"
            );
            count(|c| c.grpc_scheduled_failed.add(damaged.len() as u64));
            store.submit(damaged.into_iter().map(removal).collect(), None);
        }
        drop(table);
        Ok(Arc::new(schedule))
    }

    /// Schedules a message. Its id, and what must be done before anybody is told; `with` is written in the same transaction.
    ///
    /// # Errors
    /// The time is too far away, there is no store, or no room.
    pub(crate) fn accept(
        self: &Arc<Self>,
        mut publication: Publication,
        deliver_at: Timestamp,
        with: impl FnOnce(&str) -> Option<RecordChange>,
    ) -> Result<(String, Arc<Commit>), Error> {
        let Some(store) = &self.store else { return Err(Error::ScheduleOff) };
        let now = clock::now();
        let away = Duration::from_millis(deliver_at.0.saturating_sub(clock::to_wall(now).0));
        if away > FARTHEST {
            return Err(Error::invalid("deliver_at", "is more than 30 days away"));
        }
        if !store.accepts() {
            gateway_core::counters::count(|c| c.refused_store.add(1));
            return Err(Error::StoreRefused);
        }
        // Copied: a slice would keep the whole request in memory.
        publication.payload = Bytes::copy_from_slice(&publication.payload);
        publication.wait = if publication.qos == QoS::AtMostOnce { Wait::Accepted } else { Wait::Durable };
        let at = now.plus_millis(away.as_millis() as u64);
        let bytes = cost(&publication);
        let entry =
            ScheduledPublish { publication: Arc::new(publication), at, created: now, bytes, stored: false };
        let commit = Commit::new();
        let id = {
            let mut table = self.table.lock();
            if table.due.len() >= self.options.most || table.bytes + bytes > self.options.bytes {
                count(|c| c.grpc_scheduled_refused.add(1));
                return Err(Error::ScheduleFull);
            }
            if !self.account.charge(MemoryKind::Publisher, table.bytes, bytes) {
                broker::counters::count(|c| c.memory_publisher.add(1));
                return Err(Error::MemoryBudget);
            }
            // Never one that was there before, in this process or an earlier one.
            let id = (now.0 << 16).max(table.last + 1);
            let mut changes = vec![record(id, &entry)];
            table.insert(id, entry);
            changes.extend(with(&name(id)));
            store.submit(changes, Some(commit.part()));
            id
        };
        count(|c| c.grpc_scheduled_accepted.add(1));
        let schedule = Arc::clone(self);
        commit.then(move |written| schedule.written(id, written.is_ok()));
        Ok((name(id), commit))
    }

    fn written(&self, id: u64, written: bool) {
        let mut table = self.table.lock();
        if written {
            if let Some(at) = table.ids.get(&id).copied()
                && let Some(entry) = table.due.get_mut(&(at, id))
            {
                entry.stored = true;
            }
        } else {
            self.take(&mut table, id);
        }
        drop(table);
        self.changed.notify_one();
    }

    fn take(&self, table: &mut ScheduleTable, id: u64) -> Option<ScheduledPublish> {
        let at = table.ids.remove(&id)?;
        let entry = table.due.remove(&(at, id))?;
        table.bytes -= entry.bytes;
        self.account.release(MemoryKind::Publisher, entry.bytes);
        Some(entry)
    }

    /// The message, if it still waits.
    pub(crate) fn get(&self, id: &str) -> Option<ScheduledPublish> {
        let id = number_of(id)?;
        let table = self.table.lock();
        table.due.get(&(*table.ids.get(&id)?, id)).cloned()
    }

    /// Cancels a message; returns once that is on disk.
    ///
    /// # Errors
    /// It no longer waits, or the disk does not take it: then it is cancelled, unless the gateway crashes before the disk
    /// does.
    pub(crate) async fn cancel(&self, id: &str) -> Result<(), Error> {
        let id = number_of(id).ok_or(Error::ScheduleNotFound)?;
        let commit = Commit::new();
        {
            let mut table = self.table.lock();
            self.take(&mut table, id).ok_or(Error::ScheduleNotFound)?;
            if let Some(store) = &self.store {
                store.submit(vec![removal(key(id))], Some(commit.part()));
            }
        }
        count(|c| c.grpc_scheduled_cancelled.add(1));
        commit.done();
        commit.wait().await.map_err(|_| Error::StoreRefused)
    }

    /// Lists messages behind `after` in the order of their times, at most `most` that `wanted` accepts, and looks at no
    /// more than 10,000. Also returns the place at which to go on; `None` at the end.
    pub(crate) fn list(
        &self,
        after: Option<DuePlace>,
        most: usize,
        wanted: impl Fn(&ScheduledPublish) -> bool,
    ) -> (Vec<(String, ScheduledPublish)>, Option<DuePlace>) {
        const LOOK: usize = 10_000;

        let table = self.table.lock();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut found = Vec::new();
        for (looked, (place, entry)) in table.due.range((from, Bound::Unbounded)).enumerate() {
            if entry.stored && wanted(entry) {
                found.push((name(place.1), entry.clone()));
            }
            if found.len() >= most || looked + 1 >= LOOK {
                return (found, Some(*place));
            }
        }
        (found, None)
    }

    /// Publishes what is due, until `shutdown`.
    pub(crate) async fn run(self: Arc<Self>, broker: Broker, mut shutdown: watch::Receiver<bool>) {
        while !*shutdown.borrow() {
            let due = self.due();
            if !due.is_empty() {
                self.publish(&broker, due).await;
                continue;
            }
            tokio::select! {
                // A sender that is gone counts as asking.
                _ = shutdown.wait_for(|stop| *stop) => return,
                () = self.sleep() => {}
            }
        }
    }

    /// Waits until something may be due.
    async fn sleep(&self) {
        let first = self.table.lock().due.iter().find(|(_, entry)| entry.stored).map(|((at, _), _)| *at);
        let left = first.map_or(LONGEST_SLEEP, |at| {
            Duration::from_millis(at.0.saturating_sub(clock::now().0)).min(LONGEST_SLEEP)
        });
        let _ = tokio::time::timeout(left, self.changed.notified()).await;
    }

    /// Some that are due. They stay in the table, where they may be cancelled until they are published.
    fn due(&self) -> Vec<u64> {
        let now = clock::now();
        let table = self.table.lock();
        let due = table.due.range(..=(now, u64::MAX)).filter(|(_, entry)| entry.stored);
        due.take(STEP).map(|((_, id), _)| *id).collect()
    }

    /// Publishes messages, and removes from the disk those that are safe where they went.
    async fn publish(&self, broker: &Broker, due: Vec<u64>) {
        let mut turn = Turn::default();
        let mut sent: Vec<(u64, ScheduledPublish, Routed)> = Vec::new();
        let (mut gone, mut spreading) = (Vec::new(), Vec::new());
        for id in due {
            if turn.effort.is_spent() {
                pause(&mut turn).await;
            }
            let Some(entry) = ({
                let mut table = self.table.lock();
                self.take(&mut table, id)
            }) else {
                continue;
            };
            if self.spread.is_some() && entry.publication.device.is_none() {
                spreading.push((id, entry));
                continue;
            }
            let now = clock::now();
            match route(broker, &entry.publication, now, &mut turn).await {
                Ok(routed) => sent.push((id, entry, routed)),
                Err(error) if is_passing(&error) => self.again(id, entry),
                Err(error) => {
                    note_failed(id, &error.to_string());
                    gone.push(id);
                }
            }
        }
        turn.flush();
        gone.extend(self.publish_everywhere(spreading).await);
        for (id, entry, routed) in sent {
            if routed.wait().await.is_err() {
                self.again(id, entry);
                continue;
            }
            note_published(&entry);
            gone.push(id);
        }
        if let Some(store) = self.store.as_ref().filter(|_| !gone.is_empty()) {
            store.submit(gone.into_iter().map(|id| removal(key(id))).collect(), None);
        }
    }

    /// Publishes messages at every home, and returns those that are published there, or never will be.
    async fn publish_everywhere(&self, messages: Vec<(u64, ScheduledPublish)>) -> Vec<u64> {
        let Some(spread) = self.spread.as_ref().filter(|_| !messages.is_empty()) else { return Vec::new() };
        let requests = messages.iter().map(|(id, entry)| {
            let wait = match entry.publication.wait {
                Wait::Durable => v1::Wait::Durable,
                _ => v1::Wait::Accepted,
            };
            v1::PublishRequest {
                idempotency_key: name(*id),
                wait: wait.into(),
                ..convert::request(&entry.publication)
            }
        });
        let told = tokio::time::timeout(SPREAD, spread(requests.collect())).await.unwrap_or_default();
        let mut told = told.into_iter();
        let mut gone = Vec::new();
        for (id, entry) in messages {
            match told.next() {
                Some(Ok(())) => note_published(&entry),
                Some(Err(error)) if !may_pass(&error) => note_failed(id, &error.message),
                _ => {
                    self.again(id, entry);
                    continue;
                }
            }
            gone.push(id);
        }
        gone
    }

    /// Puts a message back to be tried again.
    fn again(&self, id: u64, entry: ScheduledPublish) {
        self.account.force(MemoryKind::Publisher, entry.bytes);
        let mut table = self.table.lock();
        let bytes = entry.bytes;
        let at = clock::now().plus_millis(AGAIN);
        table.ids.insert(id, at);
        table.due.insert((at, id), entry);
        table.bytes += bytes;
    }
}

impl Drop for Schedule {
    fn drop(&mut self) {
        self.account.release(MemoryKind::Publisher, self.table.get_mut().bytes);
    }
}

impl ScheduleTable {
    fn insert(&mut self, id: u64, entry: ScheduledPublish) {
        self.last = self.last.max(id);
        self.bytes += entry.bytes;
        self.ids.insert(id, entry.at);
        self.due.insert((entry.at, id), entry);
    }
}

/// Tells whether a retry may succeed in a moment.
fn is_passing(error: &Error) -> bool {
    matches!(error, Error::StoreRefused | Error::MemoryBudget)
}

/// Tells the same of the error of a home.
fn may_pass(error: &v1::ItemError) -> bool {
    let code = Code::from_i32(error.code);
    matches!(code, Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded)
}

fn note_published(entry: &ScheduledPublish) {
    let late = clock::now().0.saturating_sub(entry.at.0) > LATE;
    count(|c| if late { c.grpc_scheduled_late.add(1) } else { c.grpc_scheduled_published.add(1) });
}

fn note_failed(id: u64, error: &str) {
    count(|c| c.grpc_scheduled_failed.add(1));
    gateway_core::warn_limited!(error, schedule_id = name(id), "scheduled message is not published");
}

fn cost(publication: &Publication) -> usize {
    let device = publication.device.as_ref().map_or(0, String::len);
    let properties = publication.properties.as_ref().map_or(0, |properties| properties.cost());
    OVERHEAD + publication.payload.len() + publication.topic.len() + device + properties
}

/// The id as callers know it.
fn name(id: u64) -> String {
    format!("{id:016x}")
}

fn number_of(name: &str) -> Option<u64> {
    u64::from_str_radix(name, 16).ok().filter(|id| self::name(*id) == name)
}

fn key(id: u64) -> Bytes {
    Bytes::copy_from_slice(&id.to_be_bytes())
}

fn number(key: &[u8]) -> Option<u64> {
    key.try_into().ok().map(u64::from_be_bytes)
}

/// The first byte of a record: the form of what follows.
const FORM: u8 = 1;

fn record(id: u64, entry: &ScheduledPublish) -> RecordChange {
    let mut value = vec![FORM];
    for time in [entry.at, entry.created] {
        value.extend_from_slice(&time.0.to_be_bytes());
    }
    value.extend_from_slice(&convert::request(&entry.publication).encode_to_vec());
    RecordChange::put(RecordKind::Scheduled, key(id), value.into())
}

fn removal(key: Bytes) -> RecordChange {
    RecordChange::remove(RecordKind::Scheduled, key)
}

/// Reads a record written by [`record`].
fn decode(value: &[u8], broker: &Broker) -> Option<ScheduledPublish> {
    let (&FORM, rest) = value.split_first()? else { return None };
    let (at, rest) = rest.split_first_chunk::<8>()?;
    let (created, rest) = rest.split_first_chunk::<8>()?;
    let request = v1::PublishRequest::decode(rest).ok()?;
    let mut publication = convert::publication(request, broker.limits()).ok()?;
    // Its record goes when it is safe where it went.
    publication.wait = if publication.qos == QoS::AtMostOnce { Wait::Accepted } else { Wait::Durable };
    let bytes = cost(&publication);
    let time = |bytes: &[u8; 8]| Timestamp(u64::from_be_bytes(*bytes));
    Some(ScheduledPublish {
        publication: Arc::new(publication),
        at: time(at),
        created: time(created),
        bytes,
        stored: true,
    })
}
