//! Latest values, their history, and retained messages.

use clap::Subcommand;
use mqtt_gateway_client::{
    Update,
    v1::{
        BatchGetLatestRequest, DeleteLatestRequest, DeleteRetainedRequest, GetLatestRequest,
        GetRetainedRequest, LatestValue, ListHistoryRequest, ListLatestRequest, ListRetainedRequest,
        Properties, RetainedMessage, SetRetainedRequest, WatchLatestRequest, watch_latest_item::Item,
    },
};
use prost_types::Timestamp;

use super::{
    answer,
    messages::{lost, missing},
    pages, pair, qos, user_properties,
};
use crate::{
    VerbContext,
    failure::Failure,
    output::{self, at, or_dash},
    remark, spans,
};

/// Latest values.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum LatestVerb {
    /// Shows the last message of topics
    Get {
        /// Topics
        #[arg(required = true)]
        topics: Vec<String>,
        /// Of this device; without it the newest of all
        #[arg(short, long, value_name = "ID")]
        device: Option<String>,
    },
    /// Lists the last messages by device and topic
    List {
        /// Only topics that match this filter
        filter: Option<String>,
        /// Only of this device; may be repeated
        #[arg(short, long, value_name = "ID")]
        device: Vec<String>,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Shows the values, then every change, until interrupted
    Watch {
        /// Topic filters; none is '#'
        filters: Vec<String>,
        /// Only of this device; may be repeated
        #[arg(short, long, value_name = "ID")]
        device: Vec<String>,
        /// Leave out the values that are there
        #[arg(long)]
        changes_only: bool,
        /// End after so many
        #[arg(short, long, value_name = "N")]
        count: Option<u64>,
    },
    /// Lists what a device has sent on a topic, the newest first; for topics that database.history names
    History {
        /// The device
        device: String,
        /// The topic
        topic: String,
        /// Received since: 2026-01-31T12:00:00Z, or -1h for the last hour
        #[arg(long, value_name = "TIME", value_parser = spans::moment, allow_hyphen_values = true)]
        since: Option<Timestamp>,
        /// Received before
        #[arg(long, value_name = "TIME", value_parser = spans::moment, allow_hyphen_values = true)]
        until: Option<Timestamp>,
        /// The oldest first
        #[arg(long)]
        oldest_first: bool,
        /// At most so many
        #[arg(short, long, value_name = "N", default_value_t = 100)]
        limit: usize,
    },
    /// Deletes latest values of a device
    Delete {
        /// The device
        device: String,
        /// Topic, or filter
        topic: String,
    },
}

const VALUE: &[&str] = &["DEVICE", "TOPIC", "TIME", "PAYLOAD"];

fn row(value: &LatestValue) -> Vec<String> {
    vec![
        output::clean(&value.device_id),
        output::clean(&value.topic),
        at(value.receive_time.as_ref()),
        output::payload(&value.payload),
    ]
}

fn line(value: &LatestValue) -> String {
    let (device, topic) = (or_dash(&value.device_id), output::clean(&value.topic));
    format!("{device} {topic} {}", output::payload(&value.payload))
}

fn page_size(limit: Option<usize>) -> i32 {
    limit.map_or(1000, |limit| i32::try_from(limit.clamp(1, 1000)).unwrap_or(1000))
}

impl LatestVerb {
    pub(crate) fn streams(&self) -> bool {
        matches!(self, Self::Watch { .. })
    }

    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        match self {
            Self::Get { topics, device } if topics.len() == 1 => {
                let topic = topics.into_iter().next().unwrap_or_default();
                let request = GetLatestRequest { topic, device_id: device };
                let value = answer!(context.client.state().get_latest(context.ask(request)))
                    .value
                    .unwrap_or_default();
                context.out.line_of(&line(&value), &value)?;
                Ok(())
            }
            Self::Get { topics, device } => {
                let mut requests: Vec<GetLatestRequest> = topics
                    .into_iter()
                    .map(|topic| GetLatestRequest { topic, device_id: device.clone() })
                    .collect();
                let mut absent = 0;
                while !requests.is_empty() {
                    let batch: Vec<GetLatestRequest> = requests.iter().take(1000).cloned().collect();
                    let asked = batch.len();
                    let request = BatchGetLatestRequest { requests: batch };
                    let response = answer!(context.client.state().batch_get_latest(context.ask(request)));
                    for entry in &response.entries {
                        match &entry.value {
                            Some(value) => context.out.line_of(&line(value), value)?,
                            None => absent += 1,
                        }
                    }
                    let answered =
                        if response.next_index == 0 { asked } else { response.next_index as usize };
                    requests.drain(..answered.min(asked));
                }
                context.out.flush()?;
                match absent {
                    0 => Ok(()),
                    absent => Err(Failure::Absent(format!("{absent} of the topics have no value"))),
                }
            }
            Self::List { filter, device, limit } => {
                let topic_filter = filter.unwrap_or_default();
                pages!(
                    context,
                    limit,
                    |page_token| context.client.state().list_latest(context.ask(ListLatestRequest {
                        device_ids: device.clone(),
                        topic_filter: topic_filter.clone(),
                        page_size: page_size(limit),
                        page_token,
                    })),
                    |page| {
                        context.out.rows(VALUE, &page.values, row)?;
                        page.values.len()
                    }
                );
                Ok(())
            }
            Self::Watch { filters, device, changes_only, count } => {
                let request = WatchLatestRequest {
                    device_ids: device,
                    topic_filters: filters,
                    changes_only,
                    ..WatchLatestRequest::default()
                };
                watch(context, request, count.unwrap_or(u64::MAX)).await
            }
            Self::History { device, topic, since, until, oldest_first, limit } => {
                let limit = Some(limit);
                pages!(
                    context,
                    limit,
                    |page_token| context.client.state().list_history(context.ask(ListHistoryRequest {
                        device_id: device.clone(),
                        topic: topic.clone(),
                        start_time: since,
                        end_time: until,
                        oldest_first,
                        page_size: page_size(limit),
                        page_token,
                    })),
                    |page| {
                        context.out.rows(VALUE, &page.values, row)?;
                        page.values.len()
                    }
                );
                Ok(())
            }
            Self::Delete { device, topic } => {
                let (topic, topic_filter) = topic_or_filter(topic);
                let request = DeleteLatestRequest { device_id: device, topic, topic_filter };
                let response = answer!(context.client.state().delete_latest(context.ask(request)));
                Ok(context.out.line_of(&format!("{} deleted", response.count), &response)?)
            }
        }
    }
}

