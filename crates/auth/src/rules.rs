//! Decisions on the rights of devices: by the rules in force, which are read from their file and replaced as a whole,
//! each time under another version, or by the embedding program.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{
            AtomicU32,
            Ordering::{AcqRel, Acquire},
        },
    },
};

use access::{
    Author, Principal, Subject,
    rules::{AccessQuestion, Explanation, RuleGrant, Rules, Subscribing},
};
use arc_swap::ArcSwap;
use broker::{Account, CloseReason};
use config::{Config, ConfigError, DeniedPublish, Problem};
use edge::reload::Reload;
use gateway_core::{ClientId, QoS, ReservedTopics, SharedMessage, has_wildcard, matches, parse_shared};
use session::{GATED, Gate, TooManyGranted};
use tokio::sync::watch;
use tracing::info;

use super::{
    Authorizer, Connected, ConnectionCheck, Remembered, identity,
    remote::{AuthorizationRequest, NoDecision, RemoteAuthorizer},
};

/// Decides what devices may do, where rules or a program are set.
pub struct Authority {
    decides: Decides,
    /// Asked where the rules say nothing.
    authorizer: Option<Arc<RemoteAuthorizer>>,
    /// Topics that a device may use without a rule that says so.
    reserved: ReservedTopics,
    /// A denied PUBLISH that no acknowledgement can tell of ends its connection.
    pub closes: bool,
}

enum Decides {
    Rules(RulesFile),
    /// The program that embeds the gateway.
    Program(Arc<dyn Authorizer>),
}

/// The rules of this moment.
struct RulesFile {
    /// None where only the service is asked.
    path: Option<PathBuf>,
    rules: ArcSwap<Rules>,
    /// Grows after the rules were replaced: what was decided under an earlier one is decided anew.
    version: AtomicU32,
    /// Told each time they were replaced.
    replaced: watch::Sender<()>,
}

impl Authority {
    /// Has the embedding program decide, and nobody else.
    pub fn of_program(program: Arc<dyn Authorizer>, closes: bool) -> Arc<Self> {
        // The program denies everything that it does not allow, these topics too.
        let reserved = ReservedTopics::default();
        Arc::new(Self { decides: Decides::Program(program), authorizer: None, reserved, closes })
    }

    /// Reads the rules.
    ///
    /// # Errors
    /// Every mistake, with file and line.
    pub fn open(
        path: Option<PathBuf>,
        authorizer: Option<Arc<RemoteAuthorizer>>,
        reserved: ReservedTopics,
        closes: bool,
    ) -> Result<Arc<Self>, Vec<String>> {
        let file = RulesFile {
            path,
            rules: ArcSwap::default(),
            version: AtomicU32::new(0),
            replaced: watch::Sender::new(()),
        };
        file.reload()?;
        Ok(Arc::new(Self { decides: Decides::Rules(file), authorizer, reserved, closes }))
    }

    /// Returns whether a client with a proved identity may connect under its client id. A program decides that as it
    /// authenticates.
    pub fn may_connect(&self, subject: &Subject<'_>) -> bool {
        match &self.decides {
            Decides::Rules(file) => file.rules.load().connect(subject),
            Decides::Program(_) => true,
        }
    }

    /// Changes each time other rules are in force; `None` where the embedding program decides.
    pub fn replacements(&self) -> Option<watch::Receiver<()>> {
        match &self.decides {
            Decides::Rules(file) => Some(file.replaced.subscribe()),
            Decides::Program(_) => None,
        }
    }

    /// Returns the grant for publishing to a topic.
    pub fn publish(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        match &self.decides {
            Decides::Rules(file) => self.or_own(file.rules.load().publish(subject, topic), subject, topic),
            Decides::Program(program) => program.publish(subject, topic),
        }
    }

    /// Returns the grant for receiving messages of a topic.
    pub fn receive(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        match &self.decides {
            Decides::Rules(file) => self.or_own(file.rules.load().receive(subject, topic), subject, topic),
            Decides::Program(program) => program.receive(subject, topic),
        }
    }

    /// Decides on a subscription.
    pub fn subscribe(&self, subject: &Subject<'_>, filter: &str) -> Subscribing {
        match &self.decides {
            Decides::Rules(file) => match file.rules.load().subscribe(subject, filter) {
                Subscribing::DENIED if self.reserved.owns(subject.client_id, filter) => Subscribing::Allowed,
                said => said,
            },
            Decides::Program(program) => program.subscribe(subject, filter),
        }
    }

    /// Allows an unnamed topic that is reserved for this device.
    fn or_own(&self, grant: RuleGrant, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        match grant.is_unnamed() && self.reserved.owns(subject.client_id, topic) {
            true => RuleGrant::ALLOWED,
            false => grant,
        }
    }

