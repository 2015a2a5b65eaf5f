//! A PUBLISH of the client: whether it is routed, and how it is answered.

use std::sync::Arc;

use codec::{AckKind, Frame, Publish, reason};
use gateway_core::{Commit, Protocol, QoS, level_count, limits::Limits};

use super::{Effect, Inbound, InboundOwner};
use crate::{Permits, PublishPermit, Qos2Begin, Reply, Violation, counters::count};

/// Why a PUBLISH is not routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishError {
    /// The connection must end with this reason code.
    Fatal(u8),
    /// The message is refused with this code in its acknowledgement; at QoS 0 the connection ends (v5) with it.
    Refused(u8),
}

/// A message of the client that is to be routed. Its owner has the room for it, which is used for one message after the other.
#[derive(Debug, Default)]
pub struct Incoming<'p> {
    /// The packet. With a topic alias its topic may be empty: see [`Self::topic`].
    pub publish: Publish<'p>,
    alias: Option<Arc<str>>,
}

impl Incoming<'_> {
    /// The topic name, which an alias may stand for.
    #[inline]
    pub fn topic(&self) -> &str {
        self.alias.as_deref().unwrap_or(self.publish.topic)
    }
}

impl Inbound {
    pub(super) fn handle_publish<'p, O: InboundOwner>(
        &mut self,
        frame: &Frame<'p>,
        incoming: &mut Incoming<'p>,
        permits: &mut impl Permits,
        owner: &mut O,
    ) -> Result<Effect, O::End> {
        frame
            .check_length(self.protocol)
            .and_then(|()| {
                codec::decode_publish(frame.first, frame.body, self.protocol, &mut incoming.publish)
            })
            .map_err(Violation::from)?;
        let publish = &incoming.publish;
        count(|c| {
            let (messages, bytes) = match publish.qos {
                QoS::AtMostOnce => (&c.messages_in_0, &c.payload_bytes_in_0),
                QoS::AtLeastOnce => (&c.messages_in_1, &c.payload_bytes_in_1),
                QoS::ExactlyOnce => (&c.messages_in_2, &c.payload_bytes_in_2),
            };
            messages.add(1);
            bytes.add(publish.payload.len() as u64);
        });
        let (qos, packet_id) = (publish.qos, publish.packet_id);
        let checked = self.check_publish(publish, owner.limits());
        if publish.alias.is_some() {
            // Also that of a message which is refused.
            owner.hold_aliases(self.alias_bytes())?;
        }
        incoming.alias = match checked {
            Ok(alias) => alias,
            Err(PublishError::Fatal(code)) => return Err(Violation(code).into()),
            Err(PublishError::Refused(code)) => return Ok(self.refuse(qos, packet_id, code)?),
        };
        let permit = permits.may_publish(incoming.topic(), &incoming.publish);
        if permit != PublishPermit::Granted {
            if permit == PublishPermit::Later {
                return Ok(Self::put_off(qos, incoming.publish.payload.len()));
            }
            // A duplicate of what was allowed when it came first was routed then: were it refused now, the client would use
            // its identifier for another message, which would be taken for the same.
            if qos == QoS::ExactlyOnce
                && let Some(after) = owner.outbound(|out, _| out.received_before(packet_id))?
            {
                return Ok(Effect::Reply(Reply::to(qos, packet_id, after)));
            }
            return Ok(match permit {
                PublishPermit::Closed => self.deny(qos, packet_id)?,
                _ => self.forget(qos, packet_id),
            });
        }
        if qos == QoS::ExactlyOnce {
            let maximum = owner.limits().receive_maximum;
            match owner.outbound(|out, _| out.begin_received(packet_id, maximum))? {
                Qos2Begin::New => {}
                // Its message was routed when it came first [MQTT-4.3.3-10].
                Qos2Begin::Duplicate(after) => {
                    return Ok(Effect::Reply(Reply {
                        code: reason::SUCCESS,
                        ..Reply::to(qos, packet_id, after)
                    }));
                }
                Qos2Begin::Exceeded => return Err(Violation(reason::RECEIVE_MAXIMUM_EXCEEDED).into()),
            }
        }
        Ok(Effect::Publish)
    }

    /// Takes the message out of the counters: the packet is handled again, and counted then.
    #[cold]
    fn put_off(qos: QoS, bytes: usize) -> Effect {
        count(|c| {
            let (messages, payload) = match qos {
                QoS::AtMostOnce => (&c.messages_in_0, &c.payload_bytes_in_0),
                QoS::AtLeastOnce => (&c.messages_in_1, &c.payload_bytes_in_1),
                QoS::ExactlyOnce => (&c.messages_in_2, &c.payload_bytes_in_2),
            };
            messages.take_back(1);
            payload.take_back(bytes as u64);
            c.packets_in.take_back(1);
        });
        Effect::Later
    }

    /// Drops a PUBLISH that is not allowed, where the connection is to go on.
    #[cold]
    fn forget(&self, qos: QoS, packet_id: u16) -> Effect {
        gateway_core::counters::count(|c| c.refused_not_authorized.add(1));
        let code = if self.protocol.is_v5() { reason::NOT_AUTHORIZED } else { reason::SUCCESS };
        let reply = (qos != QoS::AtMostOnce).then(|| Reply { code, ..Reply::to(qos, packet_id, None) });
        reply.map_or(Effect::Done, Effect::Reply)
    }

    /// Refuses a PUBLISH that is not allowed, where only an acknowledgement keeps the connection.
    #[cold]
    fn deny(&self, qos: QoS, packet_id: u16) -> Result<Effect, Violation> {
        gateway_core::counters::count(|c| c.refused_not_authorized.add(1));
        if !self.protocol.is_v5() || qos == QoS::AtMostOnce {
            return Err(Violation(reason::NOT_AUTHORIZED));
        }
        Ok(Effect::Reply(Reply { code: reason::NOT_AUTHORIZED, ..Reply::to(qos, packet_id, None) }))
    }

    /// Refuses a PUBLISH before it is routed.
    fn refuse(&self, qos: QoS, packet_id: u16, code: u8) -> Result<Effect, Violation> {
        gateway_core::counters::count(|c| c.refused_not_accepted.add(1));
        Ok(self.refused(qos, packet_id, code)?.map_or(Effect::Done, Effect::Reply))
    }

    /// The answer to a PUBLISH that was routed to so many receivers, to be sent after what must be on disk first. None at
    /// QoS 0.
    #[inline]
    pub fn routed(
        &self,
        qos: QoS,
        packet_id: u16,
        matched: u32,
        after: Option<Arc<Commit>>,
    ) -> Option<Reply> {
        let code = if matched == 0 { reason::NO_MATCHING_SUBSCRIBERS } else { reason::SUCCESS };
        (qos != QoS::AtMostOnce).then(|| Reply { code, ..Reply::to(qos, packet_id, after) })
    }

    /// The answer to a PUBLISH that is refused with `code`; none where there is no acknowledgement and the protocol has the
    /// message forgotten. In its turn, after those that wait for the disk [MQTT-4.6.0-2], [MQTT-4.6.0-3].
    ///
    /// # Errors
    /// Nothing but the connection's end can tell the client.
    pub fn refused(&self, qos: QoS, packet_id: u16, code: u8) -> Result<Option<Reply>, Violation> {
        match refusal(self.protocol, qos, code) {
            PublishRefusal::Acknowledge(code) => Ok(Some(Reply { code, ..Reply::to(qos, packet_id, None) })),
            PublishRefusal::Drop => Ok(None),
            PublishRefusal::Close => Err(Violation(code)),
        }
    }

    /// Checks a decoded PUBLISH against the limits and resolves its alias. `Ok(Some)` is the topic behind an
    /// alias; `Ok(None)` means that the packet carries its topic itself.
    pub(crate) fn check_publish(
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
        let name = topic.as_deref().unwrap_or(publish.topic);
        if !may_publish_to(name, limits) && !self.may_write_state(name, limits) {
            return Err(PublishError::Refused(reason::TOPIC_NAME_INVALID));
        }
        let claims_text = publish.properties.as_ref().is_some_and(|p| p.payload_format == Some(1));
        if claims_text && limits.validate_payload_format && std::str::from_utf8(publish.payload).is_err() {
            return Err(PublishError::Refused(reason::PAYLOAD_FORMAT_INVALID));
        }
        Ok(topic)
    }

    /// Returns whether the client is a bridge that may tell its state on this topic.
    #[cold]
    fn may_write_state(&mut self, topic: &str, limits: &Limits) -> bool {
        fits(topic, limits) && self.bridge().is_some_and(|bridge| bridge.may_write(topic))
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
        let aliases = &mut self.rare.get_or_insert_default().aliases;
        if topic.is_empty() {
            return aliases.get(alias).map(Some).ok_or(PublishError::Fatal(reason::PROTOCOL_ERROR));
        }
        aliases.set(alias, topic);
        Ok(None)
    }
}

