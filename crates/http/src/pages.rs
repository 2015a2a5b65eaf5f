//! Pages that operators read over HTTP: `/metrics`, `/healthz` and `/readyz`.

use std::{net::IpAddr, sync::Arc};

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{
        StatusCode,
        header::{ALLOW, CONNECTION, CONTENT_TYPE},
    },
    response::IntoResponse,
    routing::get,
};

/// The text format of Prometheus.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Reason to show no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageDenied {
    /// The caller is not known.
    Unknown,
    /// The caller may not see it.
    Forbidden,
}

/// Decides whether the sender of this value of `authorization` at this address may see a page.
pub(crate) type Authorize = Arc<dyn Fn(Option<&[u8]>, IpAddr) -> Result<(), PageDenied> + Send + Sync>;

/// Contents of the pages.
#[derive(Clone)]
pub struct MonitoringPages {
    /// Decides who may see them, health aside, which everybody may.
    pub authorize: Authorize,
    /// Text of `/metrics`.
    pub render: Arc<dyn Fn() -> String + Send + Sync>,
    /// Status text while the gateway takes connections; otherwise the reason why it does not.
    pub ready: Arc<dyn Fn() -> Result<String, String> + Send + Sync>,
    /// Returns whether the gateway stands by for another: then it is ready for those that ask with `standby=ok`.
    pub stands_by: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl MonitoringPages {
    pub(super) fn router(self) -> Router {
        Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get("ok\n"))
            .route("/readyz", get(readyz))
            .fallback((
                StatusCode::NOT_FOUND,
                [(CONNECTION, "close")],
                "not found; try /metrics, /healthz or /readyz\n",
            ))
            .method_not_allowed_fallback(async || {
                (StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "GET, HEAD")], "only GET and HEAD\n")
            })
            .with_state(self)
    }
}

async fn metrics(State(pages): State<MonitoringPages>) -> impl IntoResponse {
    ([(CONTENT_TYPE, PROMETHEUS)], (pages.render)())
}

async fn readyz(State(pages): State<MonitoringPages>, RawQuery(query): RawQuery) -> (StatusCode, String) {
    let accepts = query.is_some_and(|query| query.split('&').any(|pair| pair == "standby=ok"));
    match (pages.ready)() {
        Err(why) if accepts && (pages.stands_by)() => (StatusCode::OK, format!("{why}\n")),
        Ok(state) => (StatusCode::OK, state),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}
