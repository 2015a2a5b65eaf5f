//! The steps of `[auth]`, asked one after the other until one decides.

use std::{collections::HashMap, io, sync::Arc};

use access::{
    ClientIdTemplate,
    certificate::{CertificateFields, NameTemplate},
    jwt::{self, JwtError},
    scram,
};
use broker::Account;
use config::{AuthCertificate, AuthStep, Config, ConfigError};
use edge::reload::Reloads;

use super::{
    AllowAll, Authenticator, Credentials, Decision, Denied, Dialogue, Method, Principal, certificate,
    enhanced::{self, RefusedDialogue, Scram, ScramDialogue, TokenDialogue},
    hashing::{HashBounds, Hashing},
    login_queue::LoginClient,
    passwords::PasswordFile,
    remote::{GrpcHook, HttpHook, LoginOutcome},
    tokens::JwtTokens,
};
use crate::counters::count;

/// Verdict of a step.
enum StepVerdict {
    /// This is who it is.
    Allow(Principal),
    /// The client may not connect, whatever the other steps would say.
    Deny(Denied),
    /// Nothing: the next one is asked.
    Pass,
}

/// Decides by the steps that the configuration names for each listener. A step that knows the device decides; the others
/// pass it on, and who is passed on by all may not connect.
pub struct Chain {
    /// By the listener's name.
    listeners: HashMap<String, Box<[AuthStep]>>,
    sources: Arc<Sources>,
}

/// Sources that the steps consult.
pub(super) struct Sources {
    certificate: CertificateTemplates,
    pub(super) scram: Option<Scram>,
    passwords: Option<Arc<PasswordFile>>,
    /// Client id that a user of the password file must have; `None` lets the device choose.
    client_id_of_users: Option<ClientIdTemplate>,
    hashing: Hashing,
    tokens: Option<Arc<JwtTokens>>,
    /// Checks signatures, which never wait for passwords.
    signatures: Hashing,
    http: Option<HttpHook>,
    grpc: Option<GrpcHook>,
}

/// `[auth.certificate]`, read.
struct CertificateTemplates {
    username: Option<NameTemplate>,
    client_id: Option<NameTemplate>,
    groups: Vec<NameTemplate>,
    tenant: Option<NameTemplate>,
}

impl Chain {
    /// Reads the files that the configuration names and adds them to the files that can be read again. To be called
    /// within the runtime where remote sources are to be asked.
    ///
    /// # Errors
    /// A file cannot be used, or a thread cannot be made.
    pub fn start(config: &Config, reloads: &Reloads) -> Result<Arc<Self>, ChainError> {
        let passwords = PasswordFile::open(&config.auth)?.map(Arc::new);
        if let Some(passwords) = &passwords {
            reloads.add(Arc::clone(passwords) as _);
        }
        let tokens =
            config.auth.jwt.is_on().then(|| JwtTokens::start(&config.auth.jwt)).transpose()?.map(Arc::new);
        if let Some(tokens) = &tokens {
            reloads.add(Arc::clone(tokens) as _);
            if let Some(key_set) = &tokens.key_set {
                reloads.add(key_set.reloads());
            }
        }
        let http = config.auth.http.url.is_some().then(|| HttpHook::new(&config.auth.http)).transpose()?;
        if let Some(http) = &http {
            reloads.add(http.reloads());
        }
        let grpc = config.auth.grpc.authenticates().then(|| GrpcHook::new(&config.auth.grpc)).transpose()?;
        if let Some(grpc) = &grpc {
            reloads.add(grpc.reloads());
        }
        let bounds = |threads| HashBounds {
            threads,
            waiting: config.auth.max_waiting_hashes,
            patience: config.limits.connect_timeout.0,
        };
        let sources = Sources {
            certificate: CertificateTemplates::of(&config.auth.certificate),
            scram: passwords.as_ref().map(|file| Scram::new(Arc::clone(file))),
            hashing: Hashing::start(bounds(passwords.as_ref().map_or(0, |_| config.hash_threads())))?,
            passwords,
            // The configuration was checked: no template is left out.
            client_id_of_users: ClientIdTemplate::parse(&config.auth.password.client_id).ok(),
            http,
            grpc,
            signatures: Hashing::start(bounds(tokens.iter().len()))?,
            tokens,
        };
        let listeners = config.effective_listeners().into_iter().map(|(address, listener)| {
            let steps = config.auth_steps(&address, &listener).into();
            (listener.name, steps)
        });
        Ok(Arc::new(Self { listeners: listeners.collect(), sources: Arc::new(sources) }))
    }

