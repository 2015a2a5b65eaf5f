//! The fields of a posted form: within a size, on the memory account while the form is worked on.

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

use super::state::{PageState, out_of_memory};
use crate::counters::count;
use crate::held::HeldBytes;

/// Most bytes of a form, and of a form from an unknown sender.
pub(super) const MOST: usize = 256 << 10;
pub(super) const MOST_UNKNOWN: usize = 32 << 10;
/// Most fields.
const FIELDS: usize = 64;

/// The fields of a form.
pub(super) struct FormFields {
    pairs: Vec<(String, String)>,
    _held: HeldBytes,
}

impl FormFields {
    /// Reads a form of at most so many bytes, which comes within `http.body_timeout` as a whole.
    pub(super) async fn read(
        page_state: &PageState,
        headers: &HeaderMap,
        body: Body,
        most: usize,
    ) -> Result<Self, Response> {
        let refuse = |status: StatusCode, why: &'static str| (status, why).into_response();
        let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
            return Err(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, "this is not a form\n"));
        }
        let mut held = HeldBytes::new(&page_state.account);
        let (mut body, mut whole) = (body, Vec::new());
        let end = Instant::now() + page_state.body_timeout;
        loop {
            let Ok(frame) = timeout_at(end, body.frame()).await else {
                count(|c| c.http_bodies_late.add(1));
                return Err(refuse(
                    StatusCode::REQUEST_TIMEOUT,
                    "the rest of the form did not come in time\n",
                ));
            };
            let Some(frame) = frame else { break };
            let Ok(frame) = frame else {
                return Err(refuse(StatusCode::BAD_REQUEST, "the form did not come to its end\n"));
            };
            let Ok(data) = frame.into_data() else { continue };
            if whole.len() + data.len() > most {
                return Err(refuse(StatusCode::PAYLOAD_TOO_LARGE, "the form is too large\n"));
            }
            // A vector doubles, and each field is decoded and may be shown again.
            if held.more(4 * data.len()).is_err() {
                return Err(out_of_memory());
            }
            whole.extend_from_slice(&data);
        }
        let pairs: Vec<(String, String)> = form_urlencoded::parse(&whole).into_owned().take(FIELDS).collect();
        Ok(Self { pairs, _held: held })
    }

    /// Returns the text of the field; empty if the field is not there.
    pub(super) fn get(&self, name: &str) -> &str {
        self.pairs.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }

    /// Returns the text of a field of several lines, which browsers send with line breaks of their own.
    pub(super) fn lines(&self, name: &str) -> String {
        self.get(name).replace("\r\n", "\n")
    }

    /// Returns whether the box is ticked.
    pub(super) fn ticked(&self, name: &str) -> bool {
        !self.get(name).is_empty()
    }
}
