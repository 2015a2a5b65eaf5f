//! Device shadows at work: documents, their store, and who is told of a change.
//!
//! ```text
//! queues      one request of a device after the other, many devices at once
//! requests   what devices publish to the topics of their shadows, and the answers
//! watching   backends that follow changes
//! ```
//!
//! Whoever asks, a device or a backend, its request goes through the queue of the device, so that requests of one device are
//! carried out in the order in which they came. Another gateway on the same database may change a shadow at the same time: the
//! store writes only on the version that a change was made from, and the change is made again on what is there now.
//!
//! What holds: nobody is told of a change before it is durable. Of one device all are told of changes in their order. Work that
//! waits is bounded, on the memory account, and holds up no thread that serves devices.
//!
//! Must not know: tonic, MQTT's packets, which store it is.

pub mod counters;
mod device_queues;
mod requests;
#[cfg(test)]
mod tests;
mod watching;

use std::{sync::Arc, time::Duration};

use broker::{Broker, Turn};
use gateway_core::{Budget, ClientId, Message, Origin, QoS, Timestamp, clock, is_one_level};
use shadow::{AnswerContext, DocumentLimits, Patch, Rejection, ShadowTopics, Snapshot, State, Update};
use store::{MAX_SHADOW_DEVICE, ShadowPut, ShadowRecord, ShadowStore, StoreError};
use tokio::{runtime::Handle, time::timeout};

use counters::count;
use device_queues::DeviceQueues;
pub use requests::DeviceShadows;
use watching::Watchers;
pub use watching::{ShadowChange, ShadowWatch};

/// Bounds.
#[derive(Debug, Clone)]
pub struct ShadowOptions {
    /// Their topics.
    pub topics: ShadowTopics,
    /// Of a document.
    pub limits: DocumentLimits,
    /// Named shadows of a device.
    pub max_names: usize,
    /// Requests that a device may have under way.
    pub max_requests: usize,
    /// Longest wait of a request before it is begun; after that it is refused, so that behind a store that answers nobody,
    /// requests do not wait one after the other for the store's time limit.
    pub max_wait: Duration,
}

/// Tries of a change while others change the shadow at the same time.
const TRIES: usize = 16;

/// Longest time that a store may take for one call.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

/// All shadows.
pub struct ShadowService {
    store: Arc<dyn ShadowStore>,
    options: ShadowOptions,
    device_queues: DeviceQueues,
    watchers: Arc<Watchers>,
}

/// A shadow as it is.
#[derive(Debug, Clone)]
pub struct ShadowDocument {
    pub device: ClientId,
    pub name: Arc<str>,
    pub version: u64,
    pub changed: Timestamp,
    /// `None` if it was deleted.
    pub state: Option<Arc<State>>,
}

/// Name of a shadow.
#[derive(Debug, Clone)]
pub struct ShadowKey {
    pub device: ClientId,
    pub name: Arc<str>,
}

impl ShadowDocument {
    fn snapshot(&self) -> Option<Snapshot<'_>> {
        self.state.as_deref().map(|state| Snapshot { state, version: self.version })
    }

    fn read(record: ShadowRecord) -> Result<Self, Rejection> {
        let ShadowRecord { device, name, version, changed, document } = record;
        let state = match document {
            None => None,
            Some(document) => {
                let state = State::decode(&document).ok_or_else(|| {
                    gateway_core::error_limited!(%device, %name, "stored document of a shadow cannot be read");
                    Rejection::Internal
                })?;
                Some(Arc::new(state))
            }
        };
        Ok(Self { device, name, version, changed, state })
    }
}

/// Result of an update: the shadow before and after.
struct Updated {
    previous: Option<ShadowDocument>,
    current: ShadowDocument,
}

impl ShadowService {
    /// Shadows in `store`, whose work is done in the current runtime.
    pub fn new(store: Arc<dyn ShadowStore>, options: ShadowOptions) -> Arc<Self> {
        let device_queues = DeviceQueues::new(Handle::current(), options.max_requests);
        Arc::new(Self { store, options, device_queues, watchers: Arc::default() })
    }

    /// Bounds in force.
    pub fn options(&self) -> &ShadowOptions {
        &self.options
    }

    /// The shadow, also if it was deleted.
    pub async fn find(&self, key: &ShadowKey) -> Result<Option<ShadowDocument>, Rejection> {
        let found = within(self.store.get(key.device.as_str(), &key.name)).await?;
        found.map(ShadowDocument::read).transpose()
    }

    /// The shadow.
    pub async fn get(&self, key: &ShadowKey) -> Result<ShadowDocument, Rejection> {
        let found = self.find(key).await?.filter(|shadow| shadow.state.is_some());
        found.ok_or_else(|| Rejection::NotFound(key.name.to_string()))
    }

