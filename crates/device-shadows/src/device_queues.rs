//! Work in order for each device, for many devices at once.

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
};

use ahash::RandomState;
use broker::{Account, Charge, MemoryKind};
use gateway_core::ClientId;
use hashbrown::HashMap;
use parking_lot::Mutex;
use shadow::Rejection;
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore, oneshot},
};

/// Devices whose work is under way at once; others wait for their turn.
const AT_ONCE: usize = 128;

/// Locks over which the queues are spread.
const STRIPES: usize = 32;

/// Bytes counted for work that waits, besides what it carries.
const OVERHEAD: usize = 1024;

/// Work to be done for a device.
pub(super) type DeviceWork = Pin<Box<dyn Future<Output = ()> + Send>>;

struct QueuedWork {
    work: DeviceWork,
    charge: Charge,
}

/// Work that waits for a device. A queue exists as long as a task works for the device.
#[derive(Default)]
struct DeviceQueue {
    waiting: VecDeque<QueuedWork>,
    /// Number of waiting requests from devices, which is limited.
    requests: usize,
}

type QueueStripe = HashMap<ClientId, DeviceQueue, RandomState>;

/// The queues of all devices.
pub(super) struct DeviceQueues(Arc<DeviceQueuesInner>);

struct DeviceQueuesInner {
    runtime: Handle,
    stripes: Box<[Mutex<QueueStripe>]>,
    hasher: RandomState,
    permits: Arc<Semaphore>,
    max_requests: usize,
    /// A queue has ended.
    ended: Notify,
}

/// Why work is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkRefusal {
    /// The device has as much under way as it may.
    Device,
    /// The memory budget.
    Memory,
}

impl DeviceQueues {
    pub(super) fn new(runtime: Handle, max_requests: usize) -> Self {
        Self(Arc::new(DeviceQueuesInner {
            runtime,
            stripes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            permits: Arc::new(Semaphore::new(AT_ONCE)),
            max_requests,
            ended: Notify::new(),
        }))
    }

    /// Has a request of the device carried out in its turn. Never waits.
    pub(super) fn request(
        &self,
        account: &Arc<Account>,
        device: &ClientId,
        bytes: usize,
        work: impl FnOnce() -> DeviceWork,
    ) -> Result<(), WorkRefusal> {
        let mut stripe = self.0.stripe(device).lock();
        let under_way = stripe.get(device).map_or(0, |queue| queue.requests);
        if under_way >= self.0.max_requests {
            return Err(WorkRefusal::Device);
        }
        let mut charge = Charge::new(account, MemoryKind::Shadows);
        if !charge.set(bytes + OVERHEAD) {
            return Err(WorkRefusal::Memory);
        }
        let inner = Arc::downgrade(&self.0);
        let (work, owner) = (work(), device.clone());
        let work = Box::pin(async move {
            work.await;
            if let Some(inner) = Weak::upgrade(&inner)
                && let Some(queue) = inner.stripe(&owner).lock().get_mut(&owner)
            {
                queue.requests -= 1;
            }
        });
        let queue = self.0.push(&mut stripe, device, QueuedWork { work, charge });
        queue.requests += 1;
        Ok(())
    }

    /// The result of work for the device that somebody waits for, in its turn. Cancelled, it is done all the same.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        account: &Arc<Account>,
        device: ClientId,
        bytes: usize,
        work: impl Future<Output = Result<T, Rejection>> + Send + 'static,
    ) -> Result<T, Rejection> {
        let (reply, answer) = oneshot::channel();
        let mut charge = Charge::new(account, MemoryKind::Shadows);
        if !charge.set(bytes + OVERHEAD) {
            return Err(Rejection::TooManyRequests);
        }
        let work = Box::pin(async move {
            // A caller who is gone wants no answer.
            let _ = reply.send(work.await);
        });
        self.0.push(&mut self.0.stripe(&device).lock(), &device, QueuedWork { work, charge });
        answer.await.unwrap_or(Err(Rejection::Unavailable))
    }

    /// Returns when there is no queue.
    pub(super) async fn settle(&self) {
        loop {
            let mut ended = std::pin::pin!(self.0.ended.notified());
            // From now on it is told, also before it is polled.
            ended.as_mut().enable();
            if self.0.stripes.iter().all(|stripe| stripe.lock().is_empty()) {
                return;
            }
            ended.await;
        }
    }
}

impl DeviceQueuesInner {
    fn stripe(&self, device: &ClientId) -> &Mutex<QueueStripe> {
        &self.stripes[self.hasher.hash_one(device) as usize % STRIPES]
    }

    fn push<'s>(
        self: &Arc<Self>,
        stripe: &'s mut QueueStripe,
        device: &ClientId,
        waiting: QueuedWork,
    ) -> &'s mut DeviceQueue {
        let is_new = !stripe.contains_key(device);
        let queue = stripe.entry(device.clone()).or_default();
        queue.waiting.push_back(waiting);
        if is_new {
            self.runtime.spawn(Arc::clone(self).serve(device.clone()));
        }
        queue
    }

    /// Works for a device until nothing of it waits. Others come between two pieces of its work.
    async fn serve(self: Arc<Self>, device: ClientId) {
        let mut queue = Served { inner: self, device, has_ended: false };
        while let Some(QueuedWork { work, charge }) = queue.next() {
            // Never closed.
            let _permit = queue.inner.permits.acquire().await;
            work.await;
            drop(charge);
        }
    }
}

/// A queue as long as somebody works for it. Where work panics, all that waits is given up with it, so that the device's
/// next request begins a new queue.
struct Served {
    inner: Arc<DeviceQueuesInner>,
    device: ClientId,
    has_ended: bool,
}

impl Served {
    /// Returns the next piece of work; `None` ends the queue.
    fn next(&mut self) -> Option<QueuedWork> {
        let mut stripe = self.inner.stripe(&self.device).lock();
        let next = stripe.get_mut(&self.device).and_then(|queue| queue.waiting.pop_front());
        if next.is_none() {
            stripe.remove(&self.device);
            self.has_ended = true;
        }
        next
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if !self.has_ended {
            let left = self.inner.stripe(&self.device).lock().remove(&self.device);
            // Not under the lock: whoever waits for it is told here.
            drop(left);
        }
        self.inner.ended.notify_waiters();
    }
}
