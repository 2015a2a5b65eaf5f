//! Packets of the client: the half of a session that ends with its connection. Frames in, effects out.
//!
//! [`Inbound::handle`] takes one frame, checks it, does what the session can do alone, and says what is left for the
//! connection's owner: route a message, subscribe to filters, answer, end. It needs no socket, broker or clock. The other
//! half of the session, which other threads deliver into, is the owner's: it is reached through [`InboundOwner::outbound`].
//! The client's rights are lent with the frame, as [`Permits`].

mod bridge;
mod filters;
mod publish;

use codec::{AckKind, Connect, Disconnect, Frame, Packet, SubscribeFilter, reason};
use gateway_core::{Effort, Protocol, Timestamp, limits::Limits};

use self::bridge::BridgePeer;
use super::{
    Enhanced, Env, Outbound, Permits, PresentedAuth, Reply, Violation, WrongStep, alias::InboundAliases,
};
use crate::counters::count;

pub(super) use bridge::is_connection_state;
pub use filters::Filters;
pub use publish::Incoming;
#[cfg(test)]
pub(super) use publish::{PublishError, PublishRefusal, refusal};
pub(super) use publish::{fits, may_publish_to};

/// PUBACK packets that are handled under one lock: deliveries to the session wait for them.
const ACKS_PER_LOCK: usize = 16;

/// Services that the inbound half needs of the connection's owner.
pub trait InboundOwner {
    /// Why the connection ends.
    type End: From<Violation>;

    /// Bounds in force.
    fn limits(&self) -> &Limits;

    /// Returns the time of arrival of the packets that are handled now.
    fn now(&self) -> Timestamp;

    /// The authentications of the connection; none if its CONNECT named no method.
    fn enhanced(&mut self) -> Option<&mut Enhanced>;

    /// Takes memory for the client's topic aliases, `bytes` in all. Their number was granted, so that nothing else than the
    /// connection's end says that one cannot be kept.
    ///
    /// # Errors
    /// There is no memory for them.
    fn hold_aliases(&mut self, bytes: usize) -> Result<(), Self::End>;

    /// Runs `act` on the outbound half, which nobody else uses meanwhile. What it leaves in the out-buffer is sent.
    ///
    /// # Errors
    /// The session is another connection's now, or this one is to end.
    fn outbound<R>(&mut self, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> Result<R, Self::End>;
}

/// Work that a packet leaves to the owner, in the order of the packets.
#[derive(Debug)]
pub enum Effect {
    /// Nothing.
    Done,
    /// Handle the frame again once it is known whether the client may publish it: nothing has changed by it so far.
    Later,
    /// Route the [`Incoming`] message, then answer as [`Inbound::routed`] or [`Inbound::refused`] says.
    Publish,
    /// Subscribe to each of the filters, then send SUBACK.
    Subscribe(Filters<SubscribeFilter>),
    /// End the subscription of each of the filters, then send UNSUBACK.
    Unsubscribe(Filters<String>),
    /// Send an acknowledgement.
    Reply(Reply),
    /// See who the client has proved to be; then ask, conclude, or end the connection, as [`Enhanced`] says.
    Authenticate(PresentedAuth),
    /// Send PINGRESP [MQTT-3.12.4-1].
    Pong,
    /// End the connection: the client said so.
    Disconnect {
        /// Its reason code.
        code: u8,
        /// The session's expiry from now on, if it is to change; seconds.
        expiry: Option<u32>,
    },
}

/// See the module.
#[derive(Debug)]
pub struct Inbound {
    protocol: Protocol,
    /// Session expiry granted at CONNECT, seconds.
    expiry: u32,
    rare: Option<Box<InboundExtras>>,
}

/// State that few connections need, made when first used.
#[derive(Debug, Default)]
struct InboundExtras {
    aliases: InboundAliases,
    /// The client is a bridge, or has a will like one.
    bridge: Option<BridgePeer>,
}

impl Inbound {
    /// For a new connection of a session with this expiry, in seconds.
    pub fn new(protocol: Protocol, expiry: u32) -> Self {
        Self { protocol, expiry, rare: None }
    }

    /// Gives the client what it may have as a bridge, if its CONNECT says that it is one.
    #[must_use]
    pub fn for_client(self, connect: &Connect) -> Self {
        let Some(bridge) = BridgePeer::of(connect) else { return self };
        Self {
            rare: Some(Box::new(InboundExtras { bridge: Some(bridge), ..InboundExtras::default() })),
            ..self
        }
    }

    fn bridge(&mut self) -> Option<&mut BridgePeer> {
        self.rare.as_mut()?.bridge.as_mut()
    }

    /// Protocol level.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Bytes that the client's topic aliases take.
    pub(crate) fn alias_bytes(&self) -> usize {
        self.rare.as_ref().map_or(0, |rare| rare.aliases.bytes())
    }

