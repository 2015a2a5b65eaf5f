//! The half of a session that ends with its connection: checks what the peer publishes.

use std::sync::Arc;

use codec::{Publish, Subscribe, reason};
use gateway_core::{Protocol, QoS, limits::Limits};
use thiserror::Error;

use super::alias::InboundAliases;

/// Why a PUBLISH is not routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PublishError {
    /// The connection must end with this reason code.
    #[error("publish violates the protocol: reason {0:#04x}")]
    Fatal(u8),
    /// The message is refused with this code in its acknowledgement; at QoS 0 the connection ends (v5) with it.
    #[error("publish refused: reason {0:#04x}")]
    Refused(u8),
}

/// See the module.
#[derive(Debug)]
pub struct Inbound {
    protocol: Protocol,
    aliases: Option<Box<InboundAliases>>,
}

impl Inbound {
    /// For a new connection.
    pub fn new(protocol: Protocol) -> Self {
        Self { protocol, aliases: None }
    }

    /// Protocol level.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Bytes that the client's topic aliases take.
    pub fn alias_bytes(&self) -> usize {
        self.aliases.as_ref().map_or(0, |aliases| aliases.bytes())
    }

    /// Checks a decoded PUBLISH against the limits and resolves its alias. `Ok(Some)` is the topic behind an
    /// alias; `Ok(None)` means that the packet carries its topic itself.
    pub fn check_publish(
        &mut self,
        publish: &Publish<'_>,
        limits: &Limits,
    ) -> Result<Option<Arc<str>>, PublishError> {
        if publish.qos as u8 > limits.max_qos {
            return Err(PublishError::Fatal(reason::QOS_NOT_SUPPORTED)); // [MQTT-3.2.2-11]
        }
        if publish.retain && !limits.retain_available {
            return Err(PublishError::Fatal(reason::RETAIN_NOT_SUPPORTED)); // [MQTT-3.2.2-14]
        }
        let topic = match publish.alias {
            None => None,
            Some(alias) => self.resolve(alias, publish.topic, limits)?,
        };
        if !may_publish_to(topic.as_deref().unwrap_or(publish.topic), limits) {
            return Err(PublishError::Refused(reason::TOPIC_NAME_INVALID));
        }
        let claims_text = publish.properties.as_ref().is_some_and(|p| p.payload_format == Some(1));
        if claims_text && limits.validate_payload_format && std::str::from_utf8(publish.payload).is_err() {
            return Err(PublishError::Refused(reason::PAYLOAD_FORMAT_INVALID));
        }
        Ok(topic)
    }

    /// Checks a SUBSCRIBE, before any of its filters is looked at, for what CONNACK said is not there; the reason code if
    /// it asks for that nevertheless (sections 3.2.2.3.11 to 3.2.2.3.13). MQTT 3 has no such announcement: there such
    /// a filter is refused in the SUBACK [MQTT-3.8.3-2].
    pub fn check_subscribe(&self, subscribe: &Subscribe, limits: &Limits) -> Result<(), u8> {
        if !self.protocol.is_v5() {
            return Ok(());
        }
        if !limits.subscription_id_available && subscribe.id.is_some() {
            return Err(reason::SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED);
        }
        let any = |is_so: fn(&str) -> bool| subscribe.filters.iter().any(|wanted| is_so(&wanted.filter));
        if !limits.shared_available && any(|filter| filter.starts_with("$share/")) {
            return Err(reason::SHARED_SUBSCRIPTIONS_NOT_SUPPORTED);
        }
        if !limits.wildcard_available && any(|filter| filter.contains(['+', '#'])) {
            return Err(reason::WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED);
        }
        Ok(())
    }

    fn resolve(
        &mut self,
        alias: u16,
        topic: &str,
        limits: &Limits,
    ) -> Result<Option<Arc<str>>, PublishError> {
        if alias == 0 || alias > limits.topic_alias_maximum {
            return Err(PublishError::Fatal(reason::TOPIC_ALIAS_INVALID)); // [MQTT-3.3.2-8] [MQTT-3.3.2-9]
        }
        let aliases = self.aliases.get_or_insert_with(Box::default);
        if topic.is_empty() {
            return aliases.get(alias).map(Some).ok_or(PublishError::Fatal(reason::PROTOCOL_ERROR));
        }
        aliases.set(alias, topic);
        Ok(None)
    }
}

/// What becomes of a PUBLISH that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Acknowledged with this code.
    Acknowledge(u8),
    /// Forgotten: there is no acknowledgement at QoS 0.
    Drop,
    /// The connection must end, since nothing else can say it.
    Close,
}

/// What becomes of a PUBLISH of `qos` that is refused with `code`. 3.1.1 may close or acknowledge what is not allowed
/// [MQTT-3.3.5-2]; 3.1 must acknowledge it (its section 3.3), but not what may be accepted when it comes again.
pub fn refusal(protocol: Protocol, qos: QoS, code: u8) -> Refusal {
    let for_good = matches!(code, reason::NOT_AUTHORIZED | reason::TOPIC_NAME_INVALID);
    match (protocol, qos) {
        (Protocol::V3, QoS::AtMostOnce) if for_good => Refusal::Drop,
        (Protocol::V3, _) if for_good => Refusal::Acknowledge(reason::SUCCESS),
        (Protocol::V5, QoS::AtLeastOnce | QoS::ExactlyOnce) => Refusal::Acknowledge(code),
        _ => Refusal::Close,
    }
}

/// Whether the gateway takes messages for this topic name, which is well formed, from a client: in a PUBLISH or as its will.
pub(super) fn may_publish_to(topic: &str, limits: &Limits) -> bool {
    let levels = topic.bytes().filter(|b| *b == b'/').count() + 1;
    topic.len() <= limits.max_topic_bytes && levels <= limits.max_topic_levels && !topic.starts_with("$SYS/")
}