    /// Shadows of a device in the order of their names, behind `after` if given: at most `limit`. With the last name that was
    /// looked at, if there may be more.
    pub async fn list(
        &self,
        device: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<ShadowDocument>, Option<Arc<str>>), Rejection> {
        let records = within(self.store.list(device, after, limit, true)).await?;
        let last = records.last().map(|record| Arc::clone(&record.name));
        let shadows: Result<Vec<_>, _> = records
            .into_iter()
            .filter(|record| record.document.is_some())
            .map(ShadowDocument::read)
            .collect();
        Ok((shadows?, last))
    }

    /// Changes from now on; those that wait are charged to `budget`. Start to watch, then list: what the list missed is among
    /// the changes.
    pub fn watch(
        &self,
        budget: Arc<dyn Budget + Send + Sync>,
        wants: impl Fn(&ShadowDocument) -> bool + Send + Sync + 'static,
    ) -> ShadowWatch {
        Watchers::add(&self.watchers, budget, Box::new(wants))
    }

    /// Changes the shadow, in its turn after what was asked for the device before. Goes on if it is cancelled.
    pub async fn update(
        self: &Arc<Self>,
        broker: &Broker,
        key: ShadowKey,
        update: Update,
    ) -> Result<ShadowDocument, Rejection> {
        count(|c| c.shadow_updates_backend.add(1));
        let (this, broker, account) = (Arc::clone(self), broker.clone(), Arc::clone(broker.account()));
        let cost = size_of_update(&update);
        let device = key.device.clone();
        let asked = clock::now();
        let work = async move {
            this.check_wait(asked)?;
            let updated = this.make_update(&key, &update).await?;
            this.tell_update(&broker, &key, &update, &updated);
            Ok(updated.current)
        };
        self.device_queues.run(&account, device, cost, work).await
    }

    /// Deletes the shadow, in its turn, and returns what is left of it. Goes on if it is cancelled.
    pub async fn delete(
        self: &Arc<Self>,
        broker: &Broker,
        key: ShadowKey,
        expected: Option<u64>,
    ) -> Result<ShadowDocument, Rejection> {
        count(|c| c.shadow_deletes_backend.add(1));
        let (this, broker, account) = (Arc::clone(self), broker.clone(), Arc::clone(broker.account()));
        let device = key.device.clone();
        let asked = clock::now();
        let work = async move {
            this.check_wait(asked)?;
            let left = this.make_delete(&key, expected).await?;
            this.tell_delete(&broker, &key, &left, None);
            Ok(left)
        };
        self.device_queues.run(&account, device, 0, work).await
    }

    /// Returns when nothing waits.
    pub async fn settle(&self) {
        self.device_queues.settle().await;
    }

    /// Checks that a request from this time may still be begun.
    fn check_wait(&self, asked: Timestamp) -> Result<(), Rejection> {
        let waited = Duration::from_millis(clock::now().0.saturating_sub(asked.0));
        if waited < self.options.max_wait {
            return Ok(());
        }
        store::counters::count(|c| c.shadow_refused_waited.add(1));
        Err(Rejection::Unavailable)
    }

    async fn make_update(&self, key: &ShadowKey, update: &Update) -> Result<Updated, Rejection> {
        if key.device.as_str().is_empty() || key.device.as_str().len() > MAX_SHADOW_DEVICE {
            return Err(Rejection::TooLarge);
        }
        for _ in 0..TRIES {
            let there = self.find(key).await?;
            let version = check_version(there.as_ref(), update.version)?;
            if there.is_none() && !key.name.is_empty() {
                self.make_room(key).await?;
            }
            let none = State::default();
            let before = there.as_ref().and_then(|shadow| shadow.state.as_deref()).unwrap_or(&none);
            let changed = wall();
            let state = before.updated(update, changed.0 / 1000, &self.options.limits)?;
            let record = ShadowRecord {
                device: key.device.clone(),
                name: Arc::clone(&key.name),
                version: version + 1,
                changed,
                document: Some(state.encode().into()),
            };
            match within(self.store.put(record, version)).await? {
                ShadowPut::Written => {
                    let current = ShadowDocument {
                        device: key.device.clone(),
                        name: Arc::clone(&key.name),
                        version: version + 1,
                        changed,
                        state: Some(Arc::new(state)),
                    };
                    let previous = there.filter(|there| there.state.is_some());
                    return Ok(Updated { previous, current });
                }
                ShadowPut::Conflict => count(|c| c.shadow_retried.add(1)),
                ShadowPut::Full => return Err(Rejection::NoRoom),
            }
        }
        Err(Rejection::Unavailable)
    }

