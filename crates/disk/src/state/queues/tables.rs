//! The tables of queues, their keys and values, and the changes of one entry.
//!
//! `bodies`: message number -> record of the message. Numbers grow, so that bodies are only ever added at the end.
//! `refs`: message number -> how many entries have it, unless one. `entries`: queue, place -> number, flags, cost.
//! `received`: queue, packet identifier -> nothing. `expiry`: second, queue, place -> nothing, for what expires.
//! All numbers in keys are big-endian and shorter than 8 bytes, but for a queue: its home in 2 bytes, then its number in 6.

use std::ops::Bound;

use gateway_core::{QoS, QueueEntry, QueueId, Timestamp};
use heed::RoTxn;

use crate::{environment::Environment, format::QUEUE_TABLES, table::Table, table::WriteTxn};
use store::encoding::fields::{Input, put_varint};

const QUEUE: usize = 8;
/// The number of a group's queue in an entry. It is of the same home as the entry's own queue.
const GROUP_NUMBER: usize = 5;
const SEQ: usize = 6;
const NUMBER: usize = 6;
const SECOND: usize = 5;

const QOS: u8 = 3;
const RETAIN: u8 = 1 << 2;
const SENT: u8 = 1 << 3;
const SOLE: u8 = 1 << 4;
const GROUP: u8 = 1 << 5;
const IDS: u8 = 1 << 6;
const EXPIRY: u8 = 1 << 7;

pub(super) type EntryKey = [u8; QUEUE + SEQ];
pub(super) type NumberKey = [u8; NUMBER];

/// Entry `seq` of `queue`; `None` if that is out of range, which no session reaches.
pub(super) fn entry_key(queue: QueueId, seq: u64) -> Option<EntryKey> {
    let mut key = [0; QUEUE + SEQ];
    key[..QUEUE].copy_from_slice(&queue.0.to_be_bytes());
    put(&mut key[QUEUE..], seq)?;
    Some(key)
}

/// The last possible entry of `queue`.
pub(super) fn last_key(queue: QueueId) -> Option<EntryKey> {
    entry_key(queue, (1 << (8 * SEQ)) - 1)
}

/// Queue and place of an entry's key.
pub(crate) fn place(key: &[u8]) -> Option<(QueueId, u64)> {
    let mut input = Input(key);
    Some((QueueId(input.be(QUEUE)?), input.be(SEQ)?))
}

pub(super) fn number_key(number: u64) -> NumberKey {
    let mut key = [0; NUMBER];
    key.copy_from_slice(&number.to_be_bytes()[8 - NUMBER..]);
    key
}

/// Number of a message's key.
pub(super) fn number(key: &[u8]) -> Option<u64> {
    Input(key).be(NUMBER)
}

/// Returns the number of entries that share a message.
pub(super) fn refs(value: &[u8]) -> Option<u32> {
    Input(value).u32()
}

fn received_key(queue: QueueId, packet_id: u16) -> [u8; QUEUE + 2] {
    let mut key = [0; QUEUE + 2];
    key[..QUEUE].copy_from_slice(&queue.0.to_be_bytes());
    key[QUEUE..].copy_from_slice(&packet_id.to_be_bytes());
    key
}

/// Queue and packet identifier of a received key.
pub(crate) fn received(key: &[u8]) -> Option<(QueueId, u16)> {
    let mut input = Input(key);
    Some((QueueId(input.be(QUEUE)?), input.be(2)? as u16))
}

pub(super) fn expiry_key(second: u64, entry: &EntryKey) -> [u8; SECOND + QUEUE + SEQ] {
    let mut key = [0; SECOND + QUEUE + SEQ];
    key[..SECOND].copy_from_slice(&second.to_be_bytes()[8 - SECOND..]);
    key[SECOND..].copy_from_slice(entry);
    key
}

/// Second, queue and place of an expiry key.
pub(crate) fn expiry(key: &[u8]) -> Option<(u64, QueueId, u64)> {
    let mut input = Input(key);
    Some((input.be(SECOND)?, QueueId(input.be(QUEUE)?), input.be(SEQ)?))
}

