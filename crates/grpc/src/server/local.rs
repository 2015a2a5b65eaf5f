//! The API for clients inside the process, such as those of the HTTP listener: the same services behind the same layers, so
//! that a caller is asked for, held to a scope, limited and put into the audit log as on a connection.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use auth::backends::callers::CallerKey;
use tonic::{
    Status,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{Request, Response},
    },
    service::Routes,
};

use super::{access::Guarded, calls::Limited};

/// All services, for clients in the process. The `authorization` metadata of each request names the caller, and the extension
/// [`ForwardedFor`](auth::backends::callers::ForwardedFor) the address that the audit log names.
#[derive(Clone)]
pub struct LocalService(Limited<Guarded<Routes>>);

impl LocalService {
    pub(crate) fn new(service: Limited<Guarded<Routes>>) -> Self {
        Self(service)
    }

    /// Returns the key of the caller if this call would be admitted, before there is a message to send. A denial is counted and
    /// in the audit log; the call must not be made then.
    ///
    /// # Errors
    /// The status with which the call would be refused.
    pub fn check(&self, request: &Request<()>) -> Result<CallerKey, Status> {
        Ok(self.0.inner().check(request)?)
    }
}

impl Service<Request<Body>> for LocalService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.call(request)
    }
}
