//! Messages that came with an `idempotency_key`: each is published once, and a repeated call gets its answer.
//!
//! A key belongs to its caller, and stands for one request with all its fields. Only digests and the answer are kept of it.
//! The order of the steps, and the state that a crash leaves after each:
//!
//! 1. The key is claimed in memory. Nothing is on disk: after a crash the same key publishes, as it should.
//! 2. The message is routed. After a crash *here*, before the next step is on disk, **the same key publishes again**: messages
//!    are in the stores of their receivers, answers in one of their own, and no transaction covers both.
//! 3. What takes longer than routing is noted as accepted. After a crash, or when the gateway ends meanwhile, the same key is
//!    told that the message was published and that nobody knows what became of it ([`Error::OutcomeLost`]).
//! 4. The answer is written, and given once it is on disk. From here on the same key gets it, for as long as it is remembered.
//!
//! A record is written only of routed messages, never before: none says that a message was accepted which was not. A
//! refused key is forgotten, so that the same key may try again. If the answer cannot be written the call fails although
//! the message is published; the key is then known in memory, and the next call with it only writes the answer again.
//!
//! A message with a `deliver_at` has none of these windows: its record and that of its key are one transaction.
//!
//! A claim is followed by a task of its own, which outlives the call: a call that is cancelled, or whose deadline comes, leaves
//! its key behind, and the next one joins the wait. The task ends when nobody waits and the key is no longer remembered.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use aws_lc_rs::digest::{self, SHA256};
use broker::{Account, Charge, MemoryKind};
use bytes::Bytes;
use gateway_core::{Commit, ReceiptState, Timestamp, clock};
use parking_lot::Mutex;
use prost::Message as _;
use store::{RecordChange, RecordKind, RecordStore, StoreError};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::routed::Routed;
use crate::{counters::count, proto::gateway::v1, server::access::Call};
use grpc_messages::status::{Error, Reached, ReachedLevel};

/// Longest key, in bytes.
const MOST_KEY: usize = 128;
/// Bytes counted for a key and its answer.
const ANSWERED: usize = 384;
/// Bytes counted for a key whose message waits, with its task.
const WAITING: usize = 1536;
/// Keys that a call drops at most to make room for its own, or because they are too old.
const STEP: usize = 16;
/// The same at each look at the clock.
const SWEEP: usize = 10_000;

type PublishOutcome = Result<v1::PublishResponse, Error>;
type RequestDigest = [u8; 32];

/// Largest number of remembered keys, and the time for which each is remembered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyOptions {
    pub most: usize,
    pub time: Duration,
}

/// The key of a request, with a digest of its content.
pub(crate) struct RequestKey {
    id: RequestDigest,
    content: RequestDigest,
}

impl RequestKey {
    /// Returns the key of a request that has one. Large payloads are read in steps.
    pub(crate) async fn of(call: &Call, request: &v1::PublishRequest) -> Result<Option<Self>, Error> {
        /// Bytes between two pauses.
        const PART: usize = 256 << 10;

        let key = request.idempotency_key.as_bytes();
        if key.is_empty() {
            return Ok(None);
        }
        if key.len() > MOST_KEY {
            return Err(Error::invalid("idempotency_key", format!("is longer than {MOST_KEY} bytes")));
        }
        let caller = call.caller();
        let mut id = digest::Context::new(&SHA256);
        for part in [caller.credential.as_str().as_bytes(), caller.grant.id.as_bytes(), key] {
            id.update(&(part.len() as u64).to_le_bytes());
            id.update(part);
        }
        let mut content = digest::Context::new(&SHA256);
        // A reference to it, not the payload, is cloned.
        let mut rest = v1::PublishRequest { idempotency_key: String::new(), ..request.clone() };
        let payload = std::mem::take(&mut rest.payload);
        content.update(&rest.encode_to_vec());
        for (place, part) in payload.chunks(PART).enumerate() {
            if place > 0 {
                tokio::task::yield_now().await;
            }
            content.update(part);
        }
        content.update(&(payload.len() as u64).to_le_bytes());
        Ok(Some(Self { id: bytes_of(id.finish()), content: bytes_of(content.finish()) }))
    }
}