    async fn make_delete(&self, key: &ShadowKey, expected: Option<u64>) -> Result<ShadowDocument, Rejection> {
        for _ in 0..TRIES {
            let there = self.get(key).await?;
            let version = check_version(Some(&there), expected)?;
            let changed = wall();
            let record = ShadowRecord {
                device: key.device.clone(),
                name: Arc::clone(&key.name),
                version: version + 1,
                changed,
                document: None,
            };
            match within(self.store.put(record, version)).await? {
                ShadowPut::Written => {
                    return Ok(ShadowDocument { version: version + 1, changed, state: None, ..there });
                }
                ShadowPut::Conflict => count(|c| c.shadow_retried.add(1)),
                ShadowPut::Full => return Err(Rejection::NoRoom),
            }
        }
        Err(Rejection::Unavailable)
    }

    /// Room for one more name of the device: what is left of the shadow that was deleted first goes.
    async fn make_room(&self, key: &ShadowKey) -> Result<(), Rejection> {
        let device = key.device.as_str();
        // All of them: what is after the classic one's empty name.
        let mut names = Vec::new();
        while names.len() < self.options.max_names {
            let after = names.last().map_or("", |record: &ShadowRecord| &*record.name).to_owned();
            let more = within(self.store.list(device, Some(&after), self.options.max_names, false)).await?;
            if more.is_empty() {
                return Ok(());
            }
            names.extend(more);
        }
        let deleted = names.iter().filter(|record| record.document.is_none());
        let oldest = deleted.min_by_key(|record| record.changed).ok_or(Rejection::TooManyShadows)?;
        // Made anew by another gateway meanwhile it stays, and there is one more than there may be.
        within(self.store.forget(device, &oldest.name, oldest.version)).await?;
        Ok(())
    }

    fn tell_update(&self, broker: &Broker, key: &ShadowKey, update: &Update, updated: &Updated) {
        let Updated { previous, current } = updated;
        self.watchers.changed(current);
        let Some(now) = current.snapshot() else { return };
        let before = previous.as_ref().and_then(ShadowDocument::snapshot);
        let context =
            AnswerContext { now: current.changed.0 / 1000, client_token: update.client_token.as_deref() };
        let mut turn = Turn::default();
        let mut tell = |answer: &str, text: &str| self.publish(broker, key, answer, text, &mut turn);
        tell("update/accepted", &context.update_accepted(update, current.version));
        if let Some(delta) = context.delta(now) {
            count(|c| c.shadow_deltas.add(1));
            tell("update/delta", &delta);
        }
        tell("update/documents", &context.documents(before, now));
        turn.flush();
    }

    fn tell_delete(
        &self,
        broker: &Broker,
        key: &ShadowKey,
        left: &ShadowDocument,
        client_token: Option<&str>,
    ) {
        self.watchers.changed(left);
        let context = AnswerContext { now: left.changed.0 / 1000, client_token };
        let mut turn = Turn::default();
        self.publish(broker, key, "delete/accepted", &context.delete_accepted(left.version), &mut turn);
        turn.flush();
    }

    /// Publishes an answer to those who have subscribed to it.
    fn publish(&self, broker: &Broker, key: &ShadowKey, answer: &str, text: &str, turn: &mut Turn) {
        if !is_one_level(key.device.as_str()) {
            // The device has no topics: they could be those of another device.
            return;
        }
        let topic = self.options.topics.answer(key.device.as_str(), &key.name, answer);
        let mut message = Message::new(&topic, text.as_bytes(), clock::now(), Origin::SERVER);
        message.qos = QoS::AtLeastOnce;
        broker.publish(&message, turn);
    }
}

/// The version of the shadow, if it is the expected one. A shadow that does not exist has version 0, and so has a deleted one for
/// a caller that expects 0.
fn check_version(there: Option<&ShadowDocument>, expected: Option<u64>) -> Result<u64, Rejection> {
    let version = there.map_or(0, |shadow| shadow.version);
    let is_gone = there.is_none_or(|shadow| shadow.state.is_none());
    match expected {
        Some(0) if is_gone => Ok(version),
        Some(expected) if expected != version => Err(Rejection::Conflict { version }),
        _ => Ok(version),
    }
}

/// Waits for a store's answer, and turns errors and a late answer into the rejection that requests are told.
async fn within<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, Rejection> {
    let error = match timeout(STORE_TIMEOUT, call).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => error,
        Err(_) => StoreError::Unavailable("no answer in time".to_owned()),
    };
    count(|c| c.shadow_store_errors.add(1));
    gateway_core::warn_limited!(%error, "store of shadows failed");
    Err(match error {
        StoreError::Damaged(_) | StoreError::Format(_) => Rejection::Internal,
        _ => Rejection::Unavailable,
    })
}

/// By the wall clock.
fn wall() -> Timestamp {
    clock::to_wall(clock::now())
}

/// About the bytes that an update takes while it waits.
fn size_of_update(update: &Update) -> usize {
    let size = |patch: &Option<Patch>| match patch {
        Some(Patch::Merge(values)) => {
            let mut text = String::new();
            shadow::Json::Object(values.clone()).write(&mut text);
            text.len()
        }
        _ => 0,
    };
    size(&update.desired) + size(&update.reported)
}
