//! Streams that are open, slowest first. There are at most `grpc.max_streams`, so all of them are looked at.

use std::{cmp::Reverse, collections::HashMap, time::Duration};

use access::backends::Roles;
use gateway_core::clock;

use crate::{
    context::Context,
    proto::gateway::v1,
    server::access::Call,
    stream::{OpenStream, StreamBacklog},
};
use grpc_messages::convert::SlowPolicy;
use grpc_messages::{answers, convert, status::Error};

/// Most streams that are shown, and how many if nothing is said.
const MOST: usize = 1_000;
const DEFAULT: usize = 100;

/// Tells whether the caller may know of a stream.
fn is_visible(call: &Call, stream: &OpenStream) -> bool {
    let caller = call.caller();
    let sees_all = Roles::OPERATE.include(caller.grant.role) && call.scope().is_all();
    sees_all || stream.call.caller().is_same_as(caller)
}

/// Ranks the streams that the caller may know of.
pub(super) fn rank(
    context: &Context,
    call: &Call,
    request: &v1::ListStreamsRequest,
) -> Result<v1::ListStreamsResponse, Error> {
    let now = clock::now();
    let by = convert::known(request.rank_by, "rank_by")?;
    let value = |backlog: &StreamBacklog| match by {
        v1::StreamRank::Unspecified | v1::StreamRank::WaitingTime => {
            backlog.oldest.map_or(0, |oldest| now.0.saturating_sub(oldest.0) + 1)
        }
        v1::StreamRank::WaitingBytes => backlog.bytes,
        v1::StreamRank::Dropped => backlog.dropped,
    };
    let most = match usize::try_from(request.limit) {
        Ok(0) => DEFAULT,
        Ok(most @ ..=MOST) => most,
        _ => return Err(Error::invalid("limit", format!("is not between 0 and {MOST}"))),
    };
    let mut streams = context.streams.all();
    streams.retain(|stream| {
        (request.method.is_empty() || name(stream) == request.method) && is_visible(call, stream)
    });
    let mut members = MemberBacklogs { context, known: HashMap::new() };
    let mut ranked: Vec<_> = streams.iter().map(|stream| (members.backlog(stream), stream)).collect();
    ranked.sort_unstable_by_key(|(backlog, stream)| (Reverse(value(backlog)), stream.id));
    let shown = ranked.iter().take(most).map(|(backlog, stream)| {
        let waiting_time = backlog.oldest.map(|oldest| Duration::from_millis(now.0.saturating_sub(oldest.0)));
        to_proto(stream, backlog, waiting_time)
    });
    Ok(v1::ListStreamsResponse { streams: shown.collect(), ranked: ranked.len() as u64 })
}

/// The method of a stream, as it is named to others.
fn name(stream: &OpenStream) -> &'static str {
    stream.call.method().trim_start_matches('/')
}

/// Backlogs of the members of groups; each group is asked once.
struct MemberBacklogs<'a> {
    context: &'a Context,
    known: HashMap<String, HashMap<String, StreamBacklog>>,
}

impl MemberBacklogs<'_> {
    fn backlog(&mut self, stream: &OpenStream) -> StreamBacklog {
        let own = stream.backlog();
        let Some((group, member)) = stream.member.get() else { return own };
        let known = self.known.entry(group.clone()).or_insert_with(|| {
            let groups = self.context.hooks.groups.as_ref().ok();
            let members = groups.and_then(|groups| groups.members(group).ok()).unwrap_or_default();
            let backlog = |member: groups::MemberStatus| {
                let groups::Amount { messages, bytes } = member.outstanding;
                let oldest = member.oldest;
                let backlog = StreamBacklog {
                    waiting: messages as u64,
                    bytes: bytes as u64,
                    oldest,
                    ..StreamBacklog::default()
                };
                (member.name.to_string(), backlog)
            };
            members.into_iter().map(backlog).collect()
        });
        let has = known.get(member).copied().unwrap_or_default();
        StreamBacklog { waiting: has.waiting, bytes: has.bytes, oldest: has.oldest, ..own }
    }
}

fn policy(policy: SlowPolicy) -> v1::SlowPolicy {
    match policy {
        SlowPolicy::DropOldest => v1::SlowPolicy::DropOldest,
        SlowPolicy::DropNewest => v1::SlowPolicy::DropNewest,
        SlowPolicy::Conflate => v1::SlowPolicy::Conflate,
        SlowPolicy::Close => v1::SlowPolicy::Close,
    }
}

fn to_proto(stream: &OpenStream, backlog: &StreamBacklog, waiting_time: Option<Duration>) -> v1::OpenStream {
    let target = stream.target();
    let options = target.as_ref().map(|target| target.options());
    let (filters, filter_count) = stream.filters();
    let (group, member_id) = stream.member.get().cloned().unwrap_or_default();
    v1::OpenStream {
        stream_id: stream.id,
        method: name(stream).to_owned(),
        caller: stream.call.caller().grant.id.clone(),
        peer: stream.call.peer().map(|peer| peer.to_string()).unwrap_or_default(),
        open_time: Some(answers::time(clock::to_wall(stream.since))),
        topic_filters: filters.to_vec(),
        topic_filter_count: u32::try_from(filter_count).unwrap_or(u32::MAX),
        group,
        member_id,
        slow_policy: options.map_or(v1::SlowPolicy::Unspecified, |options| policy(options.policy)).into(),
        buffer_bytes: options.map_or(0, |options| options.buffer as u64),
        waiting: backlog.waiting,
        waiting_bytes: backlog.bytes,
        waiting_time: waiting_time.and_then(|waited| waited.try_into().ok()),
        sent: backlog.sent,
        dropped: backlog.dropped,
        conflated: backlog.conflated,
    }
}