/// The second by whose end a message that expires at `at` has expired; never, if that is beyond the format.
pub(super) fn expiry_second(at: Timestamp) -> Option<u64> {
    let second = at.0.div_ceil(1000);
    (second < 1 << (8 * SECOND)).then_some(second)
}

fn put(into: &mut [u8], number: u64) -> Option<()> {
    let bytes = number.to_be_bytes();
    let (zeros, rest) = bytes.split_at(8 - into.len());
    into.copy_from_slice(rest);
    zeros.iter().all(|&zero| zero == 0).then_some(())
}

/// Fields of an entry in `entries`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EntryHead {
    /// Number of its message; 0 if it was released and only its place is kept.
    pub(crate) number: u64,
    pub(crate) qos: QoS,
    pub(crate) retain: bool,
    pub(crate) sent: bool,
    /// No other entry has its message.
    pub(crate) sole: bool,
    pub(crate) cost: u32,
    pub(crate) group: QueueId,
    pub(crate) ids: Option<Box<[u32]>>,
    /// The second by whose end it may be dropped unsent.
    pub(crate) expiry: Option<u64>,
}

impl EntryHead {
    /// Writes the value into `out`, which is cleared first.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        encode(out, self, self.ids.as_deref());
    }

    /// Writes the value of a new entry into `out`, which is cleared first, and gives its second in `expiry`.
    pub(super) fn encode_new(entry: &QueueEntry, number: u64, sole: bool, out: &mut Vec<u8>) -> Option<u64> {
        // A message that may have been sent is sent again even when it has expired [MQTT-3.3.2-5].
        let sent = entry.may_be_sent();
        let expiry = if sent { None } else { entry.expires.and_then(expiry_second) };
        let head = Self {
            number,
            qos: entry.qos,
            retain: entry.retain,
            sent,
            sole,
            cost: entry.cost(),
            group: entry.group,
            ids: None,
            expiry,
        };
        encode(out, &head, entry.ids.as_deref());
        head.swept()
    }

    /// The second of its key in `expiry`, if it has one: not what may have been sent, which is left to its session.
    pub(super) fn swept(&self) -> Option<u64> {
        self.expiry.filter(|_| !self.sent)
    }

    /// The value of a released entry: only its place is left.
    pub(super) fn released() -> Self {
        Self { qos: QoS::ExactlyOnce, sent: true, ..Self::default() }
    }

    /// Reads a value.
    pub(super) fn decode(value: &[u8]) -> Option<Self> {
        let mut input = Input(value);
        let (number, flags) = (input.be(NUMBER)?, input.u8()?);
        let mut head = Self {
            number,
            qos: QoS::from_bits(flags & QOS)?,
            retain: flags & RETAIN != 0,
            sent: flags & SENT != 0,
            sole: flags & SOLE != 0,
            cost: input.varint()?,
            ..Self::default()
        };
        if flags & GROUP != 0 {
            head.group = QueueId::of(QueueId::HOME, input.be(GROUP_NUMBER)?);
        }
        if flags & EXPIRY != 0 {
            head.expiry = Some(input.be(SECOND)?);
        }
        if flags & IDS != 0 {
            let mut ids = Vec::new();
            while !input.0.is_empty() {
                ids.push(input.varint()?);
            }
            head.ids = Some(ids.into());
        }
        Some(head)
    }

    /// Cost, group (if any) and QoS of a value, without the rest.
    pub(super) fn decode_cost(value: &[u8]) -> Option<u32> {
        Input(value.get(NUMBER + 1..)?).varint()
    }

    /// Returns whether a value has QoS 2.
    pub(super) fn is_exact(value: &[u8]) -> bool {
        value.get(NUMBER).is_some_and(|flags| flags & QOS == QoS::ExactlyOnce as u8)
    }

    /// Returns whether a value names a shared group.
    pub(super) fn has_group(value: &[u8]) -> bool {
        value.get(NUMBER).is_some_and(|flags| flags & GROUP != 0)
    }
}

