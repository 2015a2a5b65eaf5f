//! Any bytes as those of a segment.

use std::sync::Arc;

use super::format::{self, LogFrame, PlacesAt, Prefix, SegmentHeader};

/// Decodes `data` as a header, as frames and as a footer: each is told to be unsound or is what its encoding gives again.
pub fn fuzz_log(data: &[u8]) {
    if let Prefix::Length(length) = format::prefix(data)
        && let Some(header) = data.get(..length).and_then(SegmentHeader::decode)
    {
        assert_eq!(header.encode(), data[..length], "a header is as it was written");
    }
    // The first eight bytes are where the frames are in the log: a sum is of bytes and their place.
    let (offset, mut rest) = data.split_first_chunk::<8>().unwrap_or((&[0; 8], data));
    let mut offset = u64::from_le_bytes(*offset);
    let mut known = Arc::from([]);
    while let Some((frame, length)) = format::frame(rest, offset) {
        assert!((format::FRAME..=rest.len()).contains(&length));
        if let LogFrame::Record(record) = frame {
            let groups = record.groups().count();
            if let Some(decoded) = record.decode(offset, &mut known) {
                assert_eq!(decoded.groups.len(), groups);
                assert_eq!(record.received(), Some(decoded.message.received));
            }
        }
        rest = &rest[length..];
        offset = offset.wrapping_add(length as u64);
    }
    let tail = data.len().saturating_sub(format::TRAILER);
    if let Some(trailer) = format::trailer(&data[tail..]) {
        let _ = trailer.decode_holes(&data[..tail]);
    }
    if let Some(places) = PlacesAt::decode(data) {
        let _ = places.places(data.get(format::ENTRY..).unwrap_or_default());
    }
}

/// As [`fuzz_log`], of one frame whose sum is made right: so what is after the sum is reached.
pub fn fuzz_log_frame(data: &[u8]) {
    let Some((tag, body)) = data.split_first() else { return };
    let offset = 99_u64;
    let mut bytes = offset.to_le_bytes().to_vec();
    format::put_frame(tag & 1, body, offset, &mut bytes);
    fuzz_log(&bytes);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_of_a_segment_panic(data in prop::collection::vec(any::<u8>(), 0..400)) {
            fuzz_log(&data);
            let mut record = vec![0];
            record.extend_from_slice(&data);
            fuzz_log_frame(&record);
            record[0] = 1;
            fuzz_log_frame(&record);
        }
    }
}
