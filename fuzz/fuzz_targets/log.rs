//! Any bytes as those of a segment of the log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    disk::fuzz_log(data);
    disk::fuzz_log_frame(data);
});
