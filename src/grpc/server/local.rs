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
pub(super) struct Behalf(pub SocketAddr);

/// What generated clients are made of to call inside the process: `PublisherClient::new(local.on_behalf_of(peer))`. Who
/// calls is said by the `authorization` metadata of each request, as on a connection.
#[derive(Clone)]
pub(crate) struct Local {
    service: Limited<Guarded<Routes>>,
    peer: Option<SocketAddr>,
}

impl Local {
    pub(in crate::grpc) fn new(service: Limited<Guarded<Routes>>) -> Self {
        Self { service, peer: None }
    }

    /// The same on behalf of a client at `peer`, which the audit log names.
    pub(crate) fn on_behalf_of(&self, peer: SocketAddr) -> Self {
        Self { service: self.service.clone(), peer: Some(peer) }
    }

    /// Who would be let through with a call of the method at `path` and these credentials, before there is a message to send. A
    /// denial is counted and in the audit log, so the call is not to be made then.
    ///
    /// # Errors
    /// What the call would be answered.
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
            request.extensions_mut().insert(Behalf(peer));
        }
        Ok(self.service.inner().check(&request)?)
    }
}

impl Service<Request<Body>> for Local {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(Behalf(peer));
        }
        self.service.call(request)
    }
}
