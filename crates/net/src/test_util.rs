//! State that connections share, for tests.

use std::sync::Arc;

use auth::{AllowAll, abuse::AbuseGuard};
use broker::{Broker, BrokerConfig};
use config::Limits;

use super::NetShared;

/// A gateway with these limits that lets everybody in.
pub(crate) fn shared(limits: Limits) -> Arc<NetShared> {
    let broker = Broker::new(BrokerConfig { limits: Arc::new(limits), ..BrokerConfig::default() });
    NetShared::new(broker, Arc::new(AllowAll), None, AbuseGuard::idle(), String::new(), String::new())
}