    /// Charges what is remembered of logins to this account from now on; before that nothing is.
    pub fn charge_to(&self, account: &Arc<Account>) {
        self.sources.hashing.charge_to(account);
        self.sources.signatures.charge_to(account);
        if let Some(passwords) = &self.sources.passwords {
            passwords.proofs.charge_to(account);
        }
        if let Some(http) = &self.sources.http {
            http.charge_to(account);
        }
        if let Some(grpc) = &self.sources.grpc {
            grpc.charge_to(account);
        }
    }
}

/// Error that left the configuration without a chain.
#[derive(Debug)]
pub enum ChainError {
    /// A file cannot be used.
    Config(ConfigError),
    /// A thread cannot be made.
    Io(io::Error),
}

impl From<ConfigError> for ChainError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<io::Error> for ChainError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads what `[auth]` names, as a start would.
///
/// # Errors
/// A file that cannot be used.
pub fn check_files(config: &Config) -> Result<(), ConfigError> {
    PasswordFile::open(&config.auth)?;
    config.auth.jwt.is_on().then(|| JwtTokens::check(&config.auth.jwt)).transpose()?;
    config.auth.http.url.is_some().then(|| HttpHook::check(&config.auth.http)).transpose()?;
    config.auth.grpc.url.is_some().then(|| GrpcHook::check(&config.auth.grpc)).transpose()?;
    Ok(())
}

impl Authenticator for Chain {
    fn authenticate(&self, credentials: Credentials) -> Decision {
        let steps = self.listeners.get(credentials.listener.as_str());
        let steps: &[AuthStep] = steps.map_or(&[], |steps| steps);
        if steps == [AuthStep::Anonymous] && credentials.certificate.is_none() {
            return AllowAll.authenticate(credentials);
        }
        let (steps, sources) = (Box::<[AuthStep]>::from(steps), Arc::clone(&self.sources));
        Box::pin(async move { sources.decide(&steps, credentials).await })
    }

    fn footprint(&self, credentials: &Credentials) -> usize {
        let steps: &[AuthStep] = self.listeners.get(credentials.listener.as_str()).map_or(&[], |steps| steps);
        let question = |step: &AuthStep| match step {
            AuthStep::Certificate | AuthStep::Scram | AuthStep::Anonymous => 0,
            AuthStep::Password | AuthStep::Jwt => credentials.bytes(),
            AuthStep::Http => HttpHook::footprint(credentials),
            // As a message, and encoded.
            AuthStep::Grpc => 2 * credentials.bytes(),
        };
        credentials.bytes() + steps.iter().map(question).max().unwrap_or_default()
    }

    fn begin(&self, method: &str, credentials: Credentials) -> Option<Box<dyn Dialogue>> {
        let steps: &[AuthStep] = self.listeners.get(credentials.listener.as_str()).map_or(&[], |steps| steps);
        let step = match method {
            scram::METHOD => AuthStep::Scram,
            enhanced::JWT => AuthStep::Jwt,
            _ => return None,
        };
        let place = steps.iter().position(|known| *known == step)?;
        let fields = credentials.certificate.as_deref().map(certificate::read);
        // A certificate that is asked first and is not good for this device is not made good by something else.
        if steps[..place].contains(&AuthStep::Certificate)
            && let StepVerdict::Deny(denied) = self.sources.by_certificate(fields.as_ref(), &credentials)
        {
            return Some(Box::new(RefusedDialogue(denied)));
        }
        let (sources, common_name) = (Arc::clone(&self.sources), fields.and_then(|fields| fields.cn));
        Some(match step {
            AuthStep::Scram => Box::new(ScramDialogue::new(sources, credentials.client_id, common_name)),
            _ => {
                let login_client = sources.signatures.login_client(credentials.address(), None);
                Box::new(TokenDialogue {
                    sources,
                    client_id: credentials.client_id,
                    common_name,
                    login_client,
                })
            }
        })
    }
}

