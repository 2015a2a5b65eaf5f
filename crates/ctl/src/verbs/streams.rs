//! Streams of backends that are open.

use clap::ValueEnum;
use mqtt_gateway_client::v1::{ListStreamsRequest, OpenStream, StreamRank};

use super::answer;
use crate::{
    VerbContext,
    failure::Failure,
    output::{at, clean, or_dash},
};

/// Lists streams of backends that are open, the slowest first.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StreamsVerb {
    /// By what
    #[arg(long, value_enum, default_value_t)]
    by: StreamRankArgument,
    /// At most so many
    #[arg(short, long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(i32).range(1..=1000))]
    limit: i32,
    /// Only of this method, as gateway.v1.Subscriber/Subscribe
    #[arg(long, value_name = "METHOD", default_value = "")]
    method: String,
}

/// By what streams are ranked.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum StreamRankArgument {
    /// How long the oldest of what waits has waited
    #[default]
    Time,
    /// Bytes that wait
    Bytes,
    /// Messages lost
    Dropped,
}

impl StreamsVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let rank_by = match self.by {
            StreamRankArgument::Time => StreamRank::WaitingTime,
            StreamRankArgument::Bytes => StreamRank::WaitingBytes,
            StreamRankArgument::Dropped => StreamRank::Dropped,
        };
        let request = ListStreamsRequest { rank_by: rank_by.into(), limit: self.limit, method: self.method };
        let response = answer!(context.client.subscriber().list_streams(context.ask(request)));
        let columns = &[
            "ID", "METHOD", "CALLER", "PEER", "SINCE", "WHAT", "WAITING", "BYTES", "FOR", "SENT", "DROPPED",
        ];
        Ok(context.out.rows(columns, &response.streams, |stream: &OpenStream| {
            let what =
                if stream.group.is_empty() { stream.topic_filters.join(" ") } else { stream.group.clone() };
            vec![
                stream.stream_id.to_string(),
                stream.method.strip_prefix("gateway.v1.").unwrap_or(&stream.method).to_owned(),
                or_dash(&stream.caller),
                or_dash(&stream.peer),
                at(stream.open_time.as_ref()),
                if what.is_empty() { "-".to_owned() } else { clean(&what) },
                stream.waiting.to_string(),
                stream.waiting_bytes.to_string(),
                stream.waiting_time.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
                stream.sent.to_string(),
                stream.dropped.to_string(),
            ]
        })?)
    }
}