fn bytes_of(digest: digest::Digest) -> RequestDigest {
    let mut bytes = RequestDigest::default();
    bytes.copy_from_slice(digest.as_ref());
    bytes
}

/// All keys that are remembered.
pub(crate) struct RequestKeys {
    table: Mutex<KeyTable>,
    store: Option<Arc<dyn RecordStore>>,
    options: KeyOptions,
    shutdown: watch::Receiver<bool>,
}

struct KeyTable {
    known: HashMap<RequestDigest, KnownKey, ahash::RandomState>,
    /// By number: the oldest first.
    order: BTreeMap<u64, RequestDigest>,
    next: u64,
    charge: Charge,
}

struct KnownKey {
    content: RequestDigest,
    since: Timestamp,
    number: u64,
    state: KeyState,
}

enum KeyState {
    /// Its task tells.
    Waiting(watch::Receiver<RoutingProgress>),
    Answered(v1::PublishResponse),
    /// Answered, and not on disk although it should be.
    Unwritten(v1::PublishResponse),
    /// The message was published; its outcome is lost.
    Lost,
}

impl KeyState {
    fn bytes(&self) -> usize {
        if matches!(self, Self::Waiting(_)) { WAITING } else { ANSWERED }
    }
}

/// Progress of a message.
#[derive(Clone)]
enum RoutingProgress {
    Routing,
    Routed(Arc<Routed>),
    Told(PublishOutcome),
}

/// A key that somebody has claimed, under its number: another claim has another.
struct Claimed {
    id: RequestDigest,
    content: RequestDigest,
    since: Timestamp,
    number: u64,
}

/// Outcome of a claim on a key.
pub(crate) enum KeyClaim {
    /// The caller publishes.
    First(KeyedPublish),
    /// Another call published before.
    Before(Keyed),
}

impl RequestKeys {
    /// Reads the keys that earlier processes left in `store`; without a store, keys end with the process. Blocks on the
    /// disk.
    pub(crate) fn open(
        options: KeyOptions,
        store: Option<Arc<dyn RecordStore>>,
        account: &Arc<Account>,
        shutdown: watch::Receiver<bool>,
    ) -> Result<Arc<Self>, StoreError> {
        let table = KeyTable {
            known: HashMap::default(),
            order: BTreeMap::new(),
            next: 0,
            charge: Charge::new(account, MemoryKind::Publisher),
        };
        let keys = Arc::new(Self { table: Mutex::new(table), store, options, shutdown });
        keys.restore()?;
        Ok(keys)
    }

    fn restore(&self) -> Result<(), StoreError> {
        let Some(store) = &self.store else { return Ok(()) };
        let (mut found, mut useless) = (Vec::new(), Vec::new());
        store.restore(RecordKind::Answers, &mut |key, value| match (
            RequestDigest::try_from(&key[..]),
            decode(&value),
        ) {
            (Ok(id), Some((content, since, state))) => found.push((since, id, content, state)),
            _ => useless.push(key),
        })?;
        found.sort_unstable_by_key(|(since, ..)| *since);
        let mut table = self.table.lock();
        for (since, id, content, state) in found {
            let number = table.number();
            table.order.insert(number, id);
            table.known.insert(id, KnownKey { content, since, number, state });
            while table.known.len() > self.options.most {
                self.drop_oldest(&mut table);
            }
            let bytes = table.charge.bytes() + ANSWERED;
            if !table.charge.set(bytes) {
                let newest = table.order.pop_last();
                useless.extend(newest.map(|(_, id)| Bytes::copy_from_slice(&id)));
                table.known.remove(&id);
            }
        }
        drop(table);
        self.sweep();
        let removals = useless.into_iter().map(removal).collect();
        store.submit(removals, None);
        Ok(())
    }

    /// Forgets those that are too old, in steps.
    pub(crate) fn sweep(&self) {
        self.forget_old(&mut self.table.lock(), SWEEP);
    }

