//! Calls under way: how many on a connection and in all, and the answer to one too many.
//!
//! HTTP/2's own limit makes clients hold calls back without a word, so it is announced [`SPARE`](super::connection_calls::SPARE) higher, and calls above
//! ours are answered at once. The memory that a call takes is charged: at first a fixed share for each call and its
//! headers, then its request as it comes and its answer until it is sent. A health check, which anybody may make, has a
//! request of a few bytes, and a small reserve for when memory is short.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use broker::Account;
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
    caller_memory::CallerMemory,
    connection_calls::{ConnectionCalls, RefusedCall, RunningCall},
    request_body::{self, RequestBounds},
};
use crate::counters::count;
use grpc_messages::status::Error;

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
