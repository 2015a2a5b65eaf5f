//! Admission: places for connections and handshakes, in all and by address. A leaf.
//!
//! Every listening socket has its own [`Door`], so that an attack on one holds up no other. An accepted socket waits in the
//! [`AcceptQueue`] for its address's turn, gets a [`ConnectionPermit`], and is a [`PendingConnection`] until it has completed its
//! request. If there is no place, the pending connection that has been silent longest has to leave for the newcomer, but only
//! once the door's patience is over: in a storm everybody is served in turn and nobody is closed for another.

mod accept_queue;
mod address;
mod host;
mod listener;
mod rates;
mod state;

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    task::{Context, Poll},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use self::state::Occupancy;
pub use self::{
    accept_queue::AcceptQueue, address::SourceAddress, address::SourceNetwork, host::Origins,
    host::is_this_machine, listener::Arrival, listener::DoorListener,
};

/// Bounds of a door.
#[derive(Debug, Clone, Copy)]
pub struct DoorBounds {
    /// Connections at once, handshakes included.
    pub connections: usize,
    /// Connections of one address.
    pub connections_per_address: usize,
    /// Handshakes at once.
    pub handshakes: usize,
    /// Handshakes of one address.
    pub handshakes_per_address: usize,
    /// Connections that an address may open each second, 0 is no limit.
    pub rate_per_address: u32,
    /// Time that a pending connection may be silent although others wait for its place.
    pub patience: Duration,
}

impl Default for DoorBounds {
    fn default() -> Self {
        Self {
            connections: usize::MAX,
            connections_per_address: usize::MAX,
            handshakes: usize::MAX,
            handshakes_per_address: usize::MAX,
            rate_per_address: 0,
            patience: Duration::from_secs(1),
        }
    }
}

/// Reason to refuse a newcomer at the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoorRefusal {
    /// The limit is reached.
    ConnectionLimit,
    /// The door's connections are all taken.
    Connections,
    /// The address's connections are all taken.
    AddressConnections,
    /// The address's handshakes are all taken.
    AddressHandshakes,
    /// The address comes too often.
    Rate,
    /// The address is banned.
    Banned,
    /// Logins from the address have failed, and it has to wait.
    FailedLogins,
}

impl DoorRefusal {
    /// As the log says it.
    pub fn words(self) -> &'static str {
        match self {
            Self::ConnectionLimit => "too many connections in all",
            Self::Connections => "too many connections on this listener",
            Self::AddressConnections => "too many connections of this address",
            Self::AddressHandshakes => "too many handshakes of this address",
            Self::Rate => "this address connects too often",
            Self::Banned => "this address is banned",
            Self::FailedLogins => "this address waits after failed logins",
        }
    }
}

/// Reason to give no place now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotNow {
    /// Somebody who is silent may leave, or a handshake end.
    Wait,
    /// Nobody has to leave.
    Refused(DoorRefusal),
}

/// Places that several doors share: a number of connections.
#[derive(Debug)]
pub struct ConnectionLimit {
    most: usize,
    taken: AtomicUsize,
    doors: Mutex<Vec<Weak<Door>>>,
}

impl ConnectionLimit {
    /// For `most` connections.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, taken: AtomicUsize::new(0), doors: Mutex::default() })
    }

    /// Takes one more place; if need be the oldest silent pending connection of all doors leaves for it.
    fn take(&self) -> Result<(), NotNow> {
        if self.taken.fetch_add(1, Relaxed) < self.most {
            return Ok(());
        }
        let doors: Vec<Arc<Door>> = self.doors.lock().iter().filter_map(Weak::upgrade).collect();
        let since = |door: &Arc<Door>| door.state.lock().oldest_since().map(|since| door.began + since);
        let oldest =
            doors.iter().filter_map(|door| Some((since(door)?, door))).min_by_key(|(since, _)| *since);
        let not_now = match oldest {
            None => NotNow::Refused(DoorRefusal::ConnectionLimit),
            Some((_, door)) => {
                let end_signal = door.state.lock().make_room(door.now());
                if end_signal.is_some() {
                    tell(end_signal);
                    return Ok(());
                }
                NotNow::Wait
            }
        };
        self.give_back();
        Err(not_now)
    }

    fn give_back(&self) {
        self.taken.fetch_sub(1, Relaxed);
    }
}

type EndSignal = oneshot::Sender<()>;

/// The places of one listening socket.
#[derive(Debug)]
pub struct Door {
    connection_limit: Arc<ConnectionLimit>,
    patience: Duration,
    began: Instant,
    state: Mutex<Occupancy<EndSignal>>,
    /// Tells of places given back.
    freed: Notify,
    closed: AtomicBool,
}

impl Door {
    /// A door of `connection_limit`.
    pub fn new(bounds: DoorBounds, connection_limit: &Arc<ConnectionLimit>) -> Arc<Self> {
        let door = Arc::new(Self {
            connection_limit: Arc::clone(connection_limit),
            patience: bounds.patience,
            began: Instant::now(),
            state: Mutex::new(Occupancy::new(bounds)),
            freed: Notify::new(),
            closed: AtomicBool::new(false),
        });
        let mut doors = connection_limit.doors.lock();
        doors.retain(|known| known.strong_count() > 0);
        doors.push(Arc::downgrade(&door));
        drop(doors);
        door
    }

    /// A door of a connection limit of its own.
    pub fn alone(bounds: DoorBounds) -> Arc<Self> {
        Self::new(bounds, &ConnectionLimit::new(usize::MAX))
    }

