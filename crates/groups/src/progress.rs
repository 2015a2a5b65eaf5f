//! Progress of a group in a partition, as it is kept on disk.

use bytes::{Buf, Bytes};
use gateway_core::Timestamp;
use thiserror::Error;

use super::lagging::{Lagging, Undelivered};

/// Progress of a group in one partition. Everything before [`read`](Self::read) is settled except the messages named here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Place from which on nothing was read yet.
    pub(crate) read: u64,
    /// Unsettled messages before `read`, in order.
    pub(crate) unsettled: Vec<Undelivered>,
    /// Keys that lag, by number of key, with what waits of them.
    pub(crate) lagging: Vec<(u64, Lagging)>,
}

/// A record of progress that this version cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadProgress {
    /// A later version wrote it.
    #[error("written by a later version ({0})")]
    Version(u8),
    /// The record is damaged.
    #[error("damaged")]
    Damaged,
}

/// Without pauses: what older versions read, too.
const VERSION: u8 = 1;
/// Each key that lags has the end of its pause besides.
const WITH_PAUSES: u8 = 2;

impl Progress {
    /// Nothing read from `offset` on, all before it settled.
    pub fn at(offset: u64) -> Self {
        Self { read: offset, ..Self::default() }
    }

    /// Returns the place from which on nothing was read yet.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// The first place that is not settled.
    pub fn floor(&self) -> u64 {
        let unsettled = self.unsettled.first().map_or(self.read, |first| first.offset);
        let lagging = self.lagging.iter().filter_map(|(_, lagging)| lagging.first());
        lagging.fold(self.read.min(unsettled), u64::min)
    }

    /// Returns the number of messages named.
    pub fn named(&self) -> usize {
        self.unsettled.len() + self.lagging.iter().map(|(_, lagging)| lagging.todo.len()).sum::<usize>()
    }

    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(16 + 3 * self.unsettled.len() + 32 * self.lagging.len());
        let has_pauses = self.lagging.iter().any(|(_, lagging)| lagging.due.is_some());
        out.push(if has_pauses { WITH_PAUSES } else { VERSION });
        put(&mut out, self.read);
        put_waiting(&mut out, self.unsettled.iter());
        put(&mut out, self.lagging.len() as u64);
        for (key, lagging) in &self.lagging {
            out.extend_from_slice(&key.to_le_bytes());
            put(&mut out, lagging.scan.map_or(0, |scan| scan.saturating_add(1)));
            put_waiting(&mut out, lagging.todo.iter());
            let reason = lagging.reason.as_deref().unwrap_or_default();
            put(&mut out, reason.len() as u64);
            out.extend_from_slice(reason.as_bytes());
            if has_pauses {
                put(&mut out, lagging.due.map_or(0, |due| due.0.saturating_add(1)));
            }
        }
        Bytes::from(out)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`BadProgress`] if it is not one.
    pub fn decode(mut from: &[u8]) -> Result<Self, BadProgress> {
        let version = from.first().copied().ok_or(BadProgress::Damaged)?;
        if !(VERSION..=WITH_PAUSES).contains(&version) {
            return Err(if version > VERSION { BadProgress::Version(version) } else { BadProgress::Damaged });
        }
        from.advance(1);
        decode(&mut from, version == WITH_PAUSES).filter(|_| from.is_empty()).ok_or(BadProgress::Damaged)
    }
}

fn decode(from: &mut &[u8], has_pauses: bool) -> Option<Progress> {
    let read = get(from)?;
    let unsettled = get_waiting(from)?;
    let mut lagging = Vec::new();
    for _ in 0..get(from)? {
        let key = (from.remaining() >= 8).then(|| from.get_u64_le())?;
        let scan = get(from)?.checked_sub(1);
        let todo = get_waiting(from)?;
        let length = usize::try_from(get(from)?).ok().filter(|&length| length <= from.len())?;
        let (reason, rest) = from.split_at(length);
        *from = rest;
        let reason = std::str::from_utf8(reason).ok()?;
        let reason = (!reason.is_empty()).then(|| reason.into());
        let due = if has_pauses { get(from)?.checked_sub(1).map(Timestamp) } else { None };
        let alone = todo.first().is_some_and(|first| first.attempts > 0);
        lagging.push((key, Lagging { todo: todo.into(), scan, due, alone, reason, ..Lagging::default() }));
    }
    Some(Progress { read, unsettled, lagging })
}

