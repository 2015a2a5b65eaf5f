//! `gateway.v1.Security`: tokens, bans, reading files again, and what the rules say.

use std::sync::Arc;

use access::backends::{Role, Scope, TokenGrant, TokenLineError, Tokens, hash, mint};
use gateway_core::Timestamp;
use tonic::{Request, Response, Status};

use super::{bans, explain, rules, tenants};
use crate::{
    context::Context,
    proto::{gateway::v1, server::security_server::Security},
    server::access::Call,
};
use auth::backends::now;
use grpc_messages::{answers, convert, page::RequestPages, status::Error};

/// The service.
pub(crate) struct SecurityService {
    pub(crate) context: Context,
}

impl SecurityService {
    /// Changes the file of tokens on a thread that may wait for the disk.
    async fn edit(
        &self,
        edit: impl FnOnce(&str) -> Result<String, Error> + Send + 'static,
    ) -> Result<(), Error> {
        let backends = Arc::clone(&self.context.hooks.backends);
        let edited = tokio::task::spawn_blocking(move || backends.edit(edit)).await;
        edited.map_err(|_| Error::Internal)?
    }
}

fn role_from(role: i32) -> Result<Role, Error> {
    match convert::known(role, "role")? {
        v1::Role::Unspecified => Err(Error::invalid("role", "is not said")),
        v1::Role::Reader => Ok(Role::Reader),
        v1::Role::Publisher => Ok(Role::Publisher),
        v1::Role::Consumer => Ok(Role::Consumer),
        v1::Role::Operator => Ok(Role::Operator),
        v1::Role::Admin => Ok(Role::Admin),
    }
}

pub(super) fn role_to(role: Role) -> i32 {
    let role = match role {
        Role::Reader => v1::Role::Reader,
        Role::Publisher => v1::Role::Publisher,
        Role::Consumer => v1::Role::Consumer,
        Role::Operator => v1::Role::Operator,
        Role::Admin => v1::Role::Admin,
    };
    role.into()
}

fn scope_from(scope: v1::Scope) -> Result<Scope, Error> {
    let list = |list: Vec<String>| (!list.is_empty()).then_some(list);
    let scope = Scope::new(list(scope.topic_filters), list(scope.device_patterns));
    scope.map_err(|error| Error::invalid("scope", error.to_string()))
}

pub(super) fn scope_to(scope: &Scope) -> v1::Scope {
    let list =
        |list: Option<&[Box<str>]>| list.unwrap_or_default().iter().map(|text| text.to_string()).collect();
    v1::Scope { topic_filters: list(scope.topics()), device_patterns: list(scope.devices()) }
}

pub(super) fn time(seconds: u64) -> prost_types::Timestamp {
    answers::time(Timestamp(seconds.saturating_mul(1_000)))
}

fn shown(grant: &TokenGrant) -> v1::Token {
    v1::Token {
        token_id: grant.id.clone(),
        role: role_to(grant.role),
        scope: (!grant.scope.is_all()).then(|| scope_to(&grant.scope)),
        create_time: Some(time(grant.created)),
        expire_time: grant.expires.map(time),
        note: grant.note.clone(),
    }
}

/// Admits only callers whose scope is everything: the matter concerns all devices.
pub(super) fn over_all(call: &Call) -> Result<(), Error> {
    if call.scope().is_all() { Ok(()) } else { Err(call.out_of_scope("scope", "everything")) }
}