    /// Returns the service that is asked where the rules say nothing, if there is one.
    pub fn authorizer(&self) -> Option<&Arc<RemoteAuthorizer>> {
        self.authorizer.as_ref()
    }

    pub fn version(&self) -> u32 {
        match &self.decides {
            Decides::Rules(file) => file.version.load(Acquire),
            Decides::Program(program) => program.version(),
        }
    }

    /// The rules of this moment and their file; `None` where the embedding program decides.
    pub fn rules(&self) -> Option<(Arc<Rules>, Option<&Path>)> {
        match &self.decides {
            Decides::Rules(file) => Some((file.rules.load_full(), file.path.as_deref())),
            Decides::Program(_) => None,
        }
    }

    /// Explains the decision of this moment's rules about a question.
    pub fn explain(&self, subject: &Subject<'_>, asked: &AccessQuestion<'_>) -> Explanation {
        let program = match &self.decides {
            Decides::Rules(file) => {
                return self.explain_own(file.rules.load().explain(subject, asked), subject, asked);
            }
            Decides::Program(program) => program,
        };
        let allowed = match *asked {
            AccessQuestion::Publish { topic, qos, retain, bytes } => {
                program.publish(subject, topic).permits(qos, retain, bytes).is_ok()
            }
            AccessQuestion::Connect => true,
            AccessQuestion::Subscribe { filter } => {
                !matches!(program.subscribe(subject, filter), Subscribing::Denied(_))
            }
        };
        let said = if allowed { "allowed" } else { "denied" };
        Explanation {
            allowed,
            line: 0,
            lines: vec![format!("{said} by the program that embeds the gateway")],
        }
    }

    /// Adds the gateway's own decision about its topics, whatever the rules say.
    fn explain_own(
        &self,
        rules: Explanation,
        subject: &Subject<'_>,
        asked: &AccessQuestion<'_>,
    ) -> Explanation {
        let Explanation { allowed, line, mut lines } = rules;
        let own = |topic: &str| !allowed && line == 0 && self.reserved.owns(subject.client_id, topic);
        let (allowed, said) = match *asked {
            AccessQuestion::Publish { topic, .. } if self.reserved.is_foreign(subject.client_id, topic) => {
                (false, "denied: the topic is reserved, and not for this device")
            }
            AccessQuestion::Publish { topic, .. } if own(topic) => {
                (true, "allowed: the topic is reserved for this device")
            }
            AccessQuestion::Subscribe { filter } if own(filter) => {
                (true, "allowed: its topics are reserved for this device")
            }
            _ => return Explanation { allowed, line, lines },
        };
        lines.push(said.to_owned());
        Explanation { allowed, line: 0, lines }
    }

    /// Returns the decision of the user's service about a topic that no rule names, and its words; `None` if no service
    /// is asked.
    pub async fn ask_service(
        &self,
        subject: &Subject<'_>,
        asked: &AccessQuestion<'_>,
    ) -> Option<(bool, &'static str)> {
        let authorizer = self.authorizer.as_ref()?;
        let authorization_request = match *asked {
            AccessQuestion::Connect => return None,
            AccessQuestion::Publish { topic, qos, retain, .. } => {
                AuthorizationRequest::Publish { topic: topic.into(), qos, retain }
            }
            AccessQuestion::Subscribe { filter } => {
                AuthorizationRequest::Subscribe { filter: filter.into(), qos: QoS::AtMostOnce }
            }
        };
        Some(match authorizer.may(subject, &authorization_request).await {
            Ok(true) => (true, "allowed: no rule names it, and the service of auth.grpc allows it"),
            Ok(false) => (false, "denied: no rule names it, and the service of auth.grpc does not allow it"),
            Err(NoDecision) => {
                (false, "denied: no rule names it, and the service of auth.grpc does not answer")
            }
        })
    }

    /// Returns whether the rules of this moment would grant an existing subscription. A filter that no rule names was
    /// granted by the user's service, if there is one.
    pub fn may_subscribe(&self, subject: &Subject<'_>, filter: &str) -> bool {
        match self.subscribe(subject, filter) {
            Subscribing::Denied(line) => line == 0 && self.authorizer.is_some(),
            Subscribing::Allowed | Subscribing::OnDelivery => true,
        }
    }

