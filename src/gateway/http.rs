//! The HTTP listener: pages for operators, the API as JSON, the web page.

use std::sync::Arc;

use ::values::LatestCache;
use auth::backends::{BackendAuthenticator, MetricsDenied};
use broker::Broker;
use config::Config;
use edge::tls::TlsHandle;
use gateway_http::{HttpLimits, JsonApi, JsonOptions, LocalChannel, MonitoringPages, PageDenied, Site};
use grpc::GrpcApi;
use telemetry::render;
use tokio::sync::watch;

use super::{health::StoreWatch, metrics::metrics};

/// The listener before it serves.
pub(super) struct HttpListener {
    pub(super) socket: std::net::TcpListener,
    pub(super) tls: Option<TlsHandle>,
    pub(super) config: Arc<Config>,
    pub(super) broker: Broker,
    pub(super) latest: Option<Arc<LatestCache>>,
    pub(super) watch: Arc<StoreWatch>,
    pub(super) backends: Arc<BackendAuthenticator>,
    /// The gRPC API, which JSON and the page call.
    pub(super) api: LocalChannel,
}

/// The API for clients of the listener.
pub(super) fn local_channel(api: &GrpcApi) -> LocalChannel {
    let local = api.local();
    LocalChannel::new(local.clone(), move |request| local.check(request))
}

impl HttpListener {
    /// Serves until `stop`; its streams end with `drain`.
    pub(super) async fn run(self, drain: watch::Receiver<bool>, mut stop: watch::Receiver<bool>) {
        let Self { socket, tls, config, broker, latest, watch, backends, api } = self;
        let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
        let http = &config.http;
        let account = Arc::clone(broker.account());
        let json = http.api.then(|| {
            let options = JsonOptions {
                max_body: http.max_body.0,
                body_timeout: http.body_timeout.0,
                cors_origins: http.cors_origins.clone(),
            };
            JsonApi::new(api.clone(), Arc::clone(&account), options).router()
        });
        let (asks, body_timeout) = (backends.is_on(), http.body_timeout.0);
        let page =
            http.page.then(|| gateway_http::page::router(api, &account, asks, body_timeout, drain.clone()));
        let pages = MonitoringPages {
            authorize: Arc::new(move |authorization, peer| {
                backends.may_read_metrics(authorization, peer).map_err(|denied| match denied {
                    MetricsDenied::Unknown => PageDenied::Unknown,
                    MetricsDenied::Scope => PageDenied::Forbidden,
                })
            }),
            render: {
                let (latest, watch) = (latest.clone(), Arc::clone(&watch));
                Arc::new(move || render(&metrics(&broker, latest.as_deref(), &watch)))
            },
            stands_by: false,
            ready: Arc::new(move || {
                if *drain.borrow() {
                    return Err("shutting down".to_owned());
                }
                match &latest {
                    Some(latest) if !latest.healthy() && watch.database.is_none() => {
                        Err("latest-value store is failing".to_owned())
                    }
                    // Services that need neither disk nor database are up all the same.
                    _ => Ok(format!("ready\n{}", watch.problems())),
                }
            }),
        };
        let limits = limits(&config);
        let site = Site { pages, more: json.into_iter().chain(page).collect() };
        gateway_http::serve(socket, tls, site, limits, account, async move {
            let _ = stop.wait_for(|stop| *stop).await;
        })
        .await;
    }
}

/// Limits of the listener.
pub(super) fn limits(config: &Config) -> HttpLimits {
    let http = &config.http;
    HttpLimits {
        max_connections: http.max_connections,
        max_requests: http.max_requests,
        max_requests_per_caller: or_no_limit(http.max_requests_per_caller),
        max_streams: http.max_streams,
        max_streams_per_caller: or_no_limit(http.max_streams_per_caller),
        header_timeout: http.header_timeout.0,
        write_timeout: http.write_timeout.0,
    }
}

/// A limit of which 0 is none.
fn or_no_limit(most: usize) -> usize {
    if most == 0 { usize::MAX } else { most }
}
