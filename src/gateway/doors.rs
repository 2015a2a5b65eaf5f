//! The listeners of devices, backends and operators, and the shards that serve devices.

use std::{sync::Arc, thread::JoinHandle, time::Duration};

use broker::Account;
use grpc::GrpcApi;
use net::{BoundListener, NetShared, Pulse, ShardHandle};
use tokio::{
    sync::watch,
    task::{self, JoinSet},
};
use tracing::{debug, error, warn};

use super::{
    StartError, api,
    common::Common,
    http::{HttpListener, HttpPages, local_channel},
    listeners::{BoundListeners, CERTIFICATE_AGE_LOOK},
};

/// Interval at which files that can be read again are looked at.
const RELOAD_LOOK: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Doors {
    pub(super) shared: Arc<NetShared>,
    pub(super) shards: Vec<ShardHandle>,
    threads: Vec<JoinHandle<()>>,
    /// Ends by itself after draining.
    grpc_task: Option<task::JoinHandle<()>>,
    /// Tasks of listeners; end by themselves after draining, those of QUIC once their last packet is sent.
    listeners: JoinSet<()>,
    tasks: JoinSet<()>,
}

impl Doors {
    /// Starts the shards; no listener accepts yet.
    pub(super) fn start(common: &Common, shared: &Arc<NetShared>) -> Result<Self, StartError> {
        let (shards, threads) = net::start_shards(common.config.effective_shards(), shared)?;
        let mut tasks = JoinSet::new();
        tasks.spawn(net::tick_shards(shards.clone()));
        tasks.spawn(Arc::clone(&common.tls).watch_dates(CERTIFICATE_AGE_LOOK));
        tasks.spawn(Arc::clone(&common.reloads).watch(RELOAD_LOOK));
        let (listeners, shared) = (JoinSet::new(), Arc::clone(shared));
        Ok(Self { shared, shards, threads, grpc_task: None, listeners, tasks })
    }

    /// Accepts devices from now on, until `drain`.
    pub(super) fn accept(&mut self, devices: Vec<BoundListener>, drain: &watch::Receiver<bool>) {
        for listener in devices {
            let (shared, shards) = (Arc::clone(&self.shared), self.shards.clone());
            let accepting = net::accept_loop(listener, shared, shards, drain.clone());
            self.listeners.spawn(async move {
                if let Err(error) = accepting.await {
                    error!(%error, "listener ended");
                }
            });
        }
    }

    /// Answers backends and operators from now on: `api` until `drain`, the pages until `stop`.
    pub(super) fn answer(
        &mut self,
        common: &Common,
        bound: BoundListeners,
        api: GrpcApi,
        account: &Arc<Account>,
        pages: HttpPages,
        (drain, stop): (&watch::Receiver<bool>, &watch::Receiver<bool>),
    ) {
        let BoundListeners { grpc, grpc_tls, http, http_tls, .. } = bound;
        if let Some(socket) = http {
            let listener = HttpListener {
                socket,
                tls: http_tls,
                config: Arc::clone(&common.config),
                account: Arc::clone(account),
                backends: Arc::clone(&common.admission.backends),
                api: local_channel(&api),
                pages,
            };
            self.tasks.spawn(listener.run(drain.clone(), stop.clone()));
        }
        self.grpc_task = Some(tokio::spawn(api::run(grpc, grpc_tls, api)));
    }

    /// Goes on until the listeners end.
    pub(super) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// A function that tells how long the most sluggish shard has shown no sign of life; usable until the end.
    pub(super) fn silence(&self) -> impl Fn() -> Duration + Send + Sync + use<> {
        let pulses: Vec<_> = self.shards.iter().map(ShardHandle::pulse).collect();
        move || pulses.iter().map(Pulse::silence).max().unwrap_or_default()
    }

    /// Waits until callers of gRPC are told why they end, which takes as long as they take to read it. Cancel safe.
    pub(super) async fn callers_told(&mut self) {
        if let Some(task) = &mut self.grpc_task {
            let _ = task.await;
            self.grpc_task = None;
        }
    }

    /// Ends what is left of calls, connections and handshakes, so that nothing outlives the gateway. Bounded by a quarter of `deadline`.
    pub(super) async fn end(&mut self, deadline: Duration) {
        if let Some(task) = self.grpc_task.take() {
            task.abort();
        }
        end_shards(&self.shared, std::mem::take(&mut self.threads), deadline / 8).await;
        let told = async { while self.listeners.join_next().await.is_some() {} };
        if tokio::time::timeout(deadline / 8, told).await.is_err() {
            debug!("not every client of QUIC has acknowledged the end of its connection");
        }
        self.listeners.shutdown().await;
    }

    /// Ends the pages of operators, which are there until all else has ended.
    pub(super) async fn shut(mut self) {
        self.tasks.shutdown().await;
    }
}

impl Drop for Doors {
    fn drop(&mut self) {
        self.shared.end();
    }
}

/// Ends what is left of connections and handshakes, so that nothing outlives the gateway, not even the lock on its data directory. Waits for
/// the shards so long at most.
async fn end_shards(shared: &NetShared, threads: Vec<JoinHandle<()>>, longest: Duration) {
    shared.end();
    let joined = task::spawn_blocking(|| {
        for thread in threads {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    });
    if tokio::time::timeout(longest, joined).await.is_err() {
        warn!("a shard is still busy, it is left behind");
    }
}