impl Sources {
    async fn decide(&self, steps: &[AuthStep], credentials: Credentials) -> Result<Arc<Principal>, Denied> {
        let fields = credentials.certificate.as_deref().map(certificate::read);
        for step in steps {
            let verdict = match step {
                AuthStep::Certificate => self.by_certificate(fields.as_ref(), &credentials),
                AuthStep::Jwt => self.by_token(&credentials).await,
                // SCRAM has a method of its own: a password or token is for the other steps.
                AuthStep::Scram => StepVerdict::Pass,
                AuthStep::Password => self.by_password(&credentials).await,
                AuthStep::Http => self.by_http(&credentials, fields.as_ref()).await,
                AuthStep::Grpc => self.by_grpc(&credentials, fields.as_ref()).await,
                AuthStep::Anonymous if credentials.password.is_none() || steps.len() == 1 => {
                    StepVerdict::Allow(Principal::default())
                }
                AuthStep::Anonymous => StepVerdict::Pass,
            };
            match verdict {
                StepVerdict::Allow(mut principal) => {
                    principal.common_name = fields.and_then(|fields| fields.cn);
                    return Ok(Arc::new(principal));
                }
                StepVerdict::Deny(denied) => return Err(denied),
                StepVerdict::Pass => {}
            }
        }
        let tried = credentials.username.is_some() || credentials.password.is_some();
        Err(if tried { Denied::BadCredentials } else { Denied::NotAuthorized })
    }

    fn by_certificate(&self, fields: Option<&CertificateFields>, credentials: &Credentials) -> StepVerdict {
        let (names, Some(fields)) = (&self.certificate, fields) else { return StepVerdict::Pass };
        let fill = |template: &Option<NameTemplate>| match template {
            None => Ok(None),
            Some(template) => template.fill(fields).map(Some).ok_or(()),
        };
        let (Ok(username), Ok(client_id), Ok(tenant)) =
            (fill(&names.username), fill(&names.client_id), fill(&names.tenant))
        else {
            // The certificate lacks what its device would be named by.
            return StepVerdict::Deny(Denied::NotAuthorized);
        };
        if client_id.is_some_and(|client_id| client_id != credentials.client_id) {
            return StepVerdict::Deny(Denied::ClientId);
        }
        StepVerdict::Allow(Principal {
            method: Method::Certificate,
            username: username.map(Into::into),
            groups: names.groups.iter().filter_map(|group| group.fill(fields)).map(Into::into).collect(),
            tenant: tenant.map(Into::into),
            ..Principal::default()
        })
    }

    async fn by_token(&self, credentials: &Credentials) -> StepVerdict {
        let Some(tokens) = &self.tokens else { return StepVerdict::Pass };
        let token = if tokens.in_username {
            credentials.username.clone()
        } else {
            let password = credentials.password.as_ref();
            password.and_then(|password| std::str::from_utf8(&password.0).ok()).map(str::to_owned)
        };
        let Some(token) = token.filter(|token| jwt::looks_like_token(token)) else {
            return StepVerdict::Pass;
        };
        let login_client = self.signatures.login_client(credentials.address(), None);
        match self.verify_token(token, &credentials.client_id, login_client).await {
            Ok(principal) => StepVerdict::Allow(principal),
            Err(Some(denied)) => StepVerdict::Deny(denied),
            // Another step may know whose it is.
            Err(None) => StepVerdict::Pass,
        }
    }

