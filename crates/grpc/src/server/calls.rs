//! Calls under way: how many on a connection and in all, and the answer to one too many.
//!
//! HTTP/2's own limit makes clients hold calls back without a word, so it is announced [`SPARE`] higher, and calls above
//! ours are answered at once. The memory that a call takes is charged: at first a fixed share for each call and its
//! headers, then its request as it comes and its answer until it is sent. A health check, which anybody may make, has a
//! request of a few bytes, and a small reserve for when memory is short.

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    task::{Context, Poll, Waker},
};

use broker::Account;
use edge::door::{ConnectionPermit, PendingConnection};
use parking_lot::Mutex;
use tonic::{
    Status,
    body::Body,
    codegen::{
        Body as HttpBody, BoxFuture, Bytes, Service,
        http::{HeaderMap, Request, Response},
    },
};
use tower_layer::Layer;

use super::{
    answer_body,
    caller_memory::{CallerMemory, MemoryReservation},
    request_body::{self, RequestBounds},
};
use crate::counters::count;
use auth::backends::{CertificateNames, callers::Share};
use grpc_messages::status::Error;

/// Calls that a connection may have beyond its limit, to be told so.
pub(crate) const SPARE: u32 = 100;
/// Called by supervisors and answered at once, so it does not count among all calls.
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// Bytes of a call under way: its task, HTTP/2's stream, tonic's buffers.
const CALL: usize = 16 << 10;
/// Bytes of a call for descriptors, of which two answers wait for a client that reads none.
const DESCRIBING_CALL: usize = 256 << 10;
/// Bytes of the request of a health check, with the head of its message: it names a service.
const HEALTH_REQUEST: usize = 256;
/// Health checks at once in the process for which there was no memory, and which are answered all the same.
const RESERVED_CHECKS: usize = 16;
/// Memory that a header takes besides its bytes.
const HEADER: usize = 128;

/// State that all calls of a connection share: its places, their number, and the memory that they hold.
pub(crate) struct ConnectionCalls {
    pending: PendingConnection,
    peer: SocketAddr,
    /// Names in the peer's verified client certificate.
    certificate: Option<CertificateNames>,
    _seat: ConnectionPermit,
    calls: AtomicUsize,
    /// Refused calls whose answers are not sent.
    refusals: AtomicUsize,
    caller_memory: Arc<CallerMemory>,
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
            _seat: permit,
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

