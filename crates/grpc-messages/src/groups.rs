//! Groups: requests to settings, and back. Pure functions; what they refuse names the field.

use std::time::Duration;

use broker::{is_event, is_event_message};
use config::{Groups as Defaults, Limits};
use consumer_groups::{
    DeadLetter, Definition, GroupMessageFilter, GroupStart, GroupStatus, Info, KeptOrder, PendingMessage,
    RetentionPolicy,
};
use gateway_core::{SharedMessage, Timestamp, clock, has_wildcard};
use groups::{AckResult, Delivery, Gap, GapReason, MemberStatus, PendingState};
use prost::Message as _;

use super::{answers, consumed::MessageId, convert};
use crate::status::Error;
use gateway_api::gateway::v1;

/// Longest name.
const MAX_NAME: usize = 63;
/// Longest deadline, pause and delay.
const MAX_WAIT: Duration = Duration::from_hours(1);
/// Shortest deadline of a group.
const MIN_DEADLINE: Duration = Duration::from_secs(1);
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Longest time that messages are kept for: 100 years, in whole days.
const MAX_AGE: Duration = Duration::from_hours(24 * 36_525);
/// Most labels, and bytes of each with its name.
const MAX_LABELS: usize = 64;
const MAX_LABEL: usize = 1_024;
/// Most exclusions with wildcards: each costs a match for every message.
const MAX_WILD_EXCLUSIONS: usize = 100;
/// Longest reason of a nack.
pub const MAX_REASON: usize = 1_024;
/// Longest name of a member.
const MAX_MEMBER: usize = 64;

/// The fields of a group that an update mask may name: those that can be changed, and the filter, which must be the same.
const FIELDS: [&str; 11] = [
    "filter",
    "ack_deadline",
    "max_attempts",
    "min_backoff",
    "max_backoff",
    "retention_age",
    "retention_bytes",
    "replay_age",
    "when_full",
    "paused",
    "labels",
];

/// Validates the name of a group.
pub fn name(field: &str, name: String) -> Result<String, Error> {
    let is_known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_known) {
        return Err(Error::invalid(field, "is not 1 to 63 of lower-case letters, digits, '-', '_' and '.'"));
    }
    Ok(name)
}

/// Validates the name of a member.
pub fn member(field: &str, member: &str) -> Result<(), Error> {
    if member.len() > MAX_MEMBER || member.contains(char::is_control) {
        return Err(Error::invalid(
            field,
            format!("is longer than {MAX_MEMBER} bytes, or has control characters"),
        ));
    }
    Ok(())
}

/// Validates the reason of a nack.
pub fn reason(field: &str, reason: &str) -> Result<(), Error> {
    if reason.len() > MAX_REASON {
        return Err(Error::invalid(field, format!("is longer than {MAX_REASON} bytes")));
    }
    Ok(())
}

/// Validates a span of at most an hour.
pub fn wait(field: &str, proto: Option<prost_types::Duration>) -> Result<Option<Duration>, Error> {
    within(field, proto, Duration::ZERO, MAX_WAIT)
}

fn within(
    field: &str,
    proto: Option<prost_types::Duration>,
    least: Duration,
    most: Duration,
) -> Result<Option<Duration>, Error> {
    let span = convert::span(field, proto)?;
    if span.is_some_and(|span| !(least..=most).contains(&span)) {
        let problem = format!("is not between {} ms and {} s", least.as_millis(), most.as_secs());
        return Err(Error::invalid(field, problem));
    }
    Ok(span)
}

