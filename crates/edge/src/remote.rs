//! A client of one HTTP service that the gateway calls: HTTP/1.1 over TCP or TLS, with connections that are used again.
//! The bytes taken from the service for one request are bounded in any case.

mod allowance;

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use config::{ConfigError, Problem};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, StatusCode, Uri,
    body::Incoming,
    client::conn::http1::{SendRequest, handshake},
    header::{self, HeaderMap, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

pub use self::allowance::{Allowance, Metered, TooMuch};
use crate::{
    reload::Reload,
    tls::{ClientTls, ServerName},
};

/// Longest body of an answer.
const MAX_ANSWER: usize = 64 << 10;
/// All bytes for one request: that, its headers, and before them interim answers and the handshake of TLS.
const MAX_RECEIVED: usize = 2 * MAX_ANSWER;

/// Error that left a request without an answer. The text has nothing of the request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection could be made.
    #[error("{0}")]
    Connect(String),
    /// The connection ended without a whole answer, or the answer is none.
    #[error("{0}")]
    Answer(String),
}

/// See the module.
pub struct Client {
    uri: Uri,
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName)>,
    /// Connections that nobody uses now. No more than questions at once.
    idle: Mutex<Vec<Open>>,
}

/// A connection.
struct Open {
    sender: SendRequest<Full<Bytes>>,
    allowance: Arc<Allowance>,
}

impl Client {
    /// For the service at `url`, whose certificate is of the CA in `tls`.
    ///
    /// # Errors
    /// The fault of the URL.
    pub fn new(url: &str, tls: Option<ClientTls>) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|_| "not a URL".to_owned())?;
        let host = uri.host().ok_or("no host in the URL")?.trim_matches(['[', ']']).to_owned();
        let (secure, usual) = match uri.scheme_str() {
            Some("http") => (false, 80),
            Some("https") => (true, 443),
            _ => return Err("not a URL of http or https".to_owned()),
        };
        let tls = match (secure, tls) {
            (false, _) => None,
            (true, None) => return Err("https needs the CA of the service's certificate".to_owned()),
            (true, Some(config)) => {
                let name =
                    ServerName::try_from(host.clone()).map_err(|_| "no host name in the URL".to_owned())?;
                Some((TlsConnector::from(Arc::new(config)), name))
            }
        };
        let port = uri.port_u16().unwrap_or(usual);
        Ok(Self { uri, host, port, tls, idle: Mutex::default() })
    }

    /// Posts JSON; the status and the body of the answer. Cancel safe: then the connection is not used again.
    ///
    /// # Errors
    /// There is no whole answer.
    pub async fn post(&self, json: Vec<u8>) -> Result<(StatusCode, Bytes), RequestError> {
        let told = self.ask(Method::POST, Bytes::from(json), &[]).await?;
        Ok((told.status, told.body))
    }

    /// Posts JSON with headers of the caller's; as [`Self::post`].
    ///
    /// # Errors
    /// There is no whole answer.
    pub async fn send(
        &self,
        json: Bytes,
        headers: &[(HeaderName, HeaderValue)],
    ) -> Result<HttpAnswer, RequestError> {
        self.ask(Method::POST, json, headers).await
    }

    /// Gets what is there; as [`Self::post`].
    ///
    /// # Errors
    /// There is no whole answer.
    pub async fn get(&self) -> Result<(StatusCode, Bytes), RequestError> {
        let told = self.ask(Method::GET, Bytes::new(), &[]).await?;
        Ok((told.status, told.body))
    }

    /// Returns whether nobody else hears or changes the conversation: over TLS, or within this machine.
    pub fn is_secret(&self) -> bool {
        let address: Result<IpAddr, _> = self.host.parse();
        self.tls.is_some() || self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    async fn ask(
        &self,
        method: Method,
        body: Bytes,
        headers: &[(HeaderName, HeaderValue)],
    ) -> Result<HttpAnswer, RequestError> {
        let mut again = false;
        loop {
            // One question must not use up the connections of all others, if the service closes each for it.
            let idle = self.idle().filter(|_| !again);
            let used = idle.is_some();
            let mut open = match idle {
                Some(open) => open,
                None => self.connect().await?,
            };
            open.allowance.add(MAX_RECEIVED);
            let answer = match open.sender.send_request(self.request(&method, body.clone(), headers)?).await {
                Ok(answer) => answer,
                // The service may have closed it while nobody used it.
                Err(_) if used => {
                    again = true;
                    continue;
                }
                Err(error) => return Err(RequestError::Answer(format!("no answer: {error}"))),
            };
            let told = read(answer).await?;
            if open.sender.ready().await.is_ok() {
                self.idle.lock().push(open);
            }
            return Ok(told);
        }
    }

    /// A connection that nobody uses now.
    fn idle(&self) -> Option<Open> {
        let mut idle = self.idle.lock();
        while let Some(open) = idle.pop() {
            if !open.sender.is_closed() {
                return Some(open);
            }
        }
        None
    }

    fn request(
        &self,
        method: &Method,
        body: Bytes,
        headers: &[(HeaderName, HeaderValue)],
    ) -> Result<Request<Full<Bytes>>, RequestError> {
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let host = self.uri.authority().map_or("", |authority| authority.as_str());
        // The part before an @ is not for the header.
        let host = host.rsplit('@').next().unwrap_or_default();
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, host);
        if method == Method::POST {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request
            .header(header::ACCEPT, "application/json")
            .body(Full::new(body))
            .map_err(|_| RequestError::Answer("not a request".to_owned()))
    }

    async fn connect(&self) -> Result<Open, RequestError> {
        let socket = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| format!("connect to {}:{}: {error}", self.host, self.port))
            .map_err(RequestError::Connect)?;
        let _ = socket.set_nodelay(true);
        let allowance = Allowance::per_question(MAX_RECEIVED);
        allowance.add(MAX_RECEIVED);
        let socket = Metered::new(socket, Arc::clone(&allowance));
        let sender = match &self.tls {
            None => self.open(TokioIo::new(socket)).await?,
            Some((connector, name)) => {
                let tls = connector.connect(name.clone(), socket).await;
                let tls = tls.map_err(|error| RequestError::Connect(format!("TLS: {error}")))?;
                self.open(TokioIo::new(tls)).await?
            }
        };
        Ok(Open { sender, allowance })
    }

    async fn open<T>(&self, io: T) -> Result<SendRequest<Full<Bytes>>, RequestError>
    where
        T: hyper::rt::Read + hyper::rt::Write + Send + Unpin + 'static,
    {
        let (sender, connection) =
            handshake(io).await.map_err(|error| RequestError::Answer(format!("HTTP: {error}")))?;
        // Ends with the last request, or after an hour: then another address of the name has its turn.
        tokio::spawn(tokio::time::timeout(Duration::from_secs(3600), connection));
        Ok(sender)
    }
}

