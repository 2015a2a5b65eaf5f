//! Requests to the gateway's types: pure functions. An accepted value is valid for the rest of the gateway; a refusal names
//! the field. The way back is `answers`.

use std::{sync::Arc, time::Duration};

use broker::Selector;
use bytes::Bytes;
use config::Limits;
use gateway_core::{
    Message, Origin, Properties, QoS, Timestamp, TopicError, TopicFilter, TopicName, has_wildcard,
    level_count, parse_shared,
};

use super::answers;
use crate::{status::Error, wait::Wait};
use gateway_api::gateway::v1;

/// Most entries over all filter fields of a request.
pub const MAX_FILTERS: usize = 1_000;
/// Most exclusions with wildcards: each costs a match for every message.
const MAX_WILD_EXCLUSIONS: usize = 100;
/// Most items in a batch.
pub const MAX_BATCH: usize = 10_000;
/// Most bytes in a batch of a stream.
pub const MAX_STREAM_BATCH: usize = 64 << 10;
/// Least buffer of a stream, if the gateway's own limit is not below.
const MIN_BUFFER: usize = 4 << 10;
const MAX_LINGER: Duration = Duration::from_secs(10);
const MIN_HEARTBEAT: Duration = Duration::from_millis(100);
const MAX_PAGE: usize = 1_000;
const DEFAULT_PAGE: usize = 100;
/// The last second of the year 9999, where google.protobuf.Timestamp ends.
const MAX_SECONDS: u64 = 253_402_300_799;
/// Longest MQTT string or binary property.
const MAX_STRING: usize = 65_535;

/// Policy for a full buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlowPolicy {
    DropOldest,
    DropNewest,
    Conflate,
    Close,
}

/// Time for which a batch that is not full waits for more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Linger {
    /// Not at all after a silence of a few milliseconds, else until that long after the batch before: a lone message goes at
    /// once, and a busy stream costs at most 200 wake-ups a second.
    #[default]
    Adaptive,
    /// This long from when the reader first sees that something waits.
    Fixed(Duration),
}

/// A publish that passed validation.
#[derive(Debug)]
pub struct Publication {
    pub device: Option<String>,
    pub topic: String,
    pub payload: Bytes,
    pub qos: QoS,
    pub retain: bool,
    pub properties: Option<Arc<Properties>>,
    pub expiry: Option<u32>,
    pub wait: Wait,
    pub offline: broker::Offline,
    /// By the wall clock.
    pub deliver_at: Option<Timestamp>,
}

impl Publication {
    /// The message to route.
    pub fn message(&self, now: Timestamp) -> Message<'_> {
        let mut message = Message::new(&self.topic, &self.payload, now, Origin::BACKEND);
        message.qos = self.qos;
        message.retain = self.retain;
        message.properties = self.properties.as_ref();
        message.expires = self.expiry.map(|seconds| now.plus_secs(seconds));
        message.direct = self.device.is_some();
        message
    }
}

/// Validates one publish.
pub fn publication(request: v1::PublishRequest, limits: &Limits) -> Result<Publication, Error> {
    let wait = match known(request.wait, "wait")? {
        v1::Wait::Unspecified | v1::Wait::Accepted => Wait::Accepted,
        v1::Wait::Durable => Wait::Durable,
        v1::Wait::Sent => Wait::Sent,
        v1::Wait::Acked => Wait::Acked,
    };
    let offline = match known(request.offline, "offline")? {
        v1::Offline::Unspecified | v1::Offline::Queue => broker::Offline::Queue,
        v1::Offline::Fail => broker::Offline::Fail,
        v1::Offline::Drop => broker::Offline::Drop,
    };
    match &request.device_id {
        Some(device) => check_client_id("device_id", device, limits)?,
        None if offline != broker::Offline::Queue => {
            return Err(Error::invalid("offline", "needs device_id"));
        }
        None => {}
    }
    if request.retain {
        if request.device_id.is_some() {
            return Err(Error::invalid("retain", "cannot be combined with device_id"));
        }
        if !limits.retain_available {
            return Err(Error::RetainUnavailable);
        }
    }
    check_topic("topic", &request.topic, limits)?;
    let qos = qos("qos", request.qos, limits)?;
    let properties = request.properties.map(|p| properties("properties", p)).transpose()?.flatten();
    check_payload("payload", &request.payload, properties.as_deref(), limits)?;
    check_expiry(request.expiry_seconds)?;
    if wait == Wait::Durable && qos == QoS::AtMostOnce {
        return Err(Error::invalid("wait", "DURABLE needs qos 1 or 2"));
    }
    let deliver_at = time("deliver_at", request.deliver_at)?;
    if deliver_at.is_some() && matches!(wait, Wait::Sent | Wait::Acked) {
        return Err(Error::invalid("wait", "cannot be longer than DURABLE with deliver_at"));
    }
    Ok(Publication {
        device: request.device_id,
        topic: request.topic,
        payload: request.payload,
        qos,
        retain: request.retain,
        properties,
        expiry: request.expiry_seconds,
        wait,
        offline,
        deliver_at,
    })
}

