//! Serves a [`Site`] over HTTP/1.1, with TLS or without.
//!
//! axum answers the requests. Accepting is ours, since a connection that does not send, does not read or has shown no
//! credentials keeps its place only until another needs it, and no [kind of request](RequestKind) ever keeps another from
//! being answered.

use std::{
    future::Future,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    http::{
        HeaderValue, Request, StatusCode,
        header::{AUTHORIZATION, CONNECTION, HOST, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use broker::Account;
use edge::{
    door::{Arrival, ConnectionPermit, Door, DoorBounds, DoorListener, PendingConnection, is_this_machine},
    tls::{self, TlsHandle},
};
use gateway_core::{info_of_peer, log_limits::LineKind};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tokio_io_timeout::TimeoutWriter;
use tokio_rustls::TlsAcceptor;
use tracing::debug;

use super::{
    Site,
    client::{ENCRYPTED, HttpClient, NoSlot, PLAIN, SenderAddress, StrangerCharge, Strangers},
    json,
    limits::HttpLimits,
    pages::{Authorize, PageDenied},
    slots::{RequestKind, RequestSlots},
};
use crate::counters::count;

/// Longest time that a connection keeps its place when others wait for one.
const PATIENCE: Duration = Duration::from_millis(250);
/// Sockets that may wait for a place, as a multiple of the places.
const WAITING: usize = 4;
/// Connections beyond the slots, so that strangers find places while all slots are kept.
const STRANGERS: usize = 256;

/// Among the extensions of a request that came through TLS of this listener.
#[derive(Debug, Clone, Copy)]
pub(super) struct Encrypted;

/// State that all connections share.
struct Server {
    authorize: Authorize,
    router: TowerToHyperService<Router>,
    limits: HttpLimits,
    slots: RequestSlots,
    account: Arc<Account>,
    /// True if only this machine can connect: then requests must name it as their host.
    loopback: bool,
    stopped: watch::Receiver<bool>,
}

/// Serves until `shutdown` ends, then lets the requests under way finish. Dropped, it ends them. `tls` is looked at for
/// each connection. The holdings of connections are charged to `account`.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsHandle>,
    site: Site,
    limits: HttpLimits,
    account: Arc<Account>,
    shutdown: impl Future<Output = ()>,
) {
    let (stop, stopped) = watch::channel(false);
    let slots = RequestSlots::new(&limits);
    let places = slots.places().saturating_add(STRANGERS);
    let server = Arc::new(Server {
        authorize: Arc::clone(&site.pages.authorize),
        router: TowerToHyperService::new(site.router()),
        limits,
        slots,
        account,
        loopback: listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback()),
        stopped,
    });
    let strangers =
        Strangers::new(Arc::clone(&server.account), if tls.is_some() { ENCRYPTED } else { PLAIN });
    let patience = PATIENCE.min(limits.header_timeout / 2);
    let door = Door::alone(DoorBounds { handshakes: places, patience, ..DoorBounds::default() });
    let mut arrivals = DoorListener::new(listener, door, places.saturating_mul(WAITING));
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    let prepare = |door: &Door| {
        if strangers.are_too_many() {
            broker::counters::count(|c| c.memory_unauthenticated.add(1));
            door.shed();
        }
    };
    loop {
        let arrival = tokio::select! {
            () = &mut shutdown => break,
            arrival = arrivals.next(prepare) => arrival,
            Some(_) = connections.join_next() => continue,
        };
        match arrival {
            Arrival::Entered(stream, peer, permit, pending) => {
                let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.load_full()));
                let entrant = Entrant { peer, permit, pending, charge: strangers.enter() };
                connections.spawn(open(Arc::clone(&server), stream, tls, entrant));
            }
            Arrival::Refused(..) => {}
            Arrival::TurnedAway => count(|c| c.http_refused_waiting.add(1)),
            Arrival::Failed(error) => gateway_core::warn_limited!(%error, "http accept failed"),
        }
    }
    drop(arrivals);
    stop.send_replace(true);
    let finished = async { while connections.join_next().await.is_some() {} };
    let _ = timeout(limits.header_timeout, finished).await;
}

/// Client that has come through the door, with its holdings.
struct Entrant {
    peer: SocketAddr,
    permit: ConnectionPermit,
    pending: PendingConnection,
    charge: StrangerCharge,
}

