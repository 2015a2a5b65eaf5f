//! The only place that makes a [`Status`]. Codes follow google.rpc conventions; `ErrorInfo.reason` is the
//! stable name a caller may branch on. Store details never reach the text.

use std::{collections::HashMap, time::Duration};

use ::commands::{CancelError, CommandStartError, CommandState, NoReply, SendStage};
use access::backends::Role;
use auth::{
    abuse::BanError,
    backends::{UnknownCaller, file::FileError},
};
use consumer_groups::{GroupError, MemberEnd};
use gateway_api::gateway::v1;
use gateway_core::{DropReason, ReceiptState};
use shadow::Rejection;
use store::StoreError;
use thiserror::Error;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::command_state;
use crate::counters::count;

/// `ErrorInfo.domain` of every error.
pub const ERROR_DOMAIN: &str = "mqtt-server";

/// Why a call, or one item of a batch, failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    #[error("{field}: {problem}")]
    Invalid { field: String, problem: String },
    #[error("no device with this id has a session")]
    DeviceNotFound,
    #[error("the device has not connected since the gateway started, describe who it is")]
    DeviceUnknown,
    #[error("no value")]
    ValueNotFound,
    #[error("there is no such ban")]
    BanNotFound,
    #[error("this ban is in the file that bans.file names, remove it there")]
    BanInFile,
    #[error("there are as many bans as bans.max allows")]
    TooManyBans,
    #[error("this gateway stands by for another of its cluster, which serves{}", shown_address(.address))]
    NotActive { address: String },
    #[error("no gateway of the cluster serves home {home} now")]
    HomeNotServed { home: u16 },
    #[error("device is offline")]
    DeviceOffline,
    #[error("packet exceeds the device's maximum packet size")]
    PacketTooLarge,
    #[error("the device's queue is full")]
    QueueFull,
    #[error("the gateway's memory budget is used up")]
    MemoryBudget,
    #[error("the store of sessions and queues does not take more now")]
    StoreRefused,
    #[error("too many streams at once {0}")]
    TooManyStreams(&'static str),
    #[error("too many calls at once {0}")]
    TooManyCalls(&'static str),
    #[error("too many devices are traced, switch some off")]
    TooManyTraces,
    #[error("the stream's buffer overflowed and its slow policy is CLOSE")]
    SlowConsumer,
    #[error("the request is larger than the gateway takes")]
    RequestTooLarge,
    #[error("the rest of the request did not come in time")]
    RequestIncomplete,
    #[error("page_token: is not one of this gateway's tokens")]
    PageTokenInvalid,
    #[error("page_token: belongs to a request with other fields")]
    PageTokenMismatch,
    #[error("limit for retained messages reached")]
    RetainedQuota,
    #[error("retained messages are switched off")]
    RetainUnavailable,
    #[error("deadline exceeded; level reached: {}", .0.level.name())]
    Deadline(Reached),
    #[error("the gateway shuts down; level reached: {}", .0.level.name())]
    CutShort(Reached),
    #[error("deadline exceeded before the store answered")]
    Late,
    #[error("latest values are switched off")]
    LatestOff,
    #[error("no topic has a history")]
    HistoryOff,
    #[error("stored data cannot be read now")]
    StoreUnavailable,
    #[error("stored data cannot be read")]
    StoreDamaged,
    #[error("the gateway shuts down")]
    ShuttingDown,
    #[error("{0}")]
    Unauthenticated(UnknownCaller),
    #[error("the role {role} may not call this; see docs/security.md for what each role may do")]
    RoleDenied { role: Role },
    #[error("{field}: is not in the caller's scope")]
    OutOfScope { field: String },
    #[error(
        "{field}: has messages of filters that the group had before, which the caller's scope may not have: drain the group with \
         an unlimited scope, delete it and create it again"
    )]
    HadOtherFilters { field: String },
    #[error("no such method")]
    Unimplemented,
    #[error("{0}")]
    NoTokens(String),
    #[error("no token has this id")]
    TokenNotFound,
    #[error("groups are switched off by {0}")]
    GroupsOff(&'static str),
    #[error("there is no group of this name")]
    GroupNotFound,
    #[error("the group is the queue of a bridge: change the bridge in the configuration, or pause it")]
    GroupOfBridge,
    #[error(
        "the filter of a group cannot be changed: create a group with the new filter, drain this one, then delete it"
    )]
    FilterImmutable,
    #[error("there is a group of this name with another configuration")]
    GroupExists,
    #[error("there are as many groups as groups.max_groups allows")]
    TooManyGroups,
    #[error("the group has changed since this etag")]
    EtagMismatch,
    #[error("the group cannot be moved yet: messages that came under its former filter go out first")]
    GroupDraining,
    #[error("the group was deleted")]
    GroupDeleted,
    #[error("another stream has taken the place of this member, or its lease has ended")]
    Fenced,
    #[error("the place that the token names is no longer kept")]
    OldToken,
    #[error("the group has as many members as it may have")]
    TooManyMembers,
    #[error("commands are switched off by {0}")]
    CommandsOff(&'static str),
    #[error("command_id: there is a command of this id with other content")]
    CommandExists,
    #[error("there is no command of this id")]
    CommandNotFound,
    #[error("the command has ended")]
    CommandEnded(CommandState),
    #[error("there are as many commands as {0} allows")]
    TooManyCommands(&'static str),
    #[error("{why}")]
    Command { why: NoReply, stage: SendStage },
    #[error("idempotency_key: stands for a request with other fields")]
    KeyReused,
    #[error("a message with this key was published before, and what became of it is no longer known")]
    OutcomeLost,
    #[error("deliver_at needs a data directory: store.enabled is false")]
    ScheduleOff,
    #[error("as many messages wait for their time as grpc.scheduled_messages and grpc.scheduled_bytes allow")]
    ScheduleFull,
    #[error("no message with this id waits for its time")]
    ScheduleNotFound,
    #[error("the rules do not allow the device this subscription")]
    FilterNotAllowed,
    #[error("{0} are not available")]
    FilterUnsupported(&'static str),
    #[error("the device has as many subscriptions as its limits or quotas allow")]
    SubscriptionQuota,
    #[error("shadows are switched off by {0}")]
    ShadowsOff(&'static str),
    #[error("the device has no shadow of this name")]
    ShadowNotFound,
    #[error("the shadow has version {version}")]
    VersionConflict { version: u64 },
    #[error("the shadow would be larger than shadow.max_bytes allows")]
    ShadowTooLarge,
    #[error("the device has as many named shadows as shadow.max_named allows")]
    TooManyShadows,
    #[error("all shadows together take as much of the disk as shadow.max_total_bytes allows")]
    ShadowsFull,
    #[error("internal error")]
    Internal,
}

/// Progress of a message whose wait ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reached {
    pub level: ReachedLevel,
    pub state: ReceiptState,
}

/// A level of [`Reached`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReachedLevel {
    /// Routed.
    Accepted,
    /// Handed to the operating system for every online receiver.
    Sent,
}

impl ReachedLevel {
    fn name(self) -> &'static str {
        match self {
            Self::Accepted => "ACCEPTED",
            Self::Sent => "SENT",
        }
    }
}

