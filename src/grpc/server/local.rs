//! The API for clients inside the process, such as those of the HTTP listener: the same services behind the same layers, so
//! that who calls is asked for, held to a scope, limited and put into the audit log as on a connection.

use std::{
    convert::Infallible,
    net::SocketAddr,
    task::{Context, Poll},
};

use tonic::{
    Status,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{HeaderValue, Request, Response, Uri, header::AUTHORIZATION, uri::PathAndQuery},
    },
    service::Routes,
};

use super::{access::Guarded, callers::CallerKey, calls::Limited};

/// From where a call inside the process is made on behalf of somebody.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnBehalfOf(pub SocketAddr);

/// Transport of generated clients that call inside the process: `PublisherClient::new(local.on_behalf_of(peer))`. The
/// `authorization` metadata of each request names the caller, as on a connection.
#[derive(Clone)]
pub(crate) struct LocalChannel {
    service: Limited<Guarded<Routes>>,
    peer: Option<SocketAddr>,
}

impl LocalChannel {
    pub(in crate::grpc) fn new(service: Limited<Guarded<Routes>>) -> Self {
        Self { service, peer: None }
    }

    /// The same on behalf of a client at `peer`, which the audit log names.
    pub(crate) fn on_behalf_of(&self, peer: SocketAddr) -> Self {
        Self { service: self.service.clone(), peer: Some(peer) }
    }

    /// Returns the key of the caller if a call of the method at `path` with these credentials would be admitted, before
    /// there is a message to send. A denial is counted and in the audit log; the call must not be made then.
    ///
    /// # Errors
    /// The status with which the call would be refused.
    pub(crate) fn check(
        &self,
        path: &PathAndQuery,
        credentials: &[HeaderValue],
    ) -> Result<CallerKey, Status> {
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from(path.clone());
        for value in credentials {
            request.headers_mut().append(AUTHORIZATION, value.clone());
        }
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(OnBehalfOf(peer));
        }
        Ok(self.service.inner().check(&request)?)
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
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(OnBehalfOf(peer));
        }
        self.service.call(request)
    }
}
