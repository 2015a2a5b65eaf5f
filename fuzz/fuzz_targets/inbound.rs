//! Any packets of a client into a session.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    session::fuzz_inbound(data);
});
