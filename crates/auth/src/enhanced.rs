//! MQTT 5's enhanced authentication: the methods that a listener's steps offer.

use std::{future::ready, sync::Arc};

use access::{jwt, passwords::PasswordDigest, scram};
use aws_lc_rs::rand;
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;

use super::{
    Answering, AuthProgress, Denied, Dialogue, Method, Principal, chain::Sources, login_queue::LoginClient,
    passwords::PasswordFile,
};

/// Name of the method whose data is a JSON Web Token.
pub(super) const JWT: &str = "JWT";

/// Users of the password file that have keys for SCRAM.
pub(super) struct Scram {
    passwords: Arc<PasswordFile>,
}

impl Scram {
    /// For the users of this file.
    pub(super) fn new(passwords: Arc<PasswordFile>) -> Self {
        Self { passwords }
    }

    /// Answers the client's first message. Costs some hashes of a block, since the keys were made when the password was set.
    fn start(&self, first: &[u8]) -> Result<(scram::Exchange, Vec<u8>), Denied> {
        let mut nonce = [0; 18];
        rand::fill(&mut nonce).map_err(|_| Denied::Unavailable)?;
        let users = self.passwords.users();
        let mock = scram::MockScram { secret: users.secret(), shapes: users.scram_shapes() };
        let started =
            scram::Exchange::start(first, &STANDARD_NO_PAD.encode(nonce), &mock, |user| {
                match users.get(user) {
                    Some(PasswordDigest::Scram(keys)) => Some(keys.clone()),
                    _ => None,
                }
            });
        started.map_err(|_| Denied::NotAuthorized)
    }
}

/// The dialogue of SCRAM-SHA-256.
pub(super) struct ScramDialogue {
    sources: Arc<Sources>,
    client_id: String,
    common_name: Option<Box<str>>,
    stage: ScramStage,
}

enum ScramStage {
    /// The client's first message is to come.
    First,
    /// Its last.
    Last(Box<scram::Exchange>),
    Over,
}

impl ScramDialogue {
    pub(super) fn new(sources: Arc<Sources>, client_id: String, common_name: Option<Box<str>>) -> Self {
        Self { sources, client_id, common_name, stage: ScramStage::First }
    }

    fn take(&mut self, data: &[u8]) -> Result<AuthProgress, Denied> {
        match std::mem::replace(&mut self.stage, ScramStage::Over) {
            ScramStage::First => {
                let scram = self.sources.scram.as_ref().ok_or(Denied::NotAuthorized)?;
                let (exchange, answer) = scram.start(data)?;
                self.stage = ScramStage::Last(Box::new(exchange));
                Ok(AuthProgress::Challenge(answer.into()))
            }
            ScramStage::Last(exchange) => match exchange.finish(data) {
                Ok((user, _)) if !self.sources.may_have(&user, &self.client_id) => Err(Denied::ClientId),
                Ok((user, proof)) => {
                    let principal = Principal {
                        method: Method::Scram,
                        username: Some(user),
                        common_name: self.common_name.take(),
                        ..Principal::default()
                    };
                    Ok(AuthProgress::Proved(Arc::new(principal), Some(proof.into())))
                }
                Err(scram::ScramError::Wrong) => Err(Denied::BadCredentials),
                Err(scram::ScramError::Malformed) => Err(Denied::NotAuthorized),
            },
            ScramStage::Over => Err(Denied::NotAuthorized),
        }
    }
}

impl Dialogue for ScramDialogue {
    fn answer(&mut self, data: Bytes) -> Answering {
        Box::pin(ready(self.take(&data)))
    }
}

/// The dialogue of a token: the client shows it, and that is all.
pub(super) struct TokenDialogue {
    pub(super) sources: Arc<Sources>,
    pub(super) client_id: String,
    pub(super) common_name: Option<Box<str>>,
    pub(super) login_client: LoginClient,
}

impl Dialogue for TokenDialogue {
    fn answer(&mut self, data: Bytes) -> Answering {
        let (sources, client_id, login_client) =
            (Arc::clone(&self.sources), self.client_id.clone(), self.login_client);
        let common_name = self.common_name.take();
        Box::pin(async move {
            // There is no other step that could know whose it is.
            let token = std::str::from_utf8(&data).ok().filter(|token| jwt::looks_like_token(token));
            let token = token.map(str::to_owned).ok_or(Denied::BadCredentials)?;
            drop(data);
            let proved = sources.verify_token(token, &client_id, login_client).await;
            let principal = proved.map_err(|denied| denied.unwrap_or(Denied::BadCredentials))?;
            Ok(AuthProgress::Proved(Arc::new(Principal { common_name, ..principal }), None))
        })
    }
}

/// Dialogue that was refused before its first message.
pub(super) struct RefusedDialogue(pub(super) Denied);

impl Dialogue for RefusedDialogue {
    fn answer(&mut self, _: Bytes) -> Answering {
        Box::pin(ready(Err(self.0)))
    }
}