/// A filter is what has wildcards.
fn topic_or_filter(text: String) -> (String, String) {
    if text.contains(['+', '#']) { (String::new(), text) } else { (text, String::new()) }
}

async fn watch(context: &mut VerbContext, request: WatchLatestRequest, mut left: u64) -> Result<(), Failure> {
    let mut stream = context.client.watch_latest(request);
    while left > 0 {
        match stream.next().await? {
            Update::Item(Item::Value(value)) => {
                context.out.line_of(&line(&value), &value)?;
                left -= 1;
            }
            Update::Item(Item::Removed(value)) => {
                let text =
                    format!("{} {} (deleted)", output::clean(&value.device_id), output::clean(&value.topic));
                context.out.line_of(&text, &value)?;
            }
            Update::Item(Item::Gap(gap)) => remark(&missing(gap.count, gap.reason().as_str_name())),
            Update::Item(Item::Heartbeat(_) | Item::SnapshotEnd(_)) => {}
            Update::Lost(error) => lost(&error),
            Update::Reconnected { .. } => remark("connected again; the current values follow"),
        }
        if left == 0 || stream.read_ahead() == 0 {
            context.out.flush()?;
        }
    }
    Ok(())
}

/// Retained messages.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum RetainedVerb {
    /// Shows the retained message of a topic
    Get {
        /// The topic
        topic: String,
    },
    /// Lists retained messages by topic
    List {
        /// Only topics that match this filter
        filter: Option<String>,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Sets the retained message of a topic without sending it to anyone
    Set {
        /// The topic
        topic: String,
        /// Payload, not empty
        payload: String,
        /// Quality of service: 0, 1 or 2
        #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(..=2))]
        qos: u8,
        /// Seconds until it expires
        #[arg(long, value_name = "SECONDS")]
        expiry: Option<u32>,
        /// MIME type of the payload
        #[arg(long, value_name = "TYPE")]
        content_type: Option<String>,
        /// User property; may be repeated
        #[arg(short, long = "property", value_name = "NAME=VALUE", value_parser = pair)]
        properties: Vec<(String, String)>,
    },
    /// Deletes retained messages
    Delete {
        /// Topic, or filter
        topic: String,
    },
}

impl RetainedVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        match self {
            Self::Get { topic } => {
                let request = context.ask(GetRetainedRequest { topic });
                let message =
                    answer!(context.client.state().get_retained(request)).message.unwrap_or_default();
                Ok(context.out.one(&message)?)
            }
            Self::List { filter, limit } => {
                let topic_filter = filter.unwrap_or_default();
                pages!(
                    context,
                    limit,
                    |page_token| context.client.state().list_retained(context.ask(ListRetainedRequest {
                        topic_filter: topic_filter.clone(),
                        page_size: page_size(limit),
                        page_token,
                    })),
                    |page| {
                        let columns = &["TOPIC", "DEVICE", "QOS", "TIME", "EXPIRES", "PAYLOAD"];
                        context.out.rows(columns, &page.messages, |message: &RetainedMessage| {
                            vec![
                                output::clean(&message.topic),
                                or_dash(&message.device_id),
                                output::qos(message.qos),
                                at(message.receive_time.as_ref()),
                                message
                                    .expiry_seconds
                                    .map_or_else(|| "never".to_owned(), |left| format!("{left}s")),
                                output::payload(&message.payload),
                            ]
                        })?;
                        page.messages.len()
                    }
                );
                Ok(())
            }
            Self::Set { topic, payload, qos: level, expiry, content_type, properties } => {
                let properties = Properties {
                    content_type,
                    user_properties: user_properties(&properties),
                    ..Properties::default()
                };
                let request = SetRetainedRequest {
                    topic,
                    payload: payload.into(),
                    qos: qos(level),
                    properties: (properties != Properties::default()).then_some(properties),
                    expiry_seconds: expiry,
                };
                let response = answer!(context.client.state().set_retained(context.ask(request)));
                let text = if response.replaced { "set, in place of another" } else { "set" };
                Ok(context.out.line_of(text, &response)?)
            }
            Self::Delete { topic } => {
                let (topic, topic_filter) = topic_or_filter(topic);
                let request = context.ask(DeleteRetainedRequest { topic, topic_filter });
                let response = answer!(context.client.state().delete_retained(request));
                Ok(context.out.line_of(&format!("{} deleted", response.count), &response)?)
            }
        }
    }
}
