//! Any operations on a session.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = mqtt_server::session::fuzz_session(data);
});
