//! Consumer groups: administration, and consuming without a stream.

use std::collections::HashMap;

use clap::{Subcommand, ValueEnum};
use mqtt_gateway_client::v1::{
    AckResult, AcknowledgeRequest, AcknowledgeResponse, ConsumedMessage, CreateGroupRequest, DeadLetter,
    DeleteGroupRequest, EventKind, FetchRequest, Filter, GetGroupRequest, Group, ListDeadLettersRequest,
    ListGroupsRequest, ListMembersRequest, ListPendingRequest, Member, ModifyLeaseRequest, OrderKey,
    Position, PurgeDeadLettersRequest, RequeueDeadLettersRequest, SeekGroupRequest, UpdateGroupRequest,
    WhenFull, consumed_message::Content, dead_letter::Content as DeadContent, position::At,
};
use prost_types::FieldMask;

use super::{answer, events, messages, pages, pair, qos};
use crate::{
    VerbContext,
    failure::Failure,
    output::{self, at, or_dash},
    remark, spans,
};

/// Groups.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum GroupsVerb {
    /// Makes a group: from now on the gateway keeps for it what matches. The same again does no harm
    Create {
        /// Its name
        name: String,
        #[command(flatten)]
        wanted: Box<Wanted>,
        #[command(flatten)]
        settings: Box<Settings>,
        /// What keeps its order
        #[arg(long, value_enum, default_value_t)]
        order: OrderArgument,
        /// Where it begins: latest, earliest, a time or a token
        #[arg(long, value_name = "PLACE", value_parser = place)]
        start: Option<Position>,
        /// Only check whether it could be made
        #[arg(long)]
        validate_only: bool,
    },
    /// Shows a group and how far it is
    Get {
        /// Its name
        name: String,
    },
    /// Lists the groups and how far they are
    List,
    /// Changes what is given of a group. Its filter stays: for another create a group, drain this one, then delete it
    Update {
        /// Its name
        name: String,
        #[command(flatten)]
        settings: Box<Settings>,
        /// Only if this is its etag
        #[arg(long, default_value = "")]
        etag: String,
    },
    /// Delivers nothing until the group is resumed; messages are kept
    Pause {
        /// Its name
        name: String,
    },
    /// Delivers again
    Resume {
        /// Its name
        name: String,
    },
    /// Deletes a group with all that waits in it
    Delete {
        /// Its name
        name: String,
        /// It is fine if there is no such group
        #[arg(long)]
        allow_missing: bool,
    },
    /// Moves a group to another place; tells a token that leads back
    Seek {
        /// Its name
        name: String,
        /// latest, earliest, a time as 2026-01-31T12:00:00Z or -1h, or a token
        #[arg(value_parser = place, allow_hyphen_values = true)]
        to: Position,
    },
    /// Lists the members of a group
    Members {
        /// Its name
        name: String,
    },
    /// Lists what was delivered and is not acknowledged, and what waits for its redelivery
    Pending {
        /// Its name
        name: String,
        /// Only messages of this device
        #[arg(short, long, value_name = "ID", default_value = "")]
        device: String,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Messages that were given up
    #[command(subcommand)]
    DeadLetters(DeadLettersVerb),
    /// Takes messages without a stream; 'groups ack' acknowledges them
    Fetch {
        /// Its name
        name: String,
        /// Name of the member
        #[arg(short, long, default_value = "ctl")]
        member: String,
        /// At most so many
        #[arg(short, long, value_name = "N", default_value_t = 100)]
        count: u32,
        /// How long to wait for the first
        #[arg(long, value_name = "SPAN", value_parser = spans::span, default_value = "0s")]
        wait: std::time::Duration,
    },
    /// Acknowledges what was fetched, by ack ids
    Ack {
        /// The group
        name: String,
        /// Ack ids
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Gives back what was fetched, or keeps it longer
    Lease {
        /// The group
        name: String,
        /// Ack ids
        #[arg(required = true)]
        ids: Vec<String>,
        /// Keep them so long from now; 0s gives them back
        #[arg(long = "for", value_name = "SPAN", value_parser = spans::span, default_value = "0s")]
        time: std::time::Duration,
        /// Why they are given back
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
    },
}

/// Messages of a group.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Wanted {
    /// Topic filter; may be repeated; none is '#'
    #[arg(short, long = "filter", value_name = "FILTER")]
    filters: Vec<String>,
    /// Only messages of this device; may be repeated
    #[arg(short, long = "device", value_name = "ID")]
    devices: Vec<String>,
    /// Only messages of devices whose id begins so; may be repeated
    #[arg(long = "device-prefix", value_name = "PREFIX")]
    device_prefixes: Vec<String>,
    /// Not these topics; may be repeated
    #[arg(short, long = "exclude", value_name = "FILTER")]
    exclude: Vec<String>,
    /// Not these devices; may be repeated
    #[arg(long = "exclude-device", value_name = "ID")]
    exclude_devices: Vec<String>,
    /// Also what backends and the gateway itself publish
    #[arg(long)]
    include_backends: bool,
    /// Only messages of this quality of service or higher
    #[arg(long, value_name = "QOS", value_parser = clap::value_parser!(u8).range(..=2))]
    min_qos: Option<u8>,
    /// Also events of this kind; may be repeated
    #[arg(long = "event", value_enum, value_name = "KIND")]
    events: Vec<events::EventArgument>,
}

