//! Routing of messages of backends: to those who subscribe, or to one device.

use std::sync::Arc;

use broker::{Broker, DirectOutcome, Published, Routing, Shortage, Spread, Turn};
use gateway_core::{Commit, Durability, Outcome, Receipt, SharedMessage, Timestamp, clock::now};

use super::routed::Routed;
use crate::counters::count;
use grpc_messages::{
    convert::Publication,
    status::{Error, drop_error},
    wait::Wait,
};

/// Lets the other calls of this thread go first.
pub(crate) async fn pause(turn: &mut Turn) {
    turn.flush();
    turn.effort.renew();
    tokio::task::yield_now().await;
}

/// Routes a message, and hands it to all its receivers.
pub(crate) async fn route(
    broker: &Broker,
    publication: &Publication,
    at: Timestamp,
    turn: &mut Turn,
) -> Result<Routed, Error> {
    let receipt = receipt(publication);
    let mut message = publication.message(at);
    message.receipt = receipt.as_ref();
    message.durability = durability(broker, publication);
    let (published, commit) = match &publication.device {
        None => match broker.publish_some(&message, turn) {
            Routing::Done(published) => (published, message.issued().cloned()),
            Routing::More(spread) => spread_all(spread, turn).await,
        },
        Some(device) => {
            let outcome = broker.publish_to_device(device, &message, publication.offline, turn);
            (direct(outcome)?, message.issued().cloned())
        }
    };
    let expires = message.expires;
    drop(message);
    let routed = routed(broker, publication, published, receipt, commit)?;
    let device = publication.device.as_deref();
    Ok(match device.zip(expires) {
        None => routed,
        Some((device, at)) => routed.until(broker, device, at),
    })
}

/// Hands to one device what is shared by all that get it.
pub(crate) fn route_to_device(
    broker: &Broker,
    publication: &Publication,
    shared: &Arc<SharedMessage>,
    device: &str,
    turn: &mut Turn,
) -> Result<Routed, Error> {
    let receipt = receipt(publication);
    let awaited = receipt.as_ref().map(|receipt| shared.with_receipt(Arc::clone(receipt)));
    let mut message = awaited.as_ref().unwrap_or(shared).borrow_at(now());
    message.durability = durability(broker, publication);
    let outcome = broker.publish_to_device(device, &message, publication.offline, turn);
    let commit = message.issued().cloned();
    let routed = routed(broker, publication, direct(outcome)?, receipt, commit)?;
    Ok(match message.expires {
        None => routed,
        Some(at) => routed.until(broker, device, at),
    })
}

/// Returns a receipt that records how far a message comes, if the caller waits for that.
fn receipt(publication: &Publication) -> Option<Arc<Receipt>> {
    matches!(publication.wait, Wait::Sent | Wait::Acked).then(Arc::<Receipt>::default)
}

fn durability(broker: &Broker, publication: &Publication) -> Durability {
    match publication.wait {
        Wait::Durable => Durability::Always,
        // Nobody waits for the disk.
        _ => broker.durability(&publication.topic, None).max(Durability::Interval),
    }
}

fn routed(
    broker: &Broker,
    publication: &Publication,
    published: Published,
    receipt: Option<Arc<Receipt>>,
    commit: Option<Arc<Commit>>,
) -> Result<Routed, Error> {
    if let Some(commit) = &commit {
        commit.done();
    }
    if let Some(refusal) = published.refused {
        return Err(refused(refusal));
    }
    count(|c| c.grpc_published.add(1));
    let is_barred = publication.wait == Wait::Durable && !broker.lease().is_open();
    let commit = if is_barred { Some(broker.lease().wait_for(commit)) } else { commit };
    Ok(Routed {
        published,
        wait: publication.wait,
        receipt: receipt.filter(|_| published.sent > 0),
        commit,
        scheduled: None,
        expiry: None,
    })
}

/// Hands a message to the rest of its receivers.
async fn spread_all(mut spread: Box<Spread>, turn: &mut Turn) -> (Published, Option<Arc<Commit>>) {
    loop {
        pause(turn).await;
        if let Some(published) = spread.go_on(turn) {
            return (published, spread.commit().cloned());
        }
    }
}

fn refused(refusal: Shortage) -> Error {
    match refusal {
        Shortage::Memory => Error::MemoryBudget,
        Shortage::Store => Error::StoreRefused,
    }
}

/// The result of a message to one device in the form of a routed one.
pub(crate) fn direct(outcome: DirectOutcome) -> Result<Published, Error> {
    let one = Published { matched: 1, ..Published::default() };
    match outcome {
        DirectOutcome::UnknownDevice => Err(Error::DeviceNotFound),
        DirectOutcome::DeviceOffline => Err(Error::DeviceOffline),
        DirectOutcome::Refused(refusal) => Err(refused(refusal)),
        DirectOutcome::Done(Outcome::Sent) => Ok(Published { sent: 1, ..one }),
        DirectOutcome::Done(Outcome::Ignored) => Ok(Published::default()),
        DirectOutcome::Done(Outcome::Queued) => Ok(Published { queued: 1, ..one }),
        DirectOutcome::Done(Outcome::Dropped(reason)) => match drop_error(reason) {
            Some(error) => Err(error),
            None => Ok(Published { dropped: 1, reason: Some(reason), ..one }),
        },
    }
}

#[cfg(test)]
mod tests {
    use gateway_core::DropReason;

    use super::*;

    #[test]
    fn direct_results_are_outcomes_or_errors() {
        let done = |outcome| direct(DirectOutcome::Done(outcome));
        assert_eq!(direct(DirectOutcome::UnknownDevice), Err(Error::DeviceNotFound));
        assert_eq!(direct(DirectOutcome::DeviceOffline), Err(Error::DeviceOffline));
        assert_eq!(direct(DirectOutcome::Refused(Shortage::Store)), Err(Error::StoreRefused));
        assert_eq!(done(Outcome::Dropped(DropReason::TooLarge)), Err(Error::PacketTooLarge));
        assert_eq!(done(Outcome::Dropped(DropReason::QueueFull)), Err(Error::QueueFull));
        assert_eq!(done(Outcome::Sent).unwrap().sent, 1);
        assert_eq!(done(Outcome::Queued).unwrap().queued, 1);
        assert_eq!(done(Outcome::Dropped(DropReason::Offline)).unwrap().dropped, 1);
    }
}
