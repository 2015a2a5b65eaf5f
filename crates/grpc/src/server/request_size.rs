//! Guards in front of every service: the size limit, refused in our words, and the choice of callers who get compressed
//! answers.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use tonic::{
    Status,
    body::Body,
    codegen::{
        Service,
        http::{HeaderMap, Request, Response},
    },
    server::NamedService,
};

use grpc_messages::status::Error;

/// A service with the limit before it.
#[derive(Clone)]
pub(crate) struct SizeLimit<S>(pub(crate) S);

impl<S: NamedService> NamedService for SizeLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for SizeLimit<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        answer_in_kind(request.headers_mut());
        let answer = self.0.call(request);
        Box::pin(async move {
            let response = answer.await?;
            Ok(match Status::from_header_map(response.headers()).as_ref().and_then(too_large) {
                Some(error) => Status::from(error).into_http(),
                None => response,
            })
        })
    }
}

/// Compresses only for those who send gzip themselves. Most clients say that they could read it, and compressing for
/// all of them costs more CPU than everything else about a message.
pub fn answer_in_kind(headers: &mut HeaderMap) {
    if headers.get("grpc-encoding").is_none_or(|encoding| encoding == "identity") {
        headers.remove("grpc-accept-encoding");
    }
}

/// Our error for tonic's own about a request above the limit, packed or unpacked.
pub(crate) fn too_large(status: &Status) -> Option<Error> {
    let (packed, unpacked) = ("Error, decoded message length too large", "Error decompressing: size limit");
    (status.message().starts_with(packed) || status.message().starts_with(unpacked))
        .then_some(Error::RequestTooLarge)
}
