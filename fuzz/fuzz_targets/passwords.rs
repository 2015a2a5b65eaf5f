//! Any bytes as a file of users and password hashes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    access::login_fuzz::fuzz_passwords(data);
});