impl Wanted {
    /// The filter; `None` is the gateway's default.
    fn filter(self) -> Option<Filter> {
        let filter = Filter {
            device_ids: self.devices,
            device_id_prefixes: self.device_prefixes,
            topic_filters: self.filters,
            exclude_topic_filters: self.exclude,
            exclude_device_ids: self.exclude_devices,
            include_backends: self.include_backends,
            min_qos: self.min_qos.map_or(0, qos),
            event_kinds: self.events.into_iter().map(|kind| EventKind::from(kind).into()).collect(),
        };
        (filter != Filter::default()).then_some(filter)
    }
}

/// Settings of their delivery.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Settings {
    /// How long a message may stay unacknowledged before it is delivered again
    #[arg(long, value_name = "SPAN", value_parser = spans::span)]
    ack_deadline: Option<std::time::Duration>,
    /// After how many deliveries a message is given up; 0 is never
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// The first pause before a redelivery
    #[arg(long, value_name = "SPAN", value_parser = spans::span)]
    min_backoff: Option<std::time::Duration>,
    /// The longest pause before a redelivery
    #[arg(long, value_name = "SPAN", value_parser = spans::span)]
    max_backoff: Option<std::time::Duration>,
    /// How long unacknowledged messages are kept; 0s is without limit
    #[arg(long, value_name = "SPAN", value_parser = spans::span)]
    retention: Option<std::time::Duration>,
    /// How many bytes of unacknowledged messages are kept; 0 is without a limit of its own
    #[arg(long, value_name = "BYTES")]
    retention_bytes: Option<u64>,
    /// How long messages stay for seek, acknowledged or not
    #[arg(long, value_name = "SPAN", value_parser = spans::span)]
    replay: Option<std::time::Duration>,
    /// What happens when it is full
    #[arg(long, value_enum)]
    when_full: Option<FullArgument>,
    /// For what you want to remember; may be repeated
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = pair)]
    labels: Vec<(String, String)>,
}

/// What keeps its order.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum OrderArgument {
    /// Messages of one device
    #[default]
    Device,
    /// Messages of one device on one topic
    DeviceTopic,
    /// Nothing
    None,
}

/// What happens when a group is full.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum FullArgument {
    /// The oldest messages go
    DropOldest,
    /// New messages are refused to their publishers
    Refuse,
}

/// Messages that were given up.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum DeadLettersVerb {
    /// Lists them, the oldest first
    List {
        /// The group
        group: String,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Puts them back into the group
    Requeue {
        /// The group
        group: String,
        /// Which; none is all
        ids: Vec<String>,
    },
    /// Deletes them
    Purge {
        /// The group
        group: String,
        /// Which; without --all at least one
        #[arg(required_unless_present = "all")]
        ids: Vec<String>,
        /// All of them
        #[arg(long, conflicts_with = "ids")]
        all: bool,
    },
}