    /// Verifies a token; returns the identity that it proves, if it is good for the device.
    ///
    /// # Errors
    /// The reason for refusing the token; `None` if it names no key that is known here.
    pub(super) async fn verify_token(
        &self,
        token: String,
        client_id: &str,
        login_client: LoginClient,
    ) -> Result<Principal, Option<Denied>> {
        let tokens = self.tokens.as_ref().ok_or(None)?;
        let token: Arc<str> = token.into();
        let verify = async || {
            let (tokens, token) = (Arc::clone(tokens), Arc::clone(&token));
            self.signatures.run(login_client, move |_| tokens.verify(&token)).await
        };
        let mut verified = verify().await;
        if let (Some(key_set), Ok(Err(JwtError::UnknownKey))) = (&tokens.key_set, &verified) {
            if key_set.refetch().await {
                verified = verify().await;
            }
            if matches!(verified, Ok(Err(JwtError::UnknownKey))) && key_set.keys().is_empty() {
                return Err(Some(Denied::Unavailable));
            }
        }
        let verified = verified.map_err(Some)?;
        self.signatures.told(login_client, verified.is_ok());
        match verified {
            Ok(verified) if verified.client_id.as_deref().is_some_and(|id| id != client_id) => {
                Err(Some(Denied::ClientId))
            }
            Ok(verified) => Ok(verified.principal),
            Err(JwtError::UnknownKey | JwtError::Malformed) => Err(None),
            Err(JwtError::Signature) => Err(Some(Denied::BadCredentials)),
            Err(JwtError::Expired | JwtError::TooEarly | JwtError::NotForUs | JwtError::TooMany) => {
                Err(Some(Denied::NotAuthorized))
            }
        }
    }

    /// Tells whether a user of the password file may connect under this client id.
    pub(super) fn may_have(&self, username: &str, client_id: &str) -> bool {
        self.client_id_of_users.as_ref().is_none_or(|template| template.fits(username, client_id))
    }

    async fn by_http(&self, credentials: &Credentials, fields: Option<&CertificateFields>) -> StepVerdict {
        let Some(http) = &self.http else { return StepVerdict::Pass };
        http.ask(credentials, fields).await.into()
    }

    async fn by_grpc(&self, credentials: &Credentials, fields: Option<&CertificateFields>) -> StepVerdict {
        let Some(grpc) = &self.grpc else { return StepVerdict::Pass };
        grpc.ask(credentials, fields).await.into()
    }

    async fn by_password(&self, credentials: &Credentials) -> StepVerdict {
        let (Some(file), Some(user), Some(password)) =
            (&self.passwords, &credentials.username, &credentials.password)
        else {
            return StepVerdict::Pass;
        };
        let allow = || {
            // Said only to a client that knows the password.
            if !self.may_have(user, &credentials.client_id) {
                return StepVerdict::Deny(Denied::ClientId);
            }
            let username = Some(user.as_str().into());
            StepVerdict::Allow(Principal { method: Method::Password, username, ..Principal::default() })
        };
        let (users, name, password) = (file.users(), user.clone(), password.clone());
        let login_client = self.hashing.login_client(credentials.address(), Some(user));
        let proof = file.proofs.of(&users, user, &password.0);
        if proof.is_some_and(|proof| file.proofs.has(proof)) {
            count(|c| c.checks_remembered.add(1));
            self.hashing.told(login_client, true);
            return allow();
        }
        let verified =
            self.hashing.run(login_client, move |scratch| users.check(&name, &password.0, scratch)).await;
        if let Ok(right) = verified {
            self.hashing.told(login_client, right == Some(true));
        }
        match verified {
            Ok(Some(true)) => {
                if let Some(proof) = proof {
                    file.proofs.keep(proof);
                }
                allow()
            }
            Ok(Some(false)) => StepVerdict::Deny(Denied::BadCredentials),
            Ok(None) => StepVerdict::Pass,
            Err(denied) => StepVerdict::Deny(denied),
        }
    }
}

impl From<LoginOutcome> for StepVerdict {
    fn from(said: LoginOutcome) -> Self {
        match said {
            LoginOutcome::Allow(principal) => Self::Allow(principal),
            LoginOutcome::Deny => Self::Deny(Denied::NotAuthorized),
            LoginOutcome::Ignore => Self::Pass,
            LoginOutcome::Busy => Self::Deny(Denied::Busy),
            LoginOutcome::Unavailable => Self::Deny(Denied::Unavailable),
        }
    }
}

