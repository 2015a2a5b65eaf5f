//! From the match to the receivers: all of them in one go, or in parts ([`SpreadProgress`]) where there are very many.

use std::sync::Arc;

use gateway_core::{DropReason, Effort, Message, Offer, Outcome, QoS, QueueId, limits::Limits};

use super::{
    index::{MatchList, Matched},
    published::{DirectOutcome, Offline, Published},
};
use crate::{
    Delivered, Session, Target,
    counters::count,
    durable::{Durable, Storage},
    memory::Account,
    shared::{DeliveryContext, SharedGroup},
};

/// Receivers served between two checks of the effort that is left.
const PART: usize = 8;

/// Hands messages to receivers. Holds the places of what that needs, which are looked at only where it is needed.
#[derive(Clone, Copy)]
pub(crate) struct Deliverer<'a> {
    pub(crate) limits: &'a Arc<Limits>,
    pub(crate) account: &'a Arc<Account>,
    pub(crate) durable: &'a Option<Durable>,
}

/// Progress of a message through a list of receivers.
#[derive(Default)]
pub(crate) struct SpreadProgress {
    /// Receivers served so far: first the list's targets, then its groups.
    pub(crate) served: usize,
    /// Only streams get the message.
    pub(crate) only_streams: bool,
    pub(crate) published: Published,
}

impl Deliverer<'_> {
    /// Delivers the message to all in `list`. This and what it calls is most of what a message costs.
    #[inline(always)]
    pub(crate) fn hand_out(
        self,
        list: &MatchList,
        message: &Message<'_>,
        only_streams: bool,
        dirty: &mut Vec<Arc<dyn Target>>,
        effort: &mut Effort,
    ) -> Published {
        let mut published = Published::default();
        if only_streams {
            count_blocked(list);
        }
        self.deliver(list, &list.targets, message, only_streams, &mut published, dirty);
        effort.spend_each(Effort::DELIVERY, list.targets.len());
        if !only_streams {
            for group in &list.groups {
                self.deliver_to_group(group, message, &mut published, dirty, effort);
            }
        }
        published
    }

    /// Continues in `list` until the effort is spent.
    pub(crate) fn hand_out_some(
        self,
        list: &MatchList,
        message: &Message<'_>,
        progress: &mut SpreadProgress,
        dirty: &mut Vec<Arc<dyn Target>>,
        effort: &mut Effort,
    ) {
        if progress.only_streams && progress.served == 0 {
            count_blocked(list);
        }
        while let Some(rest) = list.targets.get(progress.served..).filter(|rest| !rest.is_empty()) {
            let part = &rest[..rest.len().min(PART)];
            let listed = dirty.len();
            self.deliver(list, part, message, progress.only_streams, &mut progress.published, dirty);
            progress.served += part.len();
            effort.spend_each(Effort::DELIVERY, part.len());
            effort.spend_each(Effort::FLUSH, dirty.len() - listed);
            if effort.is_spent() {
                return;
            }
        }
        while let Some(group) = list.groups.get(progress.served - list.targets.len()) {
            progress.served += 1;
            let listed = dirty.len();
            if !progress.only_streams {
                self.deliver_to_group(group, message, &mut progress.published, dirty, effort);
            }
            effort.spend_each(Effort::FLUSH, dirty.len() - listed);
            if effort.is_spent() {
                return;
            }
        }
    }

    /// Delivers the message to `part` of the list's targets.
    #[inline(always)]
    fn deliver(
        self,
        list: &MatchList,
        part: &[Matched],
        message: &Message<'_>,
        only_streams: bool,
        published: &mut Published,
        dirty: &mut Vec<Arc<dyn Target>>,
    ) {
        let offline_qos0 = self.limits.offline_qos0;
        for matched in part {
            if only_streams && !matched.stream {
                continue;
            }
            let Some(merged) = matched.for_sender(message.origin.slot) else { continue };
            let offer = Offer {
                qos: merged.qos,
                retain: merged.retain_as_published && message.retain,
                ids: list.ids(&merged),
                group: 0,
                group_queue: QueueId::NONE,
                queue_offline: offline_qos0 || message.qos.min(merged.qos) > QoS::AtMostOnce,
            };
            let Delivered { outcome, flush } = matched.target.deliver(message, offer);
            if flush {
                dirty.push(Arc::clone(&matched.target));
            }
            published.add(outcome);
        }
    }

    /// Shared subscriptions are apart from the others: each group gets its own copy [MQTT-4.8.2-5].
    fn deliver_to_group(
        self,
        group: &SharedGroup,
        message: &Message<'_>,
        published: &mut Published,
        dirty: &mut Vec<Arc<dyn Target>>,
        effort: &mut Effort,
    ) {
        let storage = Storage { account: self.account, durable: self.durable.as_ref() };
        let mut context = DeliveryContext::new(storage, dirty, message.now);
        published.add(group.deliver(message, &mut context));
        effort.spend(Effort::DELIVERY);
        effort.spend_each(Effort::MEMBER, context.visited);
    }
}

/// Counts the devices that get nothing.
#[cold]
fn count_blocked(list: &MatchList) {
    let blocked = list.targets.iter().filter(|matched| !matched.stream).count() + list.groups.len();
    count(|c| c.non_broker_blocked.add(blocked as u64));
}

/// Hands one message to one device, subscribed or not.
pub(crate) fn deliver_direct(
    session: Arc<dyn Session>,
    message: &Message<'_>,
    offline: Offline,
    dirty: &mut Vec<Arc<dyn Target>>,
) -> DirectOutcome {
    let offer = Offer {
        qos: QoS::ExactlyOnce,
        retain: false,
        ids: &[],
        group: 0,
        group_queue: QueueId::NONE,
        queue_offline: offline == Offline::Queue,
    };
    let Delivered { outcome, flush } = session.deliver(message, offer);
    if flush {
        dirty.push(session);
    }
    if offline == Offline::Fail && outcome == Outcome::Dropped(DropReason::Offline) {
        return DirectOutcome::DeviceOffline;
    }
    DirectOutcome::Done(outcome)
}
