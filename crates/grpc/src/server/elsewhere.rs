//! Calls that another gateway answers: the caller's rights are checked here, the call itself goes to whoever serves.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
};

use auth::backends::Caller;
use tonic::{
    Status,
    body::Body,
    codegen::{
        Body as HttpBody, BoxFuture, Bytes, Service, StdError,
        http::{Request, Response},
    },
};

use super::access::Call;

/// A call whose caller may make it.
pub struct CheckedCall {
    /// The caller.
    pub caller: Caller,
    /// Address of the caller, unless it is inside the process.
    pub peer: Option<SocketAddr>,
    /// The call.
    pub request: Request<Body>,
}

/// Answers calls to a gateway that does not serve. Dropping the answer cancels the call.
pub type AnswerElsewhere = Arc<dyn Fn(CheckedCall) -> BoxFuture<Response<Body>, Infallible> + Send + Sync>;

/// All services of a gateway that does not serve.
#[derive(Clone)]
pub(crate) struct Elsewhere(pub(crate) AnswerElsewhere);

impl<B> Service<Request<B>> for Elsewhere
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<StdError>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        match Call::of(request.extensions()) {
            Ok(call) => {
                let (caller, peer) = (call.caller().clone(), call.peer());
                self.0(CheckedCall { caller, peer, request: request.map(Body::new) })
            }
            Err(error) => Box::pin(std::future::ready(Ok(Status::from(error).into_http()))),
        }
    }
}