    fn look(&self) {
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

/// Limits the calls of everything it is laid upon.
#[derive(Clone)]
pub(crate) struct CallLimit {
    per_connection: usize,
    in_all: usize,
    calls: Arc<AtomicUsize>,
    account: Arc<Account>,
    bounds: RequestBounds,
    /// Health checks that are answered without memory for them.
    reserved: Arc<AtomicUsize>,
}

impl CallLimit {
    pub(crate) fn new(
        per_connection: u32,
        in_all: u32,
        account: Arc<Account>,
        bounds: RequestBounds,
    ) -> Self {
        Self {
            per_connection: per_connection as usize,
            in_all: in_all as usize,
            calls: Arc::default(),
            account,
            bounds,
            reserved: Arc::default(),
        }
    }

    /// A place for a call, on its connection first, and what it holds.
    fn begin<B>(&self, request: &Request<B>) -> Result<(RunningCall, Arc<CallerMemory>), Error> {
        let is_health = request.uri().path() == HEALTH_CHECK;
        let mut call = RunningCall::default();
        let connection_calls = request.extensions().get::<Arc<ConnectionCalls>>();
        if let Some(connection_calls) = connection_calls {
            let before = connection_calls.calls.fetch_add(1, Relaxed);
            call.connection = Some(Arc::clone(connection_calls));
            if before >= self.per_connection {
                count(|c| c.grpc_calls_refused.add(1));
                return Err(Error::TooManyCalls("on this connection"));
            }
        }
        if !is_health {
            let before = self.calls.fetch_add(1, Relaxed);
            call.all = Some(Arc::clone(&self.calls));
            if before >= self.in_all {
                count(|c| c.grpc_calls_refused_all.add(1));
                return Err(Error::TooManyCalls("in all"));
            }
        }
        let caller_memory = match connection_calls {
            Some(connection_calls) => Arc::clone(&connection_calls.caller_memory),
            None => CallerMemory::new(Arc::clone(&self.account)),
        };
        let mut holding = caller_memory.open();
        if holding.set(size_of_call(request.uri().path()) + size_of_headers(request.headers())) {
            call.holding = Some(holding);
        } else if is_health && self.reserved.fetch_add(1, Relaxed) < RESERVED_CHECKS {
            call.reserved = Some(Arc::clone(&self.reserved));
        } else {
            if is_health {
                self.reserved.fetch_sub(1, Relaxed);
            }
            return Err(Error::MemoryBudget);
        }
        Ok((call, caller_memory))
    }

    fn bounds_of<B>(&self, request: &Request<B>) -> RequestBounds {
        match request.uri().path() {
            HEALTH_CHECK => RequestBounds { body: HEALTH_REQUEST, ..self.bounds },
            _ => self.bounds,
        }
    }
}

fn size_of_call(path: &str) -> usize {
    if path.ends_with("/ServerReflectionInfo") { DESCRIBING_CALL } else { CALL }
}

fn size_of_headers(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + HEADER).sum()
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
    connection: Option<Arc<ConnectionCalls>>,
    all: Option<Arc<AtomicUsize>>,
    holding: Option<MemoryReservation>,
    /// Among the calls of its caller, once that is known.
    place: CallPlace,
    /// A health check of the reserve.
    reserved: Option<Arc<AtomicUsize>>,
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
struct RefusedCall(Arc<ConnectionCalls>);

impl RefusedCall {
    fn new(connection_calls: &Arc<ConnectionCalls>) -> Self {
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

impl<S> Layer<S> for CallLimit {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Limited<S> {
        Limited { inner, limit: self.clone() }
    }
}

/// A service whose calls are limited.
#[derive(Clone)]
pub(crate) struct Limited<S> {
    inner: S,
    limit: CallLimit,
}

impl<S> Limited<S> {
    /// Returns the limited service.
    pub(crate) fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S, B> Service<Request<Body>> for Limited<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: HttpBody<Data = Bytes, Error = Status> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Response<Body>, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let connection_calls = request.extensions().get::<Arc<ConnectionCalls>>();
        let newcomer =
            connection_calls.filter(|connection_calls| !connection_calls.is_authenticated()).cloned();
        let answer = self.begin(request);
        if let Some(newcomer) = newcomer {
            newcomer.look();
        }
        answer
    }
}

impl<S> Limited<S> {
    /// Calls the service, which says at once whether the caller may, unless there is no place or no memory for the call.
    fn begin<B>(&mut self, mut request: Request<Body>) -> BoxFuture<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        S::Future: Send + 'static,
        S::Error: 'static,
        B: HttpBody<Data = Bytes, Error = Status> + Send + 'static,
    {
        match self.limit.begin(&request) {
            Ok((call, caller_memory)) => {
                request.extensions_mut().insert(call.place.clone());
                let arrived = Arc::new(Mutex::new(caller_memory.open()));
                let bounds = self.limit.bounds_of(&request);
                let request = request_body::charged(request, bounds, Arc::clone(&arrived));
                let answer = self.inner.call(request);
                Box::pin(async move {
                    let answer = answer.await?;
                    drop(arrived);
                    Ok(answer_body::charged(answer, call, caller_memory).await)
                })
            }
            Err(error) => {
                let mut refused = Status::from(error).into_http();
                if let Some(connection_calls) = request.extensions().get::<Arc<ConnectionCalls>>() {
                    answer_body::keep_until_sent(refused.headers_mut(), RefusedCall::new(connection_calls));
                }
                Box::pin(async move { Ok(refused) })
            }
        }
    }
}