/// Validates what is asked for, with defaults for what is not said.
pub fn definition(group: v1::Group, defaults: &Defaults, limits: &Limits) -> Result<Definition, Error> {
    let min_backoff = within("group.min_backoff", group.min_backoff, Duration::ZERO, MAX_WAIT)?;
    let min_backoff = min_backoff.unwrap_or(MIN_BACKOFF);
    let max_backoff = within("group.max_backoff", group.max_backoff, Duration::ZERO, MAX_WAIT)?;
    if max_backoff.is_some_and(|most| most < min_backoff) {
        return Err(Error::invalid("group.max_backoff", "is less than min_backoff"));
    }
    let too_long =
        |(name, value): (&String, &String)| name.is_empty() || name.len() + value.len() > MAX_LABEL;
    if group.labels.len() > MAX_LABELS || group.labels.iter().any(too_long) {
        let problem =
            format!("are more than {MAX_LABELS}, or one has no name or more than {MAX_LABEL} bytes");
        return Err(Error::invalid("group.labels", problem));
    }
    let age = |field, proto| within(field, proto, Duration::ZERO, MAX_AGE);
    let ack_deadline = within("group.ack_deadline", group.ack_deadline, MIN_DEADLINE, MAX_WAIT)?;
    let retention_age = age("group.retention_age", group.retention_age)?;
    Ok(Definition {
        name: group.name,
        filter: filter(group.filter.unwrap_or_default(), limits)?,
        order: match convert::known(group.order_key, "group.order_key")? {
            v1::OrderKey::Unspecified | v1::OrderKey::Device => KeptOrder::Device,
            v1::OrderKey::DeviceTopic => KeptOrder::DeviceTopic,
            v1::OrderKey::None => KeptOrder::None,
        },
        ack_deadline: millis(ack_deadline.unwrap_or(defaults.ack_deadline.0)),
        max_attempts: group.max_attempts,
        min_backoff: millis(min_backoff),
        max_backoff: millis(max_backoff.unwrap_or_else(|| MAX_BACKOFF.max(min_backoff))),
        retention_age: millis(retention_age.unwrap_or(defaults.retention.0)),
        retention_bytes: group.retention_bytes,
        replay_age: millis(age("group.replay_age", group.replay_age)?.unwrap_or_default()),
        when_full: match convert::known(group.when_full, "group.when_full")? {
            v1::WhenFull::Unspecified | v1::WhenFull::DropOldest => RetentionPolicy::DropOldest,
            v1::WhenFull::Refuse => RetentionPolicy::Refuse,
        },
        paused: group.paused,
        labels: group.labels.into_iter().collect(),
    })
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn filter(filter: v1::Filter, limits: &Limits) -> Result<GroupMessageFilter, Error> {
    let entries = filter.device_ids.len()
        + filter.device_id_prefixes.len()
        + filter.topic_filters.len()
        + filter.exclude_topic_filters.len()
        + filter.exclude_device_ids.len()
        + filter.event_kinds.len();
    convert::check_entries(entries)?;
    convert::check_filters("group.filter.topic_filters", &filter.topic_filters, limits)?;
    convert::check_filters("group.filter.exclude_topic_filters", &filter.exclude_topic_filters, limits)?;
    let wild = filter.exclude_topic_filters.iter().filter(|filter| has_wildcard(filter)).count();
    if wild > MAX_WILD_EXCLUSIONS {
        let problem = format!("has more than {MAX_WILD_EXCLUSIONS} filters with wildcards");
        return Err(Error::invalid("group.filter.exclude_topic_filters", problem));
    }
    convert::check_client_ids("group.filter.device_ids", &filter.device_ids, limits)?;
    convert::check_client_ids("group.filter.device_id_prefixes", &filter.device_id_prefixes, limits)?;
    convert::check_client_ids("group.filter.exclude_device_ids", &filter.exclude_device_ids, limits)?;
    let mut events = Vec::new();
    for kind in &filter.event_kinds {
        match convert::known(*kind, "group.filter.event_kinds")? {
            v1::EventKind::Unspecified => {}
            kind => events.push(event_name(kind).to_owned()),
        }
    }
    let sorted = |mut list: Vec<String>| {
        list.sort_unstable();
        list.dedup();
        list
    };
    let topic_filters = match events.is_empty() {
        true => convert::or_all(filter.topic_filters),
        false => sorted(filter.topic_filters),
    };
    Ok(GroupMessageFilter {
        devices: sorted(filter.device_ids),
        device_prefixes: sorted(filter.device_id_prefixes),
        topics: topic_filters,
        exclude_topics: sorted(filter.exclude_topic_filters),
        exclude_devices: sorted(filter.exclude_device_ids),
        include_backends: filter.include_backends,
        min_qos: match convert::known(filter.min_qos, "group.filter.min_qos")? {
            v1::Qos::Unspecified | v1::Qos::AtMostOnce => 0,
            v1::Qos::AtLeastOnce => 1,
            v1::Qos::ExactlyOnce => 2,
        },
        events: sorted(events),
    })
}

/// The name of a kind of events, as the broker has it.
fn event_name(kind: v1::EventKind) -> &'static str {
    match kind {
        v1::EventKind::Unspecified => "",
        v1::EventKind::Connected => "connected",
        v1::EventKind::Disconnected => "disconnected",
        v1::EventKind::TakenOver => "taken_over",
        v1::EventKind::Subscribed => "subscribed",
        v1::EventKind::Unsubscribed => "unsubscribed",
        v1::EventKind::SessionEnded => "session_ended",
        v1::EventKind::Dropped => "dropped",
        v1::EventKind::AuthFailed => "auth_failed",
    }
}

