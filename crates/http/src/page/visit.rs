//! A request of a known visitor, and forms that this page has made.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::{Method, StatusCode, request::Parts},
    response::{IntoResponse, Redirect, Response},
};
use gateway_api::gateway::v1;
use gateway_core::clock;
use maud::html;
use tonic::Code;

pub(super) use super::form::FormFields;
use super::{
    api::PageApi,
    form, layout,
    logins::{PageLogin, is_own_form},
    state::PageState,
};
use crate::client::{HttpClient, SenderAddress};
use crate::counters::count;

/// Visitor of a page, and the rights of the visitor's role.
pub(super) struct Visitor {
    pub(super) api: PageApi,
    pub(super) caller: v1::GetCallerResponse,
    /// Token that every form brings back.
    pub(super) csrf: Arc<str>,
}

impl Visitor {
    /// Returns whether the role may call this method, as `Devices/GetDevice`.
    pub(super) fn may(&self, method: &str) -> bool {
        let known = |path: &String| path.strip_prefix("/gateway.v1.") == Some(method);
        self.caller.methods.iter().any(known)
    }

    /// Returns the reason for which the role may not call the method; `None` if it may.
    pub(super) fn why_not(&self, method: &str) -> Option<String> {
        (!self.may(method)).then(|| format!("not for the role {}", self.role()))
    }

    pub(super) fn role(&self) -> &'static str {
        match self.caller.role() {
            v1::Role::Unspecified => "unknown",
            v1::Role::Reader => "reader",
            v1::Role::Publisher => "publisher",
            v1::Role::Operator => "operator",
            v1::Role::Admin => "admin",
            v1::Role::Consumer => "consumer",
        }
    }

    async fn of(parts: &Parts, page_state: &PageState) -> Result<Self, Response> {
        let peer = peer(parts);
        let known = match page_state.asks {
            true => page_state.logins.find(&parts.headers, clock::now()),
            false => Some(page_state.logins.open()),
        };
        let Some(PageLogin { token, csrf }) = known else { return Err(to_login(parts)) };
        let api = PageApi::new(&page_state.local, token.as_ref().map(|token| token.as_str()), peer);
        match api.operations().get_caller(v1::GetCallerRequest {}).await {
            Ok(caller) => {
                let key = api.key().map_err(|status| layout::failure(&status))?;
                HttpClient::identified(&parts.extensions, key).map_err(IntoResponse::into_response)?;
                Ok(Self { api, caller: caller.into_inner(), csrf })
            }
            Err(status) if status.code() == Code::Unauthenticated => {
                page_state.logins.remove(&parts.headers);
                Err(to_login(parts))
            }
            Err(status) => Err(layout::failure(&status)),
        }
    }
}

/// Returns the address that a request comes from.
pub(super) fn peer(parts: &Parts) -> SocketAddr {
    parts.extensions.get::<SenderAddress>().map_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)), |peer| peer.0)
}

/// Redirects to the login, which leads back to the page. A stream of events is not followed elsewhere.
fn to_login(parts: &Parts) -> Response {
    let path = parts.uri.path_and_query().map_or("/page/", |path| path.as_str());
    if path.starts_with("/page/live/") {
        return (StatusCode::UNAUTHORIZED, "log in first\n").into_response();
    }
    let next = if parts.method == Method::GET { path } else { "/page/" };
    Redirect::to(&format!("/page/login?{}", layout::query(&[("next", next)]))).into_response()
}

impl FromRequestParts<Arc<PageState>> for Visitor {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, page_state: &Arc<PageState>) -> Result<Self, Response> {
        Self::of(parts, page_state).await
    }
}

/// A form that a page of ours has sent for a known visitor.
pub(super) struct Post {
    pub(super) visitor: Visitor,
    pub(super) fields: FormFields,
}

impl FromRequest<Arc<PageState>> for Post {
    type Rejection = Response;

    async fn from_request(request: Request, page_state: &Arc<PageState>) -> Result<Self, Response> {
        let (parts, body) = request.into_parts();
        let refuse = |why: &str| {
            let text = html! { div.narrow { p.notice.bad role="alert" { (why) } p { a href="/page/" { "Overview" } } } };
            (StatusCode::FORBIDDEN, layout::bare("Not taken", text)).into_response()
        };
        if !is_own_form(&parts.headers) {
            count(|c| c.page_refused_origin.add(1));
            return Err(refuse("This form was not sent from this page."));
        }
        let visitor = Visitor::of(&parts, page_state).await?;
        let fields = FormFields::read(page_state, &parts.headers, body, form::MOST).await?;
        let token = fields.get("csrf").as_bytes();
        let same = aws_lc_rs::constant_time::verify_slices_are_equal(token, visitor.csrf.as_bytes()).is_ok();
        if token.is_empty() || !same {
            count(|c| c.page_refused_csrf.add(1));
            return Err(refuse("This form is of an earlier login. Load the page again."));
        }
        Ok(Self { visitor, fields })
    }
}