fn encode(out: &mut Vec<u8>, head: &EntryHead, ids: Option<&[u32]>) {
    out.clear();
    out.extend_from_slice(&number_key(head.number));
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    out.push(
        head.qos as u8
            | flag(head.retain, RETAIN)
            | flag(head.sent, SENT)
            | flag(head.sole, SOLE)
            | flag(head.group != QueueId::NONE, GROUP)
            | flag(head.expiry.is_some(), EXPIRY)
            | flag(ids.is_some(), IDS),
    );
    put_varint(out, head.cost);
    if head.group != QueueId::NONE {
        out.extend_from_slice(&head.group.0.to_be_bytes()[8 - GROUP_NUMBER..]);
    }
    if let Some(second) = head.expiry {
        out.extend_from_slice(&second.to_be_bytes()[8 - SECOND..]);
    }
    for &id in ids.unwrap_or_default() {
        put_varint(out, id);
    }
}

/// The open tables.
#[derive(Clone, Copy)]
pub(crate) struct QueueTables {
    pub(super) bodies: Table,
    pub(super) refs: Table,
    pub(super) entries: Table,
    pub(super) received: Table,
    pub(super) expiry: Table,
}

impl QueueTables {
    /// Opens them, new ones in an empty environment.
    pub(crate) fn create(environment: &Environment, txn: &mut WriteTxn<'_>) -> Result<Self, heed::Error> {
        let [bodies, refs, entries, received, expiry] = QUEUE_TABLES;
        let mut table = |name| environment.table(txn, name);
        Ok(Self {
            bodies: table(bodies)?,
            refs: table(refs)?,
            entries: table(entries)?,
            received: table(received)?,
            expiry: table(expiry)?,
        })
    }

    /// One more than the last message number in use.
    pub(super) fn next_number(&self, txn: &RoTxn<'_>) -> Result<u64, heed::Error> {
        let last = self.bodies.last(txn)?.and_then(|(key, _)| number(key));
        Ok(last.map_or(1, |last| last + 1))
    }

    /// Adds a message after all others, for `refs` entries.
    pub(super) fn add_body(
        &self,
        txn: &mut WriteTxn<'_>,
        number: u64,
        record: &[u8],
        refs: u32,
    ) -> Result<(), heed::Error> {
        let key = number_key(number);
        self.bodies.append(txn, &key, record)?;
        if refs > 1 {
            self.refs.put(txn, &key, &refs.to_le_bytes())?;
        }
        Ok(())
    }

    /// Removes an entry with all that belongs to it, and returns what it was if it was there.
    pub(super) fn remove(
        &self,
        txn: &mut WriteTxn<'_>,
        key: &EntryKey,
    ) -> Result<Option<EntryHead>, heed::Error> {
        let Some(value) = self.entries.get(txn, key)? else { return Ok(None) };
        // Nothing else is known of a damaged value.
        let head = EntryHead::decode(value).unwrap_or_default();
        self.entries.delete(txn, key)?;
        self.drop_content(txn, key, &head)?;
        Ok(Some(head))
    }

