//! Messages that a group has given up, as they are kept.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use gateway_core::{ClientId, OriginKind, Properties, QoS, SharedMessage, Timestamp};
use serde::{Deserialize, Serialize};
use store::Expect;

use super::{
    GroupError, MessageFilter,
    records::put,
    state::{StateChange, StateRecord},
};

/// A message that was given up.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// Names it.
    pub id: u64,
    /// The message.
    pub message: Arc<SharedMessage>,
    /// Deliveries.
    pub attempts: u32,
    /// Time at which the message was given up.
    pub time: Timestamp,
    /// Of the last nack.
    pub reason: String,
    /// The group's filter matches it, as a caller may have it whose scope covers that filter. Not so of one that came under
    /// another filter.
    pub matches: bool,
}

/// The first byte of the key of each.
pub(super) const LETTER: u8 = b'l';

pub(super) fn key(id: u64) -> Bytes {
    let mut key = vec![LETTER];
    key.extend_from_slice(&id.to_be_bytes());
    Bytes::from(key)
}

pub(super) fn id(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.strip_prefix(&[LETTER])?.try_into().ok()?))
}

/// Count and size of the dead letters: where there is no room for one more, the oldest goes.
#[derive(Debug)]
pub(super) struct DeadLetters {
    /// Number and bytes of each, in order.
    kept: VecDeque<(u64, usize)>,
    bytes: usize,
    next: u64,
    most: usize,
    most_bytes: usize,
    /// Letters that are being put back.
    claimed: BTreeSet<u64>,
    /// Letters are being moved to another group: none is put back or removed.
    closed: bool,
}

impl DeadLetters {
    /// None, of which the next has the number `next` at least: numbers of those that are gone are not used again, for somebody
    /// may still ask for them.
    pub(super) fn new(most: usize, most_bytes: usize, next: u64) -> Self {
        let next = next.max(1);
        Self {
            kept: VecDeque::new(),
            bytes: 0,
            next,
            most,
            most_bytes,
            claimed: BTreeSet::new(),
            closed: false,
        }
    }

    /// The number of the next.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Keeps others from putting this letter back until [`Self::unclaim`]; false if somebody does already, or it is not there.
    pub(super) fn claim(&mut self, id: u64) -> bool {
        let is_there = self.kept.binary_search_by_key(&id, |&(kept, _)| kept).is_ok();
        is_there && !self.closed && self.claimed.insert(id)
    }

    pub(super) fn unclaim(&mut self, id: u64) {
        self.claimed.remove(&id);
    }

    /// Keeps all letters as they are until [`Self::reopen`]; false if one is being put back.
    pub(super) fn close(&mut self) -> bool {
        self.closed = self.claimed.is_empty();
        self.closed
    }

    pub(super) fn reopen(&mut self) {
        self.closed = false;
    }

    /// The next has this number at least.
    pub(super) fn go_on_from(&mut self, next: u64) {
        self.next = self.next.max(next);
    }

    /// Adds a letter of another group, under its number, which is higher than those that are here; returns the record to write.
    pub(super) fn adopt(&mut self, letter: &StateRecord) -> Option<StateChange> {
        self.restore(id(&letter.key)?, letter.value.len());
        Some(put(letter.key.clone(), letter.value.clone()))
    }

