//! Connections of a client to the gateway, and its credentials.

use std::{error::Error as StdError, fmt, path::Path, sync::Arc, time::Duration};

use gateway_api::gateway::v1::{
    commands_client::CommandsClient, consumer_client::ConsumerClient, devices_client::DevicesClient,
    events_client::EventsClient, groups_client::GroupsClient, operations_client::OperationsClient,
    publisher_client::PublisherClient, security_client::SecurityClient, shadows_client::ShadowsClient,
    state_client::StateClient, subscriber_client::SubscriberClient,
};
use tonic::{
    Request, Status,
    metadata::AsciiMetadataValue,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};
use tonic_health::pb::health_client::HealthClient;

use crate::{Error, Reason};

/// The largest answer that is read: a message may be as large as MQTT allows.
const MAX_ANSWER: usize = 300 * 1024 * 1024;
/// A connection that says nothing for so long is asked whether it still is there.
const PING_AFTER: Duration = Duration::from_secs(20);
const PING_ANSWER: Duration = Duration::from_secs(10);

/// Service that makes the calls: a channel that connects again by itself, with the token.
pub type Caller = InterceptedService<Channel, Bearer>;

/// Says with each call who calls, if there is a token.
#[derive(Clone, Default)]
pub struct Bearer(Token);

#[derive(Clone, Default)]
enum Token {
    #[default]
    None,
    Fixed(AsciiMetadataValue),
    Asked(Arc<dyn Fn() -> Result<String, String> + Send + Sync>),
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Token::None => "no token",
            Token::Fixed(_) => "a token",
            Token::Asked(_) => "a source of tokens",
        })
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let value = match &self.0 {
            Token::None => return Ok(request),
            Token::Fixed(value) => value.clone(),
            Token::Asked(ask) => {
                let token = ask().map_err(|error| Status::unauthenticated(format!("no token: {error}")))?;
                shown(&token).ok_or_else(|| Status::unauthenticated(NO_TOKEN))?
            }
        };
        request.metadata_mut().insert("authorization", value);
        Ok(request)
    }
}

const NO_TOKEN: &str = "the token has characters that no token has";