    /// Keeps only the place of an entry; also if it was not there (its message had expired).
    pub(super) fn release(
        &self,
        txn: &mut WriteTxn<'_>,
        key: &EntryKey,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error> {
        let head = self.entries.get(txn, key)?.and_then(EntryHead::decode);
        if let Some(head) = head {
            self.drop_content(txn, key, &head)?;
        }
        EntryHead::released().encode(buffer);
        self.entries.put(txn, key, buffer)
    }

    /// Notes that an entry may have been sent, so that it is no longer swept. Its key in `expiry` must be gone already.
    pub(super) fn note_sent(
        &self,
        txn: &mut WriteTxn<'_>,
        key: &EntryKey,
        head: EntryHead,
    ) -> Result<(), heed::Error> {
        let mut value = Vec::new();
        EntryHead { sent: true, ..head }.encode(&mut value);
        self.entries.put(txn, key, &value)
    }

    /// Notes that all entries of a queue below this place may have been sent. Those already marked are left alone; the
    /// others are few, as few are in flight.
    pub(crate) fn note_all_sent(
        &self,
        txn: &mut WriteTxn<'_>,
        queue: QueueId,
        below: u64,
    ) -> Result<(), heed::Error> {
        let (Some(first), Some(end)) = (entry_key(queue, 0), entry_key(queue, below)) else { return Ok(()) };
        let mut unknown: Vec<(EntryKey, EntryHead)> = Vec::new();
        for entry in self.entries.range(txn, &(Bound::Included(&first[..]), Bound::Excluded(&end[..])))? {
            let (key, value) = entry?;
            if let (Ok(key), Some(head)) =
                (EntryKey::try_from(key), EntryHead::decode(value).filter(|head| !head.sent))
            {
                unknown.push((key, head));
            }
        }
        for (key, head) in unknown {
            if let Some(second) = head.swept() {
                self.expiry.delete(txn, &expiry_key(second, &key))?;
            }
            self.note_sent(txn, &key, head)?;
        }
        Ok(())
    }

    fn drop_content(
        &self,
        txn: &mut WriteTxn<'_>,
        key: &EntryKey,
        head: &EntryHead,
    ) -> Result<(), heed::Error> {
        if let Some(second) = head.swept() {
            self.expiry.delete(txn, &expiry_key(second, key))?;
        }
        if head.number == 0 {
            return Ok(());
        }
        let number = number_key(head.number);
        if !head.sole {
            let left = self.refs.get(txn, &number)?.and_then(refs).unwrap_or(1);
            if left > 1 {
                return self.refs.put(txn, &number, &(left - 1).to_le_bytes());
            }
            self.refs.delete(txn, &number)?;
        }
        self.bodies.delete(txn, &number)?;
        Ok(())
    }

    /// Notes, or forgets, that a message with this packet identifier came in.
    pub(super) fn set_received(
        &self,
        txn: &mut WriteTxn<'_>,
        queue: QueueId,
        packet_id: u16,
        received: bool,
    ) -> Result<(), heed::Error> {
        let key = received_key(queue, packet_id);
        if received { self.received.put(txn, &key, &[]) } else { self.received.delete(txn, &key).map(|_| ()) }
    }

    /// Forgets all received packet identifiers of a queue.
    pub(super) fn forget_received(&self, txn: &mut WriteTxn<'_>, queue: QueueId) -> Result<(), heed::Error> {
        let (first, last) = (received_key(queue, 0), received_key(queue, u16::MAX));
        let range = (Bound::Included(&first[..]), Bound::Included(&last[..]));
        self.received.delete_range(txn, &range)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_home_and_number_and_refuse_what_does_not_fit() {
        let last = QueueId::of(u16::MAX, (1 << 48) - 1);
        let keys: Vec<_> = [(0, 1, 0), (0, 1, 255), (0, 1, 256), (0, 1, (1 << 48) - 1), (0, 2, 0), (1, 1, 7)]
            .map(|(home, queue, seq)| entry_key(QueueId::of(home, queue), seq).unwrap())
            .into_iter()
            .chain(entry_key(last, 7))
            .collect();
        assert!(keys.is_sorted());
        assert_eq!(place(&keys[1]), Some((QueueId(1), 255)));
        assert_eq!(keys[5][..3], [0, 1, 0], "the home comes first");
        assert_eq!(entry_key(QueueId(1), 1 << 48), None);
        assert_eq!(expiry(&expiry_key(77, &keys[6])), Some((77, last, 7)));
    }

    #[test]
    fn heads_come_back_as_they_went_and_no_bytes_make_the_decoder_panic() {
        let full = EntryHead {
            number: 1 << 40,
            qos: QoS::ExactlyOnce,
            retain: true,
            sent: true,
            sole: true,
            cost: 70_000,
            group: QueueId(9),
            ids: Some([1, 268_435_455].into()),
            expiry: Some(1_700_000_000),
        };
        let bare = EntryHead { ids: None, group: QueueId::NONE, expiry: None, ..full.clone() };
        let mut bytes = Vec::new();
        for head in [EntryHead::released(), bare, full] {
            head.encode(&mut bytes);
            assert_eq!(EntryHead::decode(&bytes).as_ref(), Some(&head));
            assert_eq!(EntryHead::decode_cost(&bytes), Some(head.cost));
            for at in 0..bytes.len() {
                let _ = EntryHead::decode(&bytes[..at]);
                let mut flipped = bytes.clone();
                flipped[at] ^= 0xFF;
                let _ = EntryHead::decode(&flipped);
            }
        }
    }
}