/// The request that [`publication`] takes for this one, but for what is waited for and when it is to be delivered.
pub fn request(publication: &Publication) -> v1::PublishRequest {
    let offline = match publication.offline {
        broker::Offline::Queue => v1::Offline::Queue,
        broker::Offline::Fail => v1::Offline::Fail,
        broker::Offline::Drop => v1::Offline::Drop,
    };
    v1::PublishRequest {
        device_id: publication.device.clone(),
        topic: publication.topic.clone(),
        payload: publication.payload.clone(),
        qos: answers::qos_to_proto(publication.qos),
        retain: publication.retain,
        properties: publication.properties.as_deref().map(answers::properties_to_proto),
        expiry_seconds: publication.expiry,
        offline: offline.into(),
        ..v1::PublishRequest::default()
    }
}

/// Validates a retained message.
pub fn retained(request: v1::SetRetainedRequest, limits: &Limits) -> Result<Publication, Error> {
    if !limits.retain_available {
        return Err(Error::RetainUnavailable);
    }
    if request.payload.is_empty() {
        return Err(Error::invalid("payload", "is empty; use DeleteRetained to delete"));
    }
    publication(
        v1::PublishRequest {
            topic: request.topic,
            payload: request.payload,
            qos: request.qos,
            retain: true,
            properties: request.properties,
            expiry_seconds: request.expiry_seconds,
            ..v1::PublishRequest::default()
        },
        limits,
    )
}

/// Validates MQTT 5 properties; `None` if nothing is set.
pub fn properties(field: &str, proto: v1::Properties) -> Result<Option<Arc<Properties>>, Error> {
    let payload_format = match known(proto.payload_format, "properties.payload_format")? {
        v1::PayloadFormat::Unspecified => None,
        v1::PayloadFormat::Bytes => Some(0),
        v1::PayloadFormat::Text => Some(1),
    };
    if let Some(text) = &proto.content_type {
        check_string(|| format!("{field}.content_type"), text)?;
    }
    if let Some(topic) = &proto.response_topic {
        TopicName::check(topic).map_err(|e| topic_error(format!("{field}.response_topic"), e))?;
    }
    if proto.correlation_data.as_ref().is_some_and(|data| data.len() > MAX_STRING) {
        return Err(Error::invalid(format!("{field}.correlation_data"), "is longer than 65535 bytes"));
    }
    let mut user = Vec::with_capacity(proto.user_properties.len());
    for (place, property) in proto.user_properties.into_iter().enumerate() {
        check_string(|| format!("{field}.user_properties[{place}].name"), &property.name)?;
        check_string(|| format!("{field}.user_properties[{place}].value"), &property.value)?;
        user.push((property.name, property.value));
    }
    let properties = Properties {
        payload_format,
        content_type: proto.content_type,
        response_topic: proto.response_topic,
        // Copied: a slice would keep the whole request in memory with a queued message.
        correlation_data: proto.correlation_data.map(|data| Bytes::copy_from_slice(&data)),
        user,
    };
    Ok((!properties.is_empty()).then(|| Arc::new(properties)))
}

/// A subscription that passed validation.
#[derive(Debug)]
pub struct SubscriptionRequest {
    pub selector: Selector,
    pub filters: Vec<String>,
    pub policy: SlowPolicy,
    pub buffer: usize,
    pub batch: usize,
    pub linger: Linger,
    pub heartbeat: Option<Duration>,
}

