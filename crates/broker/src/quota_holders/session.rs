//! Share of one session in the quotas of its quota holders.

use std::sync::Arc;

use super::{Counted, QuotaExceeded, QuotaHolder, QuotaHolderKind, QuotaHolders, try_add_all};

/// See the module. Boxed, so that a session without quota holders is no larger for it.
#[derive(Debug)]
pub(crate) struct SessionQuotaUse {
    /// Quota holders whose quotas the session uses, also after its end: its will may still be published.
    quota_holders: QuotaHolders,
    /// One for each, and none after the session's end.
    holdings: Vec<HolderQuotaUse>,
}

/// Share of the session in the quotas of one quota holder: a session, at most a connection, and subscriptions.
#[derive(Debug)]
struct HolderQuotaUse {
    holder: Arc<QuotaHolder>,
    connected: bool,
    subscriptions: usize,
}

impl HolderQuotaUse {
    /// Of a session that was counted by the caller.
    fn of(holder: &Arc<QuotaHolder>, connected: bool) -> Self {
        Self { holder: Arc::clone(holder), connected, subscriptions: 0 }
    }
}

impl Drop for HolderQuotaUse {
    fn drop(&mut self) {
        self.holder.give_back(Counted::Sessions, 1);
        self.holder.give_back(Counted::Connections, self.connected.into());
        self.holder.give_back(Counted::Subscriptions, self.subscriptions);
    }
}

impl SessionQuotaUse {
    /// A session gets a connection whose device has these quota holders. What it replaces, or resumes with `kept`
    /// subscriptions, has `former`, of which it takes over what is of the same quota holders: so nobody is refused for what he
    /// has already. The rest of `former` is given back when the caller drops it.
    ///
    /// # Errors
    /// A quota does not allow another connection or session. Nothing has changed then.
    pub(crate) fn enter(
        quota_holders: &QuotaHolders,
        mut former: Option<&mut Self>,
        kept: usize,
    ) -> Result<Option<Box<Self>>, QuotaExceeded> {
        if quota_holders.is_empty() {
            return Ok(None);
        }
        {
            let has = |holder: &Arc<QuotaHolder>| {
                let holding = former.as_ref().and_then(|former| former.find(holder));
                holding.map(|at| former.as_ref().is_some_and(|former| former.holdings[at].connected))
            };
            let wanted = quota_holders.iter().flat_map(|holder| {
                let has = has(holder);
                [
                    (holder, Counted::Connections, usize::from(has != Some(true))),
                    (holder, Counted::Sessions, usize::from(has.is_none())),
                ]
            });
            try_add_all(wanted).map_err(QuotaExceeded::counted)?;
        }
        let holdings = quota_holders.iter().map(|holder| {
            let taken_over = former.as_mut().and_then(|former| {
                let at = former.find(holder)?;
                Some(former.holdings.swap_remove(at))
            });
            let mut holding = taken_over.unwrap_or_else(|| HolderQuotaUse::of(holder, true));
            holding.connected = true;
            holding.set_subscriptions(kept);
            holding
        });
        Ok(Some(Box::new(Self { quota_holders: quota_holders.clone(), holdings: holdings.collect() })))
    }

    /// A session of an earlier process, which counts whatever the quotas say.
    pub(crate) fn restored(quota_holders: &QuotaHolders) -> Option<Box<Self>> {
        let holdings = quota_holders.iter().map(|holder| {
            holder.add(Counted::Sessions, 1);
            HolderQuotaUse::of(holder, false)
        });
        (!quota_holders.is_empty())
            .then(|| Box::new(Self { quota_holders: quota_holders.clone(), holdings: holdings.collect() }))
    }

    /// The connection has ended.
    pub(crate) fn disconnected(&mut self) {
        for holding in &mut self.holdings {
            holding
                .holder
                .give_back(Counted::Connections, usize::from(std::mem::take(&mut holding.connected)));
        }
    }

    /// Adds a subscription; one that is restored counts whatever the quotas say. Refusals are not counted here: the
    /// subscription may be there already.
    pub(crate) fn subscribe(&mut self, restored: bool) -> Result<(), QuotaExceeded> {
        match restored {
            true => self.holdings.iter().for_each(|holding| holding.holder.add(Counted::Subscriptions, 1)),
            false => {
                try_add_all(self.holdings.iter().map(|holding| (&holding.holder, Counted::Subscriptions, 1)))?
            }
        }
        self.holdings.iter_mut().for_each(|holding| holding.subscriptions += 1);
        Ok(())
    }

    /// A subscription is gone.
    pub(crate) fn unsubscribe(&mut self) {
        for holding in &mut self.holdings {
            let left = holding.subscriptions.saturating_sub(1);
            holding.set_subscriptions(left);
        }
    }

    /// Returns the quota holders whose quotas the session uses.
    pub(crate) fn quota_holders(&self) -> &QuotaHolders {
        &self.quota_holders
    }

    /// The session is over: gives everything back.
    pub(crate) fn end(&mut self) {
        self.holdings.clear();
    }

    /// The name of its quota holder of a kind.
    pub(crate) fn holder(&self, kind: QuotaHolderKind) -> Option<&str> {
        self.quota_holders.iter().find(|holder| holder.kind == kind).map(|holder| holder.name())
    }

    fn find(&self, holder: &Arc<QuotaHolder>) -> Option<usize> {
        self.holdings.iter().position(|holding| Arc::ptr_eq(&holding.holder, holder))
    }
}

impl HolderQuotaUse {
    fn set_subscriptions(&mut self, subscriptions: usize) {
        match subscriptions.checked_sub(self.subscriptions) {
            Some(more) => self.holder.add(Counted::Subscriptions, more),
            None => self.holder.give_back(Counted::Subscriptions, self.subscriptions - subscriptions),
        }
        self.subscriptions = subscriptions;
    }
}
