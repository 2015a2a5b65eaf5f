//! One pure decision: the wishes of a CONNECT and the grants of the gateway.

use std::sync::Arc;

use codec::{ConnAck, Connect, reason};
use gateway_core::{BRIDGE_MARK, ClientId, Protocol, QoS, limits::Limits};

use super::{
    LinkParams,
    inbound::{fits, is_connection_state, may_publish_to},
};

/// Inputs of the decision besides the packet.
pub struct ConnectPolicy<'a> {
    /// Bounds.
    pub limits: &'a Limits,
    /// In non-broker mode a client id must fit into one topic level.
    pub non_broker: bool,
    /// A fresh client id for clients that send none.
    pub assigned_id: &'a (dyn Fn() -> String + Sync),
    /// Response Information for clients that ask for it; `{client_id}` is replaced. Empty is none.
    pub response_information: &'a str,
    /// The mark of this gateway, for bridges of other gateways; empty is none.
    pub bridge_mark: &'a str,
}

/// A CONNECT that may go on to authentication.
#[derive(Debug)]
pub struct Accepted {
    /// Client id, assigned if the client sent none.
    pub client_id: ClientId,
    /// Discard an earlier session.
    pub clean_start: bool,
    /// Session expiry granted, seconds.
    pub expiry: u32,
    /// Keep alive in force, seconds, 0 is none.
    pub keep_alive: u16,
    /// Parameters of the connection for the session's outbound half.
    pub link: LinkParams,
    /// The CONNACK; the caller sets `session_present`.
    pub connack: ConnAck,
}

/// A CONNECT that is answered and closed: the v5 reason code (v3: mapped to a return code; `None` closes
/// without an answer).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectRefused(pub Option<u8>);

/// Decides about a CONNECT.
pub fn evaluate_connect(connect: &Connect, policy: &ConnectPolicy<'_>) -> Result<Accepted, ConnectRefused> {
    let limits = policy.limits;
    let v5 = connect.protocol.is_v5();
    let mut connack = ConnAck::default();
    let client_id = client_id(connect, policy, &mut connack)?;
    check_will(connect, limits)?;
    let wanted = if v5 {
        connect.session_expiry.unwrap_or(0)
    } else if connect.clean_start {
        0
    } else {
        limits.session_expiry_max
    };
    let expiry = wanted.min(limits.session_expiry_max);
    let keep_alive = keep_alive(connect.keep_alive, limits);
    if v5 {
        announce(&mut connack, limits);
        connack.auth_method.clone_from(&connect.auth_method); // [MQTT-4.12.0-5]
        connack.response_information = response_information(connect, &client_id, policy);
        connack.user = bridge_mark(connect, policy);
        connack.session_expiry = (expiry != wanted).then_some(expiry);
        connack.server_keep_alive = (keep_alive != connect.keep_alive).then_some(keep_alive);
    }
    Ok(Accepted {
        client_id,
        clean_start: connect.clean_start,
        expiry,
        keep_alive: if v5 || connect.keep_alive == 0 { keep_alive } else { connect.keep_alive },
        link: LinkParams {
            protocol: connect.protocol,
            receive_maximum: connect.receive_maximum.unwrap_or(u16::MAX),
            maximum_packet_size: connect.maximum_packet_size.unwrap_or(u32::MAX),
            topic_alias_maximum: connect.topic_alias_maximum,
        },
        connack,
    })
}

