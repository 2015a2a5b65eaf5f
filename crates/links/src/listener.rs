//! Lets the gateways of the cluster in. Whoever shows no certificate of the cluster's authority, or one with the name of no
//! member, learns nothing and holds a place for a moment only.

use std::{
    convert::Infallible, future::Future, net::SocketAddr, pin::Pin, pin::pin, sync::Arc, time::Duration,
};

use edge::{
    door::{Arrival, Door, DoorBounds, DoorListener},
    tls::{self as edge_tls, TlsHandle},
};
use gateway_core::{info_of_peer, log_limits::LineKind};
use http_body_util::BodyExt as _;
use hyper::{
    HeaderMap, Request, Response, StatusCode, body::Incoming, server::conn::http2, service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    CALLER, DEVICE, HEADER_LIST, HOME, LinkAnswer, LinkBody, LinkRequest, PassedCaller, RELAY, RelayStream,
    RelayedDevice, STREAM_WINDOW,
    counters::count,
    link::{body_of, empty},
    stream::outgoing,
    tls,
};

/// Connections at once. A gateway has two to each other one.
const MOST_LINKS: usize = 64;
const MOST_LINKS_OF_ADDRESS: usize = 16;

/// Handshakes at once, and sockets that wait for one.
const MOST_HANDSHAKES: usize = 16;
const MOST_WAITING: usize = 64;

/// Time for TLS, and for the question whether the peer is a member.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// A handshake that is silent for so long leaves for another.
const PATIENCE: Duration = Duration::from_millis(250);

/// Relays and calls of one link.
const MOST_STREAMS: u32 = 1 << 20;

/// A link on which nothing comes is asked so often, and is gone without an answer in [`ANSWER`].
const ASK: Duration = Duration::from_secs(2);
const ANSWER: Duration = Duration::from_secs(3);

/// Knows the members of the cluster.
pub trait Members: Send + Sync + 'static {
    /// Returns whether a node of the cluster has this name. Cancel safe.
    fn has<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>>;
}

/// Takes what other gateways ask for.
pub trait LinkHandler: Send + Sync + 'static {
    /// Takes a device that another gateway has admitted; its CONNECT is the first that `stream` reads. False if this gateway does not
    /// serve its home.
    fn relay(&self, device: RelayedDevice, stream: RelayStream) -> bool;

    /// Answers a call at a home for its caller; `None` if this gateway does not serve that home.
    fn call(
        &self,
        home: u16,
        caller: PassedCaller,
        request: LinkRequest,
    ) -> Option<Pin<Box<dyn Future<Output = LinkAnswer> + Send>>>;
}

/// The socket of links.
pub struct LinkListener {
    socket: TcpListener,
    tls: TlsHandle,
    members: Arc<dyn Members>,
    handler: Arc<dyn LinkHandler>,
}

impl LinkListener {
    /// A listener. `tls` must require client certificates of the cluster's authority.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn new(
        socket: std::net::TcpListener,
        tls: TlsHandle,
        members: Arc<dyn Members>,
        handler: Arc<dyn LinkHandler>,
    ) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: TcpListener::from_std(socket)?, tls, members, handler })
    }

    /// Serves for ever. Dropping the future ends all links.
    pub async fn run(self) {
        let Self { socket, tls, members, handler } = self;
        let door = Door::alone(DoorBounds {
            connections: MOST_LINKS + MOST_HANDSHAKES,
            connections_per_address: MOST_LINKS_OF_ADDRESS,
            handshakes: MOST_HANDSHAKES,
            patience: PATIENCE,
            ..DoorBounds::default()
        });
        let mut arrivals = DoorListener::new(socket, door, MOST_WAITING);
        let mut links = JoinSet::new();
        loop {
            let arrival = tokio::select! {
                arrival = arrivals.next(|_| ()) => arrival,
                Some(_) = links.join_next() => continue,
            };
            let (socket, peer, permit, pending) = match arrival {
                Arrival::Entered(socket, peer, permit, pending) => (socket, peer, permit, pending),
                Arrival::Refused(..) | Arrival::TurnedAway => {
                    count(|c| c.refused_door.add(1));
                    continue;
                }
                Arrival::Failed(error) => {
                    gateway_core::warn_limited!(%error, "accepting a link failed");
                    continue;
                }
            };
            let acceptor = TlsAcceptor::from(tls.load_full());
            let (members, handler) = (Arc::clone(&members), Arc::clone(&handler));
            links.spawn(async move {
                let handshake = pin!(timeout(HANDSHAKE, enter(socket, peer, acceptor, &*members)));
                let entered = pending.attend(handshake).await;
                drop(pending);
                let Some(Ok(Some((name, stream)))) = entered else { return };
                count(|c| c.accepted.add(1));
                tracing::info!(%peer, gateway = name, "link of another gateway");
                serve(stream, handler).await;
                drop(permit);
            });
        }
    }
}