fn shown_address(address: &str) -> String {
    if address.is_empty() { String::new() } else { format!(" at {address}") }
}

impl Error {
    /// INVALID_ARGUMENT about `field`.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), problem: problem.into() }
    }

    /// The gRPC code.
    pub fn code(&self) -> Code {
        match self {
            Self::ScheduleNotFound => Code::NotFound,
            Self::Invalid { .. } | Self::PageTokenInvalid | Self::PageTokenMismatch => Code::InvalidArgument,
            Self::DeviceNotFound
            | Self::ValueNotFound
            | Self::TokenNotFound
            | Self::BanNotFound
            | Self::ShadowNotFound
            | Self::GroupNotFound => Code::NotFound,
            Self::GroupExists => Code::AlreadyExists,
            Self::EtagMismatch | Self::VersionConflict { .. } | Self::Fenced => Code::Aborted,
            Self::OldToken => Code::OutOfRange,
            Self::DeviceOffline
            | Self::DeviceUnknown
            | Self::PacketTooLarge
            | Self::RetainUnavailable
            | Self::LatestOff
            | Self::NoTokens(_)
            | Self::BanInFile
            | Self::GroupsOff(_)
            | Self::GroupOfBridge
            | Self::FilterImmutable
            | Self::GroupDraining
            | Self::ShadowsOff(_)
            | Self::GroupDeleted
            | Self::ScheduleOff
            | Self::FilterNotAllowed
            | Self::FilterUnsupported(_)
            | Self::HistoryOff => Code::FailedPrecondition,
            Self::QueueFull
            | Self::MemoryBudget
            | Self::StoreRefused
            | Self::TooManyStreams(_)
            | Self::TooManyCalls(_)
            | Self::TooManyTraces
            | Self::TooManyBans
            | Self::TooManyGroups
            | Self::TooManyShadows
            | Self::ShadowsFull
            | Self::ShadowTooLarge
            | Self::TooManyMembers
            | Self::SlowConsumer
            | Self::RequestTooLarge
            | Self::ScheduleFull
            | Self::SubscriptionQuota
            | Self::RetainedQuota => Code::ResourceExhausted,
            Self::Deadline(_) | Self::Late | Self::RequestIncomplete => Code::DeadlineExceeded,
            Self::StoreUnavailable
            | Self::ShuttingDown
            | Self::CutShort(_)
            | Self::NotActive { .. }
            | Self::HomeNotServed { .. } => Code::Unavailable,
            Self::StoreDamaged => Code::DataLoss,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::RoleDenied { .. } | Self::OutOfScope { .. } | Self::HadOtherFilters { .. } => {
                Code::PermissionDenied
            }
            Self::Unimplemented => Code::Unimplemented,
            Self::CommandsOff(_) | Self::CommandEnded(_) => Code::FailedPrecondition,
            Self::CommandExists => Code::AlreadyExists,
            Self::CommandNotFound => Code::NotFound,
            Self::TooManyCommands(_) => Code::ResourceExhausted,
            Self::Command { why, .. } => command_state::code(*why),
            Self::KeyReused => Code::AlreadyExists,
            Self::OutcomeLost => Code::Unknown,
            Self::Internal => Code::Internal,
        }
    }

    /// `ErrorInfo.reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "INVALID_FIELD",
            Self::DeviceNotFound => "DEVICE_NOT_FOUND",
            Self::DeviceUnknown => "DEVICE_UNKNOWN",
            Self::ValueNotFound => "VALUE_NOT_FOUND",
            Self::BanNotFound => "BAN_NOT_FOUND",
            Self::BanInFile => "BAN_IN_FILE",
            Self::TooManyBans => "TOO_MANY_BANS",
            Self::NotActive { .. } | Self::HomeNotServed { .. } => "NOT_ACTIVE",
            Self::DeviceOffline => "DEVICE_OFFLINE",
            Self::PacketTooLarge => "PACKET_TOO_LARGE",
            Self::QueueFull => "QUEUE_FULL",
            Self::MemoryBudget => "MEMORY_BUDGET",
            Self::StoreRefused => "STORE_REFUSED",
            Self::TooManyStreams(_) => "TOO_MANY_STREAMS",
            Self::TooManyCalls(_) => "TOO_MANY_CALLS",
            Self::TooManyTraces => "TOO_MANY_TRACES",
            Self::SlowConsumer => "SLOW_CONSUMER",
            Self::RequestTooLarge => "REQUEST_TOO_LARGE",
            Self::RequestIncomplete => "REQUEST_INCOMPLETE",
            Self::PageTokenInvalid => "PAGE_TOKEN_INVALID",
            Self::PageTokenMismatch => "PAGE_TOKEN_MISMATCH",
            Self::RetainedQuota => "RETAINED_QUOTA",
            Self::RetainUnavailable => "RETAIN_UNAVAILABLE",
            Self::Deadline(_) => "WAIT_INCOMPLETE",
            Self::Late => "STORE_LATE",
            Self::LatestOff => "LATEST_OFF",
            Self::HistoryOff => "HISTORY_OFF",
            Self::StoreUnavailable => "STORE_UNAVAILABLE",
            Self::StoreDamaged => "STORE_DAMAGED",
            Self::ShuttingDown | Self::CutShort(_) => "SHUTTING_DOWN",
            Self::Unauthenticated(unknown) => unknown.reason(),
            Self::RoleDenied { .. } => "ROLE_DENIED",
            Self::OutOfScope { .. } | Self::HadOtherFilters { .. } => "OUT_OF_SCOPE",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::NoTokens(_) => "NO_TOKENS",
            Self::TokenNotFound => "TOKEN_NOT_FOUND",
            Self::GroupsOff(_) => "GROUPS_DISABLED",
            Self::GroupNotFound => "GROUP_NOT_FOUND",
            Self::GroupOfBridge => "GROUP_OF_BRIDGE",
            Self::FilterImmutable => "FILTER_IMMUTABLE",
            Self::GroupExists => "GROUP_EXISTS",
            Self::TooManyGroups => "TOO_MANY_GROUPS",
            Self::EtagMismatch => "ETAG_MISMATCH",
            Self::GroupDraining => "GROUP_DRAINING",
            Self::GroupDeleted => "GROUP_DELETED",
            Self::Fenced => "FENCED",
            Self::OldToken => "OLD_TOKEN",
            Self::TooManyMembers => "TOO_MANY_MEMBERS",
            Self::CommandsOff(_) => "COMMANDS_DISABLED",
            Self::CommandExists => "COMMAND_EXISTS",
            Self::CommandNotFound => "COMMAND_NOT_FOUND",
            Self::CommandEnded(_) => "COMMAND_ENDED",
            Self::TooManyCommands(_) => "TOO_MANY_COMMANDS",
            Self::Command { why, .. } => command_state::reason(*why),
            Self::KeyReused => "IDEMPOTENCY_KEY_REUSED",
            Self::OutcomeLost => "OUTCOME_LOST",
            Self::ScheduleOff => "SCHEDULE_NEEDS_STORE",
            Self::ScheduleFull => "SCHEDULE_FULL",
            Self::ScheduleNotFound => "SCHEDULE_NOT_FOUND",
            Self::FilterNotAllowed => "FILTER_NOT_ALLOWED",
            Self::FilterUnsupported(_) => "FILTER_NOT_SUPPORTED",
            Self::SubscriptionQuota => "SUBSCRIPTION_QUOTA",
            Self::ShadowsOff(_) => "SHADOWS_DISABLED",
            Self::ShadowNotFound => "SHADOW_NOT_FOUND",
            Self::VersionConflict { .. } => "VERSION_CONFLICT",
            Self::ShadowTooLarge => "SHADOW_TOO_LARGE",
            Self::TooManyShadows => "TOO_MANY_SHADOWS",
            Self::ShadowsFull => "SHADOWS_FULL",
            Self::Internal => "INTERNAL",
        }
    }

    /// Returns the delay after which a retry makes sense.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::QueueFull
            | Self::MemoryBudget
            | Self::StoreRefused
            | Self::TooManyStreams(_)
            | Self::TooManyCalls(_)
            | Self::NotActive { .. }
            | Self::HomeNotServed { .. }
            | Self::StoreUnavailable => Some(Duration::from_secs(1)),
            Self::Command { why, .. } if command_state::code(*why) == Code::ResourceExhausted => {
                Some(Duration::from_secs(1))
            }
            _ => None,
        }
    }

    fn metadata(&self) -> HashMap<String, String> {
        match self {
            Self::Deadline(Reached { level, state }) | Self::CutShort(Reached { level, state }) => {
                HashMap::from([
                    ("level".to_owned(), level.name().to_owned()),
                    ("sent".to_owned(), state.sent.to_string()),
                    ("acked".to_owned(), state.acked.to_string()),
                    ("rejected".to_owned(), state.rejected.to_string()),
                ])
            }
            Self::Invalid { field, .. } | Self::OutOfScope { field } | Self::HadOtherFilters { field } => {
                HashMap::from([("field".to_owned(), field.clone())])
            }
            Self::Command { why, stage } => command_state::metadata(*why, *stage),
            Self::NotActive { address } => HashMap::from([("address".to_owned(), address.clone())]),
            Self::HomeNotServed { home } => HashMap::from([("home".to_owned(), home.to_string())]),
            Self::VersionConflict { version } => HashMap::from([("version".to_owned(), version.to_string())]),
            Self::CommandEnded(state) => {
                HashMap::from([("state".to_owned(), command_state::state_name(*state).to_owned())])
            }
            Self::ShadowsOff(key)
            | Self::GroupsOff(key)
            | Self::CommandsOff(key)
            | Self::TooManyCommands(key) => HashMap::from([("key".to_owned(), (*key).to_owned())]),
            Self::ScheduleOff => HashMap::from([("key".to_owned(), "store.enabled".to_owned())]),
            Self::RoleDenied { role } => HashMap::from([("role".to_owned(), role.to_string())]),
            _ => HashMap::new(),
        }
    }

    /// The form for one item of a batch.
    pub fn to_item(&self) -> v1::ItemError {
        count(|c| c.grpc_requests_failed.add(1));
        v1::ItemError {
            code: self.code().into(),
            reason: self.reason().to_owned(),
            message: self.to_string(),
            metadata: self.metadata(),
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        count(|c| c.grpc_requests_failed.add(1));
        let mut details = ErrorDetails::with_error_info(error.reason(), ERROR_DOMAIN, error.metadata());
        if let Some(delay) = error.retry_after() {
            details.set_retry_info(Some(delay));
        }
        if let Error::Invalid { field, problem } = &error {
            details.add_bad_request_violation(field, problem);
        }
        Self::with_error_details(error.code(), error.to_string(), details)
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::BadPageToken => Self::PageTokenInvalid,
            StoreError::NeedsDevices => {
                Self::invalid("device_ids", "is empty, and the database in use lists by device only")
            }
            StoreError::Unavailable(detail) | StoreError::Partly { reason: detail, .. } => {
                tracing::debug!(detail, "stored data cannot be read now");
                Self::StoreUnavailable
            }
            StoreError::Damaged(detail) | StoreError::Format(detail) => {
                gateway_core::error_limited!(detail, "stored data is damaged");
                Self::StoreDamaged
            }
        }
    }
}

