//! Subscriptions that backends make for devices: made in the session as the device's own are, whether it is connected or not.
//!
//! Work that is the connection's, above all sending retained messages at its pace, is handed to it as replay work.

use std::sync::Arc;

use access::rules::AccessQuestion;
use broker::{ReplayWork, Session, SubscribeError, SubscribeRequest};
use gateway_core::{Commit, CommitRefused, TopicFilter, clock::now, parse_shared};

use crate::{context::Context, proto::gateway::v1, server::access::Call};
use auth::{self, Subject, Subscribing};
use grpc_messages::{answers, convert, status::Error};

/// The largest Subscription Identifier [MQTT-3.8.2.1.2].
const LARGEST_ID: u32 = 268_435_455;

/// Makes a subscription; returns once it is on disk, if the session is, and the retained messages are on their way. Cancel safe:
/// what is done stays.
pub(super) async fn subscribe(
    context: &Context,
    call: &Call,
    request: &v1::SubscribeDeviceRequest,
) -> Result<v1::SubscribeDeviceResponse, Error> {
    let (device, filter) = (request.device_id.as_str(), request.topic_filter.as_str());
    let broker = &context.broker;
    check_filter(call, filter)?;
    let retain_handling = match convert::known(request.retain_handling, "retain_handling")? {
        v1::RetainHandling::Unspecified | v1::RetainHandling::Send => 0,
        v1::RetainHandling::SendIfNew => 1,
        v1::RetainHandling::DoNotSend => 2,
    };
    let id = request.subscription_identifier;
    if id.is_some_and(|id| !(1..=LARGEST_ID).contains(&id)) {
        return Err(Error::invalid("subscription_identifier", "is not between 1 and 268435455"));
    }
    let qos = convert::wanted_qos(request.qos)?;
    let session = broker.session(device).ok_or(Error::DeviceNotFound)?;
    let is_new_grant = ask_rules(context, device, &session, filter).await?;
    let commit = session.is_durable().then(Commit::new);
    let wanted = SubscribeRequest {
        filter,
        qos,
        no_local: request.no_local,
        retain_as_published: request.retain_as_published,
        retain_handling,
        id,
        commit: commit.as_ref(),
    };
    let subscribed = broker.subscribe(&session, &wanted, now()).map_err(|error| {
        if is_new_grant {
            session.withdraw(filter);
        }
        match error {
            // So it is told, too, of a session that ends meanwhile.
            SubscribeError::NotAuthorized if broker.session(device).is_none() => Error::DeviceNotFound,
            error => refused(error),
        }
    })?;
    if let Some(commit) = commit
        && let Err(refused) = written(commit).await
    {
        if !subscribed.existed {
            broker.unsubscribe(&session, filter, now(), None);
            session.withdraw(filter);
        }
        return Err(refused);
    }
    if subscribed.group_queue {
        session.nudge();
    }
    if let Some(cursor) = subscribed.replay
        && let Err(ReplayWork::Replay(cursor)) = session.take_replay_work(ReplayWork::Replay(cursor))
    {
        cursor.queue_for(broker, &session).await;
        if let Some(stores) = broker.stores().filter(|_| session.is_durable()) {
            stores.flush_queues().await;
        }
    }
    let granted_qos = answers::qos_to_proto(subscribed.qos);
    Ok(v1::SubscribeDeviceResponse { granted_qos, replaced: subscribed.existed })
}

/// Removes a subscription; returns once that is on disk, if the session is. Whether there was one. Cancel safe.
pub(super) async fn unsubscribe(
    context: &Context,
    call: &Call,
    request: &v1::UnsubscribeDeviceRequest,
) -> Result<bool, Error> {
    let filter = request.topic_filter.as_str();
    check_filter(call, filter)?;
    let session = context.broker.session(&request.device_id).ok_or(Error::DeviceNotFound)?;
    let commit = session.is_durable().then(Commit::new);
    let existed = context.broker.unsubscribe(&session, filter, now(), commit.as_ref());
    session.withdraw(filter);
    if existed {
        // If there is nobody to take it there is no replay to be ended.
        let _ = session.take_replay_work(ReplayWork::EndReplay(filter.into()));
    }
    if let Some(commit) = commit {
        written(commit).await?;
    }
    Ok(existed)
}

/// Waits for the disk.
async fn written(commit: Arc<Commit>) -> Result<(), Error> {
    commit.done();
    commit.wait().await.map_err(|CommitRefused| Error::StoreRefused)
}

/// All topics of the filter must be in scope.
fn check_filter(call: &Call, filter: &str) -> Result<(), Error> {
    let inner = parse_shared(filter).map(|shared| shared.map_or(filter, |(_, inner)| inner)).ok();
    let inner = inner.filter(|inner| TopicFilter::check(inner).is_ok());
    let inner = inner.ok_or_else(|| Error::invalid("topic_filter", "is not a topic filter"))?;
    call.check_whole_filter("topic_filter", inner)
}

/// Asks who decides about subscriptions of this device, whether it is connected or was last. Of one that has not been since the
/// gateway started nobody knows who it is: what it is not allowed is withheld when it comes. Whether the session was granted
/// something that it did not have.
async fn ask_rules(
    context: &Context,
    device: &str,
    session: &Arc<dyn Session>,
    filter: &str,
) -> Result<bool, Error> {
    let Some(authority) = &context.hooks.authority else { return Ok(false) };
    let info = context.broker.device(device).ok_or(Error::DeviceNotFound)?;
    if info.restored {
        return Ok(false);
    }
    let principal = auth::principal(&info.connection);
    let subject = Subject { client_id: device, listener: &info.connection.listener, principal: &principal };
    match authority.subscribe(&subject, filter) {
        Subscribing::Allowed | Subscribing::OnDelivery => Ok(false),
        Subscribing::Denied(line) if line != 0 => Err(Error::FilterNotAllowed),
        Subscribing::Denied(_) => {
            match authority.ask_service(&subject, &AccessQuestion::Subscribe { filter }).await {
                Some((true, _)) => session.grant(filter).ok_or(Error::SubscriptionQuota),
                _ => Err(Error::FilterNotAllowed),
            }
        }
    }
}

fn refused(error: SubscribeError) -> Error {
    match error {
        SubscribeError::Invalid => Error::invalid("topic_filter", "is not a topic filter within the limits"),
        SubscribeError::NoLocalShared => Error::invalid("no_local", "is not for shared subscriptions"),
        SubscribeError::Quota => Error::SubscriptionQuota,
        SubscribeError::NotAuthorized => Error::FilterNotAllowed,
        SubscribeError::WildcardUnavailable => Error::FilterUnsupported("wildcards"),
        SubscribeError::SharedUnavailable => Error::FilterUnsupported("shared subscriptions"),
        SubscribeError::IdUnavailable => Error::FilterUnsupported("subscription identifiers"),
    }
}
