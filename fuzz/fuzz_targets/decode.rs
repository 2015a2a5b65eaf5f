//! Any bytes into the decoder.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = mqtt_server::codec::fuzz_decode(data);
});
