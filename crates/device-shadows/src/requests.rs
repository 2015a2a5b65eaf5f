//! Requests of devices: taken on the thread that serves the device, carried out elsewhere, answered to its topics.

use std::sync::Arc;

use broker::{Broker, Reserved, ReservedOutcome, Shortage, Turn};
use bytes::Bytes;
use gateway_core::{Commit, Effort, Message, Timestamp};
use shadow::{AnswerContext, Rejection, ShadowOperation, Snapshot, Update, client_token, operation};

use super::{ShadowKey, ShadowService, device_queues::WorkRefusal, wall};
use crate::counters::count;

/// A payload up to this size is read for its token on the thread that serves the device, to refuse a request with it.
const QUICK: usize = 1024;

/// The acknowledgement of a request waits for this: until the change is durable, or the request has its answer. Refused if its
/// work is given up.
struct Promise(Option<Arc<Commit>>);

impl Promise {
    fn keep(mut self) {
        if let Some(part) = self.0.take() {
            part.done();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(part) = self.0.take() {
            part.refuse();
        }
    }
}

/// A request on its way.
struct ShadowRequest {
    key: ShadowKey,
    operation: ShadowOperation,
    payload: Bytes,
    asked: Timestamp,
    promise: Promise,
}

/// The shadows as a part of the gateway that hears from devices.
pub struct DeviceShadows(pub Arc<ShadowService>);

impl Reserved for DeviceShadows {
    fn prefix(&self) -> &str {
        self.0.options.topics.prefix()
    }

    fn take(&self, message: &Message<'_>, rest: &str, broker: &Broker, turn: &mut Turn) -> ReservedOutcome {
        let (Some(device), Some((operation, name))) = (message.origin.client_id, operation(rest)) else {
            store::counters::count(|c| c.shadow_requests_unknown.add(1));
            return ReservedOutcome::Taken;
        };
        turn.effort.spend(Effort::REQUEST);
        turn.effort.spend_each(Effort::KIB, message.payload.len() / 1024);
        let shadows = &self.0;
        let key = ShadowKey { device: device.clone(), name: Arc::from(name) };
        // A message larger than any request is answered, but not kept.
        let size = message.payload.len().min(shadows.options.limits.request_bytes() + 1);
        let make = || {
            let request = ShadowRequest {
                key: key.clone(),
                operation,
                payload: Bytes::copy_from_slice(&message.payload[..size]),
                asked: message.received,
                promise: Promise(message.plain_part()),
            };
            Box::pin(Arc::clone(shadows).carry_out(request, broker.clone()))
                as super::device_queues::DeviceWork
        };
        match shadows.device_queues.request(broker.account(), device, size, make) {
            Ok(()) => {
                count(|c| {
                    match operation {
                        ShadowOperation::Update => &c.shadow_updates_device,
                        ShadowOperation::Get => &c.shadow_gets_device,
                        ShadowOperation::Delete => &c.shadow_deletes_device,
                    }
                    .add(1);
                });
                ReservedOutcome::Taken
            }
            Err(WorkRefusal::Memory) => {
                store::counters::count(|c| c.shadow_refused_memory.add(1));
                ReservedOutcome::Refused(Shortage::Memory)
            }
            Err(WorkRefusal::Device) => {
                store::counters::count(|c| c.shadow_refused_requests.add(1));
                let quick = &message.payload[..size.min(QUICK)];
                let token = client_token(quick, &shadows.options.limits).ok().flatten();
                shadows.reject(broker, &key, operation, token.as_deref(), &Rejection::TooManyRequests, turn);
                ReservedOutcome::Taken
            }
        }
    }
}

impl ShadowService {
    async fn carry_out(self: Arc<Self>, request: ShadowRequest, broker: Broker) {
        let ShadowRequest { key, operation, payload, asked, promise } = request;
        let limits = &self.options.limits;
        if let Err(rejection) = self.check_wait(asked) {
            let mut turn = Turn::default();
            let token = client_token(&payload, limits).ok().flatten();
            self.reject(&broker, &key, operation, token.as_deref(), &rejection, &mut turn);
            turn.flush();
            return promise.keep();
        }
        let (token, result) = match operation {
            ShadowOperation::Update => match Update::parse(&payload, limits) {
                Err((rejection, token)) => (token, Err(rejection)),
                Ok(update) => match self.make_update(&key, &update).await {
                    Ok(updated) => {
                        // On disk: the acknowledgement may go, and the answers with it.
                        promise.keep();
                        self.tell_update(&broker, &key, &update, &updated);
                        return;
                    }
                    Err(rejection) => (update.client_token, Err(rejection)),
                },
            },
            ShadowOperation::Get => match client_token(&payload, limits) {
                Err(rejection) => (None, Err(rejection)),
                Ok(token) => (token, self.get(&key).await),
            },
            ShadowOperation::Delete => match client_token(&payload, limits) {
                Err(rejection) => (None, Err(rejection)),
                Ok(token) => match self.make_delete(&key, None).await {
                    Ok(left) => {
                        promise.keep();
                        self.tell_delete(&broker, &key, &left, token.as_deref());
                        return;
                    }
                    Err(rejection) => (token, Err(rejection)),
                },
            },
        };
        let mut turn = Turn::default();
        match result {
            Ok(shadow) => {
                if let Some(state) = &shadow.state {
                    let context = AnswerContext { now: wall().0 / 1000, client_token: token.as_deref() };
                    let text = context.get_accepted(Snapshot { state, version: shadow.version });
                    self.publish(&broker, &key, "get/accepted", &text, &mut turn);
                }
                promise.keep();
            }
            Err(rejection) => {
                self.reject(&broker, &key, operation, token.as_deref(), &rejection, &mut turn);
                // The rejection is the answer, also where the store is away: a client of MQTT 3 could only be told by the
                // end of its connection, again and again while the store is away.
                promise.keep();
            }
        }
        turn.flush();
    }

    fn reject(
        &self,
        broker: &Broker,
        key: &ShadowKey,
        operation: ShadowOperation,
        client_token: Option<&str>,
        rejection: &Rejection,
        turn: &mut Turn,
    ) {
        count(|c| c.shadow_rejected.add(1));
        let text = AnswerContext { now: wall().0 / 1000, client_token }.rejected(rejection);
        let answer = [operation.name(), "/rejected"].concat();
        self.publish(broker, key, &answer, &text, turn);
    }
}
