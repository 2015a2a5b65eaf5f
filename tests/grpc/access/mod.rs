//! Rights to calls: roles, scopes, tokens that end, and client certificates.

pub(crate) mod audit;
mod certificates;
mod groups;
mod jwt;
mod places;
mod raw;
mod roles;
mod rules;
mod scopes;
mod tokens;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use access::backends::{Role, Scope, TokenGrant, Tokens, hash, mint};
use mqtt_server::{config::Config, proto::gateway::v1::security_client::SecurityClient};
use tonic::{
    Request,
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

use crate::harness::*;

/// Sends a token with each call.
#[derive(Clone)]
pub(crate) struct Bearer(pub(crate) String);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, tonic::Status> {
        request.metadata_mut().insert("authorization", format!("Bearer {}", self.0).parse().unwrap());
        Ok(request)
    }
}

/// A channel whose calls carry a token.
pub(crate) type Authorized = InterceptedService<Channel, Bearer>;

/// A gateway that asks who calls, and tokens by name.
pub(crate) struct Guarded {
    pub(crate) setup: Setup,
    pub(crate) file: PathBuf,
    tokens: HashMap<String, String>,
    _dir: tempfile::TempDir,
}

/// Grant of a token: its name, role, topics and devices; none is all of them.
pub(crate) type Wanted<'a> = (&'a str, Role, Option<&'a [&'a str]>, Option<&'a [&'a str]>);

impl Guarded {
    /// With a token of each role, named as the role, for everything.
    pub(crate) async fn with_roles() -> Self {
        let wanted: Vec<Wanted<'_>> =
            Role::ALL.into_iter().map(|role| (role.as_str(), role, None, None)).collect();
        Self::with(&wanted, |_| {}).await
    }

    pub(crate) async fn with(wanted: &[Wanted<'_>], change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tokens");
        let list =
            |list: Option<&[&str]>| list.map(|list| list.iter().map(|text| (*text).to_owned()).collect());
        let mut tokens = HashMap::new();
        for (name, role, topics, devices) in wanted {
            let scope = Scope::new(list(*topics), list(*devices)).unwrap();
            tokens.insert((*name).to_owned(), add(&file, name, *role, scope, None));
        }
        let setup = Setup::with(|config| {
            config.backends.tokens = Some(file.clone());
            change(config);
        })
        .await;
        Self { setup, file, tokens, _dir: dir }
    }

    pub(crate) fn token(&self, name: &str) -> &str {
        &self.tokens[name]
    }

    pub(crate) fn channel(&self, name: &str) -> Authorized {
        self.channel_of(self.token(name))
    }

    pub(crate) fn channel_of(&self, token: &str) -> Authorized {
        InterceptedService::new(self.setup.channel.clone(), Bearer(token.to_owned()))
    }

    pub(crate) fn security(&self, name: &str) -> SecurityClient<Authorized> {
        SecurityClient::new(self.channel(name))
    }
}

/// Adds a token to a file and returns it.
pub(crate) fn add(file: &Path, id: &str, role: Role, scope: Scope, expires: Option<u64>) -> String {
    let (token, _) = mint().unwrap();
    let (id, hash) = (id.to_owned(), hash(&token));
    let grant = TokenGrant { id, role, scope, created: 0, expires, note: String::new(), hash };
    let text = std::fs::read_to_string(file).unwrap_or_default();
    std::fs::write(file, Tokens::with(&text, &grant).unwrap()).unwrap();
    token
}
