//! Streams of the API as server-sent events.
//!
//! An item is an event of its name, its data the JSON of it. A stream that can be resumed has the place as the event's
//! id, and goes on behind `Last-Event-ID`. Any other stream has a number: a client that comes back with it is told by a
//! first event `gap` that it may have missed something. A call that fails before its first item is an answer like any
//! other; afterwards the failure is an event `problem`, the last.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header::CACHE_CONTROL, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame};
use prost_reflect::{DynamicMessage, MessageDescriptor, ReflectMessage as _, Value, prost::Message as _};
use tokio::time::{Sleep, sleep};
use tokio_stream::Stream as _;
use tonic::Streaming;

use super::{
    call::HttpCall,
    encode::{self, JsonForm},
    payload::PayloadView,
    problem::HttpProblem,
};
use crate::held::HeldBytes;

/// Interval of comments while nothing happens, for proxies that close silent connections, and to find readers that are
/// gone.
const COMMENT: Duration = Duration::from_secs(15);
/// Time, in milliseconds, that a client is to wait before it comes back.
const RETRY: &str = "retry: 2000\n\n";
/// Bytes that a stream holds: its task, and a response as JSON.
const STREAM: usize = 128 << 10;
/// The field of a request that has the place to go on from, and that of an answer that has it.
const RESUME: &str = "resume_token";

/// Opens the stream of a call.
pub(super) async fn open(
    call: HttpCall<'_>,
    mut message: DynamicMessage,
    headers: &HeaderMap,
    view: PayloadView,
    form: JsonForm,
    mut held: HeldBytes,
) -> Result<Response, HttpProblem> {
    held.more(STREAM)?;
    let last = match headers.get("last-event-id") {
        None => None,
        Some(id) => {
            let text = id.to_str().map_err(|_| HttpProblem::invalid("Last-Event-ID", "is not ASCII"))?;
            (!text.is_empty()).then(|| text.to_owned())
        }
    };
    let resumes = message.descriptor().get_field_by_name(RESUME).is_some();
    // A stream that sends its state first leaves no gap.
    let restates = message.descriptor().get_field_by_name("changes_only").is_some()
        && message.get_field_by_name("changes_only").is_some_and(|only| only.as_bool() == Some(false))
        || call.method.name() == "WatchCommand";
    let mut missed = last.is_some() && !resumes && !restates;
    if let Some(last) = last.filter(|_| resumes) {
        message.set_field_by_name(RESUME, Value::String(last));
    }
    let opened = call.stream(message.encode_to_vec().into()).await;
    let stream = match opened {
        // Nobody remembers the place: a client that comes back by itself would be refused for ever.
        Err(problem) if matches!(problem.reason(), "OLD_TOKEN") && headers.contains_key("last-event-id") => {
            missed = true;
            message.clear_field_by_name(RESUME);
            call.stream(message.encode_to_vec().into()).await?
        }
        other => other?,
    };
    let mut begin = RETRY.to_owned();
    if missed {
        begin.push_str(
            "event: gap\ndata: {\"count\":\"0\",\"reason\":\"GAP_REASON_UNSPECIFIED\",\"resumed\":false}\n\n",
        );
    }
    let events = EventStreamText {
        of: call.method.output(),
        stream,
        view,
        form,
        begin: Some(begin.into()),
        number: 0,
        silence: Box::pin(sleep(COMMENT)),
        ended: false,
        held,
    };
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-store"),
        // nginx gathers answers otherwise.
        (axum::http::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((StatusCode::OK, headers, Body::new(events)).into_response())
}

/// A stream as the text of its events. One response is in the making at a time, so a slow reader leaves the rest to the
/// stream's buffer in the broker and its policy there.
struct EventStreamText {
    of: MessageDescriptor,
    stream: Streaming<Bytes>,
    view: PayloadView,
    form: JsonForm,
    begin: Option<Bytes>,
    number: u64,
    silence: Pin<Box<Sleep>>,
    ended: bool,
    /// Holdings of at least [`STREAM`], and of the response in the making.
    held: HeldBytes,
}

impl HttpBody for EventStreamText {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if let Some(begin) = this.begin.take() {
            return Poll::Ready(Some(Ok(Frame::data(begin))));
        }
        if this.ended {
            return Poll::Ready(None);
        }
        // The text made before has been read.
        this.held.at_most(STREAM);
        loop {
            let text = match Pin::new(&mut this.stream).poll_next(cx) {
                Poll::Ready(Some(Ok(message))) => match this.text(message) {
                    Ok(text) => text,
                    Err(problem) => this.end(&problem),
                },
                Poll::Ready(Some(Err(status))) => this.end(&HttpProblem::from(status)),
                Poll::Ready(None) => {
                    this.ended = true;
                    return Poll::Ready(None);
                }
                Poll::Pending => {
                    if this.silence.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    ":\n\n".into()
                }
            };
            let next = tokio::time::Instant::now() + COMMENT;
            this.silence.as_mut().reset(next);
            if !text.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
        }
    }
}

impl EventStreamText {
    /// The last event.
    fn end(&mut self, problem: &HttpProblem) -> Vec<u8> {
        self.ended = true;
        let mut text = Vec::new();
        event(&mut text, "problem", None, &problem.to_json());
        text
    }

    /// The events of a response.
    fn text(&mut self, message: Bytes) -> Result<Vec<u8>, HttpProblem> {
        self.held.at_least(message.len().saturating_mul(encode::TIMES))?;
        let response =
            DynamicMessage::decode(self.of.clone(), message).map_err(|_| HttpProblem::internal())?;
        let token = response.get_field_by_name(RESUME);
        let token = token.as_ref().and_then(|token| token.as_str()).filter(|token| !token.is_empty());
        let mut text = Vec::new();
        let items = response.get_field_by_name("items");
        let items = items.as_ref().and_then(|items| items.as_list());
        let Some(items) = items else {
            // A response that is one item: its only message, or all of it.
            for (field, value) in response.fields() {
                if let Value::Message(message) = value {
                    self.number += 1;
                    let json = encode::to_vec(message, None, self.form, self.view)?;
                    event(&mut text, field.json_name(), Some(&self.number.to_string()), &json);
                }
            }
            return Ok(text);
        };
        let last = items.len();
        for (index, item) in items.iter().enumerate() {
            let Some((field, Value::Message(inner))) =
                item.as_message().and_then(|item| item.fields().next())
            else {
                continue;
            };
            self.number += 1;
            let number = self.number.to_string();
            // The place is after the whole response.
            let id = match token {
                Some(token) => (index + 1 == last).then_some(token),
                None => Some(&*number),
            };
            if field.name() == "heartbeat" {
                text.extend_from_slice(b":\n\n");
                continue;
            }
            let json = encode::to_vec(inner, None, self.form, self.view)?;
            event(&mut text, field.json_name(), id, &json);
        }
        if let (0, Some(token)) = (last, token) {
            // An id without data is remembered by the client and is no event.
            text.extend_from_slice(format!("id: {token}\n\n").as_bytes());
        }
        Ok(text)
    }
}

/// Writes one event. Line breaks in `data` are between parts of JSON, as in a payload that is shown as its sender wrote it.
fn event(text: &mut Vec<u8>, name: &str, id: Option<&str>, data: &[u8]) {
    text.extend_from_slice(b"event: ");
    text.extend_from_slice(name.as_bytes());
    if let Some(id) = id {
        text.extend_from_slice(b"\nid: ");
        text.extend_from_slice(id.as_bytes());
    }
    text.extend_from_slice(b"\ndata: ");
    text.extend(data.iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte }));
    text.extend_from_slice(b"\n\n");
}
