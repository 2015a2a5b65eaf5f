//! A packet that was too much for one poll: what is left of it, in its place. Nothing behind it is looked at before it is
//! done. If the connection ends first it is not answered; filters that are left are forgotten, and a message reaches the
//! rest of its receivers all the same.

use std::sync::Arc;

use broker::{Published, Session, Spread, SubscribeError, SubscribeRequest, Target, Turn};
use codec::{Packet, SubAck, Subscribe, SubscribeFilter, Unsubscribe, reason};
use gateway_core::{Commit, Effort, QoS, Timestamp};

use super::{
    connection::Connection,
    device::Device,
    ending::End,
    packets::{close_unit, subscribe_code},
};

/// What is left of a packet.
pub(super) enum Unfinished {
    Subscribe { id: Option<u32>, filters: Filters<SubscribeFilter> },
    Unsubscribe(Filters<String>),
    Publish(Publishing),
}

/// A PUBLISH whose message some receivers have.
pub(super) struct Publishing {
    pub(super) spread: Box<Spread>,
    pub(super) qos: QoS,
    pub(super) packet_id: u16,
}

impl Publishing {
    /// All receivers have it: what must be on disk before it is acknowledged.
    fn conclude(&self, device: &Device) -> Option<Arc<Commit>> {
        let commit = self.spread.commit().cloned();
        if let Some(unit) = self.spread.unit() {
            close_unit(device, self.packet_id, unit);
        }
        if let Some(commit) = &commit {
            commit.done();
        }
        commit
    }

    /// Hands the message to the rest without its connection, in turns. What the next connection of the client sends may
    /// overtake it.
    fn finish_alone(mut self, device: Arc<Device>) {
        let rest = async move {
            let mut turn = Turn::default();
            while self.spread.go_on(&mut turn).is_none() {
                turn.flush();
                turn.effort.renew();
                tokio::task::yield_now().await;
            }
            turn.flush();
            self.conclude(&device);
        };
        // Without a runtime it is dropped, and with it handed out at once.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(rest);
        }
    }
}

/// The filters of a packet that are left, and the answers to the others.
pub(super) struct Filters<F> {
    packet_id: u16,
    left: std::vec::IntoIter<F>,
    codes: Vec<u8>,
    /// What must be on disk before the answer.
    commit: Option<Arc<Commit>>,
}

impl<F> Filters<F> {
    fn new(packet_id: u16, filters: Vec<F>, durable: bool) -> Self {
        let codes = Vec::with_capacity(filters.len());
        Self { packet_id, left: filters.into_iter(), codes, commit: durable.then(Commit::new) }
    }

    fn into_answer(self) -> (SubAck, Option<Arc<Commit>>) {
        let Self { packet_id, codes, commit, .. } = self;
        (SubAck { packet_id, reason_string: None, user: Vec::new(), codes }, commit)
    }
}

impl Connection {
    pub(super) fn handle_subscribe(
        &mut self,
        subscribe: Subscribe,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        self.inbound.check_subscribe(&subscribe, &self.device.shared.limits).map_err(End::Protocol)?;
        let filters = Filters::new(subscribe.packet_id, subscribe.filters, self.device.is_durable());
        self.go_on_with(Unfinished::Subscribe { id: subscribe.id, filters }, now, turn, answers)
    }

    pub(super) fn handle_unsubscribe(
        &mut self,
        unsubscribe: Unsubscribe,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let filters = Filters::new(unsubscribe.packet_id, unsubscribe.filters, self.device.is_durable());
        self.go_on_with(Unfinished::Unsubscribe(filters), now, turn, answers)
    }

