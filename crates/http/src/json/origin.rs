//! Pages of other origins. A browser sends what a page asks for, on this machine also to a gateway that asks nobody for a token:
//! only pages that the configuration names may have it do so, and only they read the answers.

use axum::{
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
        header::{
            ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
            ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, HOST,
            ORIGIN, VARY,
        },
    },
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{JsonApi, problem::HttpProblem};
use crate::counters::count;

const METHODS: &str = "GET, POST, PUT, PATCH, DELETE";
const HEADERS: &str = "authorization, content-type, idempotency-key, last-event-id";
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Page that a request comes from.
enum RequestOrigin {
    /// None, or one of the gateway's own host.
    Own,
    /// One of an origin that is allowed.
    Allowed(HeaderValue),
    /// Another.
    Foreign,
}

fn page(headers: &HeaderMap, allowed: &[String]) -> RequestOrigin {
    let Some(origin) = headers.get(ORIGIN) else {
        // A browser that says no origin says from where it comes, unless it is very old.
        let site = headers.get(SEC_FETCH_SITE).map(HeaderValue::as_bytes);
        return match site {
            Some(b"cross-site" | b"same-site") => RequestOrigin::Foreign,
            _ => RequestOrigin::Own,
        };
    };
    let text = origin.to_str().unwrap_or_default();
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let own = text.split_once("://").map(|(_, own)| own);
    if own.is_some() && own.zip(host).is_some_and(|(own, host)| own.eq_ignore_ascii_case(host)) {
        return RequestOrigin::Own;
    }
    match allowed.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(text)) {
        true => RequestOrigin::Allowed(origin.clone()),
        false => RequestOrigin::Foreign,
    }
}

/// Lets requests of pages pass that may, and tells their browsers.
pub(super) async fn guard(State(json): State<JsonApi>, request: Request, next: Next) -> Response {
    let origin = match page(request.headers(), &json.0.options.cors_origins) {
        RequestOrigin::Own => return next.run(request).await,
        RequestOrigin::Foreign => {
            count(|c| c.http_cross_origin.add(1));
            return HttpProblem::cross_origin().into_response();
        }
        RequestOrigin::Allowed(origin) => origin,
    };
    let asks =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match asks {
        true => {
            let headers = [
                (ACCESS_CONTROL_ALLOW_METHODS, METHODS),
                (ACCESS_CONTROL_ALLOW_HEADERS, HEADERS),
                (ACCESS_CONTROL_MAX_AGE, "600"),
            ];
            (StatusCode::NO_CONTENT, headers).into_response()
        }
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
    headers.append(VARY, HeaderValue::from_static("origin"));
    response
}