    /// Handles a frame of the client and spends what that costs. A message that is to be routed is left in `incoming`.
    ///
    /// # Errors
    /// The connection must end: for what the client sent, or for what `owner` says.
    #[inline]
    pub fn handle<'p, O: InboundOwner>(
        &mut self,
        frame: &Frame<'p>,
        incoming: &mut Incoming<'p>,
        effort: &mut Effort,
        permits: &mut impl Permits,
        owner: &mut O,
    ) -> Result<Effect, O::End> {
        count(|c| c.packets_in.add(1));
        effort.spend(Effort::PACKET);
        if frame.is_publish() {
            self.handle_publish(frame, incoming, permits, owner)
        } else {
            self.handle_other(frame, effort, owner)
        }
    }

    /// Handles the plain PUBACK packets that `bytes` begin with, some under one lock; says how many. It is what
    /// [`Self::handle`] would do, faster: a client that keeps up sends little else.
    ///
    /// # Errors
    /// As [`Self::handle`].
    #[inline]
    pub fn handle_plain_pubacks<O: InboundOwner>(
        &self,
        bytes: &[u8],
        effort: &mut Effort,
        owner: &mut O,
    ) -> Result<usize, O::End> {
        let mut ids = codec::plain_pubacks(bytes).take(ACKS_PER_LOCK).peekable();
        if ids.peek().is_none() {
            return Ok(0);
        }
        let mut acks = 0;
        let result = owner.outbound(|out, env| out.handle_pubacks(ids.inspect(|_| acks += 1), env))?;
        effort.spend_each(Effort::STEP, acks);
        count(|c| c.packets_in.add(acks as u64));
        result.map_err(Violation::from)?;
        Ok(acks)
    }

    fn handle_other<O: InboundOwner>(
        &mut self,
        frame: &Frame<'_>,
        effort: &mut Effort,
        owner: &mut O,
    ) -> Result<Effect, O::End> {
        if let Some((kind, packet_id)) = codec::plain_ack(frame) {
            return Self::handle_ack(kind, packet_id, reason::SUCCESS, effort, owner);
        }
        // Before so many are decoded.
        let filters = codec::count_filters(frame, self.protocol);
        if filters > owner.limits().max_filters_per_packet {
            return Err(Violation(reason::QUOTA_EXCEEDED).into());
        }
        effort.spend_each(Effort::NODE, filters);
        match codec::decode_from_client(frame, self.protocol).map_err(Violation::from)? {
            Packet::PubAck(ack) => Self::handle_ack(AckKind::PubAck, ack.packet_id, ack.code, effort, owner),
            Packet::PubRec(ack) => Self::handle_ack(AckKind::PubRec, ack.packet_id, ack.code, effort, owner),
            Packet::PubRel(ack) => Self::handle_ack(AckKind::PubRel, ack.packet_id, ack.code, effort, owner),
            Packet::PubComp(ack) => {
                Self::handle_ack(AckKind::PubComp, ack.packet_id, ack.code, effort, owner)
            }
            Packet::Subscribe(subscribe) => Ok(Effect::Subscribe(self.subscribe(subscribe, owner.limits())?)),
            Packet::Unsubscribe(unsubscribe) => Ok(Effect::Unsubscribe(Self::unsubscribe(unsubscribe))),
            Packet::PingReq => Ok(Effect::Pong),
            Packet::Disconnect(disconnect) => Ok(self.disconnect(&disconnect, owner.limits())?),
            Packet::Auth(auth) => {
                effort.spend(Effort::FILTER);
                let now = owner.now();
                // [MQTT-4.12.0-7]
                let Some(enhanced) = owner.enhanced() else {
                    return Err(Violation(reason::PROTOCOL_ERROR).into());
                };
                Ok(Effect::Authenticate(enhanced.take(*auth, now)?))
            }
            // A second CONNECT [MQTT-3.1.0-2], and what only servers send.
            _ => Err(Violation(reason::PROTOCOL_ERROR).into()),
        }
    }

    /// A step of a QoS 1 or 2 handshake.
    fn handle_ack<O: InboundOwner>(
        kind: AckKind,
        packet_id: u16,
        code: u8,
        effort: &mut Effort,
        owner: &mut O,
    ) -> Result<Effect, O::End> {
        effort.spend(Effort::STEP);
        let step = owner.outbound(|out, env| match kind {
            AckKind::PubAck => out.handle_puback(packet_id, code, env).map(|_| None),
            AckKind::PubRec => out.handle_pubrec(packet_id, code, env),
            AckKind::PubRel => Ok(Some(out.handle_pubrel(packet_id, env))),
            AckKind::PubComp => out.handle_pubcomp(packet_id, env).map(|_| None),
        })?;
        let reply = step.map_err(Violation::from)?;
        Ok(reply.map_or(Effect::Done, Effect::Reply))
    }

    fn disconnect(&self, disconnect: &Disconnect, limits: &Limits) -> Result<Effect, Violation> {
        if self.expiry == 0 && disconnect.session_expiry.is_some_and(|seconds| seconds != 0) {
            return Err(Violation(reason::PROTOCOL_ERROR)); // [MQTT-3.14.2-2]
        }
        let expiry = disconnect.session_expiry.map(|seconds| seconds.min(limits.session_expiry_max));
        Ok(Effect::Disconnect { code: disconnect.code, expiry })
    }
}

impl From<WrongStep> for Violation {
    fn from(WrongStep: WrongStep) -> Self {
        Self(reason::PROTOCOL_ERROR)
    }
}
