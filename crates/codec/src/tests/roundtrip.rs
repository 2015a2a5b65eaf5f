//! Encoding and decoding are inverse; a cut packet is never accepted silently.

use proptest::prelude::*;

use super::{
    packets::{Sample, sample},
    *,
};

fn any_sample() -> impl Strategy<Value = (Protocol, Sample)> {
    prop_oneof![Just(Protocol::V3), Just(Protocol::V4), Just(Protocol::V5)]
        .prop_flat_map(|protocol| (Just(protocol), sample(protocol)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_packet_survives_a_round_trip((protocol, sample) in any_sample()) {
        let packet = sample.packet();
        let bytes = encoded(&packet, protocol);
        prop_assert_eq!(frame_len(&bytes), Ok(Some(bytes.len())));
        prop_assert_eq!(decode_one(&bytes, protocol), Ok(packet.clone()));
        if let Packet::Publish(publish) = &packet {
            prop_assert_eq!(PublishFrame::of(publish, protocol).encoded_len(), bytes.len());
        }
    }

    #[test]
    fn a_limit_is_kept_or_nothing_is_written((protocol, sample) in any_sample(), max in 0..200_usize) {
        let packet = sample.packet();
        let mut out = vec![1, 2, 3];
        let fits = encode_within(&packet, protocol, max, &mut out);
        let (before, written) = out.split_at(3);
        prop_assert_eq!(before, [1, 2, 3]);
        prop_assert_eq!(fits, !written.is_empty());
        if fits {
            prop_assert!(written.len() <= max);
            prop_assert!(decode_one(written, protocol).is_ok());
        }
    }

    #[test]
    fn a_cut_stream_is_incomplete_and_a_cut_body_is_no_other_packet((protocol, sample) in any_sample()) {
        let packet = sample.packet();
        let bytes = encoded(&packet, protocol);
        let whole = frame(&bytes, bytes.len()).expect("valid").expect("whole");
        for len in 0..bytes.len() {
            prop_assert_eq!(frame(&bytes[..len], usize::MAX), Ok(None));
        }
        for len in 0..whole.body.len() {
            let shorter = framed(whole.first, &whole.body[..len]);
            let result = decode_one(&shorter, protocol);
            prop_assert!(result.as_ref() != Ok(&packet), "accepted though cut at {}", len);
            if let Err(error) = result {
                let code = error.reason_code();
                prop_assert!([0x81, 0x82].contains(&code), "{} at {}", error, len);
            }
        }
    }

    #[test]
    fn decoding_any_bytes_does_not_panic(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzz_decode(&data);
    }
}
