//! To one other gateway: one connection, made when it is needed, and made anew when it is gone.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use config::DatabaseTls;
use edge::tls::{ServerName, TlsError};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Request, Response, StatusCode, Uri,
    client::conn::http2::{self, SendRequest},
    header::HeaderValue,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use thiserror::Error;
use tokio::{
    net::TcpStream,
    runtime::Handle,
    sync::{Mutex, watch},
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;

use crate::{
    CALLER, DEVICE, HEADER_LIST, HOME, LinkBody, PassedCaller, RELAY, RelayStream, RelayedDevice,
    STREAM_WINDOW,
    counters::count,
    stream::{Outgoing, outgoing},
    tls,
};

/// Time for TCP and TLS to the other gateway.
const CONNECT: Duration = Duration::from_secs(3);

/// Time for the answer to a request that opens a relay.
const OPEN: Duration = Duration::from_secs(5);

/// After a failed attempt nobody tries again for so long: whoever comes meanwhile is told at once.
const PAUSE: Duration = Duration::from_millis(250);

/// A connection on which nothing comes is asked so often, and is gone without an answer in [`ANSWER`].
const ASK: Duration = Duration::from_secs(2);
const ANSWER: Duration = Duration::from_secs(3);

/// Another gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTarget {
    /// Its name in the cluster, which its certificate has to show.
    pub name: String,
    /// `HOST:PORT` of its links.
    pub address: String,
}

/// Reason for which a link was of no use.
#[derive(Debug, Clone, Error)]
pub enum LinkError {
    /// No gateway is known that serves.
    #[error("no other gateway serves")]
    Nobody,
    /// The gateway cannot be reached.
    #[error("{0} cannot be reached: {1}")]
    Unreachable(String, String),
    /// The gateway does not serve, or not this.
    #[error("{0} refuses: {1}")]
    Refused(String, StatusCode),
    /// The rights of the caller, or the claims of the device, are too long to be passed on.
    #[error(
        "the scope of the caller, or the claims and certificate of the device, are too long to be passed on"
    )]
    TooLong,
}

/// A link to whichever gateway serves.
pub struct GatewayLink {
    target: watch::Receiver<Option<LinkTarget>>,
    files: DatabaseTls,
    open_key: bool,
    /// Runtime of its connection, whoever makes it.
    runtime: Handle,
    current: Mutex<CurrentLink>,
}

#[derive(Default)]
struct CurrentLink {
    open: Option<(LinkTarget, SendRequest<LinkBody>)>,
    /// Last attempt that failed.
    failed: Option<(LinkTarget, Instant, LinkError)>,
}

impl GatewayLink {
    /// A link to the gateway in `target`, now and later. Certificates are read from `files` whenever a connection is made; `open_key`
    /// allows a key that others may read. In the runtime in which its connections are to run.
    pub fn new(target: watch::Receiver<Option<LinkTarget>>, files: DatabaseTls, open_key: bool) -> Self {
        Self { target, files, open_key, runtime: Handle::current(), current: Mutex::default() }
    }

    /// Opens a relay for a device. Cancel safe.
    ///
    /// # Errors
    /// [`LinkError`]; counted.
    pub async fn relay(&self, device: &RelayedDevice) -> Result<RelayStream, LinkError> {
        let opened = self.open_relay(device).await;
        count(|c| match &opened {
            Ok(_) => c.relays_out.add(1),
            Err(LinkError::Refused(..)) => c.relays_refused.add(1),
            Err(_) => c.relays_unreachable.add(1),
        });
        opened
    }

    async fn open_relay(&self, device: &RelayedDevice) -> Result<RelayStream, LinkError> {
        let (writer, body) = outgoing();
        let mut request = Request::post(RELAY).body(body_of(body)).map_err(|_| LinkError::TooLong)?;
        let header = device.to_header().and_then(|header| HeaderValue::try_from(header).ok());
        let header = header.ok_or(LinkError::TooLong)?;
        request.headers_mut().insert(DEVICE, header);
        let answer = match timeout(OPEN, self.send(request)).await {
            Ok(answer) => answer?,
            Err(_) => return Err(LinkError::Unreachable(self.name(), "no answer".to_owned())),
        };
        match answer.status() {
            StatusCode::OK => Ok(RelayStream::new(answer.into_body(), writer)),
            status => Err(LinkError::Refused(self.name(), status)),
        }
    }

