//! Identifies the caller of every method and checks its rights, in one layer before all services.
//!
//! The layer finds the caller, looks the method up in [`super::methods`], and puts a [`Call`] into the request's
//! extensions; services use it to hold their work against the caller's scope. A call that stays open ends when its caller's
//! rights do.

use std::{
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use access::backends::{Scope, TokenGrant, covers};
use broker::InScope;
use gateway_core::has_wildcard;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tonic::{
    Code, Status,
    body::Body,
    codegen::{
        Body as HttpBody, BoxFuture, Bytes, Service,
        http::{
            Extensions, Request, Response,
            header::{AUTHORIZATION, HeaderMap},
        },
    },
};
use tower_layer::Layer;

use super::{
    connection_calls::{CallPlace, ConnectionCalls},
    methods::{AllowedCallers, GrpcMethod, method},
};
use crate::counters::count;
use auth::backends::{
    BackendAuthenticator, Caller, UnknownCaller,
    audit::{self, AuditLine},
    callers::{CallerKey, CallerPlaces, CallerShares, ForwardedFor, NoPlace},
    now,
};
use grpc_messages::status::Error;

/// Longest value of `authorization`; a signed token with many claims has some 4 KiB.
const MOST_BYTES: usize = 8 << 10;
/// Longest sleep until an expiry: the wall clock may have been set meanwhile, so it is read again after this.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// Longest name of a call's object in the audit log.
const MOST_OBJECT: usize = 256;

/// The devices in the scope of a grant, for a [`Selector`](broker::Selector); `None` if it does not limit them.
pub(crate) fn devices_of(grant: &Arc<TokenGrant>) -> Option<Arc<InScope>> {
    grant.scope.devices()?;
    let grant = Arc::clone(grant);
    Some(Arc::new(move |device: &str| grant.scope.has_device(device)))
}

/// Goes with a request that another gateway has checked: the rights of its caller.
#[derive(Debug, Clone)]
pub(crate) struct PassedCall {
    /// The caller, as that gateway found it.
    pub(crate) caller: Caller,
    /// Address of the caller, unless it is inside that gateway.
    pub(crate) peer: Option<SocketAddr>,
}

/// A call that was let through, as its service sees it.
#[derive(Debug)]
pub(crate) struct Call {
    caller: Caller,
    method: &'static str,
    peer: Option<SocketAddr>,
    /// With what an administrative call has to do.
    object: Mutex<Option<String>>,
}

impl Call {
    /// The call of a request.
    pub(crate) fn of(extensions: &Extensions) -> Result<Arc<Self>, Error> {
        // Without the layer nobody has said that it may.
        extensions.get::<Arc<Self>>().cloned().ok_or(Error::Internal)
    }

    /// One without limits.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Self {
        let backends = BackendAuthenticator::open(&Default::default()).unwrap();
        let caller = backends.anybody().clone();
        Self { caller, method: "test", peer: None, object: Mutex::default() }
    }

    /// One without limits, of somebody at 192.0.2.`host` who was not asked who it is.
    #[cfg(test)]
    pub(crate) fn from_host(host: u8) -> Self {
        Self { peer: Some(([192, 0, 2, host], 1).into()), ..Self::unlimited() }
    }

    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the key of the caller whose share the call counts for.
    pub(crate) fn key(&self) -> CallerKey {
        CallerKey::of(&self.caller, self.peer)
    }

    /// The method, as `/package.Service/GrpcMethod`.
    pub(crate) fn method(&self) -> &'static str {
        self.method
    }

    /// Returns the caller's address, unless the caller is inside the process.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    pub(crate) fn scope(&self) -> &Scope {
        &self.caller.grant.scope
    }

    /// Names what the call has to do with, for the audit log.
    pub(crate) fn about(&self, object: &str) {
        let end = object.floor_char_boundary(MOST_OBJECT);
        *self.object.lock() = Some(object[..end].to_owned());
    }

    /// The topic in `field` must be in scope.
    pub(crate) fn check_topic(&self, field: &str, topic: &str) -> Result<(), Error> {
        if self.scope().has_topic(topic) { Ok(()) } else { Err(self.out_of_scope(field, topic)) }
    }

    /// The device in `field` must be in scope.
    pub(crate) fn check_device(&self, field: &str, device: &str) -> Result<(), Error> {
        if self.scope().has_device(device) { Ok(()) } else { Err(self.out_of_scope(field, device)) }
    }

    /// The devices in `field` must be in scope.
    pub(crate) fn check_devices(&self, field: &str, devices: &[String]) -> Result<(), Error> {
        if self.scope().devices().is_none() {
            return Ok(());
        }
        devices.iter().try_for_each(|device| self.check_device(field, device))
    }

    /// Some topic that `filter` matches must be in scope; what it matches besides is left out of the answer by the service.
    pub(crate) fn check_filter(&self, field: &str, filter: &str) -> Result<(), Error> {
        if self.scope().meets(filter) { Ok(()) } else { Err(self.out_of_scope(field, filter)) }
    }

    /// Every topic that `filter` matches must be in scope, if it is a filter.
    pub(crate) fn check_whole_filter(&self, field: &str, filter: &str) -> Result<(), Error> {
        let own = self.scope().topics();
        let within = own.is_none_or(|own| own.iter().any(|own| covers(own, filter)));
        if within { Ok(()) } else { Err(self.out_of_scope(field, filter)) }
    }

    /// The part of `filters` that is in scope, as filters. Each must have such a part unless there are wildcards in it, and
    /// one of them must.
    pub(crate) fn narrow(
        &self,
        field: &str,
        filters: Vec<String>,
        most: usize,
    ) -> Result<Vec<String>, Error> {
        if self.scope().topics().is_none() {
            return Ok(filters);
        }
        for filter in filters.iter().filter(|filter| !has_wildcard(filter)) {
            self.check_topic(field, filter)?;
        }
        let narrowed = self.scope().narrow(&filters, most).ok_or_else(|| {
            let problem = format!("makes more than {most} filters together with the caller's scope");
            Error::invalid(field, problem)
        })?;
        match (narrowed.is_empty(), filters.first()) {
            (true, Some(first)) => Err(self.out_of_scope(field, first)),
            _ => Ok(narrowed),
        }
    }

    /// The denial of what is in `field`, counted and in the log.
    pub(crate) fn out_of_scope(&self, field: &str, object: &str) -> Error {
        self.denied(object, Error::OutOfScope { field: field.to_owned() })
    }

    /// The same of a group that is refused for filters that it had.
    pub(crate) fn had_other_filters(&self, field: &str, group: &str) -> Error {
        self.denied(group, Error::HadOtherFilters { field: field.to_owned() })
    }

    fn denied(&self, object: &str, error: Error) -> Error {
        auth::counters::count(|c| c.backend_denied_scope.add(1));
        let end = object.floor_char_boundary(MOST_OBJECT);
        audit::denied(AuditLine { target: Some(&object[..end]), ..self.line() }, &error.reason());
        error
    }

    fn line(&self) -> AuditLine<'_> {
        let peer = self.peer.map(|peer| peer.ip());
        AuditLine { caller: Some(&self.caller), method: self.method, target: None, peer }
    }

    /// Into the audit log, with how it ended.
    fn note(&self, code: Code) {
        // A denial is in the log already.
        if code != Code::PermissionDenied {
            let object = self.object.lock();
            audit::done(AuditLine { target: object.as_deref(), ..self.line() }, &format_args!("{code:?}"));
        }
    }
}

