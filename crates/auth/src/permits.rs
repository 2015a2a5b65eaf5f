//! Authorization of what a connected client sends: its messages before they are routed, its filters before it is subscribed
//! to them. A refusal is counted and logged here too.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use access::{Subject, rules::Excess};
use broker::{Account, Broker, SessionCore};
use codec::Publish;
use gateway_core::{QoS, Timestamp, TopicFilter, info_of_peer, log_limits::LineKind, parse_shared};
use session::{Permits, PublishPermit};

use super::{
    Asked, Authority, AuthorizationRequest, Permissions, Remembered,
    counters::count,
    permissions::{PermissionRefused, subscribe_by_rules},
};

/// Parts of a connection that decide about its packets, lent to its session with each of them.
pub struct ConnectionPermits<'a> {
    /// Rights of the client.
    pub rights: &'a mut ClientRights,
    /// Rules, service or program that decides; everything is allowed without one.
    pub authority: Option<&'a Arc<Authority>>,
    /// Broker, which knows the topics that are reserved for one device each.
    pub broker: &'a Broker,
    /// Session of the client, which knows under which names it is asked about.
    pub core: &'a SessionCore,
    /// Number of the connection in its session.
    pub epoch: u32,
    /// Time of arrival of the packet.
    pub now: Timestamp,
}

/// Decision about a filter that the client wants to subscribe to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubscribePermit {
    /// The client may. Messages are looked at on delivery, so all ways to be granted by the rules are one.
    Granted,
    /// The client may, since the user's service says so: the session's gate must be told.
    ByService,
    /// The client may not.
    Refused,
}

/// Rights of a connected client.
pub struct ClientRights {
    permissions: Permissions,
    /// Answers about the topics that it used last; none before the first question.
    answers: Option<Box<RecentAnswers>>,
}

/// Answers about the topics that a client used last.
struct RecentAnswers {
    of_rules: Remembered,
    /// The question under way too.
    of_service: Asked,
}

impl From<Permissions> for ClientRights {
    fn from(permissions: Permissions) -> Self {
        Self { permissions, answers: None }
    }
}

impl ClientRights {
    /// Permissions of the client's principal.
    pub fn permissions(&self) -> &Permissions {
        &self.permissions
    }

    /// Returns whether the user's service is being asked.
    pub fn is_asking(&self) -> bool {
        self.answers.as_ref().is_some_and(|answers| answers.of_service.is_asking())
    }

    /// Ready when the user's service is not being asked, and the request for which it was can be decided.
    pub fn poll_service(&mut self, now: Timestamp, cx: &mut Context<'_>) -> Poll<()> {
        self.answers.as_mut().map_or(Poll::Ready(()), |answers| answers.of_service.poll(now, cx))
    }

    /// The permissions, and the answers, which are made if they are not there.
    #[inline]
    fn parts(&mut self, account: &Arc<Account>) -> (&Permissions, &mut RecentAnswers) {
        let answers = self.answers.get_or_insert_with(|| {
            let beside = size_of::<RecentAnswers>() - size_of::<Remembered>();
            let of_rules = Remembered::new(account, beside);
            Box::new(RecentAnswers { of_rules, of_service: Asked::default() })
        });
        (&self.permissions, answers)
    }
}

impl Permits for ConnectionPermits<'_> {
    #[inline]
    fn may_publish(&mut self, topic: &str, publish: &Publish<'_>) -> PublishPermit {
        if self.broker.is_foreign(self.core.client_id().as_str(), topic) {
            return self.refuse_foreign(topic);
        }
        match self.authority {
            None => PublishPermit::Granted,
            Some(authority) => self.authorize(authority, topic, publish),
        }
    }
}

