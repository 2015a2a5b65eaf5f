//! Body of the fuzz target `links`.

use crate::{PassedCaller, RelayedDevice};

/// Takes bytes as the headers of a link. A device or caller that is read is the same when it is written and read again. Panics where
/// that does not hold.
#[doc(hidden)]
pub fn fuzz_links(data: &[u8]) {
    if let Some(device) = RelayedDevice::from_header(data) {
        let header = device.to_header();
        let again =
            header.map(|header| RelayedDevice::from_header(header.as_bytes()).expect("written by us"));
        assert!(again.is_none_or(|again| again == device));
    }
    if let Some(caller) = PassedCaller::from_header(data) {
        let header = caller.to_header();
        let again = header.map(|header| PassedCaller::from_header(header.as_bytes()).expect("written by us"));
        assert!(again.is_none_or(|again| again == caller));
        let _ = caller.grant();
    }
}