/// Lets those pass who may, each with no more calls at once than its share.
#[derive(Clone)]
pub(crate) struct Access {
    backends: Arc<BackendAuthenticator>,
    calls: Arc<CallerShares>,
}

impl Access {
    /// For `calls` at once.
    pub(crate) fn new(backends: Arc<BackendAuthenticator>, calls: CallerPlaces) -> Self {
        Self { backends, calls: CallerShares::new(calls) }
    }
}

impl<S> Layer<S> for Access {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, access: self.clone() }
    }
}

/// A service that is called by those only who may.
#[derive(Clone)]
pub(crate) struct Guarded<S> {
    inner: S,
    access: Access,
}

impl<S> Guarded<S> {
    /// The call, if it may be made. Its connection counts as authenticated once the caller is known.
    fn admit<B>(&self, request: &Request<B>) -> Result<(Arc<Call>, &'static GrpcMethod), Error> {
        let path = request.uri().path();
        let connection_calls = request.extensions().get::<Arc<ConnectionCalls>>();
        let passed = request.extensions().get::<PassedCall>();
        let forwarded = || request.extensions().get::<ForwardedFor>().map(|client| client.0);
        let peer = match passed {
            Some(passed) => passed.peer,
            None => connection_calls.map(|connection_calls| connection_calls.peer()).or_else(forwarded),
        };
        let deny = |caller: Option<&Caller>, error: Error| {
            // An unknown method name is text of the peer's choice.
            let end = path.floor_char_boundary(MOST_OBJECT);
            let peer = peer.map(|peer: SocketAddr| IpAddr::to_canonical(&peer.ip()));
            let line = AuditLine { caller, method: &path[..end], target: None, peer };
            audit::denied(line, &error.reason());
            error
        };
        let found = method(path);
        let identified = match found {
            _ if passed.is_some() => passed.map(|passed| passed.caller.clone()).ok_or(UnknownCaller::Nobody),
            Some(GrpcMethod { who: AllowedCallers::Anybody, .. }) => {
                Ok(self.access.backends.anybody().clone())
            }
            _ => self.identify(request.headers(), connection_calls),
        };
        let caller = match identified {
            Ok(caller) => caller,
            Err(unknown) => {
                unknown.count();
                return Err(deny(None, Error::Unauthenticated(unknown)));
            }
        };
        let shows_nothing =
            self.access.backends.is_on() && found.is_some_and(|found| found.who == AllowedCallers::Anybody);
        if let Some(connection_calls) = connection_calls.filter(|_| !shows_nothing) {
            connection_calls.authenticate()?;
        }
        let method = found.ok_or(Error::Unimplemented)?;
        if let AllowedCallers::Has(roles) = method.who
            && !roles.include(caller.grant.role)
        {
            auth::counters::count(|c| c.backend_denied_role.add(1));
            let error = Error::RoleDenied { role: caller.grant.role };
            return Err(deny(Some(&caller), error));
        }
        Ok((Arc::new(Call { caller, method: method.path, peer, object: Mutex::default() }), method))
    }