    /// Returns whether a will may be published by the rules of this moment. The owner of a will that was left before
    /// there were rules is unknown, and the will may not be published.
    pub fn may_publish_will(&self, client_id: &ClientId, author: Option<&str>, will: &SharedMessage) -> bool {
        let grant = author.and_then(Author::read).map(|Author { listener, principal, by_service }| {
            let subject =
                Subject { client_id: client_id.as_str(), listener: &listener, principal: &principal };
            let grant = self.publish(&subject, &will.topic);
            // Nobody can be asked now: what the service has said when the will was left stands.
            let stands = by_service && grant.is_unnamed() && self.authorizer.is_some();
            if stands { RuleGrant::ALLOWED } else { grant }
        });
        let Some(grant) = grant else {
            info!(%client_id, topic = &*will.topic, "will not published, who left it is not known");
            return false;
        };
        let Err(why) = grant.permits(will.qos, will.retain, will.payload.len()) else { return true };
        let (line, reason) = (grant.line, why.as_str());
        info!(%client_id, topic = &*will.topic, line, reason, "will not published, not allowed by the rules");
        false
    }
}

impl ConnectionCheck for Authority {
    /// Asked about a connection of its own process only, of which the identity is known.
    fn verdict(&self, connected: &Connected<'_>) -> Option<CloseReason> {
        let principal = identity::principal(connected.info);
        let (client_id, listener) = (connected.client_id, connected.info.listener.as_str());
        let may = self.may_connect(&Subject { client_id, listener, principal: &principal });
        (!may).then_some(CloseReason::NotAuthorized)
    }
}

impl Reload for Authority {
    fn name(&self) -> &'static str {
        "rules"
    }

    fn files(&self) -> Vec<PathBuf> {
        match &self.decides {
            Decides::Rules(file) => file.path.iter().cloned().collect(),
            Decides::Program(_) => Vec::new(),
        }
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        match &self.decides {
            Decides::Rules(file) => file.reload(),
            Decides::Program(_) => Ok("those of the program".to_owned()),
        }
    }
}

impl RulesFile {
    fn reload(&self) -> Result<String, Vec<String>> {
        let rules = match &self.path {
            None => Rules::default(),
            Some(file) => {
                let path = file.display();
                let text = fs::read_to_string(file).map_err(|error| vec![format!("read {path}: {error}")])?;
                Rules::parse(&text).map_err(|mistakes| -> Vec<String> {
                    mistakes.iter().map(|mistake| format!("{path}: {mistake}")).collect()
                })?
            }
        };
        let said = format!("{} rules", rules.len());
        // A reader that sees the version sees these rules or later ones.
        self.rules.store(Arc::new(rules));
        self.version.fetch_add(1, AcqRel);
        self.replaced.send_replace(());
        Ok(said)
    }
}

/// The rules, if a file is configured, or who is asked without them.
///
/// # Errors
/// Every mistake in the file.
pub fn open_rules(
    config: &Config,
    authorizer: Option<Arc<RemoteAuthorizer>>,
    reserved: ReservedTopics,
) -> Result<Option<Arc<Authority>>, ConfigError> {
    let path = config.authorization.rules.clone();
    if path.is_none() && authorizer.is_none() {
        return Ok(None);
    }
    let closes = config.authorization.denied_publish == DeniedPublish::Close;
    let opened = Authority::open(path, authorizer, reserved, closes);
    opened.map(Some).map_err(|mistakes| {
        let problem = |mistake: &String| Problem::new("authorization.rules", "", mistake, "correct the file");
        ConfigError(mistakes.iter().map(problem).collect())
    })
}

/// Looks at each message before a session gets it, by the rules of that moment: so no message of a subscription that is
/// no longer allowed is delivered, and none that has waited.
pub struct Receiving {
    authority: Arc<Authority>,
    client_id: Box<str>,
    listener: Arc<String>,
    principal: Arc<Principal>,
    recent: Remembered,
    /// Filters that the service allows, where the rules say nothing. No more topics than the session has subscriptions.
    granted: Granted,
}

/// Filters with wildcards, or of shared subscriptions, that the service may grant a session. They are looked at one after the
/// other for each topic that is new to the session, under its lock and in its publisher's time.
const MOST_PATTERNS: usize = 64;

/// Filters that are allowed by another party than the rules.
#[derive(Default)]
struct Granted {
    /// Without wildcards: a topic each.
    topics: HashSet<Box<str>>,
    /// The others, and those of shared subscriptions; at most [`MOST_PATTERNS`].
    patterns: HashSet<Box<str>>,
}

impl Granted {
    fn is_topic(filter: &str) -> bool {
        !has_wildcard(filter) && !filter.starts_with("$share/")
    }

    fn set_of(&mut self, filter: &str) -> &mut HashSet<Box<str>> {
        if Self::is_topic(filter) { &mut self.topics } else { &mut self.patterns }
    }

