//! One function that a fuzzer can call: whatever decodes must survive a round trip.

use gateway_core::Protocol;

use super::{Frame, Packet, PublishFrame, decode, decode_from_client, encode, encode_within, frame};

/// Splits `data` into frames, decodes each at all levels, encodes what decoded, decodes that again and
/// compares.
///
/// # Panics
/// When a packet does not survive the round trip: a fault of the codec.
pub fn fuzz_decode(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some(found)) = frame(rest, 1 << 20) {
        for protocol in [Protocol::V3, Protocol::V4, Protocol::V5] {
            check(&found, protocol);
        }
        let Some(next) = rest.get(found.len..) else {
            return;
        };
        rest = next;
    }
}

fn check(found: &Frame<'_>, protocol: Protocol) {
    let Ok(packet) = decode(found, protocol) else {
        assert!(decode_from_client(found, protocol).is_err(), "a client may not send what nobody may");
        return;
    };
    let mut bytes = Vec::new();
    encode(&packet, protocol, &mut bytes);
    if let Packet::Publish(publish) = &packet {
        assert_eq!(PublishFrame::of(publish, protocol).encoded_len(), bytes.len(), "length of {publish:?}");
    }
    let again = frame(&bytes, bytes.len());
    let Ok(Some(again)) = again else {
        panic!("no whole frame from {packet:?}: {again:?}");
    };
    assert_eq!(again.len, bytes.len(), "bytes after {packet:?}");
    assert_eq!(decode(&again, protocol).as_ref(), Ok(&packet), "changed by a round trip");
    let mut limited = Vec::new();
    let fits = encode_within(&packet, protocol, bytes.len() - 1, &mut limited);
    assert_eq!(fits, !limited.is_empty(), "result of {packet:?}");
    assert!(limited.len() < bytes.len(), "limit exceeded by {packet:?}");
}
