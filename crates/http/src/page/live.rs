//! Server-sent events: HTML that the script puts into the page.

use std::{convert::Infallible, fmt::Write as _, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::header::{CONTENT_TYPE, HeaderName},
    response::{IntoResponse, Response},
};
use maud::Markup;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{
    state::{PageState, out_of_memory},
    visit::Visitor,
};
use crate::counters::count;
use crate::held::HeldBytes;

/// A comment so often, by which a browser that is gone is found out.
pub(super) const PULSE: Duration = Duration::from_secs(15);
/// Events that may wait to be sent: a browser that reads slowly holds up the task that makes them, and nobody else.
const WAITING: usize = 4;

/// Bytes that are set aside for these.
const LIVE: usize = 256 << 10;

/// A live part that is open.
struct OpenPart {
    _held: HeldBytes,
}

impl OpenPart {
    fn new(held: HeldBytes) -> Self {
        count(|c| c.page_live_opened.add(1));
        Self { _held: held }
    }
}

impl Drop for OpenPart {
    fn drop(&mut self) {
        count(|c| c.page_live_ended.add(1));
    }
}

/// Sender of events to the browser.
pub(super) struct BrowserEvents(mpsc::Sender<Result<Bytes, Infallible>>);

/// The browser is gone.
pub(super) struct BrowserGone;

impl BrowserEvents {
    /// Replaces what the element holds.
    pub(super) async fn set(&self, element: &str, html: &Markup) -> Result<(), BrowserGone> {
        self.send("set", &format!("{element}\n{}", html.0)).await
    }

    /// Puts something before what the element holds.
    pub(super) async fn add(&self, element: &str, html: &Markup) -> Result<(), BrowserGone> {
        self.send("add", &format!("{element}\n{}", html.0)).await
    }

    /// Says why there is no more.
    pub(super) async fn end(&self, why: &str) -> Result<(), BrowserGone> {
        self.send("end", why).await
    }

    /// Sends an empty comment, which shows whether the browser is still there.
    pub(super) async fn pulse(&self) -> Result<(), BrowserGone> {
        self.0.send(Ok(Bytes::from_static(b":\n\n"))).await.map_err(|_| BrowserGone)
    }

    async fn send(&self, kind: &str, data: &str) -> Result<(), BrowserGone> {
        self.0.send(Ok(event(kind, data))).await.map_err(|_| BrowserGone)
    }
}

fn event(kind: &str, data: &str) -> Bytes {
    let mut text = format!("event: {kind}\n");
    for line in data.split(['\n', '\r']) {
        let _ = writeln!(text, "data: {line}");
    }
    text.push('\n');
    text.into()
}

/// An answer of the events that `make` sends to a visitor, until it returns, the browser is gone, the visitor's login ends, or
/// the gateway shuts down.
///
/// Waiting events are on the memory account until then.
pub(super) fn stream<F>(
    page_state: &Arc<PageState>,
    visitor: Visitor,
    make: impl FnOnce(Visitor, BrowserEvents) -> F,
) -> Response
where
    F: Future<Output = Result<(), BrowserGone>> + Send + 'static,
{
    let mut held = HeldBytes::new(&page_state.account);
    if held.more(LIVE).is_err() {
        return out_of_memory();
    }
    let open = OpenPart::new(held);
    let mut drain = page_state.drain.clone();
    let (sender, receiver) = mpsc::channel(WAITING);
    let gone = sender.clone();
    let (page_state, csrf) = (Arc::clone(page_state), Arc::clone(&visitor.csrf));
    let making = make(visitor, BrowserEvents(sender.clone()));
    tokio::spawn(async move {
        let _open = open;
        tokio::select! {
            _ = making => {}
            () = gone.closed() => {}
            () = page_state.logins.ended(&csrf) => {
                let _ = sender.try_send(Ok(event("end", "your login has ended")));
            }
            () = async { drop(drain.wait_for(|drains| *drains).await) } => {
                let _ = sender.try_send(Ok(event("end", "the gateway shuts down")));
            }
        }
    });
    let headers =
        // nginx would gather events otherwise.
        [(CONTENT_TYPE, "text/event-stream"), (HeaderName::from_static("x-accel-buffering"), "no")];
    (headers, Body::from_stream(ReceiverStream::new(receiver))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn html_with_line_breaks_stays_one_event() {
        assert_eq!(
            event("set", "x\n<b>\r\n\n</b>"),
            "event: set\ndata: x\ndata: <b>\ndata: \ndata: \ndata: </b>\n\n"
        );
    }
}
