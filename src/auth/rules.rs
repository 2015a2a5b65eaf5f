//! The rules in force: read from their file, replaced as a whole, each time under another version.

use std::{
    collections::HashSet,
    fs,
    path::PathBuf,
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
    rules::{Asked, Explanation, Grant, Rules, Subscribing},
};
use arc_swap::ArcSwap;
use gateway_core::{ClientId, QoS, SharedMessage, matches, parse_shared};
use session::Gate;
use tracing::info;

use super::remote::{Authorizer, Unanswered, Wish};
use crate::{
    config::{Config, ConfigError, DeniedPublish, Problem},
    reload::Reload,
};

/// Topics whose decisions one connection remembers, and the longest of them in bytes.
const REMEMBERED: usize = 8;
const LONGEST: usize = 256;

/// What devices may do, where rules are configured.
pub(crate) struct Authority {
    /// None where only the service is asked.
    path: Option<PathBuf>,
    /// Asked where the rules say nothing.
    authorizer: Option<Arc<Authorizer>>,
    rules: ArcSwap<Rules>,
    /// Grows after the rules were replaced: what was decided under an earlier one is decided anew.
    version: AtomicU32,
    /// A denied PUBLISH that no acknowledgement can tell of ends its connection.
    pub(crate) closes: bool,
}

impl Authority {
    /// Reads the rules.
    ///
    /// # Errors
    /// Every mistake, with file and line.
    pub(crate) fn open(
        path: Option<PathBuf>,
        authorizer: Option<Arc<Authorizer>>,
        closes: bool,
    ) -> Result<Arc<Self>, Vec<String>> {
        let (rules, version) = (ArcSwap::default(), AtomicU32::new(0));
        let this = Self { path, authorizer, rules, version, closes };
        this.reload()?;
        Ok(Arc::new(this))
    }

    /// The rules of this moment.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    /// Who is asked where the rules say nothing, if somebody is.
    pub(crate) fn authorizer(&self) -> Option<&Arc<Authorizer>> {
        self.authorizer.as_ref()
    }

    pub(crate) fn version(&self) -> u32 {
        self.version.load(Acquire)
    }

    /// Why somebody may do something by the rules of this moment, or may not.
    pub(crate) fn explain(&self, subject: &Subject<'_>, asked: &Asked<'_>) -> Explanation {
        self.rules().explain(subject, asked)
    }

    /// What the user's service says about something that no rule names, and in words; `None` if no service is asked.
    pub(crate) async fn ask_service(
        &self,
        subject: &Subject<'_>,
        asked: &Asked<'_>,
    ) -> Option<(bool, &'static str)> {
        let authorizer = self.authorizer.as_ref()?;
        let wish = match *asked {
            Asked::Publish { topic, qos, retain, .. } => Wish::Publish { topic: topic.into(), qos, retain },
            Asked::Subscribe { filter } => Wish::Subscribe { filter: filter.into(), qos: QoS::AtMostOnce },
        };
        Some(match authorizer.may(subject, &wish).await {
            Ok(true) => (true, "allowed: no rule names it, and the service of auth.grpc allows it"),
            Ok(false) => (false, "denied: no rule names it, and the service of auth.grpc does not allow it"),
            Err(Unanswered) => {
                (false, "denied: no rule names it, and the service of auth.grpc does not answer")
            }
        })
    }

    /// Whether a subscription that was made would be granted by the rules of this moment. What no rule names, the user's service
    /// has granted, if there is one.
    pub(crate) fn may_subscribe(&self, subject: &Subject<'_>, filter: &str) -> bool {
        match self.rules().subscribe(subject, filter) {
            Subscribing::Denied(line) => line == 0 && self.authorizer.is_some(),
            Subscribing::Allowed | Subscribing::OnDelivery => true,
        }
    }