fn client_id(
    connect: &Connect,
    policy: &ConnectPolicy<'_>,
    connack: &mut ConnAck,
) -> Result<ClientId, ConnectRefused> {
    let id = connect.client_id.as_str();
    let invalid = ConnectRefused(Some(reason::CLIENT_IDENTIFIER_NOT_VALID));
    if id.is_empty() {
        match connect.protocol {
            Protocol::V3 => return Err(invalid), // 3.1: 1 to 23 characters
            Protocol::V4 if !connect.clean_start => return Err(invalid), // [MQTT-3.1.3-8]
            _ => {}
        }
        let assigned = (policy.assigned_id)();
        let client_id = ClientId::new(&assigned);
        connack.assigned_client_id = connect.protocol.is_v5().then_some(assigned); // [MQTT-3.2.2-16]
        return Ok(client_id);
    }
    let unfit = policy.non_broker && id.bytes().any(|b| matches!(b, b'/' | b'+' | b'#'));
    if id.len() > policy.limits.max_client_id_bytes || unfit {
        return Err(invalid);
    }
    Ok(ClientId::new(id))
}

fn check_will(connect: &Connect, limits: &Limits) -> Result<(), ConnectRefused> {
    let Some(will) = &connect.will else { return Ok(()) };
    let is_state = is_connection_state(&will.topic) && fits(&will.topic, limits);
    if !is_state && !may_publish_to(&will.topic, limits) {
        return Err(ConnectRefused(Some(reason::TOPIC_NAME_INVALID)));
    }
    if will.qos as u8 > limits.max_qos {
        return Err(ConnectRefused(Some(reason::QOS_NOT_SUPPORTED))); // [MQTT-3.2.2-12]
    }
    if will.retain && !limits.retain_available {
        return Err(ConnectRefused(Some(reason::RETAIN_NOT_SUPPORTED))); // [MQTT-3.2.2-13]
    }
    let claims_text = will.properties.as_ref().is_some_and(|p: &Arc<_>| p.payload_format == Some(1));
    if claims_text && limits.validate_payload_format && std::str::from_utf8(&will.payload).is_err() {
        return Err(ConnectRefused(Some(reason::PAYLOAD_FORMAT_INVALID)));
    }
    Ok(())
}

fn keep_alive(wanted: u16, limits: &Limits) -> u16 {
    let most = if limits.keep_alive_max == 0 { u16::MAX } else { limits.keep_alive_max };
    if wanted == 0 {
        return limits.keep_alive_max;
    }
    wanted.max(limits.keep_alive_min).min(most)
}

/// Only for a client that asks [MQTT-3.1.2-28] and whose id is one topic level: otherwise the answer would be no valid
/// topic, or another client's.
fn response_information(
    connect: &Connect,
    client_id: &ClientId,
    policy: &ConnectPolicy<'_>,
) -> Option<String> {
    let pattern = policy.response_information;
    let unfit = client_id.as_str().contains(['/', '+', '#']);
    (connect.request_response_information && !unfit && !pattern.is_empty())
        .then(|| pattern.replace("{client_id}", client_id.as_str()))
}

/// The mark of this gateway, for a client that says that it is a bridge by its own mark: what it takes from here came from here.
fn bridge_mark(connect: &Connect, policy: &ConnectPolicy<'_>) -> Vec<(String, String)> {
    let is_bridge = connect.user.iter().any(|(name, _)| name == BRIDGE_MARK);
    let told = is_bridge && !policy.bridge_mark.is_empty();
    told.then(|| (BRIDGE_MARK.to_owned(), policy.bridge_mark.to_owned())).into_iter().collect()
}

fn announce(connack: &mut ConnAck, limits: &Limits) {
    connack.receive_maximum = (limits.receive_maximum != u16::MAX).then_some(limits.receive_maximum);
    connack.maximum_qos = (limits.max_qos < QoS::ExactlyOnce as u8).then_some(limits.max_qos); // [MQTT-3.2.2-9]
    connack.retain_available = (!limits.retain_available).then_some(false);
    connack.maximum_packet_size = u32::try_from(limits.max_packet_size.0).ok();
    connack.topic_alias_maximum = (limits.topic_alias_maximum > 0).then_some(limits.topic_alias_maximum);
    connack.wildcard_available = (!limits.wildcard_available).then_some(false);
    connack.subscription_id_available = (!limits.subscription_id_available).then_some(false);
    connack.shared_available = (!limits.shared_available).then_some(false);
}