/// One connection, with TLS first where there is.
async fn open(server: Arc<Server>, stream: TcpStream, tls: Option<TlsAcceptor>, entrant: Entrant) {
    let stream = within(stream, server.limits.write_timeout);
    let Some(acceptor) = tls else { return run(&server, stream, false, entrant).await };
    let handshake = pin!(timeout(server.limits.header_timeout, acceptor.accept(stream)));
    let shaken = entrant.pending.attend(handshake).await;
    match &shaken {
        Some(Ok(Ok(_))) => edge::counters::count(|c| c.handshake_tls_ok.add(1)),
        Some(_) => edge::counters::count(|c| c.handshake_tls_failed.add(1)),
        None => count(|c| c.http_refused_silent.add(1)),
    }
    let peer = entrant.peer;
    match shaken {
        Some(Ok(Ok(stream))) => run(&server, stream, true, entrant).await,
        Some(Ok(Err(error))) => {
            let (listener, reason) = ("http", tls::io_in_words(&error));
            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener, reason = %reason, "TLS handshake failed");
        }
        Some(Err(_)) => {
            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener = "http", "handshake timed out");
        }
        None => debug!("http connection closed for another"),
    }
}

/// The stream, whose writes fail once the peer has read nothing for so long.
fn within<S: AsyncRead + AsyncWrite>(stream: S, write_timeout: Duration) -> Pin<Box<TimeoutWriter<S>>> {
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(write_timeout));
    Box::pin(stream)
}

