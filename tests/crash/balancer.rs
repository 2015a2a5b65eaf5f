//! A TCP balancer before two gateways, as docs/guides/two-gateways.md sets HAProxy up: clients come to the one that is ready.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use super::support::local;

/// Time between two questions to a gateway.
const INTERVAL: Duration = Duration::from_millis(200);
/// A gateway that does not answer for this long is not ready.
const SILENCE: Duration = Duration::from_millis(1_000);

/// A gateway behind the balancer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gateway {
    pub(crate) mqtt: u16,
    pub(crate) http: u16,
}

/// Ends its threads when it is dropped.
pub(crate) struct Balancer {
    port: u16,
    state: Arc<BalancerState>,
}

#[derive(Default)]
struct BalancerState {
    over: AtomicBool,
    ready: [AtomicBool; 2],
    /// Every other connection to each gateway, ended when that is not ready any more. The rest stays: of these the gateway itself has
    /// to take care.
    ended: [Mutex<Vec<TcpStream>>; 2],
}

impl Balancer {
    pub(crate) fn start(to: [Gateway; 2]) -> Self {
        let listener = TcpListener::bind(local(0)).expect("bind the balancer");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(BalancerState::default());
        for (number, gateway) in to.into_iter().enumerate() {
            let state = Arc::clone(&state);
            thread::spawn(move || state.watch(number, gateway.http));
        }
        let balancer = Self { port, state: Arc::clone(&state) };
        thread::spawn(move || state.accept(&listener, to));
        balancer
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.state.over.store(true, SeqCst);
        let _ = TcpStream::connect(local(self.port));
    }
}

impl BalancerState {
    fn accept(&self, listener: &TcpListener, to: [Gateway; 2]) {
        for (count, client) in listener.incoming().enumerate() {
            if self.over.load(SeqCst) {
                return;
            }
            let Ok(client) = client else { continue };
            // In turn, if both say that they are ready. One that has just begun to serve listens already.
            let turn = [count % 2, 1 - count % 2];
            let ready = turn.into_iter().filter(|number| self.ready[*number].load(SeqCst));
            let connected = ready.chain(turn).find_map(|number| {
                TcpStream::connect(local(to[number].mqtt)).ok().map(|server| (number, server))
            });
            let Some((number, server)) = connected else { continue };
            join(&client, &server);
            if count % 4 < 2 {
                let mut ended = self.ended[number].lock();
                ended.retain(|stream| stream.peer_addr().is_ok());
                ended.push(server);
            }
        }
    }

    fn watch(&self, number: usize, http: u16) {
        while !self.over.load(SeqCst) {
            let is_ready =
                http_get(http, "/readyz", SILENCE).is_some_and(|answer| answer.starts_with("HTTP/1.1 200"));
            if self.ready[number].swap(is_ready, SeqCst) && !is_ready {
                for stream in self.ended[number].lock().drain(..) {
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            thread::sleep(INTERVAL);
        }
    }
}

/// Copies both ways until one side ends, and then ends the other.
fn join(client: &TcpStream, server: &TcpStream) {
    for (from, to) in [(client, server), (server, client)] {
        let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
        let _ = (from.set_nodelay(true), to.set_nodelay(true));
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    }
}

/// Asks over HTTP, and returns status line, header and body; `None` without an answer.
pub(crate) fn http_get(port: u16, path: &str, limit: Duration) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&local(port), limit).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}