/// Returns the header that a call shows. An error would quote the token.
fn shown(token: &str) -> Option<AsciiMetadataValue> {
    let mut value = AsciiMetadataValue::try_from(format!("Bearer {}", token.trim())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Address of the gateway and credentials to show it. Nothing is connected before [`Options::connect`].
#[derive(Clone, Default)]
pub struct Options {
    address: String,
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    server_name: Option<String>,
    bearer: Bearer,
    patience: Option<Duration>,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("address", &self.address)
            .field("bearer", &self.bearer)
            .finish_non_exhaustive()
    }
}

impl Options {
    /// The authorities to trust, PEM, and no other. Without them those that the system trusts, or that the file or directory of
    /// `SSL_CERT_FILE` or `SSL_CERT_DIR` names.
    #[must_use]
    pub fn ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(pem.into());
        self
    }

    /// The same from a file.
    ///
    /// # Errors
    /// The file cannot be read, or has no certificate.
    pub fn ca_file(self, path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let pem = read(path)?;
        let has_certificate = String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----");
        if !has_certificate {
            let path = path.display();
            return Err(Error::options(format!(
                "{path}: no authority in it; it needs a 'BEGIN CERTIFICATE' block"
            )));
        }
        Ok(self.ca(pem))
    }

    /// Certificate and private key of this client, PEM, where the gateway asks for one.
    #[must_use]
    pub fn identity(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.identity = Some((certificate.into(), key.into()));
        self
    }

    /// The same from files.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn identity_files(self, certificate: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, Error> {
        let (certificate, key) = (read(certificate.as_ref())?, read(key.as_ref())?);
        Ok(self.identity(certificate, key))
    }

    /// The name in the gateway's certificate, where it is not the host of the address.
    #[must_use]
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// A token of `mqtt-server token create`, or a JWT.
    ///
    /// # Errors
    /// When it has characters that no token has.
    pub fn token(mut self, token: &str) -> Result<Self, Error> {
        let value = shown(token).ok_or_else(|| Error::options(NO_TOKEN))?;
        self.bearer = Bearer(Token::Fixed(value));
        Ok(self)
    }

    /// The same from a function, which is asked for each call and must not block for long: it has the token, or reads it from a
    /// file, while something else renews it. A stream whose token has expired or was revoked goes on with the next.
    ///
    /// When it fails, the call does, with [`Code::Unauthenticated`](tonic::Code::Unauthenticated).
    #[must_use]
    pub fn token_from<E: Into<Box<dyn StdError + Send + Sync>>>(
        mut self,
        ask: impl Fn() -> Result<String, E> + Send + Sync + 'static,
    ) -> Self {
        let ask = move || ask().map_err(|error| crate::error::in_words(&*error.into()));
        self.bearer = Bearer(Token::Asked(Arc::new(ask)));
        self
    }

    /// For how long calls of [`Client`] that may be repeated are repeated while the gateway cannot be reached; 30 s otherwise.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// When the address or the certificates are not valid, or nobody answers.
    pub async fn connect(self) -> Result<Client, Error> {
        let (endpoint, address) = (self.endpoint()?, self.address.clone());
        let channel = endpoint.connect().await.map_err(|error| Error::connect(&address, &error))?;
        Ok(self.client(channel))
    }

    /// Connects with the first call, and so does not fail for a gateway that is not there yet. Needs a Tokio runtime.
    ///
    /// # Errors
    /// When the address or the certificates are not valid.
    pub fn connect_lazily(self) -> Result<Client, Error> {
        let channel = self.endpoint()?.connect_lazy();
        Ok(self.client(channel))
    }

    fn client(self, channel: Channel) -> Client {
        let patience = self.patience.unwrap_or(Duration::from_secs(30));
        let renews = matches!(self.bearer.0, Token::Asked(_));
        Client { caller: InterceptedService::new(channel, self.bearer), patience, renews }
    }

    fn endpoint(&self) -> Result<Endpoint, Error> {
        let address = &self.address;
        let wrong =
            |error: &dyn StdError| Error::options(format!("{address}: {}", crate::error::in_words(error)));
        let secure = address.starts_with("https://");
        if !secure && !address.starts_with("http://") {
            return Err(Error::options(format!("{address}: an address begins with https:// or http://")));
        }
        let mut endpoint = Endpoint::from_shared(address.clone())
            .map_err(|error| wrong(&error))?
            .connect_timeout(PING_ANSWER)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING_AFTER)
            .keep_alive_timeout(PING_ANSWER)
            .keep_alive_while_idle(true);
        if secure {
            let mut tls = match &self.ca {
                Some(ca) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)),
                None => ClientTlsConfig::new().with_native_roots(),
            };
            if let Some(name) = &self.server_name {
                tls = tls.domain_name(name);
            }
            if let Some((certificate, key)) = &self.identity {
                tls = tls.identity(Identity::from_pem(certificate, key));
            }
            endpoint = endpoint.tls_config(tls).map_err(|error| wrong(&error))?;
        }
        Ok(endpoint)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|error| Error::options(format!("read {}: {error}", path.display())))
}

/// A client of one gateway. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Client {
    caller: Caller,
    pub(crate) patience: Duration,
    /// True if another token may follow one that has ended.
    renews: bool,
}

macro_rules! services {
    ($($(#[$doc:meta])* $name:ident: $client:ident,)*) => {
        impl Client {
            $($(#[$doc])*
            pub fn $name(&self) -> $client<Caller> {
                $client::new(self.caller.clone()).max_decoding_message_size(MAX_ANSWER)
            })*
        }
    };
}

services! {
    /// Publishes messages and tells what became of them.
    publisher: PublisherClient,
    /// Streams messages, at most once.
    subscriber: SubscriberClient,
    /// Latest values, history, retained messages.
    state: StateClient,
    /// Devices and their sessions.
    devices: DevicesClient,
    /// Events of devices.
    events: EventsClient,
    /// Consumer groups.
    groups: GroupsClient,
    /// Members of consumer groups.
    consumer: ConsumerClient,
    /// Requests to devices.
    commands: CommandsClient,
    /// Device shadows.
    shadows: ShadowsClient,
    /// Tokens, bans, rules.
    security: SecurityClient,
    /// The gateway's state, metrics, certificates and configuration.
    operations: OperationsClient,
    /// The health service of gRPC.
    health: HealthClient,
}

impl Client {
    /// A client of the gateway at `address`, as in `https://gateway.example:10000`; `http://` for plaintext.
    pub fn at(address: impl Into<String>) -> Options {
        Options { address: address.into(), ..Options::default() }
    }

    /// Returns whether a stream that ended so is worth opening again.
    pub(crate) fn may_go_on(&self, error: &Error) -> bool {
        let ended = matches!(error.reason(), Reason::CredentialsExpired | Reason::CredentialsRevoked);
        error.is_temporary() || self.renews && ended
    }
}
