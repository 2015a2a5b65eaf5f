//! One connection to a broker: bytes in, bytes out, pings.

use std::{io, time::Duration};

use bytes::{Bytes, BytesMut};
use codec::{ConnAck, Connect, Packet, decode, encode, frame};
use gateway_core::Protocol;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf, split},
    net::TcpStream,
    select,
    time::{Instant, sleep_until, timeout},
};

use super::Dial;
use crate::{
    mark::MARK,
    status::{BridgeFailure, Reason},
};

/// Anything that bytes go through.
trait LinkStream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> LinkStream for T {}

/// Parameters of a session that the bridge asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct SessionParameters {
    /// Seconds for which the broker keeps the session; `None` if nothing of an earlier connection is kept.
    pub(super) keeps: Option<u32>,
    /// Messages that the broker may have sent unacknowledged.
    pub(super) receive_maximum: u16,
    /// The longest packet that the broker may send.
    pub(super) max_packet: usize,
}

/// See the module.
pub(super) struct BrokerLink {
    reader: ReadHalf<Box<dyn LinkStream>>,
    writer: WriteHalf<Box<dyn LinkStream>>,
    input: BytesMut,
    /// Bytes that are still to be written.
    output: BytesMut,
    unflushed: bool,
    protocol: Protocol,
    max_packet: usize,
    interval: Duration,
    ping_at: Instant,
    /// Nothing has come since a ping.
    pinged: bool,
    /// Pings without their own answer.
    pongs: u32,
    unsolicited: UnsolicitedPackets,
    /// The broker's CONNACK.
    pub(super) welcome: ConnAck,
}

/// A connection, with its login, takes no longer.
const MOST_CONNECT: Duration = Duration::from_secs(15);
/// Time that a connection must last to count as up, unless a message shows earlier that it works. A side that lets the bridge in
/// and closes at once is not up.
pub(super) const STEADY: Duration = Duration::from_secs(1);
/// The longest mark of a gateway.
const MOST_MARK: usize = 64;
/// Bytes that are read at once.
const READ: usize = 16 << 10;

