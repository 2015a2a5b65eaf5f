//! The broker as its users see it: a message, a subscription or a connection goes from one part to the next here.

mod parts;

use std::sync::Arc;

use gateway_core::limits::Limits;

use crate::{Account, BrokerConfig, QuotaHolder, QuotaHolders};

pub(crate) use parts::BrokerInner;

/// The routing core; cheap to clone, callable from any thread.
#[derive(Clone)]
pub struct Broker {
    pub(crate) inner: Arc<BrokerInner>,
}

impl Broker {
    /// An empty broker.
    pub fn new(config: BrokerConfig) -> Self {
        Self { inner: BrokerInner::new(config) }
    }

    /// The memory account of the process.
    pub fn account(&self) -> &Arc<Account> {
        &self.inner.account
    }

    /// The quota holders of a device with this user name, if it was proved, this client id and this tenant.
    pub fn quota_holders(&self, user: Option<&str>, client_id: &str, tenant: &str) -> QuotaHolders {
        self.inner.quota_holders.of(user, client_id, tenant)
    }

    /// The tenants that are configured by name.
    pub fn tenants(&self) -> impl Iterator<Item = &Arc<QuotaHolder>> {
        self.inner.quota_holders.tenants()
    }

    /// Bounds in force.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.inner.limits
    }

    /// Returns whether devices talk to backends only.
    pub fn is_non_broker(&self) -> bool {
        self.inner.non_broker
    }
}
