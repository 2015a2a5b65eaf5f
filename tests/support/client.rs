//! A blocking MQTT client with the crate's own codec, over `TcpStream` unless a test says otherwise: it does what a test says,
//! nothing more.
#![allow(unreachable_pub, reason = "shared by several test binaries")]
#![allow(dead_code, reason = "each test binary uses its own part of this module")]

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use bytes::Bytes;
use codec::{Connect, ConnectWill, Packet, Publish, Subscribe, SubscribeFilter};
use gateway_core::{Protocol, QoS};
use socket2::{Domain, Socket, Type};

use super::support::local;

/// Longer than anything may take on a loaded machine; only a failing test waits so long.
pub const WAIT: Duration = Duration::from_secs(60);

/// A connection from 127.0.0.`host`.
pub fn from_host(host: u8, port: u16) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("make a socket");
    let own = SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0));
    socket.bind(&own.into()).expect("bind the address");
    socket.connect(&local(port).into()).expect("connect");
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(WAIT)).expect("set a timeout");
    stream
}

/// Packets that came, without the fields that no test looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    ConnAck(u8),
    Publish(String, Vec<u8>),
    PubAck(u8),
    SubAck(Vec<u8>),
    PingResp,
    Disconnect(u8),
    Other(u8),
    Closed,
}

pub struct Client<S = TcpStream> {
    pub stream: S,
    protocol: Protocol,
    buffer: Vec<u8>,
}

/// A CONNECT with a clean session and no more.
pub fn hello(protocol: Protocol, client_id: &str) -> Connect {
    Connect::new(protocol, client_id)
}

pub fn will(topic: &str, payload: &'static [u8]) -> ConnectWill {
    ConnectWill {
        topic: topic.to_owned(),
        payload: Bytes::from_static(payload),
        qos: QoS::AtLeastOnce,
        retain: false,
        delay: 0,
        expiry: None,
        properties: None,
    }
}

/// A PUBLISH; with packet id 1 where it has one.
pub fn message<'a>(topic: &'a str, payload: &'a [u8], qos: QoS, retain: bool) -> Packet<'a> {
    Packet::Publish(Publish {
        dup: false,
        qos,
        retain,
        topic,
        packet_id: u16::from(qos != QoS::AtMostOnce),
        payload,
        alias: None,
        expiry: None,
        ids: Vec::new(),
        properties: None,
    })
}

/// A packet that came from the server.
pub fn decoded(bytes: &[u8], protocol: Protocol) -> Packet<'_> {
    let frame = codec::frame(bytes, usize::MAX).expect("frame from the server").expect("a whole frame");
    codec::decode(&frame, protocol).expect("packet from the server")
}

impl Client {
    /// Opens a connection and sends nothing.
    pub fn open(port: u16, protocol: Protocol) -> Self {
        Self::over(TcpStream::connect(local(port)).expect("connect to the server"), protocol)
    }

    /// Over a stream that is connected already; sends nothing.
    pub fn over(stream: TcpStream, protocol: Protocol) -> Self {
        stream.set_read_timeout(Some(WAIT)).expect("set a timeout");
        stream.set_write_timeout(Some(WAIT)).expect("set a timeout");
        Self::on(stream, protocol)
    }

    /// Connects and expects to be accepted.
    pub fn connect(port: u16, protocol: Protocol, client_id: &str) -> Self {
        Self::connect_with(port, hello(protocol, client_id))
    }

    pub fn connect_with(port: u16, connect: Connect) -> Self {
        let mut client = Self::open(port, connect.protocol);
        client.send(&Packet::Connect(Box::new(connect)));
        assert_eq!(client.next(), Got::ConnAck(0));
        client
    }
}

impl<S: Read + Write> Client<S> {
    /// Over a stream of any kind, which has its timeouts; sends nothing.
    pub fn on(stream: S, protocol: Protocol) -> Self {
        Self { stream, protocol, buffer: Vec::new() }
    }

    pub fn send(&mut self, packet: &Packet<'_>) {
        self.send_all(std::slice::from_ref(packet));
    }

    /// All in one write.
    pub fn send_all(&mut self, packets: &[Packet<'_>]) {
        let mut bytes = Vec::new();
        for packet in packets {
            codec::encode(packet, self.protocol, &mut bytes);
        }
        self.stream.write_all(&bytes).and_then(|()| self.stream.flush()).expect("send packets");
    }

    pub fn publish(&mut self, topic: &str, payload: &[u8], qos: QoS, retain: bool) {
        self.send(&message(topic, payload, qos, retain));
    }

    /// Publishes at QoS 1 and waits for the acknowledgement.
    pub fn publish_acked(&mut self, topic: &str, payload: &[u8], retain: bool) {
        self.publish(topic, payload, QoS::AtLeastOnce, retain);
        assert!(matches!(self.next(), Got::PubAck(_)));
    }

    /// At QoS 0; the code of the only filter.
    pub fn subscribe(&mut self, filter: &str) -> u8 {
        self.subscribe_with(filter, QoS::AtMostOnce, None)
    }

    /// With a QoS and, in v5, a subscription identifier.
    pub fn subscribe_with(&mut self, filter: &str, qos: QoS, id: Option<u32>) -> u8 {
        self.send(&Packet::Subscribe(Subscribe {
            packet_id: 1,
            id,
            user: Vec::new(),
            filters: vec![SubscribeFilter {
                filter: filter.to_owned(),
                qos,
                no_local: false,
                retain_as_published: false,
                retain_handling: 0,
            }],
        }));
        match self.next() {
            Got::SubAck(codes) => codes[0],
            other => panic!("{other:?} for SUBSCRIBE of {filter}"),
        }
    }

    /// PINGREQ; what comes before the answer is everything that was sent to this client until now.
    pub fn ping(&mut self) -> Vec<Got> {
        self.send(&Packet::PingReq);
        let mut before = Vec::new();
        loop {
            match self.next() {
                Got::PingResp => return before,
                Got::Closed => panic!("closed before PINGRESP, after {before:?}"),
                other => before.push(other),
            }
        }
    }

    /// The next packet, or the end of the connection.
    pub fn next(&mut self) -> Got {
        let Some(bytes) = self.next_bytes() else { return Got::Closed };
        match decoded(&bytes, self.protocol) {
            Packet::ConnAck(ack) => Got::ConnAck(ack.code),
            Packet::Publish(publish) => Got::Publish(publish.topic.to_owned(), publish.payload.to_vec()),
            Packet::PubAck(ack) => Got::PubAck(ack.code),
            Packet::SubAck(ack) => Got::SubAck(ack.codes),
            Packet::PingResp => Got::PingResp,
            Packet::Disconnect(disconnect) => Got::Disconnect(disconnect.code),
            _ => Got::Other(bytes[0]),
        }
    }

    /// The next packet as it came; none at the end of the connection.
    pub fn next_bytes(&mut self) -> Option<Vec<u8>> {
        let mut chunk = [0; 65_536];
        loop {
            if let Some(len) = codec::frame_len(&self.buffer).expect("frame from the server")
                && self.buffer.len() >= len
            {
                return Some(self.buffer.drain(..len).collect());
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return None,
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                // As a read with a time limit is, when the process has stood still.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => panic!("nothing from the server: {error}"),
            }
        }
    }
}