impl BrokerLink {
    /// Connects and logs in. Cancel safe: then there is no connection.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn open(dial: &Dial, parameters: SessionParameters) -> Result<Self, BridgeFailure> {
        let connecting = timeout(dial.deadline.min(MOST_CONNECT), Self::connect(dial, parameters)).await;
        connecting.unwrap_or_else(|_| Err(BridgeFailure::new(Reason::Deadline, "no connection in time")))
    }

    async fn connect(dial: &Dial, parameters: SessionParameters) -> Result<Self, BridgeFailure> {
        let setup =
            |(key, text): (&str, String)| BridgeFailure::new(Reason::Denied, format!("{key}: {text}"));
        let (tls, password) = (dial.tls().map_err(setup)?, dial.password().map_err(setup)?);
        let failed = |error: io::Error| {
            BridgeFailure::new(Reason::Connect, format!("connect to {}:{}: {error}", dial.host, dial.port))
        };
        let socket = TcpStream::connect((dial.host.as_str(), dial.port)).await.map_err(failed)?;
        let _ = socket.set_nodelay(true);
        let stream: Box<dyn LinkStream> = match tls {
            None => Box::new(socket),
            Some((connector, name)) => {
                let tls = connector.connect(name, socket).await;
                Box::new(tls.map_err(|error| BridgeFailure::new(Reason::Connect, format!("TLS: {error}")))?)
            }
        };
        let (reader, writer) = split(stream);
        let interval = dial.config.keep_alive.0 / 2;
        let protocol = dial.protocol();
        let mut link = Self {
            reader,
            writer,
            input: BytesMut::new(),
            output: BytesMut::new(),
            unflushed: false,
            protocol,
            max_packet: parameters.max_packet,
            interval,
            ping_at: Instant::now() + interval,
            pinged: false,
            pongs: 0,
            unsolicited: UnsolicitedPackets::new(Instant::now()),
            welcome: ConnAck::default(),
        };
        let mut connect = Connect::new(protocol, dial.client_id.as_str());
        connect.clean_start = parameters.keeps.is_none();
        connect.keep_alive = u16::try_from(dial.config.keep_alive.0.as_secs()).unwrap_or(u16::MAX);
        connect.username.clone_from(&dial.config.username);
        connect.password = password.map(Bytes::from);
        if protocol.is_v5() {
            connect.session_expiry = parameters.keeps;
            connect.receive_maximum = Some(parameters.receive_maximum);
            connect.maximum_packet_size = u32::try_from(parameters.max_packet).ok();
            // A gateway answers with its own.
            connect.user.push((MARK.to_owned(), dial.mark.clone()));
        }
        link.put(&Packet::Connect(Box::new(connect)));
        let welcome = link.next().await?;
        match link.read(&welcome)? {
            Packet::ConnAck(welcome) if welcome.code == 0 => link.welcome = *welcome,
            Packet::ConnAck(welcome) => return Err(refusal(protocol, &welcome)),
            _ => return Err(BridgeFailure::new(Reason::Failed, "the first packet is no CONNACK")),
        }
        Ok(link)
    }

    /// Queues a packet to be written; [`Self::step`] writes it.
    pub(super) fn put(&mut self, packet: &Packet<'_>) {
        let mut bytes = Vec::new();
        encode(packet, self.protocol, &mut bytes);
        self.output.extend_from_slice(&bytes);
    }

    /// The mark of the gateway on the other side, if it is one.
    pub(super) fn mark(&self) -> Option<&str> {
        let mut user = self.welcome.user.iter();
        user.find(|(name, value)| name == MARK && value.len() <= MOST_MARK).map(|(_, value)| &**value)
    }

    /// Bytes that are to be written.
    pub(super) fn unwritten(&self) -> usize {
        self.output.len() + usize::from(self.unflushed)
    }

    /// The level that is spoken.
    pub(super) fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// The next whole packet that was read, if there is one.
    ///
    /// # Errors
    /// What was read is no packet, or too long.
    pub(super) fn take(&mut self) -> Result<Option<Bytes>, BridgeFailure> {
        let found = frame(&self.input, self.max_packet).map_err(|error| malformed(&error))?;
        let length = found.map(|found| found.len);
        Ok(length.map(|length| self.input.split_to(length).freeze()))
    }

    /// Decodes a packet that [`Self::take`] returned.
    ///
    /// # Errors
    /// The bytes are no packet, or a farewell.
    pub(super) fn read<'a>(&self, bytes: &'a [u8]) -> Result<Packet<'a>, BridgeFailure> {
        let found = frame(bytes, self.max_packet).map_err(|error| malformed(&error))?;
        let found = found.ok_or_else(|| BridgeFailure::new(Reason::Failed, "half a packet"))?;
        match decode(&found, self.protocol).map_err(|error| malformed(&error))? {
            Packet::Disconnect(farewell) => Err(ended(farewell.code)),
            packet => Ok(packet),
        }
    }

    /// Takes note of a packet that is neither a message nor the answer to one.
    ///
    /// # Errors
    /// The broker sends many that nobody has asked for: each is work, and there could be no end.
    pub(super) fn other(&mut self, packet: &Packet<'_>) -> Result<(), BridgeFailure> {
        if matches!(packet, Packet::PingResp) && self.pongs > 0 {
            self.pongs -= 1;
            return Ok(());
        }
        if self.unsolicited.take(Instant::now()) {
            return Ok(());
        }
        Err(BridgeFailure::new(Reason::Failed, "the broker sends answers that nobody has asked for"))
    }

    /// The next packet, waited for.
    async fn next(&mut self) -> Result<Bytes, BridgeFailure> {
        loop {
            if let Some(packet) = self.take()? {
                return Ok(packet);
            }
            self.step().await?;
        }
    }

    /// Waits until the broker has read everything that was put, and answers. Other packets that come meanwhile are read and
    /// forgotten.
    ///
    /// # Errors
    /// The connection has ended, or nothing answers.
    pub(super) async fn ping(&mut self) -> Result<(), BridgeFailure> {
        self.put(&Packet::PingReq);
        loop {
            let packet = self.next().await?;
            if matches!(self.read(&packet)?, Packet::PingResp) {
                return Ok(());
            }
        }
    }

    /// Reads or writes what can be, or pings; returns after one of them. Cancel safe.
    ///
    /// # Errors
    /// The connection has ended, or nothing answers.
    pub(super) async fn step(&mut self) -> Result<(), BridgeFailure> {
        self.step_if(true).await
    }

    /// As [`Self::step`]; nothing is read unless `reads`.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) async fn step_if(&mut self, reads: bool) -> Result<(), BridgeFailure> {
        let lost = |error: io::Error| BridgeFailure::new(Reason::Closed, format!("connection: {error}"));
        self.input.reserve(READ);
        let (writes, flushes) = (!self.output.is_empty(), self.unflushed);
        let (writer, output) = (&mut self.writer, &mut self.output);
        let written = async {
            if writes {
                return writer.write_buf(output).await.map(|_| true);
            }
            writer.flush().await.map(|()| false)
        };
        select! {
            read = self.reader.read_buf(&mut self.input), if reads => {
                if read.map_err(lost)? == 0 {
                    return Err(BridgeFailure::new(Reason::Closed, "the broker has closed the connection"));
                }
                self.pinged = false;
            }
            written = written, if writes || flushes => self.unflushed = written.map_err(lost)?,
            () = sleep_until(self.ping_at) => {
                // Unread, the answer may be there.
                if self.pinged && reads {
                    return Err(BridgeFailure::new(Reason::Deadline, "no answer to a ping"));
                }
                self.pinged = true;
                self.pongs = self.pongs.saturating_add(1);
                self.ping_at = Instant::now() + self.interval;
                self.put(&Packet::PingReq);
            }
        }
        Ok(())
    }
}

