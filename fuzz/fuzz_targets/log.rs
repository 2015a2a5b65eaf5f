//! Any bytes as those of a segment of the log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    segment_log::fuzz_log(data);
    segment_log::fuzz_log_frame(data);
});
