//! States of commands, and why one has no reply, as the API names them.

use std::collections::HashMap;

use commands::{CommandState, NoReply, SendStage};
use tonic::Code;

use gateway_api::gateway::v1;

/// A state as the API has it.
pub(crate) fn state(state: CommandState) -> v1::CommandState {
    match state {
        CommandState::Queued => v1::CommandState::Queued,
        CommandState::Sent => v1::CommandState::Sent,
        CommandState::Delivered => v1::CommandState::Delivered,
        CommandState::Replied => v1::CommandState::Replied,
        CommandState::TimedOut => v1::CommandState::TimedOut,
        CommandState::Cancelled => v1::CommandState::Cancelled,
        CommandState::Refused => v1::CommandState::Refused,
    }
}

/// A state as metadata of errors names it.
pub(crate) fn state_name(of: CommandState) -> &'static str {
    state(of).as_str_name().trim_start_matches("COMMAND_STATE_")
}

/// The gRPC code of a failure.
pub fn code(why: NoReply) -> Code {
    match why {
        NoReply::Offline | NoReply::Refused(_) | NoReply::TooLarge => Code::FailedPrecondition,
        NoReply::TimedOut => Code::DeadlineExceeded,
        NoReply::QueueFull | NoReply::TooMany(_) | NoReply::Memory => Code::ResourceExhausted,
        NoReply::Random => Code::Internal,
        NoReply::ShuttingDown => Code::Unavailable,
    }
}

/// Its stable name.
pub fn reason(why: NoReply) -> &'static str {
    match why {
        NoReply::Offline => "DEVICE_OFFLINE",
        NoReply::TimedOut => "COMMAND_TIMED_OUT",
        NoReply::Refused(_) => "COMMAND_REFUSED",
        NoReply::TooLarge => "PACKET_TOO_LARGE",
        NoReply::QueueFull => "QUEUE_FULL",
        NoReply::TooMany(_) => "TOO_MANY_COMMANDS",
        NoReply::Memory => "MEMORY_BUDGET",
        NoReply::Random => "INTERNAL",
        NoReply::ShuttingDown => "SHUTTING_DOWN",
    }
}

/// Returns the metadata of an error: the stage that the command reached, and the reason why no reply came.
pub fn metadata(why: NoReply, stage: SendStage) -> HashMap<String, String> {
    let stage = match stage {
        SendStage::Queued => "QUEUED",
        SendStage::Sent => "SENT",
        SendStage::Delivered => "DELIVERED",
    };
    let more = match why {
        NoReply::Refused(code) => Some(("reason_code", code.to_string())),
        NoReply::TooMany(key) => Some(("key", key.to_owned())),
        _ => None,
    };
    let all = [("stage", stage.to_owned())].into_iter().chain(more);
    all.map(|(name, value)| (name.to_owned(), value)).collect()
}