#[tonic::async_trait]
impl Security for SecurityService {
    async fn create_token(
        &self,
        request: Request<v1::CreateTokenRequest>,
    ) -> Result<Response<v1::CreateTokenResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        let role = role_from(request.role)?;
        let scope = match request.scope {
            Some(scope) => scope_from(scope)?,
            None => call.scope().clone(),
        };
        if !call.scope().covers(&scope) {
            return Err(call.out_of_scope("scope", &format!("{scope:?}")).into());
        }
        let created = now();
        let expires = convert::time("expire_time", request.expire_time)?.map(|at| at.0 / 1_000);
        if expires.is_some_and(|at| at <= created) {
            return Err(Error::invalid("expire_time", "is over already").into());
        }
        let (secret, id) = mint().map_err(|_| Error::Internal)?;
        let grant = TokenGrant { id, role, scope, created, expires, note: request.note, hash: hash(&secret) };
        call.about(&grant.id);
        let token = shown(&grant);
        self.edit(move |text| {
            Tokens::with(text, &grant).map_err(|errors| {
                // Before the line for it the text was right.
                let problem = errors.into_iter().next().map(|TokenLineError { problem, .. }| problem);
                Error::invalid("note", problem.unwrap_or_default())
            })
        })
        .await?;
        Ok(Response::new(v1::CreateTokenResponse { token: Some(token), secret }))
    }

    async fn list_tokens(
        &self,
        request: Request<v1::ListTokensRequest>,
    ) -> Result<Response<v1::ListTokensResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let mut request = request.into_inner();
        let (limit, token) =
            (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
        request.page_size = 0;
        let pages = RequestPages::of("ListTokens", &request);
        // The id of the last one of the page before.
        let after = pages.start(&token)?;
        let tokens = self.context.hooks.backends.tokens();
        let all = tokens.list();
        let from = match &after {
            None => 0,
            Some(after) => match all.iter().position(|grant| grant.id == *after) {
                Some(at) => at + 1,
                None => return Err(Error::PageTokenInvalid.into()),
            },
        };
        let mut visible = all[from..].iter().filter(|grant| call.scope().covers(&grant.scope));
        let tokens: Vec<_> = visible.by_ref().take(limit).map(|grant| shown(grant)).collect();
        let last = tokens.last().map(|token| token.token_id.as_str());
        let next_page_token = pages.token(last.filter(|_| visible.next().is_some()));
        Ok(Response::new(v1::ListTokensResponse { tokens, next_page_token }))
    }

    async fn revoke_token(
        &self,
        request: Request<v1::RevokeTokenRequest>,
    ) -> Result<Response<v1::RevokeTokenResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let id = request.into_inner().token_id;
        call.about(&id);
        let tokens = self.context.hooks.backends.tokens();
        if let Some(grant) = tokens.list().iter().find(|grant| grant.id == id)
            && !call.scope().covers(&grant.scope)
        {
            return Err(call.out_of_scope("token_id", &id).into());
        }
        self.edit(move |text| Tokens::without(text, &id).ok_or(Error::TokenNotFound)).await?;
        Ok(Response::new(v1::RevokeTokenResponse {}))
    }

    async fn reload(
        &self,
        request: Request<v1::ReloadRequest>,
    ) -> Result<Response<v1::ReloadResponse>, Status> {
        let call = Call::of(request.extensions())?;
        if !call.scope().is_all() {
            return Err(call.out_of_scope("scope", "everything").into());
        }
        let reloads = Arc::clone(&self.context.hooks.reloads);
        let reloaded = tokio::task::spawn_blocking(move || reloads.reload_all()).await;
        let parts = reloaded.map_err(|_| Error::Internal)?.into_iter().map(|part| {
            let (summary, problems) = match part.outcome {
                Ok(summary) => (summary, Vec::new()),
                Err(problems) => (String::new(), problems),
            };
            v1::ReloadedPart { name: part.name.to_owned(), summary, problems }
        });
        Ok(Response::new(v1::ReloadResponse { parts: parts.collect() }))
    }

    async fn explain_access(
        &self,
        request: Request<v1::ExplainAccessRequest>,
    ) -> Result<Response<v1::ExplainAccessResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let Context { broker, hooks, .. } = &self.context;
        let answer = explain::explain(broker, hooks.authority.as_ref(), request.into_inner(), &call).await?;
        Ok(Response::new(answer))
    }

    async fn list_rules(
        &self,
        request: Request<v1::ListRulesRequest>,
    ) -> Result<Response<v1::ListRulesResponse>, Status> {
        over_all(&*Call::of(request.extensions())?)?;
        Ok(Response::new(rules::list(self.context.hooks.authority.as_deref(), request.into_inner())?))
    }

    async fn list_bans(
        &self,
        request: Request<v1::ListBansRequest>,
    ) -> Result<Response<v1::ListBansResponse>, Status> {
        let call = Call::of(request.extensions())?;
        over_all(&call)?;
        Ok(Response::new(bans::list(&self.context.hooks.bans, request.into_inner())?))
    }

    async fn add_ban(
        &self,
        request: Request<v1::AddBanRequest>,
    ) -> Result<Response<v1::AddBanResponse>, Status> {
        let call = Call::of(request.extensions())?;
        over_all(&call)?;
        let answer = bans::add(&self.context.hooks.bans, request.into_inner(), &call).await?;
        Ok(Response::new(answer))
    }

    async fn remove_ban(
        &self,
        request: Request<v1::RemoveBanRequest>,
    ) -> Result<Response<v1::RemoveBanResponse>, Status> {
        let call = Call::of(request.extensions())?;
        over_all(&call)?;
        let answer = bans::remove(&self.context.hooks.bans, request.into_inner(), &call).await?;
        Ok(Response::new(answer))
    }

    async fn list_tenants(
        &self,
        request: Request<v1::ListTenantsRequest>,
    ) -> Result<Response<v1::ListTenantsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        over_all(&call)?;
        Ok(Response::new(tenants::list(&self.context.broker, request.into_inner())?))
    }
}
