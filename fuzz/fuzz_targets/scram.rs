//! Any bytes as what a client says in SCRAM.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    access::login_fuzz::fuzz_scram(data);
});
