//! Errors as RFC 9457 says it: `application/problem+json`, with the status of HTTP that fits the one of gRPC.

use std::{borrow::Cow, collections::BTreeMap};

use axum::{
    http::{
        HeaderValue, StatusCode,
        header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::client::NoSlot;
use crate::counters::count;

/// Error that made a request fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HttpProblem(Box<ProblemDetails>);

/// The explanation that is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct ProblemDetails {
    /// There is no page to read about it, so the status says what kind it is.
    #[serde(rename = "type")]
    kind: &'static str,
    title: &'static str,
    status: u16,
    /// For people.
    detail: String,
    /// The stable name that programs may branch on; as `ErrorInfo.reason` over gRPC.
    reason: Cow<'static, str>,
    /// The status of gRPC, as in `NOT_FOUND`.
    code: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    /// Faults by field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    violations: Vec<FieldProblem>,
    #[serde(skip)]
    retry_after: Option<u64>,
    /// The rest of the request is not read, so the connection is of no more use.
    #[serde(skip)]
    closes: bool,
}

/// A field, and its fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct FieldProblem {
    field: String,
    description: String,
}

impl HttpProblem {
    fn new(status: StatusCode, code: Code, reason: &'static str, detail: impl Into<String>) -> Self {
        Self(Box::new(ProblemDetails {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or_default(),
            status: status.as_u16(),
            detail: detail.into(),
            reason: Cow::Borrowed(reason),
            code: name_of(code),
            metadata: BTreeMap::new(),
            violations: Vec::new(),
            retry_after: None,
            closes: false,
        }))
    }

    fn closing(mut self) -> Self {
        self.0.closes = true;
        self
    }

    pub(super) fn reason(&self) -> &str {
        &self.0.reason
    }

    pub(super) fn invalid(field: &str, problem: &str) -> Self {
        let detail = format!("{field}: {problem}");
        let mut all = Self::new(StatusCode::BAD_REQUEST, Code::InvalidArgument, "INVALID_FIELD", detail);
        all.0.violations.push(FieldProblem { field: field.to_owned(), description: problem.to_owned() });
        all
    }

    /// The body is not the JSON of the request, at `path`.
    pub(super) fn bad_json(path: &str, problem: &str) -> Self {
        let mut all = Self::invalid(if path.is_empty() { "body" } else { path }, problem);
        all.0.reason = Cow::Borrowed("INVALID_JSON");
        all
    }

    pub(super) fn unsupported_type() -> Self {
        let detail = "the body of this request is JSON: send 'Content-Type: application/json'";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Code::InvalidArgument, "UNSUPPORTED_MEDIA_TYPE", detail)
    }

    pub(super) fn not_found(detail: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, Code::Unimplemented, "NO_SUCH_PATH", detail)
    }

    pub(super) fn method_not_allowed() -> Self {
        let detail = "this path takes the methods that 'Allow' names";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, Code::Unimplemented, "METHOD_NOT_ALLOWED", detail)
    }

    pub(super) fn unimplemented(detail: &str) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, Code::Unimplemented, "UNIMPLEMENTED", detail)
    }

    pub(super) fn cross_origin() -> Self {
        let detail = "pages of this origin may not use the API: name it in http.cors_origins";
        Self::new(StatusCode::FORBIDDEN, Code::PermissionDenied, "CROSS_ORIGIN", detail).closing()
    }

    pub(super) fn too_large(most: usize) -> Self {
        let detail = format!("the body is larger than the {most} bytes that http.max_body allows");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, Code::ResourceExhausted, "REQUEST_TOO_LARGE", detail)
            .closing()
    }

    pub(super) fn late() -> Self {
        let detail = "the rest of the body did not come in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, Code::DeadlineExceeded, "REQUEST_INCOMPLETE", detail).closing()
    }

    pub(super) fn incomplete() -> Self {
        let detail = "the body ended early or is not framed as HTTP says";
        Self::new(StatusCode::BAD_REQUEST, Code::InvalidArgument, "REQUEST_INCOMPLETE", detail).closing()
    }

    pub(super) fn no_memory() -> Self {
        let detail = "the gateway's memory budget is used up";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut problem = Self::new(status, Code::ResourceExhausted, "MEMORY_BUDGET", detail).closing();
        problem.0.retry_after = Some(1);
        problem
    }

    pub(super) fn caller_busy() -> Self {
        let detail = "this caller has its share of requests or streams: see http.max_requests_per_caller and \
                      http.max_streams_per_caller";
        let status = StatusCode::TOO_MANY_REQUESTS;
        let mut problem = Self::new(status, Code::ResourceExhausted, "TOO_MANY_REQUESTS", detail).closing();
        problem.0.retry_after = Some(1);
        problem
    }

    pub(super) fn busy() -> Self {
        let detail =
            "as many requests or streams are under way as http.max_requests and http.max_streams allow";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut problem = Self::new(status, Code::ResourceExhausted, "TOO_MANY_REQUESTS", detail).closing();
        problem.0.retry_after = Some(1);
        problem
    }

    pub(super) fn timed_out() -> Self {
        let detail = "the call was not answered in time";
        Self::new(StatusCode::GATEWAY_TIMEOUT, Code::DeadlineExceeded, "DEADLINE_EXCEEDED", detail)
    }

    pub(super) fn internal() -> Self {
        let detail = "internal error";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, Code::Internal, "INTERNAL", detail)
    }

    /// As the data of an event.
    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(&*self.0).unwrap_or_default()
    }
}

