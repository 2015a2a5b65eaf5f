//! The web page for the people who run the gateway: server-rendered, with live parts by server-sent events.
//!
//! ```text
//! login       the form that asks for a token
//! logins      who looks: sessions in a cookie, tokens on this side
//! visit       a request of somebody who is known; posts that are the page's own
//! tries       logins that fail: a limit on their rate from one address
//! form        what a form has brought
//! api         clients of the gRPC API, with the token of who looks
//! layout      what stands around every page; words for what comes from the API
//! assets      one style sheet, one script, one icon: embedded, named by their hash
//! live        server-sent events
//! chart       lines over time as SVG
//! state       what all pages share
//! ring        samples of metrics, taken only while somebody looks
//! tail        messages as they come
//! overview, devices, device, packets, slow, topics, groups, bridges, rights, settings, try_out   the pages
//! ```
//!
//! All that is shown comes from [`LocalChannel`], the gRPC API inside the process, called with the visitor's own token: roles,
//! scopes, bounds and the audit log are the API's. Without script everything works but what is live.
//!
//! Templates are `maud`: checked by the compiler and escaped unless said otherwise, with nothing to read at run time and nothing
//! of a syntax of its own to learn; it builds in seconds. Charts are drawn by `plotters` with its SVG backend alone.

mod api;
mod assets;
mod bridges;
mod chart;
mod device;
mod devices;
mod form;
mod groups;
mod layout;
mod live;
mod login;
mod logins;
mod overview;
mod packets;
mod rights;
mod ring;
mod settings;
mod slow;
mod state;
mod tail;
mod topics;
mod tries;
mod try_out;
mod visit;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{
        HeaderValue, StatusCode,
        header::{
            CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
        },
    },
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Redirect, Response},
    routing::get,
};
use broker::Account;
use http_body_util::BodyExt as _;
use tokio::sync::watch;

use self::{
    logins::Logins,
    ring::Ring,
    state::{PageState, out_of_memory},
};
use super::{
    client::NoSlot,
    held::{HeldBytes, NoMemory, paced},
};
use crate::local::LocalChannel;

/// Longest time that a page is worked on.
const PATIENCE: Duration = Duration::from_secs(30);
/// Nothing but what this listener serves, no script or style inside a page, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Everything below `/page/`, and `/`, which leads there. A form has to come within `body_timeout`.
pub fn router(
    local: LocalChannel,
    account: &Arc<Account>,
    asks: bool,
    body_timeout: Duration,
    drain: watch::Receiver<bool>,
) -> Router {
    let account = Arc::clone(account);
    let (logins, ring) = (Logins::new(&account), Ring::new(&account));
    let page_state = Arc::new(PageState { local, account, asks, logins, body_timeout, ring, drain });
    let pages = Router::new()
        .route("/page/", get(overview::show))
        .route("/page/devices", get(devices::list))
        .route("/page/device", get(device::show).post(device::act))
        .route("/page/packets", get(packets::show))
        .route("/page/slow", get(slow::show))
        .route("/page/topics", get(topics::list))
        .route("/page/topic", get(topics::show).post(topics::act))
        .route("/page/groups", get(groups::list))
        .route("/page/group", get(groups::show).post(groups::act))
        .route("/page/bridges", get(bridges::show).post(bridges::act))
        .route("/page/access", get(rights::show).post(rights::act))
        .route("/page/certificates", get(settings::certificates))
        .route("/page/configuration", get(settings::configuration))
        .route("/page/try", get(try_out::show).post(try_out::act))
        .route("/page/login", get(login::ask).post(login::enter))
        .route("/page/logout", axum::routing::post(login::leave))
        .layer(from_fn_with_state(Arc::clone(&page_state), held))
        .layer(from_fn(in_time));
    let live = Router::new()
        .route("/page/live/overview", get(overview::live))
        .route("/page/live/device", get(device::live))
        .route("/page/live/packets", get(packets::live))
        .route("/page/live/topic", get(topics::live))
        .route("/page/live/filter", get(try_out::live));
    Router::new()
        .route("/", get(async || Redirect::to("/page/")))
        .route("/page", get(async || Redirect::to("/page/")))
        .route("/page/assets/{name}", get(assets::serve))
        .merge(pages)
        .merge(live)
        .layer(from_fn(dressed))
        .with_state(page_state)
}

/// An answer within [`PATIENCE`].
async fn in_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(PATIENCE, next.run(request)).await {
        Ok(answer) => answer,
        Err(_) => (StatusCode::GATEWAY_TIMEOUT, "this takes too long now; try again\n").into_response(),
    }
}

/// A page on the memory account until its browser has read it.
async fn held(State(page_state): State<Arc<PageState>>, request: Request, next: Next) -> Response {
    let (parts, body) = next.run(request).await.into_parts();
    // Pages are made as a whole.
    let Ok(page) = body.collect().await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    let page = page.to_bytes();
    let mut held = HeldBytes::new(&page_state.account);
    match held.more(page.len()) {
        Ok(()) => Response::from_parts(parts, paced(page, held)),
        Err(NoMemory) => out_of_memory(),
    }
}

impl IntoResponse for NoSlot {
    fn into_response(self) -> Response {
        match self {
            Self::Share => {
                (StatusCode::TOO_MANY_REQUESTS, "you have as many pages open as you may\n").into_response()
            }
            Self::Memory => out_of_memory(),
        }
    }
}

/// The headers that every answer has.
async fn dressed(request: Request, next: Next) -> Response {
    let mut answer = next.run(request).await;
    let headers = answer.headers_mut();
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // Not `no-referrer`: forms would then be sent with the origin `null`.
        (REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}