    /// Claims a key, or finds who did.
    ///
    /// # Errors
    /// It stands for something else, its outcome is lost, or there is no room for another.
    pub(crate) fn claim(self: &Arc<Self>, key: RequestKey) -> Result<KeyClaim, Error> {
        let mut table = self.table.lock();
        self.forget_old(&mut table, STEP);
        if let Some(known) = table.known.get_mut(&key.id) {
            return self.meet(known, &key).map(KeyClaim::Before);
        }
        if self.store.as_ref().is_some_and(|store| !store.accepts()) {
            gateway_core::counters::count(|c| c.refused_store.add(1));
            return Err(Error::StoreRefused);
        }
        let mut room = 0;
        while table.known.len() >= self.options.most {
            self.drop_oldest(&mut table);
            count(|c| c.grpc_keys_dropped_count.add(1));
        }
        loop {
            let bytes = table.charge.bytes() + WAITING;
            if table.charge.set(bytes) {
                break;
            }
            room += 1;
            if room > STEP || !self.drop_oldest(&mut table) {
                broker::counters::count(|c| c.memory_publisher.add(1));
                return Err(Error::MemoryBudget);
            }
            count(|c| c.grpc_keys_dropped_memory.add(1));
        }
        let (progress, seen) = watch::channel(RoutingProgress::Routing);
        let (number, since) = (table.number(), clock::now());
        let known = KnownKey { content: key.content, since, number, state: KeyState::Waiting(seen) };
        table.known.insert(key.id, known);
        table.order.insert(number, key.id);
        drop(table);
        let claimed = Claimed { id: key.id, content: key.content, since, number };
        Ok(KeyClaim::First(KeyedPublish { keys: Arc::clone(self), claimed, progress: Some(progress) }))
    }

    fn meet(self: &Arc<Self>, known: &mut KnownKey, key: &RequestKey) -> Result<Keyed, Error> {
        if known.content != key.content {
            count(|c| c.grpc_keys_reused.add(1));
            return Err(Error::KeyReused);
        }
        count(|c| match known.state {
            KeyState::Waiting(_) => c.grpc_keys_joined.add(1),
            _ => c.grpc_keys_answered.add(1),
        });
        match &known.state {
            KeyState::Waiting(progress) => Ok(Keyed(progress.clone())),
            KeyState::Answered(response) => {
                Ok(Keyed(watch::channel(RoutingProgress::Told(Ok(response.clone()))).1))
            }
            KeyState::Lost => Err(Error::OutcomeLost),
            KeyState::Unwritten(response) => {
                let (progress, seen) = watch::channel(RoutingProgress::Routing);
                let KnownKey { content, since, number, .. } = *known;
                let claimed = Claimed { id: key.id, content, since, number };
                let (keys, response) = (Arc::clone(self), response.clone());
                tokio::spawn(async move { keys.record(claimed, response, progress).await });
                Ok(Keyed(seen))
            }
        }
    }

    /// Drops the oldest key; false if there is none.
    fn drop_oldest(&self, table: &mut KeyTable) -> bool {
        let Some((_, id)) = table.order.pop_first() else { return false };
        table.let_go(&id);
        if let Some(store) = &self.store {
            store.submit(vec![removal(Bytes::copy_from_slice(&id))], None);
        }
        true
    }

    fn forget_old(&self, table: &mut KeyTable, most: usize) {
        let now = clock::now();
        for _ in 0..most {
            let oldest = table.order.first_key_value().and_then(|(_, id)| table.known.get(id));
            let is_old = |known: &KnownKey| {
                now.0.saturating_sub(known.since.0) >= self.options.time.as_millis() as u64
            };
            if !oldest.is_some_and(is_old) {
                return;
            }
            self.drop_oldest(table);
        }
    }

    /// Changes what is known of a claim, if it still is, and submits what `record` says under the same lock: records follow the
    /// order of changes.
    fn change(
        &self,
        claimed: &Claimed,
        state: Option<KeyState>,
        record: Option<RecordChange>,
        commit: Option<Arc<Commit>>,
    ) -> bool {
        let mut table = self.table.lock();
        if !table.has(claimed) {
            return false;
        }
        if let Some(state) = state {
            table.set(&claimed.id, state);
        }
        if let (Some(store), Some(record)) = (&self.store, record) {
            store.submit(vec![record], commit);
        }
        true
    }

