//! The listeners of backends and operators while another gateway of the cluster serves: every call is answered NOT_ACTIVE, with the
//! address of the one that serves. Devices are not listened for.

use std::{net::TcpListener, sync::Arc};

use auth::backends::{BackendAuthenticator, MetricsDenied};
use broker::Account;
use config::Config;
use edge::{reload::Reloads, tls::TlsHandle};
use gateway_http::{JsonApi, JsonOptions, LocalChannel, MonitoringPages, PageDenied, Site};
use grpc::{GrpcApi, GrpcTls};
use grpc_messages::status::Error;
use tokio::{sync::watch, task::JoinSet};

use super::{
    StartError, api,
    listeners::{BoundListeners, PreparedListeners},
};

/// Memory for calls that are refused.
const BUDGET: usize = 64 << 20;

/// Returns where the gateway that serves is reached; empty if nobody does, or it has not said.
pub type ActiveAddress = Arc<dyn Fn() -> String + Send + Sync>;

/// Text of `/readyz`, and of `/metrics`.
pub struct StandbyPages {
    /// Its state, on a line.
    pub state: Arc<dyn Fn() -> String + Send + Sync>,
    /// Figures of the cluster.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
}

/// The sockets of gRPC and HTTP, open from before the gateway serves until after it does, and what answers on them meanwhile.
pub struct Standby {
    sockets: Vec<(&'static str, TcpListener)>,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Standby {
    /// Binds the sockets and answers. In a Tokio runtime.
    ///
    /// # Errors
    /// As the start of the gateway.
    pub fn start(
        config: &Arc<Config>,
        active: ActiveAddress,
        pages: StandbyPages,
    ) -> Result<Self, StartError> {
        let prepared = PreparedListeners::open(config, &Reloads::new())?;
        let BoundListeners { grpc, grpc_tls, http, http_tls, .. } = prepared.bind_for_backends(config)?;
        let (stop, stopped) = watch::channel(false);
        let mut standby = Self { sockets: Vec::new(), stop, tasks: JoinSet::new() };
        let backends = Arc::new(BackendAuthenticator::open(&config.backends)?);
        let account = Arc::new(Account::new(BUDGET));
        let refusal = move || Error::NotActive { address: active() };
        let api = GrpcApi::standing_by(
            api::grpc_config(config),
            Arc::clone(&account),
            Arc::clone(&backends),
            config.limits.packet_timeout.0,
            Arc::new(refusal),
            stopped.clone(),
        );
        let local = api.local();
        let local = LocalChannel::new(local.clone(), move |request| local.check(request));
        standby.sockets.push(("grpc", grpc.try_clone()?));
        standby.tasks.spawn(serve_grpc(grpc, grpc_tls, api));
        if let Some(http) = http {
            standby.sockets.push(("http", http.try_clone()?));
            let site = site(config, local, &account, backends, pages);
            standby.tasks.spawn(serve_http(http, http_tls, site, Arc::clone(config), account, stopped));
        }
        Ok(standby)
    }

    /// Ends the answers, and gives the sockets to the gateway that serves now. Connections that wait to be accepted stay.
    pub async fn end(mut self) -> Vec<(&'static str, TcpListener)> {
        let _ = self.stop.send(true);
        self.tasks.shutdown().await;
        self.sockets
    }
}

async fn serve_grpc(socket: TcpListener, tls: Option<GrpcTls>, api: GrpcApi) {
    api::run(socket, tls, api).await;
}

fn site(
    config: &Config,
    api: LocalChannel,
    account: &Arc<Account>,
    backends: Arc<BackendAuthenticator>,
    pages: StandbyPages,
) -> Site {
    let http = &config.http;
    let json = http.api.then(|| {
        let options = JsonOptions {
            max_body: http.max_body.0,
            body_timeout: http.body_timeout.0,
            cors_origins: http.cors_origins.clone(),
        };
        JsonApi::new(api, Arc::clone(account), options).router()
    });
    let StandbyPages { state, metrics } = pages;
    let pages = MonitoringPages {
        authorize: Arc::new(move |authorization, peer| {
            backends.may_read_metrics(authorization, peer).map_err(|denied| match denied {
                MetricsDenied::Unknown => PageDenied::Unknown,
                MetricsDenied::Scope => PageDenied::Forbidden,
            })
        }),
        render: metrics,
        ready: Arc::new(move || Err(state())),
        stands_by: true,
    };
    Site { pages, more: json.into_iter().collect() }
}

async fn serve_http(
    socket: TcpListener,
    tls: Option<TlsHandle>,
    site: Site,
    config: Arc<Config>,
    account: Arc<Account>,
    mut stop: watch::Receiver<bool>,
) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    let limits = super::http::limits(&config);
    gateway_http::serve(socket, tls, site, limits, account, async move {
        let _ = stop.wait_for(|stop| *stop).await;
    })
    .await;
}
