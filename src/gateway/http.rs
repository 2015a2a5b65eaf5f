//! The HTTP listener: pages for operators, the API as JSON, the web page.

use std::sync::Arc;

use auth::backends::{BackendAuthenticator, MetricsDenied};
use broker::Account;
use config::Config;
use edge::tls::TlsHandle;
use gateway_http::{HttpLimits, JsonApi, JsonOptions, LocalChannel, MonitoringPages, PageDenied, Site};
use grpc::GrpcApi;
use telemetry::{ReadRows, render};
use tokio::sync::watch;

/// The listener before it serves.
pub(super) struct HttpListener {
    pub(super) socket: std::net::TcpListener,
    pub(super) tls: Option<TlsHandle>,
    pub(super) config: Arc<Config>,
    pub(super) account: Arc<Account>,
    pub(super) backends: Arc<BackendAuthenticator>,
    /// The gRPC API, which JSON and the page call.
    pub(super) api: LocalChannel,
    pub(super) pages: HttpPages,
}

/// Pages for operators.
pub(super) struct HttpPages {
    /// Rows of `/metrics`.
    pub(super) rows: ReadRows,
    /// See [`ReadReady`].
    pub(super) ready: ReadReady,
    /// Returns whether the gateway stands by: then it is well while it is not ready.
    pub(super) stands_by: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// Reads the problems of a gateway that is ready, a line each, or the reason for which it is not.
pub(super) type ReadReady = Arc<dyn Fn() -> Result<String, String> + Send + Sync>;

/// The API for clients of the listener.
pub(super) fn local_channel(api: &GrpcApi) -> LocalChannel {
    let local = api.local();
    LocalChannel::new(local.clone(), move |request| local.check(request))
}

impl HttpListener {
    /// Serves until `stop`; its streams end with `drain`.
    pub(super) async fn run(self, drain: watch::Receiver<bool>, mut stop: watch::Receiver<bool>) {
        let Self { socket, tls, config, account, backends, api, pages } = self;
        let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
        let http = &config.http;
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
        let HttpPages { rows, ready, stands_by } = pages;
        let pages = MonitoringPages {
            authorize: Arc::new(move |authorization, peer| {
                backends.may_read_metrics(authorization, peer).map_err(|denied| match denied {
                    MetricsDenied::Unknown => PageDenied::Unknown,
                    MetricsDenied::Scope => PageDenied::Forbidden,
                })
            }),
            render: Arc::new(move || render(&rows())),
            stands_by,
            ready: Arc::new(move || match *drain.borrow() {
                true => Err("shutting down".to_owned()),
                false => ready().map(|problems| format!("ready\n{problems}")),
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
fn limits(config: &Config) -> HttpLimits {
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
