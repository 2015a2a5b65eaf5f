//! Backends that follow changes: of each shadow the newest that they have not taken yet.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use ahash::RandomState;
use broker::{Account, Charge, MemoryKind};
use gateway_core::{ClientId, metrics::count};
use hashbrown::{HashMap, hash_map::Entry};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use super::Shadow;

/// Bytes counted for a change besides its document.
const OVERHEAD: usize = 512;

/// Whether a watcher wants to know of a shadow.
type Wants = dyn Fn(&Shadow) -> bool + Send + Sync;

/// What a watcher is told.
#[derive(Debug)]
pub(crate) enum Change {
    /// A shadow has changed, or was deleted.
    Shadow(Shadow),
    /// Changes of this number of shadows are missing.
    Missed(u64),
}

/// All watchers.
#[derive(Default)]
pub(super) struct Watchers {
    count: AtomicUsize,
    list: RwLock<Vec<Arc<Inner>>>,
}

struct Inner {
    wants: Box<Wants>,
    state: Mutex<Pending>,
    changed: Notify,
}

struct Pending {
    shadows: HashMap<(ClientId, Arc<str>), Newest, RandomState>,
    next: u64,
    charge: Charge,
    missed: u64,
}

/// The newest change of a shadow.
struct Newest {
    /// Under which number it came.
    number: u64,
    shadow: Shadow,
    bytes: usize,
}

/// A watcher. Ends when dropped.
pub(crate) struct Watch {
    inner: Arc<Inner>,
    all: Arc<Watchers>,
}

impl Watch {
    /// What has changed since the last call, of each shadow the newest, in the order in which they changed last; waits until
    /// something did. Cancel safe.
    pub(crate) async fn next(&mut self) -> Vec<Change> {
        loop {
            let (mut shadows, missed) = {
                let mut state = self.inner.state.lock();
                let shadows: Vec<_> = state.shadows.drain().map(|(_, newest)| newest).collect();
                state.charge.set(0);
                (shadows, std::mem::take(&mut state.missed))
            };
            if missed > 0 || !shadows.is_empty() {
                shadows.sort_unstable_by_key(|newest| newest.number);
                let gap = (missed > 0).then_some(Change::Missed(missed));
                return gap
                    .into_iter()
                    .chain(shadows.into_iter().map(|newest| Change::Shadow(newest.shadow)))
                    .collect();
            }
            self.inner.changed.notified().await;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut list = self.all.list.write();
        list.retain(|watcher| !Arc::ptr_eq(watcher, &self.inner));
        self.all.count.store(list.len(), SeqCst);
    }
}

impl Watchers {
    pub(super) fn add(this: &Arc<Self>, account: &Arc<Account>, wants: Box<Wants>) -> Watch {
        let state = Pending {
            shadows: HashMap::default(),
            next: 0,
            charge: Charge::new(account, MemoryKind::Shadows),
            missed: 0,
        };
        let inner = Arc::new(Inner { wants, state: Mutex::new(state), changed: Notify::new() });
        let mut list = this.list.write();
        list.push(Arc::clone(&inner));
        this.count.store(list.len(), SeqCst);
        Watch { inner, all: Arc::clone(this) }
    }

    /// Tells all who want to know. Costs a look at a number where nobody watches.
    pub(super) fn changed(&self, shadow: &Shadow) {
        if self.count.load(SeqCst) == 0 {
            return;
        }
        let bytes = OVERHEAD + shadow.state.as_ref().map_or(0, |state| state.encode().len());
        for watcher in self.list.read().iter().filter(|watcher| (watcher.wants)(shadow)) {
            watcher.add(shadow, bytes);
        }
    }
}

impl Inner {
    fn add(&self, shadow: &Shadow, bytes: usize) {
        let mut state = self.state.lock();
        let Pending { shadows, next, charge, missed } = &mut *state;
        *next += 1;
        let entry = shadows.entry((shadow.device.clone(), Arc::clone(&shadow.name)));
        let held = match &entry {
            Entry::Occupied(there) => there.get().bytes,
            Entry::Vacant(_) => 0,
        };
        if charge.set(charge.bytes() - held + bytes) {
            entry.insert(Newest { number: *next, shadow: shadow.clone(), bytes });
        } else {
            // What waits of it is no longer the newest.
            if let Entry::Occupied(there) = entry {
                there.remove();
                charge.set(charge.bytes() - held);
            }
            *missed += 1;
            count(|c| c.shadow_watch_missed.add(1));
        }
        drop(state);
        self.changed.notify_one();
    }
}
