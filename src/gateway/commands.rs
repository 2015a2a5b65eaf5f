//! Settings of commands, as their crate wants them.

use std::sync::Arc;

use ::commands::{CommandRegistryOptions, CommandTopics, CommandsOptions, ReplyDispatcher};
use config::Config;

/// The receiver of replies from devices, if commands are switched on.
pub(super) fn dispatcher(config: &Config) -> Option<Arc<ReplyDispatcher>> {
    let commands = &config.commands;
    commands.enabled.then(|| {
        ReplyDispatcher::new(CommandsOptions {
            topics: CommandTopics::new(
                commands.prefix(),
                commands.request_levels().expect("the configuration was validated"),
                commands.reply_levels().expect("the configuration was validated"),
            ),
            max_outstanding: commands.max_outstanding,
            max_outstanding_per_device: commands.max_outstanding_per_device,
        })
    })
}

pub(super) fn registry_options(config: &Config) -> CommandRegistryOptions {
    let commands = &config.commands;
    CommandRegistryOptions {
        max_outstanding: commands.max_outstanding,
        max_outstanding_per_device: commands.max_outstanding_per_device,
        max_active: commands.max_active,
        max_active_per_device: commands.max_active_per_device,
        max_bytes: commands.max_bytes.0,
        keep: commands.keep.0,
        max_kept: commands.max_kept,
    }
}