/// Validates a subscription.
pub fn subscribe(request: v1::SubscribeRequest, limits: &Limits) -> Result<SubscriptionRequest, Error> {
    let entries = request.device_ids.len()
        + request.device_id_prefixes.len()
        + request.topic_filters.len()
        + request.exclude_topic_filters.len()
        + request.exclude_device_ids.len();
    check_entries(entries)?;
    check_filters("topic_filters", &request.topic_filters, limits)?;
    check_filters("exclude_topic_filters", &request.exclude_topic_filters, limits)?;
    let wild = request.exclude_topic_filters.iter().filter(|filter| has_wildcard(filter)).count();
    if wild > MAX_WILD_EXCLUSIONS {
        let problem = format!("has more than {MAX_WILD_EXCLUSIONS} filters with wildcards");
        return Err(Error::invalid("exclude_topic_filters", problem));
    }
    check_client_ids("device_ids", &request.device_ids, limits)?;
    check_client_ids("device_id_prefixes", &request.device_id_prefixes, limits)?;
    check_client_ids("exclude_device_ids", &request.exclude_device_ids, limits)?;
    let policy = match known(request.slow_policy, "slow_policy")? {
        v1::SlowPolicy::Unspecified | v1::SlowPolicy::DropOldest => SlowPolicy::DropOldest,
        v1::SlowPolicy::DropNewest => SlowPolicy::DropNewest,
        v1::SlowPolicy::Conflate => SlowPolicy::Conflate,
        v1::SlowPolicy::Close => SlowPolicy::Close,
    };
    let selector = Selector::new(request.devices_only)
        .devices(request.device_ids, request.device_id_prefixes)
        .exclude(request.exclude_device_ids, request.exclude_topic_filters);
    let buffer = bytes_within("buffer_bytes", request.buffer_bytes, MIN_BUFFER, limits.stream_buffer.0)?;
    let batch =
        bytes_within("max_batch_bytes", request.max_batch_bytes, 1, MAX_STREAM_BATCH.min(buffer / 4))?;
    Ok(SubscriptionRequest {
        selector,
        filters: or_all(request.topic_filters),
        policy,
        buffer,
        batch,
        linger: linger(request.linger)?,
        heartbeat: heartbeat("heartbeat_interval", request.heartbeat_interval)?,
    })
}

/// A number of bytes in a range; 0 is the most.
fn bytes_within(field: &str, value: u32, least: usize, most: usize) -> Result<usize, Error> {
    match value as usize {
        0 => Ok(most),
        value if (least..=most).contains(&value) => Ok(value),
        _ => Err(Error::invalid(field, format!("is not 0 and not between {least} and {most}"))),
    }
}

/// The filters, or all topics if there are none.
pub fn or_all(mut filters: Vec<String>) -> Vec<String> {
    if filters.is_empty() {
        filters.push("#".to_owned());
    }
    filters.sort_unstable();
    filters.dedup();
    filters
}

/// Validates `linger`.
pub fn linger(proto: Option<prost_types::Duration>) -> Result<Linger, Error> {
    match span("linger", proto)? {
        None => Ok(Linger::Adaptive),
        Some(span) if span <= MAX_LINGER => Ok(Linger::Fixed(span)),
        Some(_) => Err(Error::invalid("linger", "is more than 10 s")),
    }
}

/// Validates `heartbeat_interval`.
pub fn heartbeat(field: &str, proto: Option<prost_types::Duration>) -> Result<Option<Duration>, Error> {
    let span = span(field, proto)?;
    if span.is_some_and(|span| span < MIN_HEARTBEAT) {
        return Err(Error::invalid(field, "is less than 100 ms"));
    }
    Ok(span)
}

/// A span that is not negative.
pub fn span(field: &str, proto: Option<prost_types::Duration>) -> Result<Option<Duration>, Error> {
    let span = proto.map(Duration::try_from).transpose();
    span.map_err(|_| Error::invalid(field, "is negative, or not a duration"))
}

/// A point in time, whole milliseconds since the Unix epoch.
pub fn time(field: &str, proto: Option<prost_types::Timestamp>) -> Result<Option<Timestamp>, Error> {
    let Some(proto) = proto else { return Ok(None) };
    let nanos = u32::try_from(proto.nanos).ok().filter(|nanos| *nanos < 1_000_000_000);
    let seconds = u64::try_from(proto.seconds).ok().filter(|seconds| *seconds <= MAX_SECONDS);
    match (seconds, nanos) {
        (Some(seconds), Some(nanos)) => Ok(Some(Timestamp(seconds * 1_000 + u64::from(nanos / 1_000_000)))),
        _ => Err(Error::invalid(field, "is not a time between 1970 and 9999")),
    }
}

