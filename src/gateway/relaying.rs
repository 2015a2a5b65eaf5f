//! The listeners of devices while another gateway of the cluster serves: devices are authenticated here, and relayed to that one.

use std::{sync::Arc, thread::JoinHandle, time::Duration};

use auth::abuse::{AbuseGuard, BanRegistry};
use broker::{Account, Broker, BrokerConfig};
use config::Config;
use links::GatewayLink;
use net::{BoundListener, NetShared};
use tokio::{sync::watch, task::JoinSet};
use tracing::error;

use super::{StartError, admission::Admission, end_shards};

/// Time for the end of all connections: the gateway is about to serve.
const LONGEST_END: Duration = Duration::from_secs(2);

/// Doors to devices that have their sessions elsewhere. No session is ever opened in its broker, which has the limits and the memory
/// account.
pub(super) struct RelayingDoors {
    shared: Arc<NetShared>,
    threads: Vec<JoinHandle<()>>,
    tasks: JoinSet<()>,
}

impl RelayingDoors {
    /// Accepts on these listeners until `stop` holds true.
    pub(super) fn open(
        config: &Config,
        listeners: Vec<BoundListener>,
        admission: Admission,
        link: &Arc<GatewayLink>,
        stop: &watch::Receiver<bool>,
    ) -> Result<Self, StartError> {
        let broker = Broker::new(BrokerConfig {
            limits: Arc::new(config.limits.clone()),
            non_broker: config.non_broker,
            namespace: config.namespace.clone(),
            tenants: config.tenants.clone(),
            ..BrokerConfig::default()
        });
        admission.charge_to(broker.account());
        let Admission { authenticator, authority, .. } = admission;
        let bans = Arc::new(BanRegistry::open(&config.bans, None)?);
        let guard = AbuseGuard::new(&config.bans, bans);
        // The gateway that serves answers, with its own mark.
        let mark = String::new();
        let shared = NetShared::new(broker, authenticator, authority, guard, config.response_pattern(), mark);
        shared.relay_over(Arc::clone(link));
        let (shards, threads) = net::start_shards(config.effective_shards(), &shared)?;
        let mut tasks = JoinSet::new();
        tasks.spawn(net::tick_shards(shards.clone()));
        for listener in listeners {
            let accepting = net::accept_loop(listener, Arc::clone(&shared), shards.clone(), stop.clone());
            tasks.spawn(async move {
                if let Err(error) = accepting.await {
                    error!(%error, "listener ended");
                }
            });
        }
        Ok(Self { shared, threads, tasks })
    }

    /// The memory account.
    pub(super) fn account(&self) -> &Arc<Account> {
        self.shared.broker.account()
    }

    /// Ends all connections.
    pub(super) async fn close(mut self) {
        self.shared.refuse_connects().await;
        self.tasks.shutdown().await;
        end_shards(&self.shared, std::mem::take(&mut self.threads), LONGEST_END).await;
    }
}

impl Drop for RelayingDoors {
    fn drop(&mut self) {
        self.shared.end();
    }
}
