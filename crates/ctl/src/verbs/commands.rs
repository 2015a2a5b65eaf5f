//! Commands to devices, with their answers.

use std::{path::PathBuf, time::Duration};

use clap::Subcommand;
use mqtt_gateway_client::{
    Error,
    v1::{
        CancelCommandRequest, Command, CommandSpec, CommandState, GetCommandRequest, ListCommandsRequest,
        Properties, Reply, StartCommandRequest, WatchCommandRequest,
    },
};
use prost_types::Timestamp;

use super::{answer, pages, pair, qos, user_properties};
use crate::{
    VerbContext,
    failure::Failure,
    output::{self, at, or_dash, word},
    spans,
};

/// Commands.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum CommandsVerb {
    /// Sends a command and waits for the device's answer, at most for --timeout
    Send {
        #[command(flatten)]
        what: CommandArguments,
        /// Wait for a device that is offline, like 30s
        #[arg(long, value_name = "SPAN", value_parser = spans::span)]
        wait: Option<Duration>,
    },
    /// Starts a command that the gateway keeps until the device has answered, and shows its id
    Start {
        #[command(flatten)]
        what: CommandArguments,
        /// Id of the command: the same again starts no second one
        #[arg(long, value_name = "ID", default_value = "")]
        id: String,
        /// Not before: 2026-01-31T12:00:00Z, or +2h
        #[arg(long, value_name = "TIME", value_parser = spans::moment)]
        start: Option<Timestamp>,
        /// Not after; a day without it
        #[arg(long, value_name = "TIME", value_parser = spans::moment)]
        expires: Option<Timestamp>,
        /// Send it again while there is no answer
        #[arg(long, value_name = "SPAN", value_parser = spans::span)]
        retry: Option<Duration>,
        /// Follow it until it ends
        #[arg(long)]
        follow: bool,
    },
    /// Shows a command
    Get {
        /// Its id
        id: String,
    },
    /// Lists commands, the newest first
    List {
        /// Only of this device
        #[arg(default_value = "")]
        device: String,
        /// Only those that have not ended
        #[arg(long)]
        active: bool,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Cancels a command
    Cancel {
        /// Its id
        id: String,
    },
    /// Follows a command until it ends
    Watch {
        /// Its id
        id: String,
    },
}

/// What to send.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CommandArguments {
    /// The device
    device: String,
    /// What it is to do: the last level of the topic
    name: String,
    /// With what
    #[arg(default_value = "")]
    payload: String,
    /// Payload from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "payload")]
    file: Option<PathBuf>,
    /// Quality of service: 0, 1 or 2
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(..=2))]
    qos: u8,
    /// MIME type of the payload
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// User property; may be repeated
    #[arg(short, long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    properties: Vec<(String, String)>,
}

impl CommandArguments {
    fn spec(self) -> Result<CommandSpec, Failure> {
        let payload = match self.file {
            None => self.payload.into_bytes(),
            Some(file) => std::fs::read(&file)
                .map_err(|error| Failure::Usage(format!("read {}: {error}", file.display())))?,
        };
        let properties = Properties {
            content_type: self.content_type,
            user_properties: user_properties(&self.properties),
            ..Properties::default()
        };
        Ok(CommandSpec {
            device_id: self.device,
            name: self.name,
            payload: payload.into(),
            properties: (properties != Properties::default()).then_some(properties),
            qos: qos(self.qos),
        })
    }
}

fn state(command: &Command) -> String {
    word(command.state().as_str_name(), "COMMAND_STATE_")
}

fn line(command: &Command) -> String {
    let answer = command.reply.as_ref().map_or_else(String::new, |reply| format!(": {}", reply_line(reply)));
    format!("{} {}{answer}", command.command_id, state(command))
}

fn reply_line(reply: &Reply) -> String {
    format!("{} {}", reply.device_status, output::payload(&reply.payload)).trim_end().to_owned()
}

/// A device that says so by its status has not done it.
fn unless_failed(reply: &Reply) -> Result<(), Failure> {
    match reply.device_status {
        0 | 200..300 => Ok(()),
        status => Err(Failure::Local(format!("the device answered with status {status}"))),
    }
}

impl CommandsVerb {
    pub(crate) fn streams(&self) -> bool {
        matches!(self, Self::Watch { .. })
    }

    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.commands();
        match self {
            Self::Send { what, wait } => {
                let within = context.timeout.max(wait.unwrap_or_default());
                let reply = context.client.command(what.spec()?, wait, within).await?;
                context.out.line_of(&reply_line(&reply), &reply)?;
                context.out.flush()?;
                unless_failed(&reply)
            }
            Self::Start { what, id, start, expires, retry, follow } => {
                let request = StartCommandRequest {
                    command_id: id,
                    spec: Some(what.spec()?),
                    start_time: start,
                    expire_time: expires,
                    retry_interval: retry.and_then(spans::proto),
                };
                let command = answer!(client.start_command(context.ask(request))).command.unwrap_or_default();
                if follow {
                    return watch(context, command.command_id).await;
                }
                Ok(context.out.line_of(&line(&command), &command)?)
            }
            Self::Get { id } => {
                let request = context.ask(GetCommandRequest { command_id: id });
                Ok(context.out.one(&answer!(client.get_command(request)).command.unwrap_or_default())?)
            }
            Self::List { device, active, limit } => {
                pages!(
                    context,
                    limit,
                    |page_token| client.list_commands(context.ask(ListCommandsRequest {
                        device_id: device.clone(),
                        active_only: active,
                        page_size:
                            limit.map_or(1000, |limit| i32::try_from(limit.clamp(1, 1000)).unwrap_or(1000)),
                        page_token,
                    })),
                    |page| {
                        let columns = &["ID", "DEVICE", "NAME", "STATE", "ATTEMPTS", "CHANGED", "REPLY"];
                        context.out.rows(columns, &page.commands, |command: &Command| {
                            let spec = command.spec.clone().unwrap_or_default();
                            vec![
                                command.command_id.clone(),
                                or_dash(&spec.device_id),
                                output::clean(&spec.name),
                                state(command),
                                command.attempts.to_string(),
                                at(command.update_time.as_ref()),
                                command.reply.as_ref().map_or_else(String::new, reply_line),
                            ]
                        })?;
                        page.commands.len()
                    }
                );
                Ok(())
            }
            Self::Cancel { id } => {
                let request = context.ask(CancelCommandRequest { command_id: id });
                let command = answer!(client.cancel_command(request)).command.unwrap_or_default();
                Ok(context.out.line_of(&line(&command), &command)?)
            }
            Self::Watch { id } => watch(context, id).await,
        }
    }
}

async fn watch(context: &mut VerbContext, command_id: String) -> Result<(), Failure> {
    let mut stream = answer!(context.client.commands().watch_command(WatchCommandRequest { command_id }));
    let mut last = Command::default();
    while let Some(response) = stream.message().await.map_err(Error::from)? {
        last = response.command.unwrap_or_default();
        context.out.line_of(&line(&last), &last)?;
        context.out.flush()?;
    }
    match last.state() {
        CommandState::Replied => unless_failed(&last.reply.unwrap_or_default()),
        CommandState::TimedOut | CommandState::Cancelled | CommandState::Refused => {
            Err(Failure::Local(format!("the command ended as {}", state(&last))))
        }
        _ => Ok(()),
    }
}