/// Parsed request to change a group: the fields of its mask and their new values.
pub struct GroupUpdate {
    fields: Vec<&'static str>,
    new: Definition,
}

impl GroupUpdate {
    /// Validates the fields that the mask names; the others are as if they were not there.
    pub fn new(
        group: v1::Group,
        mask: Option<prost_types::FieldMask>,
        defaults: &Defaults,
        limits: &Limits,
    ) -> Result<Self, Error> {
        let mut fields = Vec::new();
        for path in mask.unwrap_or_default().paths {
            let Some(field) = FIELDS.into_iter().find(|field| *field == path) else {
                return Err(Error::invalid("update_mask", format!("{path:?} cannot be changed")));
            };
            fields.push(field);
        }
        if fields.is_empty() {
            return Err(Error::invalid("update_mask", "names no field"));
        }
        let has = |field| fields.contains(&field);
        let only = v1::Group {
            filter: group.filter.filter(|_| has("filter")),
            ack_deadline: group.ack_deadline.filter(|_| has("ack_deadline")),
            max_attempts: group.max_attempts,
            min_backoff: group.min_backoff.filter(|_| has("min_backoff")),
            max_backoff: group.max_backoff.filter(|_| has("max_backoff") && has("min_backoff")),
            retention_age: group.retention_age.filter(|_| has("retention_age")),
            retention_bytes: group.retention_bytes,
            replay_age: group.replay_age.filter(|_| has("replay_age")),
            when_full: if has("when_full") { group.when_full } else { 0 },
            paused: group.paused,
            labels: if has("labels") { group.labels } else { Default::default() },
            ..v1::Group::default()
        };
        let mut new = definition(only, defaults, limits)?;
        if has("max_backoff") && !has("min_backoff") {
            let most = within("group.max_backoff", group.max_backoff, Duration::ZERO, MAX_WAIT)?;
            new.max_backoff = millis(most.unwrap_or(MAX_BACKOFF));
        }
        Ok(Self { fields, new })
    }

    /// Tells whether it pauses the group, or lets it go on, and nothing else.
    pub fn only_pauses(&self) -> bool {
        self.fields.iter().all(|field| *field == "paused")
    }

    /// Changes those fields.
    ///
    /// # Errors
    /// [`Error::FilterImmutable`] if the filter is another one.
    pub fn apply(self, definition: &mut Definition) -> Result<(), Error> {
        let Self { fields, new } = self;
        if fields.contains(&"filter") && definition.filter != new.filter {
            return Err(Error::FilterImmutable);
        }
        for field in fields {
            match field {
                "filter" => {}
                "ack_deadline" => definition.ack_deadline = new.ack_deadline,
                "max_attempts" => definition.max_attempts = new.max_attempts,
                "min_backoff" => definition.min_backoff = new.min_backoff,
                "max_backoff" => definition.max_backoff = new.max_backoff,
                "retention_age" => definition.retention_age = new.retention_age,
                "retention_bytes" => definition.retention_bytes = new.retention_bytes,
                "replay_age" => definition.replay_age = new.replay_age,
                "when_full" => definition.when_full = new.when_full,
                "paused" => definition.paused = new.paused,
                _ => definition.labels = new.labels.clone(),
            }
        }
        definition.max_backoff = definition.max_backoff.max(definition.min_backoff);
        Ok(())
    }
}

/// Validates a place in the log.
pub fn position(field: &str, position: Option<v1::Position>) -> Result<Option<GroupStart>, Error> {
    use v1::position::At;

    let Some(at) = position.and_then(|position| position.at) else { return Ok(None) };
    Ok(Some(match at {
        At::Latest(true) => GroupStart::Latest,
        At::Earliest(true) => GroupStart::Earliest,
        At::Latest(false) | At::Earliest(false) => return Err(Error::invalid(field, "is false")),
        At::Time(time) => match convert::time(field, Some(time))? {
            Some(time) => GroupStart::Time(clock::from_wall(time)),
            None => return Ok(None),
        },
        At::Token(token) => GroupStart::Token(token),
    }))
}

