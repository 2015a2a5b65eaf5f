//! The verbs, a module for each group of them.

mod bridges;
mod cluster;
mod commands;
mod consume;
mod devices;
mod events;
mod groups;
mod health;
mod here;
mod latest;
mod messages;
mod operations;
mod security;
mod shadow;
mod streams;
mod top;

use clap::Subcommand;
pub(crate) use here::{local, locally};
use mqtt_gateway_client::v1::{Qos, UserProperty};

use crate::{VerbContext, failure::Failure};

/// What to do.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Verb {
    /// Prints messages as they are published, until interrupted
    Sub(messages::SubVerb),
    /// Publishes messages to a topic, or to devices, and tells what became of them
    Pub(Box<messages::PubVerb>),
    /// Prints messages of a group as one of its members, and acknowledges each once it is printed
    Consume(consume::ConsumeVerb),
    /// Messages that wait for their time (pub --deliver-at)
    #[command(subcommand)]
    Scheduled(messages::ScheduledVerb),
    /// The last message of each device and topic
    #[command(subcommand)]
    Latest(latest::LatestVerb),
    /// Retained messages
    #[command(subcommand)]
    Retained(latest::RetainedVerb),
    /// Devices and their sessions
    #[command(subcommand)]
    Devices(Box<devices::DevicesVerb>),
    /// Consumer groups: what is kept until somebody has acknowledged it
    #[command(subcommand)]
    Groups(Box<groups::GroupsVerb>),
    /// Requests to devices, with their answers
    #[command(subcommand)]
    Command(Box<commands::CommandsVerb>),
    /// What devices are to be, and what they say they are
    #[command(subcommand)]
    Shadow(shadow::ShadowsVerb),
    /// Lists streams of backends that are open, the slowest first
    Streams(streams::StreamsVerb),
    /// Lists the bridges to other systems: whether each is up, what waits, and what failed last
    Bridges(bridges::BridgesVerb),
    /// Shows the cluster as the gateway that serves sees it: who stands by, what the ledger has, and what is on its way there
    Cluster(cluster::ClusterVerb),
    /// A live view: rates, slow devices, groups that lag; until interrupted
    Top(top::TopVerb),
    /// Prints what happens to devices, until interrupted
    Events(events::EventsVerb),
    /// Who may do what: rules, tokens, bans, tenants
    #[command(subcommand)]
    Security(Box<security::SecurityVerb>),
    /// The gateway itself: state, metrics, certificates, configuration, and who you are to it
    #[command(subcommand)]
    Gateway(operations::GatewayVerb),
    /// Says whether the gateway takes calls. Exit code 1 if it does not
    Health(health::HealthVerb),
    /// Gateways by name: address, authority, token
    #[command(subcommand)]
    Profile(here::ProfileVerb),
    /// Writes completion for a shell on standard output
    Completion(here::CompletionVerb),
    /// Writes the man pages into a directory
    #[command(hide = true)]
    Man(here::ManVerb),
}

impl Verb {
    /// Returns whether the verb goes on until it is interrupted, so that Ctrl-C is its orderly end.
    pub(crate) fn streams(&self) -> bool {
        match self {
            Self::Sub(_) | Self::Consume(_) | Self::Events(_) | Self::Top(_) => true,
            Self::Latest(verb) => verb.streams(),
            Self::Devices(verb) => verb.streams(),
            Self::Command(verb) => verb.streams(),
            Self::Shadow(verb) => verb.streams(),
            _ => false,
        }
    }

    /// Returns whether the verb ends by itself when it is interrupted.
    pub(crate) fn hears_interrupts(&self) -> bool {
        matches!(self, Self::Consume(_))
    }

    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        match self {
            Self::Sub(verb) => verb.run(context).await,
            Self::Pub(verb) => verb.run(context).await,
            Self::Consume(verb) => verb.run(context).await,
            Self::Groups(verb) => verb.run(context).await,
            Self::Command(verb) => verb.run(context).await,
            Self::Shadow(verb) => verb.run(context).await,
            Self::Events(verb) => verb.run(context).await,
            Self::Security(verb) => verb.run(context).await,
            Self::Streams(verb) => verb.run(context).await,
            Self::Bridges(verb) => verb.run(context).await,
            Self::Cluster(verb) => verb.run(context).await,
            Self::Top(verb) => verb.run(context).await,
            Self::Gateway(verb) => verb.run(context).await,
            Self::Health(verb) => verb.run(context).await,
            Self::Scheduled(verb) => verb.run(context).await,
            Self::Latest(verb) => verb.run(context).await,
            Self::Retained(verb) => verb.run(context).await,
            Self::Devices(verb) => verb.run(context).await,
            Self::Profile(_) | Self::Completion(_) | Self::Man(_) => Ok(()),
        }
    }
}

/// Fetches page after page: `$ask` makes the request from a token, `$show` prints the answer and gives its rows' count.
macro_rules! pages {
    ($context:ident, $limit:expr, |$token:ident| $call:expr, |$page:ident| $show:expr) => {{
        let mut $token = String::new();
        let mut left: usize = $limit.unwrap_or(usize::MAX);
        loop {
            #[allow(unused_mut, reason = "some pages are cut, others are not")]
            let mut $page = $call.await.map_err(mqtt_gateway_client::Error::from)?.into_inner();
            let shown: usize = { $show };
            left = left.saturating_sub(shown);
            $context.out.flush()?;
            $token = std::mem::take(&mut $page.next_page_token);
            if $token.is_empty() || left == 0 {
                break;
            }
        }
    }};
}
pub(crate) use pages;

/// The answer of one call.
macro_rules! answer {
    ($call:expr) => {
        $call.await.map_err(mqtt_gateway_client::Error::from)?.into_inner()
    };
}
pub(crate) use answer;

/// 0, 1 or 2 of the command line.
pub(crate) fn qos(level: u8) -> i32 {
    match level {
        0 => Qos::AtMostOnce,
        1 => Qos::AtLeastOnce,
        _ => Qos::ExactlyOnce,
    }
    .into()
}

/// `NAME=VALUE`.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

pub(crate) fn user_properties(pairs: &[(String, String)]) -> Vec<UserProperty> {
    pairs.iter().map(|(name, value)| UserProperty { name: name.clone(), value: value.clone() }).collect()
}
