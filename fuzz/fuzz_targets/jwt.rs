//! Any bytes as a token, as the claims of one that is well signed, and as a set of keys.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    access::login_fuzz::fuzz_jwt(data);
});
