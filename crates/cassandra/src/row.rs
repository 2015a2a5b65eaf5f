//! A value as a row. Every column is written every time, so that a row is never made of two values: what is absent is
//! written empty, and `present` tells it from what is there and empty.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use ahash::RandomState;
use bytes::Bytes;
use gateway_core::{ClientId, Properties, QoS, Timestamp};
use scylla::{DeserializeRow, SerializeRow};

use super::StoreError;
use store::LatestValue;

/// Columns of both tables, the largest first: the driver's buffer then has about the room for a row at once.
pub(super) const COLUMNS: &str = "payload, device, topic, qos, retained, version, received, server, present, \
                                  payload_format, content_type, response_topic, correlation_data, \
                                  user_properties";

/// A mark for each of them.
pub(super) const MARKS: &str = "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?";

// Bits of `present`.
const PROPERTIES: i8 = 1;
const PAYLOAD_FORMAT: i8 = 2;
const CONTENT_TYPE: i8 = 4;
const RESPONSE_TOPIC: i8 = 8;
const CORRELATION_DATA: i8 = 16;

/// Values from which a row is written, in the order of [`COLUMNS`], with the write timestamp and the seconds to live at the end.
#[derive(SerializeRow)]
#[scylla(flavor = "enforce_order", skip_name_checks)]
pub(super) struct BoundRow<'a> {
    payload: &'a [u8],
    device: &'a str,
    topic: &'a str,
    qos: i8,
    retained: bool,
    version: i64,
    received: i64,
    server: &'a str,
    present: i8,
    payload_format: i8,
    content_type: &'a str,
    response_topic: &'a str,
    correlation_data: &'a [u8],
    user_properties: &'a [(String, String)],
    timestamp: i64,
    ttl: i32,
}

/// `server` is the gateway that recorded it if the value does not say; a `ttl` of 0 is for ever.
pub(super) fn bind<'a>(value: &'a LatestValue, server: &'a str, ttl: i32) -> BoundRow<'a> {
    let properties = value.properties.as_deref();
    let bit = |is_set: bool, bit: i8| if is_set { bit } else { 0 };
    let present = properties.map_or(0, |p| {
        PROPERTIES
            | bit(p.payload_format.is_some(), PAYLOAD_FORMAT)
            | bit(p.content_type.is_some(), CONTENT_TYPE)
            | bit(p.response_topic.is_some(), RESPONSE_TOPIC)
            | bit(p.correlation_data.is_some(), CORRELATION_DATA)
    });
    let version = value.version.cast_signed();
    BoundRow {
        payload: &value.payload,
        device: value.device.as_str(),
        topic: &value.topic,
        qos: value.qos as i8,
        retained: value.retain,
        version,
        received: value.received.0.cast_signed(),
        server: value.server.as_deref().unwrap_or(server),
        present,
        payload_format: properties.and_then(|p| p.payload_format).unwrap_or_default().cast_signed(),
        content_type: properties.and_then(|p| p.content_type.as_deref()).unwrap_or_default(),
        response_topic: properties.and_then(|p| p.response_topic.as_deref()).unwrap_or_default(),
        correlation_data: properties.and_then(|p| p.correlation_data.as_deref()).unwrap_or_default(),
        user_properties: properties.map(|p| &*p.user).unwrap_or_default(),
        timestamp: version,
        ttl,
    }
}

/// Row that is read: [`COLUMNS`].
#[derive(DeserializeRow)]
#[scylla(flavor = "enforce_order", skip_name_checks)]
pub(super) struct LatestRow {
    payload: Bytes,
    device: String,
    topic: String,
    qos: i8,
    retained: bool,
    version: i64,
    received: i64,
    server: String,
    present: i8,
    payload_format: i8,
    content_type: String,
    response_topic: String,
    correlation_data: Bytes,
    user_properties: Vec<(String, String)>,
}

impl LatestRow {
    /// `server` is this gateway's id.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] if the gateway cannot have written it.
    pub(super) fn into_value(self, server: &str) -> Result<LatestValue, StoreError> {
        let qos = QoS::from_bits(self.qos.cast_unsigned()).ok_or_else(|| {
            StoreError::Damaged(format!("qos {} of {} {}", self.qos, self.device, self.topic))
        })?;
        let has = |bit: i8| self.present & bit != 0;
        let properties = has(PROPERTIES).then(|| {
            Arc::new(Properties {
                payload_format: has(PAYLOAD_FORMAT).then_some(self.payload_format.cast_unsigned()),
                content_type: has(CONTENT_TYPE).then_some(self.content_type),
                response_topic: has(RESPONSE_TOPIC).then_some(self.response_topic),
                correlation_data: has(CORRELATION_DATA).then_some(self.correlation_data),
                user: self.user_properties,
            })
        });
        Ok(LatestValue {
            device: ClientId::new(&self.device),
            topic: Arc::from(self.topic),
            payload: self.payload,
            qos,
            retain: self.retained,
            properties,
            received: Timestamp(self.received.cast_unsigned()),
            version: self.version.cast_unsigned(),
            server: (self.server != server).then(|| Arc::from(self.server)),
        })
    }
}

/// Longest name in a key, in bytes.
const MAX_NAME: usize = 65_535;

/// Returns whether the text can be part of a key. MQTT has no empty names either.
pub(super) fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
}

/// About the bytes of a value's row.
pub(super) fn size(value: &LatestValue) -> usize {
    let properties = value.properties.as_deref().map_or(0, |p| {
        let texts = [&p.content_type, &p.response_topic].map(|text| text.as_ref().map_or(0, String::len));
        let user: usize = p.user.iter().map(|(name, value)| name.len() + value.len() + 12).sum();
        texts[0] + texts[1] + p.correlation_data.as_ref().map_or(0, Bytes::len) + user
    });
    value.device.as_str().len() + value.topic.len() + value.payload.len() + properties + 128
}

/// `numbers` in groups of one device each, of fewer than `bytes` unless a value is larger alone.
pub(super) fn by_device(values: &[LatestValue], numbers: &[usize], bytes: usize) -> Vec<Vec<usize>> {
    groups(numbers.iter().map(|n| (*n, values[*n].device.as_str(), size(&values[*n]))), bytes)
}

/// Numbers, each with its partition and its row's size, in groups of one partition each, of fewer than `bytes` unless a
/// row is larger alone.
pub(super) fn groups<P: Eq + Hash>(
    rows: impl Iterator<Item = (usize, P, usize)>,
    bytes: usize,
) -> Vec<Vec<usize>> {
    let mut done = Vec::new();
    let mut open: HashMap<P, (usize, Vec<usize>), RandomState> = HashMap::default();
    for (number, partition, size) in rows {
        let (filled, group) = open.entry(partition).or_default();
        if !group.is_empty() && *filled + size >= bytes {
            done.push(std::mem::take(group));
            *filled = 0;
        }
        *filled += size;
        group.push(number);
    }
    done.extend(open.into_values().map(|(_, group)| group));
    done
}

/// Tells for each of `numbers` whether its value is the newest of its topic.
pub(super) fn newest_by_topic(values: &[LatestValue], numbers: &[usize]) -> Vec<bool> {
    let mut newest: HashMap<&str, usize, RandomState> = HashMap::default();
    for number in numbers {
        let best = newest.entry(&values[*number].topic).or_insert(*number);
        if values[*best].version < values[*number].version {
            *best = *number;
        }
    }
    let mut is_newest = vec![false; values.len()];
    newest.into_values().for_each(|number| is_newest[number] = true);
    is_newest
}
