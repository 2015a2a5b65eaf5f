//! Page tokens: opaque, and good only for the request they came with.
//!
//! A token is where the next page starts, with a checksum of the request (less its page fields) and one of the whole.
//! They guard against mistakes, not against forgery: whoever may ask for a page may ask for any.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use prost::Message;

use crate::status::Error;

/// Bytes of a page of a list: under the 4 MiB that clients accept by default.
pub const PAGE_BYTES: usize = 3 << 20;

/// The pages of one request.
#[derive(Debug, Clone, Copy)]
pub struct RequestPages {
    request: u32,
}

impl RequestPages {
    /// Of the RPC `method`; `request` is without its page size and token.
    pub fn of(method: &str, request: &impl Message) -> Self {
        let mut bytes = method.as_bytes().to_vec();
        bytes.push(0);
        bytes.extend(request.encode_to_vec());
        Self { request: crc32fast::hash(&bytes) }
    }

    /// Returns the place at which the page of `token` starts; `None` is the first page.
    pub fn start(self, token: &str) -> Result<Option<String>, Error> {
        if token.is_empty() {
            return Ok(None);
        }
        let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| Error::PageTokenInvalid)?;
        let (rest, whole) = bytes.split_last_chunk::<4>().ok_or(Error::PageTokenInvalid)?;
        let (request, start) = rest.split_first_chunk::<4>().ok_or(Error::PageTokenInvalid)?;
        if crc32fast::hash(rest) != u32::from_le_bytes(*whole) {
            return Err(Error::PageTokenInvalid);
        }
        if u32::from_le_bytes(*request) != self.request {
            return Err(Error::PageTokenMismatch);
        }
        String::from_utf8(start.to_vec()).map(Some).map_err(|_| Error::PageTokenInvalid)
    }

    /// The token of a page that starts at `start`; an empty one at the end.
    pub fn token(self, start: Option<&str>) -> String {
        let Some(start) = start else { return String::new() };
        let mut bytes = self.request.to_le_bytes().to_vec();
        bytes.extend(start.as_bytes());
        let whole = crc32fast::hash(&bytes);
        bytes.extend(whole.to_le_bytes());
        URL_SAFE_NO_PAD.encode(bytes)
    }
}

/// As many items as fit in `budget` bytes, at least one; true if some did not.
pub fn fit<T: Message>(items: impl Iterator<Item = T>, budget: usize) -> (Vec<T>, bool) {
    let mut taken = Vec::new();
    let mut size = 0;
    for item in items {
        size += item.encoded_len() + 8;
        if size > budget && !taken.is_empty() {
            return (taken, true);
        }
        taken.push(item);
    }
    (taken, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_api::gateway::v1::{ListLatestRequest, ListRetainedRequest};

    #[test]
    fn a_token_is_good_for_its_own_request_and_for_no_other() {
        let request =
            |filter: &str| ListLatestRequest { topic_filter: filter.to_owned(), ..Default::default() };
        let pages = RequestPages::of("ListLatest", &request("a/#"));
        let token = pages.token(Some("d\u{1}a/b"));
        assert_eq!(pages.start(&token), Ok(Some("d\u{1}a/b".to_owned())));
        assert_eq!((pages.start(""), pages.token(None)), (Ok(None), String::new()));
        assert!(!token.contains("a/b"), "nothing to read there");

        let other = RequestPages::of("ListLatest", &request("b/#"));
        assert_eq!(other.start(&token), Err(Error::PageTokenMismatch));
        // The same fields of another RPC.
        let retained = ListRetainedRequest { topic_filter: "a/#".to_owned(), ..Default::default() };
        assert_eq!(RequestPages::of("ListRetained", &retained).start(&token), Err(Error::PageTokenMismatch));

        for at in 0..token.len() {
            let mut bad = token.clone().into_bytes();
            bad[at] = if bad[at] == b'A' { b'B' } else { b'A' };
            let bad = String::from_utf8(bad).unwrap();
            assert_ne!(pages.start(&bad), Ok(Some("d\u{1}a/b".to_owned())), "{bad}");
            assert!(pages.start(&token[..at]).is_err() || at == 0);
        }
        assert_eq!(pages.start("?"), Err(Error::PageTokenInvalid));
    }
}
