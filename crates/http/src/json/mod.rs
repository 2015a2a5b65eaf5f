//! The gRPC API for those without gRPC: paths below `/v1`, JSON bodies, server-sent events.
//!
//! ```text
//! routes     the table: which path is which RPC, and where its fields come from
//! decode     JSON, paths and queries -> messages
//! encode     messages -> JSON
//! payload    how payloads are shown
//! body       request bodies as they arrive
//! call       the RPC, inside the process
//! events     streams as server-sent events
//! problem    errors (RFC 9457)
//! origin     pages of other origins
//! ```
//!
//! Messages are translated by the descriptors of the protos, as proto3 JSON says it, so that each field and each RPC is
//! here as soon as it is there. Nothing is decided here but form: the layers of the API ask for the caller and the
//! caller's rights, with the `authorization` header of the request.

mod body;
mod call;
mod decode;
mod encode;
mod events;
#[cfg(test)]
mod openapi;
mod origin;
mod payload;
mod problem;
mod routes;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{RawPathParams, State},
    http::{
        HeaderMap, Request, StatusCode, Uri,
        header::{AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_TYPE},
    },
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, on},
};
use broker::Account;
use bytes::Bytes;
use gateway_api::json::pool;
use prost_reflect::{DynamicMessage, MethodDescriptor, prost::Message as _};

use self::{
    payload::PayloadView,
    problem::HttpProblem,
    routes::{BodyContent, ROUTES, Route},
};
use super::{
    client::{HttpClient, SenderAddress},
    held::{HeldBytes, paced},
};
use crate::local::LocalChannel;

/// Document served as `/openapi.json`; a test writes it from the routes and the protos.
const OPENAPI: &str = include_str!("openapi.json");
const JSON: &str = "application/json";
/// Timeout of a call that names none.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest timeout that a call may ask for.
const LONGEST: Duration = Duration::from_secs(3600);

/// Bounds and permissions of the JSON API.
#[derive(Debug, Clone)]
pub struct JsonOptions {
    /// Most bytes of a request's body.
    pub max_body: usize,
    /// Time for a body, or 64 KiB of it.
    pub body_timeout: Duration,
    /// Origins of pages that may use it, besides those of the host that a request names; `*` is all.
    pub cors_origins: Vec<String>,
}

/// The API as JSON.
#[derive(Clone)]
pub struct JsonApi(Arc<HttpShared>);

struct HttpShared {
    api: LocalChannel,
    account: Arc<Account>,
    options: JsonOptions,
}

impl JsonApi {
    /// Over `api`; what bodies take is charged to `account`. The descriptors, which take some megabytes, are read for the first
    /// request.
    pub fn new(api: LocalChannel, account: Arc<Account>, options: JsonOptions) -> Self {
        Self(Arc::new(HttpShared { api, account, options }))
    }