impl ConnectionPermits<'_> {
    /// Decides by the rules, and by the user's service if no rule names the topic. Without an answer of the service the question
    /// is begun, and the message is to be decided about again when [`ClientRights::poll_service`] is ready.
    fn authorize(&mut self, authority: &Authority, topic: &str, publish: &Publish<'_>) -> PublishPermit {
        let (core, epoch) = (self.core, self.epoch);
        let (permissions, answers) = self.rights.parts(self.broker.account());
        // The names are looked up only for a topic that is new.
        let decide = || as_subject(core, epoch, permissions, |subject| authority.publish(subject, topic));
        let grant = answers.of_rules.find(authority, topic, decide);
        let (qos, retain) = (publish.qos, publish.retain);
        let Err(why) = grant.permits(qos, retain, publish.payload.len()) else {
            return PublishPermit::Granted;
        };
        let refused = PermissionRefused { line: grant.line, why };
        if let Some(authorizer) = authority.authorizer().filter(|_| refused.is_unnamed()) {
            match answers.of_service.about_publish(topic, qos, retain, self.now) {
                Some(true) => return PublishPermit::Granted,
                Some(false) => {}
                None => {
                    let request = AuthorizationRequest::Publish { topic: topic.into(), qos, retain };
                    let asked = &mut answers.of_service;
                    as_subject(core, epoch, permissions, |subject| {
                        asked.begin(authorizer, subject, request);
                    });
                    return PublishPermit::Later;
                }
            }
        }
        self.refuse_publish(topic, refused)
    }

    /// A topic that the gateway answers, and not for this device.
    #[cold]
    fn refuse_foreign(&self, topic: &str) -> PublishPermit {
        gateway_core::counters::count(|c| c.reserved_foreign.add(1));
        self.refuse_publish(topic, PermissionRefused { line: 0, why: Excess::Topic })
    }

    #[cold]
    fn refuse_publish(&self, topic: &str, refused: PermissionRefused) -> PublishPermit {
        self.log_refused("publish", topic, refused);
        let closes = self.authority.is_some_and(|authority| authority.closes);
        if closes { PublishPermit::Closed } else { PublishPermit::Dropped }
    }

    /// Returns whether the user's service has to be asked before [`Self::may_subscribe`]. If so, the question is now under way.
    pub fn must_ask_about(&mut self, filter: &str, qos: QoS) -> bool {
        let Some(authority) = self.authority else { return false };
        let Some(authorizer) = authority.authorizer() else { return false };
        let (core, epoch) = (self.core, self.epoch);
        let by_rules = as_subject(core, epoch, &self.rights.permissions, |subject| {
            subscribe_by_rules(authority, subject, filter)
        });
        // An invalid filter is refused as invalid before anybody is asked to authorise it.
        let valid = parse_shared(filter)
            .is_ok_and(|shared| TopicFilter::check(shared.map_or(filter, |(_, inner)| inner)).is_ok());
        if !valid || !by_rules.is_err_and(PermissionRefused::is_unnamed) {
            return false;
        }
        let (permissions, answers) = self.rights.parts(self.broker.account());
        let asked = &mut answers.of_service;
        if asked.about_subscribe(filter, qos, self.now).is_some() {
            return false;
        }
        let request = AuthorizationRequest::Subscribe { filter: filter.into(), qos };
        as_subject(core, epoch, permissions, |subject| asked.begin(authorizer, subject, request));
        true
    }

    /// Decides about a subscription: by the rules, and by what the user's service has answered if no rule names the filter.
    pub fn may_subscribe(&mut self, filter: &str, qos: QoS) -> SubscribePermit {
        let Some(authority) = self.authority else { return SubscribePermit::Granted };
        let by_rules = as_subject(self.core, self.epoch, &self.rights.permissions, |subject| {
            subscribe_by_rules(authority, subject, filter)
        });
        let Err(refused) = by_rules else { return SubscribePermit::Granted };
        if refused.is_unnamed()
            && authority.authorizer().is_some()
            && let Some(answers) = &self.rights.answers
            && answers.of_service.about_subscribe(filter, qos, self.now) == Some(true)
        {
            return SubscribePermit::ByService;
        }
        count(|c| c.subscribe_denied.add(1));
        self.log_refused("subscribe", filter, refused);
        SubscribePermit::Refused
    }

    /// Tells what was not allowed.
    #[cold]
    fn log_refused(&self, action: &str, topic: &str, refused: PermissionRefused) {
        let Some(info) = self.core.connection(self.epoch) else { return };
        let (peer, client_id, listener) = (info.peer, self.core.client_id(), info.listener.as_str());
        let PermissionRefused { line, why } = refused;
        info_of_peer!(
            LineKind::Denied, peer.ip(), %peer, %client_id, listener, action, topic, line,
            reason = why.as_str(), "not allowed by the rules"
        );
    }
}

/// Lets `ask` ask about the client of a connection.
fn as_subject<R>(
    core: &SessionCore,
    epoch: u32,
    permissions: &Permissions,
    ask: impl FnOnce(&Subject<'_>) -> R,
) -> R {
    let info = core.connection(epoch);
    // Of a session that is another connection's by now, the listener is unknown.
    let listener = info.as_ref().map_or("", |info| info.listener.as_str());
    ask(&permissions.subject(core.client_id().as_str(), listener))
}
