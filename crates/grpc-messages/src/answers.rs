//! The gateway's types to proto messages: pure functions, no refusals.

use broker::{ConnectionInfo, DeviceInfo, Event, EventKind, Published};
use gateway_core::{DropReason, Properties, Protocol, QoS, ReceiptState, SharedMessage, Timestamp, clock};
use store::LatestValue;

use super::wait::Wait;
use gateway_api::gateway::v1;

/// The proto form of MQTT 5 properties.
pub(crate) fn properties_to_proto(properties: &Properties) -> v1::Properties {
    let format = match properties.payload_format {
        None => v1::PayloadFormat::Unspecified,
        Some(1) => v1::PayloadFormat::Text,
        Some(_) => v1::PayloadFormat::Bytes,
    };
    v1::Properties {
        payload_format: format.into(),
        content_type: properties.content_type.clone(),
        response_topic: properties.response_topic.clone(),
        correlation_data: properties.correlation_data.clone(),
        user_properties: properties
            .user
            .iter()
            .map(|(name, value)| v1::UserProperty { name: name.clone(), value: value.clone() })
            .collect(),
    }
}

/// The proto form of a point in time as the wall clock shows it.
pub fn time(at: Timestamp) -> prost_types::Timestamp {
    let seconds = i64::try_from(at.0 / 1_000).unwrap_or(i64::MAX);
    let nanos = i32::try_from(at.0 % 1_000 * 1_000_000).unwrap_or_default();
    prost_types::Timestamp { seconds, nanos }
}

pub fn qos_to_proto(qos: QoS) -> i32 {
    let qos = match qos {
        QoS::AtMostOnce => v1::Qos::AtMostOnce,
        QoS::AtLeastOnce => v1::Qos::AtLeastOnce,
        QoS::ExactlyOnce => v1::Qos::ExactlyOnce,
    };
    qos.into()
}

fn drop_reason(reason: Option<DropReason>) -> i32 {
    let reason = match reason {
        None => v1::DropReason::Unspecified,
        Some(DropReason::Offline) => v1::DropReason::Offline,
        Some(DropReason::QueueFull) => v1::DropReason::QueueFull,
        Some(DropReason::Memory) => v1::DropReason::Memory,
        Some(DropReason::Expired) => v1::DropReason::Expired,
        Some(DropReason::TooLarge) => v1::DropReason::TooLarge,
        Some(DropReason::ConnectionLost) => v1::DropReason::ConnectionLost,
        Some(DropReason::SessionEnded) => v1::DropReason::SessionEnded,
        Some(DropReason::NotAuthorized) => v1::DropReason::NotAuthorized,
        Some(DropReason::Purged) => v1::DropReason::Purged,
    };
    reason.into()
}

/// Converts the fate of a message: `published` is the routing's view, `waited` the later state of its receipt.
pub fn publish_response(
    published: Published,
    wait: Wait,
    waited: Option<ReceiptState>,
) -> v1::PublishResponse {
    let lost = waited.map_or(0, |state: ReceiptState| state.dropped.min(published.sent));
    let sent = published.sent - lost;
    let waited = waited.unwrap_or_default();
    let rejected = if wait == Wait::Acked { waited.rejected } else { 0 };
    let outcome = match published {
        _ if rejected > 0 => v1::Outcome::Rejected,
        _ if sent > 0 && wait == Wait::Acked => v1::Outcome::Acked,
        _ if sent > 0 => v1::Outcome::Sent,
        Published { queued: 1.., .. } => v1::Outcome::Queued,
        Published { matched: 0, .. } => v1::Outcome::NoMatch,
        _ => v1::Outcome::Dropped,
    };
    let reason = waited.reason.filter(|_| waited.dropped > 0).or(published.reason);
    v1::PublishResponse {
        outcome: outcome.into(),
        drop_reason: drop_reason(reason),
        matched: published.matched,
        sent,
        queued: published.queued,
        dropped: published.dropped + lost,
        reason_code: waited.code.filter(|_| wait == Wait::Acked).map(u32::from),
        rejected,
        schedule_id: String::new(),
    }
}

/// A message that waits for its time.
pub fn scheduled_response(id: &str) -> v1::PublishResponse {
    v1::PublishResponse {
        outcome: v1::Outcome::Scheduled.into(),
        schedule_id: id.to_owned(),
        ..v1::PublishResponse::default()
    }
}

/// The proto form of a latest value.
pub fn latest_value(value: LatestValue) -> v1::LatestValue {
    v1::LatestValue {
        device_id: value.device.as_str().to_owned(),
        topic: value.topic.as_ref().to_owned(),
        payload: value.payload,
        qos: qos_to_proto(value.qos),
        retain: value.retain,
        properties: value.properties.as_deref().map(properties_to_proto),
        receive_time: Some(time(value.received)),
        server_id: value.server.as_deref().unwrap_or_default().to_owned(),
    }
}