/// The requests of one connection.
async fn run(
    server: &Server,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    encrypted: bool,
    Entrant { peer, permit, pending, charge }: Entrant,
) {
    let client = Arc::new(HttpClient::new(pending, peer, Arc::clone(&server.account), charge));
    let service =
        service_fn(async |mut request: Request<Incoming>| match server.refusal(&request, &client) {
            Some(refusal) => Ok(refusal),
            None => {
                request.extensions_mut().insert(SenderAddress(peer));
                if encrypted {
                    request.extensions_mut().insert(Encrypted);
                }
                request.extensions_mut().insert(Arc::clone(&client));
                let mut response = server.router.call(request).await;
                if let Ok(response) = &mut response
                    && client.leaves()
                {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                response
            }
        });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(server.limits.header_timeout)
            .max_buf_size(16 << 10)
            .serve_connection(TokioIo::new(stream), service)
    );
    let mut stopped = server.stopped.clone();
    let served = pin!(async {
        tokio::select! {
            result = connection.as_mut() => result,
            () = async { drop(stopped.wait_for(|stop| *stop).await) } => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    });
    let ended = tokio::select! {
        biased;
        ended = client.pending().attend(served) => ended,
        () = client.lost() => None,
    };
    match ended {
        Some(Ok(())) => {}
        Some(Err(error)) => {
            count(|c| c.http_failed.add(1));
            debug!(%error, "http connection ended");
        }
        None => {
            count(|c| c.http_refused_silent.add(1));
            debug!("http connection closed for another");
        }
    }
    drop(permit);
}

impl Server {
    /// Takes a slot among those who ask for the same kind of thing; `Some` if it may not have one. The client has it until the
    /// connection's next request, since it has yet to read the answer.
    fn refusal<B>(&self, request: &Request<B>, client: &HttpClient) -> Option<Response> {
        let refuse = |status, why: &'static str| Some((status, [(CONNECTION, "close")], why).into_response());
        if self.loopback && !names_this_machine(request) {
            let why = "this page is for this machine only: ask for localhost, 127.0.0.1 or [::1]\n";
            return refuse(StatusCode::MISDIRECTED_REQUEST, why);
        }
        let kind = RequestKind::of(request.uri().path());
        // The API decides itself which callers see which data.
        if kind == RequestKind::Page {
            match self.authorized(request, client.peer().ip()) {
                Ok(()) => {}
                Err(PageDenied::Unknown) => {
                    let headers = [(CONNECTION, "close"), (WWW_AUTHENTICATE, "Bearer")];
                    let why = "send 'Authorization: Bearer TOKEN' with a token that 'mqtt-server token create' made\n";
                    return Some((StatusCode::UNAUTHORIZED, headers, why).into_response());
                }
                Err(PageDenied::Forbidden) => {
                    return refuse(StatusCode::FORBIDDEN, "this needs a scope of all devices\n");
                }
            }
        }
        if !client.take_slot(&self.slots, kind) {
            count(|c| c.http_refused_busy.add(1));
            if matches!(kind, RequestKind::Api | RequestKind::Stream) {
                return Some(json::busy());
            }
            return refuse(StatusCode::SERVICE_UNAVAILABLE, "too many connections read this\n");
        }
        // Nobody else gets this far.
        let kept = if kind == RequestKind::Page { client.keep_at_address() } else { Ok(()) };
        match kept {
            Ok(()) => None,
            Err(NoSlot::Share) => {
                refuse(StatusCode::TOO_MANY_REQUESTS, "too many connections of yours read this\n")
            }
            Err(NoSlot::Memory) => {
                refuse(StatusCode::SERVICE_UNAVAILABLE, "the gateway's memory budget is used up\n")
            }
        }
    }
}

impl Server {
    /// Returns whether the sender may see more than health. A request with two identities may not.
    fn authorized<B>(&self, request: &Request<B>, peer: IpAddr) -> Result<(), PageDenied> {
        let mut values = request.headers().get_all(AUTHORIZATION).iter();
        let value = values.next().map(|value| value.as_bytes());
        let value = if values.next().is_some() { Some(&b""[..]) } else { value };
        (self.authorize)(value, peer)
    }
}

/// Returns whether all hosts named in the request are this machine. A request without a host is no browser's.
fn names_this_machine<B>(request: &Request<B>) -> bool {
    let hosts = request.headers().get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
    let target = request.uri().authority().map(|authority| authority.as_str());
    hosts.chain(target).all(is_this_machine)
}

#[cfg(test)]
mod tests {
    use std::{
        net::SocketAddr,
        sync::atomic::{AtomicBool, Ordering::Relaxed},
    };

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
        sync::oneshot,
        task::JoinHandle,
    };

    use super::*;
    use crate::MonitoringPages;

    struct Server {
        addr: SocketAddr,
        ready: Arc<AtomicBool>,
        stop: Option<oneshot::Sender<()>>,
        task: JoinHandle<()>,
    }

    async fn start(limits: HttpLimits) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let ready = Arc::new(AtomicBool::new(true));
        let flag = Arc::clone(&ready);
        let pages = MonitoringPages {
            stands_by: Arc::new(|| false),
            authorize: Arc::new(|value, _| match value {
                Some(b"Bearer small") => Err(PageDenied::Forbidden),
                Some(b"Bearer wrong" | b"") => Err(PageDenied::Unknown),
                _ => Ok(()),
            }),
            render: Arc::new(|| "x 1\n".to_owned()),
            ready: Arc::new(move || {
                flag.load(Relaxed).then(|| "ready\n".to_owned()).ok_or_else(|| "draining".to_owned())
            }),
        };
        let (stop, stopped) = oneshot::channel();
        let site = Site { pages, more: Vec::new() };
        let account = Arc::new(Account::new(1 << 30));
        let stopped = async { stopped.await.unwrap_or(()) };
        let task = tokio::spawn(serve(listener, None, site, limits, account, stopped));
        Server { addr, ready, stop: Some(stop), task }
    }

    /// In virtual time.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_now_and_then_is_waited_for_others_given_up() {
        let (ours, mut theirs) = tokio::io::duplex(4);
        let mut stream = within(ours, Duration::from_secs(10));
        let reader = tokio::spawn(async move {
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                theirs.read_exact(&mut [0; 4]).await.unwrap();
            }
            theirs
        });
        stream.write_all(&[0; 16]).await.unwrap();
        let _theirs = reader.await.unwrap();
        let error = stream.write_all(&[0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    }

    async fn get(addr: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = format!("{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn pages_answer_as_tools_expect() {
        let server = start(HttpLimits::default()).await;
        let metrics = get(server.addr, "GET /metrics").await;
        assert!(metrics.starts_with("HTTP/1.1 200") && metrics.ends_with("\r\n\r\nx 1\n"), "{metrics}");
        assert!(metrics.contains("version=0.0.4"));
        assert!(get(server.addr, "GET /healthz").await.starts_with("HTTP/1.1 200"));
        assert!(get(server.addr, "GET /readyz").await.starts_with("HTTP/1.1 200"));
        server.ready.store(false, Relaxed);
        let answer = get(server.addr, "GET /readyz?x=1").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("draining"), "{answer}");
        assert!(get(server.addr, "GET /healthz").await.starts_with("HTTP/1.1 200"));
        assert!(get(server.addr, "GET /other").await.starts_with("HTTP/1.1 404"));
        let answer = get(server.addr, "POST /metrics").await.to_lowercase();
        assert!(answer.starts_with("http/1.1 405") && answer.contains("allow: get, head"), "{answer}");
        assert!(get(server.addr, "HEAD /metrics").await.ends_with("\r\n\r\n"));
        assert!(get(server.addr, "OPTIONS *").await.starts_with("HTTP/1.1 404"));
        assert!(get(server.addr, "CONNECT localhost:80").await.starts_with("HTTP/1.1 404"));
    }

    #[tokio::test]
    async fn metrics_are_for_those_who_may_and_health_for_everybody() {
        let server = start(HttpLimits::default()).await;
        for (path, header, code) in [
            ("/metrics", "", "200"),
            ("/metrics", "\r\nAuthorization: Bearer good", "200"),
            ("/metrics", "\r\nAuthorization: Bearer wrong", "401"),
            ("/metrics", "\r\nAuthorization: Bearer good\r\nAuthorization: Bearer good", "401"),
            ("/metrics", "\r\nAuthorization: Bearer small", "403"),
            ("/other", "\r\nAuthorization: Bearer wrong", "401"),
            ("/healthz", "\r\nAuthorization: Bearer wrong", "200"),
            ("/readyz", "\r\nAuthorization: Bearer small", "200"),
        ] {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            let request =
                format!("GET {path} HTTP/1.1\r\nHost: localhost{header}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{path}{header}: {answer}");
            assert_eq!(answer.contains("x 1"), path == "/metrics" && code == "200");
            assert_eq!(answer.to_lowercase().contains("www-authenticate: bearer"), code == "401");
        }
    }

    #[tokio::test]
    async fn a_client_that_sends_nothing_loses_its_slot() {
        let header_timeout = Duration::from_millis(50);
        let limits = HttpLimits { max_connections: 1, header_timeout, ..HttpLimits::default() };
        let server = start(limits).await;
        let mut silent = TcpStream::connect(server.addr).await.unwrap();
        silent.write_all(b"GET /met").await.unwrap();
        let answer = get(server.addr, "GET /healthz").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    #[tokio::test]
    async fn it_ends_on_shutdown_with_idle_connections_open() {
        let mut server = start(HttpLimits::default()).await;
        let mut idle = TcpStream::connect(server.addr).await.unwrap();
        idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        idle.read_u8().await.unwrap();
        server.stop.take().unwrap().send(()).unwrap();
        timeout(Duration::from_secs(60), server.task).await.unwrap().unwrap();
    }

    /// No timeout frees a place within the test.
    fn patient(max_connections: usize) -> HttpLimits {
        let hour = Duration::from_secs(3_600);
        HttpLimits { max_connections, header_timeout: hour, write_timeout: hour, ..HttpLimits::default() }
    }

    #[tokio::test]
    async fn health_is_answered_while_others_send_nothing_or_read_nothing() {
        let server = start(patient(4)).await;
        let mut others = Vec::new();
        for number in 0..32 {
            let mut other = TcpStream::connect(server.addr).await.unwrap();
            let requests = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(number);
            other.write_all(&requests.as_bytes()[..requests.len().saturating_sub(number % 2)]).await.unwrap();
            others.push(other);
        }
        for path in ["/healthz", "/readyz"] {
            assert!(get(server.addr, &format!("GET {path}")).await.starts_with("HTTP/1.1 200"), "{path}");
        }
    }

    /// The failure: one client without a token asks for health now and then on as many connections as there are slots, and
    /// supervisors get 503.
    #[tokio::test]
    async fn an_answer_about_health_or_of_nothing_ends_its_connection() {
        let server = start(patient(1)).await;
        for path in ["/healthz", "/readyz", "/page/nothing"] {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            let read = stream.read_to_string(&mut answer);
            timeout(Duration::from_secs(60), read).await.expect("the end of the connection").unwrap();
            assert!(answer.to_lowercase().contains("connection: close"), "{path}: {answer}");
        }
    }

    #[tokio::test]
    async fn readers_of_pages_leave_the_slots_of_health_free() {
        let server = start(patient(2)).await;
        let mut readers = Vec::new();
        for _ in 0..2 {
            let mut reader = TcpStream::connect(server.addr).await.unwrap();
            reader.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
            assert_eq!(reader.read_u8().await.unwrap(), b'H');
            readers.push(reader);
        }
        assert!(get(server.addr, "GET /metrics").await.starts_with("HTTP/1.1 503"));
        assert!(get(server.addr, "GET /healthz").await.starts_with("HTTP/1.1 200"));
        readers.pop();
        while get(server.addr, "GET /metrics").await.starts_with("HTTP/1.1 503") {}
    }

    #[tokio::test]
    async fn a_page_led_here_under_another_name_is_not_answered() {
        let server = start(HttpLimits::default()).await;
        let ask = async |head: &str| {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        for host in ["localhost", "LOCALHOST:9090", "127.0.0.1:1", "[::1]", "[::1]:9090"] {
            let answer = ask(&format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n")).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{host}: {answer}");
        }
        for head in [
            "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n",
            "GET /healthz HTTP/1.1\r\nHost: evil.example:9090\r\n",
            "GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n",
            "GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n",
        ] {
            let answer = ask(head).await;
            assert!(answer.starts_with("HTTP/1.1 4") && !answer.contains("x 1"), "{head}: {answer}");
        }
        assert!(ask("GET /metrics HTTP/1.0\r\n").await.starts_with("HTTP/1.0 200"), "no browser's");
    }
}
