//! Rules that a history must obey. They know MQTT and share no code with the server.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gateway_core::QoS;

use super::history::{Durable, Event, Msg, MsgId, Record, Stage};

/// A breach of what the server promised. Clients are numbers in the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Violation {
    /// Acknowledged, and never came to a persistent session that had subscribed before.
    Lost { client: usize, msg: MsgId, topic: String },
    /// QoS 2, twice to one session.
    Duplicate { client: usize, msg: MsgId },
    /// First arrivals of one publisher, topic and QoS (both of publishing and of delivery) not in the order of publishing.
    OutOfOrder { client: usize, msg: MsgId, after: MsgId },
    /// Acknowledged, and no member of the group got it.
    GroupLost { group: String, msg: MsgId },
    /// QoS 2, and the group got it more than once.
    GroupDuplicate { group: String, msg: MsgId },
    /// Never published, or with another topic, or to a client without a subscription for it.
    Phantom { client: usize, what: String },
    /// A confirmed persistent session was not there any more.
    SessionLost { client: usize },
    /// A packet identifier whose QoS 2 handshake is not over came with another message.
    IdReused { client: usize, packet_id: u16, old: Option<MsgId>, new: Option<MsgId> },
    /// An acknowledgement out of turn or for nothing [MQTT-4.6.0-2, MQTT-4.6.0-3].
    AckOrder { client: usize, packet_id: u16 },
    /// The retained message is none, or older than one that was acknowledged.
    RetainedOld { topic: String, have: Option<u32>, acked: u32 },
    /// The server sent what it may not.
    Nonsense { client: usize, what: String },
}

/// Roles of the sessions in a history.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cast {
    /// Sessions that must lose nothing; others may.
    pub(crate) persistent: BTreeSet<usize>,
    /// Subscribed to all retained topics at the very end, with a clean session, and got all there was.
    pub(crate) probe: Option<usize>,
}

#[derive(Debug)]
struct Published {
    msg: Msg,
    at: u64,
    /// Of a will: a later connection of its client was accepted, which promises that it was published.
    acked: bool,
    will: bool,
    /// False of the will of a CONNECT without an answer: it may lie in the backlog of a gateway that stands still, and be handled at any
    /// later time.
    in_order: bool,
}

/// The wills of one client's connections.
#[derive(Debug, Default)]
struct Wills {
    /// Will of the CONNECT that is not answered yet.
    sent: Option<MsgId>,
    /// Will of the last connection that was accepted and did not end with DISCONNECT.
    due: Option<MsgId>,
}

/// A subscription of one session, from SUBSCRIBE on.
#[derive(Debug)]
struct Subscription {
    client: usize,
    /// Number of the client's session: one more with each that was thrown away.
    epoch: u32,
    filter: String,
    confirmed: Option<u64>,
    end_sent: Option<u64>,
    end_confirmed: Option<u64>,
}

#[derive(Debug)]
struct Arrival {
    client: usize,
    epoch: u32,
    id: MsgId,
    qos: QoS,
    retain: bool,
}

/// A history, read once.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    published: BTreeMap<MsgId, Published>,
    subscriptions: Vec<Subscription>,
    arrivals: Vec<Arrival>,
    epochs: HashMap<usize, u32>,
    wills: HashMap<usize, Wills>,
    found: Vec<Violation>,
}

pub(crate) fn matches(filter: &str, topic: &str) -> bool {
    let mut levels = topic.split('/');
    for part in filter.split('/') {
        match (part, levels.next()) {
            ("#", _) => return true,
            ("+", Some(_)) => {}
            (part, Some(level)) if part == level => {}
            _ => return false,
        }
    }
    levels.next().is_none()
}

/// Group and filter of a shared subscription.
fn shared(filter: &str) -> Option<(&str, &str)> {
    filter.strip_prefix("$share/")?.split_once('/')
}

fn plain(filter: &str) -> &str {
    shared(filter).map_or(filter, |(_, filter)| filter)
}

impl Facts {
    /// Reads a history; what is wrong by itself is found here.
    pub(crate) fn new(records: &[Record], cast: &Cast) -> Self {
        let mut facts = Self::default();
        let mut states: HashMap<usize, Durable> = HashMap::new();
        for record in records {
            let state = states.entry(record.client).or_default();
            facts.take(record, state, cast);
            state.apply(&record.event);
        }
        facts
    }

