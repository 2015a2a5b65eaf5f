//! The gRPC API as a visitor sees it.

use std::{
    net::SocketAddr,
    task::{Context, Poll},
};

use axum::http::{HeaderValue, header::AUTHORIZATION};
use gateway_api::gateway::v1::{
    commands_client::CommandsClient, devices_client::DevicesClient, events_client::EventsClient,
    groups_client::GroupsClient, operations_client::OperationsClient, publisher_client::PublisherClient,
    security_client::SecurityClient, state_client::StateClient, subscriber_client::SubscriberClient,
};
use tonic::{
    Status,
    body::Body,
    codegen::{
        Service,
        http::{Request, Response, uri::PathAndQuery},
    },
};

use auth::backends::callers::CallerKey;

use crate::local::LocalChannel;

/// Calls with a visitor's token, if there is one, from where the visitor is.
#[derive(Clone)]
pub(super) struct PageApi {
    local: LocalChannel,
    token: Option<HeaderValue>,
}

impl PageApi {
    pub(super) fn new(local: &LocalChannel, token: Option<&str>, peer: SocketAddr) -> Self {
        // A token that is no header value is no token, and must not become a call without one.
        let value = |token: &str| HeaderValue::try_from(format!("Bearer {token}"));
        let token = token.map(|token| value(token).unwrap_or(HeaderValue::from_static("")));
        let token = token.map(|mut token| {
            token.set_sensitive(true);
            token
        });
        Self { local: local.forwarded_for(peer), token }
    }

    /// Returns the caller whose share of slots the visitor uses.
    pub(super) fn key(&self) -> Result<CallerKey, Status> {
        let who = PathAndQuery::from_static("/gateway.v1.Operations/GetCaller");
        self.local.check(&who, self.token.as_slice())
    }

    pub(super) fn commands(&self) -> CommandsClient<Self> {
        CommandsClient::new(self.clone())
    }

    pub(super) fn devices(&self) -> DevicesClient<Self> {
        DevicesClient::new(self.clone())
    }

    pub(super) fn events(&self) -> EventsClient<Self> {
        EventsClient::new(self.clone())
    }

    pub(super) fn groups(&self) -> GroupsClient<Self> {
        GroupsClient::new(self.clone())
    }

    pub(super) fn operations(&self) -> OperationsClient<Self> {
        OperationsClient::new(self.clone())
    }

    pub(super) fn publisher(&self) -> PublisherClient<Self> {
        PublisherClient::new(self.clone())
    }

    pub(super) fn security(&self) -> SecurityClient<Self> {
        SecurityClient::new(self.clone())
    }

    pub(super) fn state(&self) -> StateClient<Self> {
        StateClient::new(self.clone())
    }

    pub(super) fn subscriber(&self) -> SubscriberClient<Self> {
        SubscriberClient::new(self.clone())
    }
}

impl Service<Request<Body>> for PageApi {
    type Response = Response<Body>;
    type Error = <LocalChannel as Service<Request<Body>>>::Error;
    type Future = <LocalChannel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.local.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        self.local.call(request)
    }
}
