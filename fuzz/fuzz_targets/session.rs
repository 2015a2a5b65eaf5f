//! Any operations on a session.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = session::fuzz_session(data);
});