/// Validates the number of filter entries of a request.
pub fn check_entries(entries: usize) -> Result<(), Error> {
    if entries > MAX_FILTERS {
        return Err(Error::invalid("request", format!("has more than {MAX_FILTERS} filter entries")));
    }
    Ok(())
}

/// Validates a view; unspecified is `default`.
pub fn view(view: i32, default: v1::DeviceView) -> Result<v1::DeviceView, Error> {
    let view = known(view, "view")?;
    Ok(if view == v1::DeviceView::Unspecified { default } else { view })
}

/// A batch has no more messages than a call may have.
pub fn check_batch(requests: &[v1::PublishRequest]) -> Result<(), Error> {
    if requests.len() > MAX_BATCH {
        return Err(Error::invalid("requests", format!("has more than {MAX_BATCH} items")));
    }
    Ok(())
}

/// Messages of a publish stream that may wait for their results, if the caller does not say.
pub const DEFAULT_WINDOW: usize = 1_000;
/// Most messages of a publish stream that may wait for their results.
pub const MAX_WINDOW: usize = 10_000;

/// The window of a publish stream, and whether only failures are spelled out.
pub fn publish_options(options: v1::PublishStreamOptions) -> Result<(usize, bool), Error> {
    let window = match options.window as usize {
        0 => DEFAULT_WINDOW,
        window if window <= MAX_WINDOW => window,
        _ => return Err(Error::invalid("options.window", format!("is more than {MAX_WINDOW}"))),
    };
    let detail: v1::ResultDetail = known(options.detail, "options.detail")?;
    Ok((window, detail == v1::ResultDetail::Failures))
}

/// Tells whether a result is spelled out also where only failures are.
pub fn is_failure(result: &Result<v1::PublishResponse, impl Sized>) -> bool {
    let failed = |response: &v1::PublishResponse| {
        matches!(response.outcome(), v1::Outcome::Dropped | v1::Outcome::Rejected)
    };
    result.as_ref().map_or(true, failed)
}

/// Validates a page size; 0 is the default.
pub fn page_size(size: i32) -> Result<usize, Error> {
    match usize::try_from(size) {
        Ok(0) => Ok(DEFAULT_PAGE),
        Ok(size @ ..=MAX_PAGE) => Ok(size),
        _ => Err(Error::invalid("page_size", format!("is not between 0 and {MAX_PAGE}"))),
    }
}

/// Validates MQTT filters, none of them shared.
pub fn check_filters(field: &str, filters: &[String], limits: &Limits) -> Result<(), Error> {
    for (place, filter) in filters.iter().enumerate() {
        let name = || format!("{field}[{place}]");
        check_filter(name, filter, limits)?;
    }
    Ok(())
}

/// Validates one MQTT filter that is not shared.
pub fn check_filter(field: impl Fn() -> String, filter: &str, limits: &Limits) -> Result<(), Error> {
    TopicFilter::check(filter).map_err(|e| topic_error(field(), e))?;
    match parse_shared(filter) {
        Ok(None) => check_topic_limits(field, filter, limits),
        _ => Err(Error::invalid(field(), "is a shared subscription")),
    }
}

/// Validates a topic to publish to.
pub fn check_topic(field: &str, topic: &str, limits: &Limits) -> Result<(), Error> {
    check_topic_name(field, topic, limits)?;
    if topic == "$SYS" || topic.starts_with("$SYS/") {
        return Err(Error::invalid(field, "is reserved for the gateway"));
    }
    Ok(())
}

/// Validates a topic name.
pub fn check_topic_name(field: &str, topic: &str, limits: &Limits) -> Result<(), Error> {
    TopicName::check(topic).map_err(|e| topic_error(field, e))?;
    check_topic_limits(|| field.to_owned(), topic, limits)
}

fn check_topic_limits(field: impl Fn() -> String, text: &str, limits: &Limits) -> Result<(), Error> {
    if text.len() > limits.max_topic_bytes {
        return Err(Error::invalid(field(), format!("is longer than {} bytes", limits.max_topic_bytes)));
    }
    if level_count(text) > limits.max_topic_levels {
        return Err(Error::invalid(field(), format!("has more than {} levels", limits.max_topic_levels)));
    }
    Ok(())
}

