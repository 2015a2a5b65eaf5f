//! Messages to another broker.

use std::{collections::BTreeMap, sync::Arc};

use codec::{Packet, Publish, PublishFrame, reason};
use gateway_core::{Properties, QoS, clock};
use tokio::{
    select,
    time::{Instant, sleep_until, timeout},
};

use super::{
    Dial,
    link::{BrokerLink, STEADY, SessionParameters},
};
use crate::{
    mark::{MARK, has_mark},
    outward::{BridgeSink, OutboundProgress},
    search::PoisonSearch,
    status::{BridgeFailure, BridgeRefusal, BridgeStatus, Reason},
    work::{BridgeBatch, BridgeItem, Fate},
};

/// A broker that messages are sent to. They count as delivered when it has acknowledged them; at QoS 0 when they are written.
pub(crate) struct MqttOut {
    dial: Dial,
    status: Arc<BridgeStatus>,
    link: Option<BrokerLink>,
    /// Time at which the connection counts as up; `None` once it does.
    steady: Option<Instant>,
    /// Tells which message the broker ends connections for.
    search: PoisonSearch,
    /// The last packet id.
    last: u16,
}

/// The broker sends acknowledgements, and nothing long.
const SESSION: SessionParameters =
    SessionParameters { keeps: None, receive_maximum: 16, max_packet: 64 << 10 };
/// Bytes that wait to be written before more are encoded.
const AHEAD: usize = 64 << 10;

impl MqttOut {
    pub(crate) fn new(dial: Dial, status: Arc<BridgeStatus>) -> Self {
        Self { dial, status, link: None, steady: None, search: PoisonSearch::default(), last: 0 }
    }
}

impl BridgeSink for MqttOut {
    async fn deliver(&mut self, work: &mut BridgeBatch) -> Result<OutboundProgress, BridgeFailure> {
        let part = self.search.next(work);
        // Messages that are written and not acknowledged.
        let mut sent = Vec::new();
        let Err(failure) = self.send(work, &part, &mut sent).await else {
            self.search.succeeded(&part, work);
            return Ok(OutboundProgress::of(work));
        };
        self.link = None;
        sent.retain(|&at| work.is_open(at));
        if sent.is_empty() || !failure.may_be_caused_by_a_message() {
            return Err(failure);
        }
        let failure = match sent[..] {
            [at] => failure.alone(&work.item(at).message().topic),
            _ => failure,
        };
        if self.search.failed(&sent, work, &failure) { Ok(OutboundProgress::of(work)) } else { Err(failure) }
    }

    async fn idle(&mut self) -> Result<(), BridgeFailure> {
        let link = match &mut self.link {
            Some(link) => link,
            None => {
                let link = BrokerLink::open(&self.dial, SESSION).await?;
                self.steady = Some(Instant::now() + STEADY);
                self.link.insert(link)
            }
        };
        loop {
            let steady = self.steady.unwrap_or_else(Instant::now);
            select! {
                step = link.step() => step?,
                () = sleep_until(steady), if self.steady.is_some() => {
                    self.steady = None;
                    return Ok(());
                }
            }
            while let Some(bytes) = link.take()? {
                let packet = link.read(&bytes)?;
                link.other(&packet)?;
            }
        }
    }

    fn reset(&mut self) {
        self.link = None;
    }
}

