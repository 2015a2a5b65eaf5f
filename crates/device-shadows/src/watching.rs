//! Backends that follow changes: of each shadow the newest that they have not taken yet.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use ahash::RandomState;
use gateway_core::{Budget, ClientId};
use hashbrown::{HashMap, hash_map::Entry};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use super::ShadowDocument;
use crate::counters::count;

/// Bytes counted for a change besides its document.
const OVERHEAD: usize = 512;
/// Bytes of changes that a watcher takes at once, not counting the last one.
const TAKEN: usize = 256 << 10;

/// Tells whether a watcher wants to know of a shadow.
type WatchFilter = dyn Fn(&ShadowDocument) -> bool + Send + Sync;

/// News for a watcher.
#[derive(Debug)]
pub enum ShadowChange {
    /// A shadow has changed, or was deleted.
    Shadow(ShadowDocument),
    /// Changes of this number of shadows are missing.
    Missed(u64),
}

/// All watchers.
#[derive(Default)]
pub(super) struct Watchers {
    count: AtomicUsize,
    list: RwLock<Vec<Arc<WatchInner>>>,
}

struct WatchInner {
    wants: Box<WatchFilter>,
    state: Mutex<PendingChanges>,
    changed: Notify,
}

/// Name of a shadow, with its device.
type ShadowName = (ClientId, Arc<str>);

struct PendingChanges {
    shadows: HashMap<ShadowName, Newest, RandomState>,
    /// The same in the order in which they are told: what has waited longest comes first.
    order: BTreeMap<u64, ShadowName>,
    next: u64,
    /// Of what waits, and of what was taken last.
    charge: WatchCharge,
    taken: usize,
    missed: u64,
}

/// The newest change of a shadow.
struct Newest {
    /// Its place in the order, which it has from the first change that was not told.
    number: u64,
    shadow: ShadowDocument,
    bytes: usize,
}

/// Charge of a watcher on the budget of the caller for whom it watches; given back on drop.
struct WatchCharge {
    budget: Arc<dyn Budget + Send + Sync>,
    bytes: usize,
}

impl WatchCharge {
    /// Changes it to `bytes`. Changes nothing and returns false if it would have to grow and may not.
    fn set(&mut self, bytes: usize) -> bool {
        if bytes <= self.bytes {
            self.budget.release(self.bytes - bytes);
        } else if !self.budget.charge(self.bytes, bytes - self.bytes) {
            return false;
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for WatchCharge {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl PendingChanges {
    fn release(&mut self, bytes: usize) {
        let left = self.charge.bytes.saturating_sub(bytes);
        self.charge.set(left);
    }

    /// Takes the changes that have waited longest. Those taken before are on the account no more.
    fn take(&mut self) -> Vec<ShadowChange> {
        let sent = std::mem::take(&mut self.taken);
        self.release(sent);
        let missed = std::mem::take(&mut self.missed);
        let mut changes: Vec<_> = (missed > 0).then_some(ShadowChange::Missed(missed)).into_iter().collect();
        while self.taken < TAKEN
            && let Some((_, name)) = self.order.pop_first()
            && let Some(Newest { shadow, bytes, .. }) = self.shadows.remove(&name)
        {
            self.taken += bytes;
            changes.push(ShadowChange::Shadow(shadow));
        }
        changes
    }
}

/// A watcher. Ends when dropped.
pub struct ShadowWatch {
    inner: Arc<WatchInner>,
    all: Arc<Watchers>,
}

impl ShadowWatch {
    /// Some of what has changed since it was told, of each shadow the newest, in the order in which they began to wait; waits
    /// until something has. It stays on the memory account until the next call, which is therefore made once it is sent.
    /// Cancel safe.
    pub async fn next(&mut self) -> Vec<ShadowChange> {
        loop {
            let changes = self.inner.state.lock().take();
            if !changes.is_empty() {
                return changes;
            }
            self.inner.changed.notified().await;
        }
    }
}

impl Drop for ShadowWatch {
    fn drop(&mut self) {
        let mut list = self.all.list.write();
        list.retain(|watcher| !Arc::ptr_eq(watcher, &self.inner));
        self.all.count.store(list.len(), SeqCst);
    }
}

impl Watchers {
    pub(super) fn add(
        this: &Arc<Self>,
        budget: Arc<dyn Budget + Send + Sync>,
        wants: Box<WatchFilter>,
    ) -> ShadowWatch {
        let state = PendingChanges {
            shadows: HashMap::default(),
            order: BTreeMap::new(),
            next: 0,
            charge: WatchCharge { budget, bytes: 0 },
            taken: 0,
            missed: 0,
        };
        let inner = Arc::new(WatchInner { wants, state: Mutex::new(state), changed: Notify::new() });
        let mut list = this.list.write();
        list.push(Arc::clone(&inner));
        this.count.store(list.len(), SeqCst);
        ShadowWatch { inner, all: Arc::clone(this) }
    }

    /// Tells all who want to know. Costs a look at a number where nobody watches.
    pub(super) fn changed(&self, shadow: &ShadowDocument) {
        if self.count.load(SeqCst) == 0 {
            return;
        }
        let bytes = OVERHEAD + shadow.state.as_ref().map_or(0, |state| state.encode().len());
        for watcher in self.list.read().iter().filter(|watcher| (watcher.wants)(shadow)) {
            watcher.add(shadow, bytes);
        }
    }
}

impl WatchInner {
    fn add(&self, shadow: &ShadowDocument, bytes: usize) {
        let mut state = self.state.lock();
        let PendingChanges { shadows, order, next, charge, missed, .. } = &mut *state;
        let name = (shadow.device.clone(), Arc::clone(&shadow.name));
        let entry = shadows.entry(name.clone());
        let (number, held) = match &entry {
            Entry::Occupied(there) => (there.get().number, there.get().bytes),
            Entry::Vacant(_) => {
                *next += 1;
                (*next, 0)
            }
        };
        if charge.set(charge.bytes - held + bytes) {
            entry.insert(Newest { number, shadow: shadow.clone(), bytes });
            order.insert(number, name);
        } else {
            // The shadow's waiting change is no longer the newest.
            if let Entry::Occupied(there) = entry {
                there.remove();
                order.remove(&number);
                charge.set(charge.bytes - held);
            }
            *missed += 1;
            count(|c| c.shadow_watch_missed.add(1));
        }
        drop(state);
        self.changed.notify_one();
    }
}