impl CertificateTemplates {
    /// The configuration was checked: a template that is none would be none.
    fn of(config: &AuthCertificate) -> Self {
        let template = |text: &String| NameTemplate::parse(text).ok().filter(|_| !text.is_empty());
        Self {
            username: template(&config.username),
            client_id: template(&config.client_id),
            groups: config.groups.iter().filter_map(template).collect(),
            tenant: template(&config.tenant),
        }
    }
}

#[cfg(test)]
mod tests {
    use access::passwords::{PasswordDigest, Scratch};
    use bytes::Bytes;

    use super::{super::SecretBytes, *};

    fn chain(steps: &[AuthStep], users: &str) -> Chain {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("passwords");
        std::fs::write(&file, users).unwrap();
        let config = Config {
            non_tls: true,
            auth: config::Auth { order: steps.to_vec(), password_file: Some(file), ..Default::default() },
            ..Config::default()
        };
        Arc::try_unwrap(Chain::start(&config, &Reloads::new()).unwrap()).ok().unwrap()
    }

    fn credentials(username: Option<&str>, password: Option<&str>) -> Credentials {
        Credentials {
            client_id: "d1".to_owned(),
            username: username.map(str::to_owned),
            password: password.map(|text| SecretBytes(Bytes::copy_from_slice(text.as_bytes()))),
            certificate: None,
            peer: "127.0.0.1:1".to_owned(),
            listener: Arc::new("default".to_owned()),
        }
    }

    fn user(name: &str, password: &str) -> String {
        let hash =
            PasswordDigest::argon2id(password.as_bytes(), b"0123456789abcdef", &mut Scratch::default());
        format!("{name}:{hash}\n")
    }

    #[tokio::test]
    async fn a_step_that_knows_the_device_decides_and_others_pass_it_on() {
        let both = chain(&[AuthStep::Password, AuthStep::Anonymous], &user("ann", "right"));
        let ask = async |chain: &Chain, name, password| chain.authenticate(credentials(name, password)).await;
        let ann = ask(&both, Some("ann"), Some("right")).await.unwrap();
        assert_eq!((ann.method, ann.username.as_deref()), (Method::Password, Some("ann")));
        assert_eq!(ask(&both, Some("ann"), Some("wrong")).await.unwrap_err(), Denied::BadCredentials);
        // A password that nobody has checked is not the same as none.
        assert_eq!(ask(&both, Some("bob"), Some("right")).await.unwrap_err(), Denied::BadCredentials);
        let nobody = ask(&both, None, None).await.unwrap();
        assert_eq!((nobody.method, nobody.username.as_deref()), (Method::Anonymous, None));
        let only = chain(&[AuthStep::Password], &user("ann", "right"));
        assert_eq!(ask(&only, None, None).await.unwrap_err(), Denied::NotAuthorized);
        assert_eq!(ask(&only, Some("bob"), Some("right")).await.unwrap_err(), Denied::BadCredentials);
        let open = chain(&[AuthStep::Anonymous], "");
        assert!(ask(&open, Some("bob"), Some("any")).await.unwrap().username.is_none());
    }

    #[tokio::test]
    async fn a_certificate_names_its_device_and_another_client_id_is_refused() {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "d1");
        let der = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec();
        let ask = async |names: AuthCertificate| {
            let mut chain = chain(&[AuthStep::Certificate], "");
            Arc::get_mut(&mut chain.sources).unwrap().certificate = CertificateTemplates::of(&names);
            chain
                .authenticate(Credentials { certificate: Some(der.clone()), ..credentials(None, None) })
                .await
        };
        let names = AuthCertificate { groups: vec!["g-{cn}".into(), "{ou}".into()], ..Default::default() };
        let device = ask(names).await.unwrap();
        assert_eq!(device.username.as_deref(), Some("d1"));
        assert_eq!(device.common_name.as_deref(), Some("d1"));
        assert_eq!(*device.groups, [Box::from("g-d1")]);
        let names = |client_id: &str| AuthCertificate { client_id: client_id.into(), ..Default::default() };
        assert!(ask(names("{cn}")).await.is_ok());
        assert_eq!(ask(names("x-{cn}")).await.unwrap_err(), Denied::ClientId);
        assert_eq!(ask(names("{ou}")).await.unwrap_err(), Denied::NotAuthorized);
    }
}