impl From<NoSlot> for HttpProblem {
    fn from(none: NoSlot) -> Self {
        match none {
            NoSlot::Share => Self::caller_busy(),
            NoSlot::Memory => Self::no_memory(),
        }
    }
}

impl From<Status> for HttpProblem {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        let (reason, metadata) = match details.error_info() {
            Some(info) => (info.reason.clone(), info.metadata.clone()),
            None => (String::new(), Default::default()),
        };
        let http = http_status(status.code(), &reason);
        let Self(mut problem) = Self::new(http, status.code(), "", status.message());
        problem.reason = if reason.is_empty() { Cow::Borrowed(problem.code) } else { Cow::Owned(reason) };
        problem.metadata = metadata.into_iter().collect();
        problem.violations = details
            .bad_request()
            .map(|bad| {
                let of = |one: &tonic_types::FieldViolation| FieldProblem {
                    field: json_path(&one.field),
                    description: one.description.clone(),
                };
                bad.field_violations.iter().map(of).collect()
            })
            .unwrap_or_default();
        let delay = details.retry_info().and_then(|retry| retry.retry_delay);
        problem.retry_after = delay.map(|delay| delay.as_secs_f64().ceil().max(1.0) as u64);
        Self(problem)
    }
}

impl IntoResponse for HttpProblem {
    fn into_response(self) -> Response {
        count(|c| match self.0.status {
            400..500 => c.http_api_refused.add(1),
            _ => c.http_api_failed.add(1),
        });
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = [(CONTENT_TYPE, "application/problem+json"), (CACHE_CONTROL, "no-store")];
        let mut response = {
            let mut body = self.to_json();
            body.push(b'\n');
            (status, headers, body).into_response()
        };
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.0.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.0.closes {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// The name of a field as JSON has it, where gRPC names it as the proto does.
fn json_path(path: &str) -> String {
    let mut json = String::with_capacity(path.len());
    let mut upper = false;
    for character in path.chars() {
        match character {
            '_' => upper = true,
            _ if upper => {
                json.extend(character.to_uppercase());
                upper = false;
            }
            _ => json.push(character),
        }
    }
    json
}

/// Returns the status that clients of HTTP expect. A failure that depends on the state of a device or a group is a
/// conflict, so that 400 always means that the request itself is wrong.
fn http_status(code: Code, reason: &str) -> StatusCode {
    match code {
        _ if reason == "REQUEST_TOO_LARGE" => StatusCode::PAYLOAD_TOO_LARGE,
        Code::ResourceExhausted if matches!(reason, "MEMORY_BUDGET" | "STORE_REFUSED") => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted | Code::FailedPrecondition => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable | Code::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn name_of(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