impl From<GroupError> for Error {
    fn from(error: GroupError) -> Self {
        match error {
            GroupError::NotFound => Self::GroupNotFound,
            GroupError::Exists => Self::GroupExists,
            GroupError::TooManyGroups => Self::TooManyGroups,
            GroupError::TooManyMembers => Self::TooManyMembers,
            GroupError::Memory => Self::MemoryBudget,
            GroupError::EtagMismatch => Self::EtagMismatch,
            GroupError::Draining => Self::GroupDraining,
            GroupError::OutOfRange => Self::OldToken,
            GroupError::BadToken => Self::invalid("token", "is not one of this gateway's tokens"),
            GroupError::Gone => Self::GroupDeleted,
            GroupError::Fenced => Self::Fenced,
            GroupError::OutOfScope => Self::OutOfScope { field: "group".to_owned() },
            GroupError::Damaged => {
                gateway_core::error_limited!("records of a group are damaged");
                Self::StoreDamaged
            }
            GroupError::Store(error) => error.into(),
        }
    }
}

impl From<CommandStartError> for Error {
    fn from(error: CommandStartError) -> Self {
        match error {
            CommandStartError::Exists => Self::CommandExists,
            CommandStartError::TooMany(key) => Self::TooManyCommands(key),
            CommandStartError::Memory => Self::MemoryBudget,
            CommandStartError::Store => Self::StoreRefused,
            CommandStartError::Random => Self::Internal,
        }
    }
}

