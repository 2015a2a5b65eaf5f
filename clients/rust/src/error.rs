//! Why a call failed, by names that a program can branch on.

use std::{collections::HashMap, error::Error as StdError, fmt, time::Duration};

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

macro_rules! reasons {
    ($($name:ident = $text:literal,)*) => {
        /// `ErrorInfo.reason` of the gateway's answers: stable names, with the code of gRPC beside them.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "docs/api.md tells what each means")]
        pub enum Reason {
            /// The gateway could not be reached, or the connection was lost: no answer of the gateway.
            Unreachable,
            /// An option, a file or an address of this client is not valid; nothing was sent.
            BadOptions,
            /// The time of this client was up before the gateway answered.
            NoAnswerInTime,
            $($name,)*
            /// A reason that this client does not know.
            Other(String),
        }

        impl Reason {
            fn from_text(text: &str) -> Self {
                match text {
                    $($text => Self::$name,)*
                    other => Self::Other(other.to_owned()),
                }
            }

            /// The name as the gateway writes it.
            pub fn as_str(&self) -> &str {
                match self {
                    Self::Unreachable => "UNREACHABLE",
                    Self::BadOptions => "BAD_OPTIONS",
                    Self::NoAnswerInTime => "NO_ANSWER_IN_TIME",
                    $(Self::$name => $text,)*
                    Self::Other(text) => text,
                }
            }
        }
    };
}

reasons! {
    BanInFile = "BAN_IN_FILE",
    BanNotFound = "BAN_NOT_FOUND",
    CommandsDisabled = "COMMANDS_DISABLED",
    CommandEnded = "COMMAND_ENDED",
    CommandExists = "COMMAND_EXISTS",
    CommandNotFound = "COMMAND_NOT_FOUND",
    CommandRefused = "COMMAND_REFUSED",
    CommandTimedOut = "COMMAND_TIMED_OUT",
    CredentialsExpired = "CREDENTIALS_EXPIRED",
    CredentialsMissing = "CREDENTIALS_MISSING",
    CredentialsRevoked = "CREDENTIALS_REVOKED",
    CredentialsUnknown = "CREDENTIALS_UNKNOWN",
    DeviceNotFound = "DEVICE_NOT_FOUND",
    DeviceOffline = "DEVICE_OFFLINE",
    DeviceUnknown = "DEVICE_UNKNOWN",
    EtagMismatch = "ETAG_MISMATCH",
    Fenced = "FENCED",
    FilterNotAllowed = "FILTER_NOT_ALLOWED",
    FilterNotSupported = "FILTER_NOT_SUPPORTED",
    GroupsDisabled = "GROUPS_DISABLED",
    GroupDeleted = "GROUP_DELETED",
    GroupExists = "GROUP_EXISTS",
    GroupOfBridge = "GROUP_OF_BRIDGE",
    FilterImmutable = "FILTER_IMMUTABLE",
    GroupDraining = "GROUP_DRAINING",
    GroupNotFound = "GROUP_NOT_FOUND",
    HistoryOff = "HISTORY_OFF",
    IdempotencyKeyReused = "IDEMPOTENCY_KEY_REUSED",
    Internal = "INTERNAL",
    InvalidField = "INVALID_FIELD",
    LatestOff = "LATEST_OFF",
    MemoryBudget = "MEMORY_BUDGET",
    NotActive = "NOT_ACTIVE",
    NoTokens = "NO_TOKENS",
    OldToken = "OLD_TOKEN",
    OutcomeLost = "OUTCOME_LOST",
    OutOfScope = "OUT_OF_SCOPE",
    PacketTooLarge = "PACKET_TOO_LARGE",
    PageTokenInvalid = "PAGE_TOKEN_INVALID",
    PageTokenMismatch = "PAGE_TOKEN_MISMATCH",
    QueueFull = "QUEUE_FULL",
    RequestIncomplete = "REQUEST_INCOMPLETE",
    RequestTooLarge = "REQUEST_TOO_LARGE",
    RetainedQuota = "RETAINED_QUOTA",
    RetainUnavailable = "RETAIN_UNAVAILABLE",
    RoleDenied = "ROLE_DENIED",
    ScheduleFull = "SCHEDULE_FULL",
    ScheduleNeedsStore = "SCHEDULE_NEEDS_STORE",
    ScheduleNotFound = "SCHEDULE_NOT_FOUND",
    ShadowsDisabled = "SHADOWS_DISABLED",
    ShadowsFull = "SHADOWS_FULL",
    ShadowNotFound = "SHADOW_NOT_FOUND",
    ShadowTooLarge = "SHADOW_TOO_LARGE",
    ShuttingDown = "SHUTTING_DOWN",
    SlowConsumer = "SLOW_CONSUMER",
    StoreDamaged = "STORE_DAMAGED",
    StoreLate = "STORE_LATE",
    StoreRefused = "STORE_REFUSED",
    StoreUnavailable = "STORE_UNAVAILABLE",
    SubscriptionQuota = "SUBSCRIPTION_QUOTA",
    TokenNotFound = "TOKEN_NOT_FOUND",
    TooManyBans = "TOO_MANY_BANS",
    TooManyCalls = "TOO_MANY_CALLS",
    TooManyCommands = "TOO_MANY_COMMANDS",
    TooManyGroups = "TOO_MANY_GROUPS",
    TooManyMembers = "TOO_MANY_MEMBERS",
    TooManyShadows = "TOO_MANY_SHADOWS",
    TooManyStreams = "TOO_MANY_STREAMS",
    TooManyTraces = "TOO_MANY_TRACES",
    Unimplemented = "UNIMPLEMENTED",
    ValueNotFound = "VALUE_NOT_FOUND",
    VersionConflict = "VERSION_CONFLICT",
    WaitIncomplete = "WAIT_INCOMPLETE",
}