    /// Whether a packet is not done yet.
    pub(super) fn is_unfinished(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| rare.unfinished.is_some())
    }

    /// Goes on with the unfinished packet, if there is one, until it is done or the account is spent.
    pub(super) fn go_on(
        &mut self,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let Some(unfinished) = self.rare.as_mut().and_then(|rare| rare.unfinished.take()) else {
            return Ok(());
        };
        self.rare.take_if(|rare| rare.is_unused());
        self.go_on_with(*unfinished, now, turn, answers)
    }

    fn go_on_with(
        &mut self,
        unfinished: Unfinished,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let left = match unfinished {
            Unfinished::Subscribe { id, mut filters } => {
                self.subscribe_some(id, &mut filters, now, &mut turn.effort)?;
                if filters.left.len() == 0 {
                    let (suback, commit) = filters.into_answer();
                    return self.answer(&Packet::SubAck(suback), commit, answers);
                }
                Unfinished::Subscribe { id, filters }
            }
            Unfinished::Unsubscribe(mut filters) => {
                self.unsubscribe_some(&mut filters, now, &mut turn.effort);
                if filters.left.len() == 0 {
                    let (unsuback, commit) = filters.into_answer();
                    return self.answer(&Packet::UnsubAck(unsuback), commit, answers);
                }
                Unfinished::Unsubscribe(filters)
            }
            Unfinished::Publish(mut publishing) => match publishing.spread.go_on(turn) {
                Some(published) => return self.conclude_publish(&publishing, published, answers),
                None => Unfinished::Publish(publishing),
            },
        };
        self.rare().unfinished = Some(Box::new(left));
        Ok(())
    }

    /// A message with too many receivers for this poll.
    pub(super) fn put_off(&mut self, publishing: Publishing) {
        // The same PUBLISH on the client's next connection is a duplicate: it is not acknowledged before this one is safe.
        if publishing.qos == QoS::ExactlyOnce
            && let Some(commit) = publishing.spread.commit()
        {
            let _ = self.device.lock().out.keep_received(publishing.packet_id, Arc::clone(commit));
        }
        self.rare().unfinished = Some(Box::new(Unfinished::Publish(publishing)));
    }

    fn conclude_publish(
        &mut self,
        publishing: &Publishing,
        published: Published,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let commit = publishing.conclude(&self.device);
        if publishing.qos == QoS::AtMostOnce {
            return Ok(());
        }
        let code = if published.matched == 0 { reason::NO_MATCHING_SUBSCRIBERS } else { reason::SUCCESS };
        self.acknowledge(publishing.qos, publishing.packet_id, code, commit, answers)
    }

    /// The connection ends: what becomes of the packet that it has not finished.
    pub(super) fn leave_unfinished(&mut self) {
        let unfinished = self.rare.as_mut().and_then(|rare| rare.unfinished.take());
        if let Some(Unfinished::Publish(publishing)) = unfinished.map(|unfinished| *unfinished) {
            publishing.finish_alone(Arc::clone(&self.device));
        }
    }

    fn subscribe_some(
        &mut self,
        id: Option<u32>,
        filters: &mut Filters<SubscribeFilter>,
        now: Timestamp,
        effort: &mut Effort,
    ) -> Result<(), End> {
        let protocol = self.inbound.protocol();
        let most = QoS::from_bits(self.device.shared.limits.max_qos).unwrap_or(QoS::ExactlyOnce);
        while !effort.is_spent() {
            let Some(wanted) = filters.left.next() else { break };
            let request = SubscribeRequest {
                filter: &wanted.filter,
                qos: wanted.qos.min(most),
                no_local: wanted.no_local,
                retain_as_published: wanted.retain_as_published,
                retain_handling: wanted.retain_handling,
                id,
                commit: filters.commit.as_ref(),
            };
            let code = match self.subscribe_one(&request, now, effort) {
                Ok(qos) => qos as u8,
                Err(SubscribeError::NoLocalShared) => return Err(End::Protocol(reason::PROTOCOL_ERROR)),
                Err(error) => {
                    let code = subscribe_code(error);
                    if code == reason::QUOTA_EXCEEDED {
                        self.log_refusal("SUBSCRIBE", code);
                    }
                    if protocol.is_v5() { code } else { 0x80 }
                }
            };
            filters.codes.push(code);
        }
        Ok(())
    }

    fn subscribe_one(
        &mut self,
        request: &SubscribeRequest<'_>,
        now: Timestamp,
        effort: &mut Effort,
    ) -> Result<QoS, SubscribeError> {
        effort.spend(Effort::FILTER);
        let limits = &self.device.shared.limits;
        let levels = request.filter.bytes().filter(|b| *b == b'/').count() + 1;
        if request.filter.len() > limits.max_topic_bytes || levels > limits.max_topic_levels {
            return Err(SubscribeError::Invalid);
        }
        effort.spend_each(Effort::NODE, levels);
        if !self.identity.may_subscribe(request.filter) {
            return Err(SubscribeError::NotAuthorized);
        }
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        let subscribed = self.device.shared.broker.subscribe(&session, request, now)?;
        effort.spend_each(Effort::MEMBER, subscribed.members);
        if let Some(cursor) = subscribed.replay {
            self.begin_replay(cursor, now);
        }
        if subscribed.group_queue {
            // Taken up like a replay; nobody else would, until the next message.
            self.rare().group_queues = true;
        }
        Ok(subscribed.qos)
    }

    fn unsubscribe_some(&mut self, filters: &mut Filters<String>, now: Timestamp, effort: &mut Effort) {
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        while !effort.is_spent() {
            let Some(filter) = filters.left.next() else { break };
            effort.spend(Effort::FILTER);
            let (broker, commit) = (&self.device.shared.broker, filters.commit.as_ref());
            let existed = broker.unsubscribe(&session, &filter, now, commit);
            // [MQTT-3.10.4-2]
            self.end_replay(&filter);
            filters.codes.push(if existed { reason::SUCCESS } else { reason::NO_SUBSCRIPTION_EXISTED });
        }
    }
}
