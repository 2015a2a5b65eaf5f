//! The gRPC service of the user: how it is reached, and what the gateway shows it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use arc_swap::ArcSwap;
use config::{AuthGrpc, ConfigError, Problem};
use edge::{
    reload::Reload,
    remote::{Allowance, Metered},
    secret_files::open_mode,
};
use hyper::Uri;
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, runtime::Handle};
use tonic::{
    Request,
    codegen::Service,
    metadata::AsciiMetadataValue,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use crate::hooks::v1::hook_provider_client::HookProviderClient;

/// Longest answer.
const MAX_ANSWER: usize = 64 << 10;
/// Longest headers of an answer.
const MAX_HEADERS: u32 = 16 << 10;
/// Bytes that the service may send for each question, all in all, and how many of these add up: see [`Allowance`].
const PER_QUESTION: usize = 24 << 10;
const MOST_QUESTIONS: usize = 256;
/// Bytes that it may send in a second beside these, such as pings.
const PER_SECOND: usize = 64 << 10;
const IDLE_MOST: usize = 256 << 10;
/// A connection on which nothing is heard for so long is asked whether it lives, and given up as long after.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// One connection to the service, made when it is first needed, and again whenever it is lost or what is shown has changed.
#[derive(Clone)]
pub(crate) struct Provider(Arc<ProviderInner>);

struct ProviderInner {
    /// Name that is shown for the provider.
    name: &'static str,
    config: AuthGrpc,
    runtime: Handle,
    current: ArcSwap<Current>,
    /// Of all its connections together, so that nothing is gained by ending one.
    allowance: Arc<Allowance>,
}

/// As the files were read last.
struct Current {
    client: HookProviderClient<Channel>,
    bearer: Option<AsciiMetadataValue>,
}

impl Provider {
    /// `name` is the provider's [`Reload::name`]. To be called within the runtime that carries the connection.
    ///
    /// # Errors
    /// The URL or a file cannot be used.
    pub(super) fn new(config: &AuthGrpc, name: &'static str) -> Result<Self, ConfigError> {
        let allowance = Allowance::new(MOST_QUESTIONS * PER_QUESTION, PER_SECOND, IDLE_MOST);
        let current = ArcSwap::from_pointee(Current::new(config, &allowance)?);
        let (config, runtime) = (config.clone(), Handle::current());
        Ok(Self(Arc::new(ProviderInner { name, config, runtime, current, allowance })))
    }

    /// Checks that the URL and the files can be used.
    ///
    /// # Errors
    /// The fault, in words.
    pub(super) fn check(config: &AuthGrpc) -> Result<(), ConfigError> {
        read(config).map(drop)
    }

    pub(super) fn client(&self) -> HookProviderClient<Channel> {
        self.0.current.load().client.clone()
    }

    /// With what is shown to the service, and the deadline for its answer.
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        self.0.allowance.add(PER_QUESTION);
        let mut request = Request::new(message);
        request.set_timeout(self.0.config.limits.deadline.0);
        if let Some(bearer) = &self.0.current.load().bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        request
    }
}

impl Current {
    fn new(config: &AuthGrpc, allowance: &Arc<Allowance>) -> Result<Self, ConfigError> {
        let (endpoint, bearer) = read(config)?;
        let channel = endpoint
            .connect_timeout(config.limits.deadline.0)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .http2_max_header_list_size(MAX_HEADERS)
            .connect_with_connector_lazy(Connector(Arc::clone(allowance)));
        let client = HookProviderClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        Ok(Self { client, bearer })
    }
}

/// The authority of the service, and what the gateway shows it.
impl Reload for Provider {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn files(&self) -> Vec<PathBuf> {
        let AuthGrpc { ca, cert, key, token_file, .. } = &self.0.config;
        [ca, cert, key, token_file].into_iter().flatten().cloned().collect()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let _runtime = self.0.runtime.enter();
        let current = Current::new(&self.0.config, &self.0.allowance).map_err(
            |ConfigError(problems)| -> Vec<String> { problems.iter().map(Problem::to_string).collect() },
        )?;
        // Questions that are under way keep the connection of before.
        self.0.current.store(Arc::new(current));
        Ok(format!("{} files", self.files().len()))
    }
}

