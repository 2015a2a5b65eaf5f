//! Messages from another broker. The bridge has a session there that outlives its connection, so that what is published while the
//! bridge is away waits for it; a PUBACK goes out when the message is on the gateway's disk.

use std::{collections::VecDeque, future::pending, sync::Arc, time::Duration};

use broker::Turn;
use bytes::Bytes;
use codec::{Ack, Packet, Publish, Subscribe, SubscribeFilter};
use config::Bridge;
use gateway_core::{Commit, QoS};
use tokio::{
    select,
    time::{Instant, sleep_until},
};

use super::{
    Dial,
    link::{BrokerLink, STEADY, SessionParameters},
};
use crate::{
    inward::{BridgePublisher, In, InwardMessage},
    status::{BridgeFailure, BridgeRefusal, BridgeStatus, Reason},
};

/// Messages that the broker may have sent and that are not acknowledged.
const WINDOW: u16 = 1_000;
/// Bytes of payloads of these.
const WINDOW_BYTES: usize = 4 << 20;
/// Bytes that the broker has not taken: until it does, nothing more is read, since answers would add to them.
const UNWRITTEN: usize = 64 << 10;
/// Time for the subscription.
const SUBSCRIBING: Duration = Duration::from_secs(15);

/// See the module.
pub(crate) struct MqttIn {
    dial: Dial,
    config: Bridge,
    status: Arc<BridgeStatus>,
    door: BridgePublisher,
    max_packet: usize,
}

/// A message that is published here and not acknowledged there.
struct UnacknowledgedMessage {
    id: u16,
    bytes: usize,
    /// True if the message was published, and not left out.
    is_carried: bool,
    commit: Option<Arc<Commit>>,
}

impl MqttIn {
    pub(crate) fn new(
        dial: Dial,
        config: Bridge,
        status: Arc<BridgeStatus>,
        door: BridgePublisher,
        max_packet: usize,
    ) -> Self {
        Self { dial, config, status, door, max_packet }
    }
}

impl In for MqttIn {
    async fn serve(&mut self) -> BridgeFailure {
        match self.bring().await {
            Ok(never) => match never {},
            Err(failure) => failure,
        }
    }
}

impl MqttIn {
    async fn bring(&self) -> Result<std::convert::Infallible, BridgeFailure> {
        let keeps = u32::try_from(self.config.max_age.0.as_secs()).unwrap_or(u32::MAX);
        let parameters =
            SessionParameters { keeps: Some(keeps), receive_maximum: WINDOW, max_packet: self.max_packet };
        let mut link = BrokerLink::open(&self.dial, parameters).await?;
        let mut unacknowledged: VecDeque<UnacknowledgedMessage> = VecDeque::new();
        link.put(&Packet::Subscribe(self.subscription(&link)));
        // Messages of the session may come before the answer.
        let (mut granted, deadline) = (false, Instant::now() + SUBSCRIBING);
        // Time at which the connection counts as up; `None` before SUBACK and afterwards.
        let mut steady: Option<Instant> = None;
        loop {
            let waiting: usize = unacknowledged.iter().map(|unacknowledged| unacknowledged.bytes).sum();
            let full = unacknowledged.len() >= usize::from(WINDOW)
                || waiting >= WINDOW_BYTES
                || link.unwritten() >= UNWRITTEN;
            let first = async {
                match unacknowledged.front().map(|unacknowledged| &unacknowledged.commit) {
                    Some(Some(commit)) => commit.wait().await,
                    Some(None) => Ok(()),
                    None => pending().await,
                }
            };
            select! {
                written = first => {
                    written.map_err(|_| BridgeFailure::new(Reason::Store, "the disk has not taken a message"))?;
                    let Some(done) = unacknowledged.pop_front() else { continue };
                    if done.is_carried {
                        self.status.carried(1, done.bytes);
                        if steady.take().is_some() {
                            self.status.up();
                        }
                    }
                    self.status.set_in_flight(unacknowledged.len());
                    if done.id != 0 {
                        link.put(&Packet::PubAck(Ack {
                            packet_id: done.id,
                            code: 0,
                            reason_string: None,
                            user: Vec::new(),
                        }));
                    }
                }
                // The messages not yet acknowledged bound the reading; answers and pings go on.
                step = link.step_if(!full) => {
                    step?;
                    let mut turn = Turn::default();
                    while let Some(packet) = link.take()? {
                        if self.heard(&mut link, &packet, granted, &mut unacknowledged, &mut turn).await? {
                            granted = true;
                            steady = Some(Instant::now() + STEADY);
                        }
                    }
                    turn.flush();
                    self.status.set_in_flight(unacknowledged.len());
                }
                () = sleep_until(steady.unwrap_or(deadline)), if steady.is_some() => {
                    steady = None;
                    self.status.up();
                }
                () = sleep_until(deadline), if !granted => {
                    return Err(BridgeFailure::new(Reason::Deadline, "no answer to SUBSCRIBE"));
                }
            }
        }
    }

