//! Common part of all bridges that lead in: a message of the other side becomes one of the gateway, and is acknowledged to
//! the other side only when it is as safe here as a device's message.

use std::{future::Future, sync::Arc};

use broker::{Broker, Routing, Turn};
use config::Bridge;
use gateway_core::{Commit, Durability, Message, Origin, Properties, QoS, clock, level_count};
use tokio::{
    select,
    sync::watch,
    task::yield_now,
    time::{sleep, timeout},
};

use super::{
    mark::{MARK, has_mark},
    outward::{LAST, ended, pause},
    status::{BridgeFailure, BridgeStatus, Reason},
};

/// The other side of a bridge that leads in.
pub(super) trait In: Send {
    /// Brings messages in until something fails; tells `status` when the other side answers. Cancelled, what is not acknowledged
    /// comes again.
    fn serve(&mut self) -> impl Future<Output = BridgeFailure> + Send;

    /// Acknowledges what it can of what is here, at the end; it has [`LAST`] for that.
    fn finish(&mut self) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// Runs one until the gateway ends.
pub(super) async fn run<I: In>(
    mut side: I,
    config: Bridge,
    status: Arc<BridgeStatus>,
    mut drain: watch::Receiver<bool>,
) {
    let mut before = 0;
    loop {
        let failure = select! {
            () = ended(&mut drain) => {
                let _ = timeout(LAST, side.finish()).await;
                return;
            }
            failure = side.serve() => failure,
        };
        let progressed = status.total() > before;
        before = status.total();
        status.set_in_flight(0);
        let count = status.failed(&failure, progressed);
        let pause = pause(&config, count, failure.after);
        status.waits(pause);
        select! {
            () = ended(&mut drain) => return,
            () = sleep(pause) => {}
        }
    }
}

/// A message that comes in.
pub(super) struct InwardMessage<'a> {
    pub(super) topic: &'a str,
    pub(super) payload: &'a [u8],
    pub(super) qos: QoS,
    pub(super) retain: bool,
    pub(super) properties: Option<Arc<Properties>>,
    /// Seconds that it is worth something.
    pub(super) expiry: Option<u32>,
}

/// Entrance for messages.
#[derive(Clone)]
pub(super) struct BridgePublisher {
    pub(super) broker: Broker,
    /// The mark of this gateway.
    pub(super) mark: String,
    /// Mark of the messages that enter here.
    pub(super) entry: String,
}

impl BridgePublisher {
    /// Returns whether the message has already left this gateway, or entered it by a bridge.
    pub(super) fn was_here(&self, properties: Option<&Properties>) -> bool {
        has_mark(properties, &self.mark) || has_mark(properties, &self.entry)
    }

    /// Adds the marks that end loops: of this gateway, and of the one that sent the message, if that is known.
    pub(super) fn mark(&self, properties: &mut Properties, sender: Option<&str>) {
        for mark in [Some(&*self.entry), sender].into_iter().flatten() {
            if !has_mark(Some(properties), mark) {
                properties.user.push((MARK.to_owned(), mark.to_owned()));
            }
        }
    }

    /// Publishes it. Returns what an acknowledgement must wait for, if anything.
    ///
    /// # Errors
    /// The gateway takes nothing for now: the message must come again.
    pub(super) async fn publish(
        &self,
        incoming: &InwardMessage<'_>,
        turn: &mut Turn,
    ) -> Result<Option<Arc<Commit>>, BridgeFailure> {
        let now = clock::now();
        let mut message = Message::new(incoming.topic, incoming.payload, now, Origin::BACKEND);
        message.qos = incoming.qos;
        message.retain = incoming.retain;
        message.properties = incoming.properties.as_ref();
        message.expires = incoming.expiry.map(|seconds| now.plus_millis(u64::from(seconds) * 1_000));
        message.durability = Durability::Always;
        let (published, commit) = match self.broker.publish_some(&message, turn) {
            Routing::Done(published) => (published, message.issued().cloned()),
            Routing::More(mut spread) => loop {
                turn.flush();
                turn.effort.renew();
                yield_now().await;
                if let Some(published) = spread.go_on(turn) {
                    break (published, spread.commit().cloned());
                }
            },
        };
        if let Some(commit) = &commit {
            commit.done();
        }
        if let Some(refusal) = published.refused {
            return Err(BridgeFailure::new(
                Reason::Store,
                format!("the gateway takes nothing for now: {refusal:?}"),
            ));
        }
        Ok(commit)
    }

    /// Tells whether the gateway takes this topic, by its limits.
    pub(super) fn takes(&self, topic: &str) -> bool {
        let limits = self.broker.limits();
        !topic.is_empty()
            && !topic.starts_with('$')
            && topic.len() <= limits.max_topic_bytes
            && level_count(topic) <= limits.max_topic_levels
            && !topic.contains(['+', '#', '\0'])
    }
}