/// Packets of the broker that answer nothing: a few are let pass, since a broker may send some late.
struct UnsolicitedPackets {
    left: u32,
    at: Instant,
}

/// Most of them at once, and how often one more is allowed.
const MOST_UNSOLICITED: u32 = 100;
const UNASKED_EVERY: Duration = Duration::from_millis(100);

impl UnsolicitedPackets {
    fn new(now: Instant) -> Self {
        Self { left: MOST_UNSOLICITED, at: now }
    }

    /// Tells whether one more may pass.
    fn take(&mut self, now: Instant) -> bool {
        let more = now.saturating_duration_since(self.at).as_millis() / UNASKED_EVERY.as_millis();
        if let Ok(more @ 1..) = u32::try_from(more.min(u128::from(MOST_UNSOLICITED))) {
            self.at = now;
            self.left = self.left.saturating_add(more).min(MOST_UNSOLICITED);
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

fn malformed(error: &codec::DecodeError) -> BridgeFailure {
    BridgeFailure::new(Reason::Failed, format!("the broker sends what is no packet: {error}"))
}

/// Reads the reason of a DISCONNECT, which is about a message, about the bridge, or about the broker.
fn ended(code: u8) -> BridgeFailure {
    use codec::reason::*;
    let why = format!("the broker ends the connection, code {code:#04x}");
    let names_message = matches!(
        code,
        MALFORMED_PACKET
            | PROTOCOL_ERROR
            | TOPIC_NAME_INVALID
            | PACKET_TOO_LARGE
            | PAYLOAD_FORMAT_INVALID
            | RETAIN_NOT_SUPPORTED
            | QOS_NOT_SUPPORTED
    );
    let reason = match code {
        SERVER_BUSY
        | SERVER_SHUTTING_DOWN
        | MESSAGE_RATE_TOO_HIGH
        | QUOTA_EXCEEDED
        | CONNECTION_RATE_EXCEEDED
        | MAXIMUM_CONNECT_TIME => Reason::Busy,
        SESSION_TAKEN_OVER | ADMINISTRATIVE_ACTION | USE_ANOTHER_SERVER | SERVER_MOVED => Reason::Denied,
        _ => Reason::Closed,
    };
    BridgeFailure { names_message, ..BridgeFailure::new(reason, why) }
}

/// Why the broker does not let the bridge in.
fn refusal(protocol: Protocol, welcome: &ConnAck) -> BridgeFailure {
    use codec::reason;
    let busy = match protocol {
        Protocol::V5 => {
            matches!(welcome.code, reason::SERVER_UNAVAILABLE | reason::SERVER_BUSY | reason::QUOTA_EXCEEDED)
        }
        // 3: server unavailable.
        Protocol::V3 | Protocol::V4 => welcome.code == 3,
    };
    let why = welcome.reason_string.as_deref().unwrap_or_default();
    let detail = format!("the broker refuses the connection, code {:#04x} {why}", welcome.code);
    BridgeFailure::new(if busy { Reason::Busy } else { Reason::Denied }, detail.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_nobody_has_asked_for_are_few_at_once_and_few_a_second() {
        let now = Instant::now();
        let mut unsolicited = UnsolicitedPackets::new(now);
        let passed =
            |unsolicited: &mut UnsolicitedPackets, now| (0..1_000).filter(|_| unsolicited.take(now)).count();
        assert_eq!(passed(&mut unsolicited, now), 100);
        assert_eq!(passed(&mut unsolicited, now + Duration::from_secs(1)), 10);
        assert_eq!(passed(&mut unsolicited, now + Duration::from_hours(1)), 100);
    }
}
