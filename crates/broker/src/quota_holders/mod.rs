//! Quota holders: those that share quotas. A device belongs to one for its identity and one for its tenant, where these have
//! quotas; else to none, which costs nothing.
//!
//! A quota holder's figures are atomic counters, so that no lock is shared by all its connections but those of its rates. What a
//! session has of them is its [`SessionQuotaUse`], what a retained message has is its [`RetainedQuotaUse`]; both give back when
//! they are dropped.

mod registry;
mod retained;
mod session;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use gateway_core::{Flow, Quotas, Timestamp, warn_limited};
use parking_lot::Mutex;

use crate::counters::count;

pub(crate) use self::{registry::QuotaRegistry, retained::RetainedQuotaUse, session::SessionQuotaUse};

/// The quota holders of one device, none, one or two; without any it is no allocation.
pub type QuotaHolders = Box<[Arc<QuotaHolder>]>;

/// Why somebody is a quota holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum QuotaHolderKind {
    /// An identity: a user name that was proved.
    User,
    /// An identity: a client id without such a user name. It may be the same text, and is somebody else.
    Client,
    /// A tenant.
    Tenant,
}

/// Things that are counted against a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Sessions with a connection.
    Connections,
    /// Sessions in all.
    Sessions,
    /// Subscriptions.
    Subscriptions,
    /// Retained messages.
    RetainedMessages,
    /// Bytes of retained messages.
    RetainedBytes,
}

impl Counted {
    /// All, in the order of their declaration.
    pub const ALL: [Self; 5] =
        [Self::Connections, Self::Sessions, Self::Subscriptions, Self::RetainedMessages, Self::RetainedBytes];

    /// As metrics and logs name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Sessions => "sessions",
            Self::Subscriptions => "subscriptions",
            Self::RetainedMessages => "retained_messages",
            Self::RetainedBytes => "retained_bytes",
        }
    }
}

/// Somebody who shares quotas.
#[derive(Debug)]
pub struct QuotaHolder {
    kind: QuotaHolderKind,
    name: Box<str>,
    quotas: Quotas,
    used: [AtomicUsize; Counted::ALL.len()],
    /// Boxed, since identities are many and rates for them rare.
    flows: Option<Box<Flows>>,
}

/// Flows of messages from all connections of a quota holder, and to them.
#[derive(Debug)]
struct Flows {
    from: Mutex<Option<Flow>>,
    to: Mutex<Option<Flow>>,
}

/// A quota does not allow it.
#[derive(Debug, Clone)]
pub struct QuotaExceeded {
    /// Quota holder whose quota is used up.
    pub holder: Arc<QuotaHolder>,
    /// Kind of the exhausted quota.
    pub what: Counted,
}

impl fmt::Display for QuotaExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {:?} has used up its {}",
            self.holder.kind.as_str(),
            self.holder.name,
            self.what.as_str()
        )
    }
}

impl QuotaHolderKind {
    /// As metrics and logs name it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Client => "client",
            Self::Tenant => "tenant",
        }
    }
}