/// The proto form of a group.
pub fn group(info: &Info) -> v1::Group {
    let definition = &info.definition;
    let order = match definition.order {
        KeptOrder::Device => v1::OrderKey::Device,
        KeptOrder::DeviceTopic => v1::OrderKey::DeviceTopic,
        KeptOrder::None => v1::OrderKey::None,
    };
    let when_full = match definition.when_full {
        RetentionPolicy::DropOldest => v1::WhenFull::DropOldest,
        RetentionPolicy::Refuse => v1::WhenFull::Refuse,
    };
    v1::Group {
        name: definition.name.clone(),
        filter: Some(filter_to_proto(&definition.filter)),
        order_key: order.into(),
        ack_deadline: Some(span(definition.ack_deadline)),
        max_attempts: definition.max_attempts,
        min_backoff: Some(span(definition.min_backoff)),
        max_backoff: Some(span(definition.max_backoff)),
        retention_age: Some(span(definition.retention_age)),
        retention_bytes: definition.retention_bytes,
        replay_age: Some(span(definition.replay_age)),
        when_full: when_full.into(),
        paused: definition.paused,
        labels: definition.labels.clone().into_iter().collect(),
        etag: info.etag.clone(),
        create_time: Some(answers::time(clock::to_wall(info.created))),
        status: Some(status(&info.status)),
    }
}

fn filter_to_proto(filter: &GroupMessageFilter) -> v1::Filter {
    let min_qos = [v1::Qos::AtMostOnce, v1::Qos::AtLeastOnce, v1::Qos::ExactlyOnce]
        .get(usize::from(filter.min_qos))
        .copied()
        .unwrap_or_default();
    let kinds = (1..).map_while(|kind| v1::EventKind::try_from(kind).ok());
    let kinds = kinds.filter(|kind| filter.events.iter().any(|name| name == event_name(*kind)));
    v1::Filter {
        device_ids: filter.devices.clone(),
        device_id_prefixes: filter.device_prefixes.clone(),
        topic_filters: filter.topics.clone(),
        exclude_topic_filters: filter.exclude_topics.clone(),
        exclude_device_ids: filter.exclude_devices.clone(),
        include_backends: filter.include_backends,
        min_qos: min_qos.into(),
        event_kinds: kinds.map(Into::into).collect(),
    }
}

/// The proto form of how far a group is.
pub fn status(status: &GroupStatus) -> v1::GroupStatus {
    v1::GroupStatus {
        lag_messages: status.lag_messages,
        lag_bytes: status.lag_bytes,
        oldest_time: status.oldest.map(|at: Timestamp| answers::time(clock::to_wall(at))),
        outstanding: status.outstanding as u64,
        members: u32::try_from(status.members).unwrap_or(u32::MAX),
        dead_letters: status.dead_letters as u64,
        lost: status.lost,
    }
}

fn span(millis: u64) -> prost_types::Duration {
    prost_types::Duration::try_from(Duration::from_millis(millis)).unwrap_or_default()
}

/// The proto form of what became of an acknowledgement.
pub fn ack_result(result: AckResult) -> i32 {
    let result = match result {
        AckResult::Ok => v1::AckResult::Ok,
        AckResult::Fenced => v1::AckResult::Fenced,
        AckResult::Invalid => v1::AckResult::Invalid,
    };
    result.into()
}

/// The proto form of a place where something is missing.
pub fn gap(gap: &Gap) -> v1::Gap {
    let reason = match gap.reason {
        GapReason::Removed => v1::GapReason::Retention,
        GapReason::Damaged => v1::GapReason::Damaged,
    };
    v1::Gap { count: gap.count.unwrap_or_default(), reason: reason.into() }
}

/// The proto form of a delivery to a consumer without a stream.
pub fn delivery(delivery: &Delivery, log: u64) -> v1::ConsumedMessage {
    v1::ConsumedMessage {
        delivery_id: 0,
        ack_id: delivery.ack_id.to_string(),
        attempt: delivery.attempt,
        ack_deadline_time: Some(answers::time(clock::to_wall(delivery.deadline))),
        message_id: MessageId::new(log, delivery.partition, delivery.record.offset).as_str().to_owned(),
        content: Some(match is_event(&delivery.record) {
            true => v1::consumed_message::Content::Event(event(&delivery.record.message)),
            false => v1::consumed_message::Content::Message(received(&delivery.record.message)),
        }),
    }
}

