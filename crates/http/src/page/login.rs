//! The form that asks for a token, and what becomes of one that is shown.

use std::sync::Arc;

use axum::{
    extract::{Extension, Query, Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{RETRY_AFTER, SET_COOKIE},
    },
    response::{IntoResponse, Redirect, Response},
};
use gateway_api::gateway::v1;
use gateway_core::clock;
use maud::html;
use serde::Deserialize;
use tonic::Code;
use zeroize::Zeroizing;

use super::{
    api::PageApi,
    form::{FormFields, MOST_UNKNOWN},
    layout,
    logins::{LONGEST, LONGEST_LOGIN, NoLogin, cookie, is_own_form},
    state::{PageState, out_of_memory},
    visit::{Post, Visitor, peer},
};
use crate::counters::count;
use crate::server::Encrypted;

/// Returns the page to show after the login: one of ours.
fn safe(next: &str) -> &str {
    let own = next.starts_with("/page/") && !next.contains(['\\', '\r', '\n']) && !next.contains("//");
    if own { next } else { "/page/" }
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct LoginQuery {
    next: String,
}

fn form(next: &str, problem: Option<&str>) -> Response {
    let status = if problem.is_some() { StatusCode::FORBIDDEN } else { StatusCode::OK };
    let page = layout::bare(
        "Log in",
        html! {
            div.narrow.card {
                h1 { "Log in to the gateway" }
                @if let Some(problem) = problem { p.notice.bad role="alert" { (problem) } }
                form method="post" action="/page/login" {
                    input type="hidden" name="next" value=(safe(next));
                    p {
                        label for="token" { "Token" }
                        input #token type="password" name="token" required autofocus autocomplete="current-password" size="40"
                            aria-describedby="which";
                    }
                    p #which .why {
                        "The same tokens as for the API: "
                        code { "mqtt-server token create --role reader" }
                        " makes one. What its role and scope allow is what you can do here."
                    }
                    p { button type="submit" { "Log in" } }
                }
            }
        },
    );
    (status, page).into_response()
}

/// The form that asks for a token.
pub(super) async fn ask(
    State(page_state): State<Arc<PageState>>,
    Query(asked): Query<LoginQuery>,
) -> Response {
    if page_state.asks { form(&asked.next, None) } else { Redirect::to("/page/").into_response() }
}

/// A token was shown: it is one if the API knows its holder.
pub(super) async fn enter(State(page_state): State<Arc<PageState>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let headers = &parts.headers;
    let encrypted = parts.extensions.get::<Encrypted>().is_some();
    if !is_own_form(headers) {
        count(|c| c.page_refused_origin.add(1));
        return form("", Some("This form was not sent from this page."));
    }
    let (peer, now) = (peer(&parts), clock::now());
    if let Some(seconds) = page_state.logins.tries.wait(peer, now) {
        count(|c| c.page_logins_limited.add(1));
        let why = format!("Too many tokens were tried from your address. Try again in {seconds} seconds.");
        let mut answer = form("", Some(&why));
        *answer.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        return answer;
    }
    let fields = match FormFields::read(&page_state, headers, body, MOST_UNKNOWN).await {
        Ok(fields) => fields,
        Err(refusal) => return refusal,
    };
    let next = fields.get("next");
    let token = Zeroizing::new(fields.get("token").trim().to_owned());
    if token.is_empty() || token.len() > LONGEST {
        return form(next, Some("That is not a token."));
    }
    let caller = PageApi::new(&page_state.local, Some(&token), peer)
        .operations()
        .get_caller(v1::GetCallerRequest {})
        .await;
    if let Err(status) = caller {
        count(|c| c.page_logins_failed.add(1));
        if status.code() == Code::Unauthenticated {
            page_state.logins.tries.failed(peer, now);
        }
        return form(next, Some(status.message()));
    }
    // A login that is repeated replaces the one before.
    page_state.logins.remove(headers);
    let id = match page_state.logins.add(token, now) {
        Ok(id) => id,
        Err(NoLogin::Randomness) => return form(next, Some("The system has no randomness now.")),
        Err(NoLogin::Memory) => return out_of_memory(),
    };
    count(|c| c.page_logins.add(1));
    let mut answer = Redirect::to(safe(next)).into_response();
    answer.headers_mut().insert(SET_COOKIE, cookie(&id, encrypted, headers, LONGEST_LOGIN.as_secs()));
    answer
}

/// Ends the login.
pub(super) async fn leave(
    State(page_state): State<Arc<PageState>>,
    encrypted: Option<Extension<Encrypted>>,
    headers: HeaderMap,
    posted: Post,
) -> Response {
    let Post { visitor: Visitor { .. }, .. } = posted;
    page_state.logins.remove(&headers);
    let mut answer = Redirect::to("/page/login").into_response();
    answer.headers_mut().insert(SET_COOKIE, cookie("", encrypted.is_some(), &headers, 0));
    answer
}

#[cfg(test)]
mod tests {
    use super::safe;

    #[test]
    fn after_a_login_nobody_is_sent_elsewhere() {
        for own in ["/page/", "/page/device?id=a%2Fb"] {
            assert_eq!(safe(own), own);
        }
        for other in [
            "",
            "//evil.example",
            "https://evil.example/page/",
            "/page//evil.example",
            "/page/\\evil",
            "/metrics",
        ] {
            assert_eq!(safe(other), "/page/", "{other}");
        }
    }
}
