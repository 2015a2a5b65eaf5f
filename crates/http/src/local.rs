//! The gRPC API as a client inside the process sees it. The wiring hands it in, so that nothing here knows who serves it.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
};

use auth::backends::callers::{CallerKey, ForwardedFor};
use tonic::{
    Status,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{HeaderValue, Request, Response, Uri, header::AUTHORIZATION, uri::PathAndQuery},
    },
};
use tower::util::BoxCloneSyncService;

type CallCheck = Arc<dyn Fn(&Request<()>) -> Result<CallerKey, Status> + Send + Sync>;

/// Transport of generated clients that call inside the process: `PublisherClient::new(local.forwarded_for(peer))`. The
/// `authorization` metadata of each request names the caller, as on a connection.
#[derive(Clone)]
pub struct LocalChannel {
    service: BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>,
    check: CallCheck,
    peer: Option<SocketAddr>,
}

impl LocalChannel {
    /// Over `service`; `check` says whether it would admit a call, as [`Self::check`] describes.
    pub fn new<S>(
        service: S,
        check: impl Fn(&Request<()>) -> Result<CallerKey, Status> + Send + Sync + 'static,
    ) -> Self
    where
        S: Service<
                Request<Body>,
                Response = Response<Body>,
                Error = Infallible,
                Future = BoxFuture<Response<Body>, Infallible>,
            >,
        S: Clone + Send + Sync + 'static,
    {
        Self { service: BoxCloneSyncService::new(service), check: Arc::new(check), peer: None }
    }

    /// The same on behalf of a client at `peer`, which the audit log names.
    pub(crate) fn forwarded_for(&self, peer: SocketAddr) -> Self {
        Self { peer: Some(peer), ..self.clone() }
    }

    /// Returns the key of the caller if a call of the method at `path` with these credentials would be admitted, before
    /// there is a message to send. A denial is counted and in the audit log; the call must not be made then.
    ///
    /// # Errors
    /// The status with which the call would be refused.
    pub fn check(&self, path: &PathAndQuery, credentials: &[HeaderValue]) -> Result<CallerKey, Status> {
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from(path.clone());
        for value in credentials {
            request.headers_mut().append(AUTHORIZATION, value.clone());
        }
        self.name_peer(&mut request);
        (self.check)(&request)
    }

    fn name_peer<B>(&self, request: &mut Request<B>) {
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(ForwardedFor(peer));
        }
    }
}

impl Service<Request<Body>> for LocalChannel {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        self.name_peer(&mut request);
        self.service.call(request)
    }
}