    fn take(&mut self, record: &Record, state: &Durable, cast: &Cast) {
        let (client, at) = (record.client, record.at);
        let epoch = *self.epochs.entry(client).or_default();
        let open = |subscription: &&mut Subscription, filter: &str| {
            subscription.client == client
                && subscription.epoch == epoch
                && subscription.filter == filter
                && subscription.end_confirmed.is_none()
        };
        match &record.event {
            Event::Will { msg, delayed } => {
                let wills = self.wills.entry(client).or_default();
                // Without an entry in `published` its arrival is a phantom.
                wills.sent = None;
                if !delayed {
                    wills.sent = Some(msg.id);
                    let published =
                        Published { msg: msg.clone(), at, acked: false, will: true, in_order: false };
                    self.published.insert(msg.id, published);
                }
            }
            Event::Disconnect => {
                self.wills.entry(client).or_default().due = None;
            }
            Event::Connect { clean: true } => {
                self.epochs.insert(client, epoch + 1);
            }
            Event::Connected { clean, present, .. } => {
                if *present && (*clean || !cast.persistent.contains(&client)) {
                    self.found.push(Violation::Nonsense { client, what: "session present".to_owned() });
                }
                if !clean && !present && state.session {
                    self.found.push(Violation::SessionLost { client });
                }
                // The earlier will is published, and safe, before the next connection is accepted.
                let wills = self.wills.entry(client).or_default();
                let due = std::mem::replace(&mut wills.due, wills.sent.take());
                if let Some(published) = wills.due.and_then(|id| self.published.get_mut(&id)) {
                    published.in_order = true;
                }
                if let Some(published) = due.and_then(|id| self.published.get_mut(&id)) {
                    published.acked = true;
                }
            }
            Event::Subscribe { filter, .. } => {
                if self.subscriptions.iter_mut().any(|subscription| open(&subscription, filter)) {
                    return;
                }
                self.subscriptions.push(Subscription {
                    client,
                    epoch,
                    filter: filter.clone(),
                    confirmed: None,
                    end_sent: None,
                    end_confirmed: None,
                });
            }
            Event::Subscribed { filter } => {
                if let Some(known) = self.subscriptions.iter_mut().find(|known| open(known, filter)) {
                    known.confirmed.get_or_insert(at);
                }
            }
            Event::Unsubscribe { filter } => {
                for known in self.subscriptions.iter_mut().filter(|known| open(known, filter)) {
                    known.end_sent.get_or_insert(at);
                }
            }
            Event::Unsubscribed { filter } => {
                for known in self.subscriptions.iter_mut().filter(|known| open(known, filter)) {
                    known.end_confirmed.get_or_insert(at);
                }
            }
            Event::Publish { msg, .. } => {
                let published = Published { msg: msg.clone(), at, acked: false, will: false, in_order: true };
                self.published.insert(msg.id, published);
            }
            Event::Acked { packet_id } | Event::Refused { packet_id, .. } => {
                let Some(place) = state.published(*packet_id) else {
                    self.found.push(Violation::AckOrder { client, packet_id: *packet_id });
                    return;
                };
                let msg = &state.inflight[place].msg;
                let earlier = state.inflight[..place].iter();
                if earlier.clone().any(|out| out.stage == Stage::Published && out.msg.qos == msg.qos) {
                    self.found.push(Violation::AckOrder { client, packet_id: *packet_id });
                }
                if matches!(record.event, Event::Acked { .. })
                    && let Some(published) = self.published.get_mut(&msg.id)
                {
                    published.acked = true;
                }
            }
            Event::Received { packet_id, qos, retain, topic, id, fresh } => {
                if !fresh {
                    let old = state.received.get(packet_id).copied().flatten();
                    if old != *id {
                        let (packet_id, new) = (*packet_id, *id);
                        self.found.push(Violation::IdReused { client, packet_id, old, new });
                    }
                    return;
                }
                self.arrive(
                    Arrival {
                        client,
                        epoch,
                        id: id.unwrap_or(MsgId { publisher: usize::MAX, seq: 0 }),
                        qos: *qos,
                        retain: *retain,
                    },
                    topic,
                );
            }
            Event::Nonsense { what } => {
                self.found.push(Violation::Nonsense { client, what: what.clone() });
            }
            _ => {}
        }
    }