    /// Returns whether one more filter can be granted.
    fn has_room_for(&self, filter: &str) -> bool {
        Self::is_topic(filter) || self.patterns.len() < MOST_PATTERNS
    }

    /// Bytes of one.
    fn cost(filter: &str) -> isize {
        // A set is at most half empty.
        (2 * size_of::<Box<str>>() + filter.len()).cast_signed()
    }

    fn covers(&self, topic: &str) -> bool {
        let matches_one = |filter: &str| {
            let shared = parse_shared(filter).ok().flatten();
            matches(shared.map_or(filter, |(_, inner)| inner), topic)
        };
        self.topics.contains(topic) || self.patterns.iter().any(|filter| matches_one(filter))
    }
}

impl Receiving {
    pub(crate) fn new(
        authority: &Arc<Authority>,
        client_id: &str,
        listener: &Arc<String>,
        principal: &Arc<Principal>,
        account: &Arc<Account>,
    ) -> Self {
        let bytes = size_of::<Self>() - size_of::<Remembered>() + client_id.len() + GATED;
        Self {
            authority: Arc::clone(authority),
            client_id: client_id.into(),
            listener: Arc::clone(listener),
            principal: Arc::clone(principal),
            recent: Remembered::new(account, bytes),
            granted: Granted::default(),
        }
    }
}

impl std::fmt::Debug for Receiving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiving").field("client_id", &self.client_id).finish_non_exhaustive()
    }
}

impl Gate for Receiving {
    fn admits(&mut self, topic: &str) -> bool {
        let Self { authority, client_id, listener, principal, recent, granted, .. } = self;
        let subject = Subject { client_id, listener: listener.as_str(), principal };
        let decide = || {
            let grant = authority.receive(&subject, topic);
            if grant.is_unnamed() && granted.covers(topic) { RuleGrant::ALLOWED } else { grant }
        };
        recent.find(authority, topic, decide).is_allowed()
    }

    fn grant(&mut self, filter: &str) -> Result<bool, TooManyGranted> {
        if self.granted.set_of(filter).contains(filter) {
            return Ok(false);
        }
        if !self.granted.has_room_for(filter) {
            return Err(TooManyGranted);
        }
        self.granted.set_of(filter).insert(filter.into());
        self.recent.forget(Granted::cost(filter));
        Ok(true)
    }

    fn take_granted(&mut self) -> Vec<Box<str>> {
        let Granted { topics, patterns } = std::mem::take(&mut self.granted);
        let taken: Vec<Box<str>> = topics.into_iter().chain(patterns).collect();
        self.recent.forget(-taken.iter().map(|filter| Granted::cost(filter)).sum::<isize>());
        taken
    }

    fn withdraw(&mut self, filter: &str) {
        if self.granted.set_of(filter).remove(filter) {
            self.recent.forget(-Granted::cost(filter));
        }
    }
}

#[cfg(test)]
mod tests {
    use access::{Principal, Subject, rules::AccessQuestion};

    use super::*;

    #[test]
    fn reserved_topics_need_no_rule_and_obey_one_that_denies() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules.toml");
        let rules = "[[rules]]\ndeny = \"all\"\ntopics = [\"own/%c/secret/#\"]\n";
        fs::write(&path, rules).unwrap();
        let reserved = ReservedTopics::new(["own/"]);
        let authority = Authority::open(Some(path), None, reserved, false).unwrap();
        let principal = Principal::default();
        let subject = Subject { client_id: "d", listener: "default", principal: &principal };
        // Topic, and whether it is allowed.
        let cases = [("own/d/a", true), ("own/d/secret/a", false), ("own/e/a", false), ("other/d/a", false)];
        for (topic, allowed) in cases {
            assert_eq!(authority.publish(&subject, topic).is_allowed(), allowed, "{topic}");
            assert_eq!(authority.receive(&subject, topic).is_allowed(), allowed, "{topic}");
            let subscribing = authority.subscribe(&subject, topic);
            assert_eq!(!matches!(subscribing, Subscribing::Denied(_)), allowed, "{topic}");
            let asked = AccessQuestion::Publish { topic, qos: QoS::AtLeastOnce, retain: false, bytes: 1 };
            assert_eq!(authority.explain(&subject, &asked).allowed, allowed, "{topic}");
            assert_eq!(
                authority.explain(&subject, &AccessQuestion::Subscribe { filter: topic }).allowed,
                allowed
            );
        }
        assert!(authority.subscribe(&subject, "own/e/#") == Subscribing::DENIED);
        assert!(matches!(authority.subscribe(&subject, "own/+/a"), Subscribing::Denied(_)));
    }
}
