//! Authentication and authorization: devices and backends are let in, and held to their rights.

use std::sync::Arc;

use auth::{
    Authenticator, Authority, Authorizer, Chain, RemoteAuthorizer,
    backends::{BackendAuthenticator, JwtKeys},
};
use broker::{Account, WillAuthorizer};
use config::{Config, DeniedPublish};
use edge::reload::Reloads;

use super::StartError;

/// Everybody who decides, before anybody is asked.
pub(super) struct Admission {
    pub(super) authenticator: Arc<dyn Authenticator>,
    /// The authenticator, if the configuration makes it.
    chain: Option<Arc<Chain>>,
    /// `None` if devices may do everything.
    pub(super) authority: Option<Arc<Authority>>,
    /// The same, if its rules can be replaced.
    pub(super) replaceable: Option<Arc<Authority>>,
    pub(super) backends: Arc<BackendAuthenticator>,
}

impl Admission {
    /// Opens what the configuration names, unless the program that embeds the gateway has given its own. All of it is read
    /// again when its files change.
    pub(super) fn open(
        config: &Arc<Config>,
        authenticator: Option<Arc<dyn Authenticator>>,
        authorizer: Option<Arc<dyn Authorizer>>,
        reloads: &Arc<Reloads>,
    ) -> Result<Self, StartError> {
        let is_replaceable = authorizer.is_none() && config.authorization.rules.is_some();
        let authority = open_authority(config, authorizer, reloads)?;
        let replaceable = authority.clone().filter(|_| is_replaceable);
        if let Some(authority) = &replaceable {
            reloads.add(Arc::clone(authority) as _);
        }
        let backends = Arc::new(BackendAuthenticator::open(&config.backends)?);
        reloads.add(Arc::clone(&backends) as _);
        if config.backends.jwt.key_file.is_some() {
            reloads.add(Arc::new(JwtKeys(Arc::clone(&backends))));
        }
        let (authenticator, chain) = match authenticator {
            Some(authenticator) => (authenticator, None),
            None => {
                let chain = Chain::start(config, reloads)?;
                (Arc::clone(&chain) as Arc<dyn Authenticator>, Some(chain))
            }
        };
        Ok(Self { authenticator, chain, authority, replaceable, backends })
    }

    /// Charges what is remembered of clients to this account from now on.
    pub(super) fn charge_to(&self, account: &Arc<Account>) {
        if let Some(chain) = &self.chain {
            chain.charge_to(account);
        }
    }

    /// Has each will looked at again when it is to be published.
    pub(super) fn authorize_will(&self) -> Option<Arc<WillAuthorizer>> {
        let authority = self.authority.clone()?;
        Some(Arc::new(move |client_id, will| {
            let author = will.author.as_deref().map(String::as_str);
            authority.may_publish_will(client_id, author, &will.message)
        }))
    }
}

fn open_authority(
    config: &Config,
    authorizer: Option<Arc<dyn Authorizer>>,
    reloads: &Reloads,
) -> Result<Option<Arc<Authority>>, StartError> {
    if let Some(program) = authorizer {
        let closes = config.authorization.denied_publish == DeniedPublish::Close;
        return Ok(Some(Authority::of_program(program, closes)));
    }
    let service = RemoteAuthorizer::new(&config.auth.grpc)?;
    if let Some(service) = &service {
        reloads.add(service.reloads());
    }
    Ok(auth::open_rules(config, service, config.reserved_topics())?)
}