fn place(text: &str) -> Result<Position, String> {
    let place = match text {
        "latest" => At::Latest(true),
        "earliest" => At::Earliest(true),
        text => match spans::moment(text) {
            Ok(time) => At::Time(time),
            // A date that is none is more likely a slip than a token.
            Err(error) if text.contains(':') || text.starts_with(['+', '-']) => return Err(error),
            Err(_) => At::Token(text.to_owned()),
        },
    };
    Ok(Position { at: Some(place) })
}

impl Settings {
    /// The group, and the names of the fields that were given.
    fn group(self, name: String) -> (Group, Vec<String>) {
        let when_full = self.when_full.map(|full| match full {
            FullArgument::DropOldest => WhenFull::DropOldest,
            FullArgument::Refuse => WhenFull::Refuse,
        });
        let given = [
            ("ack_deadline", self.ack_deadline.is_some()),
            ("max_attempts", self.max_attempts.is_some()),
            ("min_backoff", self.min_backoff.is_some()),
            ("max_backoff", self.max_backoff.is_some()),
            ("retention_age", self.retention.is_some()),
            ("retention_bytes", self.retention_bytes.is_some()),
            ("replay_age", self.replay.is_some()),
            ("when_full", when_full.is_some()),
            ("labels", !self.labels.is_empty()),
        ];
        let given = given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name.to_owned()).collect();
        let group = Group {
            name,
            ack_deadline: self.ack_deadline.and_then(spans::proto),
            max_attempts: self.max_attempts.unwrap_or_default(),
            min_backoff: self.min_backoff.and_then(spans::proto),
            max_backoff: self.max_backoff.and_then(spans::proto),
            retention_age: self.retention.and_then(spans::proto),
            retention_bytes: self.retention_bytes.unwrap_or_default(),
            replay_age: self.replay.and_then(spans::proto),
            when_full: when_full.unwrap_or_default().into(),
            labels: self.labels.into_iter().collect::<HashMap<_, _>>(),
            ..Group::default()
        };
        (group, given)
    }
}

const GROUP: &[&str] =
    &["NAME", "STATE", "MEMBERS", "LAG", "OUTSTANDING", "DEAD", "LOST", "OLDEST", "FILTER"];

fn row(group: &Group) -> Vec<String> {
    let status = group.status.unwrap_or_default();
    let filters = group.filter.as_ref().map_or_else(String::new, |filter| filter.topic_filters.join(" "));
    vec![
        group.name.clone(),
        if group.paused { "paused" } else { "active" }.to_owned(),
        status.members.to_string(),
        status.lag_messages.to_string(),
        status.outstanding.to_string(),
        status.dead_letters.to_string(),
        status.lost.to_string(),
        at(status.oldest_time.as_ref()),
        if filters.is_empty() { "#".to_owned() } else { output::clean(&filters) },
    ]
}

fn content_row(content: Option<&Content>) -> [String; 3] {
    match content {
        Some(Content::Message(message)) => {
            [or_dash(&message.device_id), output::clean(&message.topic), output::payload(&message.payload)]
        }
        Some(Content::Event(event)) => [or_dash(&event.device_id), "-".to_owned(), events::what(event)],
        None => ["-".to_owned(), "-".to_owned(), String::new()],
    }
}

/// A delivery on a line.
pub(crate) fn line(delivery: &ConsumedMessage) -> String {
    let text = match &delivery.content {
        Some(Content::Message(message)) => messages::line(message),
        Some(Content::Event(event)) => format!("{} {}", or_dash(&event.device_id), events::what(event)),
        None => "-".to_owned(),
    };
    if delivery.attempt > 1 { format!("{text} (attempt {})", delivery.attempt) } else { text }
}

