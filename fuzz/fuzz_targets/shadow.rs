//! Any bytes as JSON, and as updates of a device shadow.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    shadow::fuzz_shadow(data);
});