/// The client of a service whose CA is read again. Questions that are under way keep the client of before.
pub struct Service {
    name: &'static str,
    ca: Option<PathBuf>,
    make: Box<dyn Fn() -> Result<Client, ConfigError> + Send + Sync>,
    client: ArcSwap<Client>,
}

impl Service {
    /// Has `make` read the CA, now and whenever it has changed; `name` is [`Reload::name`].
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn new(
        name: &'static str,
        ca: Option<PathBuf>,
        make: impl Fn() -> Result<Client, ConfigError> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, ConfigError> {
        let client = ArcSwap::from_pointee(make()?);
        Ok(Arc::new(Self { name, ca, make: Box::new(make), client }))
    }

    /// The client as of the last reload.
    pub fn client(&self) -> Arc<Client> {
        self.client.load_full()
    }
}

impl Reload for Service {
    fn name(&self) -> &'static str {
        self.name
    }

    fn files(&self) -> Vec<PathBuf> {
        self.ca.iter().cloned().collect()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let client = (self.make)().map_err(|ConfigError(problems)| -> Vec<String> {
            problems.iter().map(Problem::to_string).collect()
        })?;
        self.client.store(Arc::new(client));
        Ok(format!("{} files", self.ca.iter().len()))
    }
}

/// An answer.
pub struct HttpAnswer {
    /// Status code.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

async fn read(answer: hyper::Response<Incoming>) -> Result<HttpAnswer, RequestError> {
    let (head, body) = answer.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    let body = body.map_err(|error| RequestError::Answer(format!("no whole answer: {error}")))?.to_bytes();
    Ok(HttpAnswer { status: head.status, headers: head.headers, body })
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::tls;

    fn write_ca(path: &Path) {
        let key = rcgen::KeyPair::generate().expect("generate a key");
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        fs::write(path, params.self_signed(&key).expect("sign").pem()).expect("write the CA");
    }

    /// The failure: the CA of the service is replaced, and until a restart the gateway believes the old one, or nobody.
    #[test]
    fn a_new_ca_is_taken_and_a_broken_one_is_not() {
        let dir = tempfile::tempdir().expect("make a directory");
        let ca = dir.path().join("ca.pem");
        write_ca(&ca);
        let read = ca.clone();
        let service = Service::new("authorities of tests", Some(ca.clone()), move || {
            let tls = tls::client_of_ca(&read)
                .map_err(|error| ConfigError(vec![Problem::new("ca", "", error.to_string(), "")]))?;
            Ok(Client::new("https://localhost/", Some(tls)).expect("a URL"))
        });
        let service = service.expect("a service");
        assert_eq!(service.files(), std::slice::from_ref(&ca));
        let first = service.client();
        fs::write(&ca, "nothing of the kind").expect("write");
        assert_eq!(service.reload().expect_err("no certificate").len(), 1);
        assert!(Arc::ptr_eq(&service.client(), &first), "all stays as it was");
        write_ca(&ca);
        assert_eq!(service.reload(), Ok("1 files".to_owned()));
        assert!(!Arc::ptr_eq(&service.client(), &first));
    }
}