impl QuotaHolder {
    fn new(kind: QuotaHolderKind, name: &str, quotas: Quotas) -> Self {
        // Full as from the beginning of time.
        let flow = |messages, bytes| Flow::new(messages, bytes, Timestamp(0));
        let from = flow(quotas.message_rate, quotas.byte_rate);
        let to = flow(quotas.message_rate_out, quotas.byte_rate_out);
        let flows = (from.is_some() || to.is_some())
            .then(|| Box::new(Flows { from: Mutex::new(from), to: Mutex::new(to) }));
        Self { kind, name: name.into(), quotas, used: Default::default(), flows }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the quota holder's quotas.
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// Returns the quota holder's quota of `what`; 0 is no limit.
    pub fn quota(&self, what: Counted) -> usize {
        match what {
            Counted::Connections => self.quotas.connections,
            Counted::Sessions => self.quotas.sessions,
            Counted::Subscriptions => self.quotas.subscriptions,
            Counted::RetainedMessages => self.quotas.retained_messages,
            Counted::RetainedBytes => self.quotas.retained_bytes.0,
        }
    }

    /// Returns how much of `what` the quota holder uses.
    pub fn used(&self, what: Counted) -> usize {
        self.used[what as usize].load(Relaxed)
    }

    /// Returns whether messages from the quota holder's connections have a rate.
    pub fn limits_input(&self) -> bool {
        self.quotas.message_rate > 0 || self.quotas.byte_rate.0 > 0
    }

    /// Returns whether messages to the quota holder's connections have a rate.
    pub fn limits_output(&self) -> bool {
        self.quotas.message_rate_out > 0 || self.quotas.byte_rate_out.0 > 0
    }

    /// Takes what came from one of its connections; seconds until the quota holder owes nothing.
    pub fn take_input(&self, messages: u32, bytes: usize, now: Timestamp) -> f64 {
        let mut flow = self.flows.as_ref().map(|flows| flows.from.lock());
        flow.as_mut().and_then(|flow| flow.as_mut()).map_or(0.0, |flow| flow.take(messages, bytes, now))
    }

    /// Takes what went to one of its connections; seconds until the quota holder owes nothing.
    pub fn take_output(&self, messages: u32, bytes: usize, now: Timestamp) -> f64 {
        let mut flow = self.flows.as_ref().map(|flows| flows.to.lock());
        flow.as_mut().and_then(|flow| flow.as_mut()).map_or(0.0, |flow| flow.take(messages, bytes, now))
    }

    /// Adds `n` if the quota allows it.
    fn try_add(&self, what: Counted, n: usize) -> bool {
        let quota = self.quota(what);
        let more = |used: usize| {
            let all = used.saturating_add(n);
            (quota == 0 || all <= quota).then_some(all)
        };
        n == 0 || self.used[what as usize].fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Adds `n` whatever the quota says, for what was granted before.
    fn add(&self, what: Counted, n: usize) {
        self.used[what as usize].fetch_add(n, Relaxed);
    }

    fn give_back(&self, what: Counted, n: usize) {
        let before = self.used[what as usize].fetch_sub(n, Relaxed);
        debug_assert!(before >= n, "more {} given back than taken", what.as_str());
    }
}

impl QuotaExceeded {
    /// Counts the refusal and, if nobody else can tell whose quota it is, says so in the log.
    pub(crate) fn counted(self) -> Self {
        if !matches!(self.what, Counted::Connections | Counted::Sessions) {
            let (of, name, quota) = (self.holder.kind.as_str(), &*self.holder.name, self.what.as_str());
            warn_limited!(of, name, quota, "refused, since it is over a quota");
        }
        count(|c| {
            match (self.holder.kind, self.what) {
                (QuotaHolderKind::User | QuotaHolderKind::Client, Counted::Connections) => {
                    &c.identity_connections
                }
                (QuotaHolderKind::User | QuotaHolderKind::Client, Counted::Sessions) => &c.identity_sessions,
                (QuotaHolderKind::User | QuotaHolderKind::Client, Counted::Subscriptions) => {
                    &c.identity_subscriptions
                }
                (QuotaHolderKind::User | QuotaHolderKind::Client, Counted::RetainedMessages) => {
                    &c.identity_retained_messages
                }
                (QuotaHolderKind::User | QuotaHolderKind::Client, Counted::RetainedBytes) => {
                    &c.identity_retained_bytes
                }
                (QuotaHolderKind::Tenant, Counted::Connections) => &c.tenant_connections,
                (QuotaHolderKind::Tenant, Counted::Sessions) => &c.tenant_sessions,
                (QuotaHolderKind::Tenant, Counted::Subscriptions) => &c.tenant_subscriptions,
                (QuotaHolderKind::Tenant, Counted::RetainedMessages) => &c.tenant_retained_messages,
                (QuotaHolderKind::Tenant, Counted::RetainedBytes) => &c.tenant_retained_bytes,
            }
            .add(1);
        });
        self
    }
}

/// Adds to all of them or, if one may not have it, to none.
fn try_add_all<'a>(
    wanted: impl Iterator<Item = (&'a Arc<QuotaHolder>, Counted, usize)> + Clone,
) -> Result<(), QuotaExceeded> {
    for (number, (holder, what, n)) in wanted.clone().enumerate() {
        if !holder.try_add(what, n) {
            for (holder, what, n) in wanted.take(number) {
                holder.give_back(what, n);
            }
            return Err(QuotaExceeded { holder: Arc::clone(holder), what });
        }
    }
    Ok(())
}
