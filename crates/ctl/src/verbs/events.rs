//! Events of devices.

use clap::ValueEnum;
use mqtt_gateway_client::{
    Update,
    v1::{Event, EventKind, WatchEventsRequest, event::Detail, watch_events_item::Item},
};

use super::messages::{lost, missing};
use crate::{
    VerbContext,
    failure::Failure,
    output::{self, at, or_dash, word},
    remark,
};

/// Prints events.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EventsVerb {
    /// Only this kind; may be repeated
    #[arg(short, long, value_enum)]
    kind: Vec<EventArgument>,
    /// Only of this device; may be repeated
    #[arg(short, long, value_name = "ID")]
    device: Vec<String>,
    /// Only of devices whose id begins so; may be repeated
    #[arg(long, value_name = "PREFIX")]
    device_prefix: Vec<String>,
    /// End after so many
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
}

/// Kinds of events.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EventArgument {
    /// A connection was accepted
    Connected,
    /// A connection ended
    Disconnected,
    /// Another connection took the session over
    TakenOver,
    /// A subscription was made
    Subscribed,
    /// A subscription was removed
    Unsubscribed,
    /// The session is over
    SessionEnded,
    /// Messages were dropped
    Dropped,
    /// Authentication failed
    AuthFailed,
}

impl From<EventArgument> for EventKind {
    fn from(kind: EventArgument) -> Self {
        match kind {
            EventArgument::Connected => Self::Connected,
            EventArgument::Disconnected => Self::Disconnected,
            EventArgument::TakenOver => Self::TakenOver,
            EventArgument::Subscribed => Self::Subscribed,
            EventArgument::Unsubscribed => Self::Unsubscribed,
            EventArgument::SessionEnded => Self::SessionEnded,
            EventArgument::Dropped => Self::Dropped,
            EventArgument::AuthFailed => Self::AuthFailed,
        }
    }
}

/// Describes an event in words.
pub(crate) fn what(event: &Event) -> String {
    match &event.detail {
        Some(Detail::Connected(connected)) => {
            let connection = connected.connection.clone().unwrap_or_default();
            let session = if connected.session_present { "its session goes on" } else { "a new session" };
            format!(
                "connected from {} by {}, {session}",
                or_dash(&connection.peer),
                or_dash(&connection.listener)
            )
        }
        Some(Detail::Disconnected(ended)) => format!("disconnected: {}", output::clean(&ended.reason)),
        Some(Detail::TakenOver(_)) => "taken over".to_owned(),
        Some(Detail::Subscribed(made)) => {
            format!("subscribed to {} with QoS {}", output::clean(&made.topic_filter), output::qos(made.qos))
        }
        Some(Detail::Unsubscribed(gone)) => {
            format!("unsubscribed from {}", output::clean(&gone.topic_filter))
        }
        Some(Detail::SessionEnded(ended)) => format!("session ended: {}", output::clean(&ended.reason)),
        Some(Detail::Dropped(dropped)) => {
            format!("{} dropped: {}", dropped.count, word(dropped.reason().as_str_name(), "DROP_REASON_"))
        }
        Some(Detail::AuthFailed(_)) => "authentication failed".to_owned(),
        None => "-".to_owned(),
    }
}

impl EventsVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let request = WatchEventsRequest {
            kinds: self.kind.into_iter().map(|kind| EventKind::from(kind).into()).collect(),
            device_ids: self.device,
            device_id_prefixes: self.device_prefix,
            ..WatchEventsRequest::default()
        };
        let mut stream = context.client.watch_events(request);
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0 {
            match stream.next().await? {
                Update::Item(Item::Event(event)) => {
                    let text =
                        format!("{} {} {}", at(event.time.as_ref()), or_dash(&event.device_id), what(&event));
                    context.out.line_of(&text, &event)?;
                    left -= 1;
                }
                Update::Item(Item::Gap(gap)) => remark(&missing(gap.count, gap.reason().as_str_name())),
                Update::Item(Item::Heartbeat(_)) => {}
                Update::Lost(error) => lost(&error),
                Update::Reconnected { resumed: true } => remark("connected again, nothing is missing"),
                Update::Reconnected { resumed: false } => remark("connected again; events may be missing"),
            }
            if left == 0 || stream.read_ahead() == 0 {
                context.out.flush()?;
            }
        }
        Ok(())
    }
}