    /// Whether a will may be published by the rules of this moment. Of one that was left before there were rules nobody
    /// knows whose it is, and it may not.
    pub(crate) fn may_publish_will(
        &self,
        client_id: &ClientId,
        author: Option<&str>,
        will: &SharedMessage,
    ) -> bool {
        let grant = author.and_then(Author::read).map(|Author { listener, principal, by_service }| {
            let subject =
                Subject { client_id: client_id.as_str(), listener: &listener, principal: &principal };
            let grant = self.rules().publish(&subject, &will.topic);
            // Nobody can be asked now: what the service has said when the will was left stands.
            let stands = by_service && grant.is_unnamed() && self.authorizer.is_some();
            if stands { Grant::ALLOWED } else { grant }
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

impl Reload for Authority {
    fn name(&self) -> &'static str {
        "rules"
    }

    fn files(&self) -> Vec<PathBuf> {
        self.path.iter().cloned().collect()
    }

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
        // Whoever sees the version sees these rules or later ones.
        self.rules.store(Arc::new(rules));
        self.version.fetch_add(1, AcqRel);
        Ok(said)
    }
}

/// The rules, if a file is configured, or who is asked without them.
///
/// # Errors
/// Every mistake in the file.
pub(crate) fn open_rules(
    config: &Config,
    authorizer: Option<Arc<Authorizer>>,
) -> Result<Option<Arc<Authority>>, ConfigError> {
    let path = config.authorization.rules.clone();
    if path.is_none() && authorizer.is_none() {
        return Ok(None);
    }
    let closes = config.authorization.denied_publish == DeniedPublish::Close;
    let opened = Authority::open(path, authorizer, closes);
    opened.map(Some).map_err(|mistakes| {
        let problem = |mistake: &String| Problem::new("authorization.rules", "", mistake, "correct the file");
        ConfigError(mistakes.iter().map(problem).collect())
    })
}

/// What was decided about a few topics last, for one party and one action.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    version: u32,
    next: usize,
    grants: Vec<(Box<str>, Grant)>,
}

impl Recent {
    /// The decision about a topic in the version of this moment, made by `decide` if it is not remembered.
    pub(crate) fn find(
        &mut self,
        authority: &Authority,
        topic: &str,
        decide: impl FnOnce(&Rules) -> Grant,
    ) -> Grant {
        let version = authority.version();
        if self.version != version {
            // Rules that come in between are remembered under the version before them, and so not for long.
            (self.version, self.next) = (version, 0);
            self.grants.clear();
        }
        if let Some((_, grant)) = self.grants.iter().find(|(known, _)| **known == *topic) {
            return *grant;
        }
        let grant = decide(&authority.rules.load());
        if topic.len() > LONGEST {
            return grant;
        }
        if self.grants.len() < REMEMBERED {
            self.grants.push((topic.into(), grant));
        } else {
            self.grants[self.next] = (topic.into(), grant);
            self.next = (self.next + 1) % REMEMBERED;
        }
        grant
    }
}

/// Looks at each message before a session gets it, by the rules of that moment: so no message of a subscription that is
/// no longer allowed is delivered, and none that has waited.
pub(crate) struct Receiving {
    authority: Arc<Authority>,
    client_id: Box<str>,
    listener: Arc<String>,
    principal: Arc<Principal>,
    recent: Recent,
    /// Filters that the service allows, where the rules say nothing. No more than the session has subscriptions.
    granted: Granted,
}

/// Filters that somebody else than the rules allows.
#[derive(Default)]
struct Granted {
    /// Without wildcards: a topic each.
    topics: HashSet<Box<str>>,
    /// The others, and those of shared subscriptions.
    filters: HashSet<Box<str>>,
}

impl Granted {
    fn set_of(&mut self, filter: &str) -> &mut HashSet<Box<str>> {
        let is_topic = !filter.contains(['+', '#']) && !filter.starts_with("$share/");
        if is_topic { &mut self.topics } else { &mut self.filters }
    }

    fn covers(&self, topic: &str) -> bool {
        let matches_one = |filter: &str| {
            let shared = parse_shared(filter).ok().flatten();
            matches(shared.map_or(filter, |(_, inner)| inner), topic)
        };
        self.topics.contains(topic) || self.filters.iter().any(|filter| matches_one(filter))
    }
}

impl Receiving {
    pub(crate) fn new(
        authority: &Arc<Authority>,
        client_id: &str,
        listener: &Arc<String>,
        principal: &Arc<Principal>,
    ) -> Self {
        Self {
            authority: Arc::clone(authority),
            client_id: client_id.into(),
            listener: Arc::clone(listener),
            principal: Arc::clone(principal),
            recent: Recent::default(),
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
        let decide = |rules: &Rules| {
            let grant = rules.receive(&subject, topic);
            if grant.is_unnamed() && granted.covers(topic) { Grant::ALLOWED } else { grant }
        };
        recent.find(authority, topic, decide).is_allowed()
    }

    fn grant(&mut self, filter: &str) {
        if self.granted.set_of(filter).insert(filter.into()) {
            self.recent = Recent::default();
        }
    }

    fn take_granted(&mut self) -> Vec<Box<str>> {
        self.recent = Recent::default();
        let Granted { topics, filters } = std::mem::take(&mut self.granted);
        topics.into_iter().chain(filters).collect()
    }

    fn withdraw(&mut self, filter: &str) {
        if self.granted.set_of(filter).remove(filter) {
            self.recent = Recent::default();
        }
    }
}