/// Validates a client id.
pub fn check_client_id(field: &str, id: &str, limits: &Limits) -> Result<(), Error> {
    if id.is_empty() {
        return Err(Error::invalid(field, "is empty"));
    }
    if id.len() > limits.max_client_id_bytes {
        return Err(Error::invalid(field, format!("is longer than {} bytes", limits.max_client_id_bytes)));
    }
    if id.contains('\0') {
        return Err(Error::invalid(field, "contains a NUL character"));
    }
    Ok(())
}

/// Validates client ids or their prefixes.
pub fn check_client_ids(field: &str, ids: &[String], limits: &Limits) -> Result<(), Error> {
    ids.iter().enumerate().try_for_each(|(place, id)| {
        check_client_id(field, id, limits).map_err(|error| match error {
            Error::Invalid { field, problem } => Error::invalid(format!("{field}[{place}]"), problem),
            other => other,
        })
    })
}

/// Validates payload and properties of a message, which are together in a packet.
pub(crate) fn check_payload(
    field: &str,
    payload: &[u8],
    properties: Option<&Properties>,
    limits: &Limits,
) -> Result<(), Error> {
    if payload.len() > limits.max_packet_size.0 {
        return Err(Error::invalid(field, format!("is longer than {} bytes", limits.max_packet_size.0)));
    }
    if let Some(properties) = properties {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let user: usize = properties.user.iter().map(|(name, value)| name.len() + value.len() + 5).sum();
        let data = properties.correlation_data.as_ref().map_or(0, Bytes::len);
        let size = text(&properties.content_type) + text(&properties.response_topic) + data + user;
        if payload.len() + size > limits.max_packet_size.0 {
            let problem = format!("make the message longer than {} bytes", limits.max_packet_size.0);
            return Err(Error::invalid("properties", problem));
        }
        let claims_text = limits.validate_payload_format && properties.payload_format == Some(1);
        if claims_text && std::str::from_utf8(payload).is_err() {
            return Err(Error::invalid(field, "is not UTF-8 as properties.payload_format says"));
        }
    }
    Ok(())
}

fn check_expiry(seconds: Option<u32>) -> Result<(), Error> {
    if seconds == Some(0) { Err(Error::invalid("expiry_seconds", "is 0")) } else { Ok(()) }
}

fn check_string(field: impl Fn() -> String, text: &str) -> Result<(), Error> {
    if text.len() > MAX_STRING {
        return Err(Error::invalid(field(), "is longer than 65535 bytes"));
    }
    if text.contains('\0') {
        return Err(Error::invalid(field(), "contains a NUL character"));
    }
    Ok(())
}

fn topic_error(field: impl Into<String>, error: TopicError) -> Error {
    Error::invalid(field, error.to_string())
}

/// A known value of an enum field.
pub fn known<E: TryFrom<i32>>(value: i32, field: &str) -> Result<E, Error> {
    E::try_from(value).map_err(|_| Error::invalid(field, format!("{value} is not a known value")))
}

/// A QoS of which less may be granted; QoS 1 if none is said.
pub fn wanted_qos(value: i32) -> Result<QoS, Error> {
    Ok(match known(value, "qos")? {
        v1::Qos::AtMostOnce => QoS::AtMostOnce,
        v1::Qos::Unspecified | v1::Qos::AtLeastOnce => QoS::AtLeastOnce,
        v1::Qos::ExactlyOnce => QoS::ExactlyOnce,
    })
}

/// Validates a QoS; unspecified is 1, if the gateway has it.
pub fn qos(field: &str, value: i32, limits: &Limits) -> Result<QoS, Error> {
    let qos = match known(value, field)? {
        v1::Qos::Unspecified => QoS::from_bits(limits.max_qos.min(1)).unwrap_or_default(),
        v1::Qos::AtMostOnce => QoS::AtMostOnce,
        v1::Qos::AtLeastOnce => QoS::AtLeastOnce,
        v1::Qos::ExactlyOnce => QoS::ExactlyOnce,
    };
    if qos as u8 > limits.max_qos {
        return Err(Error::invalid(field, format!("is above the gateway's maximum {}", limits.max_qos)));
    }
    Ok(qos)
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
