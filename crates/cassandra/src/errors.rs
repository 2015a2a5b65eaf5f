//! Errors of the database, and the consequences of each kind.

use gateway_core::warn_limited;
use scylla::errors::{
    ConnectionError, ConnectionPoolError, ConnectionSetupRequestErrorKind, DbError, ExecutionError,
    MetadataError, NewSessionError, PrepareError, RequestAttemptError,
};

use super::{ScyllaOptions, StoreError};
use crate::counters::count;

/// Kinds of errors, as they are counted and answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// Nodes are absent, or too few of them: later.
    Away,
    /// The request took too long, or the database says that it is too much: later, and less at once.
    Overloaded,
    /// Tables are not as the statements expect them: look at the schema.
    Schema,
    /// The database does not take this statement, or not with these values.
    Rejected,
    /// Login, permission, or a guardrail that no value would pass, as when disks are nearly full: somebody must change
    /// something, here or there.
    Denied,
    /// Timestamps are too far in the future for the database: a clock is or was wrong, here or there.
    Clock,
}

/// Words that tell a missing schema from a value that is not taken: both are "invalid".
const SCHEMA_WORDS: &[&str] = &[
    "unconfigured table",
    "does not exist",
    "doesn't exist",
    "unknown keyspace",
    "can't find",
    "undefined column",
    "unknown identifier",
];

/// Guardrails of Cassandra that judge a value, by words of their names. What the others say is true of any value, and
/// may change: disks are nearly full, or a consistency level or timestamps are not allowed.
const VALUE_GUARDRAILS: &[&str] = &["size", "items_per_collection", "minimum_timestamp"];

pub(super) fn kind(error: &ExecutionError) -> ErrorKind {
    match error {
        ExecutionError::LastAttemptError(error) => attempt(error),
        ExecutionError::PrepareError(error) => preparing(error),
        ExecutionError::BadQuery(_) => ErrorKind::Rejected,
        ExecutionError::RequestTimeout(_) => ErrorKind::Overloaded,
        ExecutionError::ConnectionPoolError(error) if denied(error) => ErrorKind::Denied,
        _ => ErrorKind::Away,
    }
}

/// The kind of the error of a statement that was not prepared.
pub(super) fn preparing(error: &PrepareError) -> ErrorKind {
    match error {
        PrepareError::AllAttemptsFailed { first_attempt } => attempt(first_attempt),
        PrepareError::ConnectionPoolError(error) if denied(error) => ErrorKind::Denied,
        _ => ErrorKind::Away,
    }
}

fn attempt(error: &RequestAttemptError) -> ErrorKind {
    match error {
        RequestAttemptError::SerializationError(_) | RequestAttemptError::CqlRequestSerialization(_) => {
            ErrorKind::Rejected
        }
        RequestAttemptError::UnableToAllocStreamId => ErrorKind::Overloaded,
        RequestAttemptError::RepreparedIdChanged { .. } | RequestAttemptError::RepreparedIdMissingInBatch => {
            ErrorKind::Schema
        }
        RequestAttemptError::DbError(error, text) => answered(error, text),
        _ => ErrorKind::Away,
    }
}

fn answered(error: &DbError, text: &str) -> ErrorKind {
    match error {
        DbError::WriteTimeout { .. }
        | DbError::ReadTimeout { .. }
        | DbError::Overloaded
        | DbError::RateLimitReached { .. } => ErrorKind::Overloaded,
        DbError::AuthenticationError | DbError::Unauthorized => ErrorKind::Denied,
        DbError::Unprepared { .. } => ErrorKind::Schema,
        // Answer of Cassandra to a prepared statement whose table was dropped while it ran.
        DbError::ServerError if text.to_lowercase().contains("unknown cf") => ErrorKind::Schema,
        DbError::Invalid | DbError::ConfigError | DbError::SyntaxError => refused(&text.to_lowercase()),
        _ => ErrorKind::Away,
    }
}

/// Returns the kind of a refusal that the database explains in lower-case `text`.
fn refused(text: &str) -> ErrorKind {
    // Scylla of a timestamp some days ahead (`restrict_future_timestamp`), and the guardrail of Cassandra.
    if text.contains("timestamp")
        && (text.contains("future") || text.starts_with("guardrail maximum_timestamp"))
    {
        return ErrorKind::Clock;
    }
    if SCHEMA_WORDS.iter().any(|words| text.contains(words)) {
        return ErrorKind::Schema;
    }
    let guardrail = text.strip_prefix("guardrail ").and_then(|rest| rest.split_once(" violated"));
    match guardrail {
        Some((name, _)) if !VALUE_GUARDRAILS.iter().any(|words| name.contains(words)) => ErrorKind::Denied,
        _ => ErrorKind::Rejected,
    }
}

/// Returns whether the nodes do not let the gateway in.
fn denied(error: &ConnectionPoolError) -> bool {
    let ConnectionPoolError::Broken { last_connection_error } = error else { return false };
    let ConnectionError::ConnectionSetupRequestError(error) = last_connection_error else { return false };
    matches!(
        error.get_error(),
        ConnectionSetupRequestErrorKind::DbError(DbError::AuthenticationError | DbError::Unauthorized, _)
            | ConnectionSetupRequestErrorKind::MissingAuthentication
    )
}

