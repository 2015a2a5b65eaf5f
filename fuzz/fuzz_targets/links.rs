//! Any bytes as the headers of a link between gateways.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    links::fuzz_links(data);
});