    fn subscription(&self, link: &BrokerLink) -> Subscribe {
        let is_v5 = link.protocol().is_v5();
        let all = ["#".to_owned()];
        let topics = if self.config.topics.is_empty() { &all[..] } else { &self.config.topics };
        let qos = QoS::from_bits(self.dial.config.qos).unwrap_or_default();
        let filter = |filter: &String| SubscribeFilter {
            filter: filter.clone(),
            qos,
            no_local: is_v5,
            retain_as_published: is_v5,
            // Retained messages come with a new session, and not again with each connection.
            retain_handling: u8::from(is_v5),
        };
        Subscribe { packet_id: 1, id: None, user: Vec::new(), filters: topics.iter().map(filter).collect() }
    }

    /// Tells whether it was the answer to SUBSCRIBE, which has not come if it is not `granted`.
    async fn heard(
        &self,
        link: &mut BrokerLink,
        packet: &Bytes,
        granted: bool,
        unacknowledged: &mut VecDeque<UnacknowledgedMessage>,
        turn: &mut Turn,
    ) -> Result<bool, BridgeFailure> {
        let publish = match link.read(packet)? {
            Packet::Publish(publish) => publish,
            Packet::SubAck(answer) if !granted => {
                let refused = answer.codes.iter().find(|&&code| code >= 0x80);
                let why = |code: &u8| format!("the broker refuses the subscription, code {code:#04x}");
                return refused.map_or(Ok(true), |code| Err(BridgeFailure::new(Reason::Denied, why(code))));
            }
            packet => return link.other(&packet).map(|()| false),
        };
        let published = self.publish(&publish, link.mark(), turn).await?;
        unacknowledged.push_back(UnacknowledgedMessage {
            id: publish.packet_id,
            bytes: publish.payload.len(),
            is_carried: published.is_some(),
            commit: published.flatten(),
        });
        Ok(false)
    }

    /// Tells whether the configuration names the topic: the session may still have subscriptions of an earlier one.
    fn wants(&self, topic: &str) -> bool {
        let matches = |filter: &String| {
            let shared = gateway_core::parse_shared(filter).ok().flatten();
            gateway_core::matches(shared.map_or(filter.as_str(), |(_, filter)| filter), topic)
        };
        self.config.topics.is_empty() || self.config.topics.iter().any(matches)
    }

    /// Publishes a message; returns the commit that its acknowledgement must wait for, if any, or `None` if the message is
    /// left out.
    async fn publish(
        &self,
        publish: &Publish<'_>,
        sender: Option<&str>,
        turn: &mut Turn,
    ) -> Result<Option<Option<Arc<Commit>>>, BridgeFailure> {
        if self.door.was_here(publish.properties.as_deref()) {
            self.status.looped();
            return Ok(None);
        }
        let config = &self.dial.config;
        let rest = publish.topic.strip_prefix(config.remote_prefix.as_str()).unwrap_or(publish.topic);
        let topic = format!("{}{rest}", config.local_prefix);
        if !self.wants(publish.topic) || !self.door.takes(&topic) {
            self.status.refused(BridgeRefusal::Topic, publish.topic, "not a topic that is brought in");
            return Ok(None);
        }
        let mut properties = publish.properties.as_deref().cloned().unwrap_or_default();
        self.door.mark(&mut properties, sender);
        let incoming = InwardMessage {
            topic: &topic,
            payload: publish.payload,
            qos: publish.qos,
            retain: publish.retain && config.retain,
            properties: Some(Arc::new(properties)),
            expiry: publish.expiry,
        };
        self.door.publish(&incoming, turn).await.map(Some)
    }
}
