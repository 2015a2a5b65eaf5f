//! The rules in force: read from their file, replaced as a whole, each time under another version.

use std::{
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
use gateway_core::{ClientId, SharedMessage};
use session::Gate;
use tracing::info;

use crate::{
    config::{Config, ConfigError, DeniedPublish, Problem},
    reload::Reload,
};

/// Topics whose decisions one connection remembers, and the longest of them in bytes.
const REMEMBERED: usize = 8;
const LONGEST: usize = 256;

/// What devices may do, where rules are configured.
pub(crate) struct Authority {
    path: PathBuf,
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
    pub(crate) fn open(path: PathBuf, closes: bool) -> Result<Arc<Self>, Vec<String>> {
        let this = Self { path, rules: ArcSwap::default(), version: AtomicU32::new(0), closes };
        this.reload()?;
        Ok(Arc::new(this))
    }

    /// The rules of this moment.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    pub(crate) fn version(&self) -> u32 {
        self.version.load(Acquire)
    }

    /// Why somebody may do something by the rules of this moment, or may not.
    pub(crate) fn explain(&self, subject: &Subject<'_>, asked: &Asked<'_>) -> Explanation {
        self.rules().explain(subject, asked)
    }

    /// Whether a subscription would be granted by the rules of this moment.
    pub(crate) fn may_subscribe(&self, subject: &Subject<'_>, filter: &str) -> bool {
        !matches!(self.rules().subscribe(subject, filter), Subscribing::Denied(_))
    }

    /// Whether a will may be published by the rules of this moment. Of one that was left before there were rules nobody
    /// knows whose it is, and it may not.
    pub(crate) fn may_publish_will(
        &self,
        client_id: &ClientId,
        author: Option<&str>,
        will: &SharedMessage,
    ) -> bool {
        let grant = author.and_then(Author::read).map(|Author { listener, principal }| {
            let subject =
                Subject { client_id: client_id.as_str(), listener: &listener, principal: &principal };
            self.rules().publish(&subject, &will.topic)
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
        vec![self.path.clone()]
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let path = self.path.display();
        let text = fs::read_to_string(&self.path).map_err(|error| vec![format!("read {path}: {error}")])?;
        let rules = Rules::parse(&text).map_err(|mistakes| -> Vec<String> {
            mistakes.iter().map(|mistake| format!("{path}: {mistake}")).collect()
        })?;
        let said = format!("{} rules", rules.len());
        // Whoever sees the version sees these rules or later ones.
        self.rules.store(Arc::new(rules));
        self.version.fetch_add(1, AcqRel);
        Ok(said)
    }
}

/// The rules, if a file is configured.
pub(crate) fn open_rules(config: &Config) -> Result<Option<Arc<Authority>>, ConfigError> {
    let Some(path) = &config.authorization.rules else { return Ok(None) };
    let closes = config.authorization.denied_publish == DeniedPublish::Close;
    let opened = Authority::open(path.clone(), closes);
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
        let Self { authority, client_id, listener, principal, recent, .. } = self;
        let subject = Subject { client_id, listener: listener.as_str(), principal };
        recent.find(authority, topic, |rules| rules.receive(&subject, topic)).is_allowed()
    }
}