/// Brings TLS up, and returns the member's name with the connection.
async fn enter(
    socket: TcpStream,
    peer: SocketAddr,
    acceptor: TlsAcceptor,
    members: &dyn Members,
) -> Option<(String, TlsStream<TcpStream>)> {
    let _ = socket.set_nodelay(true);
    let stream = match acceptor.accept(socket).await {
        Ok(stream) => stream,
        Err(error) => {
            count(|c| c.refused_tls.add(1));
            let reason = edge_tls::io_in_words(&error);
            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, reason = &*reason, "TLS handshake of a link failed");
            return None;
        }
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let names = certificate.map(|der| tls::names(der)).unwrap_or_default();
    for name in &names {
        if members.has(name).await {
            return Some((name.clone(), stream));
        }
    }
    count(|c| c.refused_stranger.add(1));
    let names = names.join(" ");
    info_of_peer!(LineKind::Handshake, peer.ip(), %peer, names, "link refused: no member of the cluster has a name of its certificate");
    None
}

async fn serve(stream: TlsStream<TcpStream>, handler: Arc<dyn LinkHandler>) {
    let service = service_fn(move |request| {
        let answer = answer(request, &*handler);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let served = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(u32::MAX >> 1)
        .max_concurrent_streams(MOST_STREAMS)
        .max_header_list_size(HEADER_LIST)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .keep_alive_interval(ASK)
        .keep_alive_timeout(ANSWER)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    tracing::debug!(error = served.err().map(|error| error.to_string()), "link of another gateway has ended");
}

/// The answer to one request of a member.
fn answer(
    request: Request<Incoming>,
    handler: &dyn LinkHandler,
) -> Pin<Box<dyn Future<Output = LinkAnswer> + Send>> {
    let at_once = |status| Box::pin(std::future::ready(status_only(status))) as Pin<Box<_>>;
    let mut request = request.map(|body| LinkBody::new(body.map_err(Into::into)));
    if request.uri().path() == RELAY {
        let Some(device) = header(request.headers(), DEVICE).and_then(RelayedDevice::from_header) else {
            return at_once(StatusCode::BAD_REQUEST);
        };
        let (writer, body) = outgoing();
        if !handler.relay(device, RelayStream::new(request.into_body(), writer)) {
            return at_once(StatusCode::SERVICE_UNAVAILABLE);
        }
        count(|c| c.relays_in.add(1));
        return Box::pin(std::future::ready(Response::new(body_of(body))));
    }
    let Some(caller) = header(request.headers(), CALLER).and_then(PassedCaller::from_header) else {
        return at_once(StatusCode::BAD_REQUEST);
    };
    request.headers_mut().remove(CALLER);
    let home = match request.headers_mut().remove(HOME) {
        None => Some(0),
        Some(value) => value.to_str().ok().and_then(|value| value.parse().ok()),
    };
    let Some(home) = home else { return at_once(StatusCode::BAD_REQUEST) };
    match handler.call(home, caller, request) {
        Some(answer) => {
            count(|c| c.calls_in.add(1));
            answer
        }
        None => at_once(StatusCode::SERVICE_UNAVAILABLE),
    }
}

/// The only value of a header.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.as_bytes();
    values.next().is_none().then_some(value)
}

/// The answer to a call for a home that is not here.
pub fn not_here() -> LinkAnswer {
    status_only(StatusCode::SERVICE_UNAVAILABLE)
}

fn status_only(status: StatusCode) -> LinkAnswer {
    let mut answer = Response::new(empty());
    *answer.status_mut() = status;
    answer
}