/// The proto form of a message that waits.
pub fn pending(message: &PendingMessage, log: u64) -> v1::ConsumedMessage {
    let PendingMessage { pending, record } = message;
    let deadline = match pending.state {
        PendingState::Outstanding(deadline) => Some(deadline),
        PendingState::Delayed(_) => None,
    };
    v1::ConsumedMessage {
        delivery_id: 0,
        ack_id: String::new(),
        attempt: pending.attempts,
        ack_deadline_time: deadline.map(|at| answers::time(clock::to_wall(at))),
        message_id: MessageId::new(log, pending.partition, pending.offset).as_str().to_owned(),
        content: record.as_ref().map(|record| match is_event(record) {
            true => v1::consumed_message::Content::Event(event(&record.message)),
            false => v1::consumed_message::Content::Message(received(&record.message)),
        }),
    }
}

/// The proto form of a message that was given up.
pub fn dead_letter(letter: &DeadLetter) -> v1::DeadLetter {
    v1::DeadLetter {
        id: letter.id.to_string(),
        attempts: letter.attempts,
        time: Some(answers::time(clock::to_wall(letter.time))),
        reason: letter.reason.clone(),
        content: Some(match is_event_message(&letter.message) {
            true => v1::dead_letter::Content::Event(event(&letter.message)),
            false => v1::dead_letter::Content::Message(received(&letter.message)),
        }),
    }
}

/// Validates the ids of dead letters.
pub fn letter_ids(ids: &[String]) -> Result<Vec<u64>, Error> {
    const MOST: usize = 1_000;
    if ids.len() > MOST {
        return Err(Error::invalid("ids", format!("has more than {MOST} entries")));
    }
    let id = |(place, id): (usize, &String)| {
        id.parse().map_err(|_| Error::invalid(format!("ids[{place}]"), "is not an id of a dead letter"))
    };
    ids.iter().enumerate().map(id).collect()
}

/// The proto form of a member.
pub fn member_to_proto(member: MemberStatus) -> v1::Member {
    v1::Member {
        member_id: member.name.to_string(),
        connected: member.is_connected,
        partitions: u32::try_from(member.partitions).unwrap_or(u32::MAX),
        outstanding: member.outstanding.messages as u64,
        lease_time: member.lease_until.map(|at| answers::time(clock::to_wall(at))),
        oldest_delivery_time: member.oldest.map(|at| answers::time(clock::to_wall(at))),
    }
}

/// An event as it was appended.
fn event(message: &SharedMessage) -> v1::Event {
    v1::Event::decode(message.payload.clone()).unwrap_or_default()
}