    /// Takes a place among the calls of its caller, which is held until the answer is sent.
    fn place<B>(&self, request: &Request<B>, call: &Call, method: &GrpcMethod) -> Result<(), Error> {
        let Some(place) =
            request.extensions().get::<CallPlace>().filter(|_| method.who != AllowedCallers::Anybody)
        else {
            return Ok(());
        };
        let share = self.access.calls.take(call.key()).map_err(|none| match none {
            NoPlace::All => {
                count(|c| c.grpc_calls_refused_all.add(1));
                Error::TooManyCalls("in all")
            }
            NoPlace::Caller => {
                count(|c| c.grpc_calls_refused_caller.add(1));
                Error::TooManyCalls("of this caller")
            }
        })?;
        place.hold(share);
        Ok(())
    }

    /// Returns the key of the caller if a request with this path and these headers would be admitted; a denial is counted
    /// and written to the log.
    pub(crate) fn check<B>(&self, request: &Request<B>) -> Result<CallerKey, Error> {
        self.admit(request).map(|(call, _)| call.key())
    }

    fn identify(
        &self,
        headers: &HeaderMap,
        connection_calls: Option<&Arc<ConnectionCalls>>,
    ) -> Result<Caller, UnknownCaller> {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let value = values.next().map(|value| value.as_bytes());
        if value.is_some_and(|value| value.len() > MOST_BYTES) || values.next().is_some() {
            return self.access.backends.identify(Some(b""), None);
        }
        self.access
            .backends
            .identify(value, connection_calls.and_then(|connection_calls| connection_calls.certificate()))
    }
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Response<Body>, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let admitted = self.admit(&request).and_then(|(call, method)| {
            self.place(&request, &call, method)?;
            Ok((call, method))
        });
        let (call, method) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => {
                let refused = Status::from(error).into_http();
                return Box::pin(async move { Ok(refused) });
            }
        };
        // Of a call that was passed on, the gateway that did so watches the rights.
        let is_passed = request.extensions_mut().remove::<PassedCall>().is_some();
        request.extensions_mut().insert(Arc::clone(&call));
        let backends = &self.access.backends;
        let watched = (method.stays && backends.is_on() && !is_passed).then(|| Arc::clone(backends));
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            if method.administers {
                let status = Status::from_header_map(answer.headers());
                call.note(status.map_or(Code::Ok, |status| status.code()));
            }
            Ok(match watched {
                Some(backends) => ending(answer, backends, call),
                None => answer,
            })
        })
    }
}

