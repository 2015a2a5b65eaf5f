//! A device that answers commands at QoS 1, and sends an answer without PUBACK again when it is back.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _, Write as _},
    net::TcpStream,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use codec::{Ack, Connect, Packet, Publish};
use gateway_core::{Protocol, QoS};

use super::{Shared, commands::Given};
use crate::{rng::Rng, support::local};

/// Time after which a connection is given up on which the gateway has not answered.
const SILENCE: Duration = Duration::from_secs(5);

pub(super) fn name(number: usize) -> String {
    format!("commanded-{number}")
}

/// See the module.
pub(super) struct Device {
    given: Given,
    thread: JoinHandle<()>,
}

impl Device {
    pub(super) fn start(number: usize, port: u16, shared: &Arc<Shared>) -> Self {
        let given = Given::default();
        let mut work = DeviceWork {
            name: name(number),
            port,
            shared: Arc::clone(shared),
            given: Arc::clone(&given),
            rng: Rng::new(number as u64),
            open: BTreeMap::new(),
            next: 0,
        };
        let thread = thread::spawn(move || {
            while !work.shared.is_stopping() {
                let _ = work.serve();
                thread::sleep(Duration::from_millis(20));
            }
        });
        Self { given, thread }
    }

    /// Answers that it has sent.
    pub(super) fn given(&self) -> Given {
        Arc::clone(&self.given)
    }

    pub(super) fn join(self) {
        self.thread.join().expect("a device");
    }
}

struct DeviceWork {
    name: String,
    port: u16,
    shared: Arc<Shared>,
    given: Given,
    rng: Rng,
    /// Answers without PUBACK, by packet identifier: topic and payload.
    open: BTreeMap<u16, (String, Vec<u8>)>,
    next: u16,
}

impl DeviceWork {
    /// One connection, until it ends.
    fn serve(&mut self) -> io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&local(self.port), SILENCE)?;
        stream.set_read_timeout(Some(SILENCE))?;
        let mut connect = Connect::new(Protocol::V4, self.name.clone());
        connect.clean_start = false;
        send(&mut stream, &Packet::Connect(Box::new(connect)))?;
        let mut buffer = Vec::new();
        let again: Vec<u16> = self.open.keys().copied().collect();
        let (mut is_open, mut was_asked) = (false, false);
        while !self.shared.is_stopping() {
            let frame = next(&mut stream, &mut buffer)?;
            // A gateway that says nothing for so long may be one that was replaced.
            let Some(frame) = frame else {
                if !is_open || was_asked || !self.open.is_empty() {
                    return Err(ErrorKind::TimedOut.into());
                }
                was_asked = true;
                send(&mut stream, &Packet::PingReq)?;
                continue;
            };
            was_asked = false;
            let parsed = codec::frame(&frame, usize::MAX).ok().flatten().ok_or(ErrorKind::InvalidData)?;
            match codec::decode(&parsed, Protocol::V4).map_err(|_| ErrorKind::InvalidData)? {
                Packet::ConnAck(ack) if ack.code == 0 => {
                    is_open = true;
                    for id in &again {
                        self.answer(&mut stream, *id)?;
                    }
                }
                Packet::PubAck(ack) => drop(self.open.remove(&ack.packet_id)),
                Packet::Publish(publish) => self.take(&mut stream, &publish)?,
                _ => {}
            }
            if self.rng.one_in(50) {
                return Err(ErrorKind::ConnectionAborted.into());
            }
        }
        Ok(())
    }

    /// Acknowledges most commands; some it never answers, some it answers twice.
    fn take(&mut self, stream: &mut TcpStream, publish: &Publish<'_>) -> io::Result<()> {
        let mut levels = publish.topic.split('/');
        let (_, device, command) =
            (levels.next(), levels.next(), levels.next().unwrap_or_default().to_owned());
        if device != Some(self.name.as_str()) {
            self.shared.problem(format!("{} got a command of {device:?}", self.name));
        }
        if publish.qos == QoS::AtLeastOnce && !self.rng.one_in(10) {
            let packet_id = publish.packet_id;
            let ack = Ack { packet_id, code: 0, reason_string: None, user: Vec::new() };
            send(stream, &Packet::PubAck(ack))?;
        }
        for _ in 0..[0, 1, 1, 2][self.rng.between(0, 4) as usize] {
            self.next = self.next % 60_000 + 1;
            let payload = format!("{} {}", self.name, self.next).into_bytes();
            self.given.lock().entry(command.clone()).or_default().insert(payload.clone());
            let topic = format!("cmd/{}/{command}/reply/200", self.name);
            self.open.insert(self.next, (topic, payload));
            self.answer(stream, self.next)?;
        }
        Ok(())
    }

    fn answer(&self, stream: &mut TcpStream, packet_id: u16) -> io::Result<()> {
        let Some((topic, payload)) = self.open.get(&packet_id) else { return Ok(()) };
        send(
            stream,
            &Packet::Publish(Publish {
                dup: false,
                qos: QoS::AtLeastOnce,
                retain: false,
                topic,
                packet_id,
                payload,
                alias: None,
                expiry: None,
                ids: Vec::new(),
                properties: None,
            }),
        )
    }
}

fn send(stream: &mut TcpStream, packet: &Packet<'_>) -> io::Result<()> {
    let mut bytes = Vec::new();
    codec::encode(packet, Protocol::V4, &mut bytes);
    stream.write_all(&bytes)
}

/// The next packet as it came; `None` if nothing comes for a while.
fn next(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let mut chunk = [0; 16_384];
    loop {
        let length = codec::frame_len(buffer).map_err(|_| ErrorKind::InvalidData)?;
        if let Some(length) = length.filter(|length| buffer.len() >= *length) {
            return Ok(Some(buffer.drain(..length).collect()));
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer.extend_from_slice(&chunk[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
    }
}
