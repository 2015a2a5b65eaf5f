//! A packet that was too much for one poll: what is left of it, in its place. Nothing after it is looked at before it is
//! done. If the connection ends first it is not answered; filters that are left are forgotten, and a message reaches the
//! rest of its receivers all the same.

use std::sync::Arc;

use broker::{Published, Session, Spread, SubscribeError, SubscribeRequest, Target, Turn};
use codec::{Packet, SubscribeFilter, reason};
use gateway_core::{Commit, Effort, QoS, Timestamp, level_count};
use session::{Filters, Gate, Inbound, TooManyGranted};

use super::{
    Connection,
    ending::End,
    frames::{close_unit, subscribe_code},
};
use auth::SubscribePermit;
use device::Device;

/// Remainder of a packet, and the commit that must be on disk before the packet is answered.
pub(crate) enum Unfinished {
    Subscribe(Filters<SubscribeFilter>, Option<Arc<Commit>>),
    Unsubscribe(Filters<String>, Option<Arc<Commit>>),
    Publish(Publishing),
}

/// A PUBLISH whose message some receivers have.
pub(crate) struct Publishing {
    pub spread: Box<Spread>,
    pub qos: QoS,
    pub packet_id: u16,
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

    /// Hands the message to the rest without its connection, in turns. Messages of the client's next connection may
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

impl Connection {
    pub(crate) fn handle_subscribe(
        &mut self,
        filters: Filters<SubscribeFilter>,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let commit = self.device.is_durable().then(Commit::new);
        self.go_on_with(Unfinished::Subscribe(filters, commit), now, turn, answers)
    }

    pub(crate) fn handle_unsubscribe(
        &mut self,
        filters: Filters<String>,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let commit = self.device.is_durable().then(Commit::new);
        self.go_on_with(Unfinished::Unsubscribe(filters, commit), now, turn, answers)
    }

    /// Returns whether a packet is not done yet.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| rare.unfinished.is_some())
    }

    /// Goes on with the unfinished packet, if there is one, until it is done or the account is spent.
    pub(crate) fn go_on(
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
            Unfinished::Subscribe(mut filters, commit) => {
                self.subscribe_some(&mut filters, commit.as_ref(), now, &mut turn.effort);
                if filters.is_done() {
                    return self.answer(&Packet::SubAck(filters.into_answer()), commit, answers);
                }
                Unfinished::Subscribe(filters, commit)
            }
            Unfinished::Unsubscribe(mut filters, commit) => {
                self.unsubscribe_some(&mut filters, commit.as_ref(), now, &mut turn.effort);
                if filters.is_done() {
                    return self.answer(&Packet::UnsubAck(filters.into_answer()), commit, answers);
                }
                Unfinished::Unsubscribe(filters, commit)
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
    pub(crate) fn put_off(&mut self, publishing: Publishing) {
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
        let reply = self.inbound.routed(publishing.qos, publishing.packet_id, published.matched, commit);
        reply.map_or(Ok(()), |reply| self.reply(reply, answers))
    }

    /// The connection ends: what becomes of the packet that it has not finished.
    pub(crate) fn leave_unfinished(&mut self) {
        let unfinished = self.rare.as_mut().and_then(|rare| rare.unfinished.take());
        if let Some(Unfinished::Publish(publishing)) = unfinished.map(|unfinished| *unfinished) {
            publishing.finish_alone(Arc::clone(&self.device));
        }
    }

    fn subscribe_some(
        &mut self,
        filters: &mut Filters<SubscribeFilter>,
        commit: Option<&Arc<Commit>>,
        now: Timestamp,
        effort: &mut Effort,
    ) {
        while !effort.is_spent() {
            let mut permits = self.permits(now);
            if filters.peek().is_some_and(|wanted| permits.must_ask_about(&wanted.filter, wanted.qos)) {
                // Nothing after it is looked at before there is an answer.
                effort.exhaust();
                break;
            }
            let Some(wanted) = filters.next_filter() else { break };
            let request = SubscribeRequest {
                filter: &wanted.filter,
                qos: wanted.qos,
                no_local: wanted.no_local,
                retain_as_published: wanted.retain_as_published,
                retain_handling: wanted.retain_handling,
                id: filters.id,
                commit,
            };
            filters.answer(match self.subscribe_one(&request, now, effort) {
                Ok(qos) => qos as u8,
                Err(error) => {
                    let code = subscribe_code(error);
                    if code == reason::QUOTA_EXCEEDED {
                        self.log_refusal("SUBSCRIBE", code);
                    }
                    self.inbound.suback_code(code)
                }
            });
        }
    }

    /// Grants the session, or takes from it, the filters that the user's service allows; `None` if the session is
    /// another connection's.
    fn tell_gate<R>(&self, act: impl FnOnce(&mut (dyn Gate + 'static)) -> R) -> Option<R> {
        self.device.lock_owned(self.epoch)?.out.gate().map(act)
    }

    fn subscribe_one(
        &mut self,
        request: &SubscribeRequest<'_>,
        now: Timestamp,
        effort: &mut Effort,
    ) -> Result<QoS, SubscribeError> {
        effort.spend(Effort::FILTER);
        effort.spend_each(Effort::NODE, level_count(request.filter));
        let is_granted = match self.permits(now).may_subscribe(request.filter, request.qos) {
            SubscribePermit::Granted => false,
            SubscribePermit::ByService => {
                let granted = self.tell_gate(|gate| gate.grant(request.filter)).unwrap_or(Ok(false));
                granted.map_err(|TooManyGranted| {
                    broker::counters::count(|c| c.subscribe_refused.add(1));
                    SubscribeError::Quota
                })?
            }
            SubscribePermit::Refused => return Err(SubscribeError::NotAuthorized),
        };
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        let subscribed = self.device.broker().subscribe(&session, request, now).inspect_err(|_| {
            if is_granted {
                self.tell_gate(|gate| gate.withdraw(request.filter));
            }
        })?;
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

    fn unsubscribe_some(
        &mut self,
        filters: &mut Filters<String>,
        commit: Option<&Arc<Commit>>,
        now: Timestamp,
        effort: &mut Effort,
    ) {
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        while !effort.is_spent() {
            let Some(filter) = filters.next_filter() else { break };
            effort.spend(Effort::FILTER);
            let existed = self.device.broker().unsubscribe(&session, &filter, now, commit);
            if self.shared.authority.as_ref().is_some_and(|known| known.authorizer().is_some()) {
                self.tell_gate(|gate| gate.withdraw(&filter));
            }
            // [MQTT-3.10.4-2]
            self.end_replay(&filter);
            filters.answer(Inbound::unsuback_code(existed));
        }
    }
}
