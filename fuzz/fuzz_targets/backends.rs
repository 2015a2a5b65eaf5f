//! Any bytes as a file of tokens, and as filters and patterns of scopes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    access::backends::fuzz_backends(data);
});
