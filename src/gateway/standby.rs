//! The listeners while another gateway of the cluster serves. With links, devices and calls go on to that one; without, every call is
//! answered NOT_ACTIVE, with the address of the one that serves, and devices are not listened for.

use std::{net::TcpListener, sync::Arc, time::Duration};

use auth::backends::{BackendAuthenticator, MetricsDenied};
use broker::Account;
use config::Config;
use edge::{reload::Reloads, tls::TlsHandle};
use gateway_http::{JsonApi, JsonOptions, LocalChannel, MonitoringPages, PageDenied, Site};
use grpc::{AnswerElsewhere, GrpcApi, GrpcTls, pass_on};
use grpc_messages::status::Error;
use links::GatewayLink;
use tokio::{sync::watch, task::JoinSet};

use super::{
    StartError,
    admission::Admission,
    api,
    http::local_channel,
    listeners::{BoundListeners, PreparedListeners},
    relaying::RelayingDoors,
};

/// Interval at which files that can be read again are looked at.
const RELOAD_LOOK: Duration = Duration::from_secs(1);

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

/// The sockets that are open before the gateway serves, and what answers on them meanwhile.
pub struct Standby {
    sockets: Vec<(String, TcpListener)>,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
    /// For devices, with links.
    doors: Option<RelayingDoors>,
}

impl Standby {
    /// Binds the sockets and answers. `link` leads to the gateway that serves. In a Tokio runtime.
    ///
    /// # Errors
    /// As the start of the gateway.
    pub fn start(
        config: &Arc<Config>,
        active: ActiveAddress,
        pages: StandbyPages,
        link: Option<Arc<GatewayLink>>,
    ) -> Result<Self, StartError> {
        let reloads = Reloads::new();
        let prepared = PreparedListeners::open(config, &reloads)?;
        let (backends, admission) = match &link {
            Some(_) => {
                let admission = Admission::open(config, None, None, &reloads)?;
                (Arc::clone(&admission.backends), Some(admission))
            }
            None => {
                let backends = Arc::new(BackendAuthenticator::open(&config.backends)?);
                reloads.add(Arc::clone(&backends) as _);
                (backends, None)
            }
        };
        let BoundListeners { devices, grpc, grpc_tls, http, http_tls, .. } =
            prepared.bind_for_standby(config)?;
        let (stop, stopped) = watch::channel(false);
        let mut standby = Self { sockets: Vec::new(), stop, tasks: JoinSet::new(), doors: None };
        for listener in &devices {
            let socket = listener.tcp_socket()?;
            standby.sockets.extend(socket.map(|socket| (listener.name().to_owned(), socket)));
        }
        let account = match (&link, admission) {
            (Some(link), Some(admission)) => {
                let doors = RelayingDoors::open(config, devices, admission, link, &stopped)?;
                let account = Arc::clone(doors.account());
                standby.doors = Some(doors);
                account
            }
            _ => Arc::new(Account::new(BUDGET)),
        };
        let not_active = move || Error::NotActive { address: active() };
        let elsewhere: AnswerElsewhere = match &link {
            Some(link) => pass_on(Arc::clone(link), Arc::new(not_active)),
            None => refuse_all(not_active),
        };
        let api = GrpcApi::standing_by(
            api::grpc_config(config),
            Arc::clone(&account),
            Arc::clone(&backends),
            config.limits.packet_timeout.0,
            elsewhere,
            stopped.clone(),
        );
        let channel = local_channel(&api);
        standby.sockets.push(("grpc".to_owned(), grpc.try_clone()?));
        standby.tasks.spawn(serve_grpc(grpc, grpc_tls, api));
        if let Some(http) = http {
            standby.sockets.push(("http".to_owned(), http.try_clone()?));
            let site = site(config, channel, &account, backends, pages, link, &stopped);
            standby.tasks.spawn(serve_http(http, http_tls, site, Arc::clone(config), account, stopped));
        }
        standby.tasks.spawn(reloads.watch(RELOAD_LOOK));
        Ok(standby)
    }

    /// Ends the answers and the connections of devices, and gives the sockets to the gateway that serves now. Connections that wait to be
    /// accepted stay.
    pub async fn end(mut self) -> Vec<(String, TcpListener)> {
        let _ = self.stop.send(true);
        self.tasks.shutdown().await;
        if let Some(doors) = self.doors.take() {
            doors.close().await;
        }
        self.sockets
    }
}

/// Answers every call with the error that `not_active` makes.
fn refuse_all(not_active: impl Fn() -> Error + Send + Sync + 'static) -> AnswerElsewhere {
    Arc::new(move |_| {
        let refused = grpc::refused(not_active());
        Box::pin(std::future::ready(Ok(refused)))
    })
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
    link: Option<Arc<GatewayLink>>,
    stopped: &watch::Receiver<bool>,
) -> Site {
    let http = &config.http;
    let is_relayed = link.is_some();
    let asks = backends.is_on();
    // Without a link all that it would show is the refusal.
    let page = (http.page && is_relayed).then(|| {
        gateway_http::page::router(api.clone(), account, asks, http.body_timeout.0, stopped.clone())
    });
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
        ready: Arc::new(move || match &link {
            Some(link) if link.is_reachable() => Ok(format!("ready\n{}\n", state())),
            _ => Err(state()),
        }),
        stands_by: true,
    };
    Site { pages, more: json.into_iter().chain(page).collect() }
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