impl From<CancelError> for Error {
    fn from(error: CancelError) -> Self {
        match error {
            CancelError::NotFound => Self::CommandNotFound,
            CancelError::Ended(state) => Self::CommandEnded(state),
            CancelError::Store => Self::StoreRefused,
        }
    }
}

impl From<MemberEnd> for Error {
    fn from(ended: MemberEnd) -> Self {
        GroupError::from(ended).into()
    }
}

/// The error for a drop of a message to one device; `None` for drops that are outcomes, not errors.
pub fn drop_error(reason: DropReason) -> Option<Error> {
    match reason {
        DropReason::QueueFull => Some(Error::QueueFull),
        DropReason::Memory => Some(Error::MemoryBudget),
        DropReason::TooLarge => Some(Error::PacketTooLarge),
        DropReason::Offline
        | DropReason::Expired
        | DropReason::ConnectionLost
        | DropReason::SessionEnded
        | DropReason::NotAuthorized
        | DropReason::Purged => None,
    }
}

impl From<BanError> for Error {
    fn from(error: BanError) -> Self {
        match error {
            BanError::Full(_) => Self::TooManyBans,
            BanError::InFile => Self::BanInFile,
            BanError::Missing => Self::BanNotFound,
            BanError::Store(error) => {
                tracing::error!(%error, "bans cannot be written");
                Self::StoreUnavailable
            }
        }
    }
}

