//! State that all pages share.

use std::{sync::Arc, time::Duration};

use axum::{
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use broker::Account;
use tokio::sync::watch;

use super::{logins::Logins, ring::Ring};
use crate::local::LocalChannel;

/// State that all pages share.
pub(super) struct PageState {
    pub(super) local: LocalChannel,
    /// Account to which pages, forms, logins and live parts are charged.
    pub(super) account: Arc<Account>,
    /// True if callers of the API must authenticate: then visitors must, too.
    pub(super) asks: bool,
    pub(super) logins: Logins,
    /// For a form to come.
    pub(super) body_timeout: Duration,
    pub(super) ring: Ring,
    /// True once the gateway shuts down: what is live ends.
    pub(super) drain: watch::Receiver<bool>,
}

/// The answer where memory is short.
pub(super) fn out_of_memory() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the gateway's memory budget is used up; try again\n").into_response()
}