impl GroupsVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.groups();
        match self {
            Self::Create { name, wanted, settings, order, start, validate_only } => {
                let order_key = match order {
                    OrderArgument::Device => OrderKey::Device,
                    OrderArgument::DeviceTopic => OrderKey::DeviceTopic,
                    OrderArgument::None => OrderKey::None,
                };
                let (group, _) = settings.group(name);
                let group = Some(Group { filter: wanted.filter(), order_key: order_key.into(), ..group });
                let request = CreateGroupRequest { group, start, validate_only };
                let response = answer!(client.create_group(context.ask(request)));
                let text = if validate_only { "it can be made" } else { "made" };
                Ok(context.out.line_of(text, &response)?)
            }
            Self::Get { name } => {
                let response = answer!(client.get_group(context.ask(GetGroupRequest { name })));
                Ok(context.out.one(&response.group.unwrap_or_default())?)
            }
            Self::List => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client
                        .list_groups(context.ask(ListGroupsRequest { page_size: 1000, page_token })),
                    |page| {
                        context.out.rows(GROUP, &page.groups, row)?;
                        page.groups.len()
                    }
                );
                Ok(())
            }
            Self::Update { name, settings, etag } => {
                let (group, paths) = settings.group(name);
                update(context, Group { etag, ..group }, paths).await
            }
            Self::Pause { name } => {
                update(context, Group { name, paused: true, ..Group::default() }, vec!["paused".to_owned()])
                    .await
            }
            Self::Resume { name } => {
                update(context, Group { name, paused: false, ..Group::default() }, vec!["paused".to_owned()])
                    .await
            }
            Self::Delete { name, allow_missing } => {
                let response =
                    answer!(client.delete_group(context.ask(DeleteGroupRequest { name, allow_missing })));
                Ok(context.out.line_of("deleted", &response)?)
            }
            Self::Seek { name, to } => {
                let response =
                    answer!(client.seek_group(context.ask(SeekGroupRequest { name, to: Some(to) })));
                Ok(context
                    .out
                    .line_of(&format!("moved; it was at {}", response.previous_token), &response)?)
            }
            Self::Members { name } => {
                let response = answer!(client.list_members(context.ask(ListMembersRequest { name })));
                let columns = &["MEMBER", "STATE", "PARTITIONS", "OUTSTANDING", "LEASE"];
                Ok(context.out.rows(columns, &response.members, |member: &Member| {
                    vec![
                        output::clean(&member.member_id),
                        if member.connected { "connected" } else { "away" }.to_owned(),
                        member.partitions.to_string(),
                        member.outstanding.to_string(),
                        at(member.lease_time.as_ref()),
                    ]
                })?)
            }
            Self::Pending { name, device, limit } => {
                pages!(
                    context,
                    limit,
                    |page_token| client.list_pending(context.ask(ListPendingRequest {
                        name: name.clone(),
                        device_id: device.clone(),
                        page_size:
                            limit.map_or(1000, |limit| i32::try_from(limit.clamp(1, 1000)).unwrap_or(1000)),
                        page_token,
                    })),
                    |page| {
                        let columns = &["DEVICE", "TOPIC", "ATTEMPT", "DEADLINE", "PAYLOAD"];
                        context.out.rows(columns, &page.messages, |message: &ConsumedMessage| {
                            let [device, topic, payload] = content_row(message.content.as_ref());
                            let deadline = at(message.ack_deadline_time.as_ref());
                            vec![device, topic, message.attempt.to_string(), deadline, payload]
                        })?;
                        page.messages.len()
                    }
                );
                Ok(())
            }
            Self::DeadLetters(verb) => verb.run(context).await,
            Self::Fetch { name, member, count, wait } => {
                let request = FetchRequest {
                    group: name,
                    member_id: member,
                    max_messages: count,
                    max_bytes: 0,
                    wait: spans::proto(wait),
                };
                let response = answer!(context.client.consumer().fetch(context.ask(request)));
                for gap in &response.gaps {
                    remark(&messages::missing(gap.count, gap.reason().as_str_name()));
                }
                let columns = &["ACK ID", "DEVICE", "TOPIC", "ATTEMPT", "PAYLOAD"];
                Ok(context.out.rows(columns, &response.messages, |message: &ConsumedMessage| {
                    let [device, topic, payload] = content_row(message.content.as_ref());
                    vec![message.ack_id.clone(), device, topic, message.attempt.to_string(), payload]
                })?)
            }
            Self::Ack { name, ids } => {
                let request = AcknowledgeRequest { group: name, ack_ids: ids };
                let response = answer!(context.client.consumer().acknowledge(context.ask(request)));
                let results: Vec<AckResult> = response.results().collect();
                settled(context, &results, &response)
            }
            Self::Lease { name, ids, time, reason } => {
                let deadline = spans::proto(time);
                let request = ModifyLeaseRequest { group: name, ack_ids: ids, deadline, reason };
                let response = answer!(context.client.consumer().modify_lease(context.ask(request)));
                let results: Vec<AckResult> = response.results().collect();
                settled(context, &results, &AcknowledgeResponse { results: response.results })
            }
        }
    }
}

