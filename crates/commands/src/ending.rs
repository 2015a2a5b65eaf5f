//! End of a stored command.

use gateway_core::clock;

use super::{DeviceReply, machine::CommandState, record::CommandRecord};

/// State with which a command is to end, with its reason code or reply.
pub(super) struct CommandEnding {
    pub(super) state: CommandState,
    pub(super) code: Option<u8>,
    pub(super) reply: Option<DeviceReply>,
}

impl CommandEnding {
    pub(super) fn of(state: CommandState) -> Self {
        Self { state, code: None, reply: None }
    }

    /// The device does not take it, with this reason code.
    pub(super) fn refused(code: u8) -> Self {
        Self { state: CommandState::Refused, code: Some(code), reply: None }
    }

    /// The record of a command that ends so, now.
    pub(super) fn apply(self, record: &CommandRecord) -> CommandRecord {
        let mut ended = record.clone();
        ended.machine.end(self.state);
        ended.updated = clock::now();
        ended.code = self.code;
        ended.reply = self.reply;
        ended
    }
}