/// The proto form of a message as it was published.
fn received(message: &SharedMessage) -> v1::ReceivedMessage {
    let origin = super::encode::origin(message.kind);
    v1::ReceivedMessage {
        device_id: message.client_id.as_ref().map_or_else(String::new, |id| id.as_str().to_owned()),
        topic: message.topic.as_ref().to_owned(),
        payload: message.payload.clone(),
        qos: message.qos as i32 + 1,
        retain: message.retain,
        properties: message.properties.as_deref().map(answers::properties_to_proto),
        receive_time: Some(answers::time(clock::to_wall(message.received))),
        expiry_seconds: message.expires.map(|at| message.received.secs_until(at)),
        origin: origin.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(group: v1::Group) -> Result<Definition, Error> {
        definition(group, &Defaults::default(), &Limits::default())
    }

    fn refused(change: impl FnOnce(&mut v1::Group)) -> String {
        let mut group = v1::Group { filter: Some(v1::Filter::default()), ..Default::default() };
        change(&mut group);
        match convert(group) {
            Err(Error::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    fn seconds(seconds: i64) -> Option<prost_types::Duration> {
        Some(prost_types::Duration { seconds, nanos: 0 })
    }

    #[test]
    fn what_is_not_said_has_defaults_and_what_is_shown_is_taken_back() {
        let plain = convert(v1::Group::default()).unwrap();
        assert_eq!(
            (plain.filter.topics.as_slice(), plain.ack_deadline),
            (["#".to_owned()].as_slice(), 30_000)
        );
        assert_eq!((plain.min_backoff, plain.max_backoff), (100, 30_000));
        let kinds = vec![v1::EventKind::Connected.into(), v1::EventKind::Dropped.into(), 0];
        let filter = v1::Filter { event_kinds: kinds, min_qos: 2, ..Default::default() };
        let events =
            convert(v1::Group { filter: Some(filter), min_backoff: seconds(60), ..Default::default() });
        let events = events.unwrap();
        assert!(events.filter.topics.is_empty(), "events alone");
        assert_eq!((events.filter.min_qos, events.max_backoff), (1, 60_000));
        for definition in [plain, events] {
            let info = Info {
                id: gateway_core::GroupId(1),
                definition: definition.clone(),
                had_other_filters: false,
                predecessors: 0,
                etag: String::new(),
                created: Timestamp(0),
                status: GroupStatus::default(),
            };
            assert_eq!(convert(group(&info)), Ok(definition));
        }
    }

    #[test]
    fn what_is_out_of_bounds_is_named() {
        let long = "x".repeat(2_000);
        assert_eq!(refused(|group| group.ack_deadline = seconds(0)), "group.ack_deadline");
        assert_eq!(refused(|group| group.ack_deadline = seconds(3_601)), "group.ack_deadline");
        assert_eq!(refused(|group| group.retention_age = seconds(-1)), "group.retention_age");
        assert_eq!(refused(|group| group.order_key = 9), "group.order_key");
        assert_eq!(refused(|group| drop(group.labels.insert(String::new(), String::new()))), "group.labels");
        assert_eq!(refused(|group| drop(group.labels.insert("a".into(), long))), "group.labels");
        let backoffs = |group: &mut v1::Group| {
            (group.min_backoff, group.max_backoff) = (seconds(2), seconds(1));
        };
        assert_eq!(refused(backoffs), "group.max_backoff");
        let filter = |change: fn(&mut v1::Filter)| refused(|group| change(group.filter.as_mut().unwrap()));
        assert_eq!(
            filter(|filter| filter.topic_filters = vec!["a/#/b".into()]),
            "group.filter.topic_filters[0]"
        );
        assert_eq!(filter(|filter| filter.event_kinds = vec![99]), "group.filter.event_kinds");
        assert_eq!(filter(|filter| filter.device_ids = vec![String::new(); 1_001]), "request");
        for wrong in ["", "A", "a b", &"x".repeat(64)] {
            assert!(name("name", wrong.to_owned()).is_err(), "{wrong}");
        }
        assert!(name("name", "a-1_b.c".to_owned()).is_ok());
    }

    #[test]
    fn an_update_changes_what_its_mask_names_and_nothing_else() {
        let update = |group: v1::Group, paths: &[&str]| {
            let mask =
                prost_types::FieldMask { paths: paths.iter().map(|path| (*path).to_owned()).collect() };
            GroupUpdate::new(group, Some(mask), &Defaults::default(), &Limits::default())
        };
        let mut changed = convert(v1::Group { max_attempts: 3, ..Default::default() }).unwrap();
        let before = changed.clone();
        // Fields outside the mask may hold nonsense.
        let group =
            v1::Group { paused: true, max_attempts: 9, ack_deadline: seconds(-7), ..Default::default() };
        update(group, &["paused"]).unwrap().apply(&mut changed).unwrap();
        assert_eq!(changed, Definition { paused: true, ..before });
        let slower = v1::Group { min_backoff: seconds(90), ..Default::default() };
        update(slower, &["min_backoff"]).unwrap().apply(&mut changed).unwrap();
        assert_eq!((changed.min_backoff, changed.max_backoff), (90_000, 90_000));
        let with_filter = |topic: &str| {
            let filter = v1::Filter { topic_filters: vec![topic.to_owned()], ..Default::default() };
            v1::Group { filter: Some(filter), ..Default::default() }
        };
        let before = changed.clone();
        update(with_filter("#"), &["filter"]).unwrap().apply(&mut changed).unwrap();
        let other = update(with_filter("a/#"), &["paused", "filter"]).unwrap().apply(&mut changed);
        assert_eq!((other, changed), (Err(Error::FilterImmutable), before));
        for paths in [&[][..], &["order_key"], &["name"], &["filter.topic_filters"]] {
            assert!(update(v1::Group::default(), paths).is_err(), "{paths:?}");
        }
    }
}
