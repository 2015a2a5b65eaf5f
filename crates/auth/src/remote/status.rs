//! The meaning of a status in the place of an answer: it is about the one question, which is denied, or about the service.
//!
//! Clients choose client ids, user names and topics, and a service may answer an odd name with a status. Such an answer
//! must not count against the service, or one stranger could keep everybody out.

use std::{
    error::Error,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use access::breaker::QuestionFailure;
use edge::remote::RequestError;
use gateway_core::{info_of_peer, log_limits::LineKind, warn_limited};
use hyper::StatusCode;
use tonic::{Code, ConnectError, Status, TimeoutExpired};

use crate::{Credentials, hooks::v1};

/// Error that left a question without an answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// The status, which is about this question alone: it is denied.
    Denied(String),
    /// The service has not answered, or not so that it can be understood; the text, for the log, has nothing that it wrote.
    Failed(QuestionFailure, String),
}

/// The answer cannot be understood.
impl From<String> for NoAnswer {
    fn from(problem: String) -> Self {
        Self::Failed(QuestionFailure::Unusable, problem)
    }
}

impl From<RequestError> for NoAnswer {
    fn from(error: RequestError) -> Self {
        let failure = match error {
            RequestError::Connect(_) => QuestionFailure::Unreachable,
            RequestError::Answer(_) => QuestionFailure::Unusable,
        };
        Self::Failed(failure, error.to_string())
    }
}

/// Of HTTP, except those that are answers.
impl From<StatusCode> for NoAnswer {
    fn from(status: StatusCode) -> Self {
        let text = format!("status {}", status.as_u16());
        match status {
            StatusCode::BAD_REQUEST
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::URI_TOO_LONG
            | StatusCode::UNPROCESSABLE_ENTITY
            | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => Self::Denied(text),
            StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => {
                Self::Failed(QuestionFailure::Unreachable, text)
            }
            _ => Self::Failed(QuestionFailure::Unusable, text),
        }
    }
}

/// Of gRPC, except OK.
impl From<Status> for NoAnswer {
    fn from(status: Status) -> Self {
        let text = problem(&status);
        match status.code() {
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound | Code::FailedPrecondition => {
                Self::Denied(text)
            }
            Code::DeadlineExceeded => Self::Failed(QuestionFailure::Unreachable, text),
            _ if is_unreachable(&status) => Self::Failed(QuestionFailure::Unreachable, text),
            _ => Self::Failed(QuestionFailure::Unusable, text),
        }
    }
}

/// Tells whether the status is the gateway's own, for a connection that could not be made or an answer that did not come.
fn is_unreachable(status: &Status) -> bool {
    let mut source = Error::source(status);
    while let Some(error) = source {
        if error.is::<ConnectError>() || error.is::<TimeoutExpired>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// A status in words, without the message that the service has written: it could be anything.
pub(super) fn problem(status: &Status) -> String {
    let code = status.code();
    let mut text = format!("status {code:?}");
    let mut source = Error::source(status);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The subject of a question, as the log names it.
pub(super) enum AskedAbout {
    /// A login.
    Login { peer: String, client_id: String },
    /// A topic.
    Topic { client_id: String, topic: String },
}

impl AskedAbout {
    /// Of a question about this login.
    pub(super) fn login(credentials: &Credentials) -> Self {
        Self::Login { peer: credentials.peer.clone(), client_id: credentials.client_id.clone() }
    }

    /// Of this question about a topic.
    pub(super) fn topic(question: &v1::AuthorizeRequest) -> Self {
        let subject = question.subject.as_ref();
        let client_id = subject.map_or_else(String::new, |subject| subject.client_id.clone());
        Self::Topic { client_id, topic: question.topic.clone() }
    }

    /// Logs a denial by a status, within the limits of lines that peers can cause. Returns `answer`.
    pub(super) fn note(&self, source: &str, answer: NoAnswer) -> NoAnswer {
        let NoAnswer::Denied(status) = &answer else { return answer };
        match self {
            Self::Login { peer, client_id } => {
                let address = peer.parse::<SocketAddr>();
                let ip = address.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.ip());
                info_of_peer!(
                    LineKind::Status,
                    ip,
                    source,
                    status,
                    peer,
                    client_id,
                    "login denied, the service answers it with a status"
                );
            }
            Self::Topic { client_id, topic } => {
                warn_limited!(
                    source,
                    status,
                    client_id,
                    topic,
                    "topic denied, the service answers it with a status"
                );
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::{
        QuestionFailure::{Unreachable, Unusable},
        *,
    };

    #[test]
    fn what_a_status_says_of_one_login_is_not_held_against_the_service() {
        let failure = |answer: NoAnswer| match answer {
            NoAnswer::Denied(_) => None,
            NoAnswer::Failed(failure, _) => Some(failure),
        };
        let http = |status: u16| failure(StatusCode::from_u16(status).expect("a status").into());
        for status in [400, 413, 414, 422, 431] {
            assert_eq!(http(status), None, "{status}");
        }
        for status in [201, 302, 402, 404, 405, 407, 409, 421, 425, 429, 500, 502, 503, 599] {
            assert_eq!(http(status), Some(Unusable), "{status}");
        }
        assert_eq!([http(408), http(504)], [Some(Unreachable); 2]);
        let grpc = |code: Code| failure(Status::new(code, "anything").into());
        for code in [Code::InvalidArgument, Code::OutOfRange, Code::NotFound, Code::FailedPrecondition] {
            assert_eq!(grpc(code), None, "{code:?}");
        }
        for code in [
            Code::Unavailable,
            Code::ResourceExhausted,
            Code::Unimplemented,
            Code::Unauthenticated,
            Code::PermissionDenied,
            Code::Internal,
            Code::Unknown,
            Code::Cancelled,
            Code::Aborted,
            Code::AlreadyExists,
            Code::DataLoss,
        ] {
            assert_eq!(grpc(code), Some(Unusable), "{code:?}");
        }
        assert_eq!(grpc(Code::DeadlineExceeded), Some(Unreachable));
    }
}