/// Makes connections on which the service may send what is allowed it.
struct Connector(Arc<Allowance>);

impl Service<Uri> for Connector {
    type Response = TokioIo<Metered<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(connect(uri, Arc::clone(&self.0)))
    }
}

/// A connection; none while what the service may send is used up.
async fn connect(uri: Uri, allowance: Arc<Allowance>) -> io::Result<TokioIo<Metered<TcpStream>>> {
    allowance.check().map_err(io::Error::other)?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let usual = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    let socket = TcpStream::connect((host, uri.port_u16().unwrap_or(usual))).await?;
    let _ = socket.set_nodelay(true);
    Ok(TokioIo::new(Metered::new(socket, allowance)))
}

fn read(config: &AuthGrpc) -> Result<(Endpoint, Option<AsciiMetadataValue>), ConfigError> {
    let wrong = |key: &str, shown: &dyn std::fmt::Display, text: String, fix: &str| {
        ConfigError(vec![Problem::new(format!("auth.grpc.{key}"), shown, text, fix)])
    };
    let url = config.url.as_deref().unwrap_or_default();
    let not_url = |text: String| {
        wrong("url", &url, text, "write it like https://auth.example.com:7070, with auth.grpc.ca")
    };
    let mut endpoint = Endpoint::from_shared(url.to_owned()).map_err(|_| not_url("not a URL".to_owned()))?;
    let scheme = endpoint.uri().scheme_str();
    if endpoint.uri().host().is_none() || !matches!(scheme, Some("http" | "https")) {
        return Err(not_url("not a URL of http or https".to_owned()));
    }
    let is_secure = scheme == Some("https");
    let open = |key: &str, path: &Path| {
        fs::read(path).map_err(|error| {
            wrong(key, &path.display(), error.to_string(), "name a file that the gateway can read")
        })
    };
    match &config.ca {
        None if is_secure => {
            return Err(not_url("https needs the CA of the service's certificate".to_owned()));
        }
        Some(ca) if is_secure => {
            let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(open("ca", ca)?));
            if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
                own("key", key)?;
                tls = tls.identity(Identity::from_pem(open("cert", cert)?, open("key", key)?));
            }
            endpoint = endpoint.tls_config(tls).map_err(|error| {
                let text =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                wrong(
                    "ca",
                    &ca.display(),
                    text,
                    "name PEM files: the CA, and the gateway's certificate with its key",
                )
            })?;
        }
        _ => {}
    }
    let bearer = match &config.token_file {
        None => None,
        Some(path) => {
            own("token_file", path)?;
            let text = String::from_utf8(open("token_file", path)?).unwrap_or_default();
            let value = AsciiMetadataValue::try_from(format!("Bearer {}", text.trim()));
            let mut value = value.ok().filter(|_| !text.trim().is_empty()).ok_or_else(|| {
                wrong(
                    "token_file",
                    &path.display(),
                    "no token in it".to_owned(),
                    "write the token into it, alone",
                )
            })?;
            value.set_sensitive(true);
            Some(value)
        }
    };
    Ok((endpoint, bearer))
}

/// Refuses a secret that others on the machine can read.
fn own(key: &str, path: &Path) -> Result<(), ConfigError> {
    let Ok(meta) = fs::metadata(path) else { return Ok(()) };
    let Some(mode) = open_mode(&meta) else { return Ok(()) };
    let text = format!("others can read it (mode {mode:o})");
    let fix = format!("chmod 600 {}", path.display());
    Err(ConfigError(vec![Problem::new(format!("auth.grpc.{key}"), path.display(), text, fix)]))
}
