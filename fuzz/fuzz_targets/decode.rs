//! Any bytes into the decoder.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = codec::fuzz_decode(data);
});
