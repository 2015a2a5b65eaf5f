//! The gateway's types to proto messages: pure functions, no refusals.

use super::{convert::Wait, proto::gateway::v1};
use crate::{
    broker::{ConnectionInfo, DeviceInfo, Event, EventKind, Published},
    store::LatestValue,
    types::{DropReason, Properties, Protocol, QoS, ReceiptState, SharedMessage, Timestamp},
};

/// The proto form of MQTT 5 properties.
pub(super) fn properties_to_proto(properties: &Properties) -> v1::Properties {
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

fn qos_to_proto(qos: QoS) -> i32 {
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
    };
    reason.into()
}

/// What became of a message: `published` is the routing's view, `waited` what its receipt told later.
pub(super) fn publish_response(
    published: Published,
    wait: Wait,
    waited: Option<ReceiptState>,
) -> v1::PublishResponse {
    let lost = waited.map_or(0, |state| state.dropped.min(published.sent));
    let sent = published.sent - lost;
    let outcome = match published {
        _ if sent > 0 && wait == Wait::Acked => v1::Outcome::Acked,
        _ if sent > 0 => v1::Outcome::Sent,
        Published { queued: 1.., .. } => v1::Outcome::Queued,
        Published { matched: 0, .. } => v1::Outcome::NoMatch,
        _ => v1::Outcome::Dropped,
    };
    let reason = waited.filter(|state| state.dropped > 0).and_then(|state| state.reason).or(published.reason);
    v1::PublishResponse {
        outcome: outcome.into(),
        drop_reason: drop_reason(reason),
        matched: published.matched,
        sent,
        queued: published.queued,
        dropped: published.dropped + lost,
        reason_code: waited.filter(|_| wait == Wait::Acked).and_then(|state| state.code).map(u32::from),
    }
}

/// The proto form of a latest value.
pub(super) fn latest_value(value: LatestValue) -> v1::LatestValue {
    v1::LatestValue {
        device_id: value.device.as_str().to_owned(),
        topic: value.topic.as_ref().to_owned(),
        payload: value.payload,
        qos: qos_to_proto(value.qos),
        retain: value.retain,
        properties: value.properties.as_deref().map(properties_to_proto),
        received_at_ms: value.received.0,
        server_id: value.server.as_deref().unwrap_or_default().to_owned(),
    }
}

/// The proto form of a retained message.
pub(super) fn retained_message(message: &SharedMessage, now: Timestamp) -> v1::RetainedMessage {
    v1::RetainedMessage {
        device_id: message.client_id.as_ref().map_or_else(String::new, |id| id.as_str().to_owned()),
        topic: message.topic.as_ref().to_owned(),
        payload: message.payload.clone(),
        qos: qos_to_proto(message.qos),
        properties: message.properties.as_deref().map(properties_to_proto),
        received_at_ms: message.received.0,
        expires_in_seconds: message.expires.map(|at| now.secs_until(at)),
    }
}

/// The proto form of a device.
pub(super) fn device(info: DeviceInfo) -> v1::Device {
    v1::Device {
        client_id: info.client_id.as_str().to_owned(),
        online: info.online,
        connection: Some(connection(&info.connection)),
        since_ms: info.since.0,
        session_expiry_seconds: info.expiry,
        subscriptions: info
            .subscriptions
            .into_iter()
            .map(|(filter, qos)| v1::DeviceSubscription { filter, qos: qos_to_proto(qos) })
            .collect(),
        queue: Some(v1::Queue {
            inflight: info.queue.inflight as u64,
            pending: info.queue.pending as u64,
            pending_bytes: info.queue.pending_bytes as u64,
            dropped: info.queue.dropped,
        }),
    }
}

fn connection(info: &ConnectionInfo) -> v1::Connection {
    let protocol = match info.protocol {
        Protocol::V3 => v1::ProtocolVersion::V31,
        Protocol::V4 => v1::ProtocolVersion::V311,
        Protocol::V5 => v1::ProtocolVersion::V50,
    };
    v1::Connection {
        peer: info.peer.to_string(),
        listener: info.listener.to_string(),
        protocol: protocol.into(),
        keep_alive_seconds: info.keep_alive.into(),
        username: info.username.as_deref().map(str::to_owned),
    }
}

/// The kind of an event, for filters.
pub(super) fn event_kind(kind: &EventKind) -> v1::EventKind {
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
pub(super) fn event(event: Event) -> v1::Event {
    use v1::event::Detail;

    let detail = match event.kind {
        EventKind::Connected { info, session_present } => {
            Detail::Connected(v1::Connected { connection: Some(connection(&info)), session_present })
        }
        EventKind::Disconnected { reason } => {
            Detail::Disconnected(v1::Disconnected { reason: reason.to_owned() })
        }
        EventKind::TakenOver => Detail::TakenOver(v1::TakenOver {}),
        EventKind::Subscribed { filter, qos } => {
            Detail::Subscribed(v1::DeviceSubscription { filter, qos: qos_to_proto(qos) })
        }
        EventKind::Unsubscribed { filter } => Detail::Unsubscribed(v1::Unsubscribed { filter }),
        EventKind::SessionEnded { reason } => {
            Detail::SessionEnded(v1::SessionEnded { reason: reason.to_owned() })
        }
        EventKind::Dropped { reason, count } => {
            Detail::Dropped(v1::Dropped { reason: drop_reason(Some(reason)), count })
        }
        EventKind::AuthFailed => Detail::AuthFailed(v1::AuthFailed {}),
    };
    v1::Event { time_ms: event.at.0, client_id: event.client_id.as_str().to_owned(), detail: Some(detail) }
}