/// The proto form of a retained message.
pub fn retained_message(message: &SharedMessage, now: Timestamp) -> v1::RetainedMessage {
    v1::RetainedMessage {
        device_id: message.client_id.as_ref().map_or_else(String::new, |id| id.as_str().to_owned()),
        topic: message.topic.as_ref().to_owned(),
        payload: message.payload.clone(),
        qos: qos_to_proto(message.qos),
        properties: message.properties.as_deref().map(properties_to_proto),
        receive_time: Some(time(clock::to_wall(message.received))),
        expiry_seconds: message.expires.map(|at| now.secs_until(at)),
    }
}

/// The proto form of a device, without its subscriptions.
pub fn device(info: DeviceInfo) -> v1::Device {
    v1::Device {
        device_id: info.client_id.as_str().to_owned(),
        online: info.online,
        connection: Some(connection(&info.connection)),
        state_time: Some(time(clock::to_wall(info.since))),
        session_expiry_seconds: info.expiry,
        subscriptions: Vec::new(),
        subscription_count: u32::try_from(info.subscription_count).unwrap_or(u32::MAX),
        queue: Some(v1::Queue {
            inflight: info.queue.inflight as u64,
            pending: info.queue.pending as u64,
            pending_bytes: info.queue.pending_bytes as u64,
            dropped: info.queue.dropped,
        }),
    }
}

/// The proto form of a subscription.
pub fn subscription(topic_filter: String, qos: QoS, restricted: bool) -> v1::DeviceSubscription {
    v1::DeviceSubscription { topic_filter, qos: qos_to_proto(qos), restricted }
}

/// The proto form of a protocol level.
pub fn protocol_version(protocol: Protocol) -> v1::ProtocolVersion {
    match protocol {
        Protocol::V3 => v1::ProtocolVersion::V31,
        Protocol::V4 => v1::ProtocolVersion::V311,
        Protocol::V5 => v1::ProtocolVersion::V50,
    }
}

fn connection(info: &ConnectionInfo) -> v1::Connection {
    v1::Connection {
        peer: info.peer.to_string(),
        listener: info.listener.to_string(),
        protocol_version: protocol_version(info.protocol).into(),
        keep_alive_seconds: info.keep_alive.into(),
        username: info.username.as_deref().map(str::to_owned),
        common_name: auth::principal(info).common_name.as_deref().map(str::to_owned),
    }
}

/// The kind of an event, for filters.
pub fn event_kind(kind: &EventKind) -> v1::EventKind {
    match kind {
        EventKind::Connected { .. } => v1::EventKind::Connected,
        EventKind::Disconnected { .. } => v1::EventKind::Disconnected,
        EventKind::TakenOver => v1::EventKind::TakenOver,
        EventKind::Subscribed { .. } => v1::EventKind::Subscribed,
        EventKind::Unsubscribed { .. } => v1::EventKind::Unsubscribed,
        EventKind::SessionEnded { .. } => v1::EventKind::SessionEnded,
        EventKind::Dropped { .. } => v1::EventKind::Dropped,
        EventKind::AuthFailed => v1::EventKind::AuthFailed,
    }
}

/// The proto form of an event.
pub fn event(event: Event) -> v1::Event {
    use v1::event::Detail;

    let detail = match event.kind {
        EventKind::Connected { info, session_present } => {
            Detail::Connected(v1::Connected { connection: Some(connection(&info)), session_present })
        }
        EventKind::Disconnected { reason } => {
            Detail::Disconnected(v1::Disconnected { reason: reason.to_owned() })
        }
        EventKind::TakenOver => Detail::TakenOver(v1::TakenOver {}),
        EventKind::Subscribed { filter, qos } => Detail::Subscribed(subscription(filter, qos, false)),
        EventKind::Unsubscribed { filter } => Detail::Unsubscribed(v1::Unsubscribed { topic_filter: filter }),
        EventKind::SessionEnded { reason } => {
            Detail::SessionEnded(v1::SessionEnded { reason: reason.to_owned() })
        }
        EventKind::Dropped { reason, count } => {
            Detail::Dropped(v1::Dropped { reason: drop_reason(Some(reason)), count })
        }
        EventKind::AuthFailed => Detail::AuthFailed(v1::AuthFailed {}),
    };
    let device_id = event.client_id.as_str().to_owned();
    v1::Event { time: Some(time(clock::to_wall(event.at))), device_id, detail: Some(detail) }
}