impl MqttOut {
    /// Returns a connection; one that answers if `is_careful`, so that an end without a message is not blamed on one.
    async fn connect(&mut self, is_careful: bool) -> Result<BrokerLink, BridgeFailure> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => BrokerLink::open(&self.dial, SESSION).await?,
        };
        if is_careful {
            link.ping().await?;
        }
        Ok(link)
    }

    /// Sends these messages, and notes in `sent` those that the broker has to answer for.
    async fn send(
        &mut self,
        work: &mut BridgeBatch,
        part: &[usize],
        sent: &mut Vec<usize>,
    ) -> Result<(), BridgeFailure> {
        let late = |_| BridgeFailure::late();
        let deadline = self.dial.deadline;
        let is_careful = self.search.is_careful();
        // Messages have the whole deadline, however long the connection took: it is not to be blamed on them.
        let mut link = timeout(deadline, self.connect(is_careful)).await.map_err(late)??;
        let exchange = async {
            self.exchange(&mut link, work, part, sent).await?;
            if is_careful && self.dial.config.qos == 0 && !sent.is_empty() {
                // There is no PUBACK: the broker answers a ping after it has read the message.
                link.ping().await?;
            }
            Ok(())
        };
        timeout(deadline, exchange).await.map_err(late)??;
        if self.dial.config.qos == 0 {
            sent.drain(..).for_each(|at| work.set(at, Fate::Done));
        }
        self.link = Some(link);
        Ok(())
    }

    /// Writes messages and reads acknowledgements, as many messages at once as the broker allows.
    async fn exchange(
        &mut self,
        link: &mut BrokerLink,
        work: &mut BridgeBatch,
        part: &[usize],
        sent: &mut Vec<usize>,
    ) -> Result<(), BridgeFailure> {
        let qos = QoS::from_bits(self.dial.config.qos).unwrap_or_default();
        let window = usize::from(link.welcome.receive_maximum.unwrap_or(u16::MAX));
        let mut open = part.iter().copied().peekable();
        let mut waiting: BTreeMap<u16, usize> = BTreeMap::new();
        loop {
            while waiting.len() < window
                && link.unwritten() < AHEAD
                && let Some(at) = open.next()
            {
                let id = match qos {
                    QoS::AtMostOnce => 0,
                    _ => self.next_id(),
                };
                match self.put(link, work.item(at), id, qos) {
                    SendAttempt::Sent => {
                        sent.push(at);
                        if id != 0 {
                            waiting.insert(id, at);
                        }
                    }
                    SendAttempt::Passed => work.set(at, Fate::Done),
                    SendAttempt::Expired => {
                        self.status.expired(1);
                        work.set(at, Fate::Done);
                    }
                    SendAttempt::Refused(refusal, why) => work.set(at, Fate::Refused(refusal, why)),
                }
            }
            if open.peek().is_none() && waiting.is_empty() && link.unwritten() == 0 {
                return Ok(());
            }
            link.step().await?;
            while let Some(bytes) = link.take()? {
                let packet = link.read(&bytes)?;
                if let Packet::PubAck(ack) = &packet
                    && let Some(at) = waiting.remove(&ack.packet_id)
                {
                    work.set(at, fate(ack.code)?);
                } else {
                    link.other(&packet)?;
                }
            }
        }
    }

    fn next_id(&mut self) -> u16 {
        self.last = self.last.checked_add(1).unwrap_or(1);
        self.last
    }

    fn put(&self, link: &mut BrokerLink, item: &BridgeItem, id: u16, qos: QoS) -> SendAttempt {
        let message = item.message();
        let has = |mark: &str| has_mark(message.properties.as_deref(), mark);
        if has(&self.dial.mark) || link.mark().is_some_and(has) {
            // Sent before, and back again; or received from the gateway on the other side.
            self.status.looped();
            return SendAttempt::Passed;
        }
        let left = item.left(clock::now());
        if left.is_some_and(|left| left.is_zero()) {
            return SendAttempt::Expired;
        }
        let config = &self.dial.config;
        let rest = message.topic.strip_prefix(config.local_prefix.as_str()).unwrap_or(&message.topic);
        let topic = format!("{}{rest}", config.remote_prefix);
        if topic.is_empty() || topic.len() > usize::from(u16::MAX) {
            return SendAttempt::Refused(BridgeRefusal::Topic, "its topic has no name there".to_owned());
        }
        let is_v5 = link.protocol().is_v5();
        let properties = is_v5.then(|| {
            let mut properties = message.properties.as_deref().cloned().unwrap_or_default();
            properties.user.push((MARK.to_owned(), self.dial.mark.clone()));
            Arc::<Properties>::new(properties)
        });
        let expiry = left.filter(|_| is_v5);
        let publish = Publish {
            dup: false,
            qos,
            retain: message.retain && config.retain && link.welcome.retain_available != Some(false),
            topic: &topic,
            packet_id: id,
            payload: &message.payload,
            alias: None,
            expiry: expiry.map(|left| u32::try_from(left.as_millis().div_ceil(1000)).unwrap_or(u32::MAX)),
            ids: Vec::new(),
            properties,
        };
        let most = link.welcome.maximum_packet_size.map_or(codec::MAX_FRAME_LEN, |most| most as usize);
        if PublishFrame::of(&publish, link.protocol()).encoded_len() > most {
            return SendAttempt::Refused(
                BridgeRefusal::Size,
                format!("longer than the broker takes ({most} bytes)"),
            );
        }
        link.put(&Packet::Publish(publish));
        SendAttempt::Sent
    }
}

/// Result of an attempt to send a message.
enum SendAttempt {
    Sent,
    /// The message is not for the other side.
    Passed,
    /// Its time ended while those before it were sent [MQTT-3.3.2-5].
    Expired,
    Refused(BridgeRefusal, String),
}

/// Reads an acknowledgement. A broker that is full is a failure; any other refusal of a message is for good.
fn fate(code: u8) -> Result<Fate, BridgeFailure> {
    match code {
        0..0x80 => Ok(Fate::Done),
        reason::QUOTA_EXCEEDED => {
            Err(BridgeFailure::new(Reason::Busy, "the broker takes no more for now (quota exceeded)"))
        }
        code => Ok(Fate::Refused(refusal(code), format!("the broker refuses it, code {code:#04x}"))),
    }
}

fn refusal(code: u8) -> BridgeRefusal {
    match code {
        reason::TOPIC_NAME_INVALID => BridgeRefusal::Topic,
        reason::PACKET_TOO_LARGE => BridgeRefusal::Size,
        _ => BridgeRefusal::Other,
    }
}
