//! The file of an export: JSON, one record a line. docs/operations/tools.md describes it.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::Path,
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use gateway_core::{ClientId, OriginKind, Properties, Protocol, QoS, QueueId, SharedMessage, Timestamp};
use serde::{Deserialize, Serialize};

use crate::state::queues::transfer::{EntryHead, QueueRecord};
use store::{LatestValue, ShadowRecord, StoredSession, StoredSubscription, StoredWill};

/// The newest version that this program reads, and the one it writes.
pub(super) const VERSION: u32 = 1;

/// One line. Times are milliseconds since 1970, payloads base64, fields that are absent have their default.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ExportLine {
    /// The first.
    MqttServerExport {
        version: u32,
    },
    Session(SessionLine),
    Subscription(SubscriptionLine),
    Group {
        number: u64,
        filter: String,
    },
    Message {
        number: u64,
        message: MessageLine,
    },
    Entry(EntryLine),
    Received {
        queue: u64,
        packet_id: u16,
    },
    Retained(MessageLine),
    Latest(LatestLine),
    Shadow(ShadowLine),
    Versions {
        ceiling: u64,
    },
    /// The last: how many lines came before it, and their CRC-32.
    End {
        lines: u64,
        crc32: u32,
    },
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SessionLine {
    number: u64,
    client_id: String,
    expiry: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    ended: Option<u64>,
    protocol: u8,
    listener: String,
    #[serde(default, skip_serializing_if = "is_default")]
    username: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    proved: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    tenant: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    will: Option<WillLine>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WillLine {
    delay: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    expiry: Option<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    author: Option<String>,
    message: MessageLine,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SubscriptionLine {
    session: u64,
    filter: String,
    qos: u8,
    #[serde(default, skip_serializing_if = "is_default")]
    no_local: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    retain_as_published: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    id: Option<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MessageLine {
    topic: String,
    qos: u8,
    #[serde(default, skip_serializing_if = "is_default")]
    retain: bool,
    received: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    expires: Option<u64>,
    from: From,
    #[serde(default, skip_serializing_if = "is_default")]
    direct: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    client_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    properties: Option<MessageProperties>,
    payload: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum From {
    Device,
    Backend,
    Server,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageProperties {
    #[serde(default, skip_serializing_if = "is_default")]
    payload_format: Option<u8>,
    #[serde(default, skip_serializing_if = "is_default")]
    content_type: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    response_topic: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    correlation_data: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    user: Vec<(String, String)>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EntryLine {
    queue: u64,
    place: u64,
    /// Number of the message; absent if only PUBCOMP is awaited.
    #[serde(default, skip_serializing_if = "is_default")]
    message: u64,
    qos: u8,
    #[serde(default, skip_serializing_if = "is_default")]
    retain: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    sent: bool,
    /// Other entries have the message too.
    #[serde(default, skip_serializing_if = "is_default")]
    shared: bool,
    cost: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    group: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    ids: Option<Box<[u32]>>,
    /// The second by whose end it has expired.
    #[serde(default, skip_serializing_if = "is_default")]
    expires: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LatestLine {
    device: String,
    topic: String,
    qos: u8,
    #[serde(default, skip_serializing_if = "is_default")]
    retain: bool,
    received: u64,
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    properties: Option<MessageProperties>,
    payload: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShadowLine {
    device: String,
    #[serde(default, skip_serializing_if = "is_default")]
    name: String,
    version: u64,
    changed: u64,
    /// Absent of a deleted one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    document: Option<String>,
}

fn qos(bits: u8) -> Result<QoS, String> {
    QoS::from_bits(bits).ok_or_else(|| format!("{bits} is no QoS"))
}

fn payload(text: &str) -> Result<Bytes, String> {
    STANDARD.decode(text).map(Bytes::from).map_err(|e| format!("not base64: {e}"))
}

impl MessageProperties {
    fn of(properties: Option<&Properties>) -> Option<Self> {
        let properties = properties.filter(|properties| !properties.is_empty())?;
        Some(Self {
            payload_format: properties.payload_format,
            content_type: properties.content_type.clone(),
            response_topic: properties.response_topic.clone(),
            correlation_data: properties.correlation_data.as_ref().map(|data| STANDARD.encode(data)),
            user: properties.user.clone(),
        })
    }

    fn read(self) -> Result<Arc<Properties>, String> {
        Ok(Arc::new(Properties {
            payload_format: self.payload_format,
            content_type: self.content_type,
            response_topic: self.response_topic,
            correlation_data: self.correlation_data.as_deref().map(payload).transpose()?,
            user: self.user,
        }))
    }
}

impl MessageLine {
    pub(super) fn of(message: &SharedMessage) -> Self {
        Self {
            topic: message.topic.as_ref().to_owned(),
            qos: message.qos as u8,
            retain: message.retain,
            received: message.received.0,
            expires: message.expires.map(|at| at.0),
            from: match message.kind {
                OriginKind::Device => From::Device,
                OriginKind::Backend => From::Backend,
                OriginKind::Server => From::Server,
            },
            direct: message.direct,
            client_id: message.client_id.as_ref().map(|id| id.as_str().to_owned()),
            properties: MessageProperties::of(message.properties.as_deref()),
            payload: STANDARD.encode(&message.payload),
        }
    }

    pub(super) fn read(self) -> Result<SharedMessage, String> {
        Ok(SharedMessage {
            topic: Arc::from(self.topic),
            payload: payload(&self.payload)?,
            qos: qos(self.qos)?,
            retain: self.retain,
            properties: self.properties.map(MessageProperties::read).transpose()?,
            expires: self.expires.map(Timestamp),
            received: Timestamp(self.received),
            kind: match self.from {
                From::Device => OriginKind::Device,
                From::Backend => OriginKind::Backend,
                From::Server => OriginKind::Server,
            },
            client_id: self.client_id.as_deref().map(ClientId::new),
            slot: 0,
            receipt: None,
            direct: self.direct,
        })
    }
}

impl SessionLine {
    pub(super) fn of(session: &StoredSession) -> Self {
        Self {
            number: session.queue.0,
            client_id: session.client_id.as_str().to_owned(),
            expiry: session.expiry,
            ended: session.since.map(|at| at.0),
            protocol: session.protocol as u8,
            listener: session.listener.as_ref().clone(),
            username: session.username.as_deref().map(str::to_owned),
            proved: session.proved,
            tenant: session.tenant.as_deref().map(str::to_owned),
            will: session.will.as_ref().map(|will| WillLine {
                delay: will.delay,
                expiry: will.expiry,
                author: will.author.as_deref().cloned(),
                message: MessageLine::of(&will.message),
            }),
        }
    }

    pub(super) fn read(self) -> Result<StoredSession, String> {
        let will = |will: WillLine| {
            let message = Arc::new(will.message.read()?);
            let author = will.author.map(Arc::new);
            Ok::<_, String>(StoredWill { message, expiry: will.expiry, delay: will.delay, author })
        };
        Ok(StoredSession {
            queue: QueueId(self.number),
            client_id: ClientId::new(&self.client_id),
            expiry: self.expiry,
            since: self.ended.map(Timestamp),
            protocol: match self.protocol {
                3 => Protocol::V3,
                4 => Protocol::V4,
                5 => Protocol::V5,
                other => return Err(format!("{other} is no protocol level")),
            },
            listener: Arc::new(self.listener),
            username: self.username.map(String::into_boxed_str),
            proved: self.proved,
            tenant: self.tenant.map(String::into_boxed_str),
            will: self.will.map(will).transpose()?,
        })
    }
}

impl SubscriptionLine {
    pub(super) fn of(session: QueueId, subscription: StoredSubscription) -> Self {
        let StoredSubscription { filter, qos, no_local, retain_as_published, id } = subscription;
        Self { session: session.0, filter, qos: qos as u8, no_local, retain_as_published, id }
    }

    pub(super) fn read(self) -> Result<(QueueId, StoredSubscription), String> {
        let Self { session, filter, qos: bits, no_local, retain_as_published, id } = self;
        let qos = qos(bits)?;
        Ok((QueueId(session), StoredSubscription { filter, qos, no_local, retain_as_published, id }))
    }
}

impl LatestLine {
    pub(super) fn of(value: &LatestValue) -> Self {
        Self {
            device: value.device.as_str().to_owned(),
            topic: value.topic.as_ref().to_owned(),
            qos: value.qos as u8,
            retain: value.retain,
            received: value.received.0,
            version: value.version,
            properties: MessageProperties::of(value.properties.as_deref()),
            payload: STANDARD.encode(&value.payload),
        }
    }

    pub(super) fn read(self) -> Result<LatestValue, String> {
        Ok(LatestValue {
            device: ClientId::new(&self.device),
            topic: Arc::from(self.topic),
            payload: payload(&self.payload)?,
            qos: qos(self.qos)?,
            retain: self.retain,
            properties: self.properties.map(MessageProperties::read).transpose()?,
            received: Timestamp(self.received),
            version: self.version,
            server: None,
        })
    }
}

impl ShadowLine {
    pub(super) fn of(record: &ShadowRecord) -> Self {
        Self {
            device: record.device.as_str().to_owned(),
            name: record.name.as_ref().to_owned(),
            version: record.version,
            changed: record.changed.0,
            document: record.document.as_ref().map(|document| STANDARD.encode(document)),
        }
    }

    pub(super) fn read(self) -> Result<ShadowRecord, String> {
        Ok(ShadowRecord {
            device: ClientId::new(&self.device),
            name: Arc::from(self.name),
            version: self.version,
            changed: Timestamp(self.changed),
            document: self.document.as_deref().map(payload).transpose()?,
        })
    }
}

impl ExportLine {
    pub(super) fn of_queue(record: QueueRecord) -> Self {
        match record {
            QueueRecord::Message(number, message) => {
                Self::Message { number, message: MessageLine::of(&message) }
            }
            QueueRecord::Received(queue, packet_id) => Self::Received { queue: queue.0, packet_id },
            QueueRecord::Entry(queue, place, head) => Self::Entry(EntryLine {
                queue: queue.0,
                place,
                message: head.number,
                qos: head.qos as u8,
                retain: head.retain,
                sent: head.sent,
                shared: head.number != 0 && !head.sole,
                cost: head.cost,
                group: head.group.0,
                ids: head.ids,
                expires: head.expiry,
            }),
        }
    }
}

impl EntryLine {
    pub(super) fn read(self) -> Result<QueueRecord, String> {
        let head = EntryHead {
            number: self.message,
            qos: qos(self.qos)?,
            retain: self.retain,
            sent: self.sent,
            sole: self.message != 0 && !self.shared,
            cost: self.cost,
            group: QueueId(self.group),
            ids: self.ids,
            expiry: self.expires,
        };
        Ok(QueueRecord::Entry(QueueId(self.queue), self.place, head))
    }
}

/// Writes a file, line by line.
pub(super) struct ExportWriter {
    out: BufWriter<File>,
    crc: crc32fast::Hasher,
    lines: u64,
    buffer: Vec<u8>,
}

impl ExportWriter {
    /// A new file.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let out = BufWriter::new(File::create_new(path)?);
        let mut writer = Self { out, crc: crc32fast::Hasher::new(), lines: 0, buffer: Vec::new() };
        writer.write(&ExportLine::MqttServerExport { version: VERSION })?;
        Ok(writer)
    }

    pub(super) fn write(&mut self, line: &ExportLine) -> io::Result<()> {
        self.buffer.clear();
        serde_json::to_writer(&mut self.buffer, line)?;
        self.buffer.push(b'\n');
        self.crc.update(&self.buffer);
        self.lines += 1;
        self.out.write_all(&self.buffer)
    }

    /// The last line; durable after it.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let end = ExportLine::End { lines: self.lines, crc32: self.crc.clone().finalize() };
        self.write(&end)?;
        self.out.into_inner().map_err(|e| e.into_error())?.sync_all()
    }
}

/// Reads a file, line by line.
pub(super) struct ExportReader {
    input: BufReader<File>,
    crc: crc32fast::Hasher,
    /// Lines read.
    pub(super) lines: u64,
    /// Bytes read, and those of the file.
    pub(super) done: u64,
    pub(super) total: u64,
    buffer: Vec<u8>,
}

/// The beginning of a file of any version.
#[derive(Deserialize)]
struct Beginning {
    mqtt_server_export: Header,
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

impl ExportReader {
    /// Refuses what is not an export, or one of a newer version.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|e| e.to_string())?;
        let total = file.metadata().map_err(|e| e.to_string())?.len();
        let mut reader = Self {
            input: BufReader::new(file),
            crc: crc32fast::Hasher::new(),
            lines: 0,
            done: 0,
            total,
            buffer: Vec::new(),
        };
        reader.next_line()?;
        let beginning: Beginning =
            serde_json::from_slice(&reader.buffer).map_err(|_| "not an export of mqtt-server".to_owned())?;
        let version = beginning.mqtt_server_export.version;
        if version > VERSION {
            return Err(format!(
                "format {version}, this version reads up to {VERSION}: use the version that wrote it"
            ));
        }
        reader.note();
        Ok(reader)
    }

    /// The next line and its length; `None` at the sound end.
    pub(super) fn next(&mut self) -> Result<Option<(ExportLine, usize)>, String> {
        self.next_line()?;
        let line: ExportLine =
            serde_json::from_slice(&self.buffer).map_err(|e| format!("line {}: {e}", self.lines + 1))?;
        if let ExportLine::End { lines, crc32 } = line {
            if lines != self.lines || crc32 != self.crc.clone().finalize() {
                return Err("it was changed: its checksum is wrong".to_owned());
            }
            if self.done != self.total {
                return Err("something follows its end".to_owned());
            }
            return Ok(None);
        }
        self.note();
        Ok(Some((line, self.buffer.len())))
    }

    fn next_line(&mut self) -> Result<(), String> {
        self.buffer.clear();
        let read = self.input.read_until(b'\n', &mut self.buffer).map_err(|e| e.to_string())?;
        self.done += read as u64;
        if self.buffer.last() != Some(&b'\n') {
            return Err("it is cut short".to_owned());
        }
        Ok(())
    }

    fn note(&mut self) {
        self.crc.update(&self.buffer);
        self.lines += 1;
    }
}
