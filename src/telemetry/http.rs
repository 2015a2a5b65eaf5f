//! The page for operators: `/metrics`, `/healthz`, `/readyz` over HTTP/1.1.

use std::{convert::Infallible, future::Future, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};
use tracing::{debug, warn};

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What the pages show.
#[derive(Clone)]
pub struct Pages {
    /// Text of `/metrics`.
    pub render: Arc<dyn Fn() -> String + Send + Sync>,
    /// What to say when the gateway takes connections; if it does not, why.
    pub ready: Arc<dyn Fn() -> Result<String, String> + Send + Sync>,
}

/// Bounds of the server.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Connections at once; more wait in the kernel's queue.
    pub max_connections: usize,
    /// Time for a request's header, also between requests.
    pub header_timeout: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self { max_connections: 64, header_timeout: Duration::from_secs(10) }
    }
}

/// Serves until `shutdown` ends, then lets the requests under way finish.
pub async fn serve(
    listener: TcpListener,
    pages: Pages,
    limits: HttpLimits,
    shutdown: impl Future<Output = ()>,
) {
    let slots = Arc::new(Semaphore::new(limits.max_connections));
    let (stop, stopped) = watch::channel(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let accept = async {
            // The semaphore is never closed.
            let slot = Arc::clone(&slots).acquire_owned().await.ok()?;
            Some((slot, listener.accept().await))
        };
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = accept => accepted,
        };
        let Some((slot, accepted)) = accepted else { break };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "http accept failed");
                // Out of descriptors, most likely: do not spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let pages = pages.clone();
        let mut stopped = stopped.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let response = answer(&pages, &request);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut connection = pin!(
                http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(limits.header_timeout)
                    .max_buf_size(16 << 10)
                    .serve_connection(TokioIo::new(stream), service)
            );
            let result = tokio::select! {
                result = connection.as_mut() => result,
                () = async { drop(stopped.wait_for(|stop| *stop).await) } => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = result {
                debug!(%error, "http connection ended");
            }
            drop(slot);
        });
    }
    stop.send_replace(true);
    let all = u32::try_from(limits.max_connections).unwrap_or(u32::MAX);
    let finished = slots.acquire_many(all);
    let _ = tokio::time::timeout(limits.header_timeout, finished).await;
}

fn answer(pages: &Pages, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let known = matches!(request.uri().path(), "/metrics" | "/healthz" | "/readyz");
    if !known {
        return text(StatusCode::NOT_FOUND, TEXT, "not found; try /metrics, /healthz or /readyz\n");
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/metrics" => text(StatusCode::OK, PROMETHEUS, (pages.render)()),
        "/readyz" => match (pages.ready)() {
            Ok(state) => text(StatusCode::OK, TEXT, state),
            Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("not ready: {why}\n")),
        },
        _ => text(StatusCode::OK, TEXT, "ok\n"),
    }
}

fn text(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
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
        let pages = Pages {
            render: Arc::new(|| "x 1\n".to_owned()),
            ready: Arc::new(move || {
                flag.load(Relaxed).then(|| "ready\n".to_owned()).ok_or_else(|| "draining".to_owned())
            }),
        };
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(serve(listener, pages, limits, async { stopped.await.unwrap_or(()) }));
        Server { addr, ready, stop: Some(stop), task }
    }

    async fn get(addr: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
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
    }

    #[tokio::test]
    async fn a_client_that_sends_nothing_loses_its_slot() {
        let limits = HttpLimits { max_connections: 1, header_timeout: Duration::from_millis(50) };
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
        idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        idle.read_u8().await.unwrap();
        server.stop.take().unwrap().send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(60), server.task).await.unwrap().unwrap();
    }
}
