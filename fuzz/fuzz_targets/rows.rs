//! Any bytes as rows of a ledger, and as a record.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ledger::fuzz_rows(data);
});