impl Reply {
    /// PUBACK or PUBREC.
    fn to(qos: QoS, packet_id: u16, after: Option<Arc<Commit>>) -> Self {
        let kind = if qos == QoS::ExactlyOnce { AckKind::PubRec } else { AckKind::PubAck };
        Self { kind, packet_id, code: reason::SUCCESS, after }
    }
}

/// Treatment of a refused PUBLISH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishRefusal {
    /// Acknowledged with this code.
    Acknowledge(u8),
    /// Forgotten: there is no acknowledgement at QoS 0.
    Drop,
    /// The connection must end, since nothing else can say it.
    Close,
}

/// Returns the treatment of a PUBLISH of `qos` that is refused with `code`. 3.1.1 may close or acknowledge if it is not
/// allowed [MQTT-3.3.5-2]; 3.1 must acknowledge it (its section 3.3), but not a message that may be accepted when it
/// comes again.
pub(crate) fn refusal(protocol: Protocol, qos: QoS, code: u8) -> PublishRefusal {
    let for_good = matches!(code, reason::NOT_AUTHORIZED | reason::TOPIC_NAME_INVALID);
    match (protocol, qos) {
        (Protocol::V3, QoS::AtMostOnce) if for_good => PublishRefusal::Drop,
        (Protocol::V3, _) if for_good => PublishRefusal::Acknowledge(reason::SUCCESS),
        (Protocol::V5, QoS::AtLeastOnce | QoS::ExactlyOnce) => PublishRefusal::Acknowledge(code),
        _ => PublishRefusal::Close,
    }
}

/// Returns whether the gateway takes messages for this topic name, which is well formed, from a client: in a PUBLISH or
/// as its will.
pub(crate) fn may_publish_to(topic: &str, limits: &Limits) -> bool {
    fits(topic, limits) && !topic.starts_with("$SYS/")
}

/// Returns whether a topic name is within the limits.
pub(crate) fn fits(topic: &str, limits: &Limits) -> bool {
    // A topic has at most one level more than bytes: most are too short to have too many.
    let few_levels = topic.len() < limits.max_topic_levels || level_count(topic) <= limits.max_topic_levels;
    topic.len() <= limits.max_topic_bytes && few_levels
}
