//! A stored command as it is on disk: fields one after the other, integers little-endian, texts with their length. The store
//! says whether a record is whole.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{Properties, QoS, Timestamp};

use super::{
    CommandDigest, DeviceReply, RANDOM, Spec,
    machine::{CommandState, Machine, Times},
};

const VERSION: u8 = 1;

/// Record of a command on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandRecord {
    /// Its id.
    pub id: String,
    /// The request.
    pub spec: Spec,
    pub(super) content: CommandDigest,
    pub(super) correlation: [u8; RANDOM],
    /// Start of it.
    pub created: Timestamp,
    /// Its last change.
    pub updated: Timestamp,
    /// State and times.
    pub machine: Machine,
    /// Reason code of MQTT with which the device refused it.
    pub code: Option<u8>,
    /// The answer of the device.
    pub reply: Option<DeviceReply>,
}

struct RecordWriter(Vec<u8>);

impl RecordWriter {
    fn byte(&mut self, value: u8) {
        self.0.push(value);
    }
    fn number(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    fn bytes(&mut self, value: &[u8]) {
        self.0.extend(u32::try_from(value.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.0.extend(value);
    }
    fn maybe<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.byte(u8::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
    }
    fn properties(&mut self, properties: Option<&Properties>) {
        self.maybe(properties, |writer, properties| {
            writer.maybe(properties.payload_format, Self::byte);
            writer.maybe(properties.content_type.as_deref(), |writer, text| writer.bytes(text.as_bytes()));
            writer.maybe(properties.response_topic.as_deref(), |writer, text| writer.bytes(text.as_bytes()));
            writer.maybe(properties.correlation_data.as_deref(), Self::bytes);
            writer.number(properties.user.len() as u64);
            for (name, value) in &properties.user {
                writer.bytes(name.as_bytes());
                writer.bytes(value.as_bytes());
            }
        });
    }
}

struct RecordReader<'a>(&'a [u8]);

impl<'a> RecordReader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }
    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn time(&mut self) -> Option<Timestamp> {
        self.number().map(Timestamp)
    }
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = u32::from_le_bytes(self.array()?);
        self.take(length as usize)
    }
    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }
    fn maybe<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        match self.byte()? {
            0 => Some(None),
            1 => read(self).map(Some),
            _ => None,
        }
    }
    fn properties(&mut self) -> Option<Option<Arc<Properties>>> {
        self.maybe(|reader| {
            let mut properties = Properties {
                payload_format: reader.maybe(Self::byte)?,
                content_type: reader.maybe(Self::text)?,
                response_topic: reader.maybe(Self::text)?,
                correlation_data: reader.maybe(Self::bytes)?.map(Bytes::copy_from_slice),
                user: Vec::new(),
            };
            for _ in 0..reader.number()? {
                properties.user.push((reader.text()?, reader.text()?));
            }
            Some(Arc::new(properties))
        })
    }
}

impl CommandRecord {
    pub(super) fn encode(&self) -> Bytes {
        let Self { id, spec, content, correlation, created, updated, machine, code, reply } = self;
        let mut writer = RecordWriter(Vec::with_capacity(256 + spec.payload.len()));
        writer.byte(VERSION);
        writer.bytes(id.as_bytes());
        writer.bytes(spec.device.as_bytes());
        writer.bytes(spec.name.as_bytes());
        writer.bytes(&spec.payload);
        writer.properties(spec.properties.as_deref());
        writer.byte(spec.qos as u8);
        writer.0.extend(content);
        writer.0.extend(correlation);
        for time in [created, updated, &machine.times.start, &machine.times.expire] {
            writer.number(time.0);
        }
        writer.maybe(machine.times.retry, RecordWriter::number);
        writer.maybe(machine.next, |writer, at| writer.number(at.0));
        writer.number(u64::from(machine.attempts));
        writer.byte(machine.state as u8);
        writer.maybe(*code, RecordWriter::byte);
        writer.maybe(reply.as_ref(), |writer, reply| {
            writer.bytes(&reply.payload);
            writer.properties(reply.properties.as_deref());
            writer.number(u64::from(reply.status));
            writer.number(reply.at.0);
        });
        writer.0.into()
    }

    /// `None` if it is none of this version.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = RecordReader(bytes);
        (reader.byte()? == VERSION).then_some(())?;
        let id = reader.text()?;
        let spec = Spec {
            device: reader.text()?.into(),
            name: reader.text()?,
            payload: Bytes::copy_from_slice(reader.bytes()?),
            properties: reader.properties()?,
            qos: QoS::from_bits(reader.byte()?)?,
        };
        let (content, correlation) = (reader.array()?, reader.array()?);
        let (created, updated) = (reader.time()?, reader.time()?);
        let (start, expire) = (reader.time()?, reader.time()?);
        let times = Times { start, expire, retry: reader.maybe(RecordReader::number)? };
        let next = reader.maybe(RecordReader::time)?;
        let attempts = u32::try_from(reader.number()?).ok()?;
        let state = *CommandState::ALL.get(usize::from(reader.byte()?))?;
        let machine = Machine::restored(state, attempts, times, next, spec.qos == QoS::AtMostOnce);
        let code = reader.maybe(RecordReader::byte)?;
        let reply = reader.maybe(|reader| {
            Some(DeviceReply {
                payload: Bytes::copy_from_slice(reader.bytes()?),
                properties: reader.properties()?,
                status: u32::try_from(reader.number()?).ok()?,
                at: reader.time()?,
            })
        })?;
        reader.0.is_empty().then_some(Self {
            id,
            spec,
            content,
            correlation,
            created,
            updated,
            machine,
            code,
            reply,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> CommandRecord {
        let properties = Properties {
            payload_format: Some(1),
            content_type: Some("text/plain".to_owned()),
            response_topic: None,
            correlation_data: Some(Bytes::from_static(b"x")),
            user: vec![("a".to_owned(), "b".to_owned())],
        };
        let times = Times { start: Timestamp(1), expire: Timestamp(9), retry: Some(5) };
        let mut machine = Machine::new(times, false);
        machine.sent_out();
        machine.end(CommandState::Replied);
        CommandRecord {
            id: "id".to_owned(),
            spec: Spec {
                device: "d".into(),
                name: "reboot".to_owned(),
                payload: Bytes::from_static(b"now"),
                properties: Some(Arc::new(properties.clone())),
                qos: QoS::AtLeastOnce,
            },
            content: [3; 32],
            correlation: [4; RANDOM],
            created: Timestamp(1),
            updated: Timestamp(2),
            machine,
            code: Some(0x87),
            reply: Some(DeviceReply {
                payload: Bytes::from_static(b"done"),
                properties: Some(Arc::new(properties)),
                status: 200,
                at: Timestamp(8),
            }),
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_cut_one_not_at_all() {
        let full = record();
        let bytes = full.encode();
        assert_eq!(CommandRecord::decode(&bytes), Some(full.clone()));
        for end in 0..bytes.len() {
            assert_eq!(CommandRecord::decode(&bytes[..end]), None, "{end} bytes");
        }
        assert_eq!(CommandRecord::decode(&[&bytes[..], b"x"].concat()), None);
        let plain = CommandRecord { code: None, reply: None, ..full };
        assert_eq!(CommandRecord::decode(&plain.encode()), Some(plain));
    }
}