/// Why a call failed.
#[derive(Debug, Clone)]
pub struct Error(Box<ErrorFields>);

#[derive(Debug, Clone)]
struct ErrorFields {
    code: Code,
    reason: Reason,
    message: String,
    metadata: HashMap<String, String>,
    retry_after: Option<Duration>,
    idempotency_key: Option<String>,
}

impl Error {
    /// The code of gRPC.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Returns the reason, for a program to branch on.
    pub fn reason(&self) -> &Reason {
        &self.0.reason
    }

    /// For people, on one line.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// `ErrorInfo.metadata`: what the reason leaves open, such as the level that a publish has reached.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.0.metadata.get(key).map(String::as_str)
    }

    /// Returns the pause that the gateway asks for before the call is repeated.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The key of a publish that failed, given or made: with it the same request can be made again, to go on waiting, and is not
    /// published twice. Not after [`Reason::OutcomeLost`], which stays the answer for this key.
    pub fn idempotency_key(&self) -> Option<&str> {
        self.0.idempotency_key.as_deref()
    }

    /// Returns the level that a publish had reached when its time was over, where the gateway has said so: `ACCEPTED`,
    /// `DURABLE`, `SENT` or `ACKED`.
    pub fn level(&self) -> Option<&str> {
        self.metadata("level")
    }

    /// Returns whether the same call may succeed a moment later: the gateway could not be reached, shuts down, or is
    /// short of something.
    pub fn is_temporary(&self) -> bool {
        self.0.code == Code::Unavailable
            || self.0.reason == Reason::Unreachable
            || self.0.retry_after.is_some()
    }

    pub(crate) fn options(message: impl Into<String>) -> Self {
        Self::made(Code::InvalidArgument, Reason::BadOptions, message.into())
    }

    pub(crate) fn connect(address: &str, error: &dyn StdError) -> Self {
        Self::made(
            Code::Unavailable,
            Reason::Unreachable,
            format!("cannot connect to {address}: {}", in_words(error)),
        )
    }

    /// A call that this client gave up.
    pub fn no_answer(after: Duration) -> Self {
        let message = format!("no answer within {} s", after.as_secs_f32());
        Self::made(Code::DeadlineExceeded, Reason::NoAnswerInTime, message)
    }

    /// The stream ended although it should not.
    pub(crate) fn stream_ended() -> Self {
        Self::made(Code::Unavailable, Reason::Unreachable, "the gateway has ended the stream".to_owned())
    }

    fn made(code: Code, reason: Reason, message: String) -> Self {
        Self(Box::new(ErrorFields {
            code,
            reason,
            message,
            metadata: HashMap::new(),
            retry_after: None,
            idempotency_key: None,
        }))
    }

    /// Of a publish with this key.
    pub(crate) fn of_key(mut self, key: &str) -> Self {
        self.0.idempotency_key = Some(key.to_owned());
        self
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        // The transport minds the deadline of a call itself, and tells of it as of a call that was cancelled.
        let code = if is_timeout(&status) { Code::DeadlineExceeded } else { status.code() };
        let (reason, metadata) = match details.error_info() {
            Some(info) => (Reason::from_text(&info.reason), info.metadata.clone()),
            // The gateway's own services give a reason with everything they say: without one it is the connection that
            // failed, the time that was up, or the health service.
            None => match code {
                Code::DeadlineExceeded => (Reason::NoAnswerInTime, HashMap::new()),
                Code::Unimplemented => (Reason::Unimplemented, HashMap::new()),
                Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled => {
                    (Reason::Unreachable, HashMap::new())
                }
                code => (Reason::Other(format!("{code:?}")), HashMap::new()),
            },
        };
        let mut message = match status.message() {
            "" => format!("{:?}", status.code()),
            message => message.to_owned(),
        };
        if reason == Reason::Unreachable
            && let Some(cause) = StdError::source(&status)
        {
            message = format!("{message}: {}", in_words(cause));
        }
        let retry_after = details.retry_info().and_then(|info| info.retry_delay);
        Self(Box::new(ErrorFields { code, reason, message, metadata, retry_after, idempotency_key: None }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0.message, self.0.reason.as_str())
    }
}

impl StdError for Error {}

fn is_timeout(status: &Status) -> bool {
    let mut cause = StdError::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::TimeoutExpired>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// An error with its causes, each once.
pub(crate) fn in_words(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn a_refusal_keeps_its_reason_and_what_it_leaves_open() {
        let details = ErrorDetails::with_error_info(
            "VERSION_CONFLICT",
            "mqtt-server",
            [("version".to_owned(), "7".to_owned())],
        );
        let error =
            Error::from(Status::with_error_details(Code::Aborted, "the shadow has version 7", details));
        assert_eq!((error.reason(), error.metadata("version")), (&Reason::VersionConflict, Some("7")));
        assert!(!error.is_temporary());
        assert_eq!(error.to_string(), "the shadow has version 7 (VERSION_CONFLICT)");
    }

    #[test]
    fn a_failure_that_the_gateway_did_not_explain_is_a_lost_connection() {
        let error = Error::from(Status::unknown("h2 protocol error"));
        assert_eq!(error.reason(), &Reason::Unreachable);
        assert!(error.is_temporary());
    }

    #[test]
    fn a_reason_of_a_newer_gateway_is_kept_as_text() {
        let details = ErrorDetails::with_error_info("BRAND_NEW", "mqtt-server", HashMap::new());
        let error = Error::from(Status::with_error_details(Code::FailedPrecondition, "x", details));
        assert_eq!(error.reason().as_str(), "BRAND_NEW");
    }
}