/// An answer that ends when its caller's rights do.
fn ending(answer: Response<Body>, backends: Arc<BackendAuthenticator>, call: Arc<Call>) -> Response<Body> {
    if answer.body().is_end_stream() {
        return answer;
    }
    answer.map(|body| {
        let open = Arc::new(Mutex::new(PermittedBody { body: Some(body), lost: None, waker: None }));
        let watch = tokio::spawn({
            let (open, call) = (Arc::clone(&open), Arc::clone(&call));
            async move { close(&open, lost(&backends, &call.caller).await) }
        });
        Body::new(EndingCall { open, watch: watch.abort_handle(), call })
    })
}

/// Takes the stream from its caller, with all that the service did for it. Not left to the one who reads the stream: while the
/// caller takes nothing nobody does, and he would keep what he has.
fn close(open: &Mutex<PermittedBody>, unknown: UnknownCaller) {
    let (body, waker) = {
        let mut open = open.lock();
        open.lost = Some(unknown);
        (open.body.take(), open.waker.take())
    };
    // Outside the lock: it leaves what it had joined.
    drop(body);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Waits until `caller` is no longer who it was, and says why.
async fn lost(backends: &BackendAuthenticator, caller: &Caller) -> UnknownCaller {
    let mut changes = backends.changes();
    loop {
        if let Err(unknown) = backends.check(caller) {
            return unknown;
        }
        let expiry = async {
            match caller.grant.expires {
                None => std::future::pending().await,
                Some(at) => {
                    let left = Duration::from_secs(at.saturating_sub(now()));
                    // A part of the last second is left of a time in whole ones.
                    tokio::time::sleep(left.clamp(Duration::from_millis(50), LONGEST_SLEEP)).await;
                }
            }
        };
        tokio::select! {
            () = expiry => {}
            changed = changes.changed() => if changed.is_err() {
                return UnknownCaller::Revoked;
            },
        }
    }
}

struct EndingCall {
    open: Arc<Mutex<PermittedBody>>,
    watch: AbortHandle,
    call: Arc<Call>,
}

/// A stream while its caller may have it.
struct PermittedBody {
    /// Gone at the end.
    body: Option<Body>,
    /// Why it ends early, until that is told.
    lost: Option<UnknownCaller>,
    waker: Option<Waker>,
}

impl Drop for EndingCall {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl HttpBody for EndingCall {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut open = self.open.lock();
        if let Some(body) = &mut open.body {
            let polled = Pin::new(body).poll_frame(cx);
            if polled.is_pending() && !open.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                open.waker = Some(cx.waker().clone());
            }
            return polled;
        }
        let Some(unknown) = open.lost.take() else { return Poll::Ready(None) };
        drop(open);
        count(|c| match unknown {
            UnknownCaller::Expired => c.backend_streams_expired.add(1),
            _ => c.backend_streams_revoked.add(1),
        });
        let error = Error::Unauthenticated(unknown);
        audit::denied(self.call.line(), &error.reason());
        let mut trailers = HeaderMap::new();
        match Status::from(error).add_header(&mut trailers) {
            Ok(()) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            Err(status) => Poll::Ready(Some(Err(status))),
        }
    }

    fn is_end_stream(&self) -> bool {
        let open = self.open.lock();
        open.lost.is_none() && open.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