    /// Notes that a message is published, before it is known what becomes of it.
    fn note_accepted(&self, claimed: &Claimed, state: Option<KeyState>) {
        // Changes with a commit are written at once; nobody waits for this one.
        let commit = Commit::new();
        let part = commit.part();
        if !self.change(claimed, state, Some(record(claimed, None)), Some(part)) || self.store.is_none() {
            commit.done();
        }
        commit.done();
    }

    /// Nothing was published.
    fn forget(&self, claimed: &Claimed) {
        let mut table = self.table.lock();
        if table.has(claimed) {
            table.order.remove(&claimed.number);
            table.let_go(&claimed.id);
            if let Some(store) = &self.store {
                store.submit(vec![removal(Bytes::copy_from_slice(&claimed.id))], None);
            }
        }
    }

    /// Waits for what becomes of a message, however long that takes while somebody wants to know.
    async fn follow(
        self: Arc<Self>,
        claimed: Claimed,
        routed: Arc<Routed>,
        progress: watch::Sender<RoutingProgress>,
    ) {
        let mut shutdown = self.shutdown.clone();
        let told = tokio::select! {
            biased;
            told = routed.wait() => told,
            () = progress.closed() => return,
            // A sender that is gone counts as asking.
            _ = shutdown.wait_for(|stop| *stop) => return,
        };
        match told {
            Ok(response) => self.record(claimed, response, progress).await,
            Err(error) => {
                self.forget(&claimed);
                progress.send_replace(RoutingProgress::Told(Err(error)));
            }
        }
    }

    /// Writes the answer, and tells it once it is on disk.
    async fn record(
        &self,
        claimed: Claimed,
        response: v1::PublishResponse,
        progress: watch::Sender<RoutingProgress>,
    ) {
        let written = match &self.store {
            None => true,
            Some(_) => {
                let commit = Commit::new();
                let part = commit.part();
                if !self.change(&claimed, None, Some(record(&claimed, Some(&response))), Some(part)) {
                    // The key is no longer remembered; its caller is here all the same.
                    commit.done();
                }
                commit.done();
                commit.wait().await.is_ok()
            }
        };
        let state = if written {
            KeyState::Answered(response.clone())
        } else {
            KeyState::Unwritten(response.clone())
        };
        self.change(&claimed, Some(state), None, None);
        let told = if written { Ok(response) } else { Err(Error::StoreRefused) };
        progress.send_replace(RoutingProgress::Told(told));
    }

    /// Returns the number of remembered keys.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.table.lock().known.len()
    }
}

impl KeyTable {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn has(&self, claimed: &Claimed) -> bool {
        self.known.get(&claimed.id).is_some_and(|known| known.number == claimed.number)
    }

    fn set(&mut self, id: &RequestDigest, state: KeyState) {
        if let Some(known) = self.known.get_mut(id) {
            let bytes = self.charge.bytes() + state.bytes();
            let before = known.state.bytes();
            known.state = state;
            // The charge never grows.
            self.charge.set(bytes.saturating_sub(before));
        }
    }

    fn let_go(&mut self, id: &RequestDigest) {
        if let Some(known) = self.known.remove(id) {
            let bytes = self.charge.bytes().saturating_sub(known.state.bytes());
            self.charge.set(bytes);
        }
    }
}

/// A key of which the message is on its way. Dropped halfway, with the call, the message is published all the same.
pub(crate) struct KeyedPublish {
    keys: Arc<RequestKeys>,
    claimed: Claimed,
    /// `None` once it is said what became of it.
    progress: Option<watch::Sender<RoutingProgress>>,
}

impl KeyedPublish {
    /// The message was routed.
    pub(crate) fn land(mut self, routed: Routed) -> Keyed {
        let routed = Arc::new(routed);
        let (progress, seen) = match self.progress.take() {
            Some(progress) => {
                progress.send_replace(RoutingProgress::Routed(Arc::clone(&routed)));
                let seen = progress.subscribe();
                (progress, seen)
            }
            None => watch::channel(RoutingProgress::Routed(Arc::clone(&routed))),
        };
        let claimed = Claimed { ..self.claimed };
        // The record of one that is scheduled is on its way with the message.
        if routed.ready().is_none() && routed.scheduled.is_none() {
            self.keys.note_accepted(&claimed, None);
        }
        tokio::spawn(Arc::clone(&self.keys).follow(claimed, routed, progress));
        Keyed(seen)
    }

