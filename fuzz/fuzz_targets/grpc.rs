//! Any bytes as gRPC requests and their conversion.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = mqtt_server::internals::fuzz_convert(data);
});
