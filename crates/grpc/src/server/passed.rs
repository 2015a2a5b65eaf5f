//! Calls on their way between gateways: passed on by one that stands by, and answered by the one that serves as for the caller
//! itself.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use auth::backends::{Caller, CredentialKind};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};
use links::{GatewayLink, LinkBody, PassedCaller};
use tonic::{
    Status,
    body::Body,
    codegen::{
        Body as HttpBody, BoxFuture, Bytes, Service as _,
        http::{HeaderMap, Request, Response},
    },
};

use super::{
    access::PassedCall,
    elsewhere::{AnswerElsewhere, CheckedCall},
    local::LocalService,
};
use grpc_messages::status::Error;

/// Kinds of credentials by their names on a link. The keys of a token are the other gateway's.
fn credential(name: &str) -> CredentialKind {
    let kinds = [CredentialKind::Token, CredentialKind::Certificate, CredentialKind::Jwt(0)];
    kinds.into_iter().find(|kind| kind.as_str() == name).unwrap_or(CredentialKind::Unasked)
}

/// Passes calls on over `link`. `not_active` makes the error of a call that cannot be, or that breaks off.
pub fn pass_on(link: Arc<GatewayLink>, not_active: Arc<dyn Fn() -> Error + Send + Sync>) -> AnswerElsewhere {
    Arc::new(move |CheckedCall { caller, peer, request }| {
        let (link, not_active) = (Arc::clone(&link), Arc::clone(&not_active));
        let caller = PassedCaller::new(caller.credential.as_str(), &caller.grant, peer);
        let request = request.map(|body| LinkBody::new(body.map_err(Into::into)));
        Box::pin(async move {
            Ok(match link.call(&caller, request).await {
                Ok(answer) => answer.map(|body| Body::new(PassedAnswer { body: Some(body), not_active })),
                Err(error) => {
                    gateway_core::warn_limited!(%error, "a call is not passed on");
                    Status::from(not_active()).into_http()
                }
            })
        })
    })
}

/// The body of an answer from another gateway, which ends with a status even if that gateway is gone.
struct PassedAnswer {
    /// None at the end.
    body: Option<LinkBody>,
    not_active: Arc<dyn Fn() -> Error + Send + Sync>,
}

impl HttpBody for PassedAnswer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        match std::task::ready!(Pin::new(body).poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            None => {
                self.body = None;
                Poll::Ready(None)
            }
            Some(Err(_)) => {
                self.body = None;
                let mut trailers = HeaderMap::new();
                Status::from((self.not_active)()).add_header(&mut trailers)?;
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl LocalService {
    /// Answers a call that another gateway has checked. `None` if the caller's rights are not such as this version knows.
    pub fn passed(
        &self,
        caller: &PassedCaller,
        request: Request<LinkBody>,
    ) -> Option<BoxFuture<Response<LinkBody>, Infallible>> {
        let grant = Arc::new(caller.grant()?);
        let peer = caller.peer;
        let caller = Caller { credential: credential(&caller.credential), grant };
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(PassedCall { caller, peer });
        let mut service = self.clone();
        Some(Box::pin(async move {
            let answer = service.call(request).await?;
            Ok(answer.map(|body| LinkBody::new(body.map_err(Into::into))))
        }))
    }
}