/// The distance from one to the next, then the attempts of those that have any.
fn put_waiting<'a>(out: &mut Vec<u8>, waiting: impl ExactSizeIterator<Item = &'a Undelivered> + Clone) {
    put(out, waiting.len() as u64);
    let mut last = 0;
    for one in waiting.clone() {
        put(out, one.offset - last);
        last = one.offset;
    }
    let tried = waiting.enumerate().filter(|(_, one)| one.attempts > 0);
    put(out, tried.clone().count() as u64);
    let mut last = 0;
    for (at, one) in tried {
        put(out, (at - last) as u64);
        put(out, u64::from(one.attempts));
        last = at;
    }
}

fn get_waiting(from: &mut &[u8]) -> Option<Vec<Undelivered>> {
    // Each takes a byte at least, so that a wrong count takes no memory.
    let count = usize::try_from(get(from)?).ok().filter(|&count| count <= from.len())?;
    let mut waiting: Vec<Undelivered> = Vec::with_capacity(count);
    let mut offset = 0_u64;
    for at in 0..count {
        let step = get(from)?;
        if at > 0 && step == 0 {
            return None;
        }
        offset = offset.checked_add(step)?;
        waiting.push(Undelivered { offset, attempts: 0 });
    }
    let mut at = 0;
    for _ in 0..get(from)? {
        at = usize::try_from(get(from)?).ok()?.checked_add(at)?;
        waiting.get_mut(at)?.attempts = u32::try_from(get(from)?).ok()?;
    }
    Some(waiting)
}

/// LEB128.
pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

pub(crate) fn get(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn waiting(limit: usize) -> impl Strategy<Value = Vec<Undelivered>> {
        let offset = prop_oneof![0..2_000_u64, any::<u64>()];
        prop::collection::btree_map(offset, prop_oneof![Just(0), any::<u32>()], 0..limit).prop_map(|map| {
            map.into_iter().map(|(offset, attempts)| Undelivered { offset, attempts }).collect()
        })
    }

    fn lagging() -> impl Strategy<Value = (u64, Lagging)> {
        let scan = prop::option::of(0..u64::MAX);
        let due = prop::option::of(0..u64::MAX);
        (any::<u64>(), waiting(5), scan, due, prop::option::of("[a-zé]{1,9}")).prop_map(
            |(key, todo, scan, due, reason)| {
                let alone = todo.first().is_some_and(|first| first.attempts > 0);
                let (due, reason) = (due.map(Timestamp), reason.map(String::into_boxed_str));
                (key, Lagging { todo: todo.into(), scan, due, alone, reason, ..Lagging::default() })
            },
        )
    }

    fn progress() -> impl Strategy<Value = Progress> {
        (any::<u64>(), waiting(20), prop::collection::vec(lagging(), 0..4))
            .prop_map(|(read, unsettled, lagging)| Progress { read, unsettled, lagging })
    }

    proptest! {
        #[test]
        fn progress_is_read_back_as_it_was_written(progress in progress()) {
            let record = progress.encode();
            prop_assert_eq!(Progress::decode(&record), Ok(progress));
            for length in 0..record.len() {
                prop_assert_eq!(Progress::decode(&record[..length]), Err(BadProgress::Damaged));
            }
        }

        #[test]
        fn any_bytes_are_progress_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            for version in [VERSION, WITH_PAUSES] {
                if let Ok(progress) = Progress::decode(&[&[version], &bytes[..]].concat()) {
                    prop_assert!(progress.named() <= bytes.len());
                }
            }
        }
    }

    #[test]
    fn the_format_is_what_it_was() {
        let lagging = Lagging {
            todo: [Undelivered { offset: 300, attempts: 2 }].into(),
            scan: Some(400),
            alone: true,
            reason: Some("no".into()),
            ..Lagging::default()
        };
        let unsettled =
            vec![Undelivered { offset: 200, attempts: 0 }, Undelivered { offset: 210, attempts: 3 }];
        let mut progress = Progress { read: 1_000, unsettled, lagging: vec![(7, lagging)] };
        let record = progress.encode();
        let expected: &[u8] = &[
            1, 0xe8, 7, 2, 0xc8, 1, 10, 1, 1, 3, 1, 7, 0, 0, 0, 0, 0, 0, 0, 0x91, 3, 1, 0xac, 2, 1, 0, 2, 2,
            b'n', b'o',
        ];
        assert_eq!(record, expected);
        assert_eq!(progress.floor(), 200);
        progress.lagging[0].1.due = Some(Timestamp(129));
        let with_pause = [&[2], &expected[1..], &[0x82, 1]].concat();
        assert_eq!(progress.encode(), with_pause);
        assert_eq!(Progress::decode(&[3, 0]), Err(BadProgress::Version(3)));
    }
}
