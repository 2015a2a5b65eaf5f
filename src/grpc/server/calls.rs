//! Calls under way: how many on a connection and in all, and the answer to one too many.
//!
//! HTTP/2's own limit makes clients hold calls back without a word, so it is announced [`SPARE`] higher, and what is
//! above ours is answered at once. What a call makes the process hold is charged: to begin with what each one takes and its
//! headers, then its request as it comes and its answer until it is sent.

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use broker::Account;
use gateway_core::metrics::count;
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
    callers::Share,
    purse::{Holding, Purse},
    request_body::{self, RequestBounds},
};
use crate::backends::CertificateNames;
use crate::door::{Guest, Seat};
use crate::grpc::status::Error;

/// Calls that a connection may have beyond its limit, to be told so.
pub(in crate::grpc) const SPARE: u32 = 100;
/// Called by supervisors and answered at once, so it does not count among all calls.
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// Bytes of a call under way: its task, HTTP/2's stream, tonic's buffers.
const CALL: usize = 16 << 10;
/// Bytes of a call for descriptors, of which two answers wait for a client that reads none.
const DESCRIBING_CALL: usize = 256 << 10;
/// What a header takes besides its bytes.
const HEADER: usize = 128;

/// What a connection's calls share: its places, their number, and what they hold.
pub(in crate::grpc) struct Standing {
    guest: Guest,
    peer: SocketAddr,
    /// What its verified client certificate says.
    certificate: Option<CertificateNames>,
    _seat: Seat,
    calls: AtomicUsize,
    purse: Arc<Purse>,
    /// What HTTP/2 may buffer.
    _window: Holding,
}

impl Standing {
    pub(in crate::grpc) fn new(
        peer: SocketAddr,
        certificate: Option<CertificateNames>,
        seat: Seat,
        guest: Guest,
        purse: Arc<Purse>,
        window: Holding,
    ) -> Self {
        Self { guest, peer, certificate, _seat: seat, calls: AtomicUsize::new(0), purse, _window: window }
    }

    /// From where it comes.
    pub(in crate::grpc) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Names in its client certificate, if it has one.
    pub(in crate::grpc) fn certificate(&self) -> Option<&CertificateNames> {
        self.certificate.as_ref()
    }

    /// What its calls hold.
    pub(in crate::grpc) fn purse(&self) -> &Arc<Purse> {
        &self.purse
    }

    pub(in crate::grpc) fn guest(&self) -> &Guest {
        &self.guest
    }
}

/// Limits the calls of everything it is laid upon.
#[derive(Clone)]
pub(in crate::grpc) struct CallLimit {
    per_connection: usize,
    in_all: usize,
    calls: Arc<AtomicUsize>,
    account: Arc<Account>,
    bounds: RequestBounds,
    /// For health checks, which are never refused.
    health: Arc<Purse>,
}

impl CallLimit {
    pub(in crate::grpc) fn new(
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
            health: Purse::new(Arc::new(Account::new(usize::MAX))),
        }
    }

    /// A place for a call, on its connection first, and what it holds.
    fn begin<B>(&self, request: &Request<B>) -> Result<(RunningCall, Arc<Purse>), Error> {
        let is_health = request.uri().path() == HEALTH_CHECK;
        let mut call = RunningCall::default();
        let standing = request.extensions().get::<Arc<Standing>>();
        if let Some(standing) = standing {
            // From now on it is not a silent guest.
            standing.guest.heard();
            let before = standing.calls.fetch_add(1, Relaxed);
            call.connection = Some(Arc::clone(standing));
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
        let purse = match standing {
            _ if is_health => Arc::clone(&self.health),
            Some(standing) => Arc::clone(&standing.purse),
            None => Purse::new(Arc::clone(&self.account)),
        };
        let mut holding = purse.open();
        if !holding.set(size_of_call(request.uri().path()) + size_of_headers(request.headers())) {
            return Err(Error::MemoryBudget);
        }
        call.holding = Some(holding);
        Ok((call, purse))
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
pub(in crate::grpc) struct CallPlace(Arc<OnceLock<Share>>);

impl CallPlace {
    /// Holds `share` until the answer is sent or given up.
    pub(in crate::grpc) fn hold(&self, share: Share) {
        // A call has one caller.
        let _ = self.0.set(share);
    }
}

/// A call under way, until its answer is sent or given up.
#[derive(Default)]
pub(in crate::grpc) struct RunningCall {
    connection: Option<Arc<Standing>>,
    all: Option<Arc<AtomicUsize>>,
    holding: Option<Holding>,
    /// Among the calls of its caller, once that is known.
    place: CallPlace,
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        if let Some(standing) = &self.connection {
            standing.calls.fetch_sub(1, Relaxed);
        }
        if let Some(all) = &self.all {
            all.fetch_sub(1, Relaxed);
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
pub(in crate::grpc) struct Limited<S> {
    inner: S,
    limit: CallLimit,
}

impl<S> Limited<S> {
    /// What is limited.
    pub(in crate::grpc) fn inner(&self) -> &S {
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

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        match self.limit.begin(&request) {
            Ok((call, purse)) => {
                request.extensions_mut().insert(call.place.clone());
                let arrived = Arc::new(Mutex::new(purse.open()));
                let request = request_body::charged(request, self.limit.bounds, Arc::clone(&arrived));
                let answer = self.inner.call(request);
                Box::pin(async move {
                    let answer = answer.await?;
                    drop(arrived);
                    Ok(answer_body::charged(answer, call, purse).await)
                })
            }
            Err(error) => {
                let refused = Status::from(error).into_http();
                Box::pin(async move { Ok(refused) })
            }
        }
    }
}