    /// Its paths.
    pub fn router(&self) -> Router {
        let mut router = Router::new().route("/openapi.json", get(openapi).fallback(no_such_method));
        let mut paths: Vec<(&'static str, MethodRouter<Self>)> = Vec::new();
        for route in ROUTES {
            let handler = on(
                route.verb.filter(),
                async move |State(json): State<Self>,
                            params: RawPathParams,
                            request: Request<axum::body::Body>| {
                    json.answer(route, &params, request).await
                },
            );
            match paths.iter_mut().find(|(path, _)| *path == route.path) {
                Some((_, methods)) => *methods = std::mem::take(methods).merge(handler),
                None => paths.push((route.path, handler)),
            }
        }
        for (path, methods) in paths {
            router = router.route(path, methods.fallback(no_such_method));
        }
        router
            .route("/v1/{*rest}", MethodRouter::new().fallback(no_such_path))
            .layer(middleware::from_fn_with_state(self.clone(), origin::guard))
            .with_state(self.clone())
    }

    async fn answer(
        &self,
        route: &'static Route,
        params: &RawPathParams,
        request: Request<axum::body::Body>,
    ) -> Response {
        self.attempt(route, params, request).await.unwrap_or_else(IntoResponse::into_response)
    }

    async fn attempt(
        &self,
        route: &'static Route,
        params: &RawPathParams,
        request: Request<axum::body::Body>,
    ) -> Result<Response, HttpProblem> {
        let shared = &*self.0;
        let method = self.method(route, params)?;
        let (parts, body) = request.into_parts();
        let asked = RequestFields::of(route, &parts.uri, &parts.headers)?;
        let peer = parts.extensions.get::<SenderAddress>().map(|peer| peer.0);
        let credentials = parts.headers.get_all(AUTHORIZATION).into_iter().cloned().collect();
        let call =
            call::HttpCall { api: &shared.api, peer, credentials, timeout: asked.timeout, method: &method };
        // Nobody who may not call makes us hold what it sends, or keeps its slot.
        HttpClient::identified(&parts.extensions, call.check()?)?;
        let mut held = HeldBytes::new(&shared.account);
        let body = match route.body {
            BodyContent::None => Bytes::new(),
            BodyContent::Json | BodyContent::Payload(_) => {
                body::read(body, &shared.options, &mut held).await?
            }
        };
        let mut message = match route.body {
            BodyContent::Json => {
                decode::check_type(&parts.headers)?;
                decode::message(method.input(), &body, route.form, &mut held)?
            }
            BodyContent::None => DynamicMessage::new(method.input()),
            BodyContent::Payload(field) => {
                let mut message = DynamicMessage::new(method.input());
                payload::put(&mut message, field, body, &parts.headers, asked.is_base64)?;
                message
            }
        };
        for (name, value) in params.iter().filter(|(name, _)| !matches!(*name, "service" | "method")) {
            decode::put(&mut message, route.field_of(name), value)?;
        }
        for (name, value) in &asked.fields {
            decode::put(&mut message, name, value)?;
        }
        if let Some(key) = asked.key {
            decode::put(&mut message, route.key.unwrap_or("idempotencyKey"), &key)?;
        }
        if method.is_server_streaming() {
            return events::open(call, message, &parts.headers, asked.view, route.form, held).await;
        }
        let bytes = message.encode_to_vec();
        drop(message);
        let answer = tokio::time::timeout(asked.timeout.unwrap_or(TIMEOUT), call.unary(bytes.into()))
            .await
            .map_err(|_| HttpProblem::timed_out())??;
        drop(held);
        let mut held = HeldBytes::new(&shared.account);
        // Decoded, and as JSON.
        held.more(answer.len().saturating_mul(encode::TIMES))?;
        let answer = DynamicMessage::decode(method.output(), answer).map_err(|_| HttpProblem::internal())?;
        if asked.view == PayloadView::Raw {
            return payload::raw(answer, held).ok_or_else(|| {
                HttpProblem::invalid(
                    "payload",
                    "\"raw\" is for answers with one payload, such as GET /v1/latest/...",
                )
            });
        }
        let mut json = encode::to_vec(&answer, route.answer, route.form, asked.view)?;
        // For those who read it at a terminal.
        json.push(b'\n');
        drop(answer);
        let headers = [(CONTENT_TYPE, JSON), (CACHE_CONTROL, "no-store")];
        Ok((StatusCode::OK, headers, paced(json.into(), held)).into_response())
    }

    /// The RPC behind a route.
    fn method(&self, route: &Route, params: &RawPathParams) -> Result<MethodDescriptor, HttpProblem> {
        let param = |wanted| params.iter().find(|(name, _)| *name == wanted).map_or("", |(_, value)| value);
        let (service, method) = match route.rpc.split_once('/') {
            Some(known) => known,
            None => (param("service"), param("method")),
        };
        let name = match service.starts_with("gateway.v1.") {
            true => service.to_owned(),
            false => format!("gateway.v1.{service}"),
        };
        let found = pool().get_service_by_name(&name);
        let found = found.and_then(|service| service.methods().find(|known| known.name() == method));
        let found = found.ok_or_else(|| HttpProblem::not_found("there is no such service or method"))?;
        if found.is_client_streaming() {
            return Err(HttpProblem::unimplemented("this call streams requests, which needs gRPC"));
        }
        match (found.is_server_streaming(), route.is_stream()) {
            (true, false) => Err(HttpProblem::not_found(
                "this call answers with a stream: ask for it below /v1/stream/rpc/",
            )),
            (false, true) => {
                Err(HttpProblem::not_found("this call answers with one message: ask for it below /v1/rpc/"))
            }
            _ => Ok(found),
        }
    }
}

/// The answer to a request for which there is no slot.
pub(super) fn busy() -> Response {
    HttpProblem::busy().into_response()
}

/// Wishes of a request besides its path and body.
struct RequestFields {
    /// Fields of the message.
    fields: Vec<(String, String)>,
    view: PayloadView,
    timeout: Option<Duration>,
    /// The body is base64.
    is_base64: bool,
    key: Option<String>,
}

impl RequestFields {
    fn of(route: &Route, uri: &Uri, headers: &HeaderMap) -> Result<Self, HttpProblem> {
        let key = match headers.get("idempotency-key") {
            None => None,
            Some(_) if route.key.is_none() && route.rpc.contains('/') => {
                return Err(HttpProblem::invalid("Idempotency-Key", "this call does not take one"));
            }
            Some(key) => {
                let text =
                    key.to_str().map_err(|_| HttpProblem::invalid("Idempotency-Key", "is not ASCII"))?;
                Some(text.to_owned())
            }
        };
        let mut asked =
            Self { fields: Vec::new(), view: route.form.view(), timeout: None, is_base64: false, key };
        for (name, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
            match &*name {
                "payload" => asked.view = PayloadView::parse(&value)?,
                "timeout" => asked.timeout = Some(timeout(&value)?),
                "encoding" if matches!(route.body, BodyContent::Payload(_)) => match &*value {
                    "base64" => asked.is_base64 = true,
                    _ => {
                        return Err(HttpProblem::invalid("encoding", "is not base64, the only one there is"));
                    }
                },
                _ => asked.fields.push((name.into_owned(), value.into_owned())),
            }
        }
        Ok(asked)
    }
}

/// The time in a query, such as `5s`.
fn timeout(text: &str) -> Result<Duration, HttpProblem> {
    let wrong = || HttpProblem::invalid("timeout", "is not a time from 1ms to 1h, such as 5s or 500ms");
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s').ok_or_else(wrong)?, 1.0),
    };
    let seconds = number.parse::<f64>().map_err(|_| wrong())? * unit;
    let time = Duration::try_from_secs_f64(seconds).map_err(|_| wrong())?;
    if (Duration::from_millis(1)..=LONGEST).contains(&time) { Ok(time) } else { Err(wrong()) }
}

async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, JSON)], OPENAPI)
}

/// Nobody has asked who it is: it keeps no slot.
async fn no_such_path() -> impl IntoResponse {
    let problem = HttpProblem::not_found("there is nothing at this path; /openapi.json has what there is");
    ([(CONNECTION, "close")], problem)
}

async fn no_such_method() -> HttpProblem {
    HttpProblem::method_not_allowed()
}
