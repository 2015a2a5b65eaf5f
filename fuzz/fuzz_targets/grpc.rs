//! Any bytes as gRPC requests and their conversion.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = grpc_messages::fuzz_convert(data);
});