    /// The record of this answer, to be written together with the message.
    pub(crate) fn record(&self, response: &v1::PublishResponse) -> RecordChange {
        record(&self.claimed, Some(response))
    }

    /// Nothing was published.
    pub(crate) fn refuse(mut self, error: &Error) {
        self.keys.forget(&self.claimed);
        if let Some(progress) = self.progress.take() {
            progress.send_replace(RoutingProgress::Told(Err(error.clone())));
        }
    }
}

impl Drop for KeyedPublish {
    fn drop(&mut self) {
        let Some(progress) = self.progress.take() else { return };
        if std::thread::panicking() {
            self.keys.forget(&self.claimed);
        } else {
            // Its receivers have it, or get it now.
            self.keys.note_accepted(&self.claimed, Some(KeyState::Lost));
        }
        progress.send_replace(RoutingProgress::Told(Err(Error::OutcomeLost)));
    }
}

/// The wait for the answer of a key.
pub(crate) struct Keyed(watch::Receiver<RoutingProgress>);

impl Keyed {
    /// Returns the outcome if it is known; `None` if the caller must wait for it.
    pub(crate) fn ready(&self) -> Option<PublishOutcome> {
        match &*self.0.borrow() {
            RoutingProgress::Told(told) => Some(told.clone()),
            RoutingProgress::Routing | RoutingProgress::Routed(_) => None,
        }
    }

    /// Waits until the answer is there and on disk, `deadline`, or the gateway shuts down. Cancel safe.
    pub(crate) async fn finish(&self, deadline: Instant, shutdown: &watch::Receiver<bool>) -> PublishOutcome {
        let (mut progress, mut shutdown) = (self.0.clone(), shutdown.clone());
        let told = async {
            let told = progress.wait_for(|progress| matches!(progress, RoutingProgress::Told(_))).await;
            match told.as_deref() {
                Ok(RoutingProgress::Told(told)) => told.clone(),
                // Its task ends without a word only when the gateway does.
                _ => Err(Error::CutShort(self.reached())),
            }
        };
        tokio::select! {
            biased;
            told = told => told,
            // A sender that is gone counts as asking.
            _ = shutdown.wait_for(|stop| *stop) => Err(Error::CutShort(self.reached())),
            () = sleep_until(deadline) => Err(Error::Deadline(self.reached())),
        }
    }

    fn reached(&self) -> Reached {
        match &*self.0.borrow() {
            RoutingProgress::Routed(routed) => routed.reached(),
            _ => Reached { level: ReachedLevel::Accepted, state: ReceiptState::default() },
        }
    }
}

/// The first byte of a record: the form of what follows.
const FORM: u8 = 1;

fn record(claimed: &Claimed, response: Option<&v1::PublishResponse>) -> RecordChange {
    let mut value = Vec::with_capacity(64);
    value.push(FORM);
    value.extend_from_slice(&claimed.content);
    value.extend_from_slice(&claimed.since.0.to_be_bytes());
    value.push(u8::from(response.is_some()));
    if let Some(response) = response {
        value.extend_from_slice(&response.encode_to_vec());
    }
    let key = Bytes::copy_from_slice(&claimed.id);
    RecordChange::put(RecordKind::Answers, key, value.into())
}

fn removal(key: Bytes) -> RecordChange {
    RecordChange::remove(RecordKind::Answers, key)
}

/// Reads a record written by [`record`].
fn decode(value: &[u8]) -> Option<(RequestDigest, Timestamp, KeyState)> {
    let (&FORM, rest) = value.split_first()? else { return None };
    let (content, rest) = rest.split_first_chunk::<32>()?;
    let (since, rest) = rest.split_first_chunk::<8>()?;
    let state = match rest.split_first()? {
        (0, _) => KeyState::Lost,
        (_, response) => KeyState::Answered(v1::PublishResponse::decode(response).ok()?),
    };
    Some((*content, Timestamp(u64::from_be_bytes(*since)), state))
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