    /// Admits a socket from `address` to the wait for a place; `None` if the socket has no address or the address is a
    /// proxy's.
    ///
    /// # Errors
    /// The address comes too often.
    pub fn arrive(&self, address: Option<SourceAddress>) -> Result<(), DoorRefusal> {
        if self.state.lock().arrive(address, self.now()) { Ok(()) } else { Err(DoorRefusal::Rate) }
    }

    /// The places of one who arrived.
    ///
    /// # Errors
    /// The connection has to wait, or there is nothing to wait for.
    pub fn enter(
        self: &Arc<Self>,
        address: Option<SourceAddress>,
    ) -> Result<(ConnectionPermit, PendingConnection), NotNow> {
        self.connection_limit.take()?;
        let (end_signal, told) = oneshot::channel();
        let entered = self.state.lock().enter(address, self.now(), end_signal);
        let (id, leaves) = entered.map_err(|(_, not_now)| {
            self.connection_limit.give_back();
            not_now
        })?;
        tell(leaves);
        let (id, told) = (AtomicU64::new(id), Mutex::new(told));
        let (spoke, heard) = (AtomicBool::new(false), AtomicBool::new(false));
        let permit = ConnectionPermit { door: Arc::clone(self), address };
        Ok((permit, PendingConnection { door: Arc::clone(self), id, told, spoke, heard }))
    }

    /// Waits until a waiting socket should try again. Cancel safe.
    pub async fn changed(&self) {
        // A pending connection's patience runs out without a notification.
        let _ = tokio::time::timeout(self.patience / 4, self.freed.notified()).await;
    }

    /// Returns whether half of the places for handshakes are taken.
    pub fn is_half_full(&self) -> bool {
        self.state.lock().is_half_full()
    }

    /// The system has no more sockets: a silent pending connection leaves, however briefly it has been silent.
    pub fn shed(&self) {
        tell(self.state.lock().shed());
    }

    /// Every pending connection leaves.
    pub fn close(&self) {
        self.closed.store(true, Release);
        let end_signals = self.state.lock().close();
        for end_signal in end_signals {
            let _ = end_signal.send(());
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Tells a pending connection to leave; if it is gone already, nothing happens.
fn tell(end_signal: Option<EndSignal>) {
    if let Some(end_signal) = end_signal {
        let _ = end_signal.send(());
    }
}

/// The place of one connection, given back on drop.
#[derive(Debug)]
pub struct ConnectionPermit {
    door: Arc<Door>,
    address: Option<SourceAddress>,
}

impl ConnectionPermit {
    /// Sets the address, which is known only now, from the proxy in front. Only for a permit without one.
    ///
    /// # Errors
    /// The limit of the address that leaves no place.
    pub fn named(&mut self, pending: &PendingConnection, address: SourceAddress) -> Result<(), DoorRefusal> {
        let leaves = self.door.state.lock().named(pending.id(), address, self.door.now())?;
        self.address = Some(address);
        tell(leaves);
        Ok(())
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.door.connection_limit.give_back();
        self.door.state.lock().leave(self.address);
        self.door.freed.notify_one();
    }
}

/// Somebody who has yet to say what it wants; its place is given back on drop.
#[derive(Debug)]
pub struct PendingConnection {
    door: Arc<Door>,
    id: AtomicU64,
    told: Mutex<oneshot::Receiver<()>>,
    /// Something came from it since it was last waited for.
    spoke: AtomicBool,
    /// True once the pending connection has completed its request.
    heard: AtomicBool,
}

impl PendingConnection {
    /// Something came from it.
    pub fn spoke(&self) {
        self.spoke.store(true, Relaxed);
    }

    /// Notes that the pending connection has completed its request, and is not closed for others from now on.
    pub fn heard(&self) {
        if !self.heard.swap(true, Relaxed) {
            self.door.state.lock().heard(self.id());
        }
    }

    /// Notes that the pending connection was refused and told so: it may go, and is closed for others as if it had said nothing.
    pub fn answered(&self) {
        self.heard.store(false, Relaxed);
        self.spoke.store(false, Relaxed);
        self.door.state.lock().answered(self.id());
    }

    /// Its handshake is over and it has not asked for anything yet: it is closed only for other connections.
    pub fn idle(&self) {
        self.door.state.lock().settled(self.id(), true);
        self.door.freed.notify_one();
    }

    /// Runs `conversation` to its end, or returns `None` if the pending connection has to leave first. A pending connection stays
    /// if its bytes were there in time and only this thread was late to read them.
    pub async fn attend<F: Future>(&self, mut conversation: Pin<&mut F>) -> Option<F::Output> {
        poll_fn(|cx| match conversation.as_mut().poll(cx) {
            Poll::Ready(end) => Poll::Ready(Some(end)),
            Poll::Pending => self.poll_told(cx).map(|()| None),
        })
        .await
    }

    /// Ready once it has to leave; not to be polled after that, and only when there is nothing to read from it.
    pub fn poll_told(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut told = self.told.lock();
        while Pin::new(&mut *told).poll(cx).is_ready() {
            let stays = self.spoke.swap(false, Relaxed) || self.heard.load(Relaxed);
            if !stays || self.door.closed.load(Acquire) {
                return Poll::Ready(());
            }
            let end_signal;
            (end_signal, *told) = oneshot::channel();
            let id = self.door.state.lock().revive(self.id(), end_signal, self.door.now());
            self.id.store(id, Relaxed);
        }
        self.spoke.store(false, Relaxed);
        Poll::Pending
    }

    fn id(&self) -> u64 {
        self.id.load(Relaxed)
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        self.door.state.lock().exit(self.id());
        self.door.freed.notify_one();
    }
}