/// Counts an error of a request.
pub(super) fn counted(kind: ErrorKind) {
    count(|c| {
        match kind {
            ErrorKind::Away => &c.database_errors_unavailable,
            ErrorKind::Overloaded => &c.database_errors_overloaded,
            ErrorKind::Schema => &c.database_errors_schema,
            ErrorKind::Rejected => &c.database_errors_rejected,
            ErrorKind::Denied => &c.database_errors_denied,
            ErrorKind::Clock => &c.database_errors_clock,
        }
        .add(1);
    });
    if kind == ErrorKind::Clock {
        warn_limited!(
            "the database refuses values as they are from the future: set the clock of this machine or of the database \
             right; values wait meanwhile, see docs/storage.md"
        );
    }
}

/// The error of a request, counted; `doing` is verb and object.
pub(super) fn failed(doing: &str, error: &ExecutionError, options: &ScyllaOptions) -> StoreError {
    counted(kind(error));
    if matches!(error, ExecutionError::EmptyPlan) && !options.datacenter.is_empty() {
        let known = &options.datacenter;
        return StoreError::Unavailable(format!("{doing}: no node is known in datacenter {known:?}"));
    }
    StoreError::Unavailable(format!("{doing}: {error}"))
}

/// The error of a session that was not made, counted.
pub(super) fn not_connected(error: &NewSessionError, options: &ScyllaOptions) -> StoreError {
    if let NewSessionError::MetadataError(MetadataError::ConnectionPoolError(error)) = error
        && denied(error)
    {
        counted(ErrorKind::Denied);
        let user = &options.username;
        return StoreError::Unavailable(if user.is_empty() {
            format!("connect: the cluster wants a user and a password: {error}")
        } else {
            format!("connect: the cluster refuses user {user:?} or the password: {error}")
        });
    }
    counted(ErrorKind::Away);
    StoreError::Unavailable(format!("connect to {}: {error}", options.contact_points.join(",")))
}

/// The error of a statement that was not prepared, counted.
pub(super) fn not_prepared(error: &PrepareError) -> StoreError {
    counted(preparing(error));
    StoreError::Unavailable(format!("prepare a statement: {error}"))
}

/// Returns the error for a row that the gateway cannot have written.
pub(super) fn damaged(error: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_table_is_not_taken_for_a_value_that_is_refused() {
        for (text, expected) in [
            ("unconfigured table latest_by_device", ErrorKind::Schema),
            ("table latest_by_topic does not exist", ErrorKind::Schema),
            ("Keyspace 'mqtt' does not exist", ErrorKind::Schema),
            ("Can't find a column family latest_by_device in keyspace mqtt", ErrorKind::Schema),
            ("Undefined column name server in table mqtt.latest_by_device", ErrorKind::Schema),
            ("Key length of 70000 is longer than maximum of 65535", ErrorKind::Rejected),
            (
                "Guardrail column_value_size violated: value of column 'payload' has size 2MiB",
                ErrorKind::Rejected,
            ),
        ] {
            assert_eq!(answered(&DbError::Invalid, text), expected, "{text}");
        }
        let text = "java.lang.IllegalArgumentException: Unknown CF 8f5552a0-e603-11f1-ba57-6b756d61dbb1";
        assert_eq!(answered(&DbError::ServerError, text), ErrorKind::Schema);
    }

    #[test]
    fn a_guardrail_that_no_value_would_pass_does_not_make_values_dropped() {
        for (name, text) in [
            ("replica_disk_usage", "Write request failed because disk usage exceeds failure threshold"),
            (
                "write_consistency_levels",
                "Provided values [LOCAL_QUORUM] are not allowed for write consistency levels",
            ),
            ("user_timestamps", "User provided timestamps (USING TIMESTAMP) is not allowed"),
        ] {
            let text = format!("Guardrail {name} violated: {text}");
            assert_eq!(answered(&DbError::Invalid, &text), ErrorKind::Denied, "{text}");
        }
        for name in ["collection_size", "items_per_collection", "minimum_timestamp"] {
            let text = format!("Guardrail {name} violated: more than it may be");
            assert_eq!(answered(&DbError::Invalid, &text), ErrorKind::Rejected, "never taken: {text}");
        }
    }

    /// Taken for a refused value it would be dropped, and so would all others until the clock is right.
    #[test]
    fn a_timestamp_in_the_future_is_a_fault_of_a_clock_and_not_of_the_value() {
        for text in [
            "Cannot provide a timestamp more than 3 days into the future. If this was not intended, set \
             'restrict_future_timestamp' to false in the configuration.",
            "Guardrail maximum_timestamp violated: The modification to table latest_by_topic has a timestamp 2 after \
             the maximum allowable timestamp 1",
        ] {
            assert_eq!(answered(&DbError::Invalid, text), ErrorKind::Clock, "{text}");
        }
    }

    #[test]
    fn what_may_pass_is_never_taken_for_a_value_that_is_refused() {
        for error in
            [DbError::ServerError, DbError::Overloaded, DbError::IsBootstrapping, DbError::Unauthorized]
        {
            assert_ne!(answered(&error, ""), ErrorKind::Rejected, "{error}");
        }
        assert_eq!(kind(&ExecutionError::EmptyPlan), ErrorKind::Away);
        assert_eq!(kind(&ExecutionError::RequestTimeout(std::time::Duration::ZERO)), ErrorKind::Overloaded);
    }
}