impl From<FileError> for Error {
    fn from(error: FileError) -> Self {
        if let FileError::None = error {
            return Self::NoTokens(error.to_string());
        }
        // Paths and lines are for whoever runs the gateway.
        tracing::error!(%error, "the file of tokens was not changed");
        Self::NoTokens("the file of tokens cannot be changed now; the gateway's log says why".to_owned())
    }
}

impl From<Rejection> for Error {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::NotFound(_) => Self::ShadowNotFound,
            Rejection::Conflict { version } => Self::VersionConflict { version },
            Rejection::TooLarge => Self::ShadowTooLarge,
            Rejection::TooManyShadows => Self::TooManyShadows,
            Rejection::NoRoom => Self::ShadowsFull,
            Rejection::TooManyRequests => Self::MemoryBudget,
            Rejection::Unavailable => Self::StoreUnavailable,
            Rejection::Internal => Self::StoreDamaged,
            // Requests of backends are not read as those of devices are.
            Rejection::InvalidJson
            | Rejection::MissingState
            | Rejection::StateNotObject
            | Rejection::DesiredNotObject
            | Rejection::ReportedNotObject
            | Rejection::InvalidVersion
            | Rejection::InvalidToken
            | Rejection::TooDeep(_)
            | Rejection::InvalidNode
            | Rejection::NotUtf8 => Self::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_map_to_codes_and_reasons() {
        let reached = Reached { level: ReachedLevel::Sent, state: ReceiptState::default() };
        let deadline = Error::Deadline(reached);
        let table = [
            (Error::invalid("topic", "is empty"), Code::InvalidArgument, "INVALID_FIELD"),
            (Error::DeviceNotFound, Code::NotFound, "DEVICE_NOT_FOUND"),
            (Error::ValueNotFound, Code::NotFound, "VALUE_NOT_FOUND"),
            (Error::BanNotFound, Code::NotFound, "BAN_NOT_FOUND"),
            (Error::BanInFile, Code::FailedPrecondition, "BAN_IN_FILE"),
            (Error::TooManyBans, Code::ResourceExhausted, "TOO_MANY_BANS"),
            (Error::DeviceOffline, Code::FailedPrecondition, "DEVICE_OFFLINE"),
            (Error::PacketTooLarge, Code::FailedPrecondition, "PACKET_TOO_LARGE"),
            (Error::QueueFull, Code::ResourceExhausted, "QUEUE_FULL"),
            (Error::MemoryBudget, Code::ResourceExhausted, "MEMORY_BUDGET"),
            (Error::StoreRefused, Code::ResourceExhausted, "STORE_REFUSED"),
            (Error::TooManyStreams("in all"), Code::ResourceExhausted, "TOO_MANY_STREAMS"),
            (Error::TooManyCalls("in all"), Code::ResourceExhausted, "TOO_MANY_CALLS"),
            (Error::TooManyTraces, Code::ResourceExhausted, "TOO_MANY_TRACES"),
            (Error::SlowConsumer, Code::ResourceExhausted, "SLOW_CONSUMER"),
            (Error::RequestTooLarge, Code::ResourceExhausted, "REQUEST_TOO_LARGE"),
            (Error::RequestIncomplete, Code::DeadlineExceeded, "REQUEST_INCOMPLETE"),
            (Error::PageTokenInvalid, Code::InvalidArgument, "PAGE_TOKEN_INVALID"),
            (Error::PageTokenMismatch, Code::InvalidArgument, "PAGE_TOKEN_MISMATCH"),
            (Error::RetainedQuota, Code::ResourceExhausted, "RETAINED_QUOTA"),
            (Error::RetainUnavailable, Code::FailedPrecondition, "RETAIN_UNAVAILABLE"),
            (deadline.clone(), Code::DeadlineExceeded, "WAIT_INCOMPLETE"),
            (Error::Late, Code::DeadlineExceeded, "STORE_LATE"),
            (Error::LatestOff, Code::FailedPrecondition, "LATEST_OFF"),
            (Error::HistoryOff, Code::FailedPrecondition, "HISTORY_OFF"),
            (Error::StoreUnavailable, Code::Unavailable, "STORE_UNAVAILABLE"),
            (Error::StoreDamaged, Code::DataLoss, "STORE_DAMAGED"),
            (Error::ShuttingDown, Code::Unavailable, "SHUTTING_DOWN"),
            (Error::CutShort(reached), Code::Unavailable, "SHUTTING_DOWN"),
            (Error::NotActive { address: "b:10000".to_owned() }, Code::Unavailable, "NOT_ACTIVE"),
            (Error::Unauthenticated(UnknownCaller::Nobody), Code::Unauthenticated, "CREDENTIALS_MISSING"),
            (Error::Unauthenticated(UnknownCaller::Wrong), Code::Unauthenticated, "CREDENTIALS_UNKNOWN"),
            (Error::Unauthenticated(UnknownCaller::Expired), Code::Unauthenticated, "CREDENTIALS_EXPIRED"),
            (Error::Unauthenticated(UnknownCaller::Revoked), Code::Unauthenticated, "CREDENTIALS_REVOKED"),
            (Error::RoleDenied { role: Role::Reader }, Code::PermissionDenied, "ROLE_DENIED"),
            (Error::OutOfScope { field: "topic".to_owned() }, Code::PermissionDenied, "OUT_OF_SCOPE"),
            (Error::HadOtherFilters { field: "name".to_owned() }, Code::PermissionDenied, "OUT_OF_SCOPE"),
            (Error::Unimplemented, Code::Unimplemented, "UNIMPLEMENTED"),
            (Error::NoTokens("none".to_owned()), Code::FailedPrecondition, "NO_TOKENS"),
            (Error::DeviceUnknown, Code::FailedPrecondition, "DEVICE_UNKNOWN"),
            (Error::TokenNotFound, Code::NotFound, "TOKEN_NOT_FOUND"),
            (Error::GroupsOff("store.enabled"), Code::FailedPrecondition, "GROUPS_DISABLED"),
            (Error::GroupNotFound, Code::NotFound, "GROUP_NOT_FOUND"),
            (Error::FilterImmutable, Code::FailedPrecondition, "FILTER_IMMUTABLE"),
            (Error::GroupExists, Code::AlreadyExists, "GROUP_EXISTS"),
            (Error::TooManyGroups, Code::ResourceExhausted, "TOO_MANY_GROUPS"),
            (Error::EtagMismatch, Code::Aborted, "ETAG_MISMATCH"),
            (Error::GroupDraining, Code::FailedPrecondition, "GROUP_DRAINING"),
            (Error::GroupDeleted, Code::FailedPrecondition, "GROUP_DELETED"),
            (Error::Fenced, Code::Aborted, "FENCED"),
            (Error::OldToken, Code::OutOfRange, "OLD_TOKEN"),
            (Error::TooManyMembers, Code::ResourceExhausted, "TOO_MANY_MEMBERS"),
            (Error::KeyReused, Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED"),
            (Error::OutcomeLost, Code::Unknown, "OUTCOME_LOST"),
            (Error::ScheduleOff, Code::FailedPrecondition, "SCHEDULE_NEEDS_STORE"),
            (Error::ScheduleFull, Code::ResourceExhausted, "SCHEDULE_FULL"),
            (Error::ScheduleNotFound, Code::NotFound, "SCHEDULE_NOT_FOUND"),
            (Error::FilterNotAllowed, Code::FailedPrecondition, "FILTER_NOT_ALLOWED"),
            (Error::FilterUnsupported("x"), Code::FailedPrecondition, "FILTER_NOT_SUPPORTED"),
            (Error::SubscriptionQuota, Code::ResourceExhausted, "SUBSCRIPTION_QUOTA"),
            (Error::Internal, Code::Internal, "INTERNAL"),
        ];
        for (error, code, reason) in table {
            let status = Status::from(error.clone());
            assert_eq!(status.code(), code, "{error}");
            let info = status.get_details_error_info().unwrap();
            assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, ERROR_DOMAIN));
            let retry = matches!(
                error,
                Error::QueueFull | Error::MemoryBudget | Error::StoreRefused | Error::StoreUnavailable
            );
            assert!(!retry || status.get_details_retry_info().is_some(), "{error}");
            assert_eq!(error.to_item().code, code as i32);
        }
        let status = Status::from(Error::invalid("topic", "is empty"));
        assert_eq!(status.message(), "topic: is empty");
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "topic");
        let info = Status::from(deadline).get_details_error_info().unwrap();
        assert_eq!(info.metadata["level"], "SENT");
    }

    #[test]
    fn store_details_do_not_leak() {
        let status = Status::from(Error::from(StoreError::Unavailable("10.0.0.7:9042 refused".into())));
        assert!(!status.message().contains("10.0.0.7"));
    }
}
