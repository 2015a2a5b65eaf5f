//! Methods that one home answers, whichever it is: any one, or the one that knows what is asked for. The request is one message.

use std::task::Poll;

use http_body_util::{BodyExt as _, Full};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{
        Bytes,
        http::{Request, Response, request::Parts},
    },
};

use super::{
    channel::{CallHomes, HomeChannel},
    route,
};

/// Answers at the first home that is served.
pub(super) async fn any(cluster: &CallHomes, request: Request<Body>) -> Response<Body> {
    let (parts, message) = match whole(request).await {
        Ok(whole) => whole,
        Err(status) => return status.into_http(),
    };
    let mut homes = cluster.all().map(|home| cluster.home(home)).peekable();
    while let Some(home) = homes.next() {
        match home.try_answer(again(&parts, &message)).await {
            Ok(answer) => return answer,
            Err(away) if homes.peek().is_none() => return away,
            Err(_) => {}
        }
    }
    Status::internal("a cluster without homes").into_http()
}

/// Asks every home, and answers as the first one that does not say NOT_FOUND. A home that knows it comes before one that is away.
pub(super) async fn that_has(cluster: &CallHomes, request: Request<Body>) -> Response<Body> {
    let (parts, message) = match whole(request).await {
        Ok(whole) => whole,
        Err(status) => return status.into_http(),
    };
    let answer = async |home: HomeChannel| home.answer(again(&parts, &message)).await;
    let mut asked: Vec<_> = cluster.all().map(|home| Some(Box::pin(answer(cluster.home(home))))).collect();
    let mut refused: Option<(Code, Response<Body>)> = None;
    std::future::poll_fn(|cx| {
        for place in &mut asked {
            let Some(Poll::Ready(answer)) = place.as_mut().map(|asked| asked.as_mut().poll(cx)) else {
                continue;
            };
            *place = None;
            match Status::from_header_map(answer.headers()).map(|status| status.code()) {
                None | Some(Code::Ok) => return Poll::Ready(Some(answer)),
                Some(code) => {
                    if refused.as_ref().is_none_or(|(before, _)| *before == Code::NotFound) {
                        refused = Some((code, answer));
                    }
                }
            }
        }
        match asked.iter().all(Option::is_none) {
            true => Poll::Ready(refused.take().map(|(_, answer)| answer)),
            false => Poll::Pending,
        }
    })
    .await
    .unwrap_or_else(|| Status::internal("a cluster without homes").into_http())
}

/// A request with its only message.
async fn whole(request: Request<Body>) -> Result<(Parts, Bytes), Status> {
    let (parts, mut body) = request.into_parts();
    let message = route::first(&mut body).await?;
    Ok((parts, message))
}

/// The same request for another home.
fn again(parts: &Parts, message: &Bytes) -> Request<Body> {
    let body = Full::new(message.clone()).map_err(|never| match never {});
    let mut request = Request::new(Body::new(body));
    *request.method_mut() = parts.method.clone();
    *request.uri_mut() = parts.uri.clone();
    *request.version_mut() = parts.version;
    *request.headers_mut() = parts.headers.clone();
    request
}