    /// Adds a letter that was kept by an earlier process. To be called in their order.
    pub(super) fn restore(&mut self, id: u64, bytes: usize) {
        self.kept.push_back((id, bytes));
        self.bytes += bytes;
        self.next = self.next.max(id + 1);
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    /// Adds a letter; returns the records to write.
    pub(super) fn add(
        &mut self,
        message: &SharedMessage,
        attempts: u32,
        reason: &str,
        time: Timestamp,
    ) -> Vec<StateChange> {
        let value = encode(message, attempts, reason, time);
        let id = self.next;
        self.next += 1;
        self.restore(id, value.len());
        let mut changes = vec![put(key(id), value)];
        while self.kept.len() > self.most.max(1) || (self.bytes > self.most_bytes && self.kept.len() > 1) {
            let Some((oldest, bytes)) = self.kept.pop_front() else { break };
            self.bytes -= bytes;
            broker::counters::count(|c| c.groups_dropped_letters.add(1));
            changes.push(StateChange { key: key(oldest), value: None, expect: Expect::Any });
        }
        changes
    }

    /// Removes this letter; returns the record to write, or `None` if the letter is not there.
    pub(super) fn remove(&mut self, id: u64) -> Option<StateChange> {
        if self.closed {
            return None;
        }
        let at = self.kept.binary_search_by_key(&id, |&(kept, _)| kept).ok()?;
        let (_, bytes) = self.kept.remove(at)?;
        self.bytes -= bytes;
        Some(StateChange { key: key(id), value: None, expect: Expect::Any })
    }

    /// The number of the newest.
    pub(super) fn newest(&self) -> Option<u64> {
        self.kept.back().map(|&(id, _)| id)
    }

    pub(super) fn ids(&self) -> Vec<u64> {
        self.kept.iter().map(|&(id, _)| id).collect()
    }
}

/// All of a letter but payload and correlation data, which follow it.
#[derive(Serialize, Deserialize)]
struct Head {
    topic: String,
    payload: usize,
    qos: u8,
    retain: bool,
    received: u64,
    expires: Option<u64>,
    kind: u8,
    device: Option<String>,
    properties: Option<Props>,
    attempts: u32,
    reason: String,
    time: u64,
}

#[derive(Serialize, Deserialize)]
struct Props {
    payload_format: Option<u8>,
    content_type: Option<String>,
    response_topic: Option<String>,
    has_correlation_data: bool,
    user: Vec<(String, String)>,
}

const VERSION: u8 = 1;

fn encode(message: &SharedMessage, attempts: u32, reason: &str, time: Timestamp) -> Bytes {
    let properties = message.properties.as_deref();
    let correlation = properties.and_then(|properties| properties.correlation_data.as_ref());
    let head = Head {
        topic: message.topic.to_string(),
        payload: message.payload.len(),
        qos: message.qos as u8,
        retain: message.retain,
        received: message.received.0,
        expires: message.expires.map(|at| at.0),
        kind: match message.kind {
            OriginKind::Device => 0,
            OriginKind::Backend => 1,
            OriginKind::Server => 2,
        },
        device: message.client_id.as_ref().map(|id| id.as_str().to_owned()),
        properties: properties.map(|properties| Props {
            payload_format: properties.payload_format,
            content_type: properties.content_type.clone(),
            response_topic: properties.response_topic.clone(),
            has_correlation_data: properties.correlation_data.is_some(),
            user: properties.user.clone(),
        }),
        attempts,
        reason: reason.to_owned(),
        time: time.0,
    };
    let head = serde_json::to_vec(&head).unwrap_or_default();
    let mut value = Vec::with_capacity(5 + head.len() + message.payload.len());
    value.push(VERSION);
    value.extend_from_slice(&u32::try_from(head.len()).unwrap_or(u32::MAX).to_le_bytes());
    value.extend_from_slice(&head);
    value.extend_from_slice(&message.payload);
    value.extend_from_slice(correlation.map_or(&[], |data| data));
    Bytes::from(value)
}

/// Reads a letter of a group that wants this.
pub(super) fn decode(record: &StateRecord, wants: &MessageFilter) -> Result<DeadLetter, GroupError> {
    parse(record, wants).ok_or(GroupError::Damaged)
}

fn parse(record: &StateRecord, wants: &MessageFilter) -> Option<DeadLetter> {
    let id = id(&record.key)?;
    let rest = record.value.strip_prefix(&[VERSION])?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let (head, rest) = rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
    let head: Head = serde_json::from_slice(head).ok()?;
    let (payload, correlation) = rest.split_at_checked(head.payload)?;
    let properties = head.properties.map(|own| {
        Arc::new(Properties {
            payload_format: own.payload_format,
            content_type: own.content_type,
            response_topic: own.response_topic,
            correlation_data: own.has_correlation_data.then(|| Bytes::copy_from_slice(correlation)),
            user: own.user,
        })
    });
    let message = Arc::new(SharedMessage {
        topic: Arc::from(head.topic),
        payload: Bytes::copy_from_slice(payload),
        qos: QoS::from_bits(head.qos)?,
        retain: head.retain,
        properties,
        expires: head.expires.map(Timestamp),
        received: Timestamp(head.received),
        kind: match head.kind {
            0 => OriginKind::Device,
            1 => OriginKind::Backend,
            2 => OriginKind::Server,
            _ => return None,
        },
        client_id: head.device.as_deref().map(ClientId::new),
        slot: 0,
        receipt: None,
        direct: false,
    });
    let (time, matches) = (Timestamp(head.time), wants(&message.borrow()));
    Some(DeadLetter { id, message, attempts: head.attempts, time, reason: head.reason, matches })
}