    fn arrive(&mut self, arrival: Arrival, topic: &str) {
        let client = arrival.client;
        let Some(published) = self.published.get(&arrival.id) else {
            self.found
                .push(Violation::Phantom { client, what: format!("never published: {arrival:?} {topic}") });
            return;
        };
        let msg = &published.msg;
        if msg.topic != topic || arrival.qos > msg.qos || (arrival.retain && !msg.retain) {
            self.found
                .push(Violation::Phantom { client, what: format!("{msg:?} came as {arrival:?} {topic}") });
            return;
        }
        let wanted = self.subscriptions.iter().any(|subscription| {
            subscription.client == client
                && subscription.epoch == arrival.epoch
                && matches(plain(&subscription.filter), topic)
                && subscription.end_confirmed.is_none_or(|end| published.at < end)
        });
        if !wanted {
            self.found.push(Violation::Phantom { client, what: format!("no subscription for {msg:?}") });
            return;
        }
        self.arrivals.push(arrival);
    }

    /// Returns the time at which a publisher first sent the message.
    pub(crate) fn published_at(&self, msg: MsgId) -> Option<u64> {
        self.published.get(&msg).map(|published| published.at)
    }

    /// Acknowledged messages that have not come where they must.
    pub(crate) fn missing(&self, cast: &Cast) -> Vec<Violation> {
        let mut missing = Vec::new();
        let mut have: BTreeSet<(usize, u32, MsgId)> = BTreeSet::new();
        for arrival in self.arrivals.iter().filter(|arrival| !arrival.retain) {
            have.insert((arrival.client, arrival.epoch, arrival.id));
        }
        let mut due: BTreeSet<(usize, u32, MsgId)> = BTreeSet::new();
        let mut groups: BTreeMap<&str, BTreeSet<MsgId>> = BTreeMap::new();
        for subscription in &self.subscriptions {
            let current = self.epochs.get(&subscription.client) == Some(&subscription.epoch);
            let (Some(from), None) = (subscription.confirmed, subscription.end_sent) else { continue };
            if !current || !cast.persistent.contains(&subscription.client) {
                continue;
            }
            let filter = plain(&subscription.filter);
            let messages = self.published.values().filter(|published| {
                published.acked && published.at > from && matches(filter, &published.msg.topic)
            });
            for published in messages {
                if let Some((group, _)) = shared(&subscription.filter) {
                    groups.entry(group).or_default().insert(published.msg.id);
                } else {
                    due.insert((subscription.client, subscription.epoch, published.msg.id));
                }
            }
        }
        for (client, _, msg) in due.difference(&have) {
            let topic = self.published[msg].msg.topic.clone();
            missing.push(Violation::Lost { client: *client, msg: *msg, topic });
        }
        for (group, due) in groups {
            let members = self.members(group);
            let got: BTreeSet<MsgId> = have
                .iter()
                .filter(|(client, _, _)| members.contains(client))
                .map(|(_, _, msg)| *msg)
                .collect();
            for msg in due.difference(&got) {
                missing.push(Violation::GroupLost { group: group.to_owned(), msg: *msg });
            }
        }
        missing
    }

    /// Everything that is wrong with a history that has come to its end.
    pub(crate) fn violations(mut self, cast: &Cast) -> Vec<Violation> {
        let mut all = std::mem::take(&mut self.found);
        all.extend(self.missing(cast));
        self.repeated(cast, &mut all);
        self.disordered(&mut all);
        self.retained(cast, &mut all);
        all
    }

    fn members(&self, group: &str) -> BTreeSet<usize> {
        self.subscriptions
            .iter()
            .filter(|subscription| shared(&subscription.filter).is_some_and(|(name, _)| name == group))
            .map(|subscription| subscription.client)
            .collect()
    }

    fn groups(&self) -> BTreeSet<&str> {
        self.subscriptions.iter().filter_map(|subscription| Some(shared(&subscription.filter)?.0)).collect()
    }

    fn repeated(&self, cast: &Cast, all: &mut Vec<Violation>) {
        // A will may be published again after a crash.
        let exact = |arrival: &&Arrival| {
            arrival.qos == QoS::ExactlyOnce
                && !arrival.retain
                && !self.published[&arrival.id].will
                && cast.persistent.contains(&arrival.client)
        };
        let mut seen = BTreeSet::new();
        for arrival in self.arrivals.iter().filter(exact) {
            if !seen.insert((arrival.client, arrival.epoch, arrival.id)) {
                all.push(Violation::Duplicate { client: arrival.client, msg: arrival.id });
            }
        }
        for group in self.groups() {
            let members = self.members(group);
            let mut first: HashMap<MsgId, usize> = HashMap::new();
            for arrival in self.arrivals.iter().filter(exact) {
                if members.contains(&arrival.client) {
                    let member = *first.entry(arrival.id).or_insert(arrival.client);
                    if member != arrival.client {
                        all.push(Violation::GroupDuplicate { group: group.to_owned(), msg: arrival.id });
                    }
                }
            }
        }
    }

