//! The half of a session that ends with its connection: checks what the peer publishes.

use std::sync::Arc;

use thiserror::Error;

use super::alias::InboundAliases;
use crate::{
    codec::{Publish, reason},
    config::Limits,
    types::{Protocol, QoS},
};

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
        let text = topic.as_deref().unwrap_or(publish.topic);
        if text.len() > limits.max_topic_bytes
            || levels(text) > limits.max_topic_levels
            || text.starts_with("$SYS/")
        {
            return Err(PublishError::Refused(reason::TOPIC_NAME_INVALID));
        }
        let claims_text = publish.properties.as_ref().is_some_and(|p| p.payload_format == Some(1));
        if claims_text && limits.validate_payload_format && std::str::from_utf8(publish.payload).is_err() {
            return Err(PublishError::Refused(reason::PAYLOAD_FORMAT_INVALID));
        }
        Ok(topic)
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

/// What to do about a refused PUBLISH of `qos` on `protocol`: the code for its acknowledgement, or `None` when
/// the connection must end, since nothing else can say it.
pub(crate) fn refusal(protocol: Protocol, qos: QoS, code: u8) -> Option<u8> {
    (protocol.is_v5() && qos != QoS::AtMostOnce).then_some(code)
}

fn levels(topic: &str) -> usize {
    topic.bytes().filter(|b| *b == b'/').count() + 1
}
