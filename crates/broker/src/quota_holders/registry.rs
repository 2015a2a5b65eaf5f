//! All quota holders: the tenants that are configured, and everybody else that uses part of a quota at the moment.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Weak},
};

use ahash::RandomState;
use gateway_core::Quotas;
use hashbrown::HashMap;
use parking_lot::Mutex;

use super::{QuotaHolder, QuotaHolderKind, QuotaHolders};

/// The section for tenants that have none of their own.
const ANY: &str = "*";

/// See the module.
pub(crate) struct QuotaRegistry {
    /// Of each identity; `None` if they are not limited.
    identity: Option<Quotas>,
    tenants: BTreeMap<Box<str>, Arc<QuotaHolder>>,
    /// Of each tenant without a section; `None` if they are not limited.
    any_tenant: Option<Quotas>,
    counts_retained: bool,
    others: Mutex<Others>,
}

/// Quota holders without a section of their own, as long as somebody belongs to them.
#[derive(Default)]
struct Others {
    by_name: HashMap<QuotaHolderKey, Weak<QuotaHolder>, RandomState>,
    /// All of them, in the order in which they are looked at: those to which nobody belongs now are removed.
    turns: VecDeque<QuotaHolderKey>,
}

type QuotaHolderKey = (QuotaHolderKind, Arc<str>);

/// Known quota holders that are checked for removal whenever one is added. With two there are never more than twice as many quota
/// holders as are in use, and no login waits for a search through all.
const LOOKS: usize = 2;

impl QuotaRegistry {
    /// The quotas of each identity and, by name, of tenants; `*` is every other tenant.
    pub(crate) fn new(identity: &Quotas, tenants: &BTreeMap<String, Quotas>) -> Self {
        let holder = |(name, quotas): (&String, &Quotas)| {
            let holder = QuotaHolder::new(QuotaHolderKind::Tenant, name, quotas.clone());
            (Box::from(name.as_str()), Arc::new(holder))
        };
        let limited = |quotas: &Quotas| quotas.retained_messages > 0 || quotas.retained_bytes.0 > 0;
        Self {
            // Of tenants with a name also what they may have without a limit is shown.
            counts_retained: !tenants.is_empty() || limited(identity),
            identity: Some(identity).filter(|quotas| !quotas.is_empty()).cloned(),
            tenants: tenants.iter().filter(|(name, _)| *name != ANY).map(holder).collect(),
            any_tenant: tenants.get(ANY).filter(|quotas| !quotas.is_empty()).cloned(),
            others: Mutex::default(),
        }
    }

    /// Returns whether no quotas are configured.
    fn is_empty(&self) -> bool {
        self.identity.is_none() && self.tenants.is_empty() && self.any_tenant.is_none()
    }

    /// Returns whether retained messages count for any quota holder.
    #[inline]
    pub(crate) fn counts_retained(&self) -> bool {
        self.counts_retained
    }

    /// The tenants that are configured by name.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = &Arc<QuotaHolder>> {
        self.tenants.values()
    }

    /// The quota holders of a device with this user name, if it was proved, this client id and this tenant.
    pub(crate) fn of(&self, user: Option<&str>, client_id: &str, tenant: &str) -> QuotaHolders {
        if self.is_empty() {
            return QuotaHolders::default();
        }
        let by_identity = self.identity.as_ref().map(|quotas| match user {
            Some(user) => self.other(QuotaHolderKind::User, user, quotas),
            None => self.other(QuotaHolderKind::Client, client_id, quotas),
        });
        let by_tenant = match (self.tenants.get(tenant), &self.any_tenant) {
            (Some(holder), _) => Some(Arc::clone(holder)),
            (None, Some(quotas)) => Some(self.other(QuotaHolderKind::Tenant, tenant, quotas)),
            (None, None) => None,
        };
        by_identity.into_iter().chain(by_tenant).collect()
    }

    fn other(&self, kind: QuotaHolderKind, name: &str, quotas: &Quotas) -> Arc<QuotaHolder> {
        let key: QuotaHolderKey = (kind, name.into());
        let mut others = self.others.lock();
        let Others { by_name, turns } = &mut *others;
        if let Some(known) = by_name.get_mut(&key) {
            if let Some(holder) = known.upgrade() {
                return holder;
            }
            let holder = Arc::new(QuotaHolder::new(kind, name, quotas.clone()));
            *known = Arc::downgrade(&holder);
            return holder;
        }
        for _ in 0..LOOKS {
            let Some(looked) = turns.pop_front() else { break };
            if by_name.get(&looked).is_some_and(|holder| holder.strong_count() > 0) {
                turns.push_back(looked);
            } else {
                by_name.remove(&looked);
            }
        }
        let holder = Arc::new(QuotaHolder::new(kind, name, quotas.clone()));
        by_name.insert(key.clone(), Arc::downgrade(&holder));
        turns.push_back(key);
        holder
    }

    #[cfg(test)]
    pub(crate) fn others_len(&self) -> usize {
        let others = self.others.lock();
        assert_eq!(others.by_name.len(), others.turns.len());
        others.by_name.len()
    }
}
