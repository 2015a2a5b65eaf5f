//! Calls on their way between gateways: passed on by one that stands by, and answered by the one that serves as for the caller
//! itself.

use std::{convert::Infallible, sync::Arc};

use auth::backends::{Caller, CredentialKind};
use http_body_util::BodyExt as _;
use links::{LinkBody, PassedCaller};
use tonic::{
    body::Body,
    codegen::{
        BoxFuture, Service as _,
        http::{Request, Response},
    },
};

use super::{access::PassedCall, local::LocalService};

/// Kinds of credentials by their names on a link. The keys of a token are the other gateway's.
fn credential(name: &str) -> CredentialKind {
    let kinds = [CredentialKind::Token, CredentialKind::Certificate, CredentialKind::Jwt(0)];
    kinds.into_iter().find(|kind| kind.as_str() == name).unwrap_or(CredentialKind::Unasked)
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
