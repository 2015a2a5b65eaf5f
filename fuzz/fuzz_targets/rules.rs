//! Any bytes as rules, and decisions by them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    access::rules::fuzz_rules(data);
});
