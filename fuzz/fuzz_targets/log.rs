//! Any bytes as those of a segment of the log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    store::fuzz_log(data);
    store::fuzz_log_frame(data);
});
