//! Calls of one connection: their number, the memory that they hold, and each one until its answer is sent.

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    task::{Context, Waker},
};

use edge::door::{ConnectionPermit, PendingConnection};
use parking_lot::Mutex;

use super::caller_memory::{CallerMemory, MemoryReservation};
use auth::backends::{CertificateNames, callers::Share};
use grpc_messages::status::Error;

/// Calls that a connection may have beyond its limit, to be told so.
pub(crate) const SPARE: u32 = 100;

/// State that all calls of a connection share: its places, their number, and the memory that they hold.
pub(crate) struct ConnectionCalls {
    pending: PendingConnection,
    peer: SocketAddr,
    /// Names in the peer's verified client certificate.
    certificate: Option<CertificateNames>,
    _permit: ConnectionPermit,
    pub(super) calls: AtomicUsize,
    /// Refused calls whose answers are not sent.
    refusals: AtomicUsize,
    pub(super) caller_memory: Arc<CallerMemory>,
    /// Charge of the connection besides its calls.
    own: Mutex<MemoryReservation>,
    /// Bytes that HTTP/2 may buffer once the connection has shown credentials.
    window: usize,
    is_authenticated: AtomicBool,
    /// Number of calls that were looked at before the connection had shown credentials, and the task that waits for the
    /// next one.
    looked_at: AtomicUsize,
    looking: Mutex<Option<Waker>>,
}

impl ConnectionCalls {
    pub(crate) fn new(
        peer: SocketAddr,
        certificate: Option<CertificateNames>,
        (permit, pending): (ConnectionPermit, PendingConnection),
        own: MemoryReservation,
        window: usize,
    ) -> Self {
        Self {
            pending,
            peer,
            certificate,
            _permit: permit,
            calls: AtomicUsize::new(0),
            refusals: AtomicUsize::new(0),
            caller_memory: Arc::clone(own.caller_memory()),
            own: Mutex::new(own),
            window,
            is_authenticated: AtomicBool::new(false),
            looked_at: AtomicUsize::new(0),
            looking: Mutex::default(),
        }
    }

    /// The connection has shown credentials: it keeps its place, and what it holds is charged like that of all callers.
    ///
    /// # Errors
    /// There is no memory for that.
    pub(crate) fn authenticate(&self) -> Result<(), Error> {
        if self.is_authenticated() {
            return Ok(());
        }
        let mut own = self.own.lock();
        if !self.caller_memory.authenticate(&mut own, self.window) {
            return Err(Error::MemoryBudget);
        }
        self.is_authenticated.store(true, Release);
        self.pending.heard();
        Ok(())
    }

    /// Tells whether it has shown credentials, or made a call that needs none.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.is_authenticated.load(Acquire)
    }

    /// Calls that were let through or refused before the connection had shown credentials; `cx` is woken after the next one.
    pub(super) fn looked_at(&self, cx: &Context<'_>) -> usize {
        *self.looking.lock() = Some(cx.waker().clone());
        self.looked_at.load(Acquire)
    }

    pub(super) fn look(&self) {
        self.looked_at.fetch_add(1, Release);
        if let Some(waiting) = self.looking.lock().take() {
            waiting.wake();
        }
    }

    /// Tells whether more answers of refused calls wait to be sent than a client that reads would have.
    pub(crate) fn leaves_refusals_unread(&self) -> bool {
        self.refusals.load(Relaxed) > SPARE as usize
    }

    /// From where it comes.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Names in its client certificate, if it has one.
    pub(crate) fn certificate(&self) -> Option<&CertificateNames> {
        self.certificate.as_ref()
    }

    /// Returns the charges of the connection's calls.
    pub(crate) fn caller_memory(&self) -> &Arc<CallerMemory> {
        &self.caller_memory
    }

    pub(crate) fn pending(&self) -> &PendingConnection {
        &self.pending
    }
}

/// Goes with a request, for the layer that finds its caller to put the caller's place into.
#[derive(Clone, Default)]
pub(crate) struct CallPlace(Arc<OnceLock<Share>>);

impl CallPlace {
    /// Holds `share` until the answer is sent or given up.
    pub(crate) fn hold(&self, share: Share) {
        // A call has one caller.
        let _ = self.0.set(share);
    }
}

/// A call under way, until its answer is sent or given up.
#[derive(Default)]
pub(crate) struct RunningCall {
    pub(super) connection: Option<Arc<ConnectionCalls>>,
    pub(super) all: Option<Arc<AtomicUsize>>,
    pub(super) holding: Option<MemoryReservation>,
    /// Among the calls of its caller, once that is known.
    pub(super) place: CallPlace,
    /// A health check of the reserve.
    pub(super) reserved: Option<Arc<AtomicUsize>>,
}

impl RunningCall {
    /// Tells whether it is a health check of the reserve, of which the answer is a part.
    pub(super) fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    /// A call of a connection that holds `bytes`.
    #[cfg(test)]
    pub(super) fn holding(caller_memory: &Arc<CallerMemory>, bytes: usize) -> Self {
        let mut holding = caller_memory.open();
        assert!(holding.set(bytes));
        let place = CallPlace::default();
        Self { connection: None, all: None, holding: Some(holding), place, reserved: None }
    }
}

/// A call that was refused, until its answer is sent.
pub(super) struct RefusedCall(Arc<ConnectionCalls>);

impl RefusedCall {
    pub(super) fn new(connection_calls: &Arc<ConnectionCalls>) -> Self {
        connection_calls.refusals.fetch_add(1, Relaxed);
        Self(Arc::clone(connection_calls))
    }
}

impl Drop for RefusedCall {
    fn drop(&mut self) {
        self.0.refusals.fetch_sub(1, Relaxed);
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        if let Some(connection_calls) = &self.connection {
            connection_calls.calls.fetch_sub(1, Relaxed);
        }
        for count in [&self.all, &self.reserved].into_iter().flatten() {
            count.fetch_sub(1, Relaxed);
        }
    }
}
