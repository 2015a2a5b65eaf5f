//! A broker that does with each PUBLISH what a test says.

use std::{
    collections::BTreeSet,
    io::Write as _,
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use codec::{Ack, Disconnect, Packet, SubAck};
use gateway_core::Protocol;
use parking_lot::Mutex;

use crate::client::{Client, decoded};

/// Answer of the broker to a PUBLISH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// PUBACK with success.
    Take,
    /// The connection ends, without a word.
    Close,
    /// DISCONNECT with this reason, and the connection ends.
    Disconnect(u8),
    /// Nothing, for ever.
    Ignore,
}

/// Packet of the bridge after which each connection ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum EndsAfter {
    #[default]
    Nothing,
    Connect,
    Subscribe,
}

type Script = dyn Fn(&str, &[u8]) -> Answer + Send + Sync;

/// See the module. Ends with the test's process.
pub(super) struct ScriptedBroker {
    pub(super) port: u16,
    seen: Arc<Seen>,
}

struct Seen {
    protocol: Protocol,
    script: Box<Script>,
    /// Payloads that were taken, in order, without those that came again.
    taken: Mutex<(BTreeSet<Vec<u8>>, Vec<String>)>,
    connects: AtomicUsize,
    /// The user property of each CONNECT that names a gateway.
    marks: Mutex<Vec<String>>,
    ends: EndsAfter,
}

impl ScriptedBroker {
    pub(super) fn start(
        protocol: Protocol,
        script: impl Fn(&str, &[u8]) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::start_with(protocol, EndsAfter::Nothing, Box::new(script))
    }

    /// Takes every message.
    pub(super) fn of_takers(protocol: Protocol) -> Self {
        Self::start(protocol, |_, _| Answer::Take)
    }

    /// Lets the bridge in, and ends each connection.
    pub(super) fn ending(protocol: Protocol, ends: EndsAfter) -> Self {
        Self::start_with(protocol, ends, Box::new(|_, _| Answer::Take))
    }

    fn start_with(protocol: Protocol, ends: EndsAfter, script: Box<Script>) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = socket.local_addr().expect("an address").port();
        let seen = Arc::new(Seen {
            protocol,
            script,
            taken: Mutex::default(),
            connects: AtomicUsize::new(0),
            marks: Mutex::default(),
            ends,
        });
        let seeing = Arc::clone(&seen);
        thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                let seen = Arc::clone(&seeing);
                thread::spawn(move || serve(&seen, stream));
            }
        });
        Self { port, seen }
    }

    pub(super) fn taken(&self) -> Vec<String> {
        self.seen.taken.lock().1.clone()
    }

    pub(super) fn marks(&self) -> Vec<String> {
        self.seen.marks.lock().clone()
    }

    pub(super) fn connects(&self) -> usize {
        self.seen.connects.load(Relaxed)
    }
}

fn serve(seen: &Seen, stream: TcpStream) {
    let mut ending = stream.try_clone().expect("the same socket");
    let mut peer = Client::over(stream, seen.protocol);
    let mut answer = |packet: &Packet<'_>| {
        let mut bytes = Vec::new();
        codec::encode(packet, seen.protocol, &mut bytes);
        ending.write_all(&bytes).is_ok()
    };
    while let Some(bytes) = peer.next_bytes() {
        let goes_on = match decoded(&bytes, seen.protocol) {
            Packet::Connect(connect) => {
                seen.connects.fetch_add(1, Relaxed);
                let mark = connect.user.into_iter().find(|(name, _)| name == "mqtt-server-bridge");
                seen.marks.lock().extend(mark.map(|(_, value)| value));
                answer(&Packet::ConnAck(Box::default())) && seen.ends != EndsAfter::Connect
            }
            Packet::PingReq => answer(&Packet::PingResp),
            Packet::Subscribe(subscribe) => {
                let packet_id = subscribe.packet_id;
                let codes = vec![1; subscribe.filters.len()];
                answer(&Packet::SubAck(SubAck { packet_id, codes, reason_string: None, user: Vec::new() }))
                    && seen.ends != EndsAfter::Subscribe
            }
            Packet::Publish(publish) => match (seen.script)(publish.topic, publish.payload) {
                Answer::Take => {
                    let mut taken = seen.taken.lock();
                    if taken.0.insert(publish.payload.to_vec()) {
                        taken.1.push(String::from_utf8_lossy(publish.payload).into_owned());
                    }
                    drop(taken);
                    let (packet_id, code) = (publish.packet_id, 0);
                    answer(&Packet::PubAck(Ack { packet_id, code, reason_string: None, user: Vec::new() }))
                }
                Answer::Ignore => true,
                Answer::Close => false,
                Answer::Disconnect(code) => {
                    answer(&Packet::Disconnect(Box::new(Disconnect { code, ..Disconnect::default() })));
                    false
                }
            },
            _ => true,
        };
        if !goes_on {
            break;
        }
    }
    // Lets answers that were written still arrive.
    let _ = ending.shutdown(Shutdown::Write);
}