    /// Passes a call on for `caller` to a home of that gateway. Dropping the answer cancels the call.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn call(
        &self,
        caller: &PassedCaller,
        home: u16,
        mut request: Request<LinkBody>,
    ) -> Result<Response<LinkBody>, LinkError> {
        let header = caller.to_header().and_then(|header| HeaderValue::try_from(header).ok());
        let header = header.ok_or(LinkError::TooLong)?;
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = path.map(Uri::from).unwrap_or_default();
        // Neither its credentials nor what only a gateway says.
        for name in [hyper::header::AUTHORIZATION.as_str(), DEVICE] {
            request.headers_mut().remove(name);
        }
        request.headers_mut().insert(CALLER, header);
        request.headers_mut().insert(HOME, HeaderValue::from(home));
        let answer = self.send(request).await?;
        count(|c| c.calls_out.add(1));
        match answer.status() {
            StatusCode::OK => Ok(answer),
            status => Err(LinkError::Refused(self.name(), status)),
        }
    }

    /// Returns whether a gateway is known that serves, and the last attempt to reach it has not failed.
    pub fn is_reachable(&self) -> bool {
        let has_failed = |current: &CurrentLink| current.failed.is_some();
        // Held by a task that makes a connection.
        self.target.borrow().is_some() && !self.current.try_lock().is_ok_and(|current| has_failed(&current))
    }

    fn name(&self) -> String {
        self.target.borrow().as_ref().map_or_else(String::new, |target| target.name.clone())
    }

    async fn send(&self, mut request: Request<LinkBody>) -> Result<Response<LinkBody>, LinkError> {
        let (name, mut sender) = self.sender().await?;
        // Absolute form, as HTTP/2 has an authority.
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
        *request.uri_mut() = Uri::builder()
            .scheme("https")
            .authority(name.as_str())
            .path_and_query(path)
            .build()
            .map_err(|error| LinkError::Unreachable(name.clone(), error.to_string()))?;
        let failed = |error: hyper::Error| LinkError::Unreachable(name.clone(), error.to_string());
        sender.ready().await.map_err(failed)?;
        let answer = sender.send_request(request).await.map_err(failed)?;
        Ok(answer.map(|body| LinkBody::new(body.map_err(Into::into))))
    }

    /// The connection to the gateway that serves now, which is made if there is none.
    async fn sender(&self) -> Result<(String, SendRequest<LinkBody>), LinkError> {
        let target = self.target.borrow().clone().ok_or(LinkError::Nobody)?;
        let mut current = self.current.lock().await;
        if let Some((to, sender)) = &current.open
            && *to == target
            && !sender.is_closed()
        {
            return Ok((target.name, sender.clone()));
        }
        current.open = None;
        if let Some((to, at, error)) = &current.failed
            && *to == target
            && at.elapsed() < PAUSE
        {
            return Err(error.clone());
        }
        let connecting = connect(target.clone(), self.files.clone(), self.open_key);
        let connecting = self.runtime.spawn(async move { timeout(CONNECT, connecting).await });
        let connected = match connecting.await {
            Ok(Ok(connected)) => connected,
            Ok(Err(_)) => Err("no answer".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        match connected {
            Ok(sender) => {
                tracing::info!(gateway = target.name, address = target.address, "link is up");
                current.open = Some((target.clone(), sender.clone()));
                current.failed = None;
                Ok((target.name, sender))
            }
            Err(reason) => {
                gateway_core::warn_limited!(
                    gateway = target.name,
                    reason,
                    "another gateway cannot be reached"
                );
                let error = LinkError::Unreachable(target.name.clone(), reason);
                current.failed = Some((target, Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

/// Connects to another gateway; the connection runs in the current runtime.
async fn connect(
    target: LinkTarget,
    files: DatabaseTls,
    open_key: bool,
) -> Result<SendRequest<LinkBody>, String> {
    let read = tokio::task::spawn_blocking(move || tls::client(&files, open_key)).await;
    let settings = read.map_err(|error| error.to_string())?.map_err(|error: TlsError| error.to_string())?;
    let settings = settings.ok_or("cluster.links.ca is not set")?;
    let name = ServerName::try_from(target.name.clone()).map_err(|error| error.to_string())?;
    let socket = TcpStream::connect(&target.address).await.map_err(|error| error.to_string())?;
    socket.set_nodelay(true).map_err(|error| error.to_string())?;
    let stream = TlsConnector::from(settings).connect(name, socket).await;
    let stream = stream.map_err(|error| edge::tls::io_in_words(&error).into_owned())?;
    let handshake = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        // Only the windows of the streams hold anybody up.
        .initial_connection_window_size(u32::MAX >> 1)
        .max_header_list_size(HEADER_LIST)
        .max_concurrent_reset_streams(1024)
        .keep_alive_interval(ASK)
        .keep_alive_timeout(ANSWER)
        .handshake::<_, LinkBody>(TokioIo::new(stream));
    let (sender, connection) = handshake.await.map_err(|error| error.to_string())?;
    tokio::spawn(async move {
        let ended = pin!(connection).await;
        tracing::debug!(error = ended.err().map(|error| error.to_string()), "link has ended");
    });
    Ok(sender)
}

/// A body of a relay.
pub(crate) fn body_of(body: Outgoing) -> LinkBody {
    LinkBody::new(body)
}

/// A body with nothing in it.
pub(crate) fn empty() -> LinkBody {
    LinkBody::new(Empty::<Bytes>::new().map_err(|never| match never {}))
}
