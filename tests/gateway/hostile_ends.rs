//! Services and brokers that the gateway calls and that send without end. Each costs a bounded amount of work: its
//! connection ends.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use codec::Packet;
use gateway_core::Protocol;
use socket2::SockRef;

use crate::{
    client::{Client, Got},
    login::login,
    support::{Server, until},
};

/// Bytes after which a connection counts as one that never ends: many times what sockets hold.
const MOST: usize = 64 << 20;

/// Floods each connection that the gateway makes.
struct Flooder {
    port: u16,
    counts: Arc<FloodCounts>,
}

#[derive(Default)]
struct FloodCounts {
    /// Connections that the gateway ended.
    ended: AtomicUsize,
    /// Connections on which it read everything.
    swallowed: AtomicUsize,
}

impl Flooder {
    /// Says `greeting` when the first bytes of the gateway have come, and then `flood` again and again.
    fn start(greeting: &'static [u8], flood: &'static [u8]) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = socket.local_addr().expect("an address").port();
        let counts = Arc::new(FloodCounts::default());
        let counting = Arc::clone(&counts);
        thread::spawn(move || {
            for stream in socket.incoming() {
                let Ok(stream) = stream else { return };
                let counts = Arc::clone(&counting);
                thread::spawn(move || match pour(stream, greeting, flood) {
                    Ok(()) => counts.swallowed.fetch_add(1, Relaxed),
                    Err(_) => counts.ended.fetch_add(1, Relaxed),
                });
            }
        });
        Self { port, counts }
    }

    /// Waits until the gateway has ended a connection.
    fn is_ended(&self, flood: &[u8]) {
        let of = |count: &AtomicUsize| count.load(Relaxed);
        until(|| of(&self.counts.ended) + of(&self.counts.swallowed) > 0);
        let flood = String::from_utf8_lossy(flood);
        assert_eq!(of(&self.counts.swallowed), 0, "the gateway has read {MOST} bytes of {flood:?}");
    }
}

fn pour(mut stream: TcpStream, greeting: &[u8], flood: &[u8]) -> std::io::Result<()> {
    SockRef::from(&stream).set_send_buffer_size(64 << 10)?;
    let mut first = [0; 1];
    stream.read_exact(&mut first)?;
    let mut answers = stream.try_clone()?;
    // The gateway's answers are read, or it would stop by itself.
    thread::spawn(move || while answers.read(&mut [0; 1 << 16]).is_ok_and(|bytes| bytes > 0) {});
    stream.write_all(greeting)?;
    let many = flood.repeat((64 << 10) / flood.len());
    for _ in 0..MOST / many.len() {
        stream.write_all(&many)?;
    }
    Ok(())
}

/// A login that waits for the service.
fn login_begins(server: &Server, client_id: &str) -> Client {
    let mut client = Client::open(server.ports.tcp, Protocol::V5);
    client.send(&Packet::Connect(Box::new(login(Protocol::V5, client_id, Some("ann"), Some("pw")))));
    client
}

/// The failure: a service keeps a core of the gateway busy with one answer, until the deadline of a login or for ever.
#[test]
fn answers_of_an_http_service_that_never_end_are_not_read_on() {
    for (greeting, flood) in [
        (&b""[..], &b"HTTP/1.1 100 Continue\r\n\r\n"[..]),
        (b"", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1", b";a=b"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
    ] {
        let service = Flooder::start(greeting, flood);
        let toml = format!(
            "[limits]\nconnect_timeout = \"1h\"\n[auth.http]\nurl = \"http://127.0.0.1:{}/\"\n\
             limits.deadline = \"1h\"\n",
            service.port
        );
        let server = Server::start_with(&[], &toml);
        let mut client = login_begins(&server, "c");
        service.is_ended(flood);
        assert_eq!(client.next(), Got::ConnAck(0x88), "{}", String::from_utf8_lossy(flood));
    }
}

/// The failure: a service keeps a core busy with frames of HTTP/2 that nobody has asked for, as long as the connection is there.
#[test]
fn floods_of_http2_frames_of_a_grpc_service_end_its_connection() {
    const SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0";
    for flood in [
        // PING, SETTINGS, PRIORITY, and a type that nobody knows.
        &b"\0\0\x08\x06\0\0\0\0\0abcdefgh"[..],
        SETTINGS,
        b"\0\0\x05\x02\0\0\0\0\x01\0\0\0\0\x10",
        b"\0\0\0\x42\0\0\0\0\0",
    ] {
        let service = Flooder::start(SETTINGS, flood);
        let toml = format!(
            "[limits]\nconnect_timeout = \"1h\"\n[auth.grpc]\nurl = \"http://127.0.0.1:{}\"\n\
             limits.deadline = \"1h\"\n",
            service.port
        );
        let server = Server::start_with(&[], &toml);
        let mut client = login_begins(&server, "c");
        service.is_ended(flood);
        assert_eq!(client.next(), Got::ConnAck(0x88), "{flood:?}");
    }
}

/// The failure: a broker keeps a core busy with answers to nothing.
#[test]
fn answers_of_a_broker_that_nobody_asked_for_end_its_bridge() {
    for direction in ["out", "in"] {
        let greeting: &'static [u8] = match direction {
            "out" => b"\x20\x03\0\0\0",
            _ => b"\x20\x03\0\0\0\x90\x04\0\x01\0\0",
        };
        // PUBACK, PINGRESP and SUBACK.
        for flood in [&b"\x40\x02\0\x07"[..], b"\xd0\0", b"\x90\x04\0\x07\0\0"] {
            let broker = Flooder::start(greeting, flood);
            let toml = format!(
                "[bridges.b]\ndirection = \"{direction}\"\ntopics = [\"d/#\"]\n\
                 [bridges.b.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n",
                broker.port
            );
            let server = Server::start_with(&[], &toml);
            broker.is_ended(flood);
            until(|| server.metric_of("gateway_bridge_failures_total", "reason=\"failed\"") > 0);
        }
    }
}
