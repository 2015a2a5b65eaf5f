//! A client of one HTTP service: HTTP/1.1 over TCP or TLS, with connections that are used again.

use std::{net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, StatusCode, Uri,
    body::Incoming,
    client::conn::http1::{SendRequest, handshake},
    header,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::tls::{ClientTls, ServerName};

/// Longest answer.
const MAX_ANSWER: usize = 64 << 10;

/// See the module.
pub(super) struct Client {
    uri: Uri,
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName)>,
    /// Connections that nobody uses now. No more than questions at once.
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

impl Client {
    /// For the service at `url`, whose certificate is of the CA in `tls`.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub(super) fn new(url: &str, tls: Option<ClientTls>) -> Result<Self, String> {
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
    /// There is no whole answer; the text has nothing of the request.
    pub(super) async fn post(&self, json: Vec<u8>) -> Result<(StatusCode, Bytes), String> {
        self.ask(Method::POST, Bytes::from(json)).await
    }

    /// Gets what is there; as [`Self::post`].
    ///
    /// # Errors
    /// There is no whole answer.
    pub(super) async fn get(&self) -> Result<(StatusCode, Bytes), String> {
        self.ask(Method::GET, Bytes::new()).await
    }

    /// Whether nobody else hears or changes what is said: over TLS, or within this machine.
    pub(super) fn is_secret(&self) -> bool {
        let address: Result<IpAddr, _> = self.host.parse();
        self.tls.is_some() || self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    async fn ask(&self, method: Method, body: Bytes) -> Result<(StatusCode, Bytes), String> {
        loop {
            let idle = self.idle.lock().pop();
            let used = idle.is_some();
            let mut sender = match idle {
                Some(sender) if sender.is_closed() => continue,
                Some(sender) => sender,
                None => self.connect().await?,
            };
            let answer = match sender.send_request(self.request(&method, body.clone())?).await {
                Ok(answer) => answer,
                // The service may have closed it while nobody used it.
                Err(_) if used => continue,
                Err(error) => return Err(format!("no answer: {error}")),
            };
            let told = read(answer).await?;
            if sender.ready().await.is_ok() {
                self.idle.lock().push(sender);
            }
            return Ok(told);
        }
    }

    fn request(&self, method: &Method, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let host = self.uri.authority().map_or("", |authority| authority.as_str());
        // What stands before an @ is not for the header.
        let host = host.rsplit('@').next().unwrap_or_default();
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, host);
        if method == Method::POST {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        request
            .header(header::ACCEPT, "application/json")
            .body(Full::new(body))
            .map_err(|_| "not a request".to_owned())
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, String> {
        let socket = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| format!("connect to {}:{}: {error}", self.host, self.port))?;
        let _ = socket.set_nodelay(true);
        match &self.tls {
            None => self.open(TokioIo::new(socket)).await,
            Some((connector, name)) => {
                let tls = connector.connect(name.clone(), socket).await;
                self.open(TokioIo::new(tls.map_err(|error| format!("TLS: {error}"))?)).await
            }
        }
    }

    async fn open<T>(&self, io: T) -> Result<SendRequest<Full<Bytes>>, String>
    where
        T: hyper::rt::Read + hyper::rt::Write + Send + Unpin + 'static,
    {
        let (sender, connection) = handshake(io).await.map_err(|error| format!("HTTP: {error}"))?;
        // Ends with the last request, or after an hour: then another address of the name has its turn.
        tokio::spawn(tokio::time::timeout(Duration::from_secs(3600), connection));
        Ok(sender)
    }
}

async fn read(answer: hyper::Response<Incoming>) -> Result<(StatusCode, Bytes), String> {
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    Ok((status, body.map_err(|error| format!("no whole answer: {error}"))?.to_bytes()))
}
