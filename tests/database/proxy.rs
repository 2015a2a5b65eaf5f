//! A TCP proxy in front of a database, which delays what passes or cuts all connections.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::sync_channel,
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Chunks on their way through one connection.
const UNDER_WAY: usize = 4096;

/// Ends with the test's process.
pub(crate) struct Proxy {
    pub(crate) address: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    cut: AtomicBool,
    delay_ms: AtomicU64,
    /// Of both sides.
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// In front of `upstream`; everything passes.
    pub(crate) fn start(upstream: &str) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind a port");
        let address = listener.local_addr().expect("its address").to_string();
        let (state, upstream) = (Arc::new(State::default()), upstream.to_owned());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Without a database it ends at once, as it does while cut.
                if let Ok(server) = TcpStream::connect(&upstream) {
                    shared.join(client, server);
                }
            }
        });
        Self { address, state }
    }

    /// Ends all connections, and those that come from now on.
    pub(crate) fn cut(&self) {
        self.state.cut.store(true, Relaxed);
        for stream in self.state.open.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Everything passes again.
    pub(crate) fn mend(&self) {
        self.state.cut.store(false, Relaxed);
    }

    /// Every request takes so much longer from now on.
    pub(crate) fn delay(&self, by: Duration) {
        self.state.delay_ms.store(by.as_millis() as u64, Relaxed);
    }
}

impl State {
    fn join(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        let both = || Some((client.try_clone().ok()?, server.try_clone().ok()?));
        let (Some(forth), Some(back), Some(kept)) = (both(), both(), both()) else { return };
        {
            let mut open = self.open.lock();
            if self.cut.load(Relaxed) {
                return;
            }
            open.extend([kept.0, kept.1]);
        }
        self.pump(forth.0, forth.1, true);
        self.pump(back.1, back.0, false);
    }

    /// Moves bytes in order; those that are `delayed` leave that much later than they came.
    #[expect(clippy::disallowed_methods, reason = "a delay needs the real clock")]
    fn pump(self: &Arc<Self>, mut from: TcpStream, mut to: TcpStream, delayed: bool) {
        let (sender, receiver) = sync_channel::<(Instant, Vec<u8>)>(UNDER_WAY);
        let state = Arc::clone(self);
        thread::spawn(move || {
            let mut chunk = vec![0; 65_536];
            while let Ok(count @ 1..) = from.read(&mut chunk) {
                let delay = if delayed { state.delay_ms.load(Relaxed) } else { 0 };
                let due = Instant::now() + Duration::from_millis(delay);
                if sender.send((due, chunk[..count].to_vec())).is_err() {
                    break;
                }
            }
        });
        thread::spawn(move || {
            while let Ok((due, bytes)) = receiver.recv() {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}