    /// Returns whether the session was subscribed when the message was published for the first time. Otherwise it may
    /// have missed that publish, and have got an older message that was sent again.
    fn subscribed_before(&self, arrival: &Arrival) -> bool {
        let published = &self.published[&arrival.id];
        self.subscriptions.iter().any(|subscription| {
            (subscription.client, subscription.epoch) == (arrival.client, arrival.epoch)
                && subscription.end_sent.is_none()
                && subscription.confirmed.is_some_and(|from| from < published.at)
                && matches(plain(&subscription.filter), &published.msg.topic)
        })
    }

    /// Members of groups are left out: what one gives back comes late to another.
    fn disordered(&self, all: &mut Vec<Violation>) {
        let members: BTreeSet<usize> =
            self.groups().into_iter().flat_map(|group| self.members(group)).collect();
        // A broker may deliver QoS 2 at PUBREL, so the order of a topic is kept for messages of the same QoS only.
        let mut last: HashMap<(usize, u32, usize, &str, QoS, QoS), MsgId> = HashMap::new();
        let mut seen: BTreeSet<(usize, u32, MsgId)> = BTreeSet::new();
        for arrival in &self.arrivals {
            let key = (arrival.client, arrival.epoch, arrival.id);
            if arrival.retain
                || !self.published[&arrival.id].in_order
                || members.contains(&arrival.client)
                || !self.subscribed_before(arrival)
                || !seen.insert(key)
            {
                continue;
            }
            let Msg { id, topic, qos, .. } = &self.published[&arrival.id].msg;
            let stream = (arrival.client, arrival.epoch, id.publisher, topic.as_str(), *qos, arrival.qos);
            if let Some(after) = last.insert(stream, arrival.id)
                && after.seq > arrival.id.seq
            {
                all.push(Violation::OutOfOrder { client: arrival.client, msg: arrival.id, after });
            }
        }
    }

    /// Every retained topic has one publisher and one QoS, so its newest message is the one to be kept.
    fn retained(&self, cast: &Cast, all: &mut Vec<Violation>) {
        let Some(probe) = cast.probe else { return };
        let mut acked: BTreeMap<&str, u32> = BTreeMap::new();
        for published in self.published.values().filter(|published| published.msg.retain && published.acked) {
            let newest = acked.entry(&published.msg.topic).or_default();
            *newest = (*newest).max(published.msg.id.seq);
        }
        let kept: BTreeMap<&str, u32> = self
            .arrivals
            .iter()
            .filter(|arrival| arrival.client == probe)
            .map(|arrival| (self.published[&arrival.id].msg.topic.as_str(), arrival.id.seq))
            .collect();
        for (topic, acked) in acked {
            let have = kept.get(topic).copied();
            if have.is_none_or(|have| have < acked) {
                all.push(Violation::RetainedOld { topic: topic.to_owned(), have, acked });
            }
        }
    }

    /// Counts the acknowledged messages, so that an empty run is not taken for a good one.
    pub(crate) fn acked(&self) -> usize {
        self.published.values().filter(|published| published.acked && !published.will).count()
    }

    /// Wills that had to come.
    pub(crate) fn wills(&self) -> usize {
        self.published.values().filter(|published| published.acked && published.will).count()
    }

    pub(crate) fn arrived(&self) -> usize {
        self.arrivals.len()
    }
}

impl Violation {
    /// Returns the client whose session is concerned.
    pub(crate) fn client(&self) -> Option<usize> {
        match self {
            Self::Lost { client, .. }
            | Self::Duplicate { client, .. }
            | Self::OutOfOrder { client, .. }
            | Self::Phantom { client, .. }
            | Self::SessionLost { client }
            | Self::IdReused { client, .. }
            | Self::AckOrder { client, .. }
            | Self::Nonsense { client, .. } => Some(*client),
            Self::GroupLost { .. } | Self::GroupDuplicate { .. } | Self::RetainedOld { .. } => None,
        }
    }
}
