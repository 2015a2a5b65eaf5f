//! `[auth.grpc]`: a service of the user that implements `gateway.hooks.v1.HookProvider`.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::{OnError, RemoteLimits, address::optional, validate::Check};

/// A kind of event that the service is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HookEvent {
    /// A connection was accepted.
    Connected,
    /// A connection ended.
    Disconnected,
    /// Another connection took the session over.
    TakenOver,
    /// A subscription was made.
    Subscribed,
    /// A subscription was removed.
    Unsubscribed,
    /// The session is over.
    SessionEnded,
    /// Messages for the device were dropped.
    Dropped,
    /// Authentication failed.
    AuthFailed,
}

impl fmt::Display for HookEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// `[auth.grpc]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthGrpc {
    /// Address of the service; empty asks nobody.
    #[serde(with = "optional")]
    pub url: Option<String>,
    /// CA of the service's certificate, PEM.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// The gateway's certificate towards the service, PEM.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
    /// File with the bearer token that the gateway shows.
    #[serde(with = "optional")]
    pub token_file: Option<PathBuf>,
    /// Ask about logins.
    pub authenticate: bool,
    /// Treatment of a login while the service does not answer and nothing is remembered about it.
    pub on_error: OnError,
    /// Ask about topics of which the rules say nothing.
    pub authorize: bool,
    /// Treatment of such a topic while the service does not answer and nothing is remembered about it.
    pub authorize_on_error: OnError,
    /// Kinds of events that it is told.
    pub events: Vec<HookEvent>,
    /// Events that wait while it does not take them.
    pub max_events: usize,
    /// `[auth.grpc.limits]`.
    pub limits: RemoteLimits,
}

impl Default for AuthGrpc {
    fn default() -> Self {
        Self {
            url: None,
            ca: None,
            cert: None,
            key: None,
            token_file: None,
            authenticate: true,
            on_error: OnError::Refuse,
            authorize: false,
            authorize_on_error: OnError::Refuse,
            events: Vec::new(),
            max_events: 10_000,
            limits: RemoteLimits::default(),
        }
    }
}

impl AuthGrpc {
    /// Returns whether the service is asked about logins.
    pub fn authenticates(&self) -> bool {
        self.url.is_some() && self.authenticate
    }

    /// Returns whether the service is asked about topics.
    pub fn authorizes(&self) -> bool {
        self.url.is_some() && self.authorize
    }

    /// Returns whether the service is told of any event.
    pub fn hears(&self) -> bool {
        self.url.is_some() && !self.events.is_empty()
    }

    pub(super) fn check(&self, check: &mut Check) {
        self.limits.check("auth.grpc.limits", check);
        check.positive("auth.grpc.max_events", self.max_events, self.max_events == 0);
        if self.authorize_on_error == OnError::Next {
            check.fail(
                "auth.grpc.authorize_on_error",
                "next",
                "nobody else is asked about a topic",
                "use refuse or allow",
            );
        }
        if self.cert.is_some() != self.key.is_some() {
            let shown = self
                .cert
                .as_ref()
                .or(self.key.as_ref())
                .map_or_else(String::new, |path| path.display().to_string());
            check.fail("auth.grpc.cert", shown, "certificate and key go together", "set both, or none");
        }
        let asks = self.authorize || !self.events.is_empty();
        if self.url.is_none() && asks {
            check.fail("auth.grpc.url", "", "is empty, and something is asked of it", "name the service");
        }
        if self.url.is_some() && !self.authenticate && !asks {
            check.fail(
                "auth.grpc.authenticate",
                false,
                "leaves the service nothing to do",
                "set authorize or events, or leave out auth.grpc.url",
            );
        }
    }
}