fn settled(
    context: &mut VerbContext,
    results: &[AckResult],
    response: &AcknowledgeResponse,
) -> Result<(), Failure> {
    let ok = results.iter().filter(|result| **result == AckResult::Ok).count();
    context.out.line_of(&format!("{ok} of {}", results.len()), response)?;
    context.out.flush()?;
    match results.iter().find(|result| **result != AckResult::Ok) {
        None => Ok(()),
        Some(AckResult::Invalid) => {
            Err(Failure::Local("there are ids that are not of this group".to_owned()))
        }
        Some(_) => Err(Failure::Local(
            "some came too late: their messages were delivered again, or will be".to_owned(),
        )),
    }
}

async fn update(context: &mut VerbContext, group: Group, paths: Vec<String>) -> Result<(), Failure> {
    if paths.is_empty() {
        return Err(Failure::Usage(
            "nothing to change was given; 'groups update --help' shows what can be".to_owned(),
        ));
    }
    let request = UpdateGroupRequest { group: Some(group), update_mask: Some(FieldMask { paths }) };
    let response = answer!(context.client.groups().update_group(context.ask(request)));
    Ok(context.out.line_of("changed", &response.group.unwrap_or_default())?)
}

impl DeadLettersVerb {
    async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.groups();
        match self {
            Self::List { group, limit } => {
                pages!(
                    context,
                    limit,
                    |page_token| client.list_dead_letters(context.ask(ListDeadLettersRequest {
                        name: group.clone(),
                        page_size:
                            limit.map_or(1000, |limit| i32::try_from(limit.clamp(1, 1000)).unwrap_or(1000)),
                        page_token,
                    })),
                    |page| {
                        let columns = &["ID", "DEVICE", "TOPIC", "ATTEMPTS", "GIVEN UP", "REASON", "PAYLOAD"];
                        context.out.rows(columns, &page.dead_letters, |letter: &DeadLetter| {
                            let content = letter.content.clone().map(|content| match content {
                                DeadContent::Message(message) => Content::Message(message),
                                DeadContent::Event(event) => Content::Event(event),
                            });
                            let [device, topic, payload] = content_row(content.as_ref());
                            let (attempts, time) = (letter.attempts.to_string(), at(letter.time.as_ref()));
                            vec![
                                letter.id.clone(),
                                device,
                                topic,
                                attempts,
                                time,
                                or_dash(&letter.reason),
                                payload,
                            ]
                        })?;
                        page.dead_letters.len()
                    }
                );
                Ok(())
            }
            Self::Requeue { group, ids } => {
                let request = RequeueDeadLettersRequest { name: group, ids };
                let response = answer!(client.requeue_dead_letters(context.ask(request)));
                Ok(context.out.line_of(&format!("{} put back", response.count), &response)?)
            }
            Self::Purge { group, ids, all: _ } => {
                let request = PurgeDeadLettersRequest { name: group, ids };
                let response = answer!(client.purge_dead_letters(context.ask(request)));
                Ok(context.out.line_of(&format!("{} deleted", response.count), &response)?)
            }
        }
    }
}
