//! Entry point for fuzzing.

use bytes::Bytes;

use crate::{Assembly, MAX_ROW, Misread, Row, Segment, Stream, assemble, cut, decode, encode};

/// Takes bytes as rows of one number: each begins with its part, the count of parts and its length in one byte each. Panics if rows
/// that are whole are not those that are cut of the record in them, or if a record is decoded that is not written the same way again.
#[doc(hidden)]
pub fn fuzz_rows(data: &[u8]) {
    let segment = Segment { stream: Stream { home: 1, number: 2 }, epoch: 3, number: 4 };
    let whole = Bytes::copy_from_slice(data);
    if let Ok((head, position, changes)) = decode(&whole) {
        assert_eq!(encode(&head, &changes), (whole, position), "a record is written as it was read");
    }
    let (mut rows, mut rest) = (Vec::new(), data);
    while let [part, parts, length, tail @ ..] = rest {
        let (own, tail) = tail.split_at(tail.len().min(usize::from(*length)));
        let (part, parts, data) = (u16::from(*part), u16::from(*parts), Bytes::copy_from_slice(own));
        rows.push(Row { segment, n: 5, part, parts, data });
        rest = tail;
    }
    let found = assemble(segment, 5, &rows);
    if let Ok(Assembly::Whole(head, position, changes)) = &found {
        let (record, again) = encode(head, changes);
        assert_eq!(*position, again);
        let joined: Vec<u8> = rows.iter().flat_map(|row| row.data.to_vec()).collect();
        assert_eq!(record, joined);
        assert!((head.stream, head.epoch, head.n) == (segment.stream, 3, 5), "{head:?}");
    }

    // Any changes, as the record of them; and with one byte that is another.
    let head = crate::RecordHead { stream: segment.stream, epoch: 3, n: 5, time: 6, predecessor: 7 };
    let (record, position) = encode(&head, data);
    let rows = cut(&record, segment, 5).map(|rows| rows.to_vec()).unwrap_or_default();
    let expected = Assembly::Whole(head, position, Bytes::copy_from_slice(data));
    assert_eq!(assemble(segment, 5, &rows), Ok(expected));
    let at = crc32fast::hash(data) as usize % record.len();
    let mut flipped = rows;
    let row = &mut flipped[at / MAX_ROW];
    let mut changed = row.data.to_vec();
    changed[at % MAX_ROW] ^= 1 << (at % 8);
    row.data = changed.into();
    assert_eq!(assemble(segment, 5, &flipped).err(), Some(Misread::Damaged), "byte {at}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stable stand-in for the target in fuzz/: seeded bytes of many lengths, and records that are nearly right.
    #[test]
    fn any_bytes_are_taken_as_rows() {
        let mut chance = crate::twin::Chance::new(7);
        for length in (0..900).chain([MAX_ROW - 40, MAX_ROW, 2 * MAX_ROW + 17]) {
            let bytes: Vec<u8> = (0..length).map(|_| (chance.draw() >> 40) as u8 & 0x1F).collect();
            fuzz_rows(&bytes);
            let segment = Segment { stream: Stream { home: 1, number: 2 }, epoch: 3, number: 4 };
            let head = crate::RecordHead { stream: segment.stream, epoch: 3, n: 5, time: 6, predecessor: 7 };
            let (record, _) = encode(&head, &bytes);
            fuzz_rows(&record);
            let as_row = [&[0, 1, u8::try_from(record.len()).unwrap_or(u8::MAX)], &record[..]].concat();
            fuzz_rows(&as_row);
        }
    }
}
