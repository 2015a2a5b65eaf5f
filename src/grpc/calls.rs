//! Calls under way: how many on a connection and in all, and the answer to one too many.
//!
//! HTTP/2's own limit makes clients hold calls back without a word, so it is announced [`SPARE`] higher, and what is
//! above ours is answered at once.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use tonic::{
    Status,
    body::Body,
    codegen::{
        Body as HttpBody, BoxFuture, Bytes, Service,
        http::{Request, Response},
    },
};
use tower_layer::Layer;

use super::status::Error;
use crate::{
    door::{Guest, Seat},
    telemetry::count,
};

/// Calls that a connection may have beyond its limit, to be told so.
pub(super) const SPARE: u32 = 100;
/// Answered at once and asked for by supervisors: not among all calls.
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

/// What a connection's calls share: its places, and their number.
pub(super) struct Standing {
    guest: Guest,
    _seat: Seat,
    calls: AtomicUsize,
}

impl Standing {
    pub(super) fn new(seat: Seat, guest: Guest) -> Self {
        Self { guest, _seat: seat, calls: AtomicUsize::new(0) }
    }

    pub(super) fn guest(&self) -> &Guest {
        &self.guest
    }
}

/// Limits the calls of everything it is laid upon.
#[derive(Clone)]
pub(super) struct CallLimit {
    per_connection: usize,
    in_all: usize,
    calls: Arc<AtomicUsize>,
}

impl CallLimit {
    pub(super) fn new(per_connection: u32, in_all: u32) -> Self {
        Self { per_connection: per_connection as usize, in_all: in_all as usize, calls: Arc::default() }
    }

    /// A place for a call, on its connection first.
    fn begin<B>(&self, request: &Request<B>) -> Result<Call, Error> {
        let mut call = Call::default();
        if let Some(standing) = request.extensions().get::<Arc<Standing>>() {
            // From now on it is not one of the silent.
            standing.guest.heard();
            let before = standing.calls.fetch_add(1, Relaxed);
            call.connection = Some(Arc::clone(standing));
            if before >= self.per_connection {
                return Err(Error::TooManyCalls("on this connection"));
            }
        }
        if request.uri().path() != HEALTH_CHECK {
            let before = self.calls.fetch_add(1, Relaxed);
            call.all = Some(Arc::clone(&self.calls));
            if before >= self.in_all {
                return Err(Error::TooManyCalls("in all"));
            }
        }
        Ok(call)
    }
}

/// A call under way, until its answer is sent or given up.
#[derive(Default)]
struct Call {
    connection: Option<Arc<Standing>>,
    all: Option<Arc<AtomicUsize>>,
}

impl Drop for Call {
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
pub(super) struct Limited<S> {
    inner: S,
    limit: CallLimit,
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
        match self.limit.begin(&request) {
            Ok(call) => {
                let answer = self.inner.call(request);
                Box::pin(async move {
                    Ok(answer.await?.map(|body| Body::new(Answer { body: Box::pin(body), _call: call })))
                })
            }
            Err(error) => {
                count(|c| c.grpc_calls_refused.add(1));
                let refused = Status::from(error).into_http();
                Box::pin(async move { Ok(refused) })
            }
        }
    }
}

/// The body of an answer, with the place of its call.
struct Answer<B> {
    body: Pin<Box<B>>,
    _call: Call,
}

impl<B: HttpBody> HttpBody for Answer<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<B::Data>, B::Error>>> {
        self.body.as_mut().poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
